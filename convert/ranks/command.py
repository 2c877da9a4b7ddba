"""The command line of a rank: rank 0 speaks for all, and all end with one exit code."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from convert.ranks import Place, enlist
from convert.ranks.crew import Crew

#: What one rank does alone.
_ALONE = ("--dry-run", "--help", "-h")

Runner = Callable[[Any, Sequence[str]], int]


class _Together:
    """A group of commands whose failures are told to the other ranks."""

    def __init__(self, group: click.Command, place: Place) -> None:
        self.group = group
        self.place = place
        self.crew: Crew | None = None

    def main(self, args: Sequence[str], **how: Any) -> Any:
        """See :meth:`click.Command.main`."""
        self.crew = crew = Crew(self.place)
        enlist(crew)
        try:
            return self.group.main(args, **how)
        except Exception as error:
            crew.fail(error)
            raise
        except BaseException as stop:
            crew.fail(stop)
            crew.check_other(stop)
            raise
        finally:
            enlist(None)


def run_rank(run: Runner, group: click.Command, args: Sequence[str], place: Place) -> int:
    """Run one rank's command line.

    Args:
        run: Runs a group and maps errors to exit codes (:func:`convert.cli.run`).
        group: The commands.
        args: The arguments.
        place: Which rank this is.

    Returns:
        The exit code, on every rank the same where the ranks still hear each other.
    """
    if not _shared(args) or any(word in args for word in _ALONE):
        return run(group, args) if place.rank == 0 else 0
    together = _Together(group, place)
    with _silence() if place.rank else contextlib.nullcontext() as speak:
        code = run(together, args)
        crew = together.crew
        if crew is None:  # it met nobody
            return code
        code = crew.end(code)
        if speak is not None and code and crew.speaks():
            speak("error: rank 0 was lost: it was killed, or its machine is gone.")
            speak("       Nothing was finished; --resume goes on from what a run with --resume has left.")
        crew.note("left")
        crew.close()
    return code


def _shared(args: Sequence[str]) -> bool:
    """Whether the command is a conversion; the others are done by rank 0 alone."""
    from convert.cli import COMMANDS

    name = next((word for word in args if not word.startswith("-")), "")
    return COMMANDS.get(name, ("",))[0] == "conversions"


@contextlib.contextmanager
def _silence() -> Iterator[Callable[[str], None]]:
    """Nothing is printed meanwhile; what is yielded prints all the same."""
    stderr = sys.stderr

    def speak(line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, file=stderr, flush=True)

    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        yield speak
