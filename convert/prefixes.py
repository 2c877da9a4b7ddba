"""First parts of tensor names that a family's tables do not have: a trainer's attribute, or another spelling.

What wrappers of modules put anywhere into names is stripped by :mod:`convert.wrappers`.
"""

from __future__ import annotations

from collections.abc import Iterable

from convert.detect import known, score
from convert.formats.spec import TensorSpec
from convert.table import MappingTable

#: How deep in a trainer's modules the model may lie.
_PREFIX_PARTS = 3
#: Two models in one state dict have at least so many names in common.
_LEAST_COMMON = 3

Tensors = dict[str, list[TensorSpec]]


def common_first_parts(tensors: Tensors, tables: list[MappingTable], notes: list[str]) -> Tensors:
    """A trainer's module may hold the model as an attribute (``net.tok_emb.weight``): its name is stripped.

    Only if a table knows the names without it and not with it. Tensors beside the model (a loss with weights) stay
    under their names, for the table to say that it has no place for them.
    """
    if known(tensors, tables):
        return tensors
    for first in dict.fromkeys(name.split(".")[0] for name in tensors):
        prefix = ""
        sample = next(n for n in tensors if n.split(".")[0] == first)
        for part in sample.split(".")[:_PREFIX_PARTS]:
            prefix += part + "."
            bare = {n: n[len(prefix) :] for n in tensors if n.startswith(prefix) and len(n) > len(prefix)}
            if not known(bare.values(), tables):
                continue
            out = {bare.get(name, name): specs for name, specs in tensors.items()}
            if len(out) == len(tensors):
                notes.append(f"stripped from names: {prefix} ({len(bare)} names)")
                return out
    return tensors


def side_by_side(names: Iterable[str]) -> list[str]:
    """First parts under which the same names lie, as of a model beside its moving average in one state dict.

    A lone number in a list of layers is no such part.
    """
    below: dict[str, set[str]] = {}
    for name in names:
        first, dot, rest = name.partition(".")
        if dot and not first.isdecimal():
            below.setdefault(first, set()).add(rest)
    alike = [
        first
        for first, rests in below.items()
        if len(rests) >= _LEAST_COMMON and any(rests == other for key, other in below.items() if key != first)
    ]
    return alike if len(alike) > 1 else []


def aliased(tensors: Tensors, tables: list[MappingTable], notes: list[str]) -> Tensors:
    """Names that begin in another way in some files (``[[alias]]`` of a table).

    A base model saved without its wrapper lacks the ``model.`` in front (pains L5); a multimodal one has more of it.
    """
    plain = max((score(t, x, tensors) for t in tables for x in t.layouts), default=0.0)
    for found in tables:
        for layout in {rule.layout: None for rule in found.alias}:
            rules = [rule for rule in found.alias if rule.layout == layout]
            by_rule = {n: next((r for r in rules if n.startswith(r.found)), None) for n in tensors}
            renamed = {(n if (r := by_rule[n]) is None else r.name + n[len(r.found) :]): s for n, s in tensors.items()}
            # Another layout may have names that begin so by right (Meta's `layers.`).
            if len(renamed) < len(tensors) or score(found, layout, renamed) <= plain:
                continue
            for rule in rules:
                hits = sum(r is rule for r in by_rule.values())
                if hits:
                    notes.append(f"names begin with {rule.found!r} where {rule.name!r} is usual ({hits} tensors)")
            return renamed
    return tensors
