"""``python -m tests.trust.faults [--only NAME] [--every N] [--workdir DIR]``.

Lets the system fail under conversions of each kind, and looks at what is left: every call that writes fails once (disk
full and input/output error in turn), every read fails once, reads and writes come in parts, the source is changed while
it is read, signals arrive, the disk is a small tmpfs (where one can be mounted), calls are missing as on other systems.
Every number printed counts runs after which source and output were as they have to be.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import convert
import convert.claim
from convert import platform
from convert.errors import ConvertError
from convert.run import run
from tests.trust.kinds import KINDS, Kind, Scene, small_pieces

WRITES = ("pwrite", "write", "copy_file_range", "ftruncate", "fsync", "fdatasync", "mkdir", "replace")
READS = ("preadv", "copy_file_range")
ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def calls(names: tuple[str, ...], around: Callable[[Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Within the block, ``around(real, arguments)`` is called in place of functions of ``os``."""
    real = {name: getattr(os, name) for name in names}

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: around(lambda *a: function(*a, **options), args)

    for name, function in real.items():
        setattr(os, name, wrap(function))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Failing:
    """Fails one call of many, as the system would.

    Args:
        at: Which one, from 1; 0 counts only.
        code: The error.
    """

    def __init__(self, at: int, code: int = errno.ENOSPC) -> None:
        self.at, self.code, self.count = at, code, 0

    def __call__(self, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.count += 1
        if self.count == self.at:
            raise OSError(self.code, os.strerror(self.code))
        return real(*args)


def count(scene: Scene, names: tuple[str, ...]) -> int:
    """How many such calls an undisturbed run makes."""
    counting = Failing(0)
    with calls(names, counting):
        scene.convert()
    scene.clear()
    return counting.count


def expect(scene: Scene, where: str, *, resume: bool, kinds: set[str]) -> str:
    """Run; the run must fail with a finding of ``kinds``, or must have succeeded in spite of the fault."""
    before = {p.name for p in scene.place.parent.iterdir()}
    try:
        scene.convert(resume=resume)
    except ConvertError as error:
        found = {p.kind for p in error.problems}
        assert found <= kinds, f"{where}: {error}"
        assert all(p.message and p.file for p in error.problems), f"{where}: {error.problems}"
        if problem := scene.judge():
            raise AssertionError(f"{where}: {problem}") from error
        left = {p.name for p in scene.place.iterdir()} - {Path(k).parts[0] for k in scene.old}
        assert {p.name for p in scene.place.parent.iterdir()} == before
        complete = "All of it is written and checked" in str(error)
        kept = {f"{scene.kind.out(scene.place).name}.partial"}
        assert left <= (kept if resume or complete else set()), f"{where}: left {left}"
        return "complete" if complete else "failed"
    if problem := scene.judge_finished():
        raise AssertionError(f"{where}, finished: {problem}")
    return "went on"


def each_call(scene: Scene, names: tuple[str, ...], *, every: int, kinds: set[str], codes: tuple[int, ...]) -> int:
    """Fail every call once; after every other failure the run is resumed."""
    total = count(scene, names)
    done = 0
    for at in range(1, total + 1, every):
        code = codes[at % len(codes)]
        resume = at % 2 == 0
        where = f"{scene.kind.name}: call {at} of {total}, {errno.errorcode[code]}, resume={resume}"
        scene.clear()
        with calls(names, Failing(at, code)):
            outcome = expect(scene, where, resume=resume, kinds=kinds)
        if outcome == "complete" or (outcome == "failed" and resume):
            found = scene.convert(resume=True)
            assert outcome == "failed" or found.resumed > 0.9 * found.bytes_written, f"{where}: began anew: {found}"
            if problem := scene.judge_finished():
                raise AssertionError(f"{where}, resumed: {problem}")
        done += 1
    scene.clear()
    return done


def writes(scene: Scene, every: int) -> int:
    """Every write fails once."""
    codes = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS)
    return each_call(scene, WRITES, every=every, kinds={"disk_full", "write", "read"}, codes=codes)


def reads(scene: Scene, every: int) -> int:
    """Every read fails once."""
    return each_call(scene, READS, every=every, kinds={"read"}, codes=(errno.EIO,))


