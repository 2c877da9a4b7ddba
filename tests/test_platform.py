"""Every fallback gives the bytes that the call it stands in for gives."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import convert
from convert import platform
from convert.errors import ConvertError
from tests.fixtures import make_hf, make_meta

CALLS = ("pread", "pwrite", "copy_file_range")
SETS = [set(c) for n in range(len(CALLS) + 1) for c in itertools.combinations(CALLS, n)]
DATA = os.urandom(3_000_017)


@pytest.fixture(params=SETS, ids=lambda s: "+".join(sorted(s)) or "all calls")
def missing(request, monkeypatch):
    monkeypatch.setattr(platform, "DISABLED", request.param)
    monkeypatch.setattr(platform, "_COPY_BYTES", 100_003)  # several rounds per call
    monkeypatch.setattr(platform, "_local", threading.local())
    return request.param


@pytest.fixture
def files(tmp_path):
    (tmp_path / "a").write_bytes(DATA)
    (tmp_path / "b").write_bytes(bytes(len(DATA)))
    fds = [os.open(tmp_path / "a", os.O_RDONLY), os.open(tmp_path / "b", os.O_RDWR)]
    yield fds
    for fd in fds:
        os.close(fd)


def test_read(missing, files):
    for at, count in ((0, len(DATA)), (17, 250_000), (len(DATA) - 5, 5), (5, 0)):
        buffer = bytearray(count)
        assert platform.read_at(files[0], memoryview(buffer), at) == count
        assert buffer == DATA[at : at + count]
    buffer = bytearray(10)
    assert platform.read_at(files[0], memoryview(buffer), len(DATA) - 4) == 4  # the file ends
    assert buffer == DATA[-4:] + bytes(6)
    assert platform.read_at(files[0], memoryview(buffer), len(DATA) + 4) == 0


def test_write(missing, files, tmp_path):
    wanted = bytearray(len(DATA))
    for at, count in ((5, 250_007), (1_000_000, 1), (len(DATA) - 3, 3), (9, 0)):
        platform.write_at(files[1], memoryview(DATA)[at : at + count], at)
        wanted[at : at + count] = DATA[at : at + count]
    assert (tmp_path / "b").read_bytes() == wanted
    platform.write_at(files[1], b"bytes too", 0)
    assert (tmp_path / "b").read_bytes()[:9] == b"bytes too"


def test_copy(missing, files, tmp_path):
    assert platform.copy_range(files[0], files[1], 1000, 77, 500_000) == 500_000
    assert (tmp_path / "b").read_bytes()[77:500_077] == DATA[1000:501_000]
    assert not any((tmp_path / "b").read_bytes()[:77])
    assert platform.copy_range(files[0], files[1], 1000, 77, 0) == 0
    # where the source ends, the count says so
    assert platform.copy_range(files[0], files[1], len(DATA) - 10, 0, 300_000) == 10
    assert (tmp_path / "b").read_bytes()[:10] == DATA[-10:]


def test_threads_do_not_disturb_each_other(missing, files, tmp_path):
    def move(at: int) -> None:
        buffer = bytearray(10_000)
        count = platform.read_at(files[0], memoryview(buffer), at)
        platform.write_at(files[1], memoryview(buffer)[:count], at)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(move, range(0, len(DATA), 10_000)))
    assert (tmp_path / "b").read_bytes() == DATA


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP])
def test_a_filesystem_that_refuses_the_kernel_copy(files, tmp_path, monkeypatch, code):
    """Also in the middle: what was copied is kept, the rest goes through a buffer."""
    calls = []

    def refuse(source, target, count, start, to):
        calls.append(count)
        if len(calls) > 1:
            raise OSError(code, os.strerror(code))
        os.pwrite(target, os.pread(source, 1000, start), to)
        return 1000

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    assert platform.copy_range(files[0], files[1], 0, 0, len(DATA)) == len(DATA)
    assert (tmp_path / "b").read_bytes() == DATA
    assert calls == [len(DATA), len(DATA) - 1000]


def test_a_kernel_copy_that_ends_too_early_is_not_believed(files, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "copy_file_range", lambda *_: 0, raising=False)
    assert platform.copy_range(files[0], files[1], 0, 0, len(DATA)) == len(DATA)
    assert (tmp_path / "b").read_bytes() == DATA


def test_a_failing_disk_is_an_error(files, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "copy_file_range", broken, raising=False)
    with pytest.raises(OSError, match="Input/output"):
        platform.copy_range(files[0], files[1], 0, 0, 10)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.name != "conversion.json"}


@pytest.mark.parametrize("target", ["scratch", "meta", "hf"])
def test_conversions_write_the_same_bytes_without_them(missing, tmp_path, monkeypatch, target):
    make = make_meta if target == "hf" else make_hf
    made = make(tmp_path / "source", "h32kv8", dtype="bfloat16")
    options = {"model_parallel": 2} if target == "meta" else {}
    convert.convert_checkpoint(made.path, tmp_path / "fallback", to=target, **options)
    monkeypatch.setattr(platform, "DISABLED", set())
    convert.convert_checkpoint(made.path, tmp_path / "usual", to=target, **options)
    assert contents(tmp_path / "fallback") == contents(tmp_path / "usual")


def test_control_a_source_that_shrinks_is_noticed_without_the_kernel_copy_too(missing, tmp_path):
    made = make_hf(tmp_path / "source", "gqa8")
    plan = convert.plan_conversion(made.path, "scratch")
    weights = made.path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1000)
    from convert.run import run

    with pytest.raises(ConvertError, match=r"became shorter|ended while"):
        run(plan, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_folders_that_cannot_be_opened_are_no_error(tmp_path):
    platform.sync_folder(tmp_path)
    platform.sync_folder(tmp_path / "absent")
    platform.keep_freed_memory()


def test_memory_that_is_left(monkeypatch):
    """The least of what the system and its container say; what cannot be read does not count."""
    import builtins
    import io

    files = {
        "/proc/meminfo": "MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\n",
        "/sys/fs/cgroup/memory.max": "max\n",
    }

    def fake(path, **_):
        if path not in files:
            raise FileNotFoundError(path)
        return io.StringIO(files[path])

    monkeypatch.setattr(builtins, "open", fake)
    assert platform.available_memory() == 500 << 10
    files["/sys/fs/cgroup/memory.max"] = "1000\n"
    assert platform.available_memory() == 1000
    files.clear()
    assert platform.available_memory() is None
    monkeypatch.undo()
    real = platform.available_memory()
    assert real is None or real > 1 << 20


def test_reserve(tmp_path, monkeypatch):
    for name in ("fallocate", ""):
        monkeypatch.setattr(platform, "DISABLED", {name})
        fd = os.open(tmp_path / f"c{name}", os.O_RDWR | os.O_CREAT)
        platform.reserve(fd, 1_000_000)
        found = os.fstat(fd)
        os.close(fd)
        assert found.st_size == 1_000_000
        blocks = found.st_blocks
    # Without the call the file is a hole; a filesystem that has none leaves it so.
    assert blocks == 0 or blocks * 512 >= 1_000_000


def test_a_full_disk_is_told_when_the_file_is_made(tmp_path, monkeypatch):
    def full(*_):
        import ctypes

        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr(platform, "_fallocate", lambda: full)
    fd = os.open(tmp_path / "c", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises(OSError) as caught:
            platform.reserve(fd, 1_000_000)
        assert caught.value.errno == errno.ENOSPC
    finally:
        os.close(fd)


def test_more_shards_than_files_may_be_open_at_first(tmp_path):
    """The limit of a shell may be raised by whoever runs in it; one that the system has set stays."""
    resource = pytest.importorskip("resource")
    make_hf(tmp_path / "source", "gqa8", sharded=12)
    child = (
        "import resource, sys; soft, hard = map(int, sys.argv[1:3]); import convert.conversion, convert.plan, numpy\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
        "import convert; convert.convert_checkpoint(sys.argv[3], sys.argv[4], to='hf', max_shard_size=20_000)"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    for name, most, code in (("out", hard, 0), ("none", 16, 1)):
        command = [sys.executable, "-c", child, "16", str(most), str(tmp_path / "source"), str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        assert done.returncode == code, done.stderr
        assert code == 0 or "Too many open files" in done.stderr
    assert not (tmp_path / "none").exists() and len(list((tmp_path / "out").glob("*.safetensors"))) > 6
