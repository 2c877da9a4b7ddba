"""Files to fill in: the names of a user's own modules, and the table of a family that there is none for yet.

Every tensor stands there with what it is; nothing is read of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from convert import config as configs
from convert.errors import UsageError
from convert.layout import Dims
from convert.listing import MEANINGS
from convert.names import LAYOUT
from convert.relatives import relatives
from convert.resources import mappings_dir
from convert.table import CONVENTIONS, MappingTable, TensorRow, families
from convert.table_files import MAX_EXTENDS, load_head
from convert.toml_text import dumps


def skeleton(table: MappingTable, names: Mapping[str, str] | None = None, prefix: str | None = None) -> str:
    """TOML text that loads as it is.

    Args:
        table: The family.
        names: Row id → name (without the block's prefix) where it is known; the book's names elsewhere.
        prefix: What stands before the names of a block.
    """
    known = names or {}
    lead = table.prefix.get(LAYOUT, "") if prefix is None else prefix
    lines = [
        f"# Names of your own modules for the family {table.family}: {table.title}.",
        "# Replace the names on the right by those of your model's state_dict(), then check them:",
        "#   convert tables check THIS_FILE --against YOUR_CHECKPOINT",
        "# Shapes and conditions are the family's and cannot be changed here.",
        "#",
        f"# {', '.join(f'{k} = {v[0].text}' for k, v in table.dims.items() if len(k) <= 2)}",
        'title      = "my model"',
        f'extends    = "{table.family}"',
        f'prefix     = "{lead}"   # stands before every name in [block] and [[fused]]; {{l}} is the layer',
        *_convention(table),
    ]
    usual = _usual(table) | set(known)
    for section in ("top", "block"):
        lines += ["", f"[{section}]"]
        lines += _rows([r for r in table.rows.values() if r.id.startswith(section + ".")], section, known, usual)
    return "\n".join([*lines, *_fused(table)]) + "\n"


def beginning(table: MappingTable, kind: str) -> str:
    """TOML text of a new family's table that says, as it is, the same as ``table``.

    Args:
        table: The nearest family.
        kind: The new family's name: its ``model_type``.

    Raises:
        UsageError: The name is taken, or is no plain name.
    """
    if kind in families():
        raise UsageError(f"there is a family {kind!r} already.", hint=f"`convert tables show {kind}` shows its table.")
    if not (kind.isascii() and kind.replace("_", "").replace("-", "").isalnum()):
        raise UsageError(f"--as {kind!r}: a family is called by letters, digits, - and _.")
    near = relatives().get(kind)
    but = near.but if near is not None and near.like == table.family else "(what is different?)"
    head = {
        "family": kind,
        "title": f"{kind}: like {table.family}, but {but}",
        "extends": table.family,
        "model_types": [kind],
        "architectures": [],
        "layouts": [x for x in table.layouts if x in ("hf", "scratch")],
    }
    if any(set(row.zeros) - set(head["layouts"]) for row in table.rows.values()):  # rows that speak of llama.cpp's
        head |= {"layouts": list(table.layouts), "gguf_arch": kind}
    lines = [
        f"# The family {kind}, as a change of {table.family}. Its place is among the tables: mappings/{kind}.toml.",
        f"#   convert tables check {kind}.toml --against CKPT   compares it with a checkpoint",
        "# architectures: as config.json has them. layouts: gguf, with gguf_arch, only where llama.cpp has it.",
        f"# reference: the module in convert/reference/ that computes it; without a line it is that of {table.family}.",
    ]
    rest: dict[str, object] = {}
    if _depth(table.family) >= MAX_EXTENDS:  # a table that extends as many as may be is written out
        del head["extends"]
        rest = {k: v for k, v in table.raw.items() if k not in (*head, "extends", "gguf_arch", "sizes")}
    lines += [dumps(head).rstrip()]
    if rest:
        return "\n".join([*lines, dumps(rest).rstrip()]) + "\n"
    lines += ["", f"# A row replaces {table.family}'s row of that name, a new row is added, `false` takes one away:"]
    lines += ["# [block.mlp]", "# gate = false"]
    for row in table.rows.values():
        names = [f'{x} = "{n}"' for x, n in row.names.items() if x in head["layouts"]]
        lines += ["#", f"# [{row.id}]", f"# shape = {[e.text for e in row.shape]}".replace("'", '"')]
        lines += [f"# {name}" for name in names]
    return "\n".join(lines) + "\n"


def _depth(family: str) -> int:
    """How many tables a family's own extends, one after the other."""
    base = load_head(mappings_dir() / f"{family}.toml").get("extends")
    return 0 if base is None else 1 + _depth(str(base))


def _convention(table: MappingTable) -> Iterator[str]:
    kinds = [k for k in CONVENTIONS if any(k in c for c in table.convention.values())]
    if not kinds:
        return
    for kind in kinds:
        choices = "; ".join(f'"{v}": {MEANINGS[v]}' for v in CONVENTIONS[kind])
        yield f"# {kind}: {choices}"
    said = ", ".join(f'{k} = "{table.convention_of(LAYOUT, k)}"' for k in kinds)
    yield f"convention = {{ {said} }}   # what your code computes; a wrong one loads and then speaks nonsense"


def _usual(table: MappingTable) -> set[str]:
    """Rows that every model of the family has, and those that its first published size has in some layer."""
    rows = list(table.rows.values())
    always = {row.id for row in rows if not row.when}
    if not table.sizes:
        return always
    dims = Dims(table, configs.published(table, next(iter(table.sizes))))

    def somewhere(row: TensorRow) -> bool:
        places = range(dims.n_layers) if row.in_block else (None,)
        return any(all(dims.value(w, layer) for w in row.when) for layer in places)

    return always | {row.id for row in rows if somewhere(row)}


def _rows(rows: list[TensorRow], section: str, known: Mapping[str, str], usual: Collection[str]) -> Iterator[str]:
    cells = []
    for row in rows:
        name = known.get(row.id) or row.names.get(LAYOUT)
        if name is None:
            continue
        notes = [f"[{', '.join(e.text for e in row.shape)}]"]
        notes += ["only if " + " and ".join(e.text for e in row.when)] if row.when else []
        notes += [f"may share {row.tied_to.removeprefix('top.')}"] if row.tied_to else []
        off = "" if row.id in usual else "# "
        cells.append((f"{off}{row.id.removeprefix(section + '.')}", f'"{name}"', ", ".join(notes)))
    key, value = (max((len(c[i]) for c in cells), default=0) for i in (0, 1))
    for left, middle, right in cells:
        yield f"{left.ljust(key)} = {middle.ljust(value)}   # {right}"


def _fused(table: MappingTable) -> list[str]:
    """How to say that one tensor holds several rows, on the family's own attention."""
    heads = [r.id.removeprefix("block.") for r in table.rows.values() if r.in_block and len(r.shape) == 2][:3]
    parts = ", ".join(f'"{h}"' for h in heads)
    return [
        "",
        "# Several tensors stored as one, one after the other (delete their own lines above):",
        "# [[fused]]",
        '# name  = "att.qkv.weight"',
        f"# parts = [{parts}]",
    ]
