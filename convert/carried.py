"""Small files of a source that are carried beside the output as they are: which, and whether they are what they say.

A tokenizer file is copied without being understood, so a Git-LFS pointer, a login page or half a download would travel
along and fail in the reader's hands. Reading tokenizers is :mod:`convert.tokenizer`'s business.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from convert.errors import Problem
from convert.formats.sniff import refuse_non_weights, sniff

#: Files of a Hugging Face folder that belong to the tokenizer or to generation.
CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
#: More bytes than any file that is carried has.
MAX_BYTES = 96 << 20
#: JSON files up to this size are parsed; of larger ones the two ends are looked at (Gemma's tokenizer has 34 MB).
_PARSED_BYTES = 1 << 20


def carried(place: Path, own: Path) -> dict[str, Path]:
    """The files that are carried, and what bears the name of one without being a file.

    Args:
        place: Folder, or one file, of the tokenizer.
        own: The model's folder, whose generation settings are taken.
    """
    folder = place if place.is_dir() else place.parent
    found = {n: folder / n for n in CARRIED if os.path.lexists(folder / n)}
    if place.is_file() and place.name != "tokenizer.json":
        found.pop("tokenizer.json", None)
    if folder != own:
        found.pop("generation_config.json", None)
        if os.path.lexists(own / "generation_config.json"):
            found["generation_config.json"] = own / "generation_config.json"
    return found


def unsound_files(found: Mapping[str, Path]) -> list[Problem]:
    """What is wrong with any of the files that are to be carried."""
    return [problem for path in found.values() if (problem := unsound(path)) is not None]


def unsound(path: Path) -> Problem | None:
    """What is wrong with a file that is to be carried, or None. An empty ``merges.txt`` is not a file either."""
    if not path.is_file():
        what = "leads nowhere" if path.is_symlink() and not path.exists() else "is not a regular file"
        hint = "Put the file there, or remove what is in its place; --no-tokenizer converts the weights alone."
        return Problem("tokenizer", f"{path.name} {what}.", file=str(path), wanted="a file", hint=hint)
    kind = sniff(path)
    if kind in ("lfs", "html", "empty", "zeros"):
        return refuse_non_weights(path, kind).problems[0]
    if path.stat().st_size > MAX_BYTES:
        message = f"{path.name} has {path.stat().st_size:,} bytes, which no such file has."
        return Problem("tokenizer", message, file=str(path), hint="--no-tokenizer converts the weights alone.")
    if path.suffix != ".json" or _is_object(path):
        return None
    return Problem(
        "config" if path.name == "generation_config.json" else "tokenizer",
        f"{path.name} is not a JSON object; it is damaged or only half there ({path.stat().st_size:,} bytes).",
        file=str(path),
        hint="Fetch it again; --no-tokenizer converts the weights alone.",
    )


def _is_object(path: Path) -> bool:
    size = path.stat().st_size
    if size <= _PARSED_BYTES:
        try:
            return isinstance(json.loads(path.read_bytes()), dict)
        except (ValueError, RecursionError):
            return False
    with path.open("rb") as file:
        first = file.read(64)
        file.seek(-64, 2)
        last = file.read(64)
    return first.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" and last.rstrip()[-1:] == b"}"
