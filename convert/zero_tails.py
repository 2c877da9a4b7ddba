"""Weight files that end in zeros: most likely a download that was given its size first and did not finish.

Such a file has the right size and a sound header, so nothing else notices without reading all of it. Here the last
4 KiB of each file's data are read; only where they are zeros is more read, backwards tensor by tensor, to tell from
where on. That is a sample: zeros in the middle of a file are :mod:`convert.scan`'s to find. Nothing is fetched for it:
files on the Hub are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec
from convert.source import FilePool

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Bytes of one look.
_BLOCK = 4096
#: Looks at a tensor that may be all zeros, and at one that begins with something else: between two of these is the end.
_FEW, _MANY = 4, 32
#: A tail inside one matrix that is no longer than this may be padding.
_LONGEST_PADDING = 64 << 10
#: Bytes at the end of a row that may be zero by chance.
_CHANCE = 16


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies in its file, what it is called, and its dimensions."""

    start: int
    stop: int
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Tail:
    """Zeros up to the end of a file's data: from which byte, and the tensors that they reach, in file order.

    ``inside`` is the first of ``tensors`` where only its end is zeros.
    """

    start: int
    tensors: list[_Stored]
    inside: _Stored | None

    @property
    def nbytes(self) -> int:
        return self.tensors[-1].stop - self.start


def zero_tails(checkpoint: Checkpoint) -> list[Problem]:
    """Files of a checkpoint whose data end in more zeros than a model has for a reason.

    What is let pass: zeros in one matrix as a whole (a fresh head), with any number of vectors (fresh biases); rows of
    zeros at the end of a vocabulary (padding); and up to 64 KiB at the end of any one matrix.

    Args:
        checkpoint: Opened; its tensors need not fit its family.

    Returns:
        One problem of kind ``zero_tail`` per file; none for files that cannot be read, which others will say.
    """
    if not checkpoint.pool.local:
        return []
    rows = checkpoint.config.get("vocab_size")
    out = []
    for path, tensors in _suspects(checkpoint).items():
        try:
            tail = _tail(checkpoint.pool, path, sorted(tensors, key=lambda t: (t.start, t.stop)))
        except ConvertError:
            continue
        if tail is not None and _is_odd(tail, rows if isinstance(rows, int) else 0):
            out.append(_problem(path, tail))
    return out


def zero_tail_notes(checkpoint: Checkpoint) -> list[str]:
    """The same as warnings, for what goes on all the same."""
    return [f"WARNING: {p.message} {p.hint}" for p in zero_tails(checkpoint)]


def _suspects(checkpoint: Checkpoint) -> dict[Path, set[_Stored]]:
    """The files whose last tensor ends in zeros, with all their tensors: one look at each file, hardly more time."""
    last: dict[Path, tuple[str, TensorSpec]] = {}
    for name, specs in checkpoint.tensors.items():
        for spec in _pieces(specs):
            seen = last.get(spec.file)
            if (seen is None or spec.offset >= seen[1].offset) and 0 not in spec.shape:
                last[spec.file] = (name, spec)
    found: dict[Path, set[_Stored]] = {}
    for path, (name, spec) in last.items():
        tensor = _stored(name, spec)
        try:
            if _is_zero(checkpoint.pool, path, tensor.stop - _BLOCK, tensor):
                found[path] = set()
        except ConvertError:
            continue
    for name, specs in checkpoint.tensors.items() if found else ():
        for spec in _pieces(specs):
            if spec.file in found and 0 not in spec.shape:
                found[spec.file].add(_stored(name, spec))
    return found


def _stored(name: str, spec: TensorSpec) -> _Stored:
    return _Stored(spec.offset, spec.offset + _extent(spec), name, spec.shape)


def _pieces(specs: Iterable[TensorSpec]) -> Iterator[TensorSpec]:
    for spec in specs:
        yield from _pieces(spec.parts) if spec.parts else (spec,)


def _extent(spec: TensorSpec) -> int:
    """Bytes from a tensor's first element to its last."""
    if spec.strides is None:
        return spec.nbytes
    last = sum((size - 1) * abs(stride) for size, stride in zip(spec.shape, spec.strides, strict=True))
    return spec.type.nbytes((last + 1,))


