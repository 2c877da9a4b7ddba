"""A conversion's plan made again, from its record or from the output itself, and where its tensors lie in the output.

For ``convert check --source``. Names of files do not count, and neither do cuts into shards: tensors are found by their
names, wherever they lie. Nothing is compared here (:mod:`convert.rederive` does that).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from convert.checkpoint import Checkpoint, Options, open_checkpoint
from convert.detect import detect
from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem
from convert.formats.spec import Container, Entry, TensorSpec
from convert.gguf_request import GgufRequest
from convert.names import names_table
from convert.plan import ConversionPlan, Request, Target, make_plan, request_dtype
from convert.record import entries
from convert.rederive import Place
from convert.report import fold_problems
from convert.source import FilePool


def open_source(src: str | Path, record: Mapping[str, Any], options: Mapping[str, Any]) -> Checkpoint:
    """Open the source as the recorded conversion did; what is given now wins.

    Raises:
        UsageError: There is nothing at ``src``.
        ConvertError: It is no checkpoint.
    """
    said = _section(record, "source")
    known = {f.name for f in fields(Options)} - {"follow_links"}  # which a record, perhaps a stranger's, cannot allow
    chosen = {k: v for k, v in _section(said, "options").items() if k in known and k != "config"}
    if _section(said, "options").get("config") and isinstance(record.get("config"), Mapping):
        chosen["config"] = dict(record["config"])
    if isinstance(said.get("names"), Mapping) and not options.get("names"):
        chosen["table"] = names_table(said["names"], "the record")
    return open_checkpoint(src, **{**chosen, **{k: v for k, v in options.items() if v is not None}})


def plan_again(source: Checkpoint, record: Mapping[str, Any], containers: Sequence[Container]) -> ConversionPlan:
    """The plan whose output is checked.

    Args:
        source: What it was made from.
        record: Its record; empty where there is none, and the output itself then tells what was asked for.
        containers: The headers of its files.

    Raises:
        ConvertError: The record is damaged, or the source cannot be converted so (any more).
    """
    target = _section(record, "target")
    fixes = entries(_section(record, "repair").get("fixes"))
    if fixes:
        from convert.repair import plan_repair

        return plan_repair(source, [str(item.get("fix")) for item in fixes]).conversion
    if target.get("options") is None:
        return make_plan(source, _guessed(source, containers))
    try:
        names = target.get("names")
        table = names_table(names, "the record") if isinstance(names, Mapping) else None
        return make_plan(source, _recorded(target), table=table)
    except (TypeError, ValueError, KeyError, AttributeError) as error:  # whatever somebody wrote into it
        raise ConvertError(
            Problem("record", f"the record does not tell what was asked for: {error}.", hint="Is it damaged?")
        ) from None


def _section(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _recorded(target: Mapping[str, Any]) -> Request:
    said = dict(_section(target, "options"))
    gguf = dict(_section(said, "gguf"))
    if "tensor_types" in gguf:
        gguf["tensor_types"] = [(str(pattern), str(kind)) for pattern, kind in gguf["tensor_types"]]
    return Request(
        target=str(target["layout"]),
        **{
            k: said[k] for k in _names(Request) & set(said) - {"target", "gguf", "dtype", "tokenizer", "tokenizer_path"}
        },
        dtype=request_dtype(said.get("dtype")),
        tokenizer=False,  # only tensors are compared
        gguf=GgufRequest(**{k: gguf[k] for k in _names(GgufRequest) & set(gguf)}),
    )


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _guessed(source: Checkpoint, containers: Sequence[Container]) -> Request:
    """What must have been asked for: layout, types and head are seen, the rest does not matter for the tensors."""
    found = tensors_of(containers)
    raw = containers[0].metadata if containers[0].format == "gguf" else None
    specs = {name: [spec] for (_, name), spec in found.items()}
    table, layout = detect(specs, raw, format=containers[0].format, family=source.family, layout=None, table=None)
    kinds = {spec.dtype for spec in found.values() if DTYPES[spec.dtype].is_float}
    wanted = next(iter(kinds)) if len(kinds) == 1 else None
    if layout == "gguf":
        types = [(name, spec.dtype.lower()) for (_, name), spec in found.items()]
        return Request("gguf", tokenizer=False, gguf=GgufRequest(tensor_types=types))
    return Request(
        layout,
        dtype=wanted if wanted in ("F32", "F16", "BF16") else None,
        model_parallel=len(containers) if layout == "meta" else 1,
        format="pth" if layout == "scratch" and containers[0].format == "torch" else "safetensors",
        book_class=table.book_class if layout == "scratch" else None,
        allow_reference=True,
        tokenizer=False,
    )


def tensors_of(containers: Sequence[Container]) -> dict[tuple[int, str], TensorSpec]:
    """Every stored tensor, by the number of its file and its name."""
    out: dict[tuple[int, str], TensorSpec] = {}
    for number, container in enumerate(containers):
        tree = container.metadata.get("tree") if container.format == "torch" else container.tensors
        if isinstance(tree, Mapping):
            out |= {(number, str(name)): spec for name, spec in tree.items() if isinstance(spec, TensorSpec)}
    return out


class Places:
    """Where the tensors of a plan lie in an output.

    Args:
        plan: The plan.
        containers: The headers of the output's files, in their order.
        pool: Opens the files.

    Attributes:
        problems: Tensors that are absent, that nobody planned, or that have another shape or type.
    """

    def __init__(self, plan: ConversionPlan, containers: Sequence[Container], pool: FilePool) -> None:
        self.pool = pool
        self.problems: list[Problem] = []
        found = tensors_of(containers)
        ranks = plan.request.target == "meta"  # whose files have the same names in them
        wanted = {(n, e.name): e for n, file in enumerate(plan.files) for e in file.entries}
        there = found if ranks else {(0, name): spec for (_, name), spec in found.items()}
        self._where: dict[tuple[int, str], TensorSpec] = {}
        for (number, name), entry in wanted.items():
            spec = there.pop((number if ranks else 0, name), None)
            if spec is None:
                self._add("missing_tensor", name, plan.files[number].name, "is not in the output any more", None)
            elif problem := _other(entry, spec):
                self._add("tensor", name, spec.file.name, problem, [spec.dtype, list(spec.shape)])
            else:
                self._where[number, name] = spec
        for (_, name), spec in there.items():
            self._add("unexpected_tensor", name, spec.file.name, "is in the output and was not written by it", None)
        self.problems = fold_problems(self.problems)

    def _add(self, kind: str, name: str, file: str, what: str, found: Any) -> None:
        self.problems.append(Problem(kind, f"{name!r} {what}.", tensor=name, file=file, found=found))

    def __call__(self, target: Target) -> Place:
        """Where ``target`` lies."""
        spec = self._where.get((target.file, target.name))
        return None if spec is None else (self.pool.fd(spec.file), spec.offset)


def _other(entry: Entry, spec: TensorSpec) -> str | None:
    if (entry.dtype, entry.shape) != (spec.dtype, spec.shape):
        return f"is {spec.dtype} {list(spec.shape)}, and the source gives {entry.dtype} {list(entry.shape)}"
    return "is not stored in one piece any more" if spec.strides is not None else None
