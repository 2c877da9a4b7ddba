from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convert import devices
from convert.errors import UsageError
from tests.fixtures.hf import make_hf

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        (["nvidia0", "nvidiactl"], True),
        (["nvidia12"], True),
        (["kfd"], True),
        (["nvidiactl", "nvidia-uvm"], False),
        ([], False),
    ],
)
def test_device_nodes_tell(tmp_path, monkeypatch, nodes, found):
    monkeypatch.setattr(devices.sys, "platform", "linux")
    for node in nodes:
        (tmp_path / node).touch()
    assert devices.gpu_present(dev=tmp_path) is found


def test_apple_silicon_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(devices.sys, "platform", "darwin")
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    assert devices.gpu_present(dev=tmp_path)
    monkeypatch.setattr(devices.platform, "machine", lambda: "x86_64")
    assert not devices.gpu_present(dev=tmp_path)


def test_looking_imports_no_torch():
    code = "import sys, convert.devices as d; d.gpu_present(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_picking():
    torch = pytest.importorskip("torch")
    usable = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert devices.pick_device().type == usable
    assert devices.pick_device("cpu").type == "cpu"
    for name in ("tpu", "nonsense", "meta"):
        with pytest.raises(UsageError, match=name):
            devices.pick_device(name)
    if usable != "cuda":
        with pytest.raises(UsageError, match="cannot use 'cuda'"):
            devices.pick_device("cuda")


@pytest.mark.parametrize(("said", "kept"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(monkeypatch, said, kept):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # so that it is put back afterwards
    if said is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    devices.share_cores()
    assert devices.os.environ["OMP_WAIT_POLICY"] == kept


@pytest.mark.parametrize(("said", "kept"), [(None, "1"), ("3", "3")])
def test_numpy_gets_no_threads_of_its_own_unless_told_otherwise(monkeypatch, said, kept):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")  # so that it is put back afterwards
    if said is None:
        monkeypatch.delenv("OPENBLAS_NUM_THREADS")
    devices.few_threads()
    assert devices.os.environ["OPENBLAS_NUM_THREADS"] == kept


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("command", ["inspect", "validate", "diagnose"])
def test_commands_that_run_no_model_start_no_threads_for_it(tmp_path, command):
    """Asked before numpy is imported; the control, told a number, has as many as numpy alone starts then."""
    made = make_hf(tmp_path / "m", "std").path
    options = ["--probe-only"] if command == "diagnose" else []
    code = (
        "import os, sys, convert.cli; "
        "assert 'numpy' not in sys.modules; "
        "convert.cli.run(convert.cli.cli, sys.argv[1:]); "
        "assert 'numpy' in sys.modules; "
        "print(len(os.listdir('/proc/self/task')))"
    )
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    words = [sys.executable, "-c", code, command, str(made), *options]

    def threads(words: list[str], **more: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT, env=env | more)
        return done.stdout.split()[-1]

    assert threads(words) == "1"
    alone = [sys.executable, "-c", "import numpy, os; print(len(os.listdir('/proc/self/task')))"]
    assert threads(words, OPENBLAS_NUM_THREADS="64") == threads(alone, OPENBLAS_NUM_THREADS="64")
