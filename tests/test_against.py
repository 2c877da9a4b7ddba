"""A checkpoint against its good copy: where they part, and the planted fault named, across layouts and types."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import convert
from convert.against import Against, compare_against
from tests.fixtures.hf import make_hf
from tests.fixtures.planted import FAULTS, plant
from tests.fixtures.shapes import Shape

#: As in test_repair: heads of 16 rows, 8 and 2, o_proj square, rows of whole blocks. K quants need rows of 256.
SHAPE = Shape(128, 8, 2, 16, 96, 160, layers=3)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
#: What cannot be undone is named with what was seen.
LOST = {"head-lost": "head-replaced", "tensor-copied": "duplicate"}


@pytest.fixture(scope="module")
def goods(tmp_path_factory) -> dict[bool, Path]:
    """A good copy without scaling, and one with."""
    folder = tmp_path_factory.mktemp("goods")
    return {
        scaled: make_hf(folder / str(scaled), SHAPE, scaling=SCALING if scaled else None, config_style="v4").path
        for scaled in (False, True)
    }


def good_for(goods: dict[bool, Path], fault: str) -> Path:
    return goods[fault == "scaling-dropped"]


@pytest.mark.parametrize("fault", FAULTS)
def test_every_planted_fault_is_named(fault, goods, tmp_path):
    good = good_for(goods, fault)
    assert plant(good, tmp_path / "broken", fault)
    found = compare_against(tmp_path / "broken", good, run=False)
    assert found.differs and found.explained and not found.found.left
    if fault in LOST:
        assert [name for name, _ in found.found.lost] == [LOST[fault]] and not found.undone
        return
    fix = FAULTS[fault].fix
    assert fix is not None
    wanted = fix(json.loads((good / "config.json").read_text()))
    assert found.found.fixes == [wanted], found.found.fixes
    assert found.undone[0].agrees and found.undone[0].case.name in FAULTS[fault].causes
    # what comes next leaves something: the cause is not one of many
    others = [a for a in found.found.ranked if a.case.fix != wanted and a.case.fix not in found.found.equal[0]]
    assert all(not a.agrees for a in others), [a.case.fix for a in others if a.agrees]
    assert json.dumps(found.as_json()) and json.dumps(found.detail())


@pytest.mark.parametrize("fault", ["qk-left-permuted", "k-only", "theta-x5", "scaling-added"])
def test_a_rotary_fault_leaves_position_0_equal(fault, goods, tmp_path):
    plant(goods[False], tmp_path / "broken", fault)
    found = compare_against(tmp_path / "broken", goods[False])
    assert found.rotary and found.first_diff_position and found.first_diff_position >= 1
    assert found.run is not None and found.run.distance.by_position[0] <= found.run.tolerance
    assert found.departs is not None and found.departs[0] == "layer 0"
    assert any("rotary" in line for line in found.where())


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("gate-up-swapped", "layer 0"),
        ("transposed", "layer 1"),
        ("layers-exchanged", "layer 1"),
        ("tensor-copied", "layer 2"),
        ("embedding-scaled", "embed"),
        ("head-lost", "head"),
    ],
)
def test_where_hidden_states_depart(fault, step, goods, tmp_path):
    plant(goods[False], tmp_path / "broken", fault)
    found = compare_against(tmp_path / "broken", goods[False])
    assert found.departs is not None and found.departs[0] == step
    assert found.first_diff_position == 0 and not found.rotary
    names = {delta.name for delta in found.differing}
    assert names and all(delta.cosine is not None and delta.error for delta in found.differing)
    if fault == "transposed":
        assert names == {"model.layers.1.self_attn.o_proj.weight"}


FORMS = [
    ("hf", {"dtype": "bfloat16"}),
    ("hf", {"dtype": "float16"}),
    ("meta", {}),
    ("scratch", {"allow_reference": True}),
    ("gguf", {"type": "f16"}),
    ("gguf", {"type": "q8_0"}),
    ("gguf", {"type": "q4_0"}),
]


def form(source: Path, out: Path, to: str, options: dict[str, object]) -> Path:
    made = out.with_suffix(".gguf") if to == "gguf" else out
    convert.convert_checkpoint(source, made, to=to, tokenizer=False, **options)
    return made


@pytest.mark.parametrize(("to", "options"), FORMS, ids=[f"{to}-{'-'.join(map(str, o.values()))}" for to, o in FORMS])
def test_no_false_alarm_on_other_forms_and_the_fault_is_found_in_them(to, options, goods, tmp_path):
    good = goods[False]
    made = form(good, tmp_path / "same", to, options)
    found = compare_against(made, good)
    assert not found.differs and not found.explained and found.run is not None and found.run.verdict != "fail"
    assert found.as_json()["first_diff_position"] is None and not found.where()
    plant(good, tmp_path / "broken", "gate-up-swapped")
    broken = form(tmp_path / "broken", tmp_path / "made", to, options)
    found = compare_against(broken, good, run=False)
    assert found.found.fixes == ["swap-gate-up"] and found.explained
    # as good copy, too: the rounded side is the good one
    found = compare_against(tmp_path / "broken", made, run=False)
    assert found.found.fixes == ["swap-gate-up"] and found.explained


def test_faults_on_top_of_each_other(goods, tmp_path):
    good = goods[False]
    plant(good, tmp_path / "one", "qk-left-permuted")
    plant(tmp_path / "one", tmp_path / "two", "norms-swapped")
    plant(tmp_path / "two", tmp_path / "three", "theta-1e4")
    found = compare_against(tmp_path / "three", good, run=False)
    assert set(found.found.fixes) == {"unpermute-qk", "swap-norms", "set-theta=500000"} and found.explained
    convert.repair(tmp_path / "three", tmp_path / "out", fixes=found.found.fixes)
    assert not compare_against(tmp_path / "out", good, run=False).differs


def test_what_no_fault_explains_is_left_and_said(goods, tmp_path):
    other = make_hf(tmp_path / "other", SHAPE, seed=7).path
    found = compare_against(other, goods[False], run=False)
    assert found.differs and not found.explained and not found.undone
    assert len(found.found.left) == len([d for d in found.tensors if not d.same]) == len(found.differing)
    assert "differ from the good copy" in found.message()


def test_a_difference_that_a_rounding_explains_is_none_but_a_larger_one_is(goods, tmp_path):
    """The control of the tolerance: one weight off by a few roundings of bfloat16 is seen."""
    import torch
    from safetensors.torch import load_file, save_file

    good = goods[False]
    rounded = form(good, tmp_path / "rounded", "hf", {"dtype": "bfloat16"})
    state = load_file(rounded / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    state[name][3, 5] *= 1 + 2.0**-5
    save_file({k: v.contiguous() for k, v in state.items()}, rounded / "model.safetensors", metadata={"format": "pt"})
    (rounded / "conversion.json").unlink()
    found = compare_against(rounded, good, run=False)
    assert [delta.name for delta in found.differing] == [name]
    assert isinstance(found, Against) and torch.isfinite(state[name]).all()


def test_a_tied_model(tmp_path):
    good = make_hf(tmp_path / "good", replace(SHAPE, tied=True)).path
    plant(good, tmp_path / "broken", "embedding-scaled")
    found = compare_against(tmp_path / "broken", good, run=False)
    assert found.found.fixes == ["unscale-embedding"] and found.explained


def test_diagnose_against_names_the_cause_and_the_command(goods, tmp_path, capsys):
    from convert.cli import cli
    from convert.cli import run as main

    good = goods[False]
    plant(good, tmp_path / "broken", "k-other-heads")
    source = str(tmp_path / "broken")
    assert main(cli, ["diagnose", source, "--against", str(good), "--probe-only", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "broken" and said["causes"][0]["fault"] == "k-wrong-heads"
    assert said["causes"][0]["fix"].endswith("--fix k-heads=8") and said["causes"][0]["confidence"] > 0.99
    assert said["against"]["explained"] and said["against"]["hypotheses"][0]["agrees"]
    assert len(said["against"]["differing"]) == 3 and said["against"]["n_tokens"] == 0
    (tmp_path / "ids.json").write_text(json.dumps([(7 * i) % 160 for i in range(64)]))
    ids = ["--tokens", str(tmp_path / "ids.json")]
    assert main(cli, ["diagnose", source, "--against", str(good), "--json", *ids]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["against"]["rotary"] and said["against"]["departs"]["step"] == "layer 0"
    assert said["against"]["n_tokens"] == 64 and not said["hypotheses"]
    assert main(cli, ["diagnose", str(good), "--against", str(good), "--json", *ids]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"] == "good" and not said["causes"] and not said["against"]["differs"]


def test_k_quants_are_no_fault_and_one_behind_them_is_found(tmp_path):
    from convert.quants import writable_types

    if "Q4_K" not in writable_types():
        pytest.skip("K types cannot be written here")
    good = make_hf(tmp_path / "good", "kquant").path
    made = form(good, tmp_path / "same", "gguf", {"type": "q4_k_m"})
    assert not compare_against(made, good, run=False).differs
    plant(good, tmp_path / "broken", "qk-left-permuted")
    broken = form(tmp_path / "broken", tmp_path / "made", "gguf", {"type": "q4_k_m"})
    found = compare_against(broken, good, run=False)
    # interleaved once more on the way into the GGUF file; its rows are the same blocks in another order
    assert found.explained and found.found.fixes == ["permute-qk"]
