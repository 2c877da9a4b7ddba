"""Key/value heads that a Meta checkpoint stores several times, because it has more files than heads.

Meta's Llama 3.1 405B in 16 files repeats each of its 8 key/value heads, side by side, and says ``n_kv_heads: 16``. As
it stands that is a valid, larger model; the copies are dropped only if every one of them is bit-equal, in every layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from convert.errors import Problem
from convert.shapes import primary_key
from convert.source import Array, Joined, Source

if TYPE_CHECKING:
    from convert.match import Match

#: Bytes of a tensor that are compared, three times, to tell two files apart.
_SAMPLE_BYTES = 4096


class EveryNth(Source):
    """Every ``step``-th head of a source of whole heads."""

    def __init__(self, source: Source, *, head_dim: int, step: int) -> None:
        self.source = source
        self.head_dim = head_dim
        self.step = step
        self.shape = (source.shape[0] // step, *source.shape[1:])
        self.dtype = source.dtype
        self.align = head_dim

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.source.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`; ``start`` and ``stop`` are multiples of ``head_dim``."""
        heads = range(start // self.head_dim, stop // self.head_dim)
        rows = [h * self.step * self.head_dim for h in heads]
        return np.concatenate([self.source.read(r, r + self.head_dim) for r in rows])


def collapse(match: Match) -> int:
    """Drop repeated key/value heads of a Meta source from ``match`` and its checkpoint's config.

    Returns:
        How often each head was stored (1: nothing was repeated).
    """
    checkpoint = match.checkpoint
    files = len(checkpoint.files)
    match.problems += repeated_files(match)
    if match.problems:
        return 1
    heads, head_dim = int(checkpoint.dims["K"]), int(checkpoint.dims["hd"])
    # Heads are repeated only where there were more files than heads, so that each file has exactly one.
    if checkpoint.layout != "meta" or files < 2 or heads != files:
        return 1
    keys = [k for k in match.logical if _is_kv(match, k[0])]
    step = 1
    few = checkpoint.only_samples
    while heads % (step * 2) == 0 and all(_repeats(match.logical[k], head_dim, step * 2, few=few) for k in keys):
        step *= 2
    if step == 1:
        return 1
    for key in keys:
        match.logical[key] = EveryNth(match.logical[key], head_dim=head_dim, step=step)
    name = primary_key(checkpoint.table, "K")
    assert name is not None
    checkpoint.config[name] = heads // step
    equal = "equal in their first and last rows" if few else "bit-equal"
    match.notes.append(
        f"each of the {heads // step} key/value heads is stored {step} times, {equal}, for {files} files; "
        "the copies are dropped"
    )
    return step


def repeated_files(match: Match) -> list[Problem]:
    """Model-parallel files that hold the part of another: a file copied or downloaded twice under two names.

    Joined, they would give a model of the right shapes. Blocks of the embedding and of one layer's matrices are
    compared; heads that are stored several times on purpose do not count, nor do zeros.
    """
    parts = [
        source.parts
        for (row_id, layer), source in match.logical.items()
        if isinstance(source, Joined) and layer in (None, 0) and not _is_kv(match, row_id)
    ]
    if not parts or match.checkpoint.layout != "meta":
        return []
    seen: dict[tuple[bytes, ...], str] = {}
    problems = []
    for number, file in enumerate(match.checkpoint.files):
        sample = tuple(_sample(p[number]) for p in parts if len(p) == len(match.checkpoint.files))
        first = seen.setdefault(sample, file.name)
        if first != file.name and any(any(block) for block in sample):
            problems.append(
                Problem(
                    "repeated_file",
                    f"{file.name} holds the same weights as {first}, where every file should hold a part of its own.",
                    file=str(file),
                    found=first,
                    wanted="another part",
                    hint="A file copied or downloaded twice? Fetch it again.",
                )
            )
    return problems


def _sample(source: Source) -> bytes:
    """A few rows from the beginning, the middle and the end."""
    rows = source.shape[0]
    count = max(1, min(rows, _SAMPLE_BYTES // max(1, source.row_bytes)))
    return b"".join(source.read(r, r + count).tobytes() for r in sorted({0, (rows - count) // 2, rows - count}))


def _is_kv(match: Match, row_id: str) -> bool:
    return match.checkpoint.table.rows[row_id].shape[0].text == "K*hd"


def _repeats(source: Source, head_dim: int, step: int, *, few: bool) -> bool:
    """Whether each group of ``step`` heads holds one head ``step`` times; with ``few`` by first and last rows alone."""
    rows = ((0, 1), (head_dim - 1, head_dim)) if few else ((0, head_dim),)
    for start in range(0, source.shape[0], head_dim * step):
        first = [source.read(start + a, start + b).tobytes() for a, b in rows]
        for copy in range(1, step):
            at = start + copy * head_dim
            if any(source.read(at + a, at + b).tobytes() != x for (a, b), x in zip(rows, first, strict=True)):
                return False
    return True
