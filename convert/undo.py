"""What undoes each known fault of a conversion: views of a checkpoint, which can be run, or written.

Every function takes an opened checkpoint and gives a :class:`~convert.views.View`, or None where the fault does not
exist for this model. What applies follows from the table (which rows are rotary, norms, twins, square) and the config.
Which faults there are, and what they are called, is in :mod:`convert.faults`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from convert.config import with_rope
from convert.match import values
from convert.rope import FIELDS, Rope
from convert.source import RopePermuted, Source
from convert.transforms import Elementwise, shift, transposed
from convert.tying import same_values
from convert.views import View, view

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.layout import Key
    from convert.table import TensorRow

_OTHER = {"half": "interleaved", "interleaved": "half"}


def _rows(ckpt: Checkpoint, wanted: Callable[[TensorRow], bool]) -> Iterator[tuple[Key, TensorRow, Source]]:
    for key, source in ckpt.match.logical.items():
        row = ckpt.table.rows[key[0]]
        if wanted(row):
            yield key, row, source


def _is_key_side(row: TensorRow) -> bool:
    """Whether a rotary row is K's: the tables call it ``…k``, ``…k_bias``, ``…k_norm``."""
    return "k" in row.id.rsplit(".", 1)[1].split("_")


def permuted(ckpt: Checkpoint, *, steps: tuple[str, ...], side: str = "qk", norms: bool = True) -> View | None:
    """Rows of Q and K in another rotary order.

    Args:
        ckpt: The checkpoint.
        steps: ``right`` (from the other order into the one that the layout has) and ``other`` (the way back).
        side: ``qk``, ``q`` or ``k``.
        norms: Whether the norms over a head's rows go along.
    """
    orders = {"right": ckpt.pairing, "other": _OTHER[ckpt.pairing]}
    changed: dict[Key, Source] = {}
    for key, row, source in _rows(ckpt, lambda r: r.rope is not None):
        if ("k" if _is_key_side(row) else "q") not in side or (row.role == "norm" and not norms):
            continue
        assert row.rope is not None
        heads = int(ckpt.dims.value(row.rope, key[1]))
        turning = int(ckpt.dims.value(row.rotary, key[1])) if row.rotary is not None else None
        for step in steps:
            size = source.shape[0] // heads
            source = RopePermuted(source, head_dim=size, rotary_dim=turning, to=orders[step])
        changed[key] = source
    return view(ckpt, tensors=changed) if changed else None


