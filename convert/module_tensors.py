"""A live module seen as a checkpoint's layout: its tensors by name, whose names they are, its config.

Knows modules and tables; fills and saves nothing (:mod:`convert.modules`, :mod:`convert.saving`). Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from convert import config as configs
from convert.detect import detect
from convert.dtypes import dtype as named_dtype
from convert.errors import UsageError
from convert.names import load_names
from convert.source import Array, Source
from convert.table import MappingTable, families, load_table
from convert.wrappers import WRAPPER_PARTS, strip_prefixes

#: Canonical names of torch's element types.
TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
#: Types of weights that can be filled and saved.
FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(slots=True)
class Home:
    """One piece of a module's memory with every name and place it has; a tied tensor has several.

    Attributes:
        tensor: The parameter or buffer (of several that share their memory, the first).
        parameter: Whether it is a parameter.
        persistent: Whether a state dict holds it.
        names: Its names, cleaned of wrappers' parts (``module.``, ``_orig_mod.``).
        places: ``(module, attribute)`` of each.
    """

    tensor: Tensor
    parameter: bool
    persistent: bool
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        """Canonical name of the element type, or torch's own for a type no checkpoint holds."""
        return TYPES.get(self.tensor.dtype, str(self.tensor.dtype))


def homes(model: nn.Module) -> dict[str, Home]:
    """Every parameter and buffer of ``model`` by each of its names."""
    named: list[tuple[str, nn.Module, str, Tensor, bool]] = []
    for prefix, owner in model.named_modules(remove_duplicate=False):
        for parameter, held in ((True, owner._parameters), (False, owner._buffers)):
            for leaf, tensor in held.items():
                if tensor is not None:
                    named.append((f"{prefix}.{leaf}" if prefix else leaf, owner, leaf, tensor, parameter))
    cleaned, _ = strip_prefixes([name for name, *_ in named])
    by_memory: dict[Any, Home] = {}
    out: dict[str, Home] = {}
    for name, owner, leaf, tensor, parameter in named:
        persistent = parameter or leaf not in owner._non_persistent_buffers_set
        home = by_memory.setdefault((_memory(tensor), parameter), Home(tensor, parameter, persistent))
        home.names.append(cleaned[name])
        if not any(m is owner and x == leaf for m, x in home.places):
            home.places.append((owner, leaf))
        out[cleaned[name]] = home
    return out


def _memory(tensor: Tensor) -> Any:
    """Equal for tensors that are one: the same object, or other views of exactly the same elements."""
    if tensor.is_meta or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def with_layout(
    found: Mapping[str, Home],
    *,
    layout: str | None = None,
    names: str | Path | None = None,
    family: str | None = None,
    model_type: str | None = None,
) -> tuple[MappingTable, str, dict[str, Home]]:
    """Whose names a module has.

    Args:
        found: From :func:`homes`.
        layout: The layout of its names, where it shall not be detected.
        names: A names file for a module with names of its own.
        family: Its family.
        model_type: Its config's ``model_type``, where the family is to be found.

    Returns:
        The table, the layout, and the homes by the names that the layout has for them (a Hugging Face base model
        lacks the ``model.`` in front).

    Raises:
        UsageError: ``names`` and another layout than ``scratch``.
        ConvertError: No table knows the names.
    """
    table = load_names(names) if names is not None else None
    if table is not None and layout not in (None, "scratch"):
        raise UsageError(f"a names file describes from-scratch names, so layout={layout!r} does not go with it.")
    if table is not None and family is not None and table.family != family:
        raise UsageError(f"the names file extends {table.family!r}, but the checkpoint is of the family {family!r}.")
    if table is None and "embed_tokens.weight" in found and layout in (None, "hf"):
        found = {n if n.startswith("lm_head.") else f"model.{n}": home for n, home in found.items()}
    weights = [n for n, home in found.items() if home.parameter]
    table, layout = detect(
        weights,
        {"model_type": model_type} if model_type else None,
        format="module",
        family=None if table else family,
        layout=layout or ("scratch" if names is not None else None),
        table=table,
    )
    return table, layout, dict(found)


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config that a module carries, as its file would hold it: the book's ``cfg``, or transformers' ``config``."""
    tables = [load_table(f) for f in families()]
    for module in _unwrapped(model):
        for name in ("cfg", "config"):
            value: Any = getattr(module, name, None)
            value = value.to_dict() if hasattr(value, "to_dict") else value
            if isinstance(value, Mapping) and configs.layout_of(value, tables) is not None:
                return configs.plain(value)
    return None


def _unwrapped(model: nn.Module) -> Iterator[nn.Module]:
    """The module, and what lies in it while it is nothing but a wrapper."""
    found: Any = model
    while isinstance(found, nn.Module):
        yield found
        inner = dict(found.named_children())
        found = next((inner[n] for n in inner if n in WRAPPER_PARTS), None) if len(inner) == 1 else None


def hub_config(table: MappingTable, raw: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """A config of any spelling in the hub's form, and whose spelling it was in.

    Raises:
        UsageError: It is in no spelling known here.
        ConvertError: A value in it is impossible.
    """
    plain = configs.plain(raw)
    spelling = configs.layout_of(plain, [table])
    if spelling is None:
        keys = ", ".join(map(repr, list(plain)[:6])) or "nothing"
        raise UsageError(
            f"this is no config of a kind known here: it has {keys}.",
            hint="config.json, params.json and the book's dict are known.",
        )
    return configs.to_hub(table, spelling, plain), spelling


def torch_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """A torch type by object or name (``"bfloat16"``).

    Raises:
        UsageError: There is no such type of weights.
    """
    if value is None or isinstance(value, torch.dtype):
        found = value
    else:
        try:
            canonical = named_dtype(value).name
        except KeyError:
            canonical = ""
        found = next((t for t, name in TYPES.items() if name == canonical), None)
        if found is None:
            raise UsageError(f"there is no dtype {value!r}.", hint="float32, float16 or bfloat16.")
    if found is not None and TYPES.get(found) not in FLOATS:
        raise UsageError(f"{found} is no type for weights.", hint="torch.float32, torch.float16 or torch.bfloat16.")
    return found


def as_array(tensor: Tensor) -> Array:
    """A contiguous CPU tensor as raw storage values, sharing its memory."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


class TensorSource(Source):
    """A module's tensor, read from its own memory; from another device or with strides, a block at a time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()
        self.shape = tuple(tensor.shape) or (1,)
        self.dtype = TYPES[tensor.dtype]

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        tensor = self.tensor.reshape(1) if self.tensor.ndim == 0 else self.tensor
        return as_array(tensor[start:stop].to("cpu").contiguous())


def distinct(found: Iterable[Home]) -> list[Home]:
    """Each home once."""
    return list({id(home): home for home in found}.values())
