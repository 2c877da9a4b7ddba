"""Runs commands on hostile inputs in children that are watched, and says what they did that they must not do.

A lean server (no torch, no pytest) has the product imported and forks a child for each run. The child is watched by an
audit hook (programs started, sockets, files opened for writing), measured (processor seconds, peak memory since the
fork: ``VmHWM``, because ``ru_maxrss`` would include the parent's), and stopped when it hangs. Before and after, the
folder around is listed: nothing may change but the place of the output, and after a refusal nothing may be there.

``python -m tests.trust.hostile.harness`` serves: one JSON request per line on standard input, one answer per line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.trust.hostile.library import CALLS, noted_imports
from tests.trust.hostile.library import main as call

#: The bars: processor seconds and MB of memory for one command on one input, and seconds until it counts as hanging.
SECONDS, MEGABYTES, PATIENCE = 2.0, 300, 90
#: How much may be said about one bad file.
MOST_TEXT = 6000
#: What private files hold that no command may tell of.
SECRET = "the private words of a decoy"
ROOT = Path(__file__).parent.parent.parent.parent


#: What is run on every checkpoint besides, in the full run.
LATER = ("repair", "verify", "generate-text", "open", "load-into", "scratch-config", "compare-tensors")


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Attributes:
        name: ``group: what it is``.
        build: Makes the files in an empty folder and returns the path to give to the commands.
        commands: Which commands of :data:`COMMANDS` are run.
        passes: Those of them that may succeed: what is wrong is no business of theirs, and that is harmless.
        more: Commands for the full run.
        usage: Those that may end with 2: what they were given is no checkpoint at all, or the output's place is taken.
    """

    name: str
    build: Callable[[Path], Path]
    commands: tuple[str, ...] = ("inspect", "validate", "to-scratch")
    passes: frozenset[str] = frozenset()
    more: tuple[str, ...] = ("to-gguf", "diff", "check", "diagnose", *LATER)
    usage: frozenset[str] = frozenset()


#: Arguments of each command; ``{src}`` is the input, ``{out}`` where output may go, ``{good}`` a sound model.
COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "{src}"],
    "inspect-json": ["inspect", "{src}", "--json"],
    "validate": ["validate", "{src}"],
    "scan": ["validate", "{src}", "--scan"],
    "to-scratch": ["to", "scratch", "{src}", "{out}/m"],
    "to-hf": ["to", "hf", "{src}", "{out}/m"],
    "to-gguf": ["to", "gguf", "{src}", "{out}/m.gguf", "--no-tokenizer"],
    "to-gguf-vocabulary": ["to", "gguf", "{src}", "{out}/m.gguf"],
    "resume": ["to", "scratch", "{src}", "{out}/m", "--resume"],
    "metadata": ["metadata", "{src}"],
    "diff": ["diff", "{src}", "{good}"],
    "diff-b": ["diff", "{good}", "{src}"],
    "check": ["check", "{src}"],
    "check-of": ["check", "{good}", "--source", "{src}"],
    "check-source": ["check", "{src}", "--source", "{good}"],
    "diagnose": ["diagnose", "{src}", "--probe-only"],
    "diagnose-against": ["diagnose", "{good}", "--against", "{src}", "--probe-only"],
    "hashes": ["validate", "{src}", "--checksums", "{src}/sums.txt"],
    "names": ["to", "scratch", "{good}", "{out}/m", "--names", "{src}"],
    "tables-check": ["tables", "check", "{src}"],
    "tables-show": ["tables", "show", "{src}"],
    "tables-against": ["tables", "check", "{src}", "--against", "{good}"],
    "table-of": ["tables", "check", str(ROOT / "mappings" / "llama.toml"), "--against", "{src}"],
    "push": ["push", "{src}", "org/name", "--dry-run"],
    "config": ["to", "scratch", "{good}", "{out}/m", "--config", "{src}"],
    "repair": ["repair", "{src}", "{out}/m{ext}", "--fix", "swap-norms"],
    "generate": ["generate", "{src}", "--chat", "--prompt", "t1", "--max-new-tokens", "2", "--device", "cpu"],
    "generate-text": ["generate", "{src}", "--prompt", "t1", "--max-new-tokens", "2", "--device", "cpu"],
    "verify": ["verify", "{src}", "{good}", "--device", "cpu"],
    "prompts": ["verify", "{good}", "{good}", "--prompts", "{src}", "--device", "cpu"],
    "text": ["verify", "{good}", "{good}", "--text", "@{src}", "--device", "cpu"],
    "hash": ["validate", "{src}", "--hash"],
    "verify-b": ["verify", "{good}", "{src}", "--device", "cpu"],
    "verify-text": ["verify", "{src}", "{good}", "--text", "t1 t2", "--device", "cpu"],
    **{name: [name, "{src}", "{good}"] for name in CALLS},
}
#: Commands that tell what they find as a report on standard output, as they tell good news.
REPORTS = frozenset(("validate", "scan", "hashes", "diff", "diff-b", "check", "check-of", "check-source"))
REPORTS |= {"hash", "verify", "verify-b", "verify-text"}
#: What may pass where one of these may: it looks at no more than they do.
ALIKE = {
    "scratch-config": ("inspect", "to-scratch"),
    "compare-tensors": ("inspect", "diff"),
    "open": ("inspect", "validate", "to-scratch"),
    "load-into": ("validate", "to-scratch", "to-gguf"),
    "repair": ("to-scratch",),
    "verify": ("diagnose",),
    "verify-text": ("diagnose",),
    "generate-text": ("diagnose",),
}
REPORTS |= {"tables-against", "table-of"}
#: Commands that load torch: they are run in a server that has it, and what it takes by itself is not counted. What the
#: first two refuse they shall refuse before they load it; the others are given a module, or make a torch type.
TORCH = frozenset(("generate", "verify", "load-into", "scratch-config"))
LATE_TORCH = frozenset(("generate", "verify"))


