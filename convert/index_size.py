"""The one number of an index that no program reads: how many bytes its tensors have.

A wrong one is no fault, but it tells of a folder that somebody edited; every command says so. The map of an index is
audited in :mod:`convert.locate`.
"""

from __future__ import annotations

from collections.abc import Sequence

from convert.config import read_json
from convert.formats.spec import Container
from convert.locate import INDEX_NAMES, Found


def total_size_notes(found: Found, containers: Sequence[Container]) -> list[str]:
    """What is wrong with ``total_size`` of the index by which files were found, if it states one; at most one note.

    Args:
        found: The files.
        containers: Their headers, with every tensor as it is stored (scales of FP8 weights count, too).
    """
    for name in INDEX_NAMES if found.weight_map else ():
        path = found.folder / name
        if not path.is_file():
            continue
        raw = read_json(path)
        named = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(named, dict) or {p.name for p in found.files} != set(map(str, named.values())):
            continue  # of other files
        metadata = raw.get("metadata")
        stated = metadata.get("total_size") if isinstance(metadata, dict) else None
        real = sum(spec.nbytes for c in containers for spec in c.tensors.values())
        if stated is not None and stated != real:
            said = f"{stated!r:.40}"
            return [f"{name} says total_size = {said}, the tensors have {real} bytes; nothing reads that number"]
    return []
