"""The command line: parse, call one function, map errors to exit codes. The only printing is here and in commands/.

Exit codes: 0 good, 1 findings or failure, 2 usage (also the wrong command for a source), 3 weak verification, 129, 130
and 143 for SIGHUP, SIGINT and SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import click

from convert import __version__
from convert.errors import ConvertError, Problem, UsageError
from convert.stops import arrived

#: Command name → module of :mod:`convert.commands` and its attribute. Imported when the command is used, so that
#: ``--help`` stays fast.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "hf-to-scratch": ("conversions", "hf_to_scratch", "Hugging Face → from-scratch PyTorch names."),
    "scratch-to-hf": ("conversions", "scratch_to_hf", "From-scratch PyTorch names → Hugging Face."),
    "meta-to-hf": ("conversions", "meta_to_hf", "Meta original → Hugging Face."),
    "hf-to-meta": ("conversions", "hf_to_meta", "Hugging Face → Meta original."),
    "meta-to-scratch": ("conversions", "meta_to_scratch", "Meta original → from-scratch PyTorch names."),
    "scratch-to-meta": ("conversions", "scratch_to_meta", "From-scratch PyTorch names → Meta original."),
    "gguf-to-hf": ("conversions", "gguf_to_hf", "GGUF → Hugging Face."),
    "gguf-to-scratch": ("conversions", "gguf_to_scratch", "GGUF → from-scratch PyTorch names."),
    "gguf-to-meta": ("conversions", "gguf_to_meta", "GGUF → Meta original."),
    "hf-to-gguf": ("conversions", "hf_to_gguf", "Hugging Face → GGUF."),
    "meta-to-gguf": ("conversions", "meta_to_gguf", "Meta original → GGUF."),
    "scratch-to-gguf": ("conversions", "scratch_to_gguf", "From-scratch PyTorch names → GGUF."),
    "gguf-to-gguf": ("conversions", "gguf_to_gguf", "GGUF → GGUF: other types, other splits."),
    "openai-to-hf": ("conversions", "openai_to_hf", "OpenAI's TensorFlow checkpoint → Hugging Face."),
    "openai-to-scratch": ("conversions", "openai_to_scratch", "OpenAI's TensorFlow checkpoint → from-scratch names."),
    "openai-to-gguf": ("conversions", "openai_to_gguf", "OpenAI's TensorFlow checkpoint → GGUF."),
    "to": ("conversions", "to", "Any source → the LAYOUT named."),
    "inspect": ("inspect", "command", "What a checkpoint is: format, layout, sizes, RoPE, memory."),
    "validate": ("validate", "command", "Whether every tensor is there, once, in the right shape."),
    "check": ("check", "command", "Whether an output is still what was written, by its record and its source."),
    "verify": ("verify", "command", "Run two checkpoints and compare their logits."),
    "diff": ("diff", "command", "Compare two checkpoints tensor by tensor, with config and tokenizer."),
    "repair": ("repair", "command", "Write a corrected copy: undo a known fault of a conversion."),
    "diagnose": ("diagnose", "command", "What is wrong with a checkpoint that loads and misbehaves."),
    "push": ("push", "command", "Upload an output to the Hub, with a model card made of its record."),
    "metadata": ("metadata", "command", "Show and change the key-values of a GGUF file."),
    "generate": ("generate", "command", "Continue a text with the weights, from any layout."),
    "tables": ("tables", "command", "Show, check and start mapping tables and names files."),
    "families": ("families", "command", "The model families that have a table."),
}


#: Signals that end a process; Windows has no SIGHUP.
_ENDING = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
#: Seconds in which another signal asks for nothing new.
_REPEATED = 3.0


class Terminated(BaseException):
    """A signal arrived that ends the process.

    Attributes:
        number: Which one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All command names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(import_module(f"convert.commands.{module}"), attribute)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """Say which commands come near a misspelt one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=3)
            if near:
                raise click.UsageError(f"{error.message} Did you mean {' or '.join(near)}?", ctx) from None
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands from the table, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, help_) for name, (_, _, help_) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="convert")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Convert Llama-family checkpoints between Meta, Hugging Face, from-scratch and GGUF layouts, and verify them."""
    ctx.ensure_object(dict)["debug"] = debug


def main(argv: Sequence[str] | None = None) -> None:
    """The console script; under torchrun or srun, one of several ranks."""
    from convert.ranks import place

    _open_streams()
    try:
        at = place()
    except ConvertError as error:
        _show(error, False)
        sys.exit(error.exit_code)
    if at is None:
        sys.exit(run(cli, argv, last=True))
    from convert.ranks.command import run_rank

    sys.exit(run_rank(run, cli, sys.argv[1:] if argv is None else argv, at))


