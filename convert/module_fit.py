"""Whether a checkpoint fits a live module: every tensor of both sides paired, or a finding. Nothing is filled here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from convert import rope
from convert.checkpoint import Checkpoint
from convert.errors import ConvertError, Problem
from convert.layout import Dims, Slot, expand
from convert.module_tensors import FLOATS, Home, config_of, distinct, homes, hub_config, with_layout
from convert.shapes import primary_key
from convert.table import MappingTable

_META_HINT = (
    "Build the module under `with convert.no_init():` instead of torch.device('meta'): what the class computes is real "
    "then. A buffer that it computes from a parameter must be set by hand."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A tensor of the module's layout, and the module's memory for it."""

    slot: Slot
    home: Home


@dataclass(slots=True)
class Fit:
    """The outcome.

    Attributes:
        checkpoint: One side.
        table: The table with the module's names.
        layout: The layout of the module's names.
        homes: The module's tensors by those names.
        pairs: What gets filled.
        head: The pair of the tied tensor (the head), if the module has it.
        base: The pair of what it is tied to (the embedding).
        tied: Whether the two are one in the checkpoint; known after :meth:`check_tie`.
        problems: What forbids filling, beyond what is wrong with the checkpoint itself (``checkpoint.match.problems``).
        missing: Parameters of the module that the checkpoint has nothing for.
        unexpected: Tensors of the checkpoint that have no place.
        notes: Remarks.
        warnings: What makes a filled module wrong without any tensor telling so.
    """

    checkpoint: Checkpoint
    table: MappingTable
    layout: str
    homes: dict[str, Home]
    pairs: list[Pair] = field(default_factory=list)
    head: Pair | None = None
    base: Pair | None = None
    tied: bool = False
    problems: list[Problem] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def check_tie(self) -> None:
        """Find out whether head and embedding are one (may read both), and whether the module can hold that."""
        if self.checkpoint.match.problems or self.problems:
            return
        self.tied = self.checkpoint.match.tied(sampled=False)
        together = self.head is not None and self.base is not None and self.head.home is self.base.home
        if together and not self.tied:
            assert self.head is not None and self.base is not None
            self.problems.append(
                Problem(
                    "tied_module",
                    f"{self.head.slot.name!r} and {self.base.slot.name!r} are one parameter of the module, but two "
                    "different tensors of the checkpoint.",
                    tensor=self.head.slot.name,
                    hint="Build the module with a head of its own.",
                )
            )


def fit(
    ckpt: Checkpoint,
    model: nn.Module,
    *,
    layout: str | None = None,
    names: str | Path | None = None,
    strict: bool = True,
    dtype: torch.dtype | None = None,
) -> Fit:
    """Pair the tensors of a checkpoint with those of a module; reads no weights, but a head that the module lacks.

    Args:
        ckpt: The opened checkpoint.
        model: The module.
        layout: Layout of the module's names, where it shall not be detected.
        names: A names file for a module with names of its own.
        strict: Whether missing and unexpected tensors are problems.
        dtype: The type that parameters will get, instead of their own.

    Raises:
        UsageError: ``names`` does not go with ``layout`` or the checkpoint.
        ConvertError: No table knows the module's names, or the config lacks what the table needs.
    """
    table, found_layout, named = with_layout(homes(model), layout=layout, names=names, family=ckpt.family)
    out = Fit(ckpt, table, found_layout, named)
    raw = config_of(model)
    hub = _own_config(out, raw)
    if hub is not None:
        _check_heads(out, hub)
    _pair(out, strict, dtype)
    _check_shared(out)
    _left(out, strict)
    # A config that does not mention RoPE says nothing of it; the class may have its numbers elsewhere.
    _check_rope(out, hub if raw and any("rope" in key for key in raw) else None)
    return out


