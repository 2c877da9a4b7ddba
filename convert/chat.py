"""A chat turned into a prompt by the model's own template (Jinja), as transformers does it.

Templates are code from a download: they run in Jinja's sandbox, in a process of their own that has little time and
memory (:mod:`convert.engines.chat_child`). This module knows no tokens.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem

#: The longest template that is run; those of real models have up to 20 KB.
LONGEST = 1 << 20
#: Seconds to wait for the process; its own limit is one second of processor, which a busy machine stretches.
PATIENCE = 60.0
#: How the process ends at its limit of processor time.
_STOPPED = tuple(-int(getattr(signal, name)) for name in ("SIGPROF", "SIGKILL") if hasattr(signal, name))
_CHILD = Path(__file__).parent / "engines" / "chat_child.py"


def render(
    template: str, messages: Sequence[Mapping[str, str]], *, special: Mapping[str, str], generation: bool = True
) -> str:
    """The prompt that ``template`` makes of ``messages``.

    Args:
        template: Jinja source.
        messages: Each with ``role`` (``system``, ``user``, ``assistant``) and ``content``.
        special: Names templates use (``bos_token``, ``eos_token`` …) and their texts.
        generation: Whether the start of the assistant's answer is added.

    Raises:
        ConvertError: Jinja is not installed, or the template refuses these messages, is broken, or takes more than a
            second of processor, 400 MiB, or four million characters.
    """
    if not _installed():
        raise ConvertError(
            Problem(
                "jinja2",
                "A chat template needs the package jinja2, which is not installed here.",
                wanted="jinja2",
                hint="pip install jinja2; or leave --chat out and write the prompt as the model expects it.",
            )
        )
    if len(template) > LONGEST:
        raise _failed(f"it has {len(template):,} characters; at most {LONGEST:,} are run")
    values = {"messages": [dict(m) for m in messages], "add_generation_prompt": generation, **special}
    answer = _run({"template": template, "values": values, "path": [p for p in sys.path if p]})
    if "error" in answer:
        raise _failed(answer["error"])
    text = str(answer["text"])
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise _failed("it makes half a surrogate, which is no text")
    return text


def _run(request: Mapping[str, Any]) -> dict[str, str]:
    """What the subprocess answers; why it did not, as an error."""
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(_CHILD)],
            input=json.dumps(request).encode(),
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": "it takes too long"}
    if done.returncode == 0:
        answer: dict[str, str] = json.loads(done.stdout)
        return answer
    if done.returncode in _STOPPED:
        return {"error": "it takes too long (more than a second of processor)"}
    last = done.stderr.decode(errors="replace").strip().splitlines()
    return {"error": f"its process ended with exit code {done.returncode}: {last[-1][:300] if last else 'no word'}"}


def _installed() -> bool:
    try:
        return importlib.util.find_spec("jinja2") is not None
    except ValueError:  # a module put there by hand, as tests do
        return False


def _failed(why: str) -> ConvertError:
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in why[:500]).rstrip(".")
    return ConvertError(
        Problem(
            "chat_template",
            f"The chat template fails: {shown}.",
            hint="Leave --chat out and write the prompt as the model expects it.",
        )
    )
