"""Which family and which layout a checkpoint is in, from its config and its tensor names.

Numbers are not looked at here: whether Q and K are in the order that the names promise is a matter of values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from convert.adapters import refuse_adapters
from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec
from convert.names import class_tables
from convert.packed import refuse_packed
from convert.relatives import advice
from convert.report import fold_names
from convert.table import MappingTable, families, heads, load_table

_THRESHOLD = 0.5
#: Formats that hold one layout only.
_LAYOUTS = {"gguf": ["gguf"], "tensorflow": ["openai"]}


def score(table: MappingTable, layout: str, names: Collection[str]) -> float:
    """Share of the layout's unconditional tensors (layer 0 stands for all) that ``names`` has."""
    fused = {part for f in table.fused if f.layout == layout for part in f.parts}
    wanted = {f.name for f in table.fused if f.layout == layout and not any(table.rows[p].when for p in f.parts)}
    prefix = table.prefix.get(layout, "")
    wanted = {prefix + n for n in wanted}
    for row in table.rows.values():
        if layout in row.names and row.id not in fused and not row.when and not row.tied_to:
            wanted.add((prefix if row.in_block else "") + row.names[layout])
    wanted = {w.replace("{l}", "0") for w in wanted}
    return sum(w in names for w in wanted) / len(wanted) if wanted else 0.0


def explained(table: MappingTable, layout: str, names: Collection[str]) -> int:
    """How many of ``names`` the layout has for layer 0 and outside the layers, conditional ones included."""
    prefix = table.prefix.get(layout, "")
    patterns = {(prefix if r.in_block else "") + r.names[layout] for r in table.rows.values() if layout in r.names}
    patterns |= {prefix + f.name for f in table.fused if f.layout == layout}
    return sum(p.replace("{l}", "0").replace("{e}", "0") in names for p in patterns)


def candidates(
    config: Mapping[str, Any] | None,
    *,
    format: str,
    family: str | None = None,
    table: MappingTable | None = None,
    names: Collection[str] = (),
) -> list[MappingTable]:
    """The tables that can describe a checkpoint, by what its config says; all of them where it says nothing.

    Args:
        config: Its config, if it has one.
        format: Container format.
        family: What the user said.
        table: A table given by the user.
        names: Its tensor names, to say what an unknown architecture is like.

    Raises:
        ConvertError: The config names an architecture that no table describes.
    """
    if table is not None or family is not None:
        return [table or load_table(str(family))]
    said = heads()
    if format == "gguf":
        arch = str((config or {}).get("general.architecture"))
        fitting = [f for f, head in said.items() if head.get("gguf_arch") == arch]
        if not fitting:
            raise _unknown(f"a GGUF file of the architecture {arch!r}", advice(arch, names, format=format))
        return [load_table(f) for f in fitting]
    kind = _model_type(config)
    if kind:
        fitting = [f for f, head in said.items() if kind in head.get("model_types", ())]
        if not fitting:
            raise _unknown(f"{kind!r}", advice(kind, names))
        return [load_table(f) for f in fitting]
    stems = _stems(config)
    fitting = [f for f, head in said.items() if stems & {_stem(a) for a in head.get("architectures", ())}]
    if stems and not fitting:
        raise _unknown(", ".join(map(repr, (config or {})["architectures"])), advice(sorted(stems)[0], names))
    return [load_table(f) for f in fitting or said]


def known(names: Collection[str], tables: Collection[MappingTable]) -> bool:
    """Whether one of the tables knows at least half of what its layouts always have among ``names``."""
    tables = [v for t in tables for v in (t, *class_tables(t))]
    return any(score(t, layout, names) >= _THRESHOLD for t in tables for layout in t.layouts)


