"""The reference models: plain PyTorch, written to be read, and a second witness against the tables.

A mapping table names its reference model (``reference = "…"``); :func:`reference_for` imports the module of
that name in this package. Each such module offers

* ``Config``: a frozen dataclass with ``from_hf(config, …)``;
* ``Model``: the ``nn.Module``, with the interface of :class:`ReferenceModel`;
* ``ROTARY``: what the names of tensors contain whose rows are rotary pairs;
* ``build(config, *, pairing, norm, tied, names, device)``: a model for a normalised Hugging Face config.

This module imports no torch, names no family, and shares no code with the conversion.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from convert.errors import Problem, TableError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from convert.reference.layers import KVCache


@dataclass(frozen=True, slots=True)
class Control:
    """A fault that a model can be given on purpose, and that a check must see.

    Attributes:
        name: Short identifier (``rotary``).
        fault: What is wrong while it is applied, for people.
        apply: ``with control.apply(model): …`` runs the broken model; the weights are not touched.
    """

    name: str
    fault: str
    apply: Callable[[Any], AbstractContextManager[None]]


class ReferenceModel(Protocol):
    """What every reference model can do, whole or layer by layer.

    ``x = embed(ids)``, then ``x = block(l)(x, context(T, start), cache)`` for every layer, then ``head(x)``,
    is the same as ``forward(ids, cache)``.
    """

    controls: tuple[Control, ...]
    n_layers: int
    vocab_size: int

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids ``[B, T]`` to hidden states ``[B, T, D]``."""

    def context(self, length: int, start: int = 0) -> Any:
        """What all layers share for positions ``start`` to ``start + length``: rotation and mask."""

    def block(self, layer: int) -> nn.Module:
        """Layer ``layer``, called as ``block(x, context, layer_cache=None)``."""

    def head(self, x: Tensor) -> Tensor:
        """Final norm and output head: ``[B, T, D]`` to logits ``[B, T, V]``."""

    def __call__(self, ids: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids ``[B, T]`` to logits ``[B, T, V]``."""


class ReferenceModule(Protocol):
    """What a module in this package offers."""

    Config: type
    Model: type[nn.Module]
    ROTARY: tuple[str, ...]

    def build(
        self,
        config: Mapping[str, Any],
        *,
        pairing: str = "half",
        norm: str = "plain",
        tied: bool | None = None,
        names: Collection[str] | None = None,
        device: Any = None,
    ) -> nn.Module:
        """A model for a normalised Hugging Face config; see the modules."""


def reference_for(name: str) -> ReferenceModule:
    """The module of the reference model that a table names.

    Args:
        name: A module name in this package.

    Raises:
        TableError: There is no such reference model.
    """
    path = f"{__name__}.{name}"
    known = name.isidentifier() and importlib.util.find_spec(path) is not None
    module = importlib.import_module(path) if known else None
    if module is None or not hasattr(module, "build"):
        raise TableError(
            Problem(
                "reference",
                f"There is no reference model called {name!r}.",
                found=name,
                hint="The table's `reference` names a module in convert/reference/ that offers `build`.",
            )
        )
    return cast(ReferenceModule, module)
