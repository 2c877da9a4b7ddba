"""The nearest family of a model type that no table describes, and what is different about it.

Well-known types stand in ``mappings/relatives.toml``; of others the tensor names are compared with every family's.
Nothing is converted by what is said here: it tells where the table to write would begin.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from convert.errors import TableError
from convert.report import fold_names
from convert.resources import mappings_dir
from convert.table import MappingTable, families, load_table
from convert.table_files import load_toml

FILE = "relatives.toml"
_KEYS = {"like": str, "but": str, "gguf": list}
#: Below this share of a family's constant names, a likeness means nothing.
_LIKENESS = 0.4


@dataclass(frozen=True, slots=True)
class Relative:
    """A model type beside the families.

    Attributes:
        like: The nearest family.
        but: What is different, as a clause.
    """

    like: str
    but: str


@cache
def relatives() -> dict[str, Relative]:
    """All well-known types, by their ``model_type`` and by llama.cpp's names of them.

    Raises:
        TableError: The file has an unknown key, or names a family that is none.
    """
    out: dict[str, Relative] = {}
    here = families()
    for name, row in load_toml(mappings_dir() / FILE).items():
        fits = isinstance(row, dict) and {"like", "but"} <= set(row) <= set(_KEYS)
        if not fits or not all(isinstance(v, _KEYS[k]) for k, v in row.items()):
            raise TableError(f"{FILE}: {name}: an entry has `like`, `but` and perhaps `gguf`.")
        if row["like"] not in here:
            raise TableError(f"{FILE}: {name}: like: there is no family {row['like']!r}.")
        for spelling in (name, *row.get("gguf", ())):
            out.setdefault(spelling, Relative(row["like"], row["but"]))
    return out


def nearest(kind: str | None, names: Collection[str] = (), *, format: str = "") -> Relative | None:
    """The family that a model type is nearest to.

    Args:
        kind: ``model_type``, the stem of a class name, or GGUF's architecture.
        names: The tensor names of the checkpoint, for types that are not well known.
        format: Container format; GGUF names are compared with GGUF names only.

    Returns:
        None where nothing is known and no family's names are like these.
    """
    known = relatives()
    if kind is not None:
        bare = {_bare(k): v for k, v in known.items()}
        if found := known.get(kind) or bare.get(_bare(kind)):
            return found
    return _by_names(names, format) if names else None


def advice(kind: str | None, names: Collection[str] = (), *, format: str = "") -> str | None:
    """One line for people: what it is like, what is different, and what to do; None where nothing is near."""
    found = nearest(kind, names, format=format)
    if found is None:
        return None
    named = f" --as {kind}" if kind and kind.isascii() and kind.replace("_", "").isalnum() else ""
    subject = f"`{kind}`: l" if kind else "L"
    return (
        f"{subject}ike `{found.like}`, but {found.but}; write a table with `convert tables init --family "
        f"{found.like}{named}`."
    )


def _bare(kind: str) -> str:
    """`Mistral3` (of a class name) and `mistral3`, `GPTNeoX` and `gpt_neox` are one."""
    return kind.lower().replace("_", "").replace("-", "")


def _by_names(names: Collection[str], format: str) -> Relative | None:
    """The family whose constant tensors ``names`` has most of, and the names that its tables do not know."""
    from convert.detect import score

    shown = {_zeroed(n) for n in names}
    ranked = []
    for family in families():
        table = load_table(family)
        for layout in table.layouts:
            if (layout == "gguf") == (format == "gguf") and (share := score(table, layout, names)) >= _LIKENESS:
                known = _patterns(table, layout)
                ranked.append((len(shown - known) + (1 - share) * len(known), len(table.rows), family, layout))
    if not ranked:
        return None
    _, _, family, layout = min(ranked)
    table = load_table(family)
    strange = fold_names(sorted(n for n in names if _zeroed(n) not in _patterns(table, layout)))
    more = ", ".join(f"`{n}`" for n in strange[:3]) + (" …" if len(strange) > 3 else "")
    if not strange:
        return Relative(family, "its tensors are named alike and its computation may differ")
    return Relative(family, f"it has tensors that this family has not ({more})")


def _patterns(table: MappingTable, layout: str) -> set[str]:
    prefix = table.prefix.get(layout, "")
    found = {(prefix if r.in_block else "") + r.names[layout] for r in table.rows.values() if layout in r.names}
    found |= {prefix + f.name for f in table.fused if f.layout == layout}
    return {n.replace("{l}", "0").replace("{e}", "0") for n in found}


def _zeroed(name: str) -> str:
    return ".".join("0" if p.isdecimal() else p for p in name.split("."))
