"""Text from a checkpoint of any layout: the reference model with its KV cache, and the checkpoint's own tokenizer.

It is here so that people can hear weights speak after a conversion, not to be fast. The loop over tokens is
:mod:`convert.reference.generation`; text and ids are :mod:`convert.text_tokenizer`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.chat import render
from convert.devices import pick_device
from convert.errors import ConvertError, Problem, UsageError
from convert.text_tokenizer import TextTokenizer, end_ids, text_tokenizer

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

SCHEMA = "convert.generate/1"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_STORED = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(slots=True)
class Generation:
    """A text being generated: iterate over it for its pieces, then read the rest.

    Attributes:
        prompt: What the model continues, after the chat template.
        prompt_ids: Its token ids.
        device: Where the model runs.
        dtype: In which arithmetic.
        ids: The new token ids, so far.
        text: Their text, so far.
        stopped: Why it ended: ``end`` (an end token), ``length`` (as many tokens as were asked for), ``context``
            (the model's positions are used up); None while it runs.
        seconds: Time spent on the new tokens, the prompt included.
    """

    prompt: str
    prompt_ids: list[int]
    device: str
    dtype: str
    ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: str | None = None
    seconds: float = 0.0
    _pieces: Iterator[str] = field(default_factory=lambda: iter(()), repr=False)

    def __iter__(self) -> Iterator[str]:
        """Pieces of text, each whole characters, as the tokens come."""
        return self._pieces

    def as_json(self) -> dict[str, Any]:
        """What ``generate --json`` prints (schema ``convert.generate/1``)."""
        keys = ("prompt", "prompt_ids", "ids", "text", "stopped", "device", "dtype", "seconds")
        return {"schema": SCHEMA, **{key: getattr(self, key) for key in keys}}


def generate(
    src: str | Path | Checkpoint,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: str | Path | None = None,
    on_step: Callable[[str], None] | None = None,
    **options: Any,
) -> Generation:
    """Continue a text (or answer a chat) with a checkpoint of any layout.

    Args:
        src: A checkpoint folder or file, or an opened checkpoint.
        prompt: The text to continue; with ``chat`` the user's message.
        chat: Put the prompt through the model's chat template.
        max_new_tokens: The most tokens to make.
        temperature: 0 takes the likeliest token; above 0 it samples.
        top_k: Sample among this many likeliest tokens.
        top_p: Sample among the fewest likeliest tokens whose probabilities reach this sum.
        seed: Of the sampling; unless given, every run differs.
        device: ``auto``, ``cuda``, ``mps``, ``cpu``.
        dtype: Of weights and arithmetic. ``auto``: float32 on the CPU, elsewhere the stored 16-bit type.
        tokenizer: Where the tokenizer is, if not with the checkpoint.
        on_step: Told what is being done, in a few words.
        **options: The fields of :class:`convert.checkpoint.Options`, where ``src`` is a path.

    Returns:
        The generation; nothing is computed beyond the prompt's ids until it is iterated over.

    Raises:
        UsageError: The prompt is empty or too long, or a number makes no sense.
        ConvertError: There is no usable tokenizer or template, or the checkpoint cannot be run.
    """
    from convert.checkpoint import Checkpoint, open_checkpoint

    _check(max_new_tokens, temperature, top_k, top_p, dtype)
    opened: Any = src if isinstance(src, Checkpoint) else open_checkpoint(src, **options)
    try:
        opened.require_sound()
        texts = text_tokenizer(opened, tokenizer)
        text = _chat(texts, prompt) if chat else prompt
        ids = texts.encode(text, special=not chat) or _bos(texts)
        room = _room(opened, ids)
        target = pick_device(device)  # imports torch: what cannot be run is refused before
        import torch

        from convert.reference.loading import load_reference

        chosen = _dtype(opened, dtype, target.type)
        if on_step is not None:
            on_step(f"loading {opened.path.name} ({chosen}, {target})")
        model = load_reference(opened, device=target, dtype=getattr(torch, chosen))
        ends = end_ids(opened, texts)
    except ConvertError as error:
        error.source = error.source or opened.title
        raise
    finally:
        if opened is not src:
            opened.close()
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    made = Generation(text, ids, str(target), chosen)
    tokens = _tokens(model, made, ends, min(max_new_tokens, room), temperature, top_k, top_p, generator)
    made._pieces = _pieces(made, texts, tokens, "length" if max_new_tokens <= room else "context")
    return made


def _tokens(
    model: Any,
    made: Generation,
    ends: frozenset[int],
    count: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: Any,
) -> Iterator[int]:
    from convert.reference import generation

    start = time.perf_counter()
    for token in generation.generate(
        model,
        made.prompt_ids,
        max_new_tokens=count,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        eos_ids=ends,
        generator=generator,
    ):
        made.ids.append(token)
        made.seconds = time.perf_counter() - start
        yield token
    made.stopped = "end" if len(made.ids) < count else None


def _pieces(made: Generation, texts: TextTokenizer, tokens: Iterator[int], limit: str) -> Iterator[str]:
    for piece in texts.stream(tokens, prompt=made.prompt_ids):
        made.text += piece
        yield piece
    made.stopped = made.stopped or limit


def _chat(texts: TextTokenizer, prompt: str) -> str:
    template = texts.chat_templates.get("default")
    if template is None:
        others = ", ".join(texts.chat_templates)
        raise ConvertError(
            Problem(
                "chat_template",
                f"{texts.origin} has no chat template" + (f" called default (it has {others})" if others else "") + ".",
                found=others or None,
                wanted="chat_template.jinja, or chat_template in tokenizer_config.json or in the GGUF header",
                hint="Leave --chat out: a base model continues text. Or name a folder that has one: --tokenizer PATH.",
            )
        )
    special = {f"{role}_token": texts.token(role) for role in ("bos", "eos", "unk", "pad")}
    return render(template, [{"role": "user", "content": prompt}], special=special)


def _bos(texts: TextTokenizer) -> list[int]:
    """What an empty prompt becomes: the start of a text, where there is a token for it."""
    if "bos" in texts.special:
        return [texts.special["bos"]]
    raise UsageError(Problem("prompt", "The prompt is empty, and the tokenizer has no token that starts a text."))


def _room(ckpt: Checkpoint, ids: list[int]) -> int:
    """How many tokens fit after the prompt."""
    vocab = int(ckpt.config["vocab_size"])
    wrong = [i for i in ids if i >= vocab]
    if wrong:
        raise ConvertError(
            Problem(
                "vocabulary",
                f"The tokenizer gives id {wrong[0]}, but the model has {vocab:,} tokens; it belongs to another model.",
                found=wrong[0],
                wanted=f"0 to {vocab - 1}",
                hint="Name the right one: --tokenizer PATH.",
            )
        )
    context = int(ckpt.config.get("max_position_embeddings") or 1 << 31)
    if len(ids) >= context:
        raise UsageError(
            Problem(
                "prompt",
                f"The prompt has {len(ids):,} tokens; the model has {context:,} positions.",
                found=len(ids),
                wanted=f"fewer than {context}",
            )
        )
    return context - len(ids)


def _dtype(ckpt: Checkpoint, wanted: str, device: str) -> str:
    if wanted != "auto":
        return wanted
    return "float32" if device == "cpu" else _STORED.get(ckpt.dtype, "float16" if ckpt.format == "gguf" else "float32")


def _check(max_new_tokens: int, temperature: float, top_k: int | None, top_p: float | None, dtype: str) -> None:
    problems = []
    if max_new_tokens < 1:
        problems.append(Problem("max_new_tokens", f"{max_new_tokens} new tokens are none.", found=max_new_tokens))
    if temperature < 0:
        problems.append(Problem("temperature", f"A temperature of {temperature:g} is below 0.", found=temperature))
    if top_k is not None and top_k < 1:
        problems.append(Problem("top_k", f"top-k {top_k} leaves no token to choose from.", found=top_k))
    if top_p is not None and not 0 < top_p <= 1:
        problems.append(Problem("top_p", f"top-p {top_p:g} is not above 0 and at most 1.", found=top_p))
    if dtype not in DTYPES:
        problems.append(Problem("dtype", f"generate cannot compute in {dtype!r}.", found=dtype, wanted=list(DTYPES)))
    if problems:
        raise UsageError(problems)
