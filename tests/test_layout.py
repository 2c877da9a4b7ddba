"""Expanded tables against key sets that other programs made, and against golden files that show every change in a diff.

``python -m tests.test_layout`` rewrites the golden files.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert import config as configs
from convert.errors import ConvertError, TableError
from convert.layout import Dims, expand, row_shape
from convert.report import fold_names
from convert.table import load_table, read_table

HERE = Path(__file__).parent
LAYOUTS = load_table("llama").layouts
KEYS = json.loads((HERE / "data" / "llama_keys.json").read_text(encoding="utf-8"))
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "mlp_bias": True,
}


def shapes(layout: str, config: dict) -> dict[str, list[int]]:
    table = load_table("llama")
    return {n: list(s.shape) for n, s in expand(table, Dims(table, config), layout).items()}


def render(layout: str) -> str:
    """A small config line by line, then each published size with its layers folded."""
    lines = [f"# llama, {layout} layout: a small config with biases and an explicit head_dim"]
    lines += [f"{name} {shape}" for name, shape in shapes(layout, SMALL).items()]
    table = load_table("llama")
    for size in table.sizes:
        found = shapes(layout, configs.published(table, size))
        lines += ["", f"# {size}: {len(found)} tensors"]
        groups: dict[tuple[str, str], list[str]] = {}
        for name, shape in found.items():
            tail = ".".join("*" if p.isdecimal() else p for p in name.split("."))
            groups.setdefault((tail, str(shape)), []).append(name)
        lines += [f"{fold_names(names)[0]} {shape}" for (_, shape), names in groups.items()]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden(layout):
    golden = (HERE / "golden" / f"llama.{layout}.txt").read_text(encoding="utf-8")
    assert render(layout) == golden, "if this is meant, run python -m tests.test_layout and read the diff"


@pytest.mark.parametrize("name", sorted(KEYS))
def test_the_very_keys_and_shapes_that_the_classes_have(name):
    """Keys of transformers' and of the book's classes, dumped by running them."""
    layout, case = name.split("/"), KEYS[name]
    table = load_table("llama")
    hub = configs.to_hub(table, layout[0], case["config"])
    buffers = {k for k in case["keys"] if any(r.matches(k) for r in table.ignore if r.layout == layout[0])}
    want = {k: v for k, v in case["keys"].items() if k not in buffers}
    assert shapes(layout[0], hub) == want
    # and a config that is off by one does not have them
    assert shapes(layout[0], hub | {"num_hidden_layers": 1}) != want
    assert shapes(layout[0], hub | {"intermediate_size": hub["intermediate_size"] + 1}) != want


@pytest.mark.parametrize(
    ("size", "distinct", "stored"),
    [
        # what the models are published with (transformers counts the same)
        ("llama3.2-1b", 1_235_814_400, 1_498_482_688),
        ("llama3.2-3b", 3_212_749_824, 3_606_752_256),
        ("llama3-8b", 8_030_261_248, 8_030_261_248),
        ("llama3.1-8b", 8_030_261_248, 8_030_261_248),
        ("llama3-70b", 70_553_706_496, 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800, 405_853_388_800),
        ("llama2-7b", 6_738_415_616, 6_738_415_616),
        ("llama2-13b", 13_015_864_320, 13_015_864_320),
        ("llama2-70b", 68_976_648_192, 68_976_648_192),
        ("smollm2-135m", 134_515_008, 162_826_560),
        ("tinyllama-1.1b", 1_100_048_384, 1_100_048_384),
    ],
)
def test_published_sizes_have_the_published_number_of_parameters(size, distinct, stored):
    table = load_table("llama")
    hub = configs.published(table, size)
    for layout in LAYOUTS:
        slots = expand(table, Dims(table, hub), layout)
        count = sum(_size(s.shape) for s in slots.values())
        tied = sum(_size(s.shape) for s in slots.values() if table.rows[s.keys[0][0]].tied_to)
        assert count == stored
        assert count - (tied if hub.get("tie_word_embeddings") else 0) == distinct


def _size(shape: tuple[int, ...]) -> int:
    out = 1
    for n in shape:
        out *= n
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_meet_at_their_logical_tensors(layout):
    table = load_table("llama")
    config = SMALL | {"attention_bias": False, "mlp_bias": False}
    dims = Dims(table, config)
    hub = {k for s in expand(table, dims, "hf").values() for k in s.keys}
    here = expand(table, dims, layout)
    assert {k for s in here.values() for k in s.keys} == hub
    for slot in here.values():
        assert slot.shapes == tuple(row_shape(table, dims, k) for k in slot.keys)


def test_a_config_without_a_needed_key_names_it():
    with pytest.raises(ConvertError, match="hidden_size") as error:
        shapes("hf", {k: v for k, v in SMALL.items() if k != "hidden_size"})
    assert "--config" in str(error.value)


def test_per_layer_conditions_and_fused_rows(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'family = "mine"\nextends = "llama"\n[dims]\nkinds = "kinds"\n[config.kinds]\n'
        "[block.extra]\nwhen = \"kinds[l] == 'full'\"\n"
        '[block.extra.a]\nshape = ["D", "2 * l + 1"]\nhf = "extra.a"\n'
        '[[fused]]\nlayout = "hf"\nname = "gate_up"\nparts = ["block.mlp.gate", "block.mlp.up"]\n',
        encoding="utf-8",
    )
    table = read_table(path)
    slots = expand(table, Dims(table, SMALL | {"kinds": ("sliding", "full")}), "hf")
    assert "model.layers.0.extra.a" not in slots
    assert slots["model.layers.1.extra.a"].shape == (48, 3)
    fused = slots["model.layers.1.gate_up"]
    assert fused.shape == (160, 48)
    assert fused.keys == (("block.mlp.gate", 1), ("block.mlp.up", 1))
    assert "model.layers.1.mlp.gate_proj.weight" not in slots


def test_two_rows_that_turn_out_to_have_one_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'family = "mine"\nextends = "llama"\n'
        '[block.x]\nwhen = "H > 1"\nshape = ["D"]\nhf = "x"\n[block.y]\nwhen = "K > 1"\nshape = ["D"]\nhf = "x"\n',
        encoding="utf-8",
    )
    table = read_table(path)
    with pytest.raises(TableError, match=r"mine\.toml.*block\.x.*block\.y"):
        expand(table, Dims(table, SMALL), "hf")
    assert "model.layers.0.x" in expand(table, Dims(table, SMALL | {"num_key_value_heads": 1}), "hf")


if __name__ == "__main__":
    for name in LAYOUTS:
        (HERE / "golden" / f"llama.{name}.txt").write_text(render(name), encoding="utf-8")
