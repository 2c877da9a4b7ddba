"""The plain type that FP8 and block-quantised tensors get, where a target does not keep them as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from convert.dtypes import ALIASES
from convert.float8 import TABLES

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.layout import Key


def widened_type(opened: Checkpoint, key: Key) -> str | None:
    """The type that an FP8 tensor gets where none is asked for: the config's, bfloat16 without; None for others."""
    specs = opened.match.specs.get(key)
    return stated_type(opened) if specs and specs[0].scale is not None else None


def stated_type(opened: Checkpoint) -> str:
    """The type that the config of an FP8 checkpoint states for computing, bfloat16 where it states none."""
    return _stated(opened) or "BF16"


def _stated(opened: Checkpoint) -> str | None:
    stated = opened.raw_config.get("dtype") or opened.raw_config.get("torch_dtype")
    kind = ALIASES.get(str(stated).removeprefix("torch."))
    return kind if kind in ("F32", "F16", "BF16") else None


def plain_type(opened: Checkpoint) -> str:
    """The checkpoint's own type, or what its FP8 is widened to."""
    return stated_type(opened) if opened.dtype in TABLES else opened.dtype


def widening(opened: Checkpoint, target: str, dtype: str | None) -> list[str]:
    """What a plan says of FP8 and block-quantised tensors: the type that they get where GGUF does not keep them."""
    if target == "gguf":  # whose types are told with its tensors
        return []
    specs = [spec for parts in opened.tensors.values() for spec in parts]
    out = []
    if kinds := sorted({s.dtype for s in specs if s.type.is_quantized}):
        out.append(f"block-quantised tensors ({', '.join(kinds)}) are dequantised to {dtype or 'F16'}")
    if count := sum(s.scale is not None for s in specs):
        why = "" if dtype else ", the type that the config states" if _stated(opened) else ", as the config states none"
        kind = dtype or stated_type(opened)
        out.append(f"{count} FP8 tensors are widened to {kind}{why}; quantization_config is left out")
    return out
