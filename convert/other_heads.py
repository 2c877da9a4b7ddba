"""Recognises models that are no language models, by the head they have, and refuses them by name.

A classifier or reward model has the names of a language model but for its head; what is left of it is no model that
writes text, and a head of two rows is no vocabulary. Knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable

from convert.errors import FormatError, Problem

#: Name of a head's tensor, without a prefix, and what has one.
HEADS = {
    "out_head.bias": "the classifier of the book's chapter 6 (`out_head` has one row per class, and a bias)",
    "score.weight": "a classifier or reward model (one row per label in place of a head)",
    "classifier.weight": "a classifier of tokens or texts",
    "qa_outputs.weight": "a model that marks answers in a text",
    "v_head.summary.weight": "a policy with a value head (TRL), made for reinforcement learning",
    "pooler.dense.weight": "an encoder that pools texts into vectors",
}


def refuse_other_heads(names: Iterable[str]) -> None:
    """Stop where the names are those of a model with another head than a language model's.

    Args:
        names: Tensor names.

    Raises:
        FormatError: There is such a head; the hint says what can be done.
    """
    known = tuple(HEADS)
    found = next(((n, h) for n in names if n.endswith(known) for h in known if n == h or n.endswith(f".{h}")), None)
    if found is None:
        return
    name, head = found
    raise FormatError(
        Problem(
            "other_head",
            f"This is no language model but {HEADS[head]}: it has {name!r}.",
            tensor=name,
            found=name,
            wanted="a head with one row per token of the vocabulary",
            hint="Convert the language model it was made from; heads for other tasks have no place here.",
        )
    )
