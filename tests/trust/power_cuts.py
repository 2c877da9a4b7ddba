"""``python -m tests.trust.power_cuts [--cuts 200] [--kind NAME] [--workdir DIR] [--seed 0]``.

Records what conversions of each kind change on the disk, and lays out what a power cut at a random moment may leave of
it (:mod:`tests.trust.disk`). Of each such state: the source is whole, nothing under the output's name is half of
anything or opens as something wrong; ``--resume``, and another time a fresh run, give the bytes of an undisturbed run
and leave nothing beside. Some resumed runs are cut again. After the run's end the output lasts. A RAM disk will do.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import convert
import convert.claim
from convert.errors import ConvertError
from tests.trust.disk import DATA, NAMES, Disk, Named, Recorder, Synced, build
from tests.trust.kinds import ALL_KINDS, Kind, Scene, outputs, small_pieces

State = dict[str, tuple[int, bytes | None]]


class Inodes:
    """Files keep their inodes in a power cut; those laid out again have others, so all are told by numbers of ours."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._fresh = itertools.count(1)
        self._real = convert.claim.identity

    def __call__(self, path: Path) -> list[int]:
        """As :func:`convert.claim.identity`, with our number of the file for its inode."""
        inode, size = self._real(path)
        if inode not in self._known:
            self._known[inode] = next(self._fresh)
        return [self._known[inode], size]

    def recorded(self, disk: Disk) -> None:
        """Note our numbers in a record, in place of inodes, which are used again once this state is gone."""
        disk.inodes = {node: self._known[inode] for node, inode in disk.inodes.items() if inode in self._known}

    def lay_out(self, disk: Disk, state: State, place: Path) -> None:
        """Make a state."""
        found = build(state, place)
        self._known = {inode: disk.inodes[node] for inode, node in found.items() if node in disk.inodes}

    @contextmanager
    def told(self) -> Iterator[None]:
        """Within the block conversions see old numbers."""
        convert.claim.identity = self
        try:
            yield
        finally:
            convert.claim.identity = self._real


def record(
    scene: Scene, body: Callable[[], Any], *, deaf: Callable[[str], bool] = lambda _: False, check: bool = True
) -> Disk:
    """What a run changes."""
    with Recorder(scene.place, deaf=deaf) as recorder:
        body()
    strays = [name for name in recorder.strays if scene.kind.way != "hub" or not name.startswith(tempfile.gettempdir())]
    if strays:
        raise AssertionError(f"{scene.kind.name}: files outside the output's place: {strays}")
    disk = recorder.disk
    if check:  # of the recorder itself
        everything = disk.after(len(disk.events), random.Random(0), names="everything", data="everything")
        there = {
            str(p.relative_to(scene.place)): None if p.is_dir() else p.read_bytes() for p in scene.place.rglob("*")
        }
        assert {name: data for name, (_, data) in everything.items()} == there, f"{scene.kind.name}: not all was seen"
    return disk


def cut_points(disk: Disk, cuts: int, rng: random.Random) -> list[tuple[int, str, str]]:
    """Moments and what survives them: half anywhere, half where names change or are synced; the end in every way."""
    last = len(disk.events)
    busy = [
        at + after
        for at, event in enumerate(disk.events)
        if isinstance(event, Named) or (isinstance(event, Synced) and event.node in disk.folders)
        for after in (0, 1)
    ]
    ends = [(last, names, data) for names in NAMES for data in ("nothing", "mixed")]
    out = ends if cuts > 3 * len(ends) else ends[:1]
    for number in range(max(0, cuts - len(out))):
        at = rng.choice(busy or [last]) if number % 2 else rng.randint(0, last)
        names, data = rng.choice(NAMES), rng.choice(DATA)
        if number % 8 < 2:  # the extremes
            names = data = ("nothing", "everything")[number % 8]
        out.append((at, names, data))
    return out


def go_on(scene: Scene, *, resume: bool) -> int:
    """Run again; bytes found finished. What is complete has nothing left to do, what is not is replaced if asked."""
    try:
        return scene.convert(resume=resume).resumed
    except ConvertError as error:
        if "exists already" not in str(error):
            raise
    if resume or scene.there() == scene.wanted:
        return 0
    scene.convert(overwrite=True)
    return 0


