"""Runs the corpus and counts: ``python -m tests.trust.hostile.tally`` (``--all``: with every command, ``--only WORD``).

Prints a table for ``tests/TRUST.md`` and what must not be; exit code 1 when there was any.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from queue import SimpleQueue

from tests.trust.hostile import base, catalogue
from tests.trust.hostile.harness import ALIKE, COMMANDS, REPORTS, Case, Seen, Server

#: How names begin, and the row of the table that they are counted in; the first that fits.
GROUPS = {
    "pickle": "pickles",
    "torch": "torch files and zip archives",
    "zip": "torch files and zip archives",
    "safetensors": "safetensors",
    "gguf": "GGUF",
    "index": "indexes",
    "config:": "configs",
    "params:": "`params.json`",
    "record": "records of conversions",
    "list of hashes": "lists of hashes",
    "partial folder": "partial folders",
    "tensorflow": "TensorFlow and DCP",
    "dcp": "TensorFlow and DCP",
    "table:": "tables and names files",
    "names file:": "tables and names files",
    "chat template": "chat templates",
    "hub cache": "folders of the Hub's cache",
    "prompts": "files of prompts",
    "files beside": "links, pipes, folders for files",
}


@dataclass(frozen=True)
class Ran:
    """One command on one input: what was seen, and what must not be."""

    case: Case
    command: str
    seen: Seen
    faults: list[str]


def group(name: str) -> str:
    """The row of the table for an input."""
    if " is a " in name and not name.startswith("partial"):
        return "links, pipes, folders for files"
    return next((row for start, row in GROUPS.items() if name.startswith(start)), "tokenizer files")


def good_model(folder: Path) -> Path:
    """A sound model to compare with."""
    folder.mkdir(parents=True, exist_ok=True)
    return base.hf(folder)


def run_case(
    server: Server, case: Case, root: Path, good: Path, *, everything: bool
) -> Iterator[tuple[str, Seen, list[str]]]:
    """Each command on one input: its name, what was seen, what must not be."""
    box = root / "box"
    shutil.rmtree(box, ignore_errors=True)
    inside, out = box / "in", box / "out"
    inside.mkdir(parents=True)
    src = case.build(inside)
    ext = ".gguf" if src.suffix == ".gguf" else ""
    about = {str(src), *(p.name for p in islice(inside.rglob("*"), 1000)), f"{out}/m"}
    out.mkdir(exist_ok=True)  # some cases make it themselves
    made = sorted(p.name for p in out.iterdir())
    for number, name in enumerate((*case.commands, *(case.more if everything else ()))):
        if made and number:
            shutil.rmtree(box)
            inside.mkdir(parents=True)
            case.build(inside)
        argv = [a.format(src=src, out=out, good=good, ext=ext) for a in COMMANDS[name]]
        seen = server.run(argv, box, out)
        seen.left = [n for n in seen.left if n not in made]
        may, usage = bool(case.passes.intersection((name, *ALIKE.get(name, ())))), name in case.usage
        yield name, seen, seen.faults(may_pass=may, usage=usage, report=name in REPORTS, about=about)
        if not made:
            shutil.rmtree(out)
            out.mkdir()
    shutil.rmtree(box, ignore_errors=True)


def runs(cases: Iterable[Case], *, everything: bool = False, jobs: int = 1) -> Iterator[Ran]:
    """Run them all, some at a time; in order."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        good = good_model(Path(folder, "good"))
        free: SimpleQueue[tuple[Server, Path]] = SimpleQueue()
        for job in range(jobs):
            root = Path(folder, str(job))
            root.mkdir()
            free.put((stack.enter_context(Server()), root))

        def every(case: Case) -> list[Ran]:
            server, root = free.get()
            try:
                return [Ran(case, *rest) for rest in run_case(server, case, root, good, everything=everything)]
            finally:
                free.put((server, root))

        yield from chain.from_iterable(stack.enter_context(ThreadPoolExecutor(jobs)).map(every, cases))


def tally(
    cases: Iterable[Case], *, everything: bool = False, show: bool = False, jobs: int = 1
) -> tuple[Counter[str], list[str]]:
    """Run them all: counts, and each fault with its input and command."""
    return summed(runs(cases, everything=everything, jobs=jobs), show=show)


def summed(ran: Iterable[Ran], *, show: bool = False) -> tuple[Counter[str], list[str]]:
    """Counts of runs, and each fault with its input and command."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    seen_cases = set()
    for run in ran:
        seen_cases.add(run.case.name)
        counts["runs"] += 1
        counts["refused" if run.seen.code in (1, 2) else "passed, harmless"] += 1
        counts["most milliseconds"] = max(counts["most milliseconds"], int(run.seen.seconds * 1000))
        counts["most MB"] = max(counts["most MB"], run.seen.megabytes)
        bad += [f"{run.case.name} | {run.command}: {fault}" for fault in run.faults]
        if show and run.faults:
            print(f"== {run.case.name} | {run.command}: {run.faults} ({run.seen.seconds} s, {run.seen.megabytes} MB)")
            print("   " + (run.seen.out + run.seen.err)[-1500:].replace("\n", "\n   "), flush=True)
    counts["inputs"] = len(seen_cases)
    return counts, bad


def table(ran: Iterable[Ran]) -> list[str]:
    """The figures as Markdown, a row for each group."""
    rows: dict[str, list[Ran]] = {}
    for run in ran:
        rows.setdefault(group(run.case.name), []).append(run)
    every = [run for of_row in rows.values() for run in of_row]
    out = ["| inputs | | runs | refused | passed, harmless | seconds | MB |", "|---|---|---|---|---|---|---|"]
    for row, of_row in {**rows, "**all**": every}.items():
        passed = Counter(r.command for r in of_row if r.seen.code not in (1, 2))
        which = ", ".join(f"{name} {n}" for name, n in passed.most_common(4)) if of_row is not every else ""
        figures = (
            len({r.case.name for r in of_row}),
            len(of_row),
            len(of_row) - passed.total(),
            f"{passed.total()}" + (f" ({which}{' …' if len(passed) > 4 else ''})" if which else ""),
            f"{max(r.seen.seconds for r in of_row):.1f}",
            max(r.seen.megabytes for r in of_row),
        )
        out.append(f"| {row} | " + " | ".join(f"{f:,}" if isinstance(f, int) else f for f in figures) + " |")
    return out


def main() -> None:
    """Print the figures; exit code 1 when something was amiss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every command on every input")
    parser.add_argument("--only", default="", help="inputs whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--passed", action="store_true", help="list what passed, too")
    args = parser.parse_args()
    cases = [c for c in catalogue.cases() if args.only in c.name]
    ran = []
    for case_run in runs(cases, everything=args.all, jobs=args.jobs):
        summed([case_run], show=True)
        ran.append(case_run)
    if args.passed:
        print(*(f"passed: {r.case.name} | {r.command}" for r in ran if r.seen.code not in (1, 2)), sep="\n")
    bad = summed(ran)[1]
    print(*table(ran), *(f"FAULT {line}" for line in bad), sep="\n")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
