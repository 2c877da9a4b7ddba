"""Next-token generation with a reference model and its KV cache. Knows token ids, no text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from convert.errors import Problem, UsageError
from convert.reference.layers import KVCache


def generate(
    model: Any,
    ids: Sequence[int] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_ids: Collection[int] = (),
    generator: torch.Generator | None = None,
) -> Iterator[int]:
    """Yield new token ids one at a time; stops at an end token, which is not yielded.

    Args:
        model: A :class:`convert.reference.ReferenceModel`, on any device.
        ids: The prompt: at least one token id; a sequence or a tensor ``[T]`` or ``[1, T]``.
        max_new_tokens: The most tokens to yield.
        temperature: 0 takes the likeliest token; above 0 the logits are divided by it and sampled.
        top_k: Sample among this many likeliest tokens.
        top_p: Sample among the fewest likeliest tokens whose probabilities reach this sum.
        eos_ids: Token ids that end the text.
        generator: A CPU generator: sampling happens there, so that a seed means the same on every device.

    Raises:
        UsageError: The prompt is empty, or holds an id the model does not have.
    """
    prompt = torch.as_tensor(ids, dtype=torch.long).reshape(-1)
    if not len(prompt):
        raise UsageError(Problem("prompt", "The prompt is empty; generation needs at least one token."))
    if int(prompt.min()) < 0 or int(prompt.max()) >= model.vocab_size:
        raise UsageError(
            Problem(
                "prompt",
                f"The prompt has token ids from {int(prompt.min())} to {int(prompt.max())}, "
                f"the model knows 0 to {model.vocab_size - 1}.",
            )
        )
    return _tokens(model, prompt, max_new_tokens, temperature, top_k, top_p, frozenset(eos_ids), generator)


def _tokens(
    model: Any,
    prompt: Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    eos_ids: frozenset[int],
    generator: torch.Generator | None,
) -> Iterator[int]:
    device = next(model.parameters()).device
    cache = KVCache(model.n_layers)
    step = prompt.to(device)[None]
    for _ in range(max_new_tokens):
        # Inference mode is entered per step: a generator that held it would leak it into the caller.
        with torch.inference_mode():
            logits = model(step, cache)[0, -1].float().cpu()
        token = sample(logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        if token in eos_ids:
            return
        yield token
        step = torch.tensor([[token]], device=device)


def sample(
    logits: Tensor,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> int:
    """One token id from logits ``[V]`` (float32, CPU); arguments as for :func:`generate`."""
    if temperature <= 0:
        return int(logits.argmax())
    logits, order = (logits / temperature).sort(descending=True)
    if top_k is not None:
        logits = logits[: max(top_k, 1)]
    probabilities = logits.softmax(-1)
    if top_p is not None:
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < top_p)
        if float(probabilities.sum()) == 0:  # top_p = 0: only the likeliest
            probabilities[0] = 1.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
