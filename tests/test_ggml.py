"""ggml's casts against numpy and torch on every kind of bit pattern, and its block types against gguf.quants."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from convert import ggml
from convert.dtypes import DTYPES

needs_ggml = pytest.mark.skipif(not ggml.available(), reason="libggml-python (extra: quantize) is not installed")


@pytest.fixture(params=["ggml", "numpy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With and without the library."""
    if request.param == "numpy":
        monkeypatch.setattr(ggml, "_loaded", None)
    elif not ggml.available():
        pytest.skip("libggml-python is not installed")
    yield request.param


def patterns() -> np.ndarray:
    """Every float32 sign, exponent and top mantissa, with low bits around each rounding boundary of float16."""
    low = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001, 0xEFFF, 0xF000, 0xFFFF])
    high = np.arange(65536, dtype=np.uint32) << np.uint32(16)
    return (high[:, None] | low.astype(np.uint32)).view(np.float32)


def test_float16_rounds_as_numpy_and_torch_do(either: str) -> None:
    torch = pytest.importorskip("torch")
    values = patterns()
    found = ggml.float32_to_float16(values).view(np.uint16)
    with np.errstate(all="ignore"):
        by_numpy = values.astype(np.float16).view(np.uint16)
    by_torch = torch.from_numpy(values).to(torch.float16).view(torch.int16).numpy().view(np.uint16)
    number = ~np.isnan(values)
    assert (found[number] == by_numpy[number]).all() and (found[number] == by_torch[number]).all()
    assert (found[number] != (values.view(np.uint32)[number] >> 16)).any()  # the control: it is not a mere shift
    nan = found[~number]
    bits = values.view(np.uint32)[~number]
    assert (nan == ((bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF))).all()


def test_no_warning_and_any_shape(either: str) -> None:
    values = np.array([[1e6, -1e6, 1e-9], [0.5, -0.0, 65519.9]], np.float32)
    with np.errstate(all="raise"):
        found = ggml.float32_to_float16(values.T)
    assert found.shape == (3, 2) and found.dtype == np.float16
    assert found.T.tolist() == [[np.inf, -np.inf, 0.0], [0.5, 0.0, 65504.0]]
    assert ggml.float32_to_float16(np.array(0.5, np.float32)).shape == ()
    assert ggml.float32_to_float16(np.zeros((0, 4), np.float32)).shape == (0, 4)
    for count in range(40):  # every tail of the vector loop
        row = np.linspace(-3, 3, count, dtype=np.float32)
        assert (ggml.float32_to_float16(row) == row.astype(np.float16)).all()


def test_float16_widens_exactly(either: str) -> None:
    values = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    found = ggml.float16_to_float32(values)
    number = ~np.isnan(values)
    assert (found[number].view(np.uint32) == values[number].astype(np.float32).view(np.uint32)).all()
    assert np.isnan(found[~number]).all()
    out = np.empty((256, 256), np.float32)
    assert ggml.float16_to_float32(values.T, out) is out
    assert (out[number.T] == values.T[number.T]).all()
    strided = np.zeros((256, 512), np.float32)[:, ::2]
    assert (ggml.float16_to_float32(values, strided)[number] == values[number]).all()
    with pytest.raises(ValueError, match="float64"):
        ggml.float16_to_float32(values, np.empty((256, 256)))  # type: ignore[arg-type]


def test_importing_loads_nothing() -> None:
    code = "import sys, convert.ggml as g; assert g._loaded is False; assert not {'libggml', 'gguf'} & set(sys.modules)"
    code += "; g.available(); assert not {'libggml', 'gguf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@needs_ggml
def test_threads_load_once_and_scale_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "_loaded", False)
    opened = []
    real = ggml._open

    def slow() -> object:
        opened.append(threading.get_ident())
        time.sleep(0.05)
        return real()

    monkeypatch.setattr(ggml, "_open", slow)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(ggml.available())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8 and len(opened) == 1


@needs_ggml
def test_type_ids_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    for name, number in ggml.TYPE_IDS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert kind.value == number
        assert gguf.GGML_QUANT_SIZES[kind] == (DTYPES[name].block, DTYPES[name].block_bytes)


@needs_ggml
@pytest.mark.parametrize("name", sorted(ggml.DEQUANTIZES))
def test_dequantised_bits_are_those_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(sum(name.encode()))
    kind = DTYPES[name]
    blocks = rng.integers(0, 256, (32, 1024 // kind.block * kind.block_bytes), dtype=np.uint8)
    found = ggml.dequantize_rows(blocks, name)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert found.shape == wanted.shape == (32, 1024)
    number = ~np.isnan(wanted)
    assert number.mean() > 0.5 and (np.isnan(found) == ~number).all()
    assert (found.view(np.uint32)[number] == wanted.view(np.uint32)[number]).all()
    blocks[3] ^= 0x10  # the control: one bit of each byte in one row is seen
    assert not np.array_equal(ggml.dequantize_rows(blocks, name), found, equal_nan=True)


@needs_ggml
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"])
def test_quantised_bytes_are_those_of_the_gguf_package(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((64, 1024)) * 0.2).astype(np.float32)
    values[0, :256] = 0
    found = ggml.quantize_rows(values, name)
    with np.errstate(all="ignore"):
        wanted = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
    assert found.tobytes() == wanted.tobytes()
    assert ggml.quantize_rows(values + np.float32(0.01), name).tobytes() != found.tobytes()


@needs_ggml
@pytest.mark.parametrize(
    ("name", "error"),
    [("Q2_K", 0.31), ("Q3_K", 0.16), ("Q4_K", 0.075), ("Q5_K", 0.038), ("Q6_K", 0.019), ("NVFP4", 0.1)],
)
def test_types_only_ggml_writes_come_back_within_their_error(name: str, error: float) -> None:
    """Relative root mean square error on normal values; half of it would be too good to be this type."""
    gguf = pytest.importorskip("gguf")
    values = np.random.default_rng(2).standard_normal((64, 1024)).astype(np.float32)
    back = gguf.quants.dequantize(ggml.quantize_rows(values, name), gguf.GGMLQuantizationType[name])
    found = float(np.sqrt(((back - values) ** 2).mean()))
    assert error / 2 < found < error


@needs_ggml
def test_what_would_end_the_process_is_refused() -> None:
    values = np.zeros((2, 48), np.float32)
    with pytest.raises(ValueError, match="multiples of 32"):
        ggml.quantize_rows(values, "Q8_0")
    with pytest.raises(ValueError, match="importance"):
        ggml.quantize_rows(np.zeros((1, 256), np.float32), "IQ2_XS")
    with pytest.raises(ValueError, match="whole blocks"):
        ggml.dequantize_rows(np.zeros((1, 33), np.uint8), "Q8_0")
    with pytest.raises(ValueError, match="does not read"):
        ggml.dequantize_rows(np.zeros((1, 40), np.uint8), "Q8_1")
    with pytest.raises(ValueError, match="buffer"):
        ggml.quantize_rows(np.zeros((1, 64), np.float32), "Q8_0", out=np.empty((1, 34), np.uint8))
    with pytest.raises(ValueError, match="same number"):
        ggml.quantize_q8_0_simd(np.zeros(64, np.float32), out=np.empty(34, np.uint8))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "_loaded", None)
    assert not ggml.available()
    with pytest.raises(RuntimeError, match="quantize"):
        ggml.quantize_rows(np.zeros((1, 32), np.float32), "Q8_0")
