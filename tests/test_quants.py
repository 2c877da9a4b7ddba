"""Quantised sources against gguf.quants and ggml's reference, with the proof of the Q8_0 short cut, exhaustively."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convert import ggml, q8_0, quants
from convert.cast import float32_to_bf16, to_float32
from convert.dtypes import DTYPES
from convert.errors import ConvertError
from convert.formats.spec import TensorSpec
from convert.quants import Dequantized, Quantized
from convert.source import Array, FilePool, FileSource, Source

gguf = pytest.importorskip("gguf")
needs_ggml = pytest.mark.skipif(not ggml.available(), reason="libggml-python (extra: quantize) is not installed")

PLAIN = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]


class Memory(Source):
    """Rows that lie in memory."""

    def __init__(self, values: Array, dtype: str, shape: tuple[int, ...] | None = None) -> None:
        self.values, self.dtype, self.shape = values, dtype, shape or values.shape

    def read(self, start: int, stop: int) -> Array:
        return self.values[start:stop]


@pytest.fixture(params=["ggml", "gguf"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With ggml, and with the gguf package alone."""
    if request.param == "gguf":
        monkeypatch.setattr(ggml, "_loaded", None)
    elif not ggml.available():
        pytest.skip("libggml-python is not installed")
    yield request.param


def stored(values: np.ndarray, dtype: str) -> Array:
    if dtype == "BF16":
        return float32_to_bf16(values)
    return values.astype(DTYPES[dtype].storage)


def normal(rows: int, cols: int, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(rows + cols).standard_normal((rows, cols)) * scale).astype(np.float32)


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_written_bytes_are_those_of_the_gguf_package(either: str, name: str, dtype: str) -> None:
    values = stored(normal(96, 1536), dtype)  # more than one piece
    source = Quantized(Memory(values, dtype), name, tensor="w")
    found = source.read(0, 96)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.quantize(to_float32(values, dtype), gguf.GGMLQuantizationType[name])
    assert source.dtype == name and source.shape == (96, 1536)
    assert found.shape == wanted.shape and found.tobytes() == wanted.tobytes()
    halves = np.concatenate([source.read(0, 37), source.read(37, 96)])
    assert halves.tobytes() == wanted.tobytes()


@needs_ggml
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "NVFP4"])
def test_types_only_ggml_has_do_not_depend_on_the_pieces(name: str) -> None:
    values = normal(200, 768)
    found = Quantized(Memory(values, "F32"), name, tensor="w").read(0, 200)
    rows = [ggml.quantize_rows(values[n : n + 1], name) for n in range(200)]
    assert found.tobytes() == np.concatenate(rows).tobytes()


def test_experts_keep_their_shape(either: str) -> None:
    values = normal(15, 64).reshape(3, 5, 64)
    source = Quantized(Memory(values, "F32"), "Q8_0", tensor="w")
    found = source.read(1, 3)
    assert found.shape == (2, 5, 68)
    back = Dequantized(Memory(found, "Q8_0", (2, 5, 64)), "F32").read(0, 2)
    assert back.shape == (2, 5, 64) and np.abs(back - values[1:]).max() < 0.0008