def _own_config(out: Fit, raw: dict[str, Any] | None) -> dict[str, Any] | None:
    if raw is None:
        return None
    try:
        return hub_config(out.table, raw)[0]
    except ConvertError as error:  # the module may be of a kind that has more settings than its family's table
        out.notes.append(f"the module's own config was not compared: {error.problems[0].message}")
        return None


def _pair(out: Fit, strict: bool, dtype: torch.dtype | None) -> None:
    matched = out.checkpoint.match
    tie = matched.tied_pair()
    broken = {p.tensor for p in matched.problems}
    for slot in expand(out.table, Dims(out.table, out.checkpoint.config), out.layout, out.homes).values():
        home = out.homes.get(slot.name)
        replaceable = all(out.table.rows[k[0]].copy for k in slot.keys)  # nothing computes with these
        absent = [k for k in slot.keys if k not in matched.logical and not replaceable]
        from_base = tie is not None and slot.keys == (tie[0],) and tie[1] in matched.logical
        if home is None and replaceable:
            continue
        if home is None:
            _without_place(out, slot, strict, headless=from_base)
            continue
        pair = Pair(slot, home)
        if tuple(home.tensor.shape) != slot.shape:
            out.problems.append(_shape_problem(slot, home))
        elif dtype is None and home.dtype not in FLOATS:
            out.problems.append(
                Problem(
                    "dtype",
                    f"{slot.name!r} of the module is {home.dtype}, which holds no plain weights.",
                    tensor=slot.name,
                    found=home.dtype,
                    wanted=list(FLOATS),
                    hint="Fill the module before it is quantised.",
                )
            )
        elif absent and not from_base:
            if not broken:  # else the checkpoint's own problem says what is missing
                out.missing.append(slot.name)
            continue
        if tie and slot.keys == (tie[0],):
            out.head = pair
        elif tie and slot.keys == (tie[1],):
            out.base = pair
        out.pairs.append(pair)


def _without_place(out: Fit, slot: Slot, strict: bool, *, headless: bool) -> None:
    """A tensor that the module does not have; a module that computes its logits with the embedding needs no head."""
    matched = out.checkpoint.match
    stored = [matched.specs[k][0].name for k in slot.keys if k in matched.specs]
    if headless and matched.tied(sampled=False):
        return
    if not stored:
        return
    out.unexpected += stored
    if strict:
        like = ".".join(
            "*" if part.isdecimal() else part for part in slot.name.split(".")
        )  # one finding for all layers
        where = "" if slot.name == stored[0] else f", which has no {like!r}"
        out.problems.append(
            Problem(
                "unexpected_tensor",
                f"{stored[0]!r} has no place in the module{where}.",
                tensor=stored[0],
                found=list(slot.shape),
                hint="The module was built for another config or layout; strict=False leaves such tensors out.",
            )
        )


def _shape_problem(slot: Slot, home: Home) -> Problem:
    have = list(home.tensor.shape)
    return Problem(
        "shape",
        f"{slot.name!r} of the module is {have}, but the checkpoint's is {list(slot.shape)} {slot.why}.",
        tensor=slot.name,
        found=have,
        wanted=list(slot.shape),
        hint="Build the module with the checkpoint's config.",
    )


def _check_shared(out: Fit) -> None:
    """One piece of memory cannot hold two tensors, unless they are the head and the embedding."""
    first: dict[int, Pair] = {}
    for pair in out.pairs:
        other = first.setdefault(id(pair.home), pair)
        if other is not pair and {id(other), id(pair)} != {id(out.head), id(out.base)}:
            out.problems.append(
                Problem(
                    "shared_parameter",
                    f"{pair.slot.name!r} and {other.slot.name!r} are one parameter of the module, and the checkpoint "
                    "has a tensor for each.",
                    tensor=pair.slot.name,
                    hint="Build the module without sharing them.",
                )
            )


