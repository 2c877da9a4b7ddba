"""Reads the rules of quantisation types, ``mappings/quantization.toml``, strictly.

Unknown keys, roles, types and names in conditions are errors, told all at once. What the rules do is
:mod:`convert.mixtures`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from convert.dtypes import DTYPES
from convert.errors import Problem, TableError
from convert.expr import Expr
from convert.resources import mappings_dir

FILE = "quantization.toml"
_TOP = frozenset({"role", "keep", "fallback", "condition", "type", "alias", "refused", "shared"})
_NAMES = frozenset({"i", "n", "layers", "experts", "gqa"})


@dataclass(frozen=True, slots=True)
class Role:
    """A kind of tensor, recognised by its name."""

    name: str
    exact: frozenset[str]
    parts: tuple[str, ...]

    def fits(self, tensor: str) -> bool:
        """Whether the tensor has this role."""
        return tensor in self.exact or any(part in tensor for part in self.parts)


@dataclass(frozen=True, slots=True)
class Rule:
    """``role`` gets ``type`` where ``when`` holds (and it had one of ``only``, when given)."""

    role: str
    type: str
    when: Expr | None = None
    only: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Mixture:
    """One ``--type``: the type of most tensors, and the rules for the others.

    Attributes:
        name: As typed, in lower case.
        base: The type of every tensor without a rule.
        file_type: The value of ``general.file_type``.
        rules: In order; the last that holds decides.
    """

    name: str
    base: str
    file_type: int
    rules: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Tables:
    """The whole file, checked."""

    roles: tuple[Role, ...]
    keep_f32: tuple[str, ...]
    keep_wide: tuple[str, ...]
    fallback: Mapping[str, str]
    mixtures: Mapping[str, Mixture]
    aliases: Mapping[str, str]
    refused: Mapping[str, str]


@lru_cache(maxsize=1)
def tables() -> Tables:
    """The rules that ship with the program."""
    return read_tables(mappings_dir() / FILE)


@dataclass(slots=True)
class _Reader:
    """Checks while reading; all complaints at once."""

    file: str
    problems: list[Problem] = field(default_factory=list)

    def complain(self, message: str) -> None:
        self.problems.append(Problem("table", f"{self.file}: {message}", file=self.file))

    def type(self, where: str, name: Any) -> str:
        if name not in DTYPES:
            self.complain(f"{where}: {name!r} is not a type.")
            return "F32"
        return str(name)

    def keys(self, where: str, found: Mapping[str, Any], allowed: Collection[str]) -> None:
        for key in sorted(set(found) - set(allowed)):
            self.complain(f"{where}: unknown key {key!r}; known are {', '.join(sorted(allowed))}.")


def read_tables(path: Path) -> Tables:
    """Read and check a rules file.

    Raises:
        TableError: Unknown keys, roles, types, names in conditions; all of them.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TableError(f"{path.name}: {error}.") from None
    reader = _Reader(path.name)
    reader.keys("the file", raw, _TOP)
    roles = tuple(
        Role(r.get("name", ""), frozenset(r.get("is", ())), tuple(r.get("has", ()))) for r in raw.get("role", ())
    )
    for entry in raw.get("role", ()):
        reader.keys("[[role]]", entry, ("name", "is", "has"))
    keep = raw.get("keep", {})
    reader.keys("[keep]", keep, ("f32", "wide"))
    fallback = {reader.type("[fallback]", a): reader.type("[fallback]", b) for a, b in raw.get("fallback", {}).items()}
    mixtures = {name: _mixture(name, entry, raw, roles, reader) for name, entry in raw.get("type", {}).items()}
    for alias, name in raw.get("alias", {}).items():
        if name not in mixtures:
            reader.complain(f"[alias] {alias}: there is no type {name!r}.")
    if reader.problems:
        raise TableError(reader.problems)
    return Tables(
        roles=roles,
        keep_f32=tuple(keep.get("f32", ())),
        keep_wide=tuple(keep.get("wide", ())),
        fallback=fallback,
        mixtures=mixtures,
        aliases=raw.get("alias", {}),
        refused=raw.get("refused", {}),
    )


def _mixture(
    name: str, entry: Mapping[str, Any], raw: Mapping[str, Any], roles: Sequence[Role], reader: _Reader
) -> Mixture:
    where = f"[type.{name}]"
    reader.keys(where, entry, ("base", "file_type", "extends", "rule"))
    shared = raw.get("shared", {}).get(entry.get("extends", ""), {})
    if "extends" in entry and not shared:
        reader.complain(f"{where}: there is no [shared.{entry['extends']}].")
    reader.keys(f"[shared.{entry.get('extends', '')}]", shared, ("rule", "last"))
    if not isinstance(entry.get("file_type"), int):
        reader.complain(f"{where}: file_type is missing.")
    listed = [*shared.get("rule", ()), *entry.get("rule", ()), *shared.get("last", ())]
    conditions = raw.get("condition", {})
    rules = tuple(_rule(f"{where} rule {n + 1}", r, conditions, roles, reader) for n, r in enumerate(listed))
    return Mixture(name, reader.type(where, entry.get("base")), entry.get("file_type", 0), rules)


def _rule(
    where: str, entry: Mapping[str, Any], conditions: Mapping[str, str], roles: Sequence[Role], reader: _Reader
) -> Rule:
    reader.keys(where, entry, ("role", "type", "when", "from"))
    role = entry.get("role", "")
    if role not in {r.name for r in roles}:
        reader.complain(f"{where}: there is no role {role!r}.")
    when = None
    if "when" in entry:
        when = Expr(conditions.get(entry["when"], entry["when"]), f"{reader.file} {where}")
        unknown = sorted(when.names - _NAMES)
        if unknown:
            reader.complain(
                f"{where}: unknown name {unknown[0]!r} in {when.text!r}; known are i, n, layers, experts, gqa."
            )
    only = frozenset(reader.type(where, name) for name in entry.get("from", ()))
    return Rule(role, reader.type(where, entry.get("type")), when, only)
