"""First parts of tensor names that a family's tables do not have: a trainer's attribute, or another spelling.

What wrappers of modules put anywhere into names is stripped by :mod:`convert.wrappers`.
"""

from __future__ import annotations

from collections.abc import Iterable

from convert.detect import known, score
from convert.errors import Problem, UsageError
from convert.formats.spec import TensorSpec
from convert.table import MappingTable

#: How deep in a trainer's modules the model may lie.
_PREFIX_PARTS = 3
#: Two models in one state dict have at least so many names in common.
_LEAST_COMMON = 3
#: Of the names of one of them the other may lack so many; an encoder has less than this of a decoder's.
_LEAST_SHARE = 0.7
#: A trainer's module has a few attributes; in a file with thousands the model lies below one of the largest.
_MOST_GROUPS = 50

Tensors = dict[str, list[TensorSpec]]


def common_first_parts(tensors: Tensors, tables: list[MappingTable], notes: list[str]) -> Tensors:
    """A trainer's module may hold the model as an attribute (``net.tok_emb.weight``): its name is stripped.

    Only if a table knows the names without it and not with it. Tensors beside the model (a loss with weights) stay
    under their names, for the table to say that it has no place for them.
    """
    if known(tensors, tables):
        return tensors
    below: dict[str, list[str]] = {}
    for name in tensors:
        below.setdefault(name.partition(".")[0], []).append(name)
    largest = set(sorted(below, key=lambda first: -len(below[first]))[:_MOST_GROUPS])
    for names in (group for first, group in below.items() if first in largest):
        prefix = ""
        for part in names[0].split(".")[:_PREFIX_PARTS]:
            prefix += part + "."
            bare = {n: n[len(prefix) :] for n in names if n.startswith(prefix) and len(n) > len(prefix)}
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
    same: dict[frozenset[str], list[str]] = {}
    for first, rests in below.items():
        if len(rests) >= _LEAST_COMMON:
            same.setdefault(frozenset(rests), []).append(first)
    alike = {first for group in same.values() if len(group) > 1 for first in group}
    largest = sorted(same, key=len, reverse=True)[:_MOST_GROUPS]
    for number, more in enumerate(largest):
        for fewer in largest[number + 1 :]:  # an average without buffers, or without the head that is tied
            if len(fewer) >= len(more) * _LEAST_SHARE and fewer < more:
                alike.update(same[more] + same[fewer])
    return [first for first in below if first in alike]


def beside_bare(names: Iterable[str]) -> str | None:
    """The first part below which the names of all the others lie again: an average beside a model that has none."""
    below: dict[str, set[str]] = {}
    for name in (every := set(names)):
        first, dot, rest = name.partition(".")
        if dot and not first.isdecimal():
            below.setdefault(first, set()).add(rest)
    for first in sorted(below, key=lambda part: -len(below[part]))[:_MOST_GROUPS]:
        rests = below[first]
        common, others = len(rests & every), len(every) - len(rests)
        if common >= max(_LEAST_COMMON, len(rests) * _LEAST_SHARE, others * _LEAST_SHARE):
            return first
    return None


def bare_question(average: str, key: str = "") -> Problem:
    """What to ask where :func:`beside_bare` finds an average; ``key`` is where both lie."""
    full = f"{key}.{average}" if key else average
    return Problem(
        "ambiguous",
        f"There are 2 models with the same names: one below {full}, and one whose names have nothing before them.",
        found=[full, key or "."],
        wanted="one",
        hint=f"Say which one: --key {full}, or --key {key or '.'} for the other.",
    )


def chosen_part(tensors: Tensors, key: str | None, notes: list[str]) -> Tensors:
    """The tensors below the first parts that ``--key`` says; all of them without it, unless two models lie there.

    The key ``.`` is for those that have no such part, beside an average that has.

    Raises:
        UsageError: There is nothing under the key, or a model beside its moving average and no key.
    """
    if key in (None, "."):
        if average := beside_bare(tensors):
            if key is None:
                raise UsageError(bare_question(average))
            out = {name: specs for name, specs in tensors.items() if not name.startswith(f"{average}.")}
            notes.append(f"not converted: {average} ({len(tensors) - len(out)} tensors)")
            return out
        if not (alike := side_by_side(tensors)):
            return tensors
        message = f"The file holds {len(alike)} models with the same names: {' and '.join(alike)}."
        hint = f"Say which one with --key, for example --key {alike[0]}."
        raise UsageError(Problem("ambiguous", message, found=alike, wanted="one", hint=hint))
    start = f"{key}."
    out = {name[len(start) :]: specs for name, specs in tensors.items() if name.startswith(start)}
    if not out:
        first = ", ".join(dict.fromkeys(name.partition(".")[0] for name in list(tensors)[:1000]))
        raise UsageError(f"no tensor's name begins with {start!r}.", hint=f"Names begin with {first[:300]}.")
    others = len(tensors) - len(out)
    left = f"; {others} other tensor{'s are' if others > 1 else ' is'} not converted" if others else ""
    notes.append(f"the model was found under the key {key!r}{left}")
    return out


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
                    count = f"{hits} tensor{'s' if hits > 1 else ''}"
                    notes.append(f"names begin with {rule.found!r} where {rule.name!r} is usual ({count})")
            return renamed
    return tensors