def detect(
    names: Collection[str],
    config: Mapping[str, Any] | None,
    *,
    format: str,
    family: str | None = None,
    layout: str | None = None,
    table: MappingTable | None = None,
) -> tuple[MappingTable, str]:
    """The table and layout of a checkpoint.

    Args:
        names: Its tensor names.
        config: Its config, if it has one.
        format: Container format; GGUF holds one layout only.
        family: What the user said.
        layout: What the user said.
        table: A table given by the user (a names file).

    Raises:
        ConvertError: An architecture that no table describes, an adapter, or packed weights.
    """
    refuse_special(names, config)
    tables = candidates(config, format=format, family=family, table=table, names=names)
    tables = [v for t in tables for v in (t, *class_tables(t))]
    layouts = [layout] if layout else _LAYOUTS.get(format, ["hf", "meta", "scratch"])
    # What a table always wants decides, then what it can explain, then the table that says less.
    ranked = sorted(
        (
            (score(t, x, names), explained(t, x, names), -len(t.rows), t, x)
            for t in tables
            for x in layouts
            if x in t.layouts
        ),
        key=lambda item: item[:3],
        reverse=True,
    )
    if not ranked or ranked[0][0] < _THRESHOLD:
        if format == "gguf":
            return tables[0], "gguf"
        if layout and (table or family):
            return tables[0], layout
        raise _unknown_names(names, tables, layout=layout)
    return ranked[0][3], ranked[0][4]


def _unknown_names(names: Collection[str], tables: Collection[MappingTable], *, layout: str | None) -> ConvertError:
    """Names that none of ``tables`` knows; those of another family or layout than was said are called by its name."""
    sample = ", ".join(repr(n) for n in fold_names(sorted(names))[:6])
    asked = list(dict.fromkeys(t.family for t in tables))
    who = "no table knows" if len(asked) > 1 else f"the {asked[0]} table does not know"
    where = f" in the {layout} layout" if layout else ""
    every = [(t, x) for f in families() for t in [load_table(f)] for x in t.layouts]
    near, found = max(every, key=lambda e: (score(e[0], e[1], names), explained(e[0], e[1], names), -len(e[0].rows)))
    if score(near, found, names) >= _THRESHOLD:
        hint = f"They are names of {near.family} in the {found} layout; see what the config, --family and --layout say."
    else:
        own = asked[0] if len(asked) == 1 else "NAME"
        listed = "" if len(asked) == 1 else "; `convert families` has the NAMEs"
        hint = (
            f"For your own module names write a names file (`convert tables init --family {own}`{listed}) and give it "
            "with --names."
        )
    return ConvertError(
        Problem(
            "unknown_names",
            f"{who} these tensor names{where}: {sample}{' …' if len(names) > 6 else ''}.",
            found=len(names),
            wanted=[f"{t.family}: {', '.join(t.layouts)}" for t in tables],
            hint=hint,
        )
    )


def stated_family(config: Mapping[str, Any] | None) -> str | None:
    """The family that a from-scratch config names.

    Raises:
        ConvertError: No table describes it.
    """
    stated = (config or {}).get("family")
    if stated is None:
        return None
    if stated not in families():
        raise _unknown(f"of the family {stated!r}")
    return str(stated)


def _model_type(config: Mapping[str, Any] | None) -> str | None:
    value = (config or {}).get("model_type")
    return str(value) if value else None


def _stems(config: Mapping[str, Any] | None) -> set[str]:
    """What a config's ``architectures`` name; they decide where there is no ``model_type``.

    ``LlamaForCausalLM``, ``LlamaModel`` and ``LlamaForSequenceClassification`` are one architecture.
    """
    stated = (config or {}).get("architectures")
    return {_stem(a) for a in stated if isinstance(a, str)} if isinstance(stated, list) else set()


def _stem(architecture: str) -> str:
    return architecture.partition("For")[0].removesuffix("Model")


def _unknown(what: str, near: str | None = None) -> ConvertError:
    here = ", ".join(families())
    lead = f"{near} " if near else ""
    return ConvertError(
        Problem(
            "unknown_architecture",
            f"this is {what}, which no table describes.",
            found=what,
            wanted=here,
            hint=f"{lead}Families here: {here}. If it is one of them under another name, say so with --family"
            + ("." if near else "; else write a table (`convert tables init`)."),
        )
    )


def refuse_special(names: Collection[str] | Mapping[str, list[TensorSpec]], config: Mapping[str, Any] | None) -> None:
    """Adapters and packed weights are no plain numbers; they are named before any work."""
    refuse_adapters(names)
    refuse_packed(names, config)
    config = config or {}
    arch = str(config.get("general.architecture", ""))
    if config.get(f"{arch}.attention.causal") is False:
        raise ConvertError(
            Problem(
                "not_causal",
                f"this is a model in which every position sees all others ({arch}.attention.causal is false), as "
                "models for embeddings are; no layout here can say so.",
                found=False,
                wanted=True,
                hint="As a language model it would give other numbers; use it with the program that it was made for.",
            )
        )
