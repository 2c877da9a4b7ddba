"""JSON files of a checkpoint, read on guard: bounded, in one encoding, and saying everything once.

What the values mean is the business of whoever asks for the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from convert.errors import FormatError, Problem
from convert.formats.sniff import refuse_non_weights, sniff

#: A config file of more bytes than this is no config (the largest published are some 30 KB).
MAX_BYTES = 32 << 20
#: How often a character may occur in it: an index of 400,000 tensors has as many; each makes an object of 60 bytes.
_MOST_MARKS = {b"[": 400_000, b"{": 400_000, b",": 1_000_000, b'"': 2_000_000}
AGAIN = "Fetch the file again, or take it from another copy of the model."
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")


def read_json(path: Path) -> Any:
    """Parse a JSON file of a checkpoint.

    Raises:
        FormatError: It is no file, no JSON, absurdly large, or states a key twice and differently; a Git-LFS pointer or
            web page is named.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        what = f"{path.name} is {'a folder' if path.is_dir() else 'a pipe, socket or device'}, not a file."
        raise FormatError(Problem("no_file", what, file=str(path), wanted="a JSON file", hint=AGAIN))
    size = path.stat().st_size
    if size > MAX_BYTES:
        what = f"{path.name} has {size:,} bytes, which no config has."
        raise FormatError(Problem("config", what, file=str(path), found=size, wanted=MAX_BYTES, hint=AGAIN))
    twice: list[Problem] = []

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """An object; of a key that it has twice, one reader takes the first value and another the last."""
        out = dict(pairs)
        if len(out) != len(pairs):
            seen: dict[str, str] = {}
            for key, value in pairs:
                text = json.dumps(value, sort_keys=True)
                if seen.setdefault(key, text) != text and len(twice) < 8:
                    twice.append(_twice(path, key, seen[key], text))
        return out

    try:
        raw = path.read_bytes()
    except OSError as error:
        error.filename = error.filename or str(path)  # the system names none when it opens a file and fails to read it
        raise
    try:
        if any(raw.count(mark) > most for mark, most in _MOST_MARKS.items()):
            message = f"{path.name} holds more values than any config or index."
            raise FormatError(Problem("config", message, file=str(path), hint=AGAIN))
        text = raw.decode("utf-8-sig")  # editors on Windows put a mark in front
        value = json.loads(text, parse_int=_whole, object_pairs_hook=once)
        if "\\u" in text:  # half a surrogate pair is no text: no file can be named so, no terminal can show it
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # also text that is no UTF-8
        kind = sniff(path)
        if kind in ("lfs", "html", "empty", "zeros"):
            raise refuse_non_weights(path, kind) from None
        problem = Problem("config", f"{path.name} is not valid JSON: {error}.", file=str(path), hint=AGAIN)
        if raw.startswith(_UTF_16):  # as PowerShell's > writes it; transformers cannot read it either
            message = f"{path.name} is UTF-16, and JSON files are UTF-8."
            hint = "Save it as UTF-8 (PowerShell: Out-File -Encoding utf8)."
            problem = Problem("config", message, file=str(path), found="UTF-16", wanted="UTF-8", hint=hint)
        raise FormatError(problem) from None
    if twice:
        raise FormatError(twice)
    return value


def _twice(path: Path, key: str, first: str, second: str) -> Problem:
    return Problem(
        "config",
        f"{path.name} states {key!r:.200} twice and differently: {first:.80} and {second:.80}.",
        file=str(path),
        found=[first[:80], second[:80]],
        wanted="one value",
        hint="Programs differ in which of them they take; delete the wrong one, or fetch the file again.",
    )


def _whole(text: str) -> int:
    if len(text) > 100:
        raise ValueError(f"a number of {len(text):,} digits")
    return int(text)
