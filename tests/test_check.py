"""An output against its record and its source: whatever was changed since it was written is found and named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import convert
from convert.errors import ConvertError, UsageError
from tests.fixtures import make_hf, make_meta, make_scratch

TARGETS = {
    "hf": {"max_shard_size": 60_000},
    "meta": {"model_parallel": 2},
    "scratch": {},
    "half": {"to": "scratch", "dtype": "float16"},
    "pth": {"to": "scratch", "format": "pth"},
    "gguf": {"type": "q8_0"},
    "split": {"to": "gguf", "type": "f16", "split_max_size": 60_000},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("source") / "model", "gqa8", tokenizer=120).path


@pytest.fixture(scope="module", params=TARGETS)
def finished(request, source, tmp_path_factory):
    """Every kind of output, with full hashes and without."""
    root = tmp_path_factory.mktemp("out")
    options = {"to": request.param, **TARGETS[request.param]}
    for name, hashes in (("hashed", True), ("plain", False)):
        out = root / name / ("m.gguf" if options["to"] == "gguf" else "m")
        out.parent.mkdir()
        convert.convert_checkpoint(source, out, hashes=hashes, **options)
    return root


@pytest.fixture
def out(finished, tmp_path):
    """A copy of one of them; ``out("hashed")`` is what to check."""

    def make(name: str) -> Path:
        shutil.copytree(finished / name, tmp_path / name)
        return opened(tmp_path / name)

    return make


def opened(folder: Path) -> Path:
    pieces = sorted(folder.glob("*.gguf"))
    return pieces[0] if pieces else folder / "m"


def weights(out: Path) -> list[Path]:
    folder = out if out.is_dir() else out.parent
    return sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".pth", ".gguf"))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def kinds(found) -> set[str]:
    return {p.kind for p in found.problems}


@pytest.mark.parametrize("name", ["hashed", "plain"])
def test_an_untouched_output(out, source, name):
    place = out(name)
    found = convert.check(place)
    assert found.ok and found.exit_code == 0 and all(f["status"] == "same" for f in found.files)
    assert any("no full hashes" in n for n in found.notes) == (name == "plain")
    again = convert.check(place, source=source)
    assert again.ok and again.source["recorded"] is True and again.source["tensors"] >= 21
    assert again.source["bytes"] > 70_000
    said = "\n".join(found.lines())  # one is said of one
    assert f"): {(n := len(found.files))} file{'s' if n > 1 else ''}; {n} size{'s' if n > 1 else ''}, " in said
    assert not re.search(r"\b1 (files|sizes|headers|first MiBs|full hashes)", said)


def test_one_flipped_byte_in_any_file(out, source):
    """At the very end, which no header and no first MiB of a large file covers: hashes and sources see it."""
    hashed, plain = out("hashed"), out("plain")
    for place in (hashed, plain):
        with convert.open_checkpoint(place) as checkpoint:
            lasts = {}
            for specs in checkpoint.tensors.values():
                for spec in specs:
                    lasts[spec.file] = max(lasts.get(spec.file, 0), spec.offset + spec.nbytes - 1)
        assert sorted(lasts) == weights(place)
        for path, at in lasts.items():
            flip(path, at)
            if place is hashed:
                found = convert.check(place)
                assert kinds(found) == {"sha256"} and [p.file for p in found.problems] == [str(path)]
                assert found.exit_code == 1
            found = convert.check(place, source=source)
            assert "bytes" in kinds(found)
            (one,) = [p for p in found.problems if p.kind == "bytes"]
            assert one.found == 1 and "1 of" in one.message
            flip(path, at)
        assert convert.check(place, source=source).ok


def test_a_changed_header(out):
    """Sizes and tensors are as they were: only the header's hash sees it."""
    place = out("plain")
    for path in weights(place):
        data = path.read_bytes()
        if path.suffix == ".pth":  # the time stamp of the last record in the archive's directory
            at = data.rindex(b"PK\x01\x02") + 12
        else:  # a letter of the last key that holds no number
            word = next(w for w in (b"convert.tied", b"split.tensors.count") if w in data)
            at = data.index(word) + len(word) - 3
        flip(path, at)
        found = convert.check(place)
        assert any(p.kind == "header" and path.name in p.message for p in found.problems)
        path.write_bytes(data)
    assert convert.check(place).ok


