"""Hashes: of files, of headers, of outputs while they are written; and what published hashes are found and believed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import threading
from pathlib import Path

import pytest

import convert
from convert.checksums import read_list
from convert.errors import ConvertError, FormatError, UsageError
from convert.formats.spec import Entry
from convert.hashing import GIT, Hasher, hash_file, hash_files, header_hash
from tests.fixtures import make_hf, make_meta, make_scratch


def sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (3 << 20) + 17])
def test_a_files_hash_is_hashlibs(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(random.Random(size).randbytes(size))
    seen: list[int] = []
    assert hash_file(path, progress=seen.append) == sha(path) and sum(seen) == size
    assert hash_file(path, "md5") == hashlib.md5(path.read_bytes()).hexdigest()
    assert hash_files([path, path]) == {path: sha(path)}


def test_gits_hash_is_gits(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"some text\n" * 99)
    said = subprocess.run(["git", "hash-object", str(path)], capture_output=True, text=True, check=True).stdout.strip()
    assert hash_file(path, GIT) == said


def test_unreadable_files_are_all_named(tmp_path):
    with pytest.raises(ConvertError, match=r"one cannot be read.*\n?.*two cannot be read"):
        hash_files([tmp_path / "one", tmp_path / "two"])


@pytest.mark.parametrize("make", ["safetensors", "torch", "gguf"])
def test_a_headers_hash_sees_the_header_and_nothing_else(tmp_path, make):
    source = make_hf(tmp_path / "m", "gqa8").path
    to, options, name = {
        "safetensors": ("hf", {}, "out/model.safetensors"),
        "torch": ("scratch", {"format": "pth"}, "out/model.pth"),
        "gguf": ("gguf", {"type": "f32", "tokenizer": False}, "out.gguf"),
    }[make]
    convert.convert_checkpoint(source, tmp_path / name.split("/")[0], to=to, **options)
    path = tmp_path / name
    before = header_hash(path, make)
    with convert.open_checkpoint(path) as opened:
        specs = [s for parts in opened.tensors.values() for s in parts]
    data = bytearray(path.read_bytes())
    for spec in specs:  # values
        data[spec.offset] ^= 1
    path.write_bytes(data)
    assert header_hash(path, make) == before
    at = data.rindex(b"PK\x01\x02") + 12 if make == "torch" else min(s.offset for s in specs) // 2
    data[at] ^= 1
    path.write_bytes(data)
    if make == "gguf":
        from contextlib import suppress

        with suppress(ConvertError):  # some letters of a header cannot be others
            assert header_hash(path, make) != before
    else:
        assert header_hash(path, make) != before


# --- while writing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.safetensors", "m.pth", "m.gguf"])
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_in_any_order(tmp_path, name, threads):
    """A follower sees a file's front only when it is complete, and waits for what is missing."""
    from convert.formats import gguf_writer, safetensors, torch_zip_writer
    from convert.formats.gguf_values import KeyValues

    entries = [Entry("a.weight", "F32", (64, 33)), Entry("b.weight", "F32", (7,)), Entry("c.weight", "F16", (129, 3))]
    if name.endswith("gguf"):
        file = gguf_writer.layout(name, entries, KeyValues())
    else:
        file = (torch_zip_writer if name.endswith("pth") else safetensors).layout(name, entries)
    values = random.Random(3)
    wanted = bytearray(file.size)
    crcs = {e.name: 7 for e in entries}
    for at, data in file.frame(crcs):
        wanted[at : at + len(data)] = data
    pieces = []
    for entry in entries:
        start = file.offsets[entry.name]
        wanted[start : start + entry.nbytes] = values.randbytes(entry.nbytes)
        pieces += [(at, min(100, start + entry.nbytes - at)) for at in range(start, start + entry.nbytes, 100)]
    values.shuffle(pieces)
    with open(tmp_path / name, "w+b", buffering=0) as out:
        os.ftruncate(out.fileno(), file.size)
        beside = tmp_path / "source"
        beside.write_bytes(b"x" * 5000)
        with Hasher([file], [out.fileno()], [beside], threads=threads) as hasher:
            for at, count in pieces:
                os.pwrite(out.fileno(), wanted[at : at + count], at)
                hasher.wrote(0, at, count)
            for at, data in file.frame(crcs):
                os.pwrite(out.fileno(), data, at)
            found = hasher.finish()
    assert found.outputs == {name: hashlib.sha256(wanted).hexdigest()}
    assert found.sources == {beside: sha(beside)}


