"""Plans of layouts that spread one model over several files: Hugging Face shards, Meta's model-parallel files."""

from __future__ import annotations

from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.formats.spec import Entry
from convert.layout import Dims, Slot
from convert.plan import ConversionPlan, Output, Target, weight_file
from convert.report import fold_problems
from convert.source import Rows, Source


def _groups(plan: ConversionPlan, tensors: list[tuple[str, Source]]) -> list[list[tuple[str, Source]]]:
    """Tensors in order, cut so that no file is larger than the limit where a tensor is not."""
    groups: list[list[tuple[str, Source]]] = [[]]
    size = 0
    for name, source in tensors:
        nbytes = DTYPES[source.dtype].nbytes(source.shape)
        if groups[-1] and size + nbytes > plan.request.max_shard_size:
            groups.append([])
            size = 0
        groups[-1].append((name, source))
        size += nbytes
    return groups


def distribute(plan: ConversionPlan, tensors: list[tuple[str, Source]]) -> None:
    """The files of a distributed checkpoint, filled like shards, and its metadata."""
    from convert.formats.dcp_writer import layouts

    groups = _groups(plan, tensors)
    plan.files += layouts([[Entry(n, s.dtype, s.shape) for n, s in group] for group in groups])
    plan.outputs += [Output(s, (Target(i, n),)) for i, group in enumerate(groups) for n, s in group]


def shard(plan: ConversionPlan, tensors: list[tuple[str, Source]]) -> None:
    """Fill files in order up to the limit; one file is ``model.safetensors``, several get an index."""
    groups = _groups(plan, tensors)
    total = len(groups)
    for i, group in enumerate(groups):
        name = "model.safetensors" if total == 1 else f"model-{i + 1:05d}-of-{total:05d}.safetensors"
        plan.files.append(weight_file(name, [Entry(n, s.dtype, s.shape) for n, s in group], plan))
        plan.outputs += [Output(s, (Target(i, n),)) for n, s in group]


def split_model_parallel(plan: ConversionPlan, chosen: list[tuple[Slot, Source]], dims: Dims) -> None:
    """Split every tensor along its row's parallel axis over ``consolidated.NN.pth`` files; norms go into each.

    Raises:
        ConvertError: A tensor's heads or rows cannot be shared evenly; all of them are named.
    """
    ranks = plan.request.model_parallel
    axes: dict[str, int | None] = {}
    shared: list[tuple[Slot, int]] = []
    for slot, _ in chosen:
        row = plan.table.rows[slot.keys[0][0]]
        axis = None if row.parallel is None else int(dims.value(row.parallel, slot.keys[0][1]))
        axes[slot.name] = axis if ranks > 1 else None
        if axis is None:
            continue
        units = slot.shape[axis]
        if row.rope is not None:
            units = int(dims.value(row.rope))
        elif row.shape[axis].text in ("K*hd", "H*hd"):
            units = int(dims[row.shape[axis].text[0]])
        shared.append((slot, units))
    fits = ", ".join(str(n) for n in range(1, 65) if all(units % n == 0 for _, units in shared))
    problems = [
        Problem(
            "model_parallel",
            f"{slot.name!r} has {units} {'heads' if units != slot.shape[axes[slot.name] or 0] else 'rows'} on its "
            f"parallel axis, which {ranks} files cannot share evenly.",
            tensor=slot.name,
            found=units,
            wanted=f"a multiple of {ranks}",
            hint=f"--model-parallel has to divide all of them: {fits}.",
        )
        for slot, units in shared
        if units % ranks
    ]
    if problems:
        raise ConvertError(fold_problems(problems))
    for rank in range(ranks):
        entries = [Entry(s.name, x.dtype, _share(s.shape, axes[s.name], ranks)) for s, x in chosen]
        plan.files.append(weight_file(f"consolidated.{rank:02d}.pth", entries, plan))
    for slot, source in chosen:
        axis = axes[slot.name]
        if axis == 0:
            part = slot.shape[0] // ranks
            plan.outputs += [
                Output(Rows(source, r * part, (r + 1) * part), (Target(r, slot.name),)) for r in range(ranks)
            ]
        elif axis == 1:
            part = slot.shape[1] // ranks
            targets = [Target(r, slot.name, (r * part, (r + 1) * part)) for r in range(ranks)]
            plan.outputs.append(Output(source, tuple(targets)))
        else:
            plan.outputs.append(Output(source, tuple(Target(r, slot.name) for r in range(ranks))))


def _share(shape: tuple[int, ...], axis: int | None, ranks: int) -> tuple[int, ...]:
    if axis is None:
        return shape
    return tuple(n // ranks if i == axis else n for i, n in enumerate(shape))
