"""Reading GGUF files back with the ``gguf`` package: names to raw bytes, types and values, and typed key-values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np


def tensors(*paths: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Type and raw data of every tensor, of one file or of all pieces of a split one."""
    found = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            assert tensor.name not in found
            found[tensor.name] = (tensor.tensor_type.name, np.array(tensor.data))
    return found


def values(*paths: Path) -> dict[str, np.ndarray]:
    """Every tensor as float32, dequantised by the package, in torch order."""
    out = {}
    for path in paths:
        for tensor in gguf.GGUFReader(path).tensors:
            shape = tuple(int(n) for n in reversed(tensor.shape))
            out[tensor.name] = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
    return out


def keys(path: Path) -> dict[str, tuple[str, Any]]:
    """Key → (type, value); the type of an array is ``ARRAY:`` and that of its elements."""
    out = {}
    for key, field in gguf.GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            out[key] = (":".join(kind.name for kind in field.types[:2]), field.contents())
    return out


def pieces(path: Path) -> list[Path]:
    """The pieces of a split file called ``path``."""
    return sorted(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
