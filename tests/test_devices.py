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


#: Runs a command, and prints what numpy is told when it is first asked for.
WHEN_NUMPY_COMES = """
import os, sys
import convert.cli

class Witness:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy":
            print("numpy", os.environ.get("OPENBLAS_NUM_THREADS"))

assert "numpy" not in sys.modules
sys.meta_path.insert(0, Witness())
convert.cli.run(convert.cli.cli, sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [("inspect", "1"), ("validate", "1"), ("diagnose --probe-only", "1"), ("hf-to-scratch --dry-run", "None")],
)
def test_commands_that_run_no_model_say_so_before_numpy_comes(tmp_path, command, said):
    """The control is a command that may run one in the end."""
    words = [*command.split(), str(make_hf(tmp_path / "m", "std").path)]
    words += [str(tmp_path / "out")] if "dry" in command else []
    env = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    call = [sys.executable, "-c", WHEN_NUMPY_COMES, *words]
    done = subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT, env=env)
    assert [line for line in done.stdout.splitlines() if line.startswith("numpy ")] == [f"numpy {said}"]
