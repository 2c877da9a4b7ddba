"""Lazy tensors, a block at a time, against torch's views of the same file; any cut into blocks gives the same."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from convert import source as sources
from convert.errors import FormatError
from convert.formats.spec import TensorSpec
from convert.source import Cast, FilePool, FileSource, Joined, RopePermuted, Rows, Source, StridedSource, open_source

ROWS, COLUMNS = 48, 20


@pytest.fixture
def pool():
    found = FilePool()
    yield found
    found.close()


@pytest.fixture(scope="module")
def data() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS * 3, dtype=torch.float32) * 0.37 - 100


@pytest.fixture(scope="module")
def file(data, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "data"
    path.write_bytes(b"head" + data.numpy().tobytes())
    return path


def stored(file: Path, view: torch.Tensor, **changes: object) -> TensorSpec:
    """The spec of a view of the whole file's values."""
    strides = None if view.is_contiguous() else tuple(view.stride())
    return TensorSpec("t", "F32", tuple(view.shape), file, 4 + view.storage_offset() * 4, strides, **changes)  # type: ignore[arg-type]


def cuts(rows: int, align: int = 1) -> list[list[int]]:
    """Ways to cut rows into blocks."""
    steps = [align, 3 * align, 7 * align, rows]
    ways = [[*range(0, rows, step), rows] for step in steps]
    return [*ways, sorted({0, align, rows})] if align < rows else ways


def check(found: Source, wanted: torch.Tensor) -> None:
    """Every cut gives the same values as torch's tensor."""
    assert found.shape == tuple(wanted.shape)
    for way in cuts(found.shape[0], found.align):
        blocks = [found.read(a, b) for a, b in itertools.pairwise(way)]
        assert all(b.shape == (way[i + 1] - way[i], *found.shape[1:]) for i, b in enumerate(blocks))
        assert np.array_equal(np.concatenate(blocks), wanted.numpy()), way


def views(data: torch.Tensor) -> dict[str, torch.Tensor]:
    matrix = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    cube = data.view(3, ROWS, COLUMNS)
    return {
        "contiguous": matrix,
        "vector": data[5:50],
        "transposed": matrix.T,
        "columns": matrix[:, 3:9],
        "every other row": matrix[1::2],
        "every third column": matrix[:, ::3],
        "one row": matrix[7:8],
        "cube": cube,
        "permuted": cube.permute(2, 0, 1),
        "strided vector": matrix[:, 4],
        "expanded": matrix[:, :1].expand(ROWS, 6),
        "expanded rows": matrix[:1].expand(5, COLUMNS),
        "no columns": matrix[:, :0],
    }


@pytest.mark.parametrize("limit", [0, 500, 64 << 20])
@pytest.mark.parametrize("name", list(views(torch.zeros(ROWS * COLUMNS * 3))))
def test_a_stored_view_is_torchs(data, file, pool, monkeypatch, name, limit):
    """With every bound on how much is read at once: from whole spans to single runs."""
    monkeypatch.setattr(sources, "WHOLE_TENSOR_LIMIT", limit)
    view = views(data)[name]
    found = open_source(stored(file, view), pool)
    assert isinstance(found, FileSource if view.is_contiguous() else StridedSource)
    check(found, view)
    if view.is_contiguous():
        path, offset, count = found.extent(0, view.shape[0])  # type: ignore[misc]
        assert path == file
        assert file.read_bytes()[offset : offset + count] == view.numpy().tobytes()
    else:
        assert found.extent(0, 1) is None


def test_runs_read_little_more_than_they_give(data, file, monkeypatch):
    """A column slice of a tensor too large to be taken at once does not read the columns between."""

    class Counting(FilePool):
        bytes = 0

        def read_into(self, path, buffer, offset):
            self.bytes += len(buffer)
            super().read_into(path, buffer, offset)

    monkeypatch.setattr(sources, "WHOLE_TENSOR_LIMIT", 0)
    view = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)[:, 3:9]
    pool = Counting()
    open_source(stored(file, view), pool).read(0, ROWS)
    assert pool.bytes == view.numel() * 4
    pool.close()


def test_scalars_and_empty_tensors(data, file, pool):
    assert open_source(TensorSpec("s", "F32", (), file, 4), pool).read(0, 1).tolist() == [-100.0]
    assert open_source(TensorSpec("s", "F32", (), file, 4, ()), pool).read(0, 1).tolist() == [-100.0]
    assert open_source(TensorSpec("e", "F32", (0, 4), file, 4), pool).read(0, 0).shape == (0, 4)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_joined(data, file, pool, axis, strided):
    whole = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    # As Meta's files do it: parts lie elsewhere; here their values are views of one storage.
    parts = [whole.narrow(axis, a, n) for a, n in ((0, 8), (8, 4), (12, 8))]
    if axis == 0 and strided:
        parts = [p[:, ::2] for p in parts]
    found = Joined([open_source(stored(file, p), pool) for p in parts], axis)
    check(found, torch.cat(parts, axis))
    if axis == 0 and not strided:
        assert found.extent(8, 12) == (file, 4 + 8 * COLUMNS * 4, 4 * COLUMNS * 4)
    assert found.extent(7, 9) is None  # across two parts
    assert found.whole == any(p.whole for p in found.parts)


def test_rows(data, file, pool):
    whole = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    found = Rows(open_source(stored(file, whole), pool), 5, 33)
    check(found, whole[5:33])
    assert found.extent(0, 2) == (file, 4 + 5 * COLUMNS * 4, 2 * COLUMNS * 4)
    check(Rows(Rows(open_source(stored(file, whole), pool), 5, 33), 3, 10), whole[8:15])


