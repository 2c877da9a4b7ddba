"""What went wrong with the Hub, said once, with the next step: missing, private, gated, rate-limited, offline, full.

The library's exceptions are told apart by their classes and by the answer's status; nothing is asked of the network
here but the names that come near a misspelt one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from typing import Any

from convert.errors import ConvertError, Problem
from convert.hub.names import Name

#: What a server says that is busy, or that limits; asking later is worth while.
BUSY = (429, 500, 502, 503, 504)


def chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def status_of(error: BaseException) -> int | None:
    """The status of the answer that an error came from, or None."""
    for one in chain(error):
        found = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(found, int):
            return found
    return None


def retry_after(error_or_headers: Any) -> float | None:
    """Seconds that a server asks to wait, from an error's answer or from headers; None where it does not say."""
    headers = error_or_headers
    if isinstance(error_or_headers, BaseException):
        answers = (getattr(one, "response", None) for one in chain(error_or_headers))
        headers = next((a.headers for a in answers if a is not None), {})
    value = str(headers.get("Retry-After", "")).strip()
    if value.isdecimal():
        return float(value)
    if not value:
        return None
    from email.utils import parsedate_to_datetime

    try:
        import time

        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError):
        return None


def is_transport(error: BaseException) -> bool:
    """Whether no answer came at all (or not all of it): no connection, a cut one, silence."""
    from huggingface_hub.errors import HTTPError

    return isinstance(error, HTTPError) and getattr(error, "response", None) is None


def explain(error: BaseException, name: Name, *, near: Callable[[], list[str]] | None = None) -> ConvertError:
    """The one error that a user sees.

    Args:
        error: What the library raised.
        name: What was asked for.
        near: Asks for the names that come near a missing one.
    """
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    for one in chain(error):
        if isinstance(one, ConvertError):
            return one
        if isinstance(one, errors.OfflineModeIsEnabled):
            return _said(
                "offline",
                f"{name} is not in the cache, and HF_HUB_OFFLINE is set.",
                name,
                "Unset HF_HUB_OFFLINE, or give a local folder.",
            )
        if isinstance(one, errors.GatedRepoError):
            return _said(
                "gated",
                f"{name.repo} is gated: its owners let in who has accepted their terms.",
                name,
                f"Accept them at {endpoint}/{name.repo}, then log in (hf auth login) or set HF_TOKEN.",
                status_of(one),
            )
        if isinstance(one, errors.RevisionNotFoundError):
            return _said(
                "revision",
                f"{name.repo} has no revision {name.revision!r}.",
                name,
                f"Its branches and tags: {endpoint}/{name.repo}/tree/main.",
                404,
            )
        if "Invalid credentials" in str(one) or "Invalid username or password" in str(one):
            return _said(
                "token",
                f"the Hub does not know the token that was given ({name}).",
                name,
                "Log in again (hf auth login), or set HF_TOKEN to a valid one; for a public repository, unset it.",
                401,
            )
        if isinstance(one, errors.RepositoryNotFoundError) or (status_of(one) == 401):
            return _missing(name, endpoint, status_of(one), near)
        if isinstance(one, OSError) and one.errno in (errno.ENOSPC, errno.EDQUOT):
            return _full(name)
        if "free disk space" in str(one) or "No space left" in str(one):
            return _full(name)
    status = status_of(error)
    if status == 403:
        return _said(
            "forbidden",
            f"the Hub does not let this token read {name.repo} (403).",
            name,
            "Give the token read access to the repository (fine-grained tokens list them), or use another one.",
            status,
        )
    if status == 429:
        wait = retry_after(error)
        said = f", and asks to wait {wait:.0f} s" if wait else ""
        return _said(
            "rate_limited",
            f"the Hub limits how often it is asked (429){said}.",
            name,
            "Try again later; with a token (HF_TOKEN) the limit is higher.",
            status,
        )
    if status is not None and status >= 500:
        return _said("busy", f"the Hub answers {status} for {name}.", name, "Try again later.", status)
    if status == 404:
        return _said("missing", f"{name} is not there (404).", name, f"What is: {endpoint}/{name.repo}.", status)
    if isinstance(error, errors.LocalEntryNotFoundError) or any(map(is_transport, chain(error))):
        why = next((str(e) or type(e).__name__ for e in chain(error) if is_transport(e)), "no answer")
        local = "" if name.explicit else " It is no local path either."
        return _said(
            "unreachable",
            f"{endpoint} cannot be reached for {name} ({why}).{local}",
            name,
            "Is there a network, a proxy (HTTPS_PROXY), a mirror (HF_ENDPOINT)? What is in the cache is used without.",
        )
    return _said(
        "hub", f"{name}: {type(error).__name__}: {str(error).strip().splitlines()[0][:300]}", name, None, status
    )


def _missing(name: Name, endpoint: str, status: int | None, near: Callable[[], list[str]] | None) -> ConvertError:
    try:
        found = near() if near else []
    except Exception:  # a courtesy
        found = []
    like = f" Names near it: {', '.join(found[:5])}." if found else ""
    what = "names no repository that can be seen" if name.explicit else "is no local path, and no repository on the Hub"
    private = "If it is private, log in (hf auth login) or set HF_TOKEN to a token that may read it."
    return _said("missing", f"{name} {what}.{like}", name, private, status)


def _full(name: Name) -> ConvertError:
    from huggingface_hub import constants

    return _said(
        "disk_full",
        f"the disk is too full for {name} (cache: {constants.HF_HUB_CACHE}).",
        name,
        "Set HF_HOME to a larger disk, free space (hf cache prune), or convert with --no-download.",
    )


def _said(kind: str, message: str, name: Name, hint: str | None, status: int | None = None) -> ConvertError:
    return ConvertError(Problem(f"hub_{kind}", message, file=str(name), found=status, hint=hint))
