"""The parts of a mapping table, frozen: rows of tensors and of config keys, and the rules beside them.

What a file's entries mean; :mod:`convert.table` reads and checks them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.expr import Expr


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor's whole story.

    Attributes:
        id: Dotted path in the table (``block.attn.k``).
        shape: One expression per dimension, torch order.
        when: Conditions of the row and of the blocks around it; all must hold.
        names: Name pattern per layout, without the block's prefix.
        rope: Number of heads whose rotary pairs the rows are, or None.
        rotary: How many leading rows of each head turn, where not all do.
        role: What ``inspect`` counts it under; derived from the path if not stated.
        tied_to: The row whose values this one shares in a tied model.
        copy: The row whose values, in the layer's ``kv_donor``, fill this one where a source has none.
        always: Layouts that store it in a tied model too, because their loader asks for it.
        parallel: The axis that Meta's model-parallel files split, or None for a tensor that each holds whole.
        norm: Whether it is a norm's weight, to which the ``norm`` convention applies.
        linear: Whether it is a linear layer's weight, to which the ``linear`` convention applies.
        to: Operations (:data:`convert.transforms.OPERATIONS`) from the hub layout to another one.
        zeros: Layouts that always have this tensor, whatever ``when`` says; they hold zeros for a model without it.
        twin: A row of the same shape that it is taken for by mistake, which no check of shapes sees.
    """

    id: str
    shape: tuple[Expr, ...]
    when: tuple[Expr, ...]
    names: Mapping[str, str]
    rope: Expr | None = None
    role: str = ""
    tied_to: str | None = None
    copy: str | None = None
    parallel: Expr | None = None
    norm: bool = False
    linear: bool = False
    to: Mapping[str, tuple[Mapping[str, Any], ...]] = field(default_factory=dict)
    always: tuple[str, ...] = ()
    rotary: Expr | None = None
    zeros: tuple[str, ...] = ()
    twin: str | None = None

    @property
    def experts(self) -> bool:
        """Whether the first dimension counts experts, because some layout stores each under its own name."""
        return any("{e}" in name for name in self.names.values())

    @property
    def in_block(self) -> bool:
        """Whether there is one per layer."""
        return self.id.startswith("block.")


@dataclass(frozen=True, slots=True)
class ConfigRow:
    """One quantity of the config: the key each layout's config file has for it.

    Attributes:
        key: The name in ``config.json``, which is the hub's.
        names: Key per other layout; GGUF's may contain ``{arch}``. Under ``hf`` stands what this family's
            ``config.json`` calls it, where that is not the hub's name.
        gguf_type: The value type that the GGUF loader demands (``u32``, ``f32`` …).
        also: Further keys per layout that are written with the same value, and understood in the key's place.
        kind: What its values are: ``number``, ``flag``, ``text``, ``texts``, or ``ids`` (one or several).
    """

    key: str
    names: Mapping[str, str]
    gguf_type: str | None = None
    also: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kind: str = "number"


@dataclass(frozen=True, slots=True)
class Fused:
    """Several rows stored as one tensor in a layout, joined along ``axis`` in the order of ``parts``.

    The axis is that of the stored tensors. An ``alternative`` is understood in a source and never written.
    """

    layout: str
    name: str
    parts: tuple[str, ...]
    axis: int = 0
    alternative: bool = False


@dataclass(frozen=True, slots=True)
class Ignore:
    """Source tensors that are dropped, with the reason.

    ``name`` may hold ``*`` for one path part, and ``{L}`` for the number of layers.
    """

    layout: str
    name: str
    reason: str
    check: str | None = None

    def matches(self, name: str) -> bool:
        """Whether ``name`` is meant; a leading ``*.`` and a last ``**`` stand for any number of parts, also none."""
        pattern, parts = self.name.split("."), name.split(".")
        if pattern[-1] == "**":
            pattern = pattern[:-1]
            parts = parts[: len(pattern)]
        if pattern[0] == "*":
            pattern, parts = pattern[1:], parts[-len(pattern) + 1 :]
        return len(pattern) == len(parts) and all(p in ("*", q) for p, q in zip(pattern, parts, strict=True))


@dataclass(frozen=True, slots=True)
class BufferRow:
    """What some of the book's classes keep in their state dict beside weights; it follows from the config.

    Attributes:
        kind: How it is computed (:data:`convert.buffers.KINDS`).
        name: Its name in every block.
        shape: Like a row's.
    """

    kind: str
    name: str
    shape: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another beginning that a layout's names have in some files: ``found`` is replaced by ``name`` on reading."""

    layout: str
    found: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF key whose value is computed: a scalar, an array, or with ``each`` an array of one value per layer.

    Attributes:
        key: May contain ``{arch}``.
        type: ``u32``, ``f32``, ``bool``, ``str`` … (of an array, its elements' type).
        value: An expression over the dims; for an array several.
        when: Whether the key is written.
        each: One value per layer, as an array.
    """

    key: str
    type: str
    value: Expr | tuple[Expr, ...]
    when: Expr | None = None
    each: bool = False


@dataclass(frozen=True, slots=True)
class Refuse:
    """Something a layout cannot hold, with the sentence that says why.

    Attributes:
        layout: Of the target.
        when: Over the target's dims.
        reason: The sentence.
        book_class: Only of this one of the book's classes.
        reference: Our own reference class can hold it.
        note: It is held, but not all of it is computed: a remark, not a refusal.
    """

    layout: str
    when: Expr
    reason: str
    book_class: str | None = None
    reference: bool = False
    note: bool = False