def test_a_hasher_that_is_given_up_ends_its_threads(tmp_path):
    from convert.formats import safetensors

    file = safetensors.layout("m.safetensors", [Entry("a", "F32", (10, 10))])
    before = set(threading.enumerate())
    with open(tmp_path / "m", "w+b", buffering=0) as out, Hasher([file], [out.fileno()]) as hasher:
        hasher.wrote(0, file.offsets["a"] + 40, 40)
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("hf", {"max_shard_size": 50_000}),
        ("meta", {"model_parallel": 2, "dtype": "bfloat16"}),
        ("scratch", {"format": "pth"}),
        ("gguf", {"type": "q8_0", "tokenizer": False, "split_max_size": 40_000}),
    ],
)
def test_hashes_of_a_conversion(tmp_path, to, options):
    source = make_hf(tmp_path / "source", "gqa8", sharded=3).path
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    convert.convert_checkpoint(source, out, to=to, hashes=True, threads=3, **options)
    folder = tmp_path if to == "gguf" else out
    record = json.loads(next(folder.glob("*conversion.json")).read_text())
    files = record["target"]["files"]
    assert [f["sha256"] for f in files] == [sha(folder / f["name"]) for f in files]
    if to != "scratch":
        assert len(files) > 1
    assert [f["sha256"] for f in record["source"]["files"]] == [
        sha(source / f["name"]) for f in record["source"]["files"]
    ]


# --- published hashes -------------------------------------------------------------------------------------------------


def cached(source: Path, root: Path) -> Path:
    """The folder as the hub's client lays it into its cache: blobs called after their content, links to them."""
    repo = root / "models--someone--model"
    (repo / "blobs").mkdir(parents=True)
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    for path in source.iterdir():
        data = path.read_bytes()
        large = path.suffix == ".safetensors"
        name = sha(path) if large else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        shutil.copy(path, repo / "blobs" / name)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def flip(path: Path, at: int = -9) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_hubs_cache(tmp_path):
    snapshot = cached(make_hf(tmp_path / "m", "gqa8", sharded=2).path, tmp_path)
    found = convert.validate(snapshot, hashes=True)
    assert found.ok and all(h.ok for h in found.hashes) and len(found.hashes) == 5
    assert {h.algorithm for h in found.hashes} == {"sha256", GIT}
    assert "5 of 5 files hash to what was published" in found.checked
    bad = snapshot / "model-00002-of-00002.safetensors"
    flip(bad.resolve())
    assert convert.validate(snapshot).ok  # right size, wrong bytes: nothing else sees it
    found = convert.validate(snapshot, hashes=True)
    assert [p.kind for p in found.problems] == ["hash"] and bad.name in found.problems[0].message
    assert found.exit_code == 1
    flip(bad.resolve())
    flip((snapshot / "generation_config.json").resolve(), -2)
    assert [p.file for p in convert.validate(snapshot, hashes=True).problems if p.kind == "hash"] == [
        str(snapshot / "generation_config.json")
    ]


