"""A chat turned into a prompt by the model's own template (Jinja), as transformers does it.

Templates are code from a download; they run in Jinja's sandbox. This module knows no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from convert.errors import ConvertError, Problem


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
        ConvertError: Jinja is not installed, or the template refuses these messages or is broken.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConvertError(
            Problem(
                "jinja2",
                "A chat template needs the package jinja2, which is not installed here.",
                wanted="jinja2",
                hint="pip install jinja2; or leave --chat out and write the prompt as the model expects it.",
            )
        ) from None

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    # The settings are those under which templates are written: transformers' own.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    try:
        made = environment.from_string(template).render(
            messages=[dict(m) for m in messages], add_generation_prompt=generation, **special
        )
    except (TemplateError, TypeError, ValueError) as error:
        raise ConvertError(
            Problem(
                "chat_template",
                f"The chat template fails: {error}.",
                hint="Leave --chat out and write the prompt as the model expects it.",
            )
        ) from None
    return str(made)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Jinja's own filter escapes for HTML, which a prompt must not be."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