def key_heads(ckpt: Checkpoint, count: int, *, back: bool = False) -> View | None:
    """K as it was before its rows were put in order as if they were ``count`` heads.

    Args:
        ckpt: The checkpoint.
        count: The wrong number of heads.
        back: The rows came from the order that the layout has, not from the other one.
    """
    right, other = ckpt.pairing, _OTHER[ckpt.pairing]
    changed: dict[Key, Source] = {}
    for key, row, source in _rows(ckpt, lambda r: r.rope is not None and r.role != "norm" and _is_key_side(r)):
        assert row.rope is not None
        heads, rows = int(ckpt.dims.value(row.rope, key[1])), source.shape[0]
        if heads == count or row.rotary is not None or rows % (2 * count):
            return None
        wrong = RopePermuted(source, head_dim=rows // count, to=right if back else other)
        changed[key] = RopePermuted(wrong, head_dim=rows // heads, to=other if back else right)
    return view(ckpt, tensors=changed) if changed else None


def wrong_head_counts(ckpt: Checkpoint) -> list[int]:
    """Head counts that converters have given K by mistake: Q's, and Q's over K's (llama.cpp, 2023)."""
    query, key = (int(ckpt.dims.get(name) or 0) for name in ("H", "K"))
    if not ckpt.table.has_rope or not key:
        return []
    return sorted({query, query // key} - {key, 0})


def swapped(ckpt: Checkpoint, *, norms: bool) -> View | None:
    """Twins (the table's ``twin``) exchanged in every layer: the norms, or the others (gate and up)."""
    changed: dict[Key, Source] = {}
    logical = ckpt.match.logical
    for key, row, source in _rows(ckpt, lambda r: r.twin is not None and (r.role == "norm") == norms):
        assert row.twin is not None
        other = (row.twin, key[1])
        if other in logical and logical[other].shape == source.shape:
            changed[key], changed[other] = logical[other], source
    return view(ckpt, tensors=changed) if changed else None


def shifted(ckpt: Checkpoint, delta: float) -> View | None:
    """Every norm weight plus ``delta``: those that the ``norm`` convention is about, or all where there is none."""
    conventional = any(row.norm for row in ckpt.table.rows.values())

    def wanted(row: TensorRow) -> bool:
        if conventional:
            return row.norm
        return row.role == "norm" and len(row.shape) == 1 and "bias" not in row.id.rsplit(".", 1)[1].split("_")

    changed = {key: shift(values(source), delta) for key, _, source in _rows(ckpt, wanted)}
    return view(ckpt, tensors=changed) if changed else None


def transposed_rows(ckpt: Checkpoint, *, row_id: str | None = None, layer: int | None = None) -> View | None:
    """Square matrices of the layers the other way round: all, those of one row, or one of them."""
    changed: dict[Key, Source] = {}
    for key in square(ckpt):
        if row_id in (None, key[0]) and layer in (None, key[1]):
            changed[key] = transposed(values(ckpt.match.logical[key]))
    return view(ckpt, tensors=changed) if changed else None


def square(ckpt: Checkpoint) -> list[Key]:
    """Matrices in the layers that have as many rows as columns, which no check of shapes can tell from transposed."""
    return [
        key
        for key, source in ckpt.match.logical.items()
        if key[1] is not None and len(source.shape) == 2 and source.shape[0] == source.shape[1] > 1
    ]


def exchanged(ckpt: Checkpoint, layer: int) -> View | None:
    """Layers ``layer`` and ``layer + 1`` in each other's place; None where they are of different kinds."""
    logical = ckpt.match.logical
    here = {row: s for (row, at), s in logical.items() if at == layer}
    there = {row: s for (row, at), s in logical.items() if at == layer + 1}
    if not here or not there or {r: s.shape for r, s in here.items()} != {r: s.shape for r, s in there.items()}:
        return None
    changed: dict[Key, Source] = {(row, layer): s for row, s in there.items()}
    changed |= {(row, layer + 1): s for row, s in here.items()}
    return view(ckpt, tensors=changed)


def embedding_scaled(ckpt: Checkpoint, *, up: bool) -> View | None:
    """The embedding (and the head, where it is the same) times √D, or divided by it; D is the model's width."""
    logical = ckpt.match.logical
    pair = ckpt.match.tied_pair()
    found = [pair[1]] if pair else [k for k, row, _ in _rows(ckpt, lambda r: r.role == "embedding")][:1]
    if not found or found[0] not in logical:
        return None
    if pair and pair[0] in logical and ckpt.tied:
        found.append(pair[0])
    root = math.sqrt(logical[found[0]].shape[1])
    factor = root if up else 1.0 / root
    return view(ckpt, tensors={key: Elementwise(values(logical[key]), lambda x: x * factor) for key in found})


def head_tied(ckpt: Checkpoint) -> View | None:
    """The embedding in place of a head that differs from it."""
    pair = ckpt.match.tied_pair()
    if pair is None or not {*pair} <= set(ckpt.match.logical) or ckpt.tied:
        return None
    head, base = (ckpt.match.logical[key] for key in pair)
    return view(ckpt, without=[pair[0]], config={"tie_word_embeddings": True}) if head.shape == base.shape else None


def head_is_embedding(ckpt: Checkpoint) -> bool:
    """Whether a head is stored that equals the embedding, in a model whose config says it has one of its own."""
    pair = ckpt.match.tied_pair()
    if (
        pair is None
        or not {*pair} <= set(ckpt.match.logical)
        or ckpt.raw_config.get("tie_word_embeddings") is not False
    ):
        return False
    head, base = (ckpt.match.logical[key] for key in pair)
    return head is not base and same_values(head, base)


def settings(ckpt: Checkpoint) -> dict[str | None, Rope]:
    """RoPE settings by kind of layer; one kind, None, where all layers turn alike."""
    found = ckpt.config.get("rope_parameters") if ckpt.table.has_rope else None
    if not found:
        return {}
    return {None: dict(found)} if "rope_type" in found else {kind: dict(one) for kind, one in found.items()}


def with_settings(ckpt: Checkpoint, kind: str | None, new: Rope) -> View | None:
    """Other RoPE settings for one kind of layer; None where they are what the config has."""
    old = settings(ckpt)
    if kind not in old or old[kind] == new:
        return None
    changed: Rope = new if kind is None else {str(k): (new if k == kind else v) for k, v in old.items()}
    config = with_rope(ckpt.config, changed)
    return view(ckpt, config={k: config[k] for k in ("rope_parameters", "rope_theta", "rope_type")})


def with_theta(ckpt: Checkpoint, theta: float, kind: str | None = None) -> View | None:
    """Another base of the rotation."""
    old = settings(ckpt).get(kind)
    return None if old is None else with_settings(ckpt, kind, {**old, "rope_theta": float(theta)})


def with_scaling(ckpt: Checkpoint, new: Rope | None, kind: str | None = None) -> View | None:
    """Another scaling of the rotation, or none; the base stays.

    Args:
        ckpt: The checkpoint.
        new: ``rope_type`` and its fields, or None for none.
        kind: Kind of layer.
    """
    old = settings(ckpt).get(kind)
    if old is None:
        return None
    fields = new or {"rope_type": "default"}
    if missing := set(FIELDS[fields["rope_type"]]) - set(fields):
        raise ValueError(f"{fields['rope_type']} scaling lacks {sorted(missing)}")
    return with_settings(ckpt, kind, {**fields, "rope_theta": old["rope_theta"]})
