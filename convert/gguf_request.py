"""What can be asked for when a GGUF file is written: the options of the commands that end in ``-to-gguf``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: The library's names of these options, as :func:`convert.convert_checkpoint` takes them.
OPTIONS = ("type", "tensor_types", "fallback", "split_max_size", "metadata", "pre", "ollama")


@dataclass(slots=True)
class GgufRequest:
    """Options of a GGUF target.

    Attributes:
        type: A type or mixture (``f16``, ``q8_0``, ``q4_k_m`` …); ``auto`` keeps the source's 16-bit type, and every
            tensor's own type where the source is a GGUF file.
        tensor_types: ``(pattern, type)`` for single tensors; the last that fits decides.
        fallback: Whether a tensor whose rows a type cannot hold gets the next type that can.
        split_max_size: Bytes per file; more become ``NAME-00001-of-0000N.gguf``.
        metadata: Further key-values; texts are typed as a command line means them.
        pre: Name of the pre-tokenizer, where it is not recognised.
        ollama: Whether a ``Modelfile`` is written beside the file.
    """

    type: str = "auto"
    tensor_types: Sequence[tuple[str, str]] = ()
    fallback: bool = True
    split_max_size: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    pre: str | None = None
    ollama: bool = False
