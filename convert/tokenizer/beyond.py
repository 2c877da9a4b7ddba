"""Added tokens without a row: they come directly after the embedding's last one, and no model can be fed them.

Gemma 3's text models have ``<image_soft_token>`` so; llama.cpp's converter leaves such tokens out, too (its issue
12876). Which other ids are refused, :mod:`convert.tokenizer.to_gguf` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, Problem
from convert.tokenizer.tokenizer import UNUSED, WITHOUT, Tokenizer, padding_token

_ROLES = ("bos", "eos", "pad")
_SHOWN = 4


def without_rowless(tokenizer: Tokenizer, rows: int, *configs: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer without its added tokens beyond ``rows``, which a note names.

    It comes back as it is where every token has a row, or where one without is no added token: that is a tokenizer
    of another model.

    Args:
        tokenizer: It is not changed, but for its ``notes``.
        rows: Rows of the token embedding.
        configs: ``config.json`` and ``generation_config.json``, whose special ids must have rows.

    Raises:
        ConvertError: Such a token begins or ends text, or pads it.
    """
    beyond = range(rows, len(tokenizer.tokens))
    lost = {token.id: token.content for token in tokenizer.added if token.id >= rows}
    if not beyond or set(beyond) != set(lost) or not rows:
        return tokenizer
    if any(text == padding_token(i) for i, text in enumerate(tokenizer.tokens) if tokenizer.types[i] == UNUSED):
        return tokenizer  # ids before it are nobody's: it does not follow the vocabulary
    texts = set(lost.values())
    if any(left + right in texts for left, right in tokenizer.merges):
        return tokenizer  # ordinary text would hold it
    used = {tokenizer.special[role]: role for role in _ROLES if role in tokenizer.special}
    for config in configs:
        nested = config.get("text_config")
        for source in (config, nested if isinstance(nested, Mapping) else {}):
            for role in _ROLES:
                value = source.get(f"{role}_token_id")
                used |= {i: role for i in (value if isinstance(value, list) else [value]) if type(i) is int}
    if wrong := [index for index in beyond if index in used]:
        raise ConvertError(
            Problem(
                "vocabulary",
                f"The {used[wrong[0]]} token {lost[wrong[0]]!r:.80} has the id {wrong[0]:,}, the embedding only "
                f"{rows:,} rows.",
                file=tokenizer.origin,
                found=wrong[0],
                wanted=f"less than {rows}",
                hint=f"It belongs to another model, or tokens were added without resizing. {WITHOUT}",
            )
        )
    said = ", ".join(f"{text!r:.80} ({index:,})" for index, text in list(lost.items())[:_SHOWN])
    more = f" and {len(lost) - _SHOWN:,} more" if len(lost) > _SHOWN else ""
    tokenizer.notes.append(
        f"Left out: added tokens that have no row in the embedding of {rows:,} rows, so that no model can be fed "
        f"them: {said}{more}."
    )
    return dataclasses.replace(
        tokenizer,
        tokens=tokenizer.tokens[:rows],
        types=tokenizer.types[:rows],
        scores=None if tokenizer.scores is None else tokenizer.scores[:rows],
        added=[token for token in tokenizer.added if token.id < rows],
    )
