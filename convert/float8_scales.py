"""FP8 weights with scales: which scale belongs to which weight.

Known are one scale per tensor, per row, and per block of rows and columns (``weight_scale_inv`` as DeepSeek and Qwen
publish it, ``weight_scale`` as FBGEMM, ModelOpt and compressed-tensors write it), floats or bare exponents (E8M0, as
MXFP8 has them); a value is its code times its scale, whatever the name (:mod:`convert.float8`). Scales of activations
are of no use to weights and are passed over. Other packed weights are refused by :mod:`convert.packed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.float8 import EXPONENT_TYPES, TABLES
from convert.formats.spec import Scale, TensorSpec
from convert.packed import is_float8_scheme
from convert.report import fold_names

_SUFFIXES = ("_scale_inv", "_scale")
#: Endings of tensors that say how activations or the cache are scaled while the model runs.
_ACTIVATIONS = (
    *(".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
#: What DeepSeek and Qwen use, and what is taken where the config gives no size.
_BLOCK = (128, 128)
#: What shares a scale in the MX formats (OCP Microscaling Formats 1.0, section 5.2).
_MX_BLOCK = (1, 32)


def attach_scales(
    tensors: dict[str, list[TensorSpec]], config: Mapping[str, Any] | None, notes: list[str]
) -> tuple[dict[str, list[TensorSpec]], dict[str, Any] | None]:
    """Give every FP8 weight its scales, and take the scales out of the tensors.

    Args:
        tensors: All tensors by name.
        config: The config as its file holds it.
        notes: What was found is added here.

    Returns:
        Both without what they say of FP8; untouched where there is none.

    Raises:
        FormatError: A scale is missing, has no weight, or does not fit it; all at once.
    """
    weights = [n for n, specs in tensors.items() if specs[0].dtype in TABLES and not n.endswith(_SUFFIXES)]
    declared = (config or {}).get("quantization_config")
    if not weights or (isinstance(declared, Mapping) and not is_float8_scheme(declared)):
        return tensors, dict(config) if config is not None else None
    block = _declared_block(declared)
    out = dict(tensors)
    problems: list[Problem] = []
    how: dict[str, int] = {}
    for name in weights:
        suffixes = [s for s in _SUFFIXES if name + s in tensors]
        if len(suffixes) != 1 or len(tensors[name]) > 1:
            problems.append(_unscaled(name, tensors[name], suffixes))
        for suffix in suffixes:
            out.pop(name + suffix, None)
        if len(suffixes) == 1:
            spec, scale = tensors[name][0], tensors[name + suffixes[0]][0]
            found = _block_of(spec, scale, block, declared)
            if isinstance(found, Problem):
                problems.append(found)
                continue
            size, word = found
            out[name] = [replace(spec, scale=Scale(scale, size))]
            how[word] = how.get(word, 0) + 1
    spare = [n for n in out if n.endswith(_ACTIVATIONS)]
    for name in spare:
        del out[name]
    problems += [_spare(n, tensors) for n in out if n.endswith((".weight_scale", ".weight_scale_inv"))]
    if problems:
        from convert.report import fold_problems

        raise FormatError(fold_problems(problems))
    kinds = " and ".join(sorted({tensors[n][0].dtype for n in weights}))
    ways = ", ".join(f"{count} with {word}" for word, count in how.items())
    notes.append(f"FP8 weights ({kinds}) are multiplied by their scales: {ways}")
    if spare:
        notes.append(f"ignored {', '.join(fold_names(spare))}: scales of activations, which weights do not need")
    rest = {k: v for k, v in (config or {}).items() if k != "quantization_config"} if config is not None else None
    return out, rest


def _declared_block(declared: Any) -> tuple[int, int] | None:
    """The block size that a config states, in one of its spellings."""
    if not isinstance(declared, Mapping):
        return None
    groups = declared.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = first.get("weights") if isinstance(first, Mapping) else None
    stated = declared.get("weight_block_size")
    if stated is None and isinstance(weights, Mapping):
        stated = weights.get("block_structure")
        if stated is None and isinstance(weights.get("group_size"), int) and weights["group_size"] > 0:
            stated = [1, weights["group_size"]]
    if stated is None:
        return None
    if isinstance(stated, list | tuple) and len(stated) == 2 and all(type(x) is int and x > 0 for x in stated):
        return stated[0], stated[1]
    raise FormatError(
        Problem(
            "config",
            f"the config's weight_block_size is {stated!r}.",
            found=str(stated),
            wanted="two positive numbers",
            hint="It looks like this: [128, 128].",
        )
    )


def _block_of(
    spec: TensorSpec, scale: TensorSpec, block: tuple[int, int] | None, declared: Any
) -> tuple[tuple[int, int], str] | Problem:
    """The block that each scale is for, with its word, or why there is none."""
    rows, cols = (*spec.shape, 1, 1)[:2] if len(spec.shape) < 2 else spec.shape[-2:]
    lead = spec.shape[:-2]
    exponents, stated = scale.dtype in EXPONENT_TYPES, _states_exponents(declared)
    if not exponents and not DTYPES[scale.dtype].is_float:
        return _no_scales(scale)
    if len(spec.shape) <= 2 and math.prod(scale.shape) == 1 and (scale.dtype != "U8" or stated):
        return (max(rows, 1), max(cols, 1)), "one scale per tensor"
    wanted: list[list[int]] = []
    sizes = [block or _BLOCK, *([_MX_BLOCK] if exponents and block != _MX_BLOCK else ())]
    for size, word in [((1, cols), "one per row"), *((s, f"one per block of {s[0]} x {s[1]}") for s in sizes)]:
        cells = (*lead, -(-rows // max(1, size[0])), -(-cols // max(1, size[1])))
        if scale.shape == cells or (word == "one per row" and scale.shape == cells[:-1]):
            return (size, word) if scale.dtype != "U8" or stated or size == _MX_BLOCK else _no_scales(scale)
        wanted.append(list(cells))
    return Problem(
        "scale",
        f"{scale.name!r} is {list(scale.shape)}, which does not go with {spec.name!r} {list(spec.shape)}.",
        tensor=scale.name,
        file=str(scale.file),
        found=list(scale.shape),
        wanted=[[1], *wanted],
        hint=f"Blocks of {(block or _BLOCK)[0]} x {(block or _BLOCK)[1]} are "
        + ("what the config's weight_block_size says." if block else "assumed; the config has no weight_block_size."),
    )


def _states_exponents(declared: Any) -> bool:
    """Whether a config says that bytes beside the weights are exponents, in one of the spellings of MXFP8."""
    if not isinstance(declared, Mapping):
        return False
    groups = declared.get("config_groups")
    weights = (
        [g.get("weights") for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    )
    kinds = [w.get("scale_dtype") for w in weights if isinstance(w, Mapping)]
    return (
        declared.get("scale_fmt") == "ue8m0"
        or str(declared.get("quant_algo")).upper() == "MXFP8"
        or "torch.uint8" in kinds
    )


def _no_scales(scale: TensorSpec) -> Problem:
    bytes_ = scale.dtype == "U8"
    return Problem(
        "scale",
        f"{scale.name!r} is {scale.dtype}, which is no type for scales"
        + (": that its bytes are exponents, neither the config nor blocks of 1 x 32 say." if bytes_ else "."),
        tensor=scale.name,
        file=str(scale.file),
        found=scale.dtype,
        wanted=["F32", "BF16", "F16", "F8_E8M0"],
        hint='If they are, put "scale_fmt": "ue8m0" into the config\'s quantization_config.'
        if bytes_
        else "Dequantise it with the library that wrote it, and convert that.",
    )


def _unscaled(name: str, specs: list[TensorSpec], suffixes: list[str]) -> Problem:
    spec = specs[0]
    if len(specs) > 1:
        message = f"{name!r} is {spec.dtype} and lies in {len(specs)} files; FP8 in parts is not read."
    elif suffixes:
        message = f"{name!r} has scales twice: {' and '.join(name + s for s in suffixes)}."
    else:
        message = f"{name!r} is {spec.dtype}, but its scale is missing ({name}_scale_inv or {name}_scale)."
    return Problem(
        "scale",
        message,
        tensor=name,
        file=str(spec.file),
        found=[name + s for s in suffixes],
        wanted="one tensor of scales",
        hint="An incomplete download, or weights that were quantised in another way.",
    )


def _spare(name: str, tensors: Mapping[str, list[TensorSpec]]) -> Problem:
    base = next(name.removesuffix(s) for s in _SUFFIXES if name.endswith(s))
    specs = tensors.get(base)
    what = f"{base!r} is {specs[0].dtype}" if specs else f"there is no {base!r}"
    return Problem(
        "scale",
        f"{name!r} is a scale without an FP8 weight: {what}.",
        tensor=name,
        file=str(tensors[name][0].file),
        found=specs[0].dtype if specs else None,
        wanted=["F8_E4M3", "F8_E5M2"],
        hint="Files of different models in one folder, or a weight that was dequantised and kept its scale.",
    )
