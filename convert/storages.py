"""Where the storages of ``torch.save`` archives lie, which tensors are in them, and what CRC-32 the archives state.

A CRC of zero states nothing: it is what torch writes under ``torch.serialization.set_crc32_options(False)``, and for
storages left empty by ``torch.serialization.skip_data()``. Such storages are left out here. Who reads the others, and
when, is :mod:`convert.storage_crcs`' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from convert.clamp import within
from convert.errors import Problem
from convert.formats.crc import crc32_combine
from convert.formats.spec import TensorSpec
from convert.formats.zip_directory import ZipDirectory
from convert.io_errors import reading
from convert.report import fold_names

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.plan import ConversionPlan


@dataclass(slots=True)
class Storage:
    """One storage, and what has been read of it.

    Attributes:
        key: Its file, and what it is called there.
        offset: Its first byte in the file.
        nbytes: How many there are.
        wanted: The CRC-32 that the archive states.
        names: The tensors that are in it.
        due: How many bytes of the source a plan reads before it comes to this storage.
        parts: Offset in the storage, bytes and CRC-32 of the pieces read so far.
        seen: How many bytes they have.
        found: The CRC-32, once all of it has been read.
    """

    key: tuple[Path, str]
    offset: int
    nbytes: int
    wanted: int
    names: list[str] = field(default_factory=list)
    due: int = 0
    parts: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: int = 0
    found: int | None = None

    def add(self, at: int, length: int, crc: int) -> None:
        """A piece has been read, which no other overlaps."""
        self.parts[at] = length, crc
        self.seen += length
        if self.seen == self.nbytes:
            found = 0
            for _, (length, crc) in sorted(self.parts.items()):
                found = crc32_combine(found, crc, length)
            self.found = found
            self.parts.clear()

    def problem(self) -> Problem | None:
        """What is wrong with it, once all of it has been read."""
        if self.found in (None, self.wanted):
            return None
        file = self.key[0]
        what = f"the {self.nbytes:,} bytes of {', '.join(fold_names(self.names))}"
        return Problem(
            "crc",
            f"{file.name}: {what} do not have the CRC-32 that the archive states.",
            tensor=self.names[0],
            file=str(file),
            found=f"{self.found:08x}",
            wanted=f"{self.wanted:08x}",
            hint="The file was damaged or changed after it was written: fetch it again, and compare its hash with the "
            "published one (convert validate --hash, or --checksums FILE).",
        )


def storages(ckpt: Checkpoint) -> list[Storage]:
    """Every storage that holds a tensor of the checkpoint and has a CRC, in the order of the files.

    Raises:
        ConvertError: A file cannot be read any more, or is another than before.
    """
    if ckpt.format not in ("torch", "dcp"):
        return []
    named: dict[Path, dict[str, tuple[TensorSpec, list[str]]]] = {}
    for name, specs in ckpt.tensors.items():
        for leaf in _leaves(specs):
            if leaf.storage is not None:
                names = named.setdefault(leaf.file, {}).setdefault(leaf.storage, (leaf, []))[1]
                names += [name] if name not in names else []
    found: list[Storage] = []
    for path, wanted in named.items():
        if ckpt.format == "dcp":  # each chunk is an archive of its own, and its only tensor fills its only storage
            found += [
                Storage((path, key), spec.offset, spec.nbytes, spec.crc, names)
                for key, (spec, names) in wanted.items()
                if spec.crc and spec.nbytes
            ]
            continue
        with reading(path), open(path, "rb", buffering=0) as file:
            directory = ZipDirectory(file, path)
            roots = [n for n in directory.entries if n.endswith("/data.pkl") and n.count("/") == 1]
            root = roots[0].removesuffix("data.pkl") if roots else ""
            for key, (_, names) in wanted.items():
                entry = directory.entries.get(f"{root}data/{key}")
                if entry is not None and entry.crc and entry.size:
                    found.append(Storage((path, key), directory.data_offset(entry), entry.size, entry.crc, names))
    return sorted(found, key=lambda s: (str(s.key[0]), s.offset))


def _leaves(specs: Sequence[TensorSpec]) -> Iterator[TensorSpec]:
    """What lies in files: the tensors, the pieces of joined ones, the scales of FP8."""
    for spec in specs:
        if spec.parts:
            yield from _leaves(spec.parts)
        else:
            yield spec
        if spec.scale is not None:
            yield from _leaves([spec.scale.spec])


def put_in_order(storages: list[Storage], plan: ConversionPlan) -> int:
    """Sort storages as the plan reads them, those that it does not read last.

    Args:
        storages: Of the plan's source; sorted in place, and told when they are due.
        plan: What is carried out.

    Returns:
        The bytes that the plan reads, those of a tensor that is read for several outputs more than once.
    """
    first: dict[tuple[Path, str | None], int] = {}
    at = 0
    for output in plan.source.pool.ordered(plan.outputs) if storages else ():
        for source in within(output.source):
            spec = getattr(source, "spec", None)
            for leaf in _leaves([spec]) if isinstance(spec, TensorSpec) else ():
                first.setdefault((leaf.file, leaf.storage), at)
                at += leaf.nbytes
    for storage in storages:
        storage.due = first.get(storage.key, at)
    storages.sort(key=lambda s: s.due)
    return at
