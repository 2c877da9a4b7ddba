"""Carrying a plan out: claim the output, write, check, and give it its name; complete or not at all.

How bytes get to their places is :mod:`convert.writer`'s business, where the output goes meanwhile
:mod:`convert.claim`'s.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert.choices import require_choice, require_positive
from convert.claim import Claim, sweep
from convert.errors import ConvertError, Problem, UsageError
from convert.io_errors import TRANSIENT, reading, writing
from convert.journal import JOURNAL_NAME, Journal, fingerprint
from convert.losses import loss_notes, lost
from convert.output import check_target, write_sidecar
from convert.plan import ConversionPlan
from convert.platform import available_memory, keep_freed_memory
from convert.readback import read_back, read_beside
from convert.record import seal
from convert.stamps import changes, stamps, touched
from convert.storage_crcs import Beside
from convert.writer import Cancelled, Progress, Writer, casts_within
from convert.zero_tails import zero_tail_notes

CHECKS = ("sampled", "full")


@dataclass(slots=True)
class Summary:
    """What a conversion did (``--json`` prints it).

    Attributes:
        out: The finished folder or file.
        files: Files written.
        tensors: Tensors written.
        bytes_written: Bytes of the output.
        seconds: Wall time, plan excluded.
        notes: Everything assumed, substituted, dropped or ignored.
        underflowed: Non-zero values that became zero in a narrower type, or as good as zero in blocks.
        clamped: Values too large for a narrower type that became its largest.
        resumed: Bytes that an earlier run had written, and that were compared with the source.
        checked_blocks: Blocks (with a full check: tensors) that were re-read and compared.
        checked: How: ``sampled`` or ``full``.
    """

    out: Path
    files: list[str]
    tensors: int
    bytes_written: int
    seconds: float
    notes: list[str] = field(default_factory=list)
    underflowed: int = 0
    clamped: int = 0
    resumed: int = 0
    checked_blocks: int = 0
    checked: str = "sampled"

    def as_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        return {
            "schema": "convert.conversion/1",
            "out": str(self.out),
            "files": self.files,
            "tensors": self.tensors,
            "bytes": self.bytes_written,
            "seconds": round(self.seconds, 3),
            "underflowed": self.underflowed,
            "clamped": self.clamped,
            "resumed": self.resumed,
            "check": self.checked,
            "checked_blocks": self.checked_blocks,
            "notes": self.notes,
        }


def run(
    plan: ConversionPlan,
    out: Path,
    *,
    threads: int = 2,
    overwrite: bool = False,
    force: bool = False,
    hashes: bool = False,
    resume: bool = False,
    check: str = "sampled",
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
    writer_type: Callable[..., Writer] = Writer,
) -> Summary:
    """Carry out ``plan``.

    Args:
        plan: From :func:`convert.plan.make_plan`.
        out: Target folder, or file for a single-file format.
        threads: Workers.
        overwrite: Replace what is there.
        force: Write although free space or memory look too small.
        hashes: Put the SHA-256 of every source and output file into the record, taken in the same pass.
        resume: Go on from what an earlier run of the same plan left in the partial folder, comparing it with the
            source; and should this run be stopped, leave what is finished there. (What is complete and checked, and
            only does not get its name, is left there in any case.)
        check: ``sampled`` compares sizes, headers and some blocks of the finished files with the source, ``full`` every
            byte.
        progress: Called with the number of bytes written since the last call, from any thread.
        cancel: When set, work stops and the partial output is removed (kept with ``resume``).
        writer_type: Makes the writer; that of several ranks writes a share (:mod:`convert.ranks`).

    Raises:
        UsageError: The output may not be written, or ``check`` has no such value.
        ConvertError: Disk or memory are too small, values do not fit the target type, a read or a write failed, the
            source changed meanwhile or its bytes do not have the CRCs that its archives state, another plan's partial
            output would be resumed, or the check after writing failed.
        Cancelled: ``cancel`` was set.
    """
    require_choice("check", check, CHECKS)
    require_positive("threads", threads)
    if plan.source.only_samples:
        raise UsageError("this plan was made for a look, from samples.", hint="Plan again with way='download'.")
    plan.bind(out)
    try:
        check_target(plan, out, overwrite=overwrite, force=force, resume=resume)
    except UsageError:
        sweep(out, single=plan.single_file)
        raise
    if not force:
        refuse_memory(plan.peak_memory(threads))
    keep_freed_memory()
    started = time.perf_counter()
    beside = [value for value in plan.sidecars.values() if isinstance(value, Path)]
    before = stamps([*plan.source.files, *beside]) | plan.source.stamps
    cancel = cancel or threading.Event()
    claim = Claim(out, single=plan.single_file)
    journal = writer = crcs = None
    complete = False
    try:
        claim.take()
        if claim.given_back:
            check_target(plan, out, overwrite=overwrite, force=True, resume=resume)
        with reading(plan.source.path):
            identity = fingerprint(plan)
        cleared = 0 if resume else claim.clear()
        journal = Journal(claim.folder, identity, resume=resume)
        with writing(claim.folder):
            made = {*(f.name for f in plan.files), *plan.sidecars}
            claim.take_back({name: what for name, what in journal.moved.items() if name in made})
            claim.clear(keep={*(f.name for f in plan.files), JOURNAL_NAME})
        crcs = Beside(plan, cancel)
        writer = writer_type(plan, claim.folder, crcs.follow(progress), cancel, journal)
        crcs.begin(writer, threads)
        found = writer.write(threads, hashes=hashes)
        crcs.finish()
        losses = writer.losses()  # the check reads, and so counts, again
        option = "--type" if plan.request.target == "gguf" else "--dtype"
        told = loss_notes(lost((o.targets[0].name, o.source) for o in plan.outputs), option=option)
        if writer_type is Writer and plan.source.pool.local and touched(before):
            check = "full"
        with reading(claim.folder):
            checked = writer.together(read_back(plan, claim.folder, writer, full=check == "full", threads=threads))
            seal(plan, claim.folder, found, losses=losses)  # after the check, which names damage better
        for name, value in plan.sidecars.items():
            write_sidecar(claim.folder, name, value)
        with reading(claim.folder):
            read_beside(plan, claim.folder)
        writer.close()
        warnings = zero_tail_notes(plan.source)
        if problems := changes(before, plan.source.pool.opened):
            raise ConvertError(problems)
        complete = True
        with writing(out):
            if not plan.single_file:
                journal.close(keep=True)  # should it not get its name
            claim.commit(journal.commit)
    except BaseException as error:
        complete = complete and isinstance(error, Exception)  # who interrupts it wants none of it
        keep = claim.held and not claim.done and (complete or (resume and _may_go_on(error)))
        if crcs is not None:
            crcs.stop()
        if journal is not None:
            journal.close(keep=keep)
        if writer is not None:
            writer.stop(error)
        raise _ended(error, claim, keep=keep, complete=complete) from error.__cause__
    notes = [*warnings, *plan.notes, *plan.source.pool.notes]
    notes += told
    return Summary(
        out=out,
        files=[f.name for f in plan.files] + sorted(plan.sidecars),
        tensors=sum(len(f.entries) for f in plan.files),
        bytes_written=plan.nbytes,
        seconds=time.perf_counter() - started,
        notes=notes + _resumed(writer, resume, cleared),
        underflowed=losses.get("underflowed", 0),
        clamped=losses.get("clamped", 0),
        resumed=writer.found,
        checked_blocks=checked,
        checked=check,
    )


def _may_go_on(error: BaseException) -> bool:
    """Whether the same run may succeed another time, so that what is finished is worth keeping."""
    if isinstance(error, ConvertError):
        kinds = {problem.kind for problem in error.problems}
        return kinds == {"resume"} or kinds <= TRANSIENT
    return not isinstance(error, Exception) or isinstance(error, (Cancelled, OSError, MemoryError))


def _ended(error: BaseException, claim: Claim, *, keep: bool, complete: bool) -> BaseException:
    """Clean up after ``error``, or keep what is finished; returns the error, which then says so."""
    if not keep:
        claim.abandon()
        if claim.done:
            error.add_note(f"{claim.out} is complete.")
        return error
    claim.leave()
    if isinstance(error, ConvertError) and error.problems[0].kind == "resume":
        return error
    said = f"What is finished is kept in {claim.folder}; the same command with --resume goes on from there."
    if complete:
        said = (
            f"All of it is written and checked, and kept in {claim.folder}: when that is mended, the same command "
            "with --resume gives it its name."
        )
    if not isinstance(error, ConvertError):
        error.add_note(said)
        return error
    last = error.problems[-1]
    told = type(error)([*error.problems[:-1], replace(last, hint=f"{last.hint} {said}" if last.hint else said)])
    return told.with_traceback(error.__traceback__)


def _resumed(writer: Writer, resume: bool, cleared: int) -> list[str]:
    if not resume:
        said = "what an earlier, unfinished run had left was cleared away; with --resume it is gone on from"
        return [said] if cleared else []
    if not writer.found + writer.redone:
        return ["--resume: there was nothing to go on from; written from the beginning"]
    notes = [f"--resume: {writer.found:,} bytes of an earlier run were there and agree with the source"]
    if writer.redone:
        notes.append(f"--resume: {writer.redone:,} bytes that it had finished were not, and were written again")
    return notes


def refuse_memory(needed: int) -> None:
    """Being killed by the system says nothing and cleans nothing; this does, before it could happen.

    Raises:
        ConvertError: Less memory is available than the ``needed`` bytes.
    """
    there = available_memory()
    if there is not None and needed > there:
        raise ConvertError(
            Problem(
                "memory",
                f"this needs about {needed:,} bytes of memory and {there:,} are available.",
                found=there,
                wanted=needed,
                hint="Use fewer --threads; --force tries all the same.",
            )
        )


__all__ = ["Cancelled", "Summary", "casts_within", "check_target", "refuse_memory", "run"]