def _open_streams() -> None:
    """Nothing that is opened later gets the number of a closed standard stream; no letter is one too many for one.

    A weights file that got number 2 would receive whatever a library prints there; and a console of another encoding
    has no arrows.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        stream = getattr(sys, name)
        if stream is None:
            fd = os.open(os.devnull, os.O_RDWR)
            if fd != number:
                os.dup2(fd, number)
                os.close(fd)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115
        elif mode == "w" and stream.errors == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def run(group: click.Command, argv: Sequence[str] | None = None, *, last: bool = False) -> int:
    """Run the command line and return its exit code.

    Args:
        group: The commands.
        argv: The arguments, unless they are those of this process.
        last: The process ends with it: once it was stopped, cleaned up and told so, no other signal changes the code.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug, as_json = "--debug" in args, "--json" in args
    if {"--json", "--quiet", "-q"} & set(args):  # no bars of the library that downloads
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    previous = _on_signals()
    stopped = False
    try:
        result = group.main(args, prog_name="convert", standalone_mode=False)
        return int(result) if isinstance(result, int) else 0
    except ConvertError as error:
        if any(problem.kind == "stdout" for problem in error.problems):
            _silence_stdout()
        _show(error, debug)
        _show_json(error.problems if as_json else ())
        return error.exit_code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        _show_json([Problem("usage", error.format_message())] if as_json else ())
        return error.exit_code
    except (KeyboardInterrupt, click.Abort) as stop:
        stopped = True
        click.echo(f"Interrupted. {_left_behind(stop)}", err=True)
        return 130
    except Terminated as stop:
        stopped = True
        with suppress(OSError):  # after a hang-up there may be nobody to tell
            click.echo(f"Terminated. {_left_behind(stop)}", err=True)
        return 128 + stop.number
    except BrokenPipeError:
        _silence_stdout()
        return 1
    except Exception as error:
        problem = _unexpected(error, debug)
        _show_json([problem] if as_json else ())
        return 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_IGN if last and stopped else handler)


def _left_behind(stop: BaseException) -> str:
    """What a run that was stopped says of its output."""
    notes = (*getattr(stop, "__notes__", ()), *getattr(stop.__cause__, "__notes__", ()))  # click wraps the interrupt
    return " ".join(notes) or "Nothing was left behind."


def _on_signals() -> dict[int, Any]:
    """Let the signals that end a process unwind it, once; returns what handled them before.

    Whoever presses the keys three times shall not stop the cleaning up.
    """
    last = -_REPEATED

    def stop(number: int, _: Any) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < _REPEATED:
            return
        last = now
        arrived(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))

    previous: dict[int, Any] = {}
    for name in _ENDING:
        number = getattr(signal, name)
        if signal.getsignal(number) in (signal.SIG_IGN, None):  # as nohup asks
            continue
        try:
            previous[number] = signal.signal(number, stop)
        except ValueError:  # not in the main thread
            break
    return previous


def _show(error: ConvertError, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    from convert.report import error_lines

    for line in error_lines(error.problems, source=None if isinstance(error, UsageError) else error.source):
        click.echo(line, err=True)


def _show_json(problems: Sequence[Problem]) -> None:
    """The findings as one object on standard output, where ``--json`` promises one."""
    if not problems:
        return
    import json

    value = {"schema": "convert.error/1", "ok": False, "problems": [problem.as_json() for problem in problems]}
    try:
        click.echo(json.dumps(value, indent=2))
    except OSError:  # nobody reads, or the disk behind it is full
        _silence_stdout()


def _unexpected(error: Exception, debug: bool) -> Problem:
    """Tell of an error that is no finding; returns it as one."""
    from convert.io_errors import advice

    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if not where and _printing(error):
            where = " (standard output, which was not written to its end)"
            _silence_stdout()
        unread = bool(error.filename) and not os.access(error.filename, os.R_OK)  # else it was not reading that failed
        problem = Problem("system", f"{error.strerror or error}{where}.", hint=advice(error) if unread else None)
    elif isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "can't start new thread" in str(error)):
        kept = " ".join(getattr(error, "__notes__", ()))
        problem = Problem("memory", f"out of memory. Use fewer --threads. {kept}".strip())
    else:
        problem = Problem("bug", f"{type(error).__name__}: {error}. This is a bug; --debug shows where.")
    if debug:
        traceback.print_exc()
    else:
        click.echo(f"error: {problem.message}" + (f"\n       {problem.hint}" if problem.hint else ""), err=True)
    return problem


def _printing(error: OSError) -> bool:
    """Whether it was printing that failed: what the system says of a full disk behind standard output names no file."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    return at is not None and at.tb_frame.f_code is click.echo.__code__


def _silence_stdout() -> None:
    """The reader of our output has gone; keep the interpreter from complaining at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())


if __name__ == "__main__":
    main()
