"""The token ids a verification runs on: given, made from text, or fixed ones that visit the whole vocabulary.

Imports no torch, and the tokenizer library only for text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem, UsageError

#: Bytes of a file of prompts, at most.
_MOST_TEXT = 16 << 20


def fixed_tokens(vocab_size: int, count: int) -> list[int]:
    """``count`` token ids spread evenly over the vocabulary, in a fixed, mixed order.

    One id from each of ``count`` equal slices of the vocabulary, shuffled. The generator is Knuth's
    MMIX congruential one, so that the ids are the same everywhere and for ever.
    """
    state = 0x5EED

    def below(limit: int) -> int:
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) * limit >> 31

    ids = []
    for i in range(count):
        low, high = i * vocab_size // count, (i + 1) * vocab_size // count
        ids.append(min(low + below(max(high - low, 1)), vocab_size - 1))
    for i in range(count - 1, 0, -1):
        j = below(i + 1)
        ids[i], ids[j] = ids[j], ids[i]
    return ids


def choose_tokens(
    a: Any, b: Any, *, tokens: Sequence[int] | None = None, text: str | None = None, n_tokens: int = 128
) -> list[int]:
    """The token ids to run on, checked against both vocabularies; arguments as for :func:`convert.verify.verify`.

    Raises:
        ConvertError: The vocabularies differ.
        UsageError: No ids, ids outside the vocabulary, or text without a tokenizer.
    """
    size, other = a.config.get("vocab_size"), b.config.get("vocab_size")
    if size != other:
        raise ConvertError(
            Problem(
                "vocab_size",
                f"A has {size} tokens and B has {other}; their logits cannot be compared.",
                found=other,
                wanted=size,
                hint="Converting never adds or drops rows of the embedding; check what made B.",
            )
        )
    if tokens is not None and text is not None:
        raise UsageError(Problem("tokens", "Give token ids or text, not both."))
    if tokens is not None:
        ids = [int(t) for t in tokens]
    elif text is not None:
        ids = _encode(text, a, b)
    else:
        ids = fixed_tokens(size, n_tokens)
    wrong = [t for t in ids if not 0 <= t < size]
    if not ids or wrong:
        raise UsageError(
            Problem(
                "tokens",
                f"Token ids {wrong[:5]!s:.120} are outside the vocabulary of {size}."
                if ids
                else "There are no tokens to run.",
                found=wrong[:5],
                wanted=f"0 to {size - 1}",
            )
        )
    return ids


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_TEXT + 1)  # of a device, too, whose size says nothing
        if len(raw) <= _MOST_TEXT:
            return raw.decode("utf-8").replace("\r\n", "\n")
        why: str | None = f"it has more than {_MOST_TEXT >> 20} MiB, which is no prompt"
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no name of a file
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
    raise UsageError(Problem("prompts", f"{path} cannot be read: {why}.", file=str(path))) from None


def read_prompts(path: Path) -> list[str | list[int]]:
    """The prompts in a file: a JSON list of texts or of lists of token ids, or one text a line (no blank ones).

    Raises:
        UsageError: There are none, or the list holds something else.
    """
    text = read_text(path)
    if not text.lstrip().startswith("["):
        prompts: Any = [line for line in text.splitlines() if line.strip()]
    else:
        try:
            prompts = json.loads(text)
        except (ValueError, RecursionError) as error:
            why = error if isinstance(error, ValueError) else "it is nested too deep"
            raise UsageError(
                Problem("prompts", f"{path.name} begins like a JSON list, and is none: {why}.", file=str(path))
            ) from None

    def is_prompt(one: Any) -> bool:
        ids = isinstance(one, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in one)
        return bool(one) and (isinstance(one, str) or ids)

    wrong = [one for one in prompts if not is_prompt(one)]
    if not prompts or wrong:
        raise UsageError(
            Problem(
                "prompts",
                f"{path.name} holds no prompts." if not prompts else f"{wrong[0]!r:.80} in {path.name} is no prompt.",
                file=str(path),
                wanted="texts, or lists of token ids",
            )
        )
    return prompts


def pieces(ids: Sequence[int], *sides: Any) -> list[str]:
    """The text of each token id, by the tokenizer that lies beside a side; nothing where there is none."""
    tokenizer = _tokenizer(*sides)
    return [] if tokenizer is None else [tokenizer.decode([i], skip_special_tokens=False) for i in ids]


def shortened(prompt: str | Sequence[int], limit: int = 40) -> str:
    """A prompt in a few words, to name it by."""
    text = " ".join(prompt.split() if isinstance(prompt, str) else map(str, prompt))
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def _tokenizer(*sides: Any) -> Any:
    """The first ``tokenizer.json`` that lies beside a side; None without one."""
    for side in sides:
        path = getattr(side, "path", None)
        for folder in () if path is None else (Path(path), Path(path).parent):
            if (folder / "tokenizer.json").is_file():
                from convert.text_tokenizer import load_library

                return load_library(folder / "tokenizer.json")
    return None


def _encode(text: str, *sides: Any) -> list[int]:
    """Token ids of ``text`` by the first ``tokenizer.json`` that lies beside a side."""
    tokenizer = _tokenizer(*sides)
    if tokenizer is not None:
        return tokenizer.encode(text).ids
    raise UsageError(
        Problem(
            "tokenizer",
            "Neither side has a tokenizer.json beside it, so the text cannot become token ids.",
            hint="Run without text (fixed token ids), or give token ids.",
        )
    )
