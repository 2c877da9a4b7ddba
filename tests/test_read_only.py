"""File systems mounted read-only, in a mount namespace: a source there converts, an output there is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures import Shape, make_hf

ROOT = Path(__file__).resolve().parents[1]
SHAPE = Shape(64, 8, 2, 8, 96, 160, layers=1)
MOUNT = 'mount --bind "$1" "$1" && mount -o remount,bind,"$2" "$1" && shift 2 && exec "$@"'


def _namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(not _namespaces(), reason="no mount namespace can be made here (unshare -rm)")


def run(folder: Path, options: str, *words: object) -> subprocess.CompletedProcess[str]:
    """``convert`` where ``folder`` is mounted with ``options``."""
    command = [sys.executable, "-m", "convert", *map(str, words)]
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", MOUNT, "sh", str(folder), options, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )


@pytest.fixture
def source(tmp_path):
    make_hf(tmp_path / "disk" / "source", SHAPE, dtype="bfloat16")
    return tmp_path / "disk" / "source"


def test_a_source_that_is_read_only_converts(tmp_path, source):
    done = run(source.parent, "ro", "to", "scratch", source, tmp_path / "out", "--verify", "never", "--quiet")
    assert done.returncode == 0, done.stderr
    control = run(source.parent, "rw", "to", "scratch", source, tmp_path / "again", "--verify", "never", "--quiet")
    assert control.returncode == 0, control.stderr
    first, second = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("out", "again"))
    assert first == second and first


@pytest.mark.parametrize("to, name", [("scratch", "out"), ("gguf", "out.gguf")])
@pytest.mark.parametrize("extra", [[], ["--resume", "--overwrite", "--force"]])
def test_an_output_that_is_read_only_is_refused(tmp_path, source, to, name, extra):
    disk = tmp_path / "other"
    disk.mkdir()
    words = ["to", to, source, disk / name, "--verify", "never", "--quiet", "--no-tokenizer", *extra]
    done = run(disk, "ro", *words)
    assert done.returncode == 2, done.stderr  # as for every output that cannot be chosen
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 2
    assert str(disk) in done.stderr.replace("\n", "")
    assert not os.listdir(disk)
    assert run(disk, "rw", *words).returncode == 0  # the control: it was the mount


def test_a_disk_without_programs_is_a_disk(tmp_path, source):
    disk = tmp_path / "other"
    disk.mkdir()
    done = run(disk, "noexec", "to", "scratch", source, disk / "out", "--verify", "never", "--quiet")
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(disk)) == ["out"]
