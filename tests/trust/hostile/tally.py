"""Runs the corpus and counts: ``python -m tests.trust.hostile.tally`` (``--all``: with every command, ``--only WORD``).

Prints what must not be, and the figures of ``tests/TRUST.md``.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.trust.hostile import base, catalogue
from tests.trust.hostile.harness import COMMANDS, Case, Seen, Server


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
    out.mkdir(exist_ok=True)  # some cases make it themselves
    made = sorted(p.name for p in out.iterdir())
    for number, name in enumerate((*case.commands, *(case.more if everything else ()))):
        if made and number:
            shutil.rmtree(box)
            inside.mkdir(parents=True)
            case.build(inside)
        argv = [a.format(src=src, out=out, good=good) for a in COMMANDS[name]]
        seen = server.run(argv, box, out)
        seen.left = [n for n in seen.left if n not in made]
        yield name, seen, seen.faults(may_pass=name in case.passes)
        if not made:
            shutil.rmtree(out)
            out.mkdir()
    shutil.rmtree(box, ignore_errors=True)


def tally(cases: Iterable[Case], *, everything: bool = False, show: bool = False) -> tuple[Counter[str], list[str]]:
    """Run them all: counts, and each fault with its input and command."""
    counts: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as folder, Server() as server:
        root = Path(folder)
        good = good_model(root / "good")
        for case in cases:
            counts["inputs"] += 1
            for command, seen, faults in run_case(server, case, root, good, everything=everything):
                counts["runs"] += 1
                counts["refused" if seen.code in (1, 2) else "passed, harmless"] += 1
                counts["most milliseconds"] = max(counts["most milliseconds"], int(seen.seconds * 1000))
                counts["most MB"] = max(counts["most MB"], seen.megabytes)
                bad += [f"{case.name} | {command}: {fault}" for fault in faults]
                if show and (faults or show == "all"):
                    print(f"== {case.name} | {command}: {faults} ({seen.seconds} s, {seen.megabytes} MB)")
                    print("   " + (seen.out + seen.err)[-1500:].replace("\n", "\n   "), flush=True)
    return counts, bad


def main() -> None:
    """Print the figures; exit code 1 when something was amiss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every command on every input")
    parser.add_argument("--only", default="", help="inputs whose name contains this")
    args = parser.parse_args()
    counts, bad = tally((c for c in catalogue.cases() if args.only in c.name), everything=args.all, show=True)
    print(dict(counts))
    print(*bad, sep="\n")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