@dataclass
class Seen:
    """What one run did.

    Attributes:
        code: Exit code, negative for a signal.
        seconds: Processor seconds.
        megabytes: Peak memory.
        out: Standard output, the beginning.
        err: Standard error.
        events: What the audit hook saw that must not be.
        changed: Paths that changed where nothing may.
        left: What lies at the output's place.
        late: Whether torch was wanted by a command that need not have it in order to refuse.
    """

    code: int
    seconds: float
    megabytes: int
    out: str
    err: str
    events: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    late: bool = False

    def faults(
        self, *, may_pass: bool = False, usage: bool = False, report: bool = False, about: Iterable[str] = ()
    ) -> list[str]:
        """Everything that must not be, in words; empty for a clean refusal (or, if it may pass, a clean success).

        Args:
            may_pass: Exit codes 0 and 3 are no fault.
            usage: 2 is none either.
            report: A refusal may be a report on standard output, instead of an error.
            about: Names of which a refusal must say one; none are asked for if there are none.
        """
        said = self.out + self.err
        bad = [f"executed or reached out: {e}" for e in self.events]
        bad += [f"changed {p}" for p in self.changed]
        if self.code != 1 and not (may_pass and self.code in (0, 3)) and not (usage and self.code == 2):  # 3: undecided
            bad.append(f"exit code {self.code}")
        judged = may_pass and self.out.startswith("verify: ")  # both were run, and are two models
        if self.code in (1, 2) and not judged:
            bad += self._unclear(report, list(about))
        if self.code and self.left:
            bad.append(f"left {self.left}")
        if self.code == 1 and self.late and "error: " in self.err:
            bad.append("torch was loaded before it refused")
        if "Traceback" in said or "This is a bug" in said:  # an exception that nobody expected
            bad.append("a traceback")
        if self.code and not said.strip():
            bad.append("no word")
        if SECRET in said:
            bad.append("words of a private file")
        if len(said) > MOST_TEXT:
            bad.append(f"{len(said)} characters of text")
        if any(ord(c) < 32 and c not in "\n\t\r" for c in said):
            bad.append("control characters in the text")
        if self.seconds > SECONDS:
            bad.append(f"{self.seconds:.1f} s")
        if self.megabytes > MEGABYTES:
            bad.append(f"{self.megabytes} MB")
        return bad

    def _unclear(self, report: bool, about: list[str]) -> list[str]:
        """What keeps a refusal from being one clear error."""
        bad = []
        if report and not self.err.startswith("error: "):
            if self.err.strip() or not self.out.strip():
                bad.append("a report that is not on standard output alone")
        elif not self.err.startswith("error: "):
            bad.append("does not begin with 'error: '")
        elif self.out.strip():
            bad.append("an error, and words on standard output")
        if self.code == 1 and about and not any(name in self.out + self.err for name in about):
            bad.append("names no file or folder")
        lines = [line for line in (self.out + self.err).splitlines() if len(line.strip()) > 20]
        again = [line for line in dict.fromkeys(lines) if lines.count(line) > 1 and line.startswith("error: ")]
        if again:
            bad.append(f"said twice: {again[0][:80]}")
        return bad


def listing(folder: Path, leave: Path) -> dict[str, tuple[int, ...]]:
    """Everything in a folder but what lies in ``leave``: mode, size, time of change, link's target."""
    out: dict[str, tuple[Any, ...]] = {}
    for top, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = os.path.join(top, name)
            stat = os.lstat(path)
            target = os.readlink(path) if os.path.islink(path) else ""
            plain = not os.path.isdir(path)
            out[path] = (stat.st_mode, stat.st_size * plain, stat.st_mtime_ns * plain, target)
        folders[:] = [f for f in folders if os.path.join(top, f) != str(leave)]
    return out