def test_blobs_on_another_disk(tmp_path):
    snapshot = cached(make_hf(tmp_path / "m", "gqa8").path, tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    assert [h.ok for h in convert.validate(snapshot, hashes=True).hashes] == [True] * 3
    flip((snapshot / "model.safetensors").resolve())
    assert [p.kind for p in convert.validate(snapshot, hashes=True).problems] == ["hash"]


def test_a_download_into_a_folder(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8").path
    hidden = folder / ".cache" / "huggingface" / "download"
    hidden.mkdir(parents=True)
    (hidden / "model.safetensors.metadata").write_text(
        f"{'c' * 40}\n{sha(folder / 'model.safetensors')}\n1700000000.0\n"
    )
    found = convert.validate(folder, hashes=True)
    assert found.ok and [h.ok for h in found.hashes] == [True]
    flip(folder / "model.safetensors")
    assert [p.kind for p in convert.validate(folder, hashes=True).problems] == ["hash"]


def test_metas_checklist(tmp_path):
    folder = make_meta(tmp_path / "m", "gqa8", mp=2).path
    names = ["consolidated.00.pth", "consolidated.01.pth", "params.json"]
    lines = [f"{hashlib.md5((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    (folder / "checklist.chk").write_text("".join(lines))
    found = convert.validate(folder, hashes=True)
    assert found.ok and [h.algorithm for h in found.hashes] == ["md5"] * 3
    with convert.open_checkpoint(folder) as opened:
        spec = opened.tensors["output.weight"][1]
    flip(spec.file, spec.offset + 3)
    found = convert.validate(folder, hashes=True)
    assert "hash" in {p.kind for p in found.problems} and "consolidated.01.pth" in str(found.problems)
    (folder / "params.json").rename(folder / "elsewhere.json")
    found = convert.validate(folder, hashes=True, config=str(folder / "elsewhere.json"))
    assert "missing_file" in {p.kind for p in found.problems}


@pytest.mark.parametrize("style", ["gnu", "binary", "bsd"])
def test_a_given_list(tmp_path, style):
    folder = make_scratch(tmp_path / "m", "gqa8").path
    (path,) = folder.glob("model.*")
    line = {
        "gnu": f"{sha(path)}  {path.name}",
        "binary": f"{sha(path)} *./{path.name}",
        "bsd": f"SHA256 ({path.name}) = {sha(path)}",
    }[style]
    place = tmp_path / "SHA256SUMS"  # of another folder: names count
    place.write_text(f"# published\n\n{line}\n")
    found = convert.validate(folder, checksums=place)
    assert found.ok and found.hashes[0].ok and found.hashes[0].origin == "SHA256SUMS"
    with convert.open_checkpoint(folder) as opened:
        spec = next(iter(opened.tensors.values()))[0]
    flip(spec.file, spec.offset)
    assert "hash" in {p.kind for p in convert.validate(folder, checksums=place).problems}
    place.write_text(f"{line}\n{'0' * 64}  absent.safetensors\n")
    assert "missing_file" in {p.kind for p in convert.validate(folder, checksums=place).problems}


def test_our_lists_are_those_of_the_tools(tmp_path):
    path = tmp_path / "a file"
    path.write_bytes(b"content")
    for tool in ("sha256sum", "md5sum", "sha1sum", "sha512sum"):
        said = subprocess.run([tool, "a file"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        (tmp_path / "list").write_text(said)
        ((name, digest),) = read_list(tmp_path / "list").items()
        assert name == "a file" and digest == hash_file(path, tool.removesuffix("sum"))


def test_lists_that_other_programs_wrote(tmp_path):
    """With a byte order mark, with tabs, in capitals; and one that contradicts itself, which md5sum -c would notice."""
    digest = hashlib.md5(b"x").hexdigest()
    for text in (f"\ufeff{digest}  a b\r\n", f"{digest.upper()}\ta b", f"{digest}  a b\n{digest} *a b\n"):
        (tmp_path / "list").write_text(text, encoding="utf-8", newline="")
        assert read_list(tmp_path / "list") == {"a b": digest}
    (tmp_path / "list").write_text(f"{'0' * 32}  a b\n{digest}  a b\n")
    with pytest.raises(FormatError, match="line 2 gives a b another hash"):
        read_list(tmp_path / "list")


@pytest.mark.parametrize("text", ["", "not a list", "abc  file", "{}", "g" * 64 + "  file", "0" * 64])
def test_lists_that_are_none(tmp_path, text):
    folder = make_hf(tmp_path / "m", "gqa8").path
    (tmp_path / "list").write_text(text)
    with pytest.raises(FormatError, match="is no list of hashes"):
        convert.validate(folder, checksums=tmp_path / "list")
    with pytest.raises(UsageError, match="no such file"):
        convert.validate(folder, checksums=tmp_path / "absent")


def test_a_list_cannot_point_out_of_its_folder(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8").path
    (tmp_path / "list").write_text(f"{'0' * 64}  ../../../../../../etc/passwd\n{'0' * 64}  /etc/hostname\n")
    found = convert.validate(folder, checksums=tmp_path / "list")
    assert {p.kind for p in found.problems} == {"missing_file"} and len(found.problems) == 2


def test_nothing_to_compare_with_is_said(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8").path
    found = convert.validate(folder, hashes=True)
    (one,) = found.hashes
    assert found.ok and one.ok is None and one.digest == sha(folder / "model.safetensors")
    text = "\n".join(found.lines())
    assert one.digest in text and "compared with nothing" in text
    assert found.as_json()["hashes"][0]["expected"] is None
    assert "hashes" not in convert.validate(folder).as_json()


def test_our_own_record_is_believed(tmp_path):
    source = make_hf(tmp_path / "m", "gqa8").path
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch", hashes=True)
    found = convert.validate(tmp_path / "out", hashes=True)
    assert found.ok and found.hashes[0].ok and "record" in found.hashes[0].origin
    flip(tmp_path / "out" / "model.safetensors")
    assert [p.kind for p in convert.validate(tmp_path / "out", hashes=True).problems] == ["hash"]


def test_a_checkpoint_that_cannot_be_opened_is_hashed_all_the_same(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8").path
    path = folder / "model.safetensors"
    (folder / "SHA256SUMS").write_text(f"{sha(path)}  {path.name}\n")
    path.write_bytes(path.read_bytes()[:-4])
    found = convert.validate(folder, checksums=folder / "SHA256SUMS")
    assert {p.kind for p in found.problems} == {"truncated", "hash"}
