"""A tokenizer, wherever it came from: tokens by id, their types, and the rules that join and split text.

Readers (``hf_json``, ``sentencepiece_model``, ``ranks``, ``from_gguf``) make one; writers (``to_hf``,
``to_gguf``) take one. It does not tokenise anything itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.errors import Problem
from convert.tokenizer.hf_checks import SPARE_IDS
from convert.tokenizer.hf_files import AddedToken
from convert.tokenizer.pretokenizers import Pretokenizer

#: Token types; SentencePiece's ``ModelProto.SentencePiece.Type`` and GGUF's ``token_type`` have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

#: The three kinds of model: merges over bytes, merges over characters with byte fallback, best path by score.
BYTE_LEVEL, SENTENCEPIECE, UNIGRAM = "byte-level BPE", "SentencePiece BPE", "Unigram"

#: What SentencePiece writes for a space.
SPACE = "▁"

ROLES = ("bos", "eos", "unk", "sep", "pad", "mask")

WITHOUT = "The weights can be converted without it: --no-tokenizer."


@dataclass(slots=True)
class Tokenizer:
    """The content of a tokenizer file, independent of its format.

    Attributes:
        kind: :data:`BYTE_LEVEL`, :data:`SENTENCEPIECE` or :data:`UNIGRAM`.
        origin: Where it was read, for messages.
        tokens: Text by id, added tokens included; byte-level text is in the byte alphabet.
        types: One of the six numbers above by id.
        merges: Pairs in order of rank (both BPE kinds); empty when only scores are known.
        scores: By id; None when only merges are known.
        added: Tokens matched in the text as a whole, in id order.
        pre: How byte-level text is split first; None when the rules are not in the table.
        pre_tokenizer: Those rules as the file has them, for messages.
        normalizer: A Unicode form (``NFC``) that is applied first, or None.
        ignore_merges: A piece that is a token as a whole is taken as one.
        space_prefix: A space is put before the text (the SentencePiece kinds).
        merge_spaces: Runs of spaces count as one, those at the ends as none (Unigram).
        charsmap: SentencePiece's compiled normalisation table, or empty.
        byte_fallback: Characters without a token become byte tokens.
        add_bos, add_eos: Whether encoding adds them; None when nothing says.
        special: Role (``bos``, ``eos``, ``unk``, ``sep``, ``pad``, ``mask``) to id.
        chat_templates: Name to Jinja source; the plain one is ``default``.
        max_length: Context length in tokens, or None.
        blockers: Why llama.cpp cannot do what this tokenizer does; empty when it can.
        caveats: What llama.cpp does a little otherwise; they become notes when a GGUF file is written.
        notes: What a user should know about a conversion of it.
        files: Hugging Face files as they were found, to be carried unchanged; empty for other sources.
        says_flags: Whether the source can say how added tokens treat the white space and the words around them.
    """

    kind: str
    origin: str
    tokens: list[str]
    types: list[int]
    merges: list[tuple[str, str]] = field(default_factory=list)
    scores: list[float] | None = None
    added: list[AddedToken] = field(default_factory=list)
    pre: Pretokenizer | None = None
    pre_tokenizer: Mapping[str, Any] | None = None
    normalizer: str | None = None
    ignore_merges: bool = False
    space_prefix: bool = True
    merge_spaces: bool = False
    charsmap: bytes = b""
    byte_fallback: bool = False
    add_bos: bool | None = None
    add_eos: bool | None = None
    special: dict[str, int] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None
    blockers: list[str] = field(default_factory=list)
    caveats: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    says_flags: bool = True

    def id_of(self, text: str) -> int | None:
        """The id of the token with this text, added tokens first, or None."""
        for token in self.added:
            if token.content == text:
                return token.id
        try:
            return self.tokens.index(text)
        except ValueError:
            return None

    def generation_ids(self) -> dict[str, int]:
        """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as a ``generation_config.json`` has them."""
        return {f"{role}_token_id": self.special[role] for role in ("bos", "eos", "pad") if role in self.special}

    def add(self, tokens: Iterable[AddedToken]) -> None:
        """Add (or replace) added tokens; ids beyond the end leave unused padding in between.

        Raises:
            ValueError: An id is negative, or so far beyond the end that no model has that many rows.
        """
        known = {token.id: token for token in self.added}
        for token in tokens:
            if not 0 <= token.id < 2 * len(self.tokens) + SPARE_IDS:
                raise ValueError(f"the added token {token.content!r:.60} has the id {token.id!r:.60}")
            while len(self.tokens) <= token.id:
                self.types.append(UNUSED)
                self.tokens.append(padding_token(len(self.tokens)))
                if self.scores is not None:
                    self.scores.append(PADDING_SCORE)
            self.tokens[token.id] = token.content
            if self.types[token.id] != UNKNOWN:
                self.types[token.id] = CONTROL if token.special else USER_DEFINED
            known[token.id] = token
        self.added = [known[index] for index in sorted(known)]


#: Added and padding tokens of SentencePiece models carry these (llama.cpp's converter writes the same).
ADDED_SCORE, PADDING_SCORE = -1000.0, -10000.0


def padding_token(index: int) -> str:
    """The text of the unused token that fills row ``index`` (llama.cpp's converter writes the same)."""
    return f"[PAD{index}]"


def duplicate_token(tokens: Iterable[str]) -> Problem | None:
    """The finding for a token list that holds one text twice, or None when none does."""
    first: dict[str, int] = {}
    for index, text in enumerate(tokens):
        if text in first:
            return Problem(
                "duplicate_token",
                f"Tokens {first[text]} and {index} have the same text {text!r}; ids would not be unique.",
                found=text,
                wanted="every token text once",
                hint=WITHOUT,
            )
        first[text] = index
    return None
