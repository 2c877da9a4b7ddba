"""ggml's own numeric routines through ctypes, where the extra ``quantize`` (``libggml-python``) is installed.

Its libraries quantise and dequantise every block type and convert to float16 several times faster than numpy.
They are found without importing the package, loaded on first use, and called without the interpreter lock, so
that threads scale. What to do without them is decided elsewhere (:mod:`convert.cast`, :mod:`convert.quants`);
only :func:`float32_to_float16` falls back to numpy itself.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.dtypes import DTYPES

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: ``enum ggml_type`` (ggml.h) of every type that ggml and :data:`convert.dtypes.DTYPES` both know.
TYPE_IDS = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q8_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "Q8_K": 15,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ3_XXS": 18,
    "IQ1_S": 19,
    "IQ4_NL": 20,
    "IQ3_S": 21,
    "IQ2_S": 22,
    "IQ4_XS": 23,
    "I8": 24,
    "I16": 25,
    "I32": 26,
    "I64": 27,
    "F64": 28,
    "IQ1_M": 29,
    "BF16": 30,
    "TQ1_0": 34,
    "TQ2_0": 35,
    "MXFP4": 39,
    "NVFP4": 40,
}

#: Block types that exist only inside matrix products; no file holds them.
_INTERNAL = frozenset({"Q8_1", "Q8_K"})

#: Block types that ggml can turn into float32.
DEQUANTIZES = frozenset(n for n in TYPE_IDS if DTYPES[n].is_quantized) - _INTERNAL

#: Block types that ggml can write from float32 alone. The IQ types are made for an importance matrix, which this
#: program does not take: written without one they are worse than a K type of the same size.
QUANTIZES = frozenset(n for n in DEQUANTIZES if not n.startswith("IQ"))


@dataclass(frozen=True, slots=True)
class _Libraries:
    """The two shared libraries: the reference routines, and the ones with SIMD instructions."""

    base: ctypes.CDLL
    cpu: ctypes.CDLL


_lock = threading.Lock()
_loaded: _Libraries | bool | None = False  # False: not tried yet; None: not there


def _folder() -> Path | None:
    # For measuring and testing the way without ggml where it is installed.
    if os.environ.get("CONVERT_NO_GGML", "") not in ("", "0"):
        return None
    try:
        found = importlib.util.find_spec("libggml")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "lib64"


def _dequantizer(name: str) -> str:
    """The routine's name: all lower case but for the K of the K types."""
    return "dequantize_row_" + (name.lower().replace("_k", "_K"))


def _open() -> _Libraries | None:
    folder = _folder()
    if folder is None:
        return None
    try:
        # The CPU library looks its base up among what is already loaded.
        base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        base.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
        base.ggml_quantize_chunk.restype = ctypes.c_size_t
        for name in DEQUANTIZES:
            routine = getattr(base, _dequantizer(name))
            routine.argtypes, routine.restype = [pointer, pointer, count], None
        cpu.ggml_cpu_fp32_to_fp16.argtypes = [pointer, pointer, count]
        cpu.ggml_cpu_fp32_to_fp16.restype = None
        cpu.ggml_cpu_fp16_to_fp32.argtypes = [pointer, pointer, count]
        cpu.ggml_cpu_fp16_to_fp32.restype = None
        cpu.quantize_row_q8_0.argtypes = [pointer, pointer, count]
        cpu.quantize_row_q8_0.restype = None
        # Fills the lookup tables that the conversions of the CPU library read.
        cpu.ggml_cpu_init.restype = None
        cpu.ggml_cpu_init()
    except (OSError, AttributeError):  # built for another machine, or a release without these routines
        return None
    return _Libraries(base, cpu)


def _libraries() -> _Libraries | None:
    global _loaded
    if _loaded is False:
        with _lock:
            if _loaded is False:
                _loaded = _open()
    return _loaded  # type: ignore[return-value]


def available() -> bool:
    """Whether ggml's libraries are installed and can be loaded (loads them)."""
    return _libraries() is not None


def float32_to_float16(values: Floats) -> NDArray[np.float16]:
    """Round float32 to float16 (nearest even); what is too large becomes infinite, without a warning.

    Args:
        values: float32, any shape and strides.

    Returns:
        float16 of the same shape; the same bits with and without ggml, and numpy's for everything but NaN: that
        comes out quiet with the top ten bits of its payload, as the processor's own instruction has it.
    """
    libraries = _libraries()
    if libraries is None:
        return _numpy_float16(values)
    out = np.empty(values.shape, np.float16)
    values = np.ascontiguousarray(values, np.float32)
    libraries.cpu.ggml_cpu_fp32_to_fp16(values.ctypes.data, out.ctypes.data, values.size)
    tail = values.size % 8
    if tail:  # past its vectors ggml drops the payload of NaN, and bits would depend on where a block ends
        out.reshape(-1)[-tail:] = _numpy_float16(values.reshape(-1)[-tail:])
    return out


