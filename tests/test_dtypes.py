"""Sizes and names of element types against safetensors, torch, numpy and the gguf package."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from convert.dtypes import ALIASES, DTYPES, TORCH_NAMES, dtype

TORCH = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    },
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
}


def test_plain_types_are_those_of_safetensors_and_torch():
    assert {n for n, d in DTYPES.items() if d.block == 1} == set(TORCH)
    for name, kind in TORCH.items():
        raw = save({"t": torch.zeros(6, dtype=kind)})
        header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
        assert header["t"]["dtype"] == name
        start, stop = header["t"]["data_offsets"]
        assert DTYPES[name].nbytes((6,)) == DTYPES[name].nbytes((2, 3)) == stop - start == 6 * kind.itemsize
        assert DTYPES[name].storage.itemsize == kind.itemsize
        assert not DTYPES[name].is_quantized


def test_block_types_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    for name, kind in DTYPES.items():
        if kind.is_quantized:
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (kind.block, kind.block_bytes)
            assert kind.nbytes((3, 2 * kind.block)) == 6 * kind.block_bytes and not kind.is_float
            assert kind.storage == np.uint8


@pytest.mark.parametrize("shape", [(33,), (4, 31), (64, 16), ()])
def test_rows_must_hold_whole_blocks(shape):
    with pytest.raises(ValueError, match="rows of multiples of 32"):
        DTYPES["Q8_0"].nbytes(shape)


def test_names_that_people_write():
    for name in ("bfloat16", "torch.bfloat16", "bf16", "BF16"):
        assert dtype(name) is DTYPES["BF16"]
    assert dtype("half") is dtype("torch.float16") is dtype("fp16") is DTYPES["F16"]
    assert dtype("Q8_0") is DTYPES["Q8_0"]
    with pytest.raises(KeyError):
        dtype("float12")
    for name, word in TORCH_NAMES.items():
        assert getattr(torch, word) == TORCH[name] and dtype(word) is DTYPES[name] and DTYPES[name].is_float
    assert set(ALIASES.values()) <= set(DTYPES)


def test_scalars_and_empty_tensors():
    assert DTYPES["F32"].nbytes(()) == 4
    assert DTYPES["F32"].nbytes((0, 5)) == 0