@pytest.mark.parametrize("name", [*PLAIN, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_S", "NVFP4"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_read_values_are_those_of_the_gguf_package(either: str, name: str, dtype: str) -> None:
    kind = DTYPES[name]
    rng = np.random.default_rng(7)
    blocks = rng.integers(0, 256, (90, 1536 // kind.block * kind.block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        wide = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
        wanted = stored(wide, dtype)
    source = Dequantized(Memory(blocks, name, (90, 1536)), dtype)
    found = source.read(0, 90)
    assert found.shape == (90, 1536) and found.dtype == DTYPES[dtype].storage
    number = ~np.isnan(wide)
    assert (found[number] == wanted[number]).all()
    assert (source.read(80, 90)[number[80:]] == wanted[80:][number[80:]]).all()
    if dtype == "F16":
        finite = np.isfinite(wide)
        assert source.loss.overflowed >= int(np.isinf(wanted[finite]).sum())


def test_a_one_dimensional_tensor_reads_too(tmp_path: Path, either: str) -> None:
    values = normal(1, 128)
    path = tmp_path / "raw"
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    path.write_bytes(b"\0" * 7 + blocks.tobytes())
    source = Dequantized(FileSource(TensorSpec("w", "Q8_0", (128,), path, 7), FilePool()), "F32")
    found = source.read(0, 128)
    assert found.shape == (128,) and (found == gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)[0]).all()
    assert (source.read(5, 9) == found[5:9]).all()


# ---- the Q8_0 short cut ----------------------------------------------------------------------------------------


@needs_ggml
def test_26_mantissas_of_bfloat16_are_doubtful() -> None:
    """What a search over all mantissas found independently (all 128 largest values against all smaller values)."""
    table = q8_0.doubtful_mantissas()
    assert table.shape == (1024,) and int(table[::8].sum()) == 26
    assert table[127 * 16 - 1024]


def blocks_of(largest: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each largest value, blocks with it in front and all others, 31 to a block."""
    per = -(-others.shape[1] // 31)
    filled = np.zeros((len(largest), per * 31), np.float32)
    filled[:, : others.shape[1]] = others
    blocks = np.empty((len(largest), per, 32), np.float32)
    blocks[:, :, 0] = largest[:, None]
    blocks[:, :, 1:] = filled.reshape(len(largest), per, 31)
    return blocks.reshape(-1, 32)


@needs_ggml
def test_every_pair_of_bfloat16_mantissas_gives_the_reference() -> None:
    """Exhaustive: 128 largest values times all smaller ones down to where every quant is zero, of both signs."""
    differ = 0
    for mantissa in range(128):
        top = 0x3F80 + mantissa
        bits = np.arange(top - 9 * 128, top + 1, dtype=np.uint16)
        small = to_float32(bits, "BF16")
        values = blocks_of(small[-1:], np.concatenate([small, -small])[None])
        wanted = ggml.quantize_rows(values, "Q8_0")
        fast = np.empty_like(wanted)
        ggml.quantize_q8_0_simd(values, out=fast)
        differ += int((fast != wanted).any())
        found = np.empty_like(wanted)
        q8_0.quantize_q8_0(values.reshape(-1), stored(values, "BF16").reshape(-1), "BF16", found.reshape(-1))
        assert found.tobytes() == wanted.tobytes(), mantissa
    assert differ == 26  # the control: without the repair these mantissas are wrong


@needs_ggml
def test_float16_mantissas_give_the_reference() -> None:
    """Exhaustive too: 1024 largest values times all smaller ones of both signs."""
    doubtful = q8_0.doubtful_mantissas()
    differ = 0
    for mantissa in range(1024):
        top = 0x3C00 + mantissa
        small = np.arange(top - 9 * 1024, top + 1, dtype=np.uint16).view(np.float16).astype(np.float32)
        values = blocks_of(small[-1:], np.concatenate([small, -small])[None])
        wanted = ggml.quantize_rows(values, "Q8_0")
        fast = np.empty_like(wanted)
        ggml.quantize_q8_0_simd(values, out=fast)
        wrong = bool((fast != wanted).any())
        differ += wrong
        assert not wrong or doubtful[mantissa]
        found = np.empty_like(wanted)
        q8_0.quantize_q8_0(values.reshape(-1), stored(values, "F16").reshape(-1), "F16", found.reshape(-1))
        assert found.tobytes() == wanted.tobytes(), mantissa
    assert differ == doubtful.sum()


@needs_ggml
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_scale_gives_the_reference(dtype: str) -> None:
    """All positive values as the largest of a block, with its half: overflow, subnormal and zero scales included."""
    stop = 0x7F80 if dtype == "BF16" else 0x7C00
    bits = np.arange(0, stop, dtype=np.uint16)
    largest = to_float32(bits if dtype == "BF16" else bits.view(np.float16), dtype)
    with np.errstate(under="ignore"):
        values = largest[:, None] * np.array([1, 0.5, -0.5, 0.25, -1] + [0] * 27, np.float32)
    values = values[(largest <= 8e6) & (values[:, 3] * 4 == largest)]
    exact = to_float32(stored(values, dtype), dtype)
    values = values[(exact == values).all(axis=1)]
    assert len(values) > 18_000
    wanted = ggml.quantize_rows(values, "Q8_0")
    found = np.empty_like(wanted)
    values = np.ascontiguousarray(values)
    q8_0.quantize_q8_0(values.reshape(-1), stored(values, dtype).reshape(-1), dtype, found.reshape(-1))
    wrong = (found != wanted).any(axis=1)
    assert not wrong.any(), values[wrong][:3, 0]


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused(either: str, dtype: str, value: float) -> None:
    values = normal(150, 1024)
    values[140, 3:6] = value
    source = Quantized(Memory(stored(values, dtype), dtype), "Q4_0", tensor="model.w")
    source.read(0, 140)
    with pytest.raises(ConvertError) as caught:
        source.read(130, 150)
    problem = caught.value.problems[0]
    assert problem.kind == "not_finite" and problem.tensor == "model.w"
    assert problem.found == {"row": 140, "count": 3}
    assert "'model.w'" in problem.message and "row 140" in problem.message and "3 values" in problem.message


@pytest.mark.skipif(not ggml.available(), reason="needs the extra: quantize")
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
@pytest.mark.parametrize("largest", [3.0e8, 1e25, 3.3e38])
def test_values_whose_squares_overflow_are_refused(name: str, largest: float) -> None:
    """ggml's search for a scale then finds none, and it writes a block of near zeros that looks sound."""
    values = normal(8, 512)
    values[5, 300] = largest
    source = Quantized(Memory(values, "F32"), name, tensor="w")
    source.read(0, 5)
    with pytest.raises(ConvertError) as caught:
        source.read(0, 8)
    problem = caught.value.problems[0]
    assert problem.kind == "scale_overflow" and problem.found["row"] == 5 and problem.found["count"] == 1
    assert problem.found["largest"] == pytest.approx(largest, rel=1e-3)
    values[5, 300] = 60000.0  # the control: large, and held
    back = quants.dequantize(source.read(0, 8), name)
    assert back[5, 300] == pytest.approx(60000.0, rel=0.05)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_1", "Q5_1"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_scale_that_overflows_is_refused(either: str, name: str, dtype: str) -> None:
    limit = {"Q8_0": 127 * 65520.0, "Q4_0": 8 * 65520.0, "Q4_1": 65520.0, "Q5_1": 65520.0}[name]
    values = normal(8, 64)
    values[5, 40] = -limit * 1.01
    source = Quantized(Memory(stored(values, dtype), dtype), name, tensor="w")
    source.read(0, 5)
    with pytest.raises(ConvertError) as caught:
        source.read(2, 8)
    problem = caught.value.problems[0]
    assert problem.kind == "scale_overflow" and problem.found["row"] == 5 and problem.found["count"] == 1
    assert "row 5" in problem.message and name in problem.message and "'w'" in problem.message
    assert problem.found["largest"] == pytest.approx(limit * 1.01, rel=0.01)
    values[5, 40] = -limit * 0.97  # the control: just below, all is well
    found = Quantized(Memory(stored(values, dtype), dtype), name, tensor="w").read(0, 8)
    assert np.isfinite(quants.dequantize(found, name)).all()


@needs_ggml
@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_a_k_type_overflows_with_a_message_too(name: str) -> None:
    values = normal(3, 512)
    values[1, 300] = 3e8
    with pytest.raises(ConvertError, match="row 1"):
        Quantized(Memory(values, "F32"), name, tensor="w").read(0, 3)


@pytest.mark.parametrize("name", [*PLAIN, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "NVFP4"])
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_blocks_too_small_for_their_scale_are_counted(either: str, name: str, dtype: str) -> None:
    """By what the gguf package makes of the bytes; ggml writes such blocks without a word, as zeros or as nonsense."""
    if name not in quants.writable_types():
        pytest.skip("ggml alone writes it")
    values = normal(4, 1024)
    values[1] *= {"MXFP4": 1e-38}.get(name, 1e-7)
    values[2, :512] = 0.0
    values[3, 256:512] *= 1e-5
    raw = stored(values, dtype)
    wide = to_float32(raw, dtype).astype(np.float64)
    source = Quantized(Memory(raw, dtype), name, tensor="w")
    back = gguf.quants.dequantize(source.read(0, 4), gguf.GGMLQuantizationType[name]).astype(np.float64)
    block = DTYPES[name].block
    a, b = wide.reshape(-1, block), back.reshape(-1, block)
    gone = (a.any(axis=1)) & (((a - b) ** 2).sum(axis=1) >= 0.9 * (a**2).sum(axis=1))
    assert source.loss.underflowed == np.count_nonzero(a[gone]) > 800 and source.loss.overflowed == 0
    again = Quantized(Memory(raw, dtype), name, tensor="w")
    for start in range(4):
        again.read(start, start + 1)
    assert again.loss == source.loss
    for sound in (normal(4, 1024), np.zeros((4, 1024), np.float32), np.ones((4, 1024), np.float32)):  # the control
        if name == "NVFP4":  # its scale cannot be smaller than 2^-9, so weights have to be larger
            sound = sound * 100
        other = Quantized(Memory(stored(sound, dtype), dtype), name, tensor="w")
        other.read(0, 4)
        assert other.loss.underflowed == 0, sound[0, :3]


@needs_ggml
def test_what_nvfp4_would_cut_off_is_refused() -> None:
    values = normal(4, 128, 100.0)
    values[2, 70] = 2689.0
    source = Quantized(Memory(values, "F32"), "NVFP4", tensor="w")
    with pytest.raises(ConvertError, match="too large for the scale") as caught:
        source.read(0, 4)
    assert caught.value.problems[0].found == {"row": 2, "count": 1, "largest": 2689.0}
    values[2, 70] = 2688.0  # the control: the largest that it holds
    back = quants.dequantize(Quantized(Memory(values, "F32"), "NVFP4", tensor="w").read(0, 4), "NVFP4")
    assert back[2, 70] == 2688.0


@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E01])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize(
    ("name", "at"), [("Q8_0", 0), ("Q4_1", 0), ("Q4_1", 2), ("Q4_K", 0), ("Q4_K", 2), ("Q6_K", 208)]
)
def test_values_of_a_damaged_scale_are_counted(either: str, name: str, at: int, dtype: str, bad: int) -> None:
    """Infinite or no number, in the block's scale or minimum: as many as the gguf package has."""
    blocks = np.ascontiguousarray(gguf.quants.quantize(normal(8, 512), gguf.GGMLQuantizationType.Q8_0))
    if name != "Q8_0":
        kind = DTYPES[name]
        blocks = np.full((8, 512 // kind.block * kind.block_bytes), 0x11, np.uint8)
    sound = Dequantized(Memory(blocks.copy(), name, (8, 512)), dtype)
    sound.read(0, 8)
    assert sound.loss.not_finite == 0  # the control
    blocks[5, at : at + 2] = np.frombuffer(np.uint16(bad).tobytes(), np.uint8)
    with np.errstate(all="ignore"):
        wide = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    source = Dequantized(Memory(blocks, name, (8, 512)), dtype)
    source.read(0, 8)
    assert source.loss.not_finite == np.count_nonzero(~np.isfinite(wide)) > 0
    assert source.loss.overflowed == 0


def test_rows_that_are_not_whole_blocks_are_the_planners_business(either: str) -> None:
    with pytest.raises(ValueError, match="Q8_0 blocks of 32"):
        Quantized(Memory(normal(4, 48), "F32"), "Q8_0", tensor="w")
    with pytest.raises(ValueError, match="no rows"):
        Quantized(Memory(np.zeros(64, np.float32), "F32"), "Q8_0", tensor="w")
    with pytest.raises(ValueError, match="I32"):
        Quantized(Memory(np.zeros((4, 64), np.int32), "I32"), "Q8_0", tensor="w")
    with pytest.raises(ValueError, match="not a block"):
        Dequantized(Memory(normal(4, 48), "F32"))


def test_types_that_cannot_be_written_say_why(either: str) -> None:
    with pytest.raises(ConvertError, match="importance matrix"):
        Quantized(Memory(normal(4, 256), "F32"), "IQ4_XS", tensor="w")
    if either == "gguf":
        assert quants.writable_types() == set(PLAIN)
        with pytest.raises(ConvertError, match="extra: quantize"):
            Quantized(Memory(normal(4, 256), "F32"), "Q4_K", tensor="w")
    else:
        assert quants.writable_types() > set(PLAIN)
