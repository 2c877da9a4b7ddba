"""A checkpoint seen with one or more things changed: other values for some tensors, other numbers in the config.

Nothing is copied and nothing is written: a changed tensor is a :class:`~convert.source.Source` that reads another one
in another way. A view runs on the reference model as it is (:func:`convert.reference.loading.load_reference`), and its
:attr:`View.opened` is a checkpoint that can be converted. What is worth changing is :mod:`convert.faults`' matter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.layout import Key
    from convert.source import Source
    from convert.table import MappingTable


@dataclass(frozen=True)
class View:
    """A checkpoint with something changed; what ``load_reference`` takes.

    Attributes:
        base: The checkpoint as it is stored.
        opened: The same with the changes; an opened checkpoint in every respect, so that a view of it can be taken
            again, and it can be converted.
    """

    base: Checkpoint
    opened: Checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The hub config, changed."""
        return self.opened.config

    @property
    def table(self) -> MappingTable:
        """The family's table."""
        return self.opened.table

    @property
    def pairing(self) -> str:
        """The order of rotary rows."""
        return self.opened.pairing

    @property
    def norm(self) -> str:
        """How norm weights are stored."""
        return self.opened.norm

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.opened.tied

    def reference_tensors(self) -> Iterator[tuple[str, Source]]:
        """Every tensor under the reference model's name."""
        return self.opened.reference_tensors()

    @property
    def changed(self) -> list[Key]:
        """Logical tensors whose source is another one than in :attr:`base` (removed ones are not among them)."""
        old = self.base.match.logical
        return [key for key, source in self.opened.match.logical.items() if old.get(key) is not source]

    @property
    def removed(self) -> list[Key]:
        """Logical tensors that the view lacks."""
        new = self.opened.match.logical
        return [key for key in self.base.match.logical if key not in new]

    @property
    def reconfigured(self) -> bool:
        """Whether the model is to be built from other numbers than :attr:`base`; whose head it is does not count."""
        old, new = ({k: v for k, v in c.items() if k != "tie_word_embeddings"} for c in (self.base.config, self.config))
        return old != new or self.pairing != self.base.pairing

    def changed_tensors(self) -> Iterator[tuple[str, Source]]:
        """The changed ones of :meth:`reference_tensors`."""
        return self.opened.match.reference_tensors(self.changed)

    def first_layer(self) -> int:
        """The first layer that can compute something else than in :attr:`base`; the number of layers if none does.

        0 also where the embedding or the config is changed.
        """
        if self.reconfigured:
            return 0
        after = _after(self.table)
        touched = [*self.changed, *self.removed]
        layers = [0 if layer is None else layer for row, layer in touched if row not in after]
        return min(layers, default=self.base.dims.n_layers)


def _after(table: MappingTable) -> set[str]:
    """Rows that work behind the last layer: the head, and the norm in front of it."""
    return {
        row.id for row in table.rows.values() if not row.in_block and (row.tied_to or row.id.startswith("top.output"))
    }


def view(
    ckpt: Checkpoint,
    *,
    tensors: Mapping[Key, Source] | None = None,
    without: Collection[Key] = (),
    config: Mapping[str, Any] | None = None,
    pairing: str | None = None,
) -> View:
    """See a checkpoint with changes.

    Args:
        ckpt: The checkpoint, or :attr:`View.opened` of a view of it, for changes on top of changes.
        tensors: Other sources for some logical tensors (row id and layer), values in the convention they are stored in.
        without: Logical tensors to leave out.
        config: Entries of the hub config that differ.
        pairing: Another order of rotary rows.
    """
    new = replace(
        ckpt,
        config={**ckpt.config, **(config or {})},
        pairing=pairing or ckpt.pairing,
        notes=list(ckpt.notes),
    )
    old = ckpt.match
    logical = {key: (tensors or {}).get(key, source) for key, source in old.logical.items() if key not in without}
    touched = [key for key in (old.tied_pair() or ()) if key in (tensors or {}) or key in without]
    # `match` is cached, so that this is what the new checkpoint has matched.
    new.__dict__["match"] = replace(
        old,
        checkpoint=new,
        logical=logical,
        specs={key: specs for key, specs in old.specs.items() if key not in without},
        _tied={} if touched else dict(old._tied),
    )
    return View(_base(ckpt), _remember(new, _base(ckpt)))


def _base(ckpt: Checkpoint) -> Checkpoint:
    found: Checkpoint = ckpt.__dict__.get("_view_of", ckpt)
    return found


def _remember(ckpt: Checkpoint, base: Checkpoint) -> Checkpoint:
    ckpt.__dict__["_view_of"] = base
    return ckpt
