"""``merges.txt``, the second of GPT-2's two files: a pair of pieces to a line, the most preferred first."""

from __future__ import annotations

from collections.abc import Mapping

from convert.tokenizer import hf_checks

#: Lines of the longest list that is believed; the longest published have some 500,000.
_MOST = 2_000_000


def lines(text: str) -> list[str]:
    """The pairs, without the line that names the version."""
    return [line for line in text.split("\n") if line and not line.startswith("#version")]


def damage(raw: bytes, vocab: Mapping[str, int] | None) -> str | None:
    """What is wrong with the file, in words, or None.

    Args:
        raw: The file.
        vocab: The vocabulary that it belongs to, where there is one.
    """
    if raw.count(b"\n") > _MOST:
        return f"it has {raw.count(bytes([10])):,} lines, more than any list of merges"
    try:
        pairs = lines(raw.decode().replace("\r\n", "\n"))
    except UnicodeDecodeError as error:
        return f"it is no UTF-8 (byte {error.start:,})"
    if vocab is not None:
        return hf_checks.merge_damage(pairs, vocab)
    wrong = next((line for line in pairs if len(line.split(" ")) != 2), None)
    return None if wrong is None else f"the line {hf_checks.brief(wrong)} is not a pair of pieces"
