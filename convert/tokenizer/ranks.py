"""tiktoken-style vocabularies: text lines of a base64 token and its rank (Llama 3's ``tokenizer.model``).

The file holds neither merges, nor special tokens, nor splitting rules. Merges follow from the ranks; the rest is
known for the vocabularies in the table below, which are recognised by their content.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
from dataclasses import dataclass

from convert.errors import ConvertError, Problem
from convert.tokenizer import bytelevel, pretokenizers
from convert.tokenizer import merges as bpe
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.tokenizer import BYTE_LEVEL, NORMAL, WITHOUT, Tokenizer


@dataclass(frozen=True, slots=True)
class Published:
    """What a published rank file does not say.

    Attributes:
        ranks: How many lines it has.
        pre: The splitting rules.
        special: The texts of the ids after the ranks.
        roles: Role to text.
        source: Where that is written.
    """

    ranks: int
    pre: str
    special: tuple[str, ...]
    roles: dict[str, str]
    source: str


def _llama3_special() -> tuple[str, ...]:
    named = {
        0: "<|begin_of_text|>",
        1: "<|end_of_text|>",
        4: "<|finetune_right_pad_id|>",
        6: "<|start_header_id|>",
        7: "<|end_header_id|>",
        8: "<|eom_id|>",
        9: "<|eot_id|>",
        10: "<|python_tag|>",
    }
    out, spare = [], 0
    for index in range(256):
        if index in named:
            out.append(named[index])
        else:
            out.append(f"<|reserved_special_token_{spare}|>")
            spare += 1
    return tuple(out)


PUBLISHED = (
    Published(
        128000,
        "llama-bpe",
        _llama3_special(),
        {"bos": "<|begin_of_text|>", "eos": "<|end_of_text|>"},
        "tokenizer.json of meta-llama/Llama-3.1-8B (3.0 has the same ids, three of them still reserved)",
    ),
)


#: The largest published list (``o200k_base``) has 199,998.
_MOST_RANKS = 800_000
#: Characters of base64 of the longest token that is believed; published ones have some hundred.
_LONGEST = 1 << 16


def is_ranks(raw: bytes) -> bool:
    """Whether ``raw`` starts with a line of a base64 token and a whole number."""
    parts = raw.split(b"\n", 1)[0].split()
    if len(parts) != 2 or not parts[1].isdigit():
        return False
    try:
        return bool(base64.b64decode(parts[0], validate=True))
    except binascii.Error:
        return False


def parse(raw: bytes, *, origin: str, pre: str | None = None) -> Tokenizer:
    """The tokenizer in a rank file.

    Args:
        raw: The file.
        origin: Its name, for messages.
        pre: Splitting rules for a vocabulary that is not in the table; it then has no special tokens.

    Raises:
        ConvertError: A line is damaged, ranks have gaps, or the vocabulary is unknown and ``pre`` was not given.
    """
    ranks = read(raw, origin)
    published = next((row for row in PUBLISHED if row.ranks == len(ranks)), None)
    if published is None and pre is None:
        raise ConvertError(
            Problem(
                "pre_tokenizer",
                f"{origin} is a list of {len(ranks):,} ranks; it does not say how text is split, and it is not one of "
                "the published lists.",
                file=origin,
                found=f"{len(ranks):,} ranks, sha256 {hashlib.sha256(raw).hexdigest()[:16]}",
                wanted=", ".join(f"{row.ranks:,} ({row.pre})" for row in PUBLISHED),
                hint=f"Name the rules: --pre {' | '.join(pretokenizers.names())}; or give a tokenizer.json.",
            )
        )
    order = sorted(ranks, key=ranks.__getitem__)
    text = {piece: bytelevel.encode(piece) for piece in order}
    tokens = [text[piece] for piece in order]
    tokenizer = Tokenizer(BYTE_LEVEL, origin, tokens, [NORMAL] * len(tokens))
    tokenizer.merges = [(text[left], text[right]) for left, right in bpe.from_order(order, ranks)]
    # Joining the lowest rank is what tiktoken does; it also takes a piece that is a token as a whole.
    tokenizer.ignore_merges = True
    tokenizer.pre = pretokenizers.by_name(pre or (published.pre if published else ""))
    if published is not None:
        first = len(tokens)
        tokenizer.add(AddedToken(first + i, content, True) for i, content in enumerate(published.special))
        tokenizer.special = {
            role: first + published.special.index(content) for role, content in published.roles.items()
        }
        tokenizer.add_bos, tokenizer.add_eos = True, False
    return tokenizer


def read(raw: bytes, origin: str) -> dict[bytes, int]:
    """The tokens of a rank file and their ranks, which are 0, 1, 2, … in some order.

    Raises:
        ConvertError: A line is damaged, there are more than any vocabulary has, or ranks have gaps or repeat.
    """
    if (lines := raw.count(b"\n")) > _MOST_RANKS:
        message = f"{origin} has {lines:,} lines, more than any list of ranks."
        raise ConvertError(
            Problem(
                "tokenizer_damaged", message, file=origin, found=lines, wanted=f"{_MOST_RANKS} at most", hint=WITHOUT
            )
        )
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(io.BytesIO(raw), 1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            if len(piece) > _LONGEST:
                raise ValueError("no token is so long")
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except ValueError as error:  # binascii.Error is one
            raise ConvertError(
                Problem(
                    "tokenizer_damaged",
                    f"Line {number} of {origin} is not a base64 token and its rank.",
                    file=origin,
                    found=line[:40].decode("ascii", "replace"),
                    hint=f"Fetch the file again. {WITHOUT}",
                )
            ) from error
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConvertError(
            Problem("tokenizer_damaged", f"The ranks of {origin} have gaps or repeat.", file=origin, hint=WITHOUT)
        )
    return ranks
