"""A tokenizer as the ``tokenizer.*`` keys of a GGUF file, typed as llama.cpp's loader wants them.

What llama.cpp cannot do stops here, with the reason; nothing is approximated in silence. Defaults of the loader
are never relied on (byte-level BPE without an eos key would end at token 11).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, Problem, UsageError
from convert.formats.gguf_values import U32, Array, Bool, Str, StringArray, Value
from convert.tokenizer import merges as bpe
from convert.tokenizer import pretokenizers
from convert.tokenizer.beyond import without_rowless
from convert.tokenizer.from_gguf import FLAGS, FLAGS_KEY, NORMALIZER_KEY, ROLE_KEYS
from convert.tokenizer.to_hf import merges_of
from convert.tokenizer.tokenizer import (
    BYTE,
    BYTE_LEVEL,
    NORMAL,
    PADDING_SCORE,
    SENTENCEPIECE,
    UNIGRAM,
    UNUSED,
    WITHOUT,
    Tokenizer,
    duplicate_token,
    padding_token,
)

_MODELS = {BYTE_LEVEL: "gpt2", SENTENCEPIECE: "llama", UNIGRAM: "t5"}

#: SentencePiece text with merges in place of scores; llama.cpp has it for the one architecture of that name.
GEMMA4 = "gemma4"

#: Ends of a turn and of a message by text, where several eos ids must share three keys (llama.cpp knows these too).
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|END_OF_TURN_TOKEN|>", "[EOT]")
_END_OF_MESSAGE = ("<|eom_id|>",)


def gguf_metadata(
    tokenizer: Tokenizer,
    *,
    rows: int,
    config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    pre: str | None = None,
    model: str | None = None,
) -> dict[str, Value]:
    """The keys for ``tokenizer``, in the order in which llama.cpp's own converter writes them.

    Args:
        tokenizer: From :func:`convert.tokenizer.source.read_tokenizer` or another reader. Remarks about the
            conversion are appended to its ``notes``.
        rows: Rows of the token embedding; the list is padded up to it with unused tokens.
        config: ``config.json``; its ids count where the tokenizer names none, and all its eos ids count.
        generation_config: ``generation_config.json``; all its eos ids count.
        pre: Splitting rules by name, over what was recognised in the tokenizer.
        model: ``gemma4`` writes a SentencePiece BPE with its merges, as the architecture of that name has it. Else
            the kind decides.

    Raises:
        ConvertError: More tokens than rows, duplicates, unknown splitting rules, or something llama.cpp cannot do.
        UsageError: ``pre`` is not a name of the table.
    """
    if model not in (None, _MODELS[tokenizer.kind]) and (model, tokenizer.kind) != (GEMMA4, SENTENCEPIECE):
        raise UsageError(f"A {tokenizer.kind} tokenizer cannot be written as {model!r}.")
    tokenizer = without_rowless(tokenizer, rows, config or {}, generation_config or {})
    rules = _rules(tokenizer, pre)
    _possible(tokenizer, rows)
    tokens, types = list(tokenizer.tokens), list(tokenizer.types)
    scores = _scores(tokenizer)
    taken = set(tokens)
    while len(tokens) < rows:
        text = padding_token(len(tokens))
        while text in taken:
            text += "_"
        tokens.append(text)
        types.append(UNUSED)
        scores.append(PADDING_SCORE)
    problem = duplicate_token(tokens)
    if problem:
        raise ConvertError(problem)
    if rows > len(tokenizer.tokens):
        tokenizer.notes.append(
            f"The embedding has {rows:,} rows, the tokenizer {len(tokenizer.tokens):,} tokens: "
            f"{rows - len(tokenizer.tokens):,} unused ones fill the list."
        )
    keys: dict[str, Value] = {
        "model": Str(model or _MODELS[tokenizer.kind]),
        "pre": Str(rules.name if rules else model or "default"),
        "tokens": Array("str", tokens),
    }
    if tokenizer.kind != BYTE_LEVEL:
        keys["scores"] = Array("f32", scores)
    keys["token_type"] = Array("i32", types)
    if tokenizer.kind == BYTE_LEVEL or model == GEMMA4:
        merges = merges_of(tokenizer)
        keys["merges"] = Array("str", StringArray.of(f"{left} {right}" for left, right in merges))
    if tokenizer.kind != BYTE_LEVEL:
        keys["add_space_prefix"] = Bool(tokenizer.space_prefix)
        # llama.cpp heeds these for Unigram only; for the other kind they make the way back exact.
        if tokenizer.merge_spaces or tokenizer.kind == UNIGRAM:
            keys["remove_extra_whitespaces"] = Bool(tokenizer.merge_spaces)
        if tokenizer.charsmap:
            keys["precompiled_charsmap"] = Array("u8", list(tokenizer.charsmap))
    out = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    if tokenizer.normalizer != (rules.normalizer if rules else None):
        out[NORMALIZER_KEY] = Str(tokenizer.normalizer or "")
    for flag in FLAGS if tokenizer.says_flags else ():
        if marked := [token.id for token in tokenizer.added if getattr(token, flag)]:
            out[f"{FLAGS_KEY}.{flag}"] = Array("i32", marked)
    out |= _special(tokenizer, config or {}, generation_config or {}, len(tokens))
    tokenizer.notes[:] = dict.fromkeys(
        [*tokenizer.notes, *tokenizer.caveats]
    )  # planning and writing may both come here
    return out | _templates(tokenizer)


def _rules(tokenizer: Tokenizer, pre: str | None) -> pretokenizers.Pretokenizer | None:
    if tokenizer.kind != BYTE_LEVEL:
        return None
    rules = tokenizer.pre
    if pre is not None:
        rules = pretokenizers.by_name(pre)
        if rules is None:
            raise UsageError(
                Problem(
                    "pre_tokenizer",
                    f"--pre {pre!r} is not a known set of splitting rules.",
                    found=pre,
                    wanted=", ".join(pretokenizers.names()),
                )
            )
    if rules is None:
        steps = pretokenizers.steps_of(tokenizer.pre_tokenizer)
        raise ConvertError(
            Problem(
                "pre_tokenizer",
                f"{tokenizer.origin} splits text by rules that llama.cpp has no name for in our table.",
                found=steps if steps is not None else tokenizer.pre_tokenizer,
                wanted=", ".join(pretokenizers.names()),
                hint=f"If you know which rules are equal: --pre {' | '.join(pretokenizers.names())}. {WITHOUT}",
            )
        )
    if rules.caveat:
        tokenizer.notes.append(f"Some text gets other ids in llama.cpp under {rules.name}: {rules.caveat}.")
    return rules


def _possible(tokenizer: Tokenizer, rows: int) -> None:
    problems = [
        Problem(
            "tokenizer_unsupported",
            f"llama.cpp cannot tokenise as {tokenizer.origin} does: {reason}.",
            file=tokenizer.origin,
            hint=WITHOUT,
        )
        for reason in [*tokenizer.blockers, *_missing_rules(tokenizer)]
    ]
    if len(tokenizer.tokens) > rows:
        problems.append(
            Problem(
                "vocabulary",
                f"{tokenizer.origin} has {len(tokenizer.tokens):,} tokens, the embedding only {rows:,} rows.",
                file=tokenizer.origin,
                found=len(tokenizer.tokens),
                wanted=f"at most {rows}",
                hint=f"It belongs to another model, or tokens were added without resizing. {WITHOUT}",
            )
        )
    if problems:
        raise ConvertError(problems)


def _missing_rules(tokenizer: Tokenizer) -> list[str]:
    """Reasons that follow from the kind."""
    if tokenizer.kind == SENTENCEPIECE:
        found = {text for text, kind in zip(tokenizer.tokens, tokenizer.types, strict=True) if kind == BYTE}
        if len(found) < 256:
            return [f"it has {len(found)} byte tokens of 256, and llama.cpp's SentencePiece needs them all"]
        if tokenizer.charsmap:
            tokenizer.notes.append("The tokenizer normalises text by a table; llama.cpp does not for this kind.")
        if tokenizer.merge_spaces:
            tokenizer.notes.append("The tokenizer merges runs of spaces; llama.cpp does not for this kind.")
    if tokenizer.kind == UNIGRAM:
        if tokenizer.byte_fallback:
            return ["it is a Unigram model with byte fallback, and llama.cpp's knows only an unknown token"]
        if "unk" not in tokenizer.special:
            return ["it is a Unigram model without an unknown token"]
        if tokenizer.normalizer:
            return [f"it brings text to Unicode form {tokenizer.normalizer} without a compiled table"]
    return []


def _scores(tokenizer: Tokenizer) -> list[float]:
    if tokenizer.kind == BYTE_LEVEL:
        return [0.0] * len(tokenizer.tokens)
    if tokenizer.scores is not None:
        return list(tokenizer.scores)
    scores, unmade = bpe.scores_from(tokenizer.merges, tokenizer.tokens)
    unmade = [index for index in unmade if tokenizer.types[index] == NORMAL]
    if unmade:
        tokenizer.notes.append(
            f"{len(unmade)} tokens are made by no merge ({tokenizer.tokens[unmade[0]]!r}); llama.cpp may make them."
        )
    return scores


def _special(
    tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any], size: int
) -> dict[str, Value]:
    """Ids of the special tokens and whether bos and eos are added."""
    text_config = config.get("text_config") or {}

    def ids(source: Mapping[str, Any], key: str) -> list[int]:
        value = source.get(key)
        values = value if isinstance(value, list) else [value]
        return [int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < size]

    out: dict[str, Value] = {}
    special = {role: index for role, index in tokenizer.special.items() if 0 <= index < size}
    for role in ("bos", "pad"):
        named = [i for source in (generation, config, text_config) for i in ids(source, f"{role}_token_id")]
        if role not in special and named:
            special[role] = named[0]
    ends = [special["eos"]] if "eos" in special else []
    for source in (generation, config, text_config):
        ends += ids(source, "eos_token_id")
    ends = list(dict.fromkeys(ends))
    if ends:
        special["eos"] = ends[0]
    else:
        tokenizer.notes.append("No end-of-sequence token is known; llama.cpp will assume one.")
    if "bos" not in special and ends:
        special["bos"] = ends[0]  # else llama.cpp takes token 11; it is not added to text (below)
        bos_is_real = False
    else:
        bos_is_real = "bos" in special
    for role, key in ROLE_KEYS.items():
        if role in special:
            out[f"tokenizer.ggml.{key}_token_id"] = U32(special[role])
    out |= _other_ends(tokenizer, ends)
    add_bos = tokenizer.add_bos if tokenizer.add_bos is not None else tokenizer.kind == SENTENCEPIECE
    if add_bos and not bos_is_real:
        tokenizer.notes.append("The tokenizer should add a bos token but names none; none is added.")
    out["tokenizer.ggml.add_bos_token"] = Bool(add_bos and bos_is_real)
    out["tokenizer.ggml.add_eos_token"] = Bool(bool(tokenizer.add_eos) and bool(ends))
    return out


def _other_ends(tokenizer: Tokenizer, ends: list[int]) -> dict[str, Value]:
    """The eos ids after the first, as end of turn and end of message; all of them in a key of our own."""
    out: dict[str, Value] = {}
    left = ends[1:]
    text = {index: tokenizer.tokens[index] for index in left if index < len(tokenizer.tokens)}

    def take(key: str, texts: tuple[str, ...], *, any_other: bool) -> None:
        chosen = [index for index in left if text.get(index) in texts] or (left[:1] if any_other else [])
        if chosen:
            left.remove(chosen[0])
            out[f"tokenizer.ggml.{key}_token_id"] = U32(chosen[0])

    take("eom", _END_OF_MESSAGE, any_other=False)
    take("eot", _END_OF_TURN, any_other=True)
    if "tokenizer.ggml.eom_token_id" not in out:
        take("eom", (), any_other=True)
    if left:
        tokenizer.notes.append(
            "GGUF has keys for three ends of text; llama.cpp stops at the rest only if it knows their text: "
            + ", ".join(f"{index} ({text.get(index, '?')!r})" for index in left)
        )
    if len(ends) > 1:
        out["convert.eos_token_ids"] = Array("i32", ends)
    return out


def _templates(tokenizer: Tokenizer) -> dict[str, Value]:
    out: dict[str, Value] = {}
    named = {name: source for name, source in tokenizer.chat_templates.items() if name != "default"}
    if named:
        out["tokenizer.chat_templates"] = Array("str", list(named))
        out |= {f"tokenizer.chat_template.{name}": Str(source) for name, source in named.items()}
    if "default" in tokenizer.chat_templates:
        out["tokenizer.chat_template"] = Str(tokenizer.chat_templates["default"])
    return out


def placeholder_metadata(rows: int) -> dict[str, Value]:
    """A vocabulary without meaning for a file that has none, because llama.cpp aborts on such files.

    Its tokens are the 256 bytes and unused padding; ids given as numbers work as they are.
    """
    from convert.tokenizer import bytelevel

    alphabet = [bytelevel.encode(bytes([value])) for value in range(min(256, rows))]
    padding = [padding_token(index) for index in range(len(alphabet), rows)]
    return {
        "tokenizer.ggml.model": Str("gpt2"),
        "tokenizer.ggml.pre": Str("default"),
        "tokenizer.ggml.tokens": Array("str", alphabet + padding),
        "tokenizer.ggml.token_type": Array("i32", [NORMAL] * len(alphabet) + [UNUSED] * len(padding)),
        "tokenizer.ggml.merges": Array("str", ["a a"]),
        "tokenizer.ggml.bos_token_id": U32(0),
        "tokenizer.ggml.eos_token_id": U32(0),
        "tokenizer.ggml.add_bos_token": Bool(False),
        "tokenizer.ggml.add_eos_token": Bool(False),
    }
