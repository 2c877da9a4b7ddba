"""FP8 weights with scales: which scale belongs to which weight, and the weight's values as a source.

Known are one scale per tensor, per row, and per block of rows and columns (``weight_scale_inv`` as DeepSeek and Qwen
publish it, ``weight_scale`` as FBGEMM, ModelOpt and compressed-tensors write it); a value is its code times its scale,
whatever the name. Scales of activations are of no use to weights and are passed over. Other packed weights are
refused by :mod:`convert.packed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.cast import Array, to_float32
from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.formats.spec import Scale, TensorSpec
from convert.packed import is_float8_scheme
from convert.report import fold_names
from convert.source import FilePool, Source, read_rows

_SUFFIXES = ("_scale_inv", "_scale")
#: Endings of tensors that say how activations or the cache are scaled while the model runs.
_ACTIVATIONS = (
    *(".input_scale", ".input_scale_ub", ".activation_scale", ".output_scale", ".input_global_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
#: What DeepSeek and Qwen use, and what is taken where the config gives no size.
_BLOCK = (128, 128)


def _table_e4m3() -> NDArray[np.float32]:
    """Values of the 256 codes: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    positive = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    positive[127] = math.nan
    return np.concatenate([positive, -positive]).astype(np.float32)


def _table_e5m2() -> NDArray[np.float32]:
    """Values of the 256 codes: the upper half of a float16, infinities and NaN included."""
    return (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32)


TABLES = {"F8_E4M3": _table_e4m3(), "F8_E5M2": _table_e5m2()}


class Float8(Source):
    """The values of an FP8 weight, in float32 (exact: 4 bits of mantissa times 24, rounded once).

    Args:
        spec: The codes; ``spec.scale`` tells the scales, of which only those of the rows asked for are read.
        pool: Open files.
    """

    def __init__(self, spec: TensorSpec, pool: FilePool) -> None:
        assert spec.scale is not None
        self.codes = pool.source(replace(spec, scale=None))
        self.scales = pool.source(spec.scale.spec)
        self.block = spec.scale.block
        self.shape = self.codes.shape
        self.dtype = "F32"

    @property
    def whole(self) -> bool:
        """See :attr:`Source.whole`."""
        return self.codes.whole

    def read(self, start: int, stop: int) -> Array:
        """See :meth:`Source.read`."""
        out: NDArray[np.float32] = np.take(TABLES[self.codes.dtype], self.codes.read(start, stop).view(np.uint8))
        if out.ndim == 3:  # experts: one matrix of scales each
            grids = self._grid(start, stop).reshape(stop - start, *self._cells((out.shape[1], out.shape[2])))
            for matrix, scales in zip(out, grids, strict=True):
                self._multiply(matrix, scales, 0)
            return out
        rows = out.reshape(stop - start, -1)
        cells = self._cells((self.shape[0], rows.shape[1]))
        first = min(start // self.block[0], cells[0] - 1)
        last = min(-(-stop // self.block[0]), cells[0])
        if cells[0] == 1 or math.prod(self.scales.shape) == 1:
            grid = self._grid(0, self.scales.shape[0]).reshape(cells)
            first = 0
        else:
            grid = self._grid(first, last).reshape(last - first, cells[1])
        self._multiply(rows, grid, start - first * self.block[0])
        return out

    def _cells(self, shape: tuple[int, ...]) -> tuple[int, int]:
        return -(-shape[0] // self.block[0]), -(-shape[1] // self.block[1])

    def _grid(self, start: int, stop: int) -> NDArray[np.float32]:
        return to_float32(read_rows(self.scales, start, stop), self.scales.dtype)

    def _multiply(self, rows: NDArray[np.float32], grid: NDArray[np.float32], skip: int) -> None:
        """Multiply ``[n, cols]`` in place by ``grid``, of whose first row of scales ``skip`` rows lie before."""
        height, width = self.block
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # what narrowing loses is counted later
            if height == 1:
                rows *= np.repeat(grid, width, axis=1)[:, : rows.shape[1]] if grid.shape[1] > 1 else grid
                return
            for cell, scales in enumerate(grid):
                part = rows[max(0, cell * height - skip) : max(0, (cell + 1) * height - skip)]
                part *= np.repeat(scales, width)[: rows.shape[1]] if scales.size > 1 else scales


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
            found = _block_of(spec, scale, block)
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
    spec: TensorSpec, scale: TensorSpec, block: tuple[int, int] | None
) -> tuple[tuple[int, int], str] | Problem:
    """The block that each scale is for, with its word, or why there is none."""
    rows, cols = (*spec.shape, 1, 1)[:2] if len(spec.shape) < 2 else spec.shape[-2:]
    lead = spec.shape[:-2]
    if not DTYPES[scale.dtype].is_float:
        return Problem(
            "scale",
            f"{scale.name!r} is {scale.dtype}, which is no type for scales.",
            tensor=scale.name,
            file=str(scale.file),
            found=scale.dtype,
            wanted=["F32", "BF16", "F16"],
            hint="Dequantise it with the library that wrote it, and convert that.",
        )
    if len(spec.shape) <= 2 and math.prod(scale.shape) == 1:
        return (max(rows, 1), max(cols, 1)), "one scale per tensor"
    wanted: list[list[int]] = []
    known = ((1, cols), "one per row"), (block or _BLOCK, "one per block of {} x {}".format(*(block or _BLOCK)))
    for size, word in known:
        cells = (*lead, -(-rows // max(1, size[0])), -(-cols // max(1, size[1])))
        if scale.shape == cells or (word == "one per row" and scale.shape == cells[:-1]):
            return size, word
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
