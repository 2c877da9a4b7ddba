"""One plan carried out by all ranks: rank 0 does all that a single process does, and the others help it to write.

Every rank has made the plan itself, from the same files; that they agree is checked before anything is written.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem, UsageError
from convert.io_errors import reading
from convert.journal import Journal, differences, fingerprint, read_journal
from convert.output import partial_folder
from convert.plan import ConversionPlan
from convert.platform import keep_freed_memory
from convert.ranks.crew import Crew
from convert.ranks.journals import part_name
from convert.ranks.writers import HelperWriter, LeadWriter
from convert.readback import read_back
from convert.run import Summary, refuse_memory, run
from convert.storage_crcs import Beside


def run_shared(plan: ConversionPlan, out: Path, *, crew: Crew, threads: int = 2, **options: Any) -> Summary | None:
    """Carry out ``plan`` with the other ranks; all of them call this with the same arguments.

    Args:
        plan: From :func:`convert.plan.make_plan`.
        out: Target folder or file, on a filesystem that all ranks see.
        crew: This rank among the others.
        threads: Workers of this rank.
        **options: As :func:`convert.run.run` has them.

    Returns:
        What was done; None on all ranks but the first.

    Raises:
        UsageError: The source is read over a network, which one process does.
        ConvertError: As :func:`convert.run.run`; what another rank failed with; or the ranks have different plans.
    """
    plan.bind(out)
    if not getattr(plan.source.pool, "local", True):
        raise UsageError(
            "a source on the Hub is converted by one process.", hint="Download it first, or leave out torchrun."
        )
    with reading(plan.source.path):
        identity = fingerprint(plan)
    _refuse_other_plans(crew, crew.gather(identity))
    if not crew.leads:
        _help(plan, out, identity, crew=crew, threads=threads, **options)
        return None
    crew.progress = options.pop("progress", None)
    options |= {"progress": crew.progress, "cancel": crew.stopped, "writer_type": partial(LeadWriter, crew=crew)}
    try:
        summary = run(plan, out, threads=threads, **options)
    finally:
        crew.progress = None
    crew.say("done")
    return summary


def _refuse_other_plans(crew: Crew, identities: list[dict[str, Any]]) -> None:
    first = identities[0]
    problems = [
        Problem(
            "ranks",
            f"{crew.name(rank)} would write something else than rank 0: {'; '.join(differences(first, own)[:3])}.",
            hint="All ranks need the same command, the same version and the same files.",
        )
        for rank, own in enumerate(identities)
        if own != first
    ]
    if problems:
        raise ConvertError(problems)


def _help(
    plan: ConversionPlan,
    out: Path,
    identity: dict[str, Any],
    *,
    crew: Crew,
    threads: int,
    hashes: bool = False,
    resume: bool = False,
    check: str = "sampled",
    force: bool = False,
    **_: Any,
) -> None:
    """Everything between rank 0's claim and its commit that a share needs."""
    journal = writer = crcs = None
    try:
        if not force:
            refuse_memory(plan.peak_memory(threads))
        keep_freed_memory()
        crew.hear("go")
        folder = partial_folder(out, single=plan.single_file)
        found = read_journal(folder)
        if found is None or found[0] != json.loads(json.dumps(identity)):
            raise ConvertError(
                Problem(
                    "ranks",
                    f"{folder}, which rank 0 has made, is not there or is another.",
                    file=str(folder),
                    hint="The output has to lie on a filesystem that all machines share, under the same path.",
                )
            )
        journal = Journal(folder, identity, resume=False, name=part_name(crew.rank))
        journal.finished = found[1]
        crcs = Beside(plan, crew.stopped)
        writer = HelperWriter(plan, folder, crcs.follow(None), crew.stopped, journal, crew=crew)
        crcs.begin(writer, threads)
        writer.write(threads, hashes=hashes)
        crcs.finish()
        with reading(folder):
            checked = read_back(plan, folder, writer, full=check == "full", threads=threads)
        journal.close(keep=True)
        writer.together(checked)
        crew.hear("done")
    except BaseException as error:
        crew.fail(error)
        raise
    finally:
        if crcs is not None:
            crcs.stop()
        if journal is not None:
            journal.close(keep=True)
        if writer is not None:
            writer.close()
        crew.note("ended")
