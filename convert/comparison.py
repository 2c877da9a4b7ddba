"""A table or a names file against a real checkpoint: which keys are missing, unexpected, or of another shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.checkpoint import open_checkpoint
from convert.errors import Problem, UsageError
from convert.names import load_names
from convert.report import fold_names, fold_problems
from convert.table import MappingTable, read_table
from convert.table_files import load_toml

SCHEMA = "convert.tables-check/1"


@dataclass(slots=True)
class Comparison:
    """The outcome of :func:`compare`.

    Attributes:
        table: The table, loaded.
        layout: The layout that the checkpoint is in.
        keys: How many tensors the table wants.
        problems: Everything that does not fit.
        ignored: Tensors that the table drops.
    """

    table: MappingTable
    layout: str
    keys: int
    problems: list[Problem] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything fits."""
        return not self.problems

    def named(self, *kinds: str) -> list[str]:
        """Tensors with a problem of these kinds."""
        return [p.tensor for p in self.problems if p.kind in kinds and p.tensor is not None]

    @property
    def missing_keys(self) -> list[str]:
        """Tensors that the table wants and the checkpoint lacks."""
        return self.named("missing_tensor", "missing_head")

    @property
    def unexpected_keys(self) -> list[str]:
        """Tensors that the checkpoint has and the table does not know."""
        return self.named("unexpected_tensor")

    @property
    def mismatched_keys(self) -> list[str]:
        """Tensors of another shape or type."""
        return self.named("shape", "dtype")

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "family": self.table.family,
            "layout": self.layout,
            "keys": self.keys,
            "missing_keys": self.missing_keys,
            "unexpected_keys": self.unexpected_keys,
            "mismatched_keys": self.mismatched_keys,
            "ignored_keys": self.ignored,
            "problems": [p.as_json() for p in self.problems],
        }

    def lines(self) -> list[str]:
        """Verdict, then findings with layers folded."""
        if self.ok:
            said = f"ok: {self.table.source} ({self.layout}): {self.keys} keys, each there with its shape"
            return [said, *(f"  ignored: {n}" for n in fold_names(self.ignored))]
        out = [f"NOT ok: {self.table.source} ({self.layout}): {self.keys} keys wanted"]
        for word in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            names = getattr(self, word)
            if names:
                out.append(f"  {word}: {len(names)}")
                out += [f"    {n}" for n in fold_names(names)]
        told = {"missing_tensor", "unexpected_tensor"}
        out += [f"  {p.message}" for p in fold_problems(self.problems) if p.kind not in told]
        return out


def load(path: Path) -> MappingTable:
    """A table or a names file, strictly; which of them it is follows from its keys.

    Raises:
        UsageError: There is no such file.
        TableError: It is wrong; file and row are named.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file.")
    return read_table(path) if "family" in load_toml(path) else load_names(path)


def compare(path: Path, against: str | Path, **options: Any) -> Comparison:
    """Load a table or a names file and expand it for a checkpoint's config.

    Args:
        path: The TOML file.
        against: A checkpoint.
        **options: As :func:`convert.open_checkpoint`.

    Raises:
        ConvertError: The file is wrong, or the checkpoint cannot be opened.
    """
    table = load(path)
    side = {"names": path} if table.names_file else {"table": table}
    with open_checkpoint(against, **side, **options) as checkpoint:
        matched = checkpoint.match
        ignored = [name for name, _ in matched.ignored]
        return Comparison(table, checkpoint.layout, len(matched.slots), matched.problems, ignored)