def test_other_sizes_and_missing_files(out):
    place = out("plain")
    path = weights(place)[-1]
    data = path.read_bytes()
    path.write_bytes(data[:-7])
    assert "size" in kinds(convert.check(place))
    path.unlink()
    if len(weights(place)) or place.is_dir():
        assert "missing_file" in kinds(convert.check(place))
    else:
        with pytest.raises(UsageError, match="does not exist"):
            convert.check(place)


def test_moved_and_renamed(out, source, tmp_path):
    place = out("hashed")
    moved = tmp_path / "elsewhere" / "renamed"
    moved.parent.mkdir()
    if place.is_dir():
        place = place.rename(moved)
    else:
        shutil.move(place.parent, moved)
        place = opened(moved)
        if len(weights(place)) == 1:
            place = place.rename(moved / "another.gguf")  # its record keeps the old name
    found = convert.check(place, source=source)
    assert found.ok, found.lines()
    if place.name == "another.gguf":
        assert found.files[0]["recorded_name"] == "m.gguf"


def test_files_beside_the_weights(out):
    place = out("plain")
    if not place.is_dir():
        return
    (place / "notes.txt").write_text("mine")
    found = convert.check(place)
    assert found.ok and any("notes.txt" in n for n in found.notes)
    name = next(p.name for p in place.glob("*.json") if p.name not in ("conversion.json",) and "index" not in p.name)
    text = (place / name).read_text()
    (place / name).write_text(text.replace("1", "2", 1))
    assert [p.kind for p in convert.check(place).problems] in (["sha256"], ["size"])
    (place / name).unlink()
    assert "missing_file" in kinds(convert.check(place))


def test_without_a_record(out, source, tmp_path):
    place = out("plain")
    for path in (place if place.is_dir() else place.parent).glob("*conversion.json"):
        path.unlink()
    with pytest.raises(ConvertError, match="no record") as caught:
        convert.check(place)
    assert caught.value.exit_code == 1 and "--source" in str(caught.value)
    found = convert.check(place, source=source)
    assert found.ok and any("guessed" in n for n in found.notes), found.lines()
    assert found.source["recorded"] is (True if place.suffix == ".gguf" else None)  # GGUF files say it themselves
    with convert.open_checkpoint(place) as checkpoint:
        spec = next(iter(checkpoint.tensors.values()))[0]
    flip(spec.file, spec.offset)
    assert kinds(convert.check(place, source=source)) == {"bytes"}


def test_another_source(out, tmp_path):
    other = make_hf(tmp_path / "other", "gqa8", tokenizer=120, seed=5).path
    found = convert.check(out("plain"), source=other)
    assert found.source["recorded"] is False and any("not what this was made from" in n for n in found.notes)
    assert kinds(found) == {"bytes"} and len(found.problems) >= 16


def test_the_same_weights_in_other_shards(source, tmp_path):
    """Another source by its files, the same by its values: said, and no finding."""
    convert.convert_checkpoint(source, tmp_path / "cut", to="hf", max_shard_size=40_000)
    convert.convert_checkpoint(source, tmp_path / "out", to="meta")
    found = convert.check(tmp_path / "out", source=tmp_path / "cut")
    assert found.ok and found.source["recorded"] is False


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "convert.record/1"}', '{"schema": "x", "source": 3}'])
def test_a_damaged_record(source, tmp_path, text):
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch")
    (tmp_path / "out" / "conversion.json").write_text(text)
    with pytest.raises(ConvertError, match=r"conversion\.json"):
        convert.check(tmp_path / "out")


@pytest.mark.parametrize(
    "change",
    [
        {"files": 3},
        {"files": [3]},
        {"files": [{"name": 5, "bytes": "x", "sha256": 3}]},
        {"beside": [{"name": "../../../../etc/passwd", "bytes": 1, "sha256": "1" * 64}]},
        {"options": {"dtype": 3}},
        {"options": {"tie": []}},
        {"options": {"max_shard_size": "x", "model_parallel": None}},
        {"layout": "nonsense"},
        {"names": {"top": 3}},
    ],
    ids=str,
)
def test_a_hostile_record(source, tmp_path, change):
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch")
    place = tmp_path / "out" / "conversion.json"
    record = json.loads(place.read_text())
    record["target"] |= change
    place.write_text(json.dumps(record))
    with contextlib.suppress(ConvertError):
        convert.check(tmp_path / "out", source=source)