def float16_to_float32(values: NDArray[np.float16], out: Floats | None = None) -> Floats:
    """Widen float16 to float32, exactly (eight times faster than numpy where ggml is installed).

    Args:
        values: float16, any shape and strides.
        out: A float32 array of the same shape to fill.
    """
    if out is None:
        out = np.empty(values.shape, np.float32)
    elif out.shape != values.shape or out.dtype != np.float32:
        raise ValueError(f"the buffer is {out.dtype} {list(out.shape)}, wanted float32 {list(values.shape)}")
    libraries = _libraries()
    if libraries is None or not out.flags.c_contiguous:
        np.copyto(out, values)
        return out
    values = np.ascontiguousarray(values, np.float16)
    libraries.cpu.ggml_cpu_fp16_to_fp32(values.ctypes.data, out.ctypes.data, values.size)
    return out


def _numpy_float16(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = np.array(values, np.float16)
    nan = np.isnan(out)
    if nan.any():
        bits = np.asarray(values, np.float32)[nan].view(np.uint32)
        quiet = (
            (bits >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7E00) | (bits >> np.uint32(13)) & np.uint32(0x3FF)
        )
        out[nan] = quiet.astype(np.uint16).view(np.float16)
    return out


def quantize_rows(values: Floats, name: str, *, out: Bytes | None = None) -> Bytes:
    """Quantise with ggml's reference routine (the ``gguf`` package writes the same bytes where it has the type).

    Args:
        values: float32 ``[rows, cols]``, finite; ``cols`` a multiple of the type's block.
        name: One of :data:`QUANTIZES`.
        out: A contiguous ``uint8`` array of the result's shape to fill.

    Returns:
        ``uint8 [rows, bytes per row]``.

    Raises:
        ValueError: The rows do not hold whole blocks (ggml would end the process), or ggml cannot write the type.
        RuntimeError: ggml is not installed.
    """
    if name not in QUANTIZES:
        raise ValueError(f"ggml does not write {name} without an importance matrix")
    values = np.ascontiguousarray(values, np.float32)
    rows, cols = values.shape
    width = DTYPES[name].nbytes((cols,))
    out = _buffer(out, (rows, width), np.dtype(np.uint8))
    if values.size:
        _required().base.ggml_quantize_chunk(TYPE_IDS[name], values.ctypes.data, out.ctypes.data, 0, rows, cols, None)
    return out


def quantize_q8_0_simd(values: Floats, *, out: Bytes) -> None:
    """Quantise to Q8_0 with the processor's vector instructions, fifteen times faster than the reference.

    It multiplies by ``127 / max`` where the reference multiplies by ``1 / (max / 127)`` and rounds halves to even
    where the reference rounds them away from zero, so single quants may differ by one
    (:func:`convert.quants.quantize_q8_0` mends that).

    Args:
        values: float32, contiguous, whole blocks of 32.
        out: ``uint8``, contiguous, 34 bytes per block.
    """
    if values.size % 32 or out.size != values.size // 32 * 34:
        raise ValueError(f"{values.size} values and {out.size} bytes are not the same number of Q8_0 blocks")
    _required().cpu.quantize_row_q8_0(values.ctypes.data, out.ctypes.data, values.size)


def dequantize_rows(blocks: Bytes, name: str, *, out: Floats | None = None) -> Floats:
    """The values of block-quantised rows.

    Args:
        blocks: ``uint8 [rows, bytes per row]``.
        name: One of :data:`DEQUANTIZES`.
        out: A contiguous float32 array of the result's shape to fill.

    Returns:
        float32 ``[rows, cols]``.

    Raises:
        ValueError: The bytes are not whole blocks, or ggml cannot read the type.
        RuntimeError: ggml is not installed.
    """
    if name not in DEQUANTIZES:
        raise ValueError(f"ggml does not read {name}")
    kind = DTYPES[name]
    blocks = np.ascontiguousarray(blocks, np.uint8)
    rows, width = blocks.shape
    if width % kind.block_bytes:
        raise ValueError(f"{width} bytes are not whole blocks of {kind.block_bytes} ({name})")
    out = _buffer(out, (rows, width // kind.block_bytes * kind.block), np.dtype(np.float32))
    if blocks.size:
        getattr(_required().base, _dequantizer(name))(blocks.ctypes.data, out.ctypes.data, out.size)
    return out


def _required() -> _Libraries:
    libraries = _libraries()
    if libraries is None:
        raise RuntimeError("libggml-python is not installed (extra: quantize)")
    return libraries


def _buffer(out: Any, shape: tuple[int, int], kind: np.dtype) -> Any:
    if out is None:
        return np.empty(shape, kind)
    if out.shape != shape or out.dtype != kind or not out.flags.c_contiguous:
        raise ValueError(f"the buffer is {out.dtype} {list(out.shape)}, wanted contiguous {kind} {list(shape)}")
    return out