def loads(scene: Scene) -> str | None:
    """What opens there and should not; or does not, and should."""
    out = scene.kind.out(scene.place)
    there = scene.there()
    whole = [side for side in (scene.old, scene.wanted) if side]
    suffixes = (".gguf", ".safetensors", ".pth")
    weights = {k: v for k, v in there.items() if k.endswith(suffixes)}
    parts = sorted(scene.place / name for name in weights)
    complete = any(weights == {k: v for k, v in side.items() if k.endswith(suffixes)} for side in whole)
    for path in ([out] if out.exists() else parts[:1]) if complete else parts:
        try:
            with convert.open_checkpoint(path) as opened:
                count = len(opened.tensors)
        except ConvertError:
            count = 0
        if bool(count) != complete:
            return f"{path.name}: {count} tensors, {'complete' if complete else 'incomplete'}"
    for path in parts if complete else ():
        _read_elsewhere(path)
    return None


def _read_elsewhere(path: Path) -> None:
    if path.suffix == ".gguf":
        import gguf

        gguf.GGUFReader(path)
    elif path.suffix == ".safetensors":
        import safetensors

        with safetensors.safe_open(path, "np") as file:
            file.keys()
    else:
        import torch

        torch.load(path, weights_only=True, mmap=True)


def disturb(
    kind: Kind, folder: Path, cuts: int, *, seed: int = 0, deaf: Callable[[str], bool] = lambda _: False
) -> Counter[str]:
    """Cut the power ``cuts`` times in a run of a kind; the counts of what happened.

    Args:
        kind: Which conversion.
        folder: Where; a state in which something was lost is left there.
        cuts: How many states are tried.
        seed: Of what is random.
        deaf: Syncs that are left out of the record, for controls.

    Raises:
        AssertionError: Something was lost or wrong.
    """
    small_pieces()
    scene = Scene(kind, folder)
    rng = random.Random(f"{kind.name} {seed}")
    inodes = Inodes()
    with inodes.told():
        disk = record(scene, lambda: scene.convert(resume=True), deaf=deaf)
        inodes.recorded(disk)
    kinds = Counter(type(e).__name__ for e in disk.events)
    counts = Counter({"changes": kinds["Written"] + kinds["Named"], "syncs": kinds["Synced"]})
    seen: set[tuple[str, str]] = set()

    def judge(where: str) -> None:
        problem = scene.judge()
        key = repr(sorted(outputs(scene.place).items())), ""
        if not problem and key not in seen:
            problem = loads(scene)
            seen.add(key)
        if problem:
            raise AssertionError(f"{where}: {problem}")

    def finish(where: str, *, resume: bool) -> int:
        try:
            found = go_on(scene, resume=resume)
        except ConvertError as error:
            raise AssertionError(f"{where}: {error}") from error
        if problem := scene.judge_finished():
            raise AssertionError(f"{where}: {problem}; there: {sorted(p.name for p in scene.place.iterdir())}")
        return found

    with inodes.told():
        for at, names, data in cut_points(disk, cuts, rng):
            where = f"{kind.name}, before change {at} of {len(disk.events)}, names: {names}, data: {data}"
            state = disk.after(at, rng, names=names, data=data)
            inodes.lay_out(disk, state, scene.place)
            judge(where)
            if at == len(disk.events) and scene.there() != scene.wanted:
                raise AssertionError(f"{where}: the output was said to be complete, and is not")
            if rng.random() < 0.25:
                again = record(scene, lambda: finish(f"{where}, resumed", resume=True), deaf=deaf, check=False)  # noqa: B023
                inodes.recorded(again)
                point = cut_points(again, 9, rng)[rng.randint(1, 8)]
                inodes.lay_out(again, again.after(point[0], rng, names=point[1], data=point[2]), scene.place)
                judge(f"{where}, again {point} of {len(again.events)}")
                finish(f"{where}, again {point} of {len(again.events)}, resumed", resume=True)
                counts["cut again"] += 1
            else:
                counts["resumed from the middle"] += finish(f"{where}, resumed", resume=True) > 0
            inodes.lay_out(disk, state, scene.place)
            finish(f"{where}, anew", resume=False)
            counts["cuts"] += 1
    scene.clear()
    return counts


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=200)
    parser.add_argument("--kind", default="", help="only kinds with this in their name")
    parser.add_argument("--workdir", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="power-cuts-"))
    total: Counter[str] = Counter()
    print("| kind | changes of the disk | syncs | cuts | again, resuming | resumed from the middle | lost | s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for kind in ALL_KINDS:
        if args.kind not in kind.name:
            continue
        started = time.perf_counter()
        counts = disturb(kind, folder, args.cuts, seed=args.seed)
        total += counts
        numbers = [counts[k] for k in ("changes", "syncs", "cuts", "cut again", "resumed from the middle")]
        print(
            f"| {kind.name} | {' | '.join(map(str, numbers))} | 0 | {time.perf_counter() - started:.0f} |", flush=True
        )
    print(f"\nall: {total['cuts']:,} cuts, and {total['cut again']:,} while resuming; nothing lost")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
