"""The closed expression language of the mapping tables.

Names, integers, floats, strings, ``+ - * // %``, comparisons, ``in``, ``and or not``, ``a if c else b`` and
``x[l]``. No calls and no attributes: an expression can compute a size from a config and nothing else. It is
parsed by Python's own parser and walked over an allow-list of node types.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from convert.errors import TableError

#: The longest expression; the tables' own have up to 160 characters. A nest of a thousand parentheses is no size.
MAX_LENGTH = 500


def _numeric(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Of numbers alone: a text times ten thousand million, or formatted that wide, would fill the memory."""

    def of(a: Any, b: Any) -> Any:
        if isinstance(a, (int, float)) and isinstance(b, (int, float)):
            return operation(a, b)
        raise TypeError(f"{type(a).__name__} and {type(b).__name__} are not both numbers")

    return of


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _numeric(operator.mul),
    ast.FloorDiv: _numeric(operator.floordiv),
    ast.Mod: _numeric(operator.mod),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_LEAVES = (ast.Constant, ast.Name, ast.Load, ast.And, ast.Or, ast.Not, ast.USub, *_BINARY, *_COMPARE)
_BRANCHES = (ast.Expression, ast.BinOp, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.IfExp, ast.Subscript, ast.Tuple)

Lookup = Callable[[str], Any]


class MissingName(LookupError):
    """A name that the config does not have; ``or`` goes on to its next operand."""


class Expr:
    """A parsed expression.

    Args:
        text: The source, or a plain number or bool from TOML.
        where: Table file and row, for messages.

    Raises:
        TableError: The text is no expression, or uses something outside the language.
    """

    __slots__ = ("_body", "names", "text", "where")

    def __init__(self, text: str | int | float | bool, where: str = "") -> None:
        self.text = str(text)
        self.where = where
        if len(self.text) > MAX_LENGTH:
            many = f"{len(self.text):,} characters; at most {MAX_LENGTH} are read"
            raise TableError(f"{where}: an expression of {many}: {self.text[:60]!r} …")
        try:
            tree = ast.parse(self.text, mode="eval")
        except SyntaxError as error:
            raise TableError(f"{where}: {self.text!r} is not an expression ({error.msg}).") from None
        except (ValueError, RecursionError, MemoryError) as error:  # a zero byte; nested too deep
            raise TableError(f"{where}: {self.text!r} is not an expression ({error or 'nested too deep'}).") from None
        for node in ast.walk(tree):
            if not isinstance(node, (*_LEAVES, *_BRANCHES)):
                raise TableError(
                    f"{where}: {type(node).__name__} is not allowed in {self.text!r}.",
                    hint="Allowed: names, numbers, strings, + - * // %, comparisons, in, and, or, not, if-else, x[l].",
                )
            if isinstance(node, ast.Constant) and not isinstance(node.value, (int, float, str, type(None))):
                raise TableError(f"{where}: the constant {node.value!r} is not allowed in {self.text!r}.")
        self._body = tree.body
        self.names = frozenset(n.id for n in ast.walk(tree) if isinstance(n, ast.Name))

    def __repr__(self) -> str:
        return f"Expr({self.text!r})"

    def evaluate(self, lookup: Lookup) -> Any:
        """The value, with names resolved by ``lookup``.

        Raises:
            MissingName: ``lookup`` raised it and no ``or`` caught it.
            TableError: The operation does not fit its values (a string minus a number).
        """
        try:
            return _walk(self._body, lookup)
        except RecursionError:
            raise TableError(f"{self.where}: {self.text!r} is nested too deep.") from None
        except (TypeError, ArithmeticError, IndexError, KeyError) as error:
            raise TableError(f"{self.where}: {self.text!r} cannot be computed: {error}.") from None

    def explain(self, lookup: Lookup) -> str:
        """The expression with the values of its names: ``K*hd = 2*8``."""
        values = {name: lookup(name) for name in self.names if name != "l"}
        text = self.text
        if not values:
            return text
        shown = ", ".join(f"{name} = {values[name]}" for name in sorted(values, key=text.find))
        return f"{text} with {shown}"


def _walk(node: ast.AST, lookup: Lookup) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return {"true": True, "false": False}[name] if name in ("true", "false") else lookup(name)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_walk(left, lookup), _walk(right, lookup))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _walk(operand, lookup)
        case ast.UnaryOp(operand=operand):
            return -_walk(operand, lookup)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _walk(body, lookup) if _walk(test, lookup) else _walk(orelse, lookup)
        case ast.Subscript(value=value, slice=index):
            return _walk(value, lookup)[_walk(index, lookup)]
        case ast.Tuple(elts=items):
            return tuple(_walk(item, lookup) for item in items)
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            value = _walk(left, lookup)
            for comparison, comparator in zip(ops, comparators, strict=True):
                other = _walk(comparator, lookup)
                if not _COMPARE[type(comparison)](value, other):
                    return False
                value = other
            return True
        case ast.BoolOp(op=ast.And(), values=values):
            return _all(values, lookup)
        case ast.BoolOp(values=values):
            return _first(values, lookup)
    raise AssertionError(type(node).__name__)


def _all(values: list[ast.expr], lookup: Lookup) -> Any:
    result: Any = True
    for item in values:
        result = _walk(item, lookup)
        if not result:
            return result
    return result


def _first(values: list[ast.expr], lookup: Lookup) -> Any:
    """``a or b``: a name the config lacks counts as false, unless it stands last."""
    result: Any = None
    for item in values:
        try:
            result = _walk(item, lookup)
        except MissingName:
            if item is values[-1]:
                raise
            continue
        if result:
            return result
    return result
