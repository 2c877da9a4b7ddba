"""Which splitting rules each pre-tokenizer name of a GGUF file stands for, and the way back.

A GGUF file stores a name (``tokenizer.ggml.pre``); Hugging Face stores the rules themselves. The table
below is the dictionary between the two. A tokenizer is recognised by its rules, never by a hash of what
it makes of some text: a fine-tune with one more token, or a tokenizer somebody trained, has the same
rules as its model.

The regexes are those of the named models' published ``tokenizer.json`` files; that llama.cpp splits the
same way under that name is what ``src/llama-vocab.cpp`` says (class ``llm_tokenizer_bpe``) and what the
tests check with a running llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Step = tuple[Any, ...]

#: Byte-level BPE's own splitting rule, the one inside a ``ByteLevel`` step with ``use_regex``.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_APOSTROPHE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = _APOSTROPHE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = _APOSTROPHE + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN35 = _APOSTROPHE + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT4O = _CASED % (_APOSTROPHE + "?", _APOSTROPHE + "?") + r"|\p{N}{1,3}|" + _CASED_TAIL
TEKKEN = _CASED % ("", "") + r"|\p{N}|" + _CASED_TAIL
TINY_AYA_DIGITS = r"\d{1,3}(?=(?:\d{3})*\b)"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^" + "\r\n" + r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[" + "\r\n" + r"]*|\s*[" + "\r\n" + r"]+|\s+(?!\S)|\s+"
)


def _split(regex: str) -> Step:
    return ("split", regex)


#: ``Digits(individual_digits=True)``.
DIGITS: Step = ("digits",)


_MARKS = (
    "llama.cpp splits words at combining marks (Arabic vowels, Indic and Thai vowel signs) where the model does not"
)


@dataclass(frozen=True, slots=True)
class Pretokenizer:
    """One splitting scheme.

    Attributes:
        name: What a GGUF file calls it.
        steps: The splits in order; the byte mapping that ends every one of them is not listed.
        source: The published tokenizer whose rules these are.
        normalizer: The Unicode form the published tokenizers with this name apply first, or None.
        ignore_merges: A piece that is a token as a whole is taken as one (llama.cpp ties this to the name).
        add_bos: What llama.cpp assumes when the file does not say.
        aliases: Other names that llama.cpp gives the same rules, read but never written.
        caveat: Where llama.cpp's rules of this name are known to differ from the published ones, or None.
    """

    name: str
    steps: tuple[Step, ...]
    source: str
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False
    aliases: tuple[str, ...] = ()
    caveat: str | None = None

    def hf_pre_tokenizer(self) -> dict[str, Any]:
        """The ``pre_tokenizer`` section of a ``tokenizer.json`` with these rules."""
        own_rule = self.steps[-1:] == (_split(GPT2),)
        steps = [_hf_step(step) for step in (self.steps[:-1] if own_rule else self.steps)]
        steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": own_rule})
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


def _hf_step(step: Step) -> dict[str, Any]:
    if step == DIGITS:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": step[1]}, "behavior": "Isolated", "invert": False}


#: Order matters only where two rows have the same rules: the first that fits the other properties is taken.
PRETOKENIZERS: tuple[Pretokenizer, ...] = (
    Pretokenizer(
        "llama-bpe",
        (_split(LLAMA3),),
        "meta-llama/Meta-Llama-3-8B",
        ignore_merges=True,
        add_bos=True,
        aliases=("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ),
    Pretokenizer("dbrx", (_split(LLAMA3),), "databricks/dbrx-base, allenai/OLMo-2", aliases=("smaug-bpe",)),
    Pretokenizer(
        "qwen2",
        (_split(QWEN2),),
        "Qwen/Qwen2-7B",
        normalizer="NFC",
        aliases=("deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ),
    Pretokenizer("qwen35", (_split(QWEN35),), "Qwen/Qwen3.5", normalizer="NFC"),
    Pretokenizer("smollm", (DIGITS, _split(GPT2)), "HuggingFaceTB/SmolLM-135M"),
    Pretokenizer("command-r", (DIGITS, _split(GPT2)), "CohereLabs/c4ai-command-r-v01", normalizer="NFC"),
    Pretokenizer(
        "starcoder",
        (DIGITS, _split(GPT2)),
        "bigcode/starcoder2-3b",
        aliases=("refact", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ),
    Pretokenizer(
        "gpt-2",
        (_split(GPT2),),
        "openai-community/gpt2",
        aliases=("phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "jais", "trillion", "granite-docling"),
    ),
    Pretokenizer("olmo", (_split(GPT2),), "allenai/OLMo-1.7-7B", normalizer="NFC", aliases=("mpt",)),
    Pretokenizer(
        "tekken",
        (_split(TEKKEN),),
        "mistralai/Mistral-Nemo-Base-2407",
        ignore_merges=True,
        add_bos=True,
        caveat=_MARKS,
    ),
    Pretokenizer(
        "gpt-4o",
        (_split(GPT4O),),
        "o200k_base",
        aliases=("llama4", "kanana2", "talkie", "minimax-m2"),
        caveat=_MARKS,
    ),
    Pretokenizer(
        "tiny_aya",
        (_split(TINY_AYA_DIGITS), _split(GPT4O)),
        "CohereLabs/tiny-aya",
        normalizer="NFC",
        aliases=("cohere2moe",),
        caveat="llama.cpp cuts numbers of four or more digits otherwise where a letter follows at once (1234x)",
    ),
    Pretokenizer(
        "deepseek-v3",
        (_split(r"\p{N}{1,3}"), _split("[一-龥\u3040-ゟ゠-ヿ]+"), _split(_DEEPSEEK3)),
        "deepseek-ai/DeepSeek-V3",
        aliases=("hunyuan-dense", "joyai-llm"),
    ),
    Pretokenizer(
        "deepseek-coder",
        (_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split("[一-龥ࠀ-一가-\ud7ff]+"), DIGITS),
        "deepseek-ai/deepseek-coder-6.7b-base",
        caveat="llama.cpp keeps an ideographic space together with a space before it",
    ),
    Pretokenizer(
        "default",
        (
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(GPT2),
            _split(r"\p{N}+"),
            _split("[0-9][0-9][0-9]"),
        ),
        "llama.cpp's rules for files that name none",
    ),
)

_BY_NAME = {name: row for row in PRETOKENIZERS for name in (row.name, *row.aliases)}


def names() -> list[str]:
    """The names that can be written (``--pre``), in table order."""
    return [row.name for row in PRETOKENIZERS]


def by_name(name: str) -> Pretokenizer | None:
    """The scheme that GGUF files call ``name``, or None when the table has no such row."""
    return _BY_NAME.get(name)


def steps_of(tree: Mapping[str, Any] | None) -> tuple[Step, ...] | None:
    """The splits of a ``pre_tokenizer`` section in one normal form, or None when it is not byte-level.

    Spellings that split alike become equal: nested sequences, ``ByteLevel`` with its own regex against the
    same regex as a ``Split``, ``Digits`` against a split on one number character, ``Removed`` with ``invert``
    against ``Isolated``, and the two spellings of the English contractions.
    """
    steps: list[Step] = []
    ends_in_bytes = False
    for node in flatten(tree):
        kind = node.get("type")
        if kind == "ByteLevel":
            if node.get("add_prefix_space"):
                return None
            if node.get("use_regex", True):
                steps.append(_split(GPT2))
            ends_in_bytes = True
        elif kind == "Digits":
            steps.append(DIGITS if node.get("individual_digits") else _split(r"\p{N}+"))
        elif kind == "Split" and (step := _split_step(node)) is not None:
            steps.append(step)
        else:
            steps.append(("unknown", str(kind), repr(sorted(node.items()))))
    return tuple(steps) if ends_in_bytes else None


def flatten(tree: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a ``pre_tokenizer`` section in order, nested sequences resolved."""
    if not tree:
        return []
    if tree.get("type") == "Sequence":
        return [leaf for node in tree.get("pretokenizers", []) for leaf in flatten(node)]
    return [tree]


