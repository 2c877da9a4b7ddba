"""Which accelerator there is: a guess without torch for the plan, and torch's answer for the run."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import Problem, UsageError

if TYPE_CHECKING:
    import torch


def gpu_present(*, dev: Path = Path("/dev")) -> bool:
    """Whether this machine seems to have a GPU, found without importing torch.

    True for an NVIDIA device node (``/dev/nvidia0`` …), for AMD's compute node (``/dev/kfd``), and on macOS
    with an arm64 processor. A torch built for CPUs only still cannot use it: :func:`pick_device` says so then.

    Args:
        dev: The folder of device nodes.
    """
    if sys.platform == "darwin":
        return platform.machine() == "arm64"
    return (dev / "kfd").exists() or any(node.name[6:].isdigit() for node in dev.glob("nvidia*"))


def share_cores() -> None:
    """Let torch's threads sleep while they wait for each other, unless the environment says how they should wait.

    OpenMP's threads spin. Where other programs want the same cores, that burns several times what the work takes (of
    one diagnosis on two busy cores: 128 s of processor time, and 24 s without). Must come before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def few_threads() -> None:
    """Keep numpy's BLAS from threads of its own, unless the environment says how many: for commands that run no model.

    OpenBLAS starts one for every core, each with a buffer, when numpy is imported: a tenth of what ``inspect`` takes on
    two cores. Such commands have their own threads. Must come before numpy is imported.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def pick_device(name: str = "auto") -> torch.device:
    """The torch device called ``name``; ``auto`` takes cuda, then mps, then cpu, as torch can use them.

    Raises:
        UsageError: There is no such device, or torch cannot use it here.
    """
    import torch

    usable = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        return torch.device(next(kind for kind, there in usable.items() if there))
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in usable:
        raise UsageError(
            Problem("device", f"There is no device {name!r}.", found=name, wanted=["auto", *usable]),
        )
    if not usable[device.type] or (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(
            Problem(
                "device",
                f"torch {torch.__version__} cannot use {name!r} on this machine.",
                found=[kind for kind, there in usable.items() if there],
                wanted=name,
                hint="Use --device auto, or install a torch build for this accelerator.",
            )
        )
    return device
