"""What tensor shapes say about a config: fills what a config leaves out, explains what contradicts it.

A row's shape expressions are equations in the config's numbers (``K*hd`` rows, ``D`` columns). An equation with one
unknown gives it. Nothing here reads data.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from convert.errors import TableError
from convert.expr import Expr, MissingName
from convert.layout import Dims
from convert.table import MappingTable, TensorRow

Shapes = Mapping[str, tuple[int, ...]]


def count_layers(table: MappingTable, layout: str, names: Mapping[str, Any]) -> int:
    """Layers that a set of tensor names has: one more than the highest number in the place of ``{l}``."""
    head, _, tail = table.prefix.get(layout, "").partition("{l}")
    numbers = {rest.split(tail or ".", 1)[0] for rest in (n[len(head) :] for n in names if n.startswith(head))}
    return max((int(n) for n in numbers if n.isdecimal()), default=-1) + 1


def primary_key(table: MappingTable, dim: str) -> str | None:
    """The config key that a dim stands for: the first name of its first expression."""
    if dim not in table.dims:
        return dim if dim in table.config else None
    body = ast.parse(table.dims[dim][0].text, mode="eval").body
    while isinstance(body, ast.BoolOp):
        body = body.values[0]
    return body.id if isinstance(body, ast.Name) and body.id in table.config else None


def solve(table: MappingTable, dims: Dims, expr: Expr, size: int, *, known: bool = False) -> tuple[str, int] | None:
    """The config key and value that make ``expr`` equal ``size``.

    Args:
        table: The family.
        dims: The config so far.
        expr: A name, or a product of two names.
        size: What the tensor has.
        known: Solve for a key that the config already states (to explain a contradiction); the last factor is taken
            as right.

    Returns:
        None when nothing, or more than one thing, is unknown.
    """
    body = ast.parse(expr.text, mode="eval").body
    factors = _factors(body)
    if factors is None:
        return None
    unknown, product = [], 1
    for factor in factors:
        key = primary_key(table, factor) if isinstance(factor, str) else None
        if isinstance(factor, int):
            product *= factor
        elif key is not None and (dims.config.get(key) is None or (known and factor == factors[0])):
            unknown.append(key)
        else:
            try:
                product *= int(dims.lookup(None)(factor))
            except (MissingName, TypeError, TableError):  # not stated, or not one number for all layers
                return None
    if len(unknown) != 1 or product <= 0 or size % product:
        return None
    return unknown[0], size // product


def _factors(node: ast.AST) -> list[str | int] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return [node.value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _factors(node.left), _factors(node.right)
        return None if left is None or right is None else left + right
    return None


def fill(
    table: MappingTable, config: Mapping[str, Any], layout: str, shapes: Shapes
) -> tuple[dict[str, Any], list[str]]:
    """A config with what the shapes tell added where it is silent.

    Args:
        table: The family.
        config: The hub config so far.
        layout: Whose names ``shapes`` uses.
        shapes: Full (joined) shape by name.

    Returns:
        The filled config, and a note for each number that was taken from shapes.
    """
    out = dict(config)
    notes: list[str] = []

    def learn(key: str, value: Any, why: str) -> None:
        if out.get(key) is None:
            out[key] = value
            notes.append(f"{key} = {value}, from {why}")

    layers = count_layers(table, layout, shapes)
    key = primary_key(table, "L")
    if key and layers:
        learn(key, layers, "the layers that have tensors")
    first = {}
    for row in table.rows.values():
        if layout in row.names:
            prefix = table.prefix.get(layout, "") if row.in_block else ""
            pattern = prefix + row.names[layout]
            name = usual([pattern.replace("{l}", str(i)) for i in range(max(layers, 1))], shapes)
            if name is not None:
                first[row.id] = (name, shapes[name], row)

    def follows(expr: Expr, size: int) -> bool:
        """Whether a dim has this size without the config saying it (a feed-forward layer of four times the width)."""
        return expr.text in table.dims and Dims(table, out).get(expr.text) == size

    for _ in range(3):  # one unknown may have to be solved before the next
        for name, shape, row in first.values():
            if len(shape) != len(row.shape):
                continue
            turned = row.linear and table.convention_of(layout, "linear") == "in_out"
            for expr, size in zip(reversed(row.shape) if turned else row.shape, shape, strict=True):
                found = solve(table, Dims(table, out), expr, size)
                if found and found[0] != primary_key(table, "H") and not follows(expr, size):
                    learn(found[0], found[1], f"{name!r} {list(shape)}")
    for key, row_id in table.presence.items():
        if out.get(key) is None:
            found_name = _present(table, {**out, key: True}, layout, table.rows[row_id], layers, shapes)
            out[key] = found_name is not None
            if found_name is not None and not key.startswith("_"):
                notes.append(f"{key} = True, from {found_name!r}")
    return out, notes


def _present(
    table: MappingTable, config: Mapping[str, Any], layout: str, row: TensorRow, layers: int, shapes: Shapes
) -> str | None:
    """The name under which some layer that has this row by its conditions stores it, alone or with others, or None."""
    patterns = [row.names[layout]] if layout in row.names else []
    patterns += [f.name for f in table.fused if f.layout == layout and row.id in f.parts]
    prefix = table.prefix.get(layout, "") if row.in_block else ""
    dims = Dims(table, config)
    for layer in range(max(layers, 1)):
        names = ((prefix + p).replace("{l}", str(layer)) for p in patterns)
        name = next((n for n in names if n in shapes), None)
        if name is not None and all(w.evaluate(dims.lookup(layer if row.in_block else None)) for w in row.when):
            return name
    return None


def usual(names: list[str], shapes: Shapes) -> str | None:
    """The first of ``names`` that has the shape most of them have; one damaged layer must not speak for all."""
    found = [n for n in names if n in shapes]
    if not found:
        return None
    count = Counter(shapes[n] for n in found)
    return max(found, key=lambda n: count[shapes[n]])


def head_candidates(config: Mapping[str, Any], rows_q: int, rows_k: int) -> list[str]:
    """Head counts that shapes allow, for a checkpoint without a config (they do not follow from shapes)."""
    out = []
    for head_dim in (128, 64, 96, 80, 256, 48, 32, 16, 8, 6):
        if rows_q % head_dim == 0 and rows_k % head_dim == 0:
            heads, kv = rows_q // head_dim, rows_k // head_dim
            if heads % kv == 0:
                out.append(f"{heads} heads, {kv} kv heads of {head_dim}")
    return out
