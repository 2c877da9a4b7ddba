"""Damaged, changed and hostile torch archives: one clear error each, quickly."""

from __future__ import annotations

import contextlib
import random
import struct
import time
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.errors import FormatError
from convert.formats import torch_zip
from tests.fixtures.torch_files import raw, some, values


def refused(path: Path, *words: str) -> FormatError:
    with pytest.raises(FormatError) as caught:
        torch_zip.read(path)
    for word in (path.name, *words):
        assert word in str(caught.value)
    return caught.value


def test_cut_anywhere(tmp_path: Path) -> None:
    torch.save({f"w{i}": some((9, 9), torch.float32, i) for i in range(4)}, tmp_path / "w.pth")
    data = (tmp_path / "w.pth").read_bytes()
    path = tmp_path / "cut.pth"
    for cut in [*range(4, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:cut])
        refused(path)
    path.write_bytes(data[:-7])
    refused(path, "incomplete", "Download")
    path.write_bytes(data + b"x")
    refused(path)


def repack(source: Path, target: Path, change: Any) -> None:
    """The records of an archive, changed, in a new one."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for info in old.infolist():
            for name, data, kind in change(info.filename, old.read(info)):
                new.writestr(name, data, compress_type=kind)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda n, d: [(n, d, zipfile.ZIP_DEFLATED if "/data/" in n else 0)], ["compressed", "zip -0"]),
        (lambda n, d: [(n, d, 8 if n.endswith(".pkl") else 0)], ["compressed"]),
        (lambda n, d: [(n, d[:-4] if "/data/" in n else d, 0)], ["elements of F32 need"]),
        (lambda n, d: [] if "/data/" in n else [(n, d, 0)], ["missing from the archive"]),
        (lambda n, d: [(n, b"big" if n.endswith("byteorder") else d, 0)], ["byte order 'big'"]),
        (lambda n, d: [] if n.endswith("/version") else [(n, d, 0)], ["lacks the record 'version'"]),
        (lambda n, d: [(n, d, 0)] * (2 if "/data/" in n else 1), ["twice"]),
        (lambda n, d: [(n, d, 0)] + ([("other/data.pkl", d, 0)] if n.endswith(".pkl") else []), ["2 object trees"]),
        (lambda n, d: [(n, d, 0)] + ([("w/constants.pkl", d, 0)] if n.endswith(".pkl") else []), ["TorchScript"]),
        (lambda n, d: [(n, d[:-30] if n.endswith(".pkl") else d, 0)], ["object tree"]),
    ],
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_changed_archives(tmp_path: Path, change: Any, words: list[str]) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((3,), torch.float32)}, tmp_path / "w.pth")
    repack(tmp_path / "w.pth", tmp_path / "new.pth", change)
    refused(tmp_path / "new.pth", *words)


def test_an_unchanged_repack_is_read(tmp_path: Path) -> None:
    """The control of the test above: it is the change that is refused."""
    tensor = some((9, 9), torch.float32)
    torch.save({"w": tensor}, tmp_path / "w.pth")
    repack(tmp_path / "w.pth", tmp_path / "new.pth", lambda n, d: [(n, d, 0)])
    assert values(torch_zip.read(tmp_path / "new.pth").metadata["tree"]["w"]) == raw(tensor)


def test_tensors_outside_their_storage(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((9, 11), torch.float32)[1:]}, tmp_path / "w.pth")
    shape = b"K\x09K\x09\x86"

    def change(name: str, data: bytes) -> list[tuple[str, bytes, int]]:
        return [(name, data.replace(shape, b"K\x09K\xff\x86", 1).replace(b"K\x0bK\x08", b"K\x0bK\xff", 1), 0)]

    repack(tmp_path / "w.pth", tmp_path / "new.pth", change)
    error = refused(tmp_path / "new.pth", "does not lie inside it", "[9, 255]")
    assert [problem.kind for problem in error.problems] == ["tensor_bounds"] * 2  # all at once


def test_overlapping_records(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32), "v": some((9, 9), torch.float32, 1)}, tmp_path / "w.pth")
    data = bytearray((tmp_path / "w.pth").read_bytes())
    with zipfile.ZipFile(tmp_path / "w.pth") as archive:
        first, second = (archive.getinfo(f"w/data/{i}").header_offset for i in (0, 1))
    at = data.rindex(struct.pack("<I", second) + b"w/data/1")
    data[at : at + 4] = struct.pack("<I", first)
    path = tmp_path / "over.pth"
    path.write_bytes(data)
    refused(path, "reaches beyond")


def test_damaged_object_tree(tmp_path: Path) -> None:
    torch.save({"w": some((9, 9), torch.float32)}, tmp_path / "w.pth")
    data = bytearray((tmp_path / "w.pth").read_bytes())
    data[data.index(b"\x80\x02}") + 60] ^= 1
    (tmp_path / "w.pth").write_bytes(data)
    refused(tmp_path / "w.pth", "CRC-32")


@pytest.mark.parametrize("legacy", [True, False])
def test_not_torch_zip(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "model.pth"
    if legacy:
        torch.save(OrderedDict(w=torch.ones(2)), path, _use_new_zipfile_serialization=False)
        refused(path, "before torch 1.6", "save it again")
    else:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2471645608\n")
        refused(path, "Git-LFS pointer to a 2.47 GB file", "git lfs pull")


# --- hostile archives ---------------------------------------------------------------------------------------


def end_record(count: int, length: int, start: int) -> bytes:
    return struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, count, count, length, start, 0)


def end_records64(count: int, length: int, start: int, where: int) -> bytes:
    wide = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, length, start)
    return wide + struct.pack("<IIQI", 0x07064B50, 0, where, 1) + end_record(0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


def listing(count: int) -> bytes:
    """``count`` directory records of empty files at offset 0."""
    fixed = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0)
    return b"".join(fixed + b"%08d" % index for index in range(count))


HEAD = b"PK\3\4" + bytes(22) + struct.pack("<HH", 10, 0) + b"x/data.pkl"
HOSTILE: dict[str, Any] = {
    "counts what is not there": lambda: HEAD + end_record(60_000, 100, len(HEAD)),
    "directory outside": lambda: HEAD + end_record(1, 4_000_000_000, 3_000_000_000),
    "zip64 counts 2**60": lambda: HEAD + end_records64(1 << 60, 1 << 62, len(HEAD), len(HEAD)),
    "zip64 record outside": lambda: HEAD + end_records64(1, 46, len(HEAD), 1 << 60),
    "zip64 points at itself": lambda: HEAD + end_records64(3, 200, len(HEAD), len(HEAD)),
    "too many": lambda: (
        HEAD + listing(300_000) + end_records64(300_000, 300_000 * 54, len(HEAD), len(HEAD) + 300_000 * 54)
    ),
    "all at one place": lambda: HEAD + listing(60_000) + end_record(60_000, 60_000 * 54, len(HEAD)),
    "many ends": lambda: HEAD + b"PK\5\6" * 15_000,
    "only an end": lambda: end_record(0, 0, 0) + b"/data.pkl",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_archives(tmp_path: Path, name: str) -> None:
    path = tmp_path / "h.pth"
    path.write_bytes(HOSTILE[name]())
    start = time.process_time()
    error = refused(path)
    assert time.process_time() - start < 10  # at most 0.15 s on a quiet machine
    assert len(error.problems) == 1
    assert len(str(error)) < 1000


def test_random_damage_to_the_directory(tmp_path: Path) -> None:
    """Each change is refused, or leaves tensors that lie inside the file."""
    torch.save({f"w{i}": some((9, 9), torch.float32, i) for i in range(4)}, tmp_path / "w.pth")
    data = (tmp_path / "w.pth").read_bytes()
    start = data.index(b"PK\1\2")
    rng = random.Random(5)
    path = tmp_path / "d.pth"
    refusals = 0
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(start, len(data))] = rng.choice([0, 1, 255, rng.randrange(256)])
        path.write_bytes(changed)
        try:
            tree = torch_zip.read(path).metadata["tree"]
        except FormatError:
            refusals += 1
            continue
        for spec in tree.values():
            assert 0 < spec.offset <= len(data) - spec.nbytes
    assert 100 < refusals < 400


@pytest.mark.parametrize(
    ("extra", "sound"), [(b"ar\x04\x00abcd", True), (b"ar\x04\x00abcdxyz", True), (b"ar\xff\x7fab", False)]
)
def test_extra_fields(tmp_path: Path, extra: bytes, sound: bool) -> None:
    """Found by fuzzing: fields that reach beyond their record, which zipfile and torch refuse."""
    torch.save({"w": torch.arange(6.0)}, tmp_path / "plain.pth")
    path = tmp_path / "extra.pth"
    with zipfile.ZipFile(tmp_path / "plain.pth") as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            info = zipfile.ZipInfo(name)
            info.extra = extra
            new.writestr(info, old.read(name))
    if sound:
        assert list(torch_zip.read(path).metadata["tree"]) == ["w"]
        return
    with pytest.raises(zipfile.BadZipFile):
        zipfile.ZipFile(path)
    with pytest.raises(FormatError, match="extra fields"):
        torch_zip.read(path)


@pytest.mark.parametrize(
    ("record", "field", "value", "words"),
    [
        (b"PK\x06\x07", 4, 8, "several disks"),  # the locator's own disk
        (b"PK\x06\x07", 16, 15617, "several disks"),  # how many there are
        (b"PK\x06\x06", 24, -1, "more records than it says"),  # records here, and in all
    ],
)
def test_zip64_records_that_other_readers_refuse(
    tmp_path: Path, record: bytes, field: int, value: int, words: str
) -> None:
    """Found by fuzzing: zipfile and torch refuse these."""
    path = tmp_path / "w.pth"
    torch.save({"w": torch.arange(6.0), "v": torch.arange(4.0)}, path)
    assert sorted(torch_zip.read(path).metadata["tree"]) == ["v", "w"]  # the control
    data = bytearray(path.read_bytes())
    at = data.rindex(record) + field
    if value > 0:
        struct.pack_into("<I", data, at, value)
    else:
        count = struct.unpack_from("<Q", data, at)[0] - 1
        struct.pack_into("<2Q", data, at, count, count)
    path.write_bytes(data)
    with pytest.raises(zipfile.BadZipFile) if value > 0 else contextlib.nullcontext():
        zipfile.ZipFile(path)
    with pytest.raises(FormatError, match=words):
        torch_zip.read(path)