def _tail(pool: FilePool, path: Path, tensors: list[_Stored]) -> _Tail | None:
    """The zeros at the end; None where there are none."""
    zeros: list[_Stored] = []
    for tensor in reversed(tensors):
        if not _is_zero(pool, path, tensor.stop - _BLOCK, tensor):
            break  # the usual case: the first look
        places = _spread(tensor, _FEW)
        if all(_is_zero(pool, path, at, tensor) for at in places):
            zeros.insert(0, tensor)
            continue
        start = _first_zero(pool, path, tensor)
        return _Tail(start, [tensor, *zeros], tensor)
    return _Tail(zeros[0].start, zeros, None) if zeros else None


def _spread(tensor: _Stored, count: int) -> list[int]:
    """Places over a tensor, its first and last block among them."""
    room = max(0, tensor.stop - tensor.start - _BLOCK)
    return list(dict.fromkeys(tensor.start + room * i // (count - 1) for i in range(count)))


def _read(pool: FilePool, path: Path, at: int, tensor: _Stored) -> bytes:
    """One block of a tensor, or what there is of it."""
    at = max(at, tensor.start)
    block = bytearray(min(_BLOCK, tensor.stop - at))
    pool.read_into(path, memoryview(block), at)
    return bytes(block)


def _is_zero(pool: FilePool, path: Path, at: int, tensor: _Stored) -> bool:
    return not any(_read(pool, path, at, tensor))


def _first_zero(pool: FilePool, path: Path, tensor: _Stored) -> int:
    """The byte after the last that is not zero, as far as samples tell: the tensor's last block is zeros."""
    places = _spread(tensor, _MANY)
    filled = [i for i, at in enumerate(places) if not _is_zero(pool, path, at, tensor)]
    if not filled:
        return tensor.start  # something between: cannot be told from zeros by this many looks
    low, high = places[filled[-1]], places[min(filled[-1] + 1, len(places) - 1)]
    while high - low > _BLOCK:
        middle = (low + high) // 2
        if _is_zero(pool, path, middle, tensor):
            high = middle
        else:
            low = middle
    last = low
    for at in (low, low + _BLOCK):  # the block that is filled last, and the one after, which may begin filled
        if at < tensor.stop and (kept := _read(pool, path, at, tensor).rstrip(b"\0")):
            last = max(at, tensor.start) + len(kept)
    return last


def _is_odd(tail: _Tail, rows: int) -> bool:
    """Whether a model would hardly have these zeros."""
    matrices = {t.start for t in tail.tensors if len(t.shape) > 1}
    if len(matrices) > 1:
        return True
    inside = tail.inside
    return (
        inside is not None
        and len(inside.shape) > 1
        and tail.nbytes > _LONGEST_PADDING
        and not _is_padding(tail.start, inside, rows)
    )


def _is_padding(start: int, tensor: _Stored, rows: int) -> bool:
    """Whether whole rows of a vocabulary, or of a part of it, are zeros from here on."""
    if rows % tensor.shape[0] or rows // tensor.shape[0] not in (1, 2, 4, 8, 16):
        return False
    row = (tensor.stop - tensor.start) // tensor.shape[0]
    return -(start - tensor.start) % row <= _CHANCE


def _problem(path: Path, tail: _Tail) -> Problem:
    first = tail.tensors[0]
    where = f"inside {first.name}" if tail.inside else f"where {first.name} begins"
    count = len({t.name for t in tail.tensors})
    reach = f"{count} tensors" if count > 1 else "1 tensor"
    return Problem(
        "zero_tail",
        f"{path.name} holds only zeros from about byte {tail.start:,} on ({where}) to the end of its data: "
        f"{tail.nbytes:,} bytes, {reach}. A download that was given its size first and did not finish?",
        tensor=first.name,
        file=str(path),
        found=tail.start,
        hint=f"Fetch {path.name} again, or compare it with a published hash (convert validate --hash, or --checksums "
        "FILE).",
    )
