"""Says of a tensor without a place that it is several others in one, where shapes and absences say so.

Matching never takes such a tensor apart by itself: in which order the parts lie, a shape does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convert.errors import Problem
from convert.layout import Key

#: What is fused in practice: the rows of a table, and what to call them.
_FUSED = (
    (("block.attn.q", "block.attn.k", "block.attn.v"), "q, k and v"),
    (("block.mlp.gate", "block.mlp.up"), "gate and up"),
)


def name_fused(problems: Sequence[Problem], absent: Mapping[str, Key]) -> list[Problem]:
    """Findings of which those about fused tensors say so, and come first.

    Args:
        problems: All findings.
        absent: Name of every missing tensor of a layer, to its row's id and its layer.
    """
    missing = {p.tensor: p for p in problems if p.kind == "missing_tensor" and p.tensor in absent}
    of_layer: dict[Key, Problem] = {absent[str(name)]: p for name, p in missing.items()}
    first: list[Problem] = []
    explained: set[int] = set()
    for problem in problems:
        found = _parts(problem, of_layer) if problem.kind == "unexpected_tensor" else None
        if found is None:
            continue
        what, parts = found
        explained |= {id(problem), *map(id, parts)}
        rows = " + ".join(str(part.wanted[0]) for part in parts)
        first.append(
            replace(
                problem,
                message=f"{problem.tensor!r} {problem.found} looks like fused {what}: its {problem.found[0]} rows are "
                f"{rows}.",
                wanted=[part.tensor for part in parts],
                hint="Write a names file that has a [[fused]] section with the parts in their order, and give it with "
                "--names; `litgpt` is one to copy (`convert tables show litgpt`).",
            )
        )
        first += [replace(part, hint=None) for part in parts]
    return [*first, *(p for p in problems if id(p) not in explained)]


def _parts(problem: Problem, of_layer: dict[Key, Problem]) -> tuple[str, list[Problem]] | None:
    """What the tensor is made of: the missing parts of its own layer, if their rows add up to its rows."""
    layers = {int(part) for part in str(problem.tensor).split(".") if part.isdecimal() and len(part) < 6}
    for rows, what in _FUSED:
        for layer in layers:
            parts = [of_layer[row, layer] for row in rows if (row, layer) in of_layer]
            if len(parts) != len(rows):
                continue
            total = sum(part.wanted[0] for part in parts)
            if problem.found == [total, *parts[0].wanted[1:]]:
                return what, parts
    return None