def parts(scene: Scene, every: int) -> int:
    """Every read and write moves only some of the bytes that it was asked for."""
    rng = random.Random(0)

    def some(real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if len(args) == 2 or isinstance(args[1], memoryview):  # write(fd, data), pwrite(fd, data, offset)
            return real(args[0], args[1][: rng.randint(1, max(1, len(args[1])))], *args[2:])
        if isinstance(args[1], list):  # preadv(fd, [buffer], offset)
            return real(args[0], [args[1][0][: rng.randint(1, max(1, len(args[1][0])))]], *args[2:])
        return real(*args[:2], rng.randint(1, max(1, args[2])), *args[3:])  # copy_file_range(in, out, count, …)

    scene.clear()
    with calls(("pwrite", "write", "preadv", "copy_file_range"), some):
        scene.convert(check="full")
    if problem := scene.judge_finished():
        raise AssertionError(f"{scene.kind.name}, in parts: {problem}")
    scene.clear()
    return 1


def missing(scene: Scene, every: int) -> int:
    """Calls that other systems and file systems do not have."""
    sets = (*({c} for c in ("pread", "pwrite", "copy_file_range", "fallocate", "flock", "renameat2")),)
    for names in (*sets, set().union(*sets)):
        scene.clear()
        platform.DISABLED.update(names)
        try:
            scene.convert()
        finally:
            platform.DISABLED.clear()
        if problem := scene.judge_finished():
            raise AssertionError(f"{scene.kind.name}, without {names}: {problem}")
    scene.clear()
    return len(sets) + 1


def changes(scene: Scene, every: int) -> int:
    """A source file is written to, truncated, replaced or removed at a random moment: told, and no output."""
    rng = random.Random(scene.kind.name)
    done = 0
    for number in range(20):
        how = ("written", "truncated", "replaced", "removed", "appended")[number % 5]
        scene.clear()
        source = scene.source.with_name("changing")
        shutil.rmtree(source, ignore_errors=True)
        shutil.copytree(scene.source, source)
        at = rng.uniform(0, 0.98)
        with convert.open_checkpoint(source) as opened:
            plan = convert.plan_conversion(opened, scene.kind.to, **scene.kind.options)
            moment = at * sum(e.nbytes for f in plan.files for e in f.entries)
            file = rng.choice(opened.files)
            state, once = {"seen": 0.0, "done": False}, threading.Lock()

            def change(n: int, state: dict[str, Any] = state, moment: float = moment) -> None:
                with once:  # noqa: B023
                    state["seen"] += n
                    if state["seen"] >= moment and not state["done"]:
                        state["done"] = True
                        _change(file, how)  # noqa: B023

            where = f"{scene.kind.name}: {file.name} {how} at {at:.2f}"
            try:
                run(plan, scene.kind.out(scene.place), overwrite=scene.kind.overwrite, progress=change)
            except ConvertError as error:
                found = {p.kind for p in error.problems}
                assert found <= {"source_changed", "truncated", "read", "check", "not_finite", "overflow"}, (
                    f"{where}: {error}"
                )
            else:
                raise AssertionError(f"{where}: not noticed")
        assert not [p for p in scene.place.iterdir() if p.name.endswith(".partial")], where
        if problem := scene.judge():
            raise AssertionError(f"{where}: {problem}")
        done += 1
    shutil.rmtree(source)
    scene.clear()
    return done


def _change(file: Path, how: str) -> None:
    data = file.read_bytes()
    if how == "written":
        with file.open("r+b") as handle:
            handle.seek(len(data) // 2)
            handle.write(bytes(255 - b for b in data[len(data) // 2 : len(data) // 2 + 64]))
    elif how == "truncated":
        os.truncate(file, len(data) * 2 // 3)
    elif how == "appended":
        with file.open("ab") as handle:
            handle.write(b"more")
    elif how == "removed":
        file.unlink()
    else:
        file.with_name("new").write_bytes(bytes(reversed(data)))
        os.replace(file.with_name("new"), file)


def signals(scene: Scene, every: int) -> int:
    """SIGINT, SIGTERM and SIGHUP at random moments of the command: exit code, message, nothing left or resumed."""
    rng = random.Random(scene.kind.name)
    started = time.perf_counter()
    scene.convert()
    seconds = time.perf_counter() - started
    for number in range(12):
        signum = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)[number % 3]
        resume = number % 2 == 0
        scene.clear()
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            _command(scene, resume, write)
        os.close(write)
        os.read(read, 1)  # it is about to begin
        time.sleep(rng.uniform(0, 1.2 * seconds))
        os.kill(pid, signum)
        _, status = os.waitpid(pid, 0)
        said = b"".join(iter(lambda: os.read(read, 65536), b"")).decode()  # noqa: B023
        os.close(read)
        code = os.waitstatus_to_exitcode(status)
        where = f"{scene.kind.name}: {signal.Signals(signum).name} after {seconds:.2f} s, exit code {code}: {said}"
        assert code in (0, 128 + signum), where
        if code:
            assert "Nothing was left behind" in said or "--resume goes on" in said or "is complete" in said, where
        if problem := scene.judge():
            raise AssertionError(f"{where}: {problem}")
        partial = [p for p in scene.place.iterdir() if p.name.endswith(".partial")]
        assert not partial or (resume and code), where
        if partial:
            scene.convert(resume=True)
            if problem := scene.judge_finished():
                raise AssertionError(f"{where}, resumed: {problem}")
    scene.clear()
    return 12


def _command(scene: Scene, resume: bool, write: int) -> None:
    """The command line in this (forked) process; what it says goes into ``write``."""
    from convert import cli

    begin = cli.cli.main

    def tell(*args: Any, **options: Any) -> Any:
        os.write(write, b".")
        return begin(*args, **options)

    cli.cli.main = tell  # type: ignore[method-assign]
    code = 99
    try:
        os.dup2(write, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        words = []
        for key, value in scene.kind.options.items():
            flag = {"tokenizer": "no-tokenizer"}.get(key, key.replace("_", "-"))
            words += [f"--{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        words += ["--overwrite"] * scene.kind.overwrite + ["--resume"] * resume + ["--verify", "never"]
        out = scene.kind.out(scene.place)
        cli.main(["to", scene.kind.to, str(scene.source), str(out), *words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stderr.flush()
        os._exit(code)


SMALL = """
set -e
mkdir -p "$1"
mount -t tmpfs -o size="$2" none "$1"
shift 2
place=$1; shift
set +e
"$@"
code=$?
find "$place" -mindepth 1 | sort
exit $code
"""


def small_disk(scene: Scene, every: int) -> int:
    """A real file system that is too small: 10 sizes of a tmpfs, the last with room enough."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        print("  (no tmpfs can be mounted here)")
        return 0
    with convert.open_checkpoint(scene.source) as opened:
        plan = convert.plan_conversion(opened, scene.kind.to, **scene.kind.options)
        plan.bind(scene.kind.out(scene.place))
        need = plan.nbytes
    disk = scene.place / "disk"
    for number in range(10):
        size = int(need * (number + 0.5) / 10) if number < 9 else 2 * need + (1 << 20)
        words = [sys.executable, "-m", "convert", "to", scene.kind.to, str(scene.source), str(scene.kind.out(disk))]
        for key, value in scene.kind.options.items():
            flag = {"tokenizer": "no-tokenizer"}.get(key, key.replace("_", "-"))
            words += [f"--{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
        words += ["--verify", "never", "--force", "--quiet"]
        done = subprocess.run(
            ["unshare", "-rm", "sh", "-c", SMALL, "sh", str(disk), str(size), str(disk), *words],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=False,
        )
        where = (
            f"{scene.kind.name}: {size:,} of {need:,} bytes: exit code {done.returncode}: {done.stderr}{done.stdout}"
        )
        if number == 9:
            assert done.returncode == 0 and done.stdout, where
        else:
            assert done.returncode == 1 and "No space left on device" in done.stderr, where
            assert "Traceback" not in done.stderr and done.stdout == "", where
    scene.clear()
    return 10


FAULTS: dict[str, Callable[[Scene, int], int]] = {
    "writes that fail": writes,
    "reads that fail": reads,
    "reads and writes in parts": parts,
    "calls that are missing": missing,
    "sources that change": changes,
    "signals": signals,
    "small disks": small_disk,
}


def inject(kind: Kind, folder: Path, only: str = "", *, every: int = 1) -> dict[str, int]:
    """All faults on one kind of conversion; how many runs of each.

    Raises:
        AssertionError: Something was lost or wrong.
    """
    small_pieces()
    scene = Scene(kind, folder)
    out = {}
    for name, fault in FAULTS.items():
        if only in name and not (fault is small_disk and kind.overwrite):
            out[name] = fault(scene, every)
    return out


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only faults with this in their name")
    parser.add_argument("--kind", default="", help="only kinds with this in their name")
    parser.add_argument("--every", type=int, default=1, help="fail only every n-th call")
    parser.add_argument("--workdir", type=Path)
    args = parser.parse_args()
    folder = Path(args.workdir or tempfile.mkdtemp(prefix="faults-"))
    total: dict[str, int] = {}
    for kind in KINDS:
        if args.kind in kind.name:
            found = inject(kind, folder, args.only, every=args.every)
            total = {name: total.get(name, 0) + found.get(name, 0) for name in {**total, **found}}
            print(f"{kind.name}: " + ", ".join(f"{n} {name}" for name, n in found.items()), flush=True)
    print("all: " + ", ".join(f"{n:,} {name}" for name, n in total.items()) + "; nothing lost")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
