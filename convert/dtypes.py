"""Names, sizes and numpy storage of every element type that a checkpoint can hold.

Types carry the names of the safetensors format (``F32``, ``BF16`` …); block-quantised types carry ggml's
(``Q8_0``, ``Q4_K`` …). This module knows sizes and nothing of values: conversions live in
:mod:`convert.cast` and :mod:`convert.quants`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    Attributes:
        name: The canonical name.
        block: Elements per block (1 for plain types).
        block_bytes: Bytes per block.
        storage: The numpy type whose arrays hold the raw values (``BF16`` travels as ``uint16``; blocks as
            ``uint8``).
    """

    name: str
    block: int
    block_bytes: int
    storage: np.dtype

    @property
    def is_quantized(self) -> bool:
        """Whether values come in blocks that share a scale."""
        return self.block > 1

    @property
    def is_float(self) -> bool:
        """Whether this is one of the plain floating-point types of weights."""
        return self.name in ("F64", "F32", "F16", "BF16")

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a contiguous tensor of ``shape``; rows must hold whole blocks.

        Raises:
            ValueError: The last dimension is not a multiple of the block.
        """
        count = math.prod(shape)
        if self.block > 1 and (not shape or shape[-1] % self.block):
            raise ValueError(f"{self.name} holds rows of multiples of {self.block}, not shape {list(shape)}")
        return count // self.block * self.block_bytes


def _plain(name: str, size: int, storage: str) -> DType:
    return DType(name, 1, size, np.dtype(storage))


_PLAIN = (
    _plain("F64", 8, "<f8"),
    _plain("F32", 4, "<f4"),
    _plain("F16", 2, "<f2"),
    _plain("BF16", 2, "<u2"),
    _plain("F8_E4M3", 1, "u1"),
    _plain("F8_E5M2", 1, "u1"),
    _plain("F8_E8M0", 1, "u1"),
    _plain("I64", 8, "<i8"),
    _plain("I32", 4, "<i4"),
    _plain("I16", 2, "<i2"),
    _plain("I8", 1, "i1"),
    _plain("U64", 8, "<u8"),
    _plain("U32", 4, "<u4"),
    _plain("U16", 2, "<u2"),
    _plain("U8", 1, "u1"),
    _plain("BOOL", 1, "?"),
    _plain("C64", 8, "<c8"),
)

# ggml's block sizes: elements and bytes per block, as ggml.h and the gguf package's GGML_QUANT_SIZES state.
_BLOCKS = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q8_1": (32, 40),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "Q8_K": (256, 292),
    "IQ2_XXS": (256, 66),
    "IQ2_XS": (256, 74),
    "IQ3_XXS": (256, 98),
    "IQ1_S": (256, 50),
    "IQ4_NL": (32, 18),
    "IQ3_S": (256, 110),
    "IQ2_S": (256, 82),
    "IQ4_XS": (256, 136),
    "IQ1_M": (256, 56),
    "TQ1_0": (256, 54),
    "TQ2_0": (256, 66),
    "MXFP4": (32, 17),
    "NVFP4": (64, 36),
}

DTYPES: dict[str, DType] = {d.name: d for d in _PLAIN} | {
    name: DType(name, block, size, np.dtype("u1")) for name, (block, size) in _BLOCKS.items()
}

#: What people type for ``--dtype``, and what configs call them.
ALIASES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float": "F32",
    "half": "F16",
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
}
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def dtype(name: str) -> DType:
    """The element type called ``name`` (``"BF16"``, ``"bfloat16"``, ``"torch.bfloat16"``, ``"Q8_0"``).

    Raises:
        KeyError: No such type.
    """
    key = name.removeprefix("torch.")
    return DTYPES[ALIASES.get(key, key)]