def test_what_was_said_of_the_source_is_remembered(tmp_path):
    """Options without which the source would be taken for something else: order of rows, names, tie, a config."""
    meta = make_meta(tmp_path / "meta", "gqa8").path
    convert.convert_checkpoint(meta, tmp_path / "a", to="scratch", qk_layout="hf")
    assert convert.check(tmp_path / "a", source=meta).ok
    assert not convert.check(tmp_path / "a", source=meta, qk_layout="meta").ok  # the control

    scratch = make_scratch(tmp_path / "scratch", "gqa8").path
    config = scratch / "scratch_config.json"
    kept = config.rename(tmp_path / "mine.json")
    convert.convert_checkpoint(scratch, tmp_path / "b", to="hf", config=str(kept))
    kept.unlink()
    assert convert.check(tmp_path / "b", source=scratch).ok

    convert.convert_checkpoint(meta, tmp_path / "c", to="scratch", names="llama2c")
    assert convert.check(tmp_path / "c", source=meta).ok
    convert.convert_checkpoint(tmp_path / "c", tmp_path / "d", to="hf", names="llama2c")
    assert convert.check(tmp_path / "d", source=tmp_path / "c").ok


def test_memory_and_threads(source, tmp_path):
    convert.convert_checkpoint(source, tmp_path / "out", to="meta")
    seen: list[int] = []
    assert convert.check(tmp_path / "out", source=source, threads=8, progress=seen.append).ok
    assert sum(seen) > 290_000


def test_a_link_to_an_output(source, tmp_path):
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch")
    os.symlink(tmp_path / "out", tmp_path / "link")
    assert convert.check(tmp_path / "link", source=source).ok


def test_clamped_values_are_derived_again(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = make_hf(tmp_path / "m", "gqa8").path
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.mlp.up_proj.weight"][3, 5] = 1e6
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    convert.convert_checkpoint(folder, tmp_path / "out", to="scratch", dtype="float16", clamp=True)
    assert convert.check(tmp_path / "out", source=folder).ok
    assert torch.isfinite(load_file(tmp_path / "out" / "model.safetensors")["trf_blocks.0.ff.fc2.weight"]).all()


@pytest.mark.parametrize("target", ["hf", "gguf"])
def test_a_repaired_copy_is_repaired_again(tmp_path, target):
    source = make_hf(tmp_path / "m", "gqa8", tokenizer=120).path
    if target == "gguf":
        convert.convert_checkpoint(source, tmp_path / "m.gguf", to="gguf", type="f16")
        source = tmp_path / "m.gguf"
    out = tmp_path / ("out.gguf" if target == "gguf" else "out")
    convert.repair(source, out, fixes=["swap-gate-up"])
    found = convert.check(out, source=source)
    assert found.ok and found.source["recorded"] is True, found.lines()
    record = out.with_name("out.gguf.conversion.json") if target == "gguf" else out / "conversion.json"
    told = json.loads(record.read_text())
    del told["repair"]
    record.write_text(json.dumps(told))
    assert kinds(convert.check(out, source=source)) == {"bytes"}  # the control: gate and up are the other way round


def test_records_of_other_files_are_passed_over(tmp_path, source):
    convert.convert_checkpoint(source, tmp_path / "a.gguf", to="gguf", type="f16")
    convert.convert_checkpoint(source, tmp_path / "b.gguf", to="gguf", type="q8_0")
    (tmp_path / "b.gguf").rename(tmp_path / "z.gguf")
    (tmp_path / "0.conversion.json").write_text("{}")
    found = convert.check(tmp_path / "z.gguf")
    assert found.ok and found.files[0]["recorded_name"] == "b.gguf"
    (tmp_path / "b.gguf.conversion.json").unlink()
    with pytest.raises(ConvertError, match=r"no record beside it \(the file says that ckpt-convert"):
        convert.check(tmp_path / "z.gguf")


def test_what_it_advises_fits_what_was_asked(source, tmp_path):
    """The command can be pasted, and nothing is called unseen where every byte was compared."""
    out = tmp_path / "an out"
    convert.convert_checkpoint(source, out, to="scratch")
    assert not convert.check(out, source=source).notes
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-1001, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1001, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    alone, beside = convert.check(out).lines(), convert.check(out, source=source).lines()
    assert alone[-1].endswith(f"convert check '{out}' --source SRC")
    assert beside[-1].strip() == "Convert again."
