"""One tensor or two: storages, checksums, bytes; a flag is never asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from convert import tying
from convert.formats.spec import TensorSpec
from convert.source import FilePool, open_source

ROWS, WIDTH = 6000, 1024


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """Three tensors one after the other: a, an equal copy, and one that differs in a single bit of one row."""
    a = np.random.default_rng(0).integers(0, 2**16, (ROWS, WIDTH), dtype=np.uint16)
    b = a.copy()
    b[2999, 17] ^= 1
    path = tmp_path_factory.mktemp("tying") / "data"
    path.write_bytes(a.tobytes() + a.tobytes() + b.tobytes())
    return path


def spec(path: Path, number: int, **changes: object) -> TensorSpec:
    size = ROWS * WIDTH * 2
    return replace(TensorSpec(f"t{number}", "BF16", (ROWS, WIDTH), path, number * size), **changes)  # type: ignore[arg-type]


def test_what_headers_tell(path):
    a, b = spec(path, 0), spec(path, 1)
    assert tying.quick(a, spec(path, 0, name="other")) is True
    assert tying.quick(a, b) is None
    assert tying.quick(a, replace(b, dtype="F16")) is False
    assert tying.quick(a, replace(b, shape=(WIDTH, ROWS))) is False
    assert tying.quick(replace(a, crc=1), replace(b, crc=2)) is False
    assert tying.quick(replace(a, crc=1), b) is None
    assert tying.quick(a, replace(a, strides=(1, ROWS))) is not True  # the same bytes, another tensor


class Counting(FilePool):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def read_into(self, path: Path, buffer: memoryview, offset: int) -> None:
        self.bytes += len(buffer)
        super().read_into(path, buffer, offset)


def test_values(path):
    pool = Counting()
    a, same, other = (open_source(spec(path, i), pool) for i in range(3))
    assert tying.same_values(a, same)
    assert pool.bytes == 2 * ROWS * WIDTH * 2  # everything was read, once
    assert not tying.same_values(a, other)  # one bit in the middle of 6 million values
    pool.close()


def test_a_sample_reads_at_most_eight_megabytes_of_each(path):
    pool = Counting()
    a, same = (open_source(spec(path, i), pool) for i in range(2))
    assert tying.same_values(a, same, sampled=True)
    assert pool.bytes <= 2 * tying.SAMPLE_BYTES
    assert pool.bytes >= tying.SAMPLE_BYTES  # and it is a real sample
    pool.close()


def test_rows_of_an_odd_number_of_bytes(tmp_path):
    a = np.random.default_rng(1).integers(0, 2**16, (5, 3), dtype=np.uint16)
    b = a.copy()
    b[4, 2] ^= 1
    path = tmp_path / "odd"
    path.write_bytes(a.tobytes() + a.tobytes() + b.tobytes())
    pool = FilePool()
    one, two, three = (open_source(TensorSpec(f"t{i}", "F16", (5, 3), path, i * 30), pool) for i in range(3))
    assert tying.same_values(one, two)
    assert not tying.same_values(one, three)
    pool.close()
