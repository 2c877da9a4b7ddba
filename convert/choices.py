"""Values of options, checked where a call hands them over: the command line's parser does not stand before the library.

A word that nobody knows must not pass for one of the choices, and a number out of range must not end in arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convert.errors import Problem, UsageError


def require_choice(option: str, value: Any, allowed: Sequence[str]) -> None:
    """``value`` is None or one of ``allowed``.

    Raises:
        UsageError: It is not.
    """
    if value is not None and value not in allowed:
        known = ", ".join(allowed)
        raise UsageError(
            Problem(
                "option",
                f"{option}={value!r} is not known.",
                found=value,
                wanted=list(allowed),
                hint=f"Known: {known}.",
            )
        )


def require_positive(option: str, value: Any) -> None:
    """``value`` is None or a whole number of at least 1.

    Raises:
        UsageError: It is not.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UsageError(
            Problem("option", f"{option}={value!r} is no whole number of at least 1.", found=value, wanted="1 or more")
        )


def require_target(option: str, given: object, target: str, *, only: str) -> None:
    """Refuse an option that one target alone has.

    Raises:
        UsageError: It is given, and the target is another.
    """
    if given and target != only:
        raise UsageError(
            f"--{option.replace('_', '-')} only applies to the {only} layout, not to {target}.", hint="Leave it out."
        )
