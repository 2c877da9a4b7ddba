"""ggml's own numeric routines through ctypes, where the extra ``quantize`` (``libggml-python``) is installed.

Its libraries quantise and dequantise every block type and convert to float16 several times faster than numpy.
They are found without importing the package, loaded on first use, and called without the interpreter lock, so
that threads scale. What to do without them is decided elsewhere (:mod:`convert.cast`, :mod:`convert.quants`);
only :func:`float32_to_float16` falls back to numpy itself.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from dataclasses import dataclass
from functools import lru_cache
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

#: Types whose quantiser needs an importance matrix, or whose tables ggml builds only for one; we never write them.
_NEEDS_IMPORTANCE = frozenset({"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M"})
_QUANTIZES = frozenset(
    name for name in TYPE_IDS if DTYPES[name].is_quantized and name not in _NEEDS_IMPORTANCE | {"Q8_1", "Q8_K"}
)

#: Both routines work in registers and tables of a few kilobytes: pieces of this many elements keep input and
#: output in a core's second-level cache. (With much smaller ones two threads contend for the interpreter lock.)
PIECE = 128 * 1024


@dataclass(frozen=True, slots=True)
class _Libraries:
    """The two shared libraries: the reference routines, and the ones with SIMD instructions."""

    base: ctypes.CDLL
    cpu: ctypes.CDLL


_lock = threading.Lock()
_loaded: _Libraries | None | bool = False  # False: not tried yet; None: not there


def _folder() -> Path | None:
    try:
        found = importlib.util.find_spec("libggml")
    except (ImportError, ValueError):
        return None
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations))) / "lib64"


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
        cpu.ggml_cpu_fp32_to_fp16.argtypes = [pointer, pointer, count]
        cpu.ggml_cpu_fp32_to_fp16.restype = None
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
    values = np.ascontiguousarray(values, np.float32)
    out = np.empty(values.shape, np.float16)
    libraries.cpu.ggml_cpu_fp32_to_fp16(values.ctypes.data, out.ctypes.data, values.size)
    return out


def _numpy_float16(values: Floats) -> NDArray[np.float16]:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out = np.ascontiguousarray(values, np.float32).astype(np.float16)
    nan = np.isnan(out)
    if nan.any():
        bits = np.ascontiguousarray(values, np.float32)[nan].view(np.uint32)
        quiet = (
            (bits >> np.uint32(16)) & np.uint32(0x8000) | np.uint32(0x7E00) | (bits >> np.uint32(13)) & np.uint32(0x3FF)
        )
        out.view(np.uint16)[nan] = quiet
    return out