def half_to_interleaved(rows: torch.Tensor, head_dim: int, rotary: int) -> torch.Tensor:
    """torch's own words for it: (2, r/2) seen as (r/2, 2), head by head; the rest of a head stays."""
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    turned = heads[:, :rotary].unflatten(1, (2, rotary // 2)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, rotary:]], 1).flatten(0, 1)


@pytest.mark.parametrize("kind", ["matrix", "bias", "strided"])
@pytest.mark.parametrize(("head_dim", "rotary"), [(6, 6), (8, 8), (16, 16), (8, 4), (16, 6), (6, 2)])
def test_rotary_rows(data, file, pool, head_dim, rotary, kind):
    whole = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    rows = {"matrix": whole, "bias": data[:ROWS], "strided": whole[:, ::3]}[kind]
    source = open_source(stored(file, rows), pool)
    there = RopePermuted(source, head_dim=head_dim, rotary_dim=rotary, to="interleaved")
    assert there.align == head_dim and there.extent(0, head_dim) is None
    wanted = half_to_interleaved(rows, head_dim, rotary)
    check(there, wanted)
    check(RopePermuted(there, head_dim=head_dim, rotary_dim=rotary, to="half"), rows)
    back = RopePermuted(source, head_dim=head_dim, rotary_dim=rotary, to="half")
    check(RopePermuted(back, head_dim=head_dim, rotary_dim=rotary, to="interleaved"), rows)
    # the control: neither direction is nothing, and they are not each other
    assert rotary == 2 or not torch.equal(wanted, rows)
    assert rotary <= 4 or not np.array_equal(back.read(0, ROWS), wanted.numpy())


def test_rotary_rows_must_be_whole_heads(data, file, pool):
    source = open_source(stored(file, data[:ROWS]), pool)
    with pytest.raises(ValueError, match="48 rows are not whole heads of 10"):
        RopePermuted(source, head_dim=10, to="half")


def test_scattered_rows_are_taken_whole_through_every_composition(data, file, pool):
    """Rows of a transposed matrix are spread over the file: whatever stands in front of them must not read singly."""
    source = open_source(stored(file, data[: ROWS * COLUMNS].view(COLUMNS, ROWS).T), pool)
    assert source.whole
    for composed in (
        RopePermuted(source, head_dim=8, to="half"),
        Rows(source, 0, 8),
        Cast(source, "F16"),
        Joined([source, source], 0),
        Cast(RopePermuted(source, head_dim=8, to="half"), "F16"),
    ):
        assert composed.whole, composed


@pytest.mark.parametrize("start", [0, 4, 8, 12])
def test_rows_of_aligned_rows(data, file, pool, start):
    """A slice that does not begin at a head, or that ends within one, still gives the right rows."""
    whole = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    permuted = RopePermuted(open_source(stored(file, whole), pool), head_dim=8, to="interleaved")
    wanted = half_to_interleaved(whole, 8, 8)
    for stop in (start + 4, start + 8, start + 20):
        check(Rows(permuted, start, stop), wanted[start:stop])


def test_joined_with_parts_that_are_aligned_differently(data, file, pool):
    whole = data[: ROWS * COLUMNS].view(ROWS, COLUMNS)
    a = RopePermuted(open_source(stored(file, whole[:24]), pool), head_dim=8, to="interleaved")
    b = RopePermuted(open_source(stored(file, whole[24:42]), pool), head_dim=6, to="interleaved")
    c = open_source(stored(file, whole[42:43]), pool)
    wanted = torch.cat([half_to_interleaved(whole[:24], 8, 8), half_to_interleaved(whole[24:42], 6, 6), whole[42:43]])
    check(Joined([a, b, c], 0), wanted)


def test_cast_counts_each_block_once(file, pool, data):
    source = open_source(stored(file, data[: ROWS * COLUMNS].view(ROWS, COLUMNS)), pool)
    narrow = Cast(source, "BF16")
    found = narrow.read(0, ROWS)
    assert found.dtype == np.uint16 and narrow.row_bytes == COLUMNS * 2
    assert np.array_equal(
        found, data[: ROWS * COLUMNS].view(ROWS, COLUMNS).bfloat16().view(torch.int16).numpy().view(np.uint16)
    )
    assert narrow.loss.overflowed == 0
    huge = file.with_name("huge")
    huge.write_bytes(np.array([[1e38, 1.0], [70000.0, 1e-30]], np.float32).tobytes())
    narrow = Cast(open_source(TensorSpec("h", "F32", (2, 2), huge, 0), pool), "F16")
    narrow.read(0, 1)
    narrow.read(1, 2)
    assert (narrow.loss.overflowed, narrow.loss.underflowed) == (2, 1)


def test_a_file_that_ends_early_says_so(tmp_path, pool):
    path = tmp_path / "short.safetensors"
    path.write_bytes(bytes(100))
    for spec in (TensorSpec("t", "F32", (5, 6), path, 0), TensorSpec("t", "F32", (6, 5), path, 0, (1, 6))):
        with pytest.raises(FormatError, match=r"short\.safetensors ended while it was being read"):
            open_source(spec, pool).read(0, spec.shape[0])
    good = TensorSpec("t", "F32", (5, 5), path, 0)
    assert not open_source(good, pool).read(0, 5).any()


def test_a_pool_opens_a_file_once_and_closes_it(file):
    pool = FilePool()
    fd = pool.fd(file)
    assert pool.fd(file) == fd
    pool.close()
    with pytest.raises(OSError):
        os.fstat(fd)
    assert os.fstat(pool.fd(file)).st_size  # and it opens again when it is needed
    pool.close()