class Server:
    """A harness process; use as a context manager."""

    def __init__(self, *, reader: str = "") -> None:
        """Start it; ``reader`` names a module whose import changes the product (the controls do that)."""
        self.reader = reader
        self.process: subprocess.Popen[str] | None = None
        self.torch: Server | None = None

    def __enter__(self) -> Server:
        argv = [sys.executable, "-m", "tests.trust.hostile.harness", *([self.reader] if self.reader else [])]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        env["PYTHONDONTWRITEBYTECODE"] = "1"  # ours, in a fresh clone, would be files written elsewhere
        env |= {"OMP_NUM_THREADS": "1"}  # torch's threads do not survive a fork
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.torch is not None:
            self.torch.__exit__(kind, value, tb)
        assert self.process and self.process.stdin
        self.process.stdin.close()
        self.process.wait(10)
        assert self.process.stdout
        self.process.stdout.close()

    def run(self, argv: Sequence[str], box: Path, out: Path) -> Seen:
        """Run the product's command line in ``box``; only below ``out`` may anything be made."""
        if argv[0] in TORCH and not self.reader:
            if self.torch is None:
                self.torch = Server(reader="tests.trust.hostile.preload_torch").__enter__()
            return self.torch.run(argv, box, out)
        assert self.process and self.process.stdin and self.process.stdout
        before = listing(box, out)
        self.process.stdin.write(json.dumps([list(argv), str(box), str(out)]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the harness itself ended")
        seen = Seen(**json.loads(answer))
        after = listing(box, out)
        seen.changed = sorted(p for p in {*before, *after} if before.get(p) != after.get(p))[:10]
        seen.left = sorted(os.listdir(out))
        return seen


def serve() -> None:
    """Answer requests until standard input ends."""
    import tests.trust.hostile.preload  # noqa: F401

    if len(sys.argv) > 1:
        __import__(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints by mistake
    for line in sys.stdin:
        argv, box, out = json.loads(line)
        answers.write(json.dumps(_run(argv, Path(box), Path(out))) + "\n")
        answers.flush()


def _run(argv: list[str], box: Path, out: Path) -> dict[str, Any]:
    report = box.parent / f"{box.name}.report"
    texts = [box.parent / f"{box.name}.{n}" for n in ("stdout", "stderr")]
    pid = os.fork()
    if pid == 0:
        _child(argv, box, out, report, texts)
    began = time.monotonic()
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() - began > PATIENCE:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.004)
    said = json.loads(report.read_text()) if report.exists() else {"megabytes": 0, "events": ["no report"]}
    report.unlink(missing_ok=True)
    code = os.waitstatus_to_exitcode(status)
    out_text, err_text = ((p.read_text(errors="backslashreplace") if p.exists() else "")[:20000] for p in texts)
    for path in texts:
        path.unlink(missing_ok=True)
    if code < 0:
        said["events"] = [f"ended by signal {-code} after {time.monotonic() - began:.0f} s"]
    seconds = usage.ru_utime + usage.ru_stime
    return {"code": code, "seconds": round(seconds, 3), "out": out_text, "err": err_text, **said}


#: Audit events that no reader of a file has any use for.
_NEVER = ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "socket.", "pickle.find_class")
_NEVER += ("os.startfile", "shutil.", "ftplib.", "smtplib.", "urllib.", "webbrowser.", "os.kill", "code.__new__")
_PATHS = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate")


def _status(field: str) -> int:
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) for x in lines if x.startswith(field + ":")) * 1024


def _child(argv: list[str], box: Path, out: Path, report: Path, texts: list[Path]) -> None:
    events: list[str] = []
    loaded = _status("VmRSS") if "torch" in sys.modules else 0
    for number, path in enumerate(texts, 1):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(box)
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
    inside = str(out)
    done = [False]

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if done[0]:
            return
        if event == "shutil.rmtree" and str(args[0]).startswith(inside):
            return
        if event == "subprocess.Popen" and str(args[1][-1]).endswith("engines/chat_child.py"):
            return  # a chat template's own process, which limits itself
        if event.startswith(_NEVER):
            events.append(f"{event} {str(args)[:120]}")
        elif event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.abspath(os.fsdecode(args[0]))
            writes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and not path.startswith((inside, "/dev/null", "/dev/tty")):
                events.append(f"opened {path} for writing")
            real = os.path.realpath(path)
            if real.startswith(("/dev/zero", "/dev/random", "/etc/passwd")) or "decoy" in real:
                events.append(f"opened {path} ({real})")
        elif event in _PATHS:
            paths = [os.path.abspath(os.fsdecode(a)) for a in args[:2] if isinstance(a, (str, bytes))]
            if event in ("os.symlink", "os.link"):
                paths = paths[1:]
            events.extend(f"{event} {p}" for p in paths if not p.startswith(inside))

    import click.utils

    from convert import cli

    click.utils.should_strip_ansi = lambda *_, **__: False  # as on a terminal, where escape sequences are obeyed
    late = noted_imports() if argv[0] in LATE_TORCH else []
    sys.addaudithook(watch)
    code: Any = 70
    try:
        try:
            code = call(argv) if argv[0] in CALLS else cli.main(argv) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else (0 if end.code is None else 1)
        except BaseException:
            import traceback

            done[0] = True
            traceback.print_exc()
    finally:
        done[0] = True
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        peak = _status("VmHWM") - loaded
        report.write_text(json.dumps({"megabytes": peak // 10**6, "events": events[:10], "late": bool(late)}))
        os._exit(code)


if __name__ == "__main__":
    serve()
