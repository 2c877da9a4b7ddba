"""Writing a corrected copy of a checkpoint that converts, loads and misbehaves.

What is wrong and what undoes it is :mod:`convert.faults`' matter, the same for ``diagnose``, which runs the corrected
model, and for this module, which writes it; so the two cannot disagree. The copy has the source's layout, container and
types, and goes through the ordinary plan and engine. What no fix touches is compared with the source afterwards.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.checkpoint import Checkpoint, open_checkpoint
from convert.dtypes import DTYPES
from convert.errors import ConvertError, Problem, UsageError
from convert.faults import FAULTS, Case, Fault, cases, parse_fix
from convert.gguf_request import GgufRequest
from convert.layout import Key
from convert.plan import PIECE_BYTES, ConversionPlan, Request, make_plan
from convert.report import fold_names
from convert.run import Summary, run
from convert.source import Cast, Source, read_rows
from convert.views import View, view

if TYPE_CHECKING:
    from convert.table import MappingTable

SCHEMA = "convert.repair/1"


@dataclass(slots=True)
class RepairPlan:
    """A repair, decided, with nothing written yet.

    Attributes:
        source: The checkpoint that is to be repaired.
        fixes: What will be undone, in order.
        view: The source as it ought to be.
        conversion: The plan of the copy.
        changed: Tensors (the source's names) that get other values.
        config: Entries of the hub config that change: ``key: (before, after)``.
    """

    source: Checkpoint
    fixes: tuple[Case, ...]
    view: View
    conversion: ConversionPlan
    changed: list[str] = field(default_factory=list)
    config: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """What the record of the copy says of the repair."""
        return {
            "fixes": [{"fix": f.fix, "fault": f.name, "words": f.words} for f in self.fixes],
            "changed": fold_names(self.changed),
            "tensors_changed": len(self.changed),
            "config": {key: {"before": old, "after": new} for key, (old, new) in self.config.items()},
        }


@dataclass(slots=True)
class Repaired:
    """What a repair did (``--json`` prints it).

    Attributes:
        plan: What was decided.
        summary: What was written.
        untouched: Tensors that were compared with the source, bit for bit.
    """

    plan: RepairPlan
    summary: Summary
    untouched: int

    def as_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return self.summary.as_json() | {"schema": SCHEMA, **self.plan.as_json(), "untouched": self.untouched}


def known_fixes() -> list[Fault]:
    """The faults that can be undone; some have one fix between them."""
    return [fault for fault in FAULTS.values() if fault.fix]


def applicable_fixes(src: str | Path | Checkpoint, **options: Any) -> list[Case]:
    """The fixes that fit a checkpoint's architecture (not: those that it needs), with the values worth trying."""
    opened = src if isinstance(src, Checkpoint) else open_checkpoint(src, **options)
    try:
        opened.require_sound()
        return [case for case in cases(opened) if case.undo(opened) is not None]
    finally:
        if opened is not src:
            opened.close()


def plan_repair(src: str | Path | Checkpoint, fixes: Sequence[str], **options: Any) -> RepairPlan:
    """Decide a repair; reads headers and writes nothing.

    Args:
        src: The checkpoint to repair, of any layout.
        fixes: Names of fixes, applied in this order.
        **options: As :func:`convert.checkpoint.open_checkpoint` takes them.

    Raises:
        UsageError: No fix, an unknown one, or the same twice.
        ConvertError: A fix does not apply to this model, or the source is damaged.
    """
    chosen = _chosen(fixes)
    opened = src if isinstance(src, Checkpoint) else open_checkpoint(src, **options)
    try:
        return _plan(opened, chosen)
    except BaseException:
        if opened is not src:
            opened.close()
        raise


def repair(
    src: str | Path | Checkpoint,
    out: str | Path,
    *,
    fixes: Sequence[str],
    overwrite: bool = False,
    force: bool = False,
    resume: bool = False,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    cancel: threading.Event | None = None,
    **options: Any,
) -> Repaired:
    """Write a corrected copy of a checkpoint, in its own layout, container and types.

    Args:
        src: The checkpoint to repair, of any layout.
        out: The folder to make (a file for GGUF).
        fixes: Names of fixes, applied in this order (:func:`known_fixes`).
        overwrite: Replace an existing output.
        force: Write although free space or memory look too small.
        resume: Go on from what an earlier run of the same repair left, and leave what is finished should this one stop.
        threads: Workers.
        progress: Called with the number of bytes written since the last call, from any thread.
        cancel: Set it to stop; the partial output is removed (kept with ``resume``).
        **options: As :func:`convert.checkpoint.open_checkpoint` takes them.

    Raises:
        UsageError: No fix, an unknown one, or the same twice.
        ConvertError: A fix does not apply, the source is damaged, or what no fix touches came out differently.
    """
    plan = plan_repair(src, fixes, **options)
    how = {"overwrite": overwrite, "force": force, "resume": resume, "threads": threads}
    try:
        return carry_out(plan, Path(out), progress=progress, cancel=cancel, **how)
    finally:
        if plan.source is not src:
            plan.source.close()


def carry_out(plan: RepairPlan, out: Path, **how: Any) -> Repaired:
    """Write what :func:`plan_repair` decided (keywords as :func:`convert.run.run` takes them), and check the rest."""
    conversion = plan.conversion
    conversion.bind(out)
    _tell_record(plan)
    summary = run(conversion, out, **how)
    try:
        untouched = _check_untouched(plan, conversion.main_path(out))
    except ConvertError:
        _set_aside(conversion, out)
        raise
    return Repaired(plan, summary, untouched)


def _chosen(fixes: Sequence[str]) -> tuple[Case, ...]:
    if not fixes:
        raise UsageError("nothing to repair: no --fix was given.", hint="`convert repair --list` names the fixes.")
    if isinstance(fixes, str):  # which is a sequence of texts, too: its letters
        fixes = [fixes]
    for number, text in enumerate(fixes):
        if text in fixes[:number]:
            raise UsageError(f"--fix {text} is given twice.", hint="Each fix is applied once, in the order given.")
        named = FAULTS.get(text.partition("=")[0])
        if named is not None:
            fix = f"Its fix is called {named.fix!r}." if named.fix else "What is lost cannot be brought back."
            raise UsageError(f"{text!r} is the name of a fault.", hint=fix)
    return tuple(parse_fix(text) for text in fixes)


def _plan(opened: Checkpoint, chosen: tuple[Case, ...]) -> RepairPlan:
    opened.require_sound()
    found = _corrected(opened, chosen)
    config = {
        key: (opened.config.get(key), found.config.get(key))
        for key in sorted({*opened.config, *found.config})
        if opened.config.get(key) != found.config.get(key)
    }
    changed = _stored_names(opened, found)
    source = found.opened
    source.notes.extend(_notes(chosen, changed, config))
    if again := [name for name, dtype in _own_types(opened, found) if DTYPES[dtype.upper()].is_quantized]:
        source.notes.append(f"computed and quantised again to their own type: {', '.join(fold_names(again))}")
    table = opened.table if opened.table.names_file or opened.table.book_class else None
    conversion = make_plan(source, _request(opened, found), table=table)
    return RepairPlan(opened, chosen, found, conversion, changed, config)


def _corrected(opened: Checkpoint, chosen: Iterable[Case]) -> View:
    found = view(opened)
    for case in chosen:
        step = case.undo(found.opened)
        if step is None:
            raise ConvertError(
                Problem(
                    "fix",
                    f"--fix {case.fix} does not apply to {opened.path.name}: it is for the case that {case.words}, "
                    "which this model has not, or cannot have.",
                    found=opened.family,
                    wanted=case.fix,
                    hint="`convert repair SRC --list` says which fixes apply; `convert diagnose SRC` which are needed.",
                )
            )
        found = step
    return _in_own_types(opened, found)


def _in_own_types(opened: Checkpoint, found: View) -> View:
    """Values that a fix computes go back into the type that the tensor was stored in."""
    old = opened.match.logical
    cast: dict[Key, Source] = {}
    for key in found.changed:
        source, own = found.opened.match.logical[key], old[key].dtype if key in old else None
        if own and source.dtype != own and DTYPES[own].is_float and DTYPES[source.dtype].is_float:
            cast[key] = Cast(source, own)
    return view(found.opened, tensors=cast) if cast else found


def _moved(opened: Checkpoint, found: View) -> set[Key]:
    """Logical tensors that the copy will hold with other values, or in another order."""
    keys = {*found.changed, *found.removed}
    if found.pairing != opened.pairing or opened.pairing != opened.table.convention_of(opened.layout, "rope"):
        keys |= {key for key in opened.match.logical if opened.table.rows[key[0]].rope is not None}
    return keys


def _stored_names(opened: Checkpoint, found: View) -> list[str]:
    moved = _moved(opened, found)
    return [slot.name for slot in opened.match.slots.values() if moved.intersection(slot.keys)]


def _notes(chosen: Iterable[Case], changed: Sequence[str], config: dict[str, tuple[Any, Any]]) -> list[str]:
    out = [f"repaired: {case.fix} ({case.words})" for case in chosen]
    if changed:
        out.append(f"changed by the repair: {', '.join(fold_names(changed))} ({len(changed)} tensors)")
    else:
        out.append("the repair changes the config; every tensor is copied as it is")
    out += [f"config: {key} was {_shown(old)} and is {_shown(new)}" for key, (old, new) in config.items()]
    return out


def _shown(value: Any) -> str:
    return "absent" if value is None else json.dumps(value, sort_keys=True, default=str)


def _request(opened: Checkpoint, found: View) -> Request:
    """What keeps the source's own form."""
    request = Request(target=opened.layout, tie=_tie(opened), allow_reference=opened.layout == "scratch")
    if opened.layout == "scratch":
        request.format = "pth" if opened.format == "torch" else "safetensors"
        request.book_class = opened.table.book_class or _book_class(opened.raw_config, opened.table)
    elif opened.layout == "meta":
        request.model_parallel = len(opened.files)
    elif opened.layout == "hf" and len(opened.files) > 1:
        request.max_shard_size = max(file.stat().st_size for file in opened.files)
    elif opened.layout == "gguf":
        most = max(file.stat().st_size for file in opened.files) if len(opened.files) > 1 else None
        request.gguf = GgufRequest(tensor_types=_own_types(opened, found), split_max_size=most)
        request.tokenizer = any(key.startswith("tokenizer.") for key in opened.metadata)
    return request


def _tie(opened: Checkpoint) -> str | None:
    """A head that is stored beside an equal embedding, and not as one with it, stays a tensor of its own."""
    pair = opened.match.tied_pair()
    if pair is None or opened.layout not in ("hf", "gguf"):
        return None
    head, base = (opened.match.logical.get(key) for key in pair)
    stored = head is not None and head is not base
    return (
        "copy" if stored and not opened.config.get("tie_word_embeddings") and opened.match.tied(sampled=True) else None
    )


def _book_class(raw: dict[str, Any], table: MappingTable) -> str | None:
    stated = raw.get("class")
    return stated if isinstance(stated, str) and stated in table.classes else None


def _own_types(opened: Checkpoint, found: View) -> list[tuple[str, str]]:
    """Tensors whose blocks had to be opened are quantised again to the type they had."""
    out = []
    for slot in opened.match.slots.values():
        for key in slot.keys:
            was = opened.match.logical.get(key)
            source = found.opened.match.logical.get(key)
            if was is not None and source is not None and source.dtype != was.dtype:
                out.append((slot.name, was.dtype.lower()))
    return out


def _tell_record(plan: RepairPlan) -> None:
    """Put what was repaired into the record of the copy."""
    from convert.record import dump

    plan.conversion.repair = plan.as_json()  # a GGUF file's record is made anew when the file gets its name
    for name, value in plan.conversion.sidecars.items():
        if name.endswith("conversion.json") and isinstance(value, bytes):
            plan.conversion.sidecars[name] = dump(json.loads(value) | {"repair": plan.as_json()})


def _check_untouched(plan: RepairPlan, made_at: Path) -> int:
    """Compare every tensor that no fix touches with the source, as stored; returns how many.

    Raises:
        ConvertError: One of them differs.
    """
    opened = plan.source
    chosen = opened.options
    said = {"table": chosen.table, "names": chosen.names, "family": chosen.family, "follow_links": chosen.follow_links}
    moved = _moved(opened, plan.view)
    problems, count = [], 0
    with open_checkpoint(made_at, **{key: value for key, value in said.items() if value is not None}) as made:
        made.require_sound()
        for key, source in opened.match.logical.items():
            there = made.match.logical.get(key)
            if key in moved or there is None:  # an equal head may have become one with its embedding
                continue
            count += 1
            if not _equal(source, there):
                name = next(s.name for s in opened.match.slots.values() if key in s.keys)
                problems.append(
                    Problem(
                        "repair",
                        f"{name!r} was to be copied as it is and came out differently.",
                        tensor=name,
                        hint="The disk, or another program that writes the source; try again.",
                    )
                )
    if problems:
        raise ConvertError(problems)
    return count


def _equal(a: Source, b: Source) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rows = a.shape[0]
    step = rows if len(a.shape) == 1 or a.whole or b.whole else max(1, PIECE_BYTES // max(1, a.row_bytes))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if read_rows(a, start, stop).tobytes() != read_rows(b, start, stop).tobytes():
            return False
    return True


def _set_aside(conversion: ConversionPlan, out: Path) -> None:
    """Nothing that failed keeps a name under which it would be taken for good."""
    from convert.output import remove

    for path in [out.with_name(f.name) for f in conversion.files] if conversion.single_file else [out]:
        failed = path.with_name(path.name + ".failed")
        remove(failed)
        path.replace(failed)


__all__ = [
    "RepairPlan",
    "Repaired",
    "applicable_fixes",
    "carry_out",
    "known_fixes",
    "plan_repair",
    "repair",
]
