"""Whether a target takes every logical tensor of a source, and the source has every one that the target stores.

A table's own layouts answer that by their rules (biases towards Meta are refused with the reason); a names file may
lack a row that this model needs, and a config may promise what the source's names have no word for. Either way
something would be dropped, or invented.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from convert.errors import Problem
from convert.report import fold_names

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.layout import Key, Slot
    from convert.table import MappingTable


def uncovered(source: Checkpoint, table: MappingTable, layout: str, slots: Iterable[Slot]) -> list[Problem]:
    """What one side has and the other has no place for.

    Args:
        source: A checkpoint that matches its table.
        table: The target's table.
        layout: The target's layout.
        slots: What the target stores.
    """
    have = source.match.logical
    slots = list(slots)
    wanted = {key for slot in slots for key in slot.keys}
    problems = []
    dropped = [k for k in have if k not in wanted and not _tied(source, table, k) and not table.rows[k[0]].copy]
    if dropped:
        names = _names(source, dropped)
        problems.append(
            Problem(
                "no_place",
                f"{table.names_file or layout} has no place for {', '.join(names[:8])}.",
                tensor=names[0],
                found=names,
                wanted="a row for each",
                hint="Nothing is dropped: add rows to the names file, or convert to a layout that holds them.",
            )
        )
    absent = [slot for slot in slots if not all(k in have or _made(source, table, layout, k) for k in slot.keys)]
    if absent:
        names = fold_names(slot.name for slot in absent)
        problems.append(
            Problem(
                "no_source",
                f"the config promises {', '.join(names[:8])}, but the source ({source.layout}) has no name for it.",
                tensor=absent[0].name,
                found=None,
                wanted=names,
                hint="A config or a conversion.json of another model? The tensors of the source decide.",
            )
        )
    return problems


def _made(source: Checkpoint, table: MappingTable, layout: str, key: Key) -> bool:
    """Whether the target gets this tensor from another one, or zeros that say the same as its absence."""
    row = table.rows[key[0]]
    return row.copy is not None or layout in row.zeros or _tied(source, table, key)


def _tied(source: Checkpoint, table: MappingTable, key: Key) -> bool:
    """Whether another tensor stands for this one."""
    return bool(table.rows[key[0]].tied_to) and source.match.tied(sampled=False)


def _names(source: Checkpoint, keys: list[Key]) -> list[str]:
    """The names of logical tensors as the source stores them, layers folded."""
    stored = {key: slot.name for slot in source.match.slots.values() for key in slot.keys}
    return fold_names(stored[key] for key in keys)
