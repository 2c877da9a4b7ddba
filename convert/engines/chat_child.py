"""What runs inside the subprocess: a chat template in Jinja's sandbox. A script, not for import.

Reads one request as JSON from standard input and writes ``{"text": …}`` or ``{"error": …}``. A template is a program
from a download: Jinja's sandbox keeps it from Python's objects, but not from counting for ever or asking for a text of
gigabytes, both in one expression that no other thread could stop. So the process has little time and memory, and may
start no program, open no socket and change no file. The parent is :mod:`convert.chat`. It imports nothing of this
product.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

#: Seconds of processor time for compiling and rendering, bytes of address space, and characters of a prompt.
SECONDS, MEMORY, LONGEST = 1.0, 400 << 20, 4_000_000
_NEVER: tuple[str, ...] = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.",
    "socket.",
    "ctypes.",
)
_NEVER += ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.", "os.kill")


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    # The settings are those under which templates are written: transformers' own.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    _confine()
    try:
        template = environment.from_string(request["template"])
        answer = {"text": _joined(template.generate(**request["values"]))}
    except MemoryError:
        answer = {"error": f"it needs more than {MEMORY >> 20} MiB of memory"}
    except RecursionError:
        answer = {"error": "it is nested too deep, or calls itself without end"}
    except Exception as error:  # a template can raise whatever an expression can
        answer = {"error": str(error)[:1000] or type(error).__name__}
    sys.stdout.buffer.write(json.dumps(answer).encode())


def _joined(pieces: Any) -> str:
    out, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > LONGEST:
            raise ValueError(f"it makes more than {LONGEST:,} characters")
        out.append(piece)
    return "".join(out)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _confine() -> None:
    """From here on: a second of processor, little memory, no programs, sockets or files written."""
    sys.addaudithook(_watch)
    try:
        import resource
        import signal
    except ImportError:  # Windows: the parent's patience is the only limit
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform.startswith("linux"):  # elsewhere the limit is refused, or not kept
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # in the middle of one long operation, too
    signal.setitimer(signal.ITIMER_PROF, SECONDS)


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event.startswith(_NEVER) or (event == "open" and any(c in str(args[1] or "") for c in "wax+")):
        raise PermissionError(f"it may not do this: {event}")


if __name__ == "__main__":
    main()
