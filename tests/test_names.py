"""Names files: they rename and fuse, and can do nothing else; every slip names file and row."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert import config as configs
from convert.errors import TableError, UsageError
from convert.layout import Dims, expand
from convert.names import load_names, ready_made
from convert.skeleton import skeleton
from convert.table import families, load_table

WHOLE = """
extends = "llama"
prefix = "h.{l}."
convention = { rope = "interleaved" }
[top]
token_embd = "emb.weight"
output_norm = "n.weight"
output = "out.weight"
[block]
attn.norm = "n1.weight"
attn.o = "o.weight"
mlp.norm = "n2.weight"
mlp.gate = "gate.weight"
mlp.up = "up.weight"
mlp.down = "down.weight"
[[fused]]
name = "qkv.weight"
parts = ["attn.q", "attn.k", "attn.v"]
"""


def load(tmp_path: Path, text: str):
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return load_names(path)


def keys(table, size: str = "llama3.2-1b") -> dict[str, list[int]]:
    slots = expand(table, Dims(table, configs.published(table, size)), "scratch")
    return {n: list(s.shape) for n, s in slots.items()}


def test_a_whole_file(tmp_path):
    table = load(tmp_path, WHOLE)
    found = keys(table)
    assert found["h.15.qkv.weight"] == [2048 + 512 + 512, 2048]
    assert found["emb.weight"] == [128256, 2048]
    assert len(found) == 3 + 16 * 7
    assert table.convention_of("scratch", "rope") == "interleaved"
    assert load_table("llama").convention_of("scratch", "rope") == "half"  # ours is untouched
    assert keys(load_table("llama"))["trf_blocks.0.att.W_query.weight"] == [2048, 2048]
    for layout in ("hf", "meta", "gguf"):
        rows = [(r.id, r.names.get(layout)) for r in load_table("llama").rows.values()]
        assert [(r.id, r.names.get(layout)) for r in table.rows.values()] == rows


# Counted and read off the projects' own model files: nanoGPT's c_attn, LitGPT's qkv, llama2.c's names.
EXPECTED = {
    "llama2c": ("layers.0.attention.wq.weight", [2048, 2048], "interleaved", 3 + 16 * 9),
    "nanogpt": ("transformer.h.15.attn.c_attn.weight", [3072, 2048], "half", 3 + 16 * 7),
    "litgpt": ("transformer.h.7.attn.qkv.weight", [3072, 2048], "half", 3 + 16 * 7),
}


@pytest.mark.parametrize("name", ready_made())
def test_ready_made(name):
    table = load_names(name)
    key, shape, order, count = EXPECTED[name]
    assert keys(table)[key] == shape
    assert len(keys(table)) == count
    assert table.convention_of("scratch", "rope") == order
    assert table.title != load_table(table.family).title
    # every parameter is there, once
    plain = sum(a * (b[0] if b else 1) for a, *b in keys(load_table(table.family)).values())
    assert sum(a * (b[0] if b else 1) for a, *b in keys(table).values()) == plain


MISTAKES = {
    "unknown key": ("dims = 3\n" + WHOLE, "'dims'"),
    "a shape": (WHOLE.replace('gate = "gate.weight"', 'gate = { shape = ["D"] }'), "gate"),
    "no family": (WHOLE.replace('extends = "llama"', ""), "'extends'"),
    "a row that is none": (WHOLE.replace("mlp.up", "mlp.sideways"), r"block\.mlp\.sideways"),
    "a block as a row": (WHOLE.replace('mlp.up = "up.weight"', 'mlp = "up.weight"'), "not valid TOML|mlp"),
    "no name for a row": (WHOLE.replace('mlp.up = "up.weight"\n', ""), r"block\.mlp\.up has no name"),
    "an empty name": (WHOLE.replace('"up.weight"', '""'), r"block\.mlp\.up"),
    "a number": (WHOLE.replace('"up.weight"', "7"), r"block\.mlp\.up"),
    "two of one name": (WHOLE.replace('"up.weight"', '"gate.weight"'), r"gate\.weight.*block\.mlp"),
    "a fused part that is none": (WHOLE.replace('"attn.v"]', '"attn.z"]'), r"block\.attn\.z"),
    "fused without a name": (WHOLE.replace('name = "qkv.weight"', ""), "fused.*name"),
    "convention": (WHOLE.replace("interleaved", "sideways"), "sideways"),
    "convention of two": (WHOLE.replace('{ rope = "interleaved" }', '{ hf = { rope = "half" } }'), "convention"),
    "prefix": (WHOLE.replace('"h.{l}."', "3"), "prefix"),
    "TOML": ("[", "not valid TOML"),
    "extends a number": (WHOLE.replace('"llama"', "3"), "extends"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(tmp_path, name):
    text, pattern = MISTAKES[name]
    with pytest.raises(TableError, match=rf"(?s)mine\.toml.*({pattern})"):
        load(tmp_path, text)


def test_no_such_file_lists_the_ready_made():
    with pytest.raises(UsageError, match="litgpt"):
        load_names("nothing")


def test_no_such_family(tmp_path):
    with pytest.raises(TableError, match=r"extends: .*'nothing'"):
        load(tmp_path, WHOLE.replace('"llama"', '"nothing"'))


@pytest.mark.parametrize("family", families())
def test_the_skeleton_loads_and_is_the_books_own(tmp_path, family):
    base = load_table(family)
    if "scratch" not in base.layouts:
        pytest.skip("no from-scratch layout")
    table = load(tmp_path, skeleton(base))
    size = next(iter(base.sizes))
    assert keys(table, size) == keys(base, size)
    named = load(tmp_path, skeleton(base).replace(base.prefix["scratch"], "mine.{l}."))
    assert keys(named, size) != keys(base, size)