def _split_step(node: Mapping[str, Any]) -> Step | None:
    pattern = node.get("pattern", {})
    regex = pattern.get("Regex")
    if regex is None:
        return None
    behavior, invert = node.get("behavior"), bool(node.get("invert"))
    if behavior != "Isolated" and not (behavior == "Removed" and invert):
        return None
    regex = _normal_regex(regex)
    return DIGITS if regex in (r"\p{N}", r"\p{N}{1}") else _split(regex)


def _normal_regex(regex: str) -> str:
    spelled_out = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
    regex = regex.replace(spelled_out, _APOSTROPHE)
    # tiktoken's own spelling of the same contractions, and its possessive quantifiers, which match alike here.
    regex = regex.replace("'(?i:[sdmt]|ll|ve|re)", _APOSTROPHE).replace("?+", "?").replace("++", "+")
    return regex.replace("\r", r"\r").replace("\n", r"\n")


def recognise(
    pre_tokenizer: Mapping[str, Any] | None, *, normalizer: str | None, ignore_merges: bool
) -> Pretokenizer | None:
    """The table row with the rules of a tokenizer, or None when there is none.

    Args:
        pre_tokenizer: The section of a ``tokenizer.json``.
        normalizer: ``NFC`` (or another form) when the tokenizer normalises first. It only chooses between
            rows with equal rules: llama.cpp does not normalise under any name.
        ignore_merges: The model's flag of that name; a row whose flag differs gives other ids, so it never fits.
    """
    steps = steps_of(pre_tokenizer)
    if steps is None:
        return None
    fitting = [r for r in PRETOKENIZERS if _normal_steps(r) == steps and r.ignore_merges == ignore_merges]
    same_form = [row for row in fitting if row.normalizer == normalizer]
    best = same_form or fitting
    return best[0] if best else None


def _normal_steps(row: Pretokenizer) -> tuple[Step, ...]:
    return tuple(step if step == DIGITS else _split(_normal_regex(step[1])) for step in row.steps)
