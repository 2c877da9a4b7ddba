"""Repair: a planted fault is undone to the bit, in every layout, and nothing else is touched."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError, UsageError
from convert.repair import applicable_fixes, known_fixes, plan_repair, repair
from convert.run import Cancelled
from tests.fixtures.hf import make_hf
from tests.fixtures.planted import FAULTS, plant, to_half, to_interleaved
from tests.fixtures.shapes import SHAPES, Shape
from tests.trust.kinds import hashes

#: 8 heads and 2; three layers, so that neighbours can be exchanged; o_proj is square; rows are whole blocks of 32.
#: Heads of 16 rows: with 8, permuting twice is permuting back, and K as 8 heads is left alone.
SHAPE = Shape(128, 8, 2, 16, 96, 160, layers=3)
#: A tied one, so that what happens to the embedding happens to the head.
TIED = replace(SHAPE, tied=True)
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def good_for(fault: str, folder: Path, *, shape: Shape = SHAPE, dtype: str = "float32") -> Path:
    scaling = SCALING if fault == "scaling-dropped" else None
    return make_hf(folder, shape, dtype=dtype, scaling=scaling, config_style="v4").path


def state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(a: Path, b: Path) -> bool:
    first, second = state(a), state(b)
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


def rope(folder: Path) -> tuple[float, object]:
    config = json.loads((folder / "config.json").read_text())
    return config["rope_theta"], config.get("rope_scaling")


def fix_of(fault: str, good: Path) -> str:
    fix = FAULTS[fault].fix
    assert fix is not None
    return fix(json.loads((good / "config.json").read_text()))


UNDONE = [name for name, fault in FAULTS.items() if fault.fix is not None]


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((f, "float32") for f in UNDONE), *((f, "bfloat16") for f in UNDONE if not FAULTS[f].exact)],
)
def test_planted_and_repaired_is_the_good_copy(fault, dtype, tmp_path):
    good = good_for(fault, tmp_path / "good", dtype=dtype)
    assert plant(good, tmp_path / "broken", fault)
    assert not same(good, tmp_path / "broken") or rope(good) != rope(tmp_path / "broken")
    done = repair(tmp_path / "broken", tmp_path / "out", fixes=[fix_of(fault, good)])
    # transformers reads what we wrote with the settings of the good copy
    from transformers import AutoConfig

    read = [AutoConfig.from_pretrained(folder).rope_parameters for folder in (good, tmp_path / "out")]
    assert read[0] == read[1]
    if FAULTS[fault].exact:
        assert same(good, tmp_path / "out")
    else:  # one added and taken away again, times √D and back: within two roundings of the stored type
        first, last, broken = state(good), state(tmp_path / "out"), state(tmp_path / "broken")
        for name in first:
            assert first[name].dtype == last[name].dtype
            ulp = {"float32": 2.0**-23, "bfloat16": 2.0**-8}[dtype]
            largest = torch.maximum(first[name].float().abs(), broken[name].float().abs())
            assert ((first[name].float() - last[name].float()).abs() <= 2 * ulp * largest).all(), name
        assert not all(torch.equal(first[n].float(), broken[n].float()) for n in first)
    touched = sum(not torch.equal(a, b) for a, b in zip(*(d.values() for d in by_name(tmp_path)), strict=True))
    assert len(done.plan.changed) >= touched and done.untouched == len(state(good)) - len(done.plan.changed)


def by_name(tmp_path: Path) -> list[dict[str, torch.Tensor]]:
    return [dict(sorted(state(tmp_path / name).items())) for name in ("broken", "out")]


@pytest.mark.parametrize("fault", [f for f in UNDONE if FAULTS[f].exact and not f.startswith(("theta", "scaling"))])
def test_the_wrong_fix_is_not_the_good_copy(fault, tmp_path):
    good = good_for(fault, tmp_path / "good")
    plant(good, tmp_path / "broken", fault)
    right = fix_of(fault, good)
    with convert.open_checkpoint(good) as wanted, convert.open_checkpoint(tmp_path / "broken") as opened:
        values = {key: source.read(0, source.shape[0]) for key, source in wanted.match.logical.items()}
        for fix in {fix_of(f, good) for f in UNDONE if not f.startswith(("scaling", "theta"))}:
            fixed = plan_repair(opened, [fix]).view.opened.match.logical
            equal = all(np.array_equal(values[key], fixed[key].read(0, len(values[key]))) for key in values)
            assert equal == (fix == right), fix


@pytest.mark.parametrize("fault", ["qk-left-permuted", "k-other-heads", "norms-plus-one", "theta-x5"])
@pytest.mark.parametrize("layout", ["meta-2", "scratch", "scratch-pth", "gguf", "sharded"])
def test_every_layout_keeps_its_form(fault, layout, tmp_path):
    good = good_for(fault, tmp_path / "good")
    plant(good, tmp_path / "broken", fault)
    to, fix = layout.partition("-")[0], fix_of(fault, good)
    if to in ("meta", "gguf") and fault == "qk-left-permuted":
        fix = "permute-qk"  # converted from the broken folder, the rows are interleaved twice
    if (
        to in ("meta", "gguf") and fault == "k-other-heads"
    ):  # K interleaved as 8 heads: half order is only passed through
        parts = state(good)
        for name in (n for n in parts if "k_proj" in n):
            parts[name] = to_half(to_interleaved(parts[name], 8), 2)
        save_file(parts, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    options = {"meta-2": {"model_parallel": 2}, "scratch-pth": {"format": "pth"}, "sharded": {"max_shard_size": 90_000}}
    suffix = ".gguf" if to == "gguf" else ""
    for side in ("good", "broken"):
        convert.convert_checkpoint(
            tmp_path / side,
            tmp_path / f"{side}.there{suffix}",
            to="hf" if to == "sharded" else to,
            **options.get(layout, {}),
            **({"allow_reference": True} if to == "scratch" else {}),
            tokenizer=False,
        )
    there, out = tmp_path / f"broken.there{suffix}", tmp_path / f"out{suffix}"
    done = repair(there, out, fixes=[fix])
    with convert.open_checkpoint(tmp_path / f"good.there{suffix}") as wanted, convert.open_checkpoint(out) as found:
        assert (found.layout, found.format, len(found.files)) == (wanted.layout, wanted.format, len(wanted.files))
        assert found.config["rope_parameters"] == wanted.config["rope_parameters"]
        assert list(found.tensors) == list(wanted.tensors)
        for key, source in wanted.match.logical.items():
            other = found.match.logical[key]
            assert source.dtype == other.dtype
            a, b = (s.read(0, s.shape[0]) for s in (source, other))
            assert np.array_equal(a, b) if FAULTS[fault].exact else np.allclose(a, b, rtol=0, atol=1e-6)
    if fault == "theta-x5":
        assert not done.plan.changed and done.untouched == len(state(good))
    else:
        assert done.plan.changed and done.untouched


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_quantised_rows_move_as_whole_blocks(kind, tmp_path):
    gguf = pytest.importorskip("gguf")
    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "broken", "qk-left-permuted")
    for side in ("good", "broken"):
        convert.convert_checkpoint(tmp_path / side, tmp_path / f"{side}.gguf", to="gguf", type=kind, tokenizer=False)
    repair(tmp_path / "broken.gguf", tmp_path / "out.gguf", fixes=["permute-qk"])  # interleaved twice

    def tensors(path: Path) -> dict[str, tuple[int, bytes]]:
        return {t.name: (int(t.tensor_type), t.data.tobytes()) for t in gguf.GGUFReader(str(path)).tensors}

    wanted, broken, found = (tensors(tmp_path / f"{n}.gguf") for n in ("good", "broken", "out"))
    assert found == wanted  # not requantised: every block is there, in its place
    assert {n for n in wanted if wanted[n] != broken[n]} == {f"blk.{i}.attn_{x}.weight" for i in range(3) for x in "qk"}


def test_values_that_change_are_quantised_again_and_it_is_said(tmp_path):
    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "broken", "embedding-scaled")
    convert.convert_checkpoint(tmp_path / "broken", tmp_path / "broken.gguf", to="gguf", type="q8_0", tokenizer=False)
    done = repair(tmp_path / "broken.gguf", tmp_path / "out.gguf", fixes=["unscale-embedding"])
    with convert.open_checkpoint(tmp_path / "broken.gguf") as a, convert.open_checkpoint(tmp_path / "out.gguf") as b:
        assert {n: s[0].dtype for n, s in a.tensors.items()} == {n: s[0].dtype for n, s in b.tensors.items()}
        from convert.match import values

        got = values(b.match.logical["top.token_embd", None])
        wanted = state(good)["model.embed_tokens.weight"].numpy()
        assert np.abs(got.read(0, SHAPE.vocab) - wanted).max() < 0.01 * np.abs(wanted).max()
    assert any("quantised again" in note for note in done.summary.notes)


def test_several_fixes_one_after_the_other(tmp_path):
    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "one", "qk-left-permuted")
    plant(tmp_path / "one", tmp_path / "two", "gate-up-swapped")
    plant(tmp_path / "two", tmp_path / "three", "theta-1e4")
    fixes = ["set-theta=500000", "swap-gate-up", "unpermute-qk"]
    repair(tmp_path / "three", tmp_path / "out", fixes=fixes)
    assert same(good, tmp_path / "out") and rope(good) == rope(tmp_path / "out")
    repair(tmp_path / "three", tmp_path / "part", fixes=fixes[:2])
    assert not same(good, tmp_path / "part")


def test_a_tied_model_stays_tied_and_a_stored_copy_stays_stored(tmp_path):
    make_hf(tmp_path / "tied", TIED)
    repair(tmp_path / "tied", tmp_path / "out", fixes=["swap-norms"])
    assert "lm_head.weight" not in state(tmp_path / "out")
    make_hf(tmp_path / "copy", TIED, head="equal", tie_flag=False)
    repair(tmp_path / "copy", tmp_path / "out2", fixes=["swap-norms"])
    assert "lm_head.weight" in state(tmp_path / "out2")
    assert json.loads((tmp_path / "out2" / "config.json").read_text())["tie_word_embeddings"] is False


def test_the_record_says_what_was_repaired(tmp_path):
    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "broken", "k-only")
    done = repair(tmp_path / "broken", tmp_path / "out", fixes=["unpermute-k"])
    kept = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert kept["repair"]["fixes"][0]["fix"] == "unpermute-k" and kept["repair"]["tensors_changed"] == 3
    assert kept["repair"].items() <= done.as_json().items()
    assert any("unpermute-k" in note for note in kept["notes"])
    with convert.open_checkpoint(tmp_path / "out") as opened:  # and the record is taken for that of these files
        assert opened.record["repair"]["fixes"][0]["fault"] == "k-permuted"


@pytest.mark.parametrize("layout", ["hf", "gguf"])
def test_check_derives_a_corrected_copy_again(layout, tmp_path):
    from convert.check import check

    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "broken", "gate-up-swapped")
    plant(tmp_path / "broken", tmp_path / "worse", "embedding-scaled")
    source, out = tmp_path / "worse", tmp_path / "out"
    if layout == "gguf":
        source, out = tmp_path / "worse.gguf", tmp_path / "out.gguf"
        convert.convert_checkpoint(tmp_path / "worse", source, to="gguf", type="q8_0", tokenizer=False)
    repair(source, out, fixes=["swap-gate-up", "unscale-embedding"])
    assert check(out, source=source).ok
    told = tmp_path / ("out/conversion.json" if layout == "hf" else "out.gguf.conversion.json")
    record = json.loads(told.read_text())
    del record["repair"]  # the control: without it, this is not what the source gives
    told.write_text(json.dumps(record))
    assert not check(out, source=source).ok


def test_refusals_say_why_and_leave_nothing(tmp_path):
    make_hf(tmp_path / "mha", replace(SHAPES["mha"], layers=3))
    before = sorted(tmp_path.iterdir())
    for fixes, message in (
        ([], "nothing to repair"),
        (["unpermute"], "no fix 'unpermute'"),
        (["qk-permuted"], "name of a fault"),
        (["head-replaced"], "name of a fault"),
        (["set-theta"], "takes a value"),
        (["unpermute-qk=3"], "takes no value"),
        (["unpermute-qk", "unpermute-qk"], "given twice"),
        (["set-theta=zero"], "set-theta=zero"),
        (["set-scaling=ntk:8"], "neither linear"),
    ):
        with pytest.raises(UsageError, match=message):
            repair(tmp_path / "mha", tmp_path / "out", fixes=fixes)
    for fix in ("drop-scaling=all", "exchange-layers=2", "k-heads=6", "set-theta=500000"):
        with pytest.raises(ConvertError, match="does not apply") as refused:
            repair(tmp_path / "mha", tmp_path / "out", fixes=[fix])
        assert refused.value.problems[0].hint
    assert sorted(tmp_path.iterdir()) == before


def test_existing_output_is_kept_unless_told(tmp_path):
    good = good_for("", tmp_path / "good")
    shutil.copytree(good, tmp_path / "out")
    with pytest.raises(ConvertError, match="exists"):
        repair(good, tmp_path / "out", fixes=["swap-norms"])
    assert same(good, tmp_path / "out")


def test_what_fits_a_model(tmp_path):
    good = good_for("", tmp_path / "good")
    fitting = {case.fix for case in applicable_fixes(good)}
    assert {"unpermute-qk", "k-heads=8", "swap-norms", "transpose=block.attn.o@1", "exchange-layers=1"} <= fitting
    assert "drop-scaling=all" not in fitting and len(known_fixes()) >= 18
    plan = plan_repair(good, ["unpermute-qk"])
    assert len(plan.changed) == 6 and not plan.config
    plan.source.close()


def test_command(tmp_path, capsys):
    from convert.cli import cli
    from convert.cli import run as main

    good = good_for("", tmp_path / "good")
    plant(good, tmp_path / "broken", "qk-left-permuted")
    source, out = str(tmp_path / "broken"), str(tmp_path / "out")
    assert main(cli, ["repair", source, out, "--fix", "unpermute-qk", "--dry-run"]) == 0
    assert "unpermute-qk" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert main(cli, ["repair", source, out, "--fix", "unpermute-qk", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "convert.repair/1" and said["tensors_changed"] == 6 and said["untouched"] == 24
    assert same(good, tmp_path / "out")
    assert main(cli, ["repair", source, out, "--fix", "unpermute-qk"]) != 0
    assert "exist" in capsys.readouterr().err
    assert main(cli, ["repair", source, out, "--fix", "unpermute-qk", "--overwrite"]) == 0
    told = capsys.readouterr().out
    assert "24 tensors that the repair does not touch" in told and "6 were changed" in told
    assert main(cli, ["repair", source, out, "--fix", "nonsense"]) == 2
    assert main(cli, ["repair", source]) == 2
    capsys.readouterr()
    assert main(cli, ["repair", "--list"]) == 0
    assert "unpermute-qk" in capsys.readouterr().out
    assert main(cli, ["repair", source, "--list"]) == 0
    assert "exchange-layers" in capsys.readouterr().out


def test_a_stopped_repair_goes_on_where_it_was(tmp_path):
    """With --resume, to the same bytes; what another fix has left is not gone on from."""
    broken, out = make_hf(tmp_path / "broken", SHAPE).path, tmp_path / "out"
    wanted = repair(broken, tmp_path / "wanted", fixes=["swap-gate-up"]).summary.out
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        repair(
            broken, out, fixes=["swap-gate-up"], resume=True, threads=1, cancel=cancel, progress=lambda _: cancel.set()
        )
    assert (tmp_path / "out.partial").exists()
    with pytest.raises(ConvertError, match="fix was swap-gate-up, is unpermute-qk"):
        repair(broken, out, fixes=["unpermute-qk"], resume=True)
    assert repair(broken, out, fixes=["swap-gate-up"], resume=True).summary.resumed > 0
    assert hashes(out) == hashes(wanted) and not (tmp_path / "out.partial").exists()
