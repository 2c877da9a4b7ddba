"""The names a torch pickle may mention, and the inert objects that stand for all others.

A pickle names Python objects ("globals") and asks for them to be called. Here a name is only text: the few
names that describe tensors and plain containers map to the constants below, every other name becomes a
:class:`Placeholder`, which is never imported, never called and never compared. This module reads no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Placeholder:
    """An object of a pickle that was not built: what it is called and what it was given.

    Attributes:
        name: The dotted name (``argparse.Namespace``).
        called: Whether the pickle asked for an instance (False: only the name itself is meant).
        args: What it would have been called with.
        state: What its ``__setstate__`` or ``__dict__`` would have received, or None.
        items: Elements of a list or dict subclass, or None.
    """

    __slots__ = ("args", "called", "items", "name", "state")

    def __init__(self, name: str, *, called: bool = False, args: Any = ()) -> None:
        self.name = name
        self.called = called
        self.args = args
        self.state: Any = None
        self.items: dict[Any, Any] | list[Any] | None = None

    def __repr__(self) -> str:
        return f"<unread object {self.name}>"

    @property
    def fields(self) -> dict[str, Any] | None:
        """Its attributes where the pickle stored a plain dict of them (a Namespace, a dataclass)."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1] or state[0], dict):
            state = state[1] or state[0]  # (dict, slots) of classes with __slots__
        return state if isinstance(state, dict) else None


def as_mapping(value: Any) -> dict[Any, Any] | None:
    """A dict itself, what an unread subclass of dict holds, or None for anything else."""
    if isinstance(value, Placeholder):
        value = value.items
    return value if isinstance(value, dict) else None


class Known:
    """A name that the reader understands; compared by identity."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


@dataclass(frozen=True, slots=True)
class StorageType:
    """A torch storage class; ``dtype`` is the canonical type name, ``U8`` units for an untyped storage."""

    name: str
    dtype: str
    untyped: bool = False


@dataclass(slots=True, eq=False)
class StorageRef:
    """A storage that a pickle refers to: its record key in the archive and its size in elements."""

    key: str
    dtype: str
    numel: int
    untyped: bool


@dataclass(frozen=True, slots=True)
class ElementType:
    """A ``torch.dtype`` while the pickle is read; :attr:`dtype` is None for types we do not have."""

    name: str
    dtype: str | None


REBUILD_V2 = Known("torch._utils._rebuild_tensor_v2")
REBUILD_V3 = Known("torch._utils._rebuild_tensor_v3")
PARAMETER = Known("torch._utils._rebuild_parameter")
PARAMETER_WITH_STATE = Known("torch._utils._rebuild_parameter_with_state")
FROM_TYPE = Known("torch._tensor._rebuild_from_type_v2")
TENSOR_TYPE = Known("torch.Tensor")
SIZE = Known("torch.Size")
DEVICE = Known("torch.device")
DICT = Known("collections.OrderedDict")
SET = Known("builtins.set")
ENCODE = Known("_codecs.encode")
RECONSTRUCT = Known("copyreg._reconstructor")
#: Read, but a placeholder: it is listed.
GETATTR = frozenset(("builtins.getattr", "__builtin__.getattr"))

#: Element types as torch names them, with ours.
TORCH_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_OTHER_TYPES = [
    "complex32",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
    "quint8",
    "qint8",
    "qint32",
    "quint4x2",
    "quint2x4",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
]

#: torch's typed storage classes and their element types.
STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}

KNOWN: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): REBUILD_V2,
    ("torch._utils", "_rebuild_tensor_v3"): REBUILD_V3,
    ("torch._utils", "_rebuild_parameter"): PARAMETER,
    ("torch._utils", "_rebuild_parameter_with_state"): PARAMETER_WITH_STATE,
    ("torch._tensor", "_rebuild_from_type_v2"): FROM_TYPE,
    ("torch", "Tensor"): TENSOR_TYPE,
    ("torch.nn.parameter", "Parameter"): TENSOR_TYPE,
    ("torch.nn.parameter", "Buffer"): TENSOR_TYPE,
    ("torch", "Size"): SIZE,
    ("torch", "device"): DEVICE,
    ("torch.storage", "UntypedStorage"): StorageType("UntypedStorage", "U8", untyped=True),
    ("collections", "OrderedDict"): DICT,
    ("collections", "defaultdict"): DICT,
    ("_codecs", "encode"): ENCODE,
    ("copyreg", "_reconstructor"): RECONSTRUCT,
    ("copy_reg", "_reconstructor"): RECONSTRUCT,
    **{(module, name): SET for module in ("builtins", "__builtin__") for name in ("set", "frozenset")},
    **{
        (module, name): StorageType(name, dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in STORAGES.items()
    },
    **{("torch", name): ElementType(name, dtype) for name, dtype in TORCH_TYPES.items()},
    **{("torch", name): ElementType(name, None) for name in _OTHER_TYPES},
}

#: Names below these build tensors in ways that this reader does not know (sparse, quantised, distributed …).
TENSOR_MAKERS = ("torch._utils._rebuild", "torch._tensor.", "torch.storage.", "torch.distributed.", "torchao.")