def _left(out: Fit, strict: bool) -> None:
    """What of the module gets nothing: parameters are missing, buffers are kept, and nothing may stay on meta."""
    used = {id(pair.home) for pair in out.pairs} | {id(out.homes[n]) for n in out.missing}
    for home in distinct(out.homes.values()):
        if id(home) in used:
            continue
        if home.parameter:
            out.missing.append(home.names[0])
        elif home.tensor.is_meta:
            out.problems.append(
                Problem(
                    "meta_buffer",
                    f"the buffer {home.names[0]!r} is on meta and no checkpoint holds it, so its values would be lost.",
                    tensor=home.names[0],
                    found="meta",
                    hint=_META_HINT,
                )
            )
    by_name = {n: home for home in out.homes.values() for n in home.names} | out.homes
    for name in out.missing:
        empty = by_name[name].tensor.is_meta
        if strict or empty:
            out.problems.append(
                Problem(
                    "missing_tensor",
                    f"the checkpoint has nothing for {name!r} of the module {list(by_name[name].tensor.shape)}"
                    + (", which is on meta and would stay without values." if empty else "."),
                    tensor=name,
                    found=None,
                    wanted=list(by_name[name].tensor.shape),
                    hint="A module for another config, or parameters of its own"
                    + (": give those values first." if empty else "; strict=False leaves them as they are."),
                )
            )


def _check_heads(out: Fit, hub: Mapping[str, Any]) -> None:
    """Head counts do not follow from shapes: a module with other ones would be filled, and wrong."""
    counts = {row.rope.text for row in out.table.rows.values() if row.rope is not None}
    for dim in sorted(counts):
        key = primary_key(out.table, dim)
        built, stored = (hub.get(key), out.checkpoint.dims.get(dim)) if key else (None, None)
        # A config that does not state the count says nothing, whatever the family's default is.
        if built is not None and stored is not None and int(built) != int(stored):
            out.problems.append(
                Problem(
                    "config",
                    f"the module was built with {built} heads where the checkpoint has {stored} ({key}).",
                    found=int(built),
                    wanted=int(stored),
                    hint="Build the module with the checkpoint's config.",
                )
            )


def _check_rope(out: Fit, hub: Mapping[str, Any] | None) -> None:
    """The rotary tables are computed by the class, so a wrong base never shows as a wrong tensor."""
    config = out.checkpoint.config
    stated = config.get("rope_parameters")
    if stated is None:
        return
    if hub is not None and hub["rope_parameters"] != stated:
        out.warnings.append(
            f"the module was built with RoPE {dict(hub['rope_parameters'])}, the checkpoint is for {dict(stated)}"
        )
        return
    for name, home in out.homes.items():
        tensor = home.tensor
        if home.parameter or tensor.is_meta or name.rsplit(".", 1)[-1] != "cos" or tensor.ndim != 2 or len(tensor) < 2:
            continue
        row = min(len(tensor) - 1, 1024)  # far enough to tell, near enough for float32 angles
        found = tensor[row].detach().float().cpu()
        same = _cosines(out, stated, row)
        if not any(s.shape == found.shape and torch.allclose(s, found, rtol=0, atol=2e-2) for s in same):
            out.warnings.append(
                f"{name!r} of the module does not agree with the checkpoint's RoPE {dict(stated)}: it was built with "
                "another base or scaling, and will not compute what the checkpoint was made for"
            )
        return


def _cosines(out: Fit, stated: Mapping[str, Any], position: int) -> list[torch.Tensor]:
    """A row of a cosine table, for each kind of layer, in each order that classes keep it in."""
    told = out.checkpoint.table.rope
    kinds = [(settings, told[kind].head_dim) for kind, settings in stated.items()] if told else [(stated, "hd")]
    rows = []
    for settings, dim in kinds:
        amplitude = settings.get("attention_factor", 1.0)  # YaRN's
        frequencies = rope.inverse_frequencies(dict(settings), out.checkpoint.dims.turning(dim))
        cosines = torch.tensor([amplitude * math.cos(position * f) for f in frequencies])
        rows += [torch.cat([cosines, cosines]), cosines, cosines.repeat_interleave(2)]
    return rows
