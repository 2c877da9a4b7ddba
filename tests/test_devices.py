from __future__ import annotations

import subprocess
import sys

import pytest

from convert import devices
from convert.errors import UsageError


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
