"""``python -m tests.trust.killed_ranks [--kills 200] [--kind NAME] [--workdir DIR] [--seed 0]``.

Kills conversions by two ranks with SIGKILL, as :mod:`tests.trust.kill_points` does those by one process: either rank,
at a random moment or at a random call that changes a disk; most times the other one with it, else that ends by itself.
After each: the source is whole, nothing under the output's name is half of anything, and ``--resume``, by one process
or by two ranks, gives the bytes of an undisturbed run by one. Needs fork.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.trust import kinds
from tests.trust.kill_points import Steps, resume
from tests.trust.kinds import KINDS, Kind, Scene, small_pieces

NAMES = ("hf-to-scratch --format pth", "hf-to-gguf --type q8_0", "hf-to-scratch --overwrite")
WORLD = 2


def _hurry() -> None:
    """Ranks that are no more are given up soon; what every rank needs is imported before there are any."""
    import torch.distributed  # noqa: F401

    from convert.ranks import command, crew, shared  # noqa: F401

    crew.BEAT_SECONDS, crew.LOST_SECONDS, crew.SILENT_SECONDS = 0.1, 6.0, 2.0


def _rank(scene: Scene, rank: int, port: int, *, resumes: bool, step: int | None, told: int, quiet: bool) -> int:
    """Begin one rank; its process. It tells how many calls it made and how long it took."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        if quiet:
            os.dup2(null, 2)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
        steps, began = Steps(step), time.monotonic()
        code = _convert(scene, resumes)
        os.write(told, f"{rank} {steps.count} {time.monotonic() - began}\n".encode())
    finally:
        os._exit(code)


def _convert(scene: Scene, resumes: bool) -> int:
    """As :func:`convert.ranks.command.run_rank`, but for the command line, of which the record would tell."""
    from convert.ranks import carry_out, crew, enlist, place

    found = place()
    assert found is not None
    ours = crew.Crew(found)
    enlist(ours)
    kinds.run = carry_out  # type: ignore[assignment]
    code = 0
    try:
        scene.convert(resume=resumes)
    except Exception as error:
        print(error, file=sys.stderr)
        ours.fail(error)
        code = 1
    code = ours.end(code)
    ours.note("left")
    ours.close()
    return code


def together(
    scene: Scene, *, resumes: bool, victim: int = -1, step: int | None = None, after: float = 0, all_: bool = True
) -> tuple[bool, dict[int, tuple[int, float]]]:
    """One run by all ranks; whether the victim was killed, and what the others told: calls, seconds.

    Args:
        scene: What is converted.
        resumes: Whether it goes on from what is there.
        victim: The rank that is killed; none: a run that nothing disturbs.
        step: At which of its calls; None: ``after`` so many seconds.
        after: See ``step``.
        all_: Kill the others at once, too.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    read, write = os.pipe()
    ranks = [
        _rank(scene, rank, port, resumes=resumes, step=step if rank == victim else None, told=write, quiet=victim >= 0)
        for rank in range(WORLD)
    ]
    os.close(write)
    if victim >= 0:
        if step is None:
            time.sleep(after)
            os.kill(ranks[victim], signal.SIGKILL)
        _, status = os.waitpid(ranks[victim], 0)
        killed = os.WIFSIGNALED(status)
        others = [pid for rank, pid in enumerate(ranks) if rank != victim]
        for pid in others if killed and all_ else ():
            os.kill(pid, signal.SIGKILL)
    else:
        killed, others = False, ranks
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in others]
    said = b"".join(iter(lambda: os.read(read, 65536), b"")).decode().splitlines()
    os.close(read)
    if victim < 0 and any(codes):
        raise AssertionError(f"{scene.kind.name}: a run that nothing disturbed ended with {codes}")
    return killed, {int(rank): (int(count), float(seconds)) for rank, count, seconds in map(str.split, said)}


def disturb(kind: Kind, folder: Path, kills: int, *, seed: int = 0) -> Counter[str]:
    """Kill ``kills`` runs of a kind; the counts of what happened.

    Raises:
        AssertionError: Something was lost or wrong; the state is left in ``folder``.
    """
    small_pieces()
    _hurry()
    scene = Scene(kind, folder)
    _, told = together(scene, resumes=True)
    if problem := scene.judge_finished():
        raise AssertionError(f"{kind.name}, by {WORLD} ranks: {problem}")
    rng = random.Random(f"{kind.name} {seed}")
    counts: Counter[str] = Counter()
    while counts["killed"] < kills:
        victim = rng.randrange(WORLD)
        calls, seconds = told[victim]
        step = rng.randint(1, calls) if rng.random() < 0.5 else None
        after, all_, resumes = rng.uniform(0, seconds), rng.random() < 0.9, rng.random() < 0.5
        scene.clear()
        killed, _ = together(scene, resumes=resumes, victim=victim, step=step, after=after, all_=all_)
        where = f"{kind.name}, rank {victim}, step {step} of {calls}, {after:.3f} of {seconds:.3f} s, all: {all_}"
        if problem := scene.judge():
            raise AssertionError(f"{where}: {problem}")
        if scene.there() != scene.wanted and rng.random() < 0.2:
            together(scene, resumes=True)
            counts["resumed by ranks"] += 1
        else:
            counts["resumed in the middle"] += resume(scene) > 0
        if problem := scene.judge_finished():
            raise AssertionError(f"{where}, resumed: {problem}")
        counts["killed"] += killed
        counts["killed alone"] += killed and not all_
    scene.clear()
    return counts


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kind", default="", help="only kinds with this in their name")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="killed-ranks-"))
    for kind in KINDS:
        if kind.name in NAMES and args.kind in kind.name:
            began = time.perf_counter()
            counts = disturb(kind, folder, args.kills, seed=args.seed)
            print(
                f"{kind.name}, {WORLD} ranks: {counts['killed']} killed, {counts['killed alone']} of them one only; "
                f"all resumed to the same bytes, {counts['resumed by ranks']} by ranks, "
                f"{counts['resumed in the middle']} from the middle ({time.perf_counter() - began:.0f} s)",
                flush=True,
            )
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
