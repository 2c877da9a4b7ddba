"""Torch files that ``torch.save`` wrote, read without torch and without executing anything."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.errors import FormatError
from convert.formats import torch_zip
from convert.formats.placeholders import TORCH_TYPES, Placeholder
from tests.fixtures.torch_files import DTYPES, raw, some, values


def save(tree: Any, path: Path) -> Any:
    torch.save(tree, path)
    return torch_zip.read(path).metadata["tree"]


def test_every_dtype(tmp_path: Path) -> None:
    tensors = {str(dtype): some((5, 7), dtype, index) for index, dtype in enumerate(DTYPES)}
    tree = save(tensors, tmp_path / "a.pth")
    assert list(tree) == list(tensors)
    for name, tensor in tensors.items():
        spec = tree[name]
        assert TORCH_TYPES[name.removeprefix("torch.")] == spec.dtype
        assert (spec.shape, spec.strides) == ((5, 7), None)
        assert values(spec) == raw(tensor), name
        assert spec.crc == zlib.crc32(raw(tensor))
        assert values(spec) != raw(tensor.flip(0))  # control


def test_views_slices_and_shared_storages(tmp_path: Path) -> None:
    parent = some((12, 10), torch.float32)
    tensors = {
        "parent": parent,
        "transposed": parent.T,
        "slice": parent[3:7],
        "columns": parent[:, 2:9:3],
        "row": parent[5],
        "expanded": parent[0].expand(6, 10),
        "permuted": some((2, 3, 4), torch.bfloat16).permute(2, 0, 1),
        "scalar": torch.tensor(3.25),
        "element": parent[4, 4],
        "empty": torch.zeros(0, 4),
        "conv": some((4, 1, 3), torch.float16).transpose(0, 1),
    }
    tree = save(tensors, tmp_path / "views.pt")
    for name, tensor in tensors.items():
        assert tree[name].shape == tuple(tensor.shape), name
        assert values(tree[name]) == raw(tensor), name
        if tree[name].strides is not None:
            assert tree[name].strides == tensor.stride()
    assert tree["parent"].storage == tree["transposed"].storage == tree["slice"].storage
    assert tree["parent"].storage != tree["permuted"].storage
    assert tree["slice"].strides is None
    assert tree["parent"].crc is not None
    assert tree["slice"].crc is None  # covers a part of the storage
    assert tree["transposed"].crc is None


def test_parameters_and_attributes(tmp_path: Path) -> None:
    plain = torch.nn.Parameter(some((3, 4), torch.float32))
    stated = torch.nn.Parameter(some((3, 4), torch.float32, 1))
    stated.tag = "decay"  # type: ignore[attr-defined]
    noted = some((2, 2), torch.float32, 2)
    noted.tag = 1  # type: ignore[attr-defined]
    tree = save(
        {"plain": plain, "stated": stated, "noted": noted, "buffer": torch.nn.Buffer(noted)}, tmp_path / "p.pth"
    )
    for name, tensor in (("plain", plain), ("stated", stated), ("noted", noted), ("buffer", noted)):
        assert values(tree[name]) == raw(tensor), name


def test_module_state_dict_and_training_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "training.ckpt"
    torch.save(
        {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": optimizer.state_dict(),
            "args": argparse.Namespace(lr=1e-3, dims=[4, 6]),
            "best": np.float64(0.5),
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "size": torch.Size([2, 3]),
        },
        path,
    )
    opened = torch_zip.read(path)
    tree = opened.metadata["tree"]
    assert (opened.format, opened.tensors) == ("torch", {})
    for name, tensor in model.state_dict().items():
        assert values(tree["model_state_dict"][name]) == raw(tensor)
    assert tree["optimizer_state_dict"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert isinstance(tree["args"], Placeholder)
    assert tree["args"].fields == {"lr": 1e-3, "dims": [4, 6]}
    assert tree["size"] == (2, 3)
    assert tree["device"] == "cpu"
    (note,) = opened.notes
    assert "argparse.Namespace" in note
    assert "numpy" in note


def test_a_whole_file_of_one_root_name(tmp_path: Path) -> None:
    """Dots, spaces and letters beyond ASCII in the name of the file, hence of the archive's folder."""
    for name in ("consolidated.00.pth", "my model.pt", "größe.bin"):
        tensor = some((2, 3), torch.float16)
        assert values(save({"w": tensor}, tmp_path / name)["w"]) == raw(tensor)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_the_file_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "made"
    torch.save({"w": torch.ones(2), "x": Evil(target)}, tmp_path / "e.pth")
    with pytest.raises(FormatError, match=r"e\.pth asks for \w+\.mkdir .*nothing was run here"):
        torch_zip.read(tmp_path / "e.pth")
    assert not target.exists()
    torch.load(tmp_path / "e.pth", weights_only=False)  # control
    assert target.exists()


def test_crcs_switched_off(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        tensor = some((3, 3), torch.float32)
        spec = save({"w": tensor}, tmp_path / "n.pth")["w"]
    finally:
        torch.serialization.set_crc32_options(before)
    assert spec.crc is None
    assert values(spec) == raw(tensor)


@pytest.mark.parametrize("kind", ["conj", "sparse", "quantized"])
@pytest.mark.filterwarnings("ignore:torch.quantize")
def test_tensors_of_other_kinds_are_placeholders(tmp_path: Path, kind: str) -> None:
    made = {
        "conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    }[kind]()
    found = save({"w": made}, tmp_path / "k.pth")["w"]
    assert isinstance(found, Placeholder)
    assert found.name.startswith("torch._utils._rebuild")


def test_torch_is_not_imported(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pth")
    code = (
        "import sys; from pathlib import Path; from convert.formats import torch_zip, torch_zip_writer\n"
        "from convert.wrappers import unwrap\n"
        "print(list(unwrap(torch_zip.read(Path(sys.argv[1])).metadata['tree']).tensors), 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "w.pth")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stdout.split("\n")[0] == "['w'] False"
