"""``python -m tests.trust.kill_points [--kills 200] [--kind NAME] [--workdir DIR] [--seed 0]``.

Kills conversions of each kind with SIGKILL: half of them at a random moment, half at a random system call that changes
a disk (in the middle of it, where it writes: half of the bytes go out). After each: the source is whole, nothing under
the output's name is half of anything, and ``--resume`` gives the bytes of an undisturbed run. Needs fork.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert.claim
from convert.errors import ConvertError
from tests.trust.kinds import ALL_KINDS, Kind, Scene, small_pieces

#: Calls that change what a disk holds.
CALLS = (
    *("pwrite", "write", "copy_file_range", "ftruncate", "fsync", "fdatasync"),
    *("replace", "rename", "unlink", "rmdir", "mkdir"),
)


class Steps:
    """Counts the calls that change a disk, in this process, and ends it at one of them.

    Args:
        end: At which call; None counts only.
    """

    def __init__(self, end: int | None = None) -> None:
        self.count = 0
        self.end = end
        self._lock = threading.Lock()
        for name in CALLS:
            setattr(os, name, self._wrap(name, getattr(os, name)))
        convert.claim.exchange = self._wrap("exchange", convert.claim.exchange)  # type: ignore[attr-defined]

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:  # two threads that count at once would both pass by the end
                self.count += 1
                last = self.count == self.end
            if last:
                if name in ("pwrite", "write"):
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
                elif random.random() < 0.5:
                    real(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call


def _child(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def count_steps(scene: Scene) -> tuple[int, float]:
    """How many calls an undisturbed run makes, and how long it takes (seconds)."""
    read, write = os.pipe()

    def body() -> None:
        steps = Steps()
        started = time.perf_counter()
        scene.convert(resume=True)
        number, seconds = steps.count, time.perf_counter() - started
        os.write(write, f"{number} {seconds}".encode())

    os.waitpid(_child(body), 0)
    number, seconds = os.read(read, 100).split()
    os.close(read)
    os.close(write)
    scene.clear()
    return int(number), float(seconds)


def kill(scene: Scene, *, step: int | None, after: float, again: bool = False) -> bool:
    """One killed run (``again``: one that resumes); whether it was killed (it may have been faster)."""

    def body() -> None:
        if step is not None:
            Steps(step)
        if again:
            resume(scene)
        else:
            scene.convert()

    pid = _child(body)
    if step is None:
        time.sleep(after)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status) and os.waitstatus_to_exitcode(status):
        raise RuntimeError("a run failed by itself")
    return os.WIFSIGNALED(status)


def resume(scene: Scene) -> int:
    """Go on; how many bytes were found finished. A run that was killed after its last step has nothing left to do."""
    try:
        return scene.convert(resume=True).resumed
    except ConvertError as error:
        if "exists already" not in str(error):
            raise
        return 0


def disturb(kind: Kind, folder: Path, kills: int, *, seed: int = 0) -> Counter[str]:
    """Kill ``kills`` runs of a kind; the counts of what happened.

    Raises:
        AssertionError: Something was lost or wrong; the state is left in ``folder``.
    """
    small_pieces()
    scene = Scene(kind, folder)
    steps, seconds = count_steps(scene)
    rng = random.Random(f"{kind.name} {seed}")
    counts: Counter[str] = Counter(steps=steps)
    points = rng.sample(range(1, steps + 1), min(steps, (kills + 1) // 2))
    tries = 0
    while counts["killed"] < kills:
        tries += 1
        step = points.pop() if tries % 2 and points else None
        after = rng.uniform(0, seconds)
        scene.clear()
        killed = kill(scene, step=step, after=after)
        where = f"{kind.name}, step {step} of {steps}, {after:.3f} of {seconds:.3f} s"
        if problem := scene.judge():
            raise AssertionError(f"{where}: {problem}")
        if killed and rng.random() < 0.25:
            counts["killed again"] += kill(scene, step=rng.randrange(1, steps), after=0, again=True)
            if problem := scene.judge():
                raise AssertionError(f"{where}, and again: {problem}")
        found = resume(scene)
        if problem := scene.judge_finished():
            raise AssertionError(f"{where}, resumed: {problem}")
        counts["resumed in the middle"] += found > 0
        counts["killed"] += killed
    scene.clear()
    return counts


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kind", help="only kinds with this in their name")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="kill-points-"))
    total: Counter[str] = Counter()
    for kind in ALL_KINDS:
        if args.kind and args.kind not in kind.name:
            continue
        started = time.perf_counter()
        counts = disturb(kind, folder, args.kills, seed=args.seed)
        total += counts
        print(
            f"{kind.name}: {counts['killed']} killed, and {counts['killed again']} again while resuming; all resumed "
            f"to the same bytes, {counts['resumed in the middle']} from the middle "
            f"({counts['steps']} steps, {time.perf_counter() - started:.0f} s)",
            flush=True,
        )
    kills = total["killed"] + total["killed again"]
    print(f"all: {kills:,} kills survived, {total['resumed in the middle']:,} resumed from the middle, nothing lost")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
