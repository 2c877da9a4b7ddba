"""Recognises models that end in something else than a language model's head, and refuses them by name.

A classifier, a reward model or an embedding model has the transformer of a family here, but ends in something that no
layout has a place for. Told so at once, a reader knows more than from a list of tensors that do not fit. Knows names,
shapes and what configs say; reads no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec
from convert.table import MappingTable

_CLASSIFIER = "the head of a classifier, with a row per class"
_REWARD = "the head of a reward model, which gives one number for a text"
_VALUE = "a value head (of PPO training), which gives one number for each token"
_ANSWERS = "a head that marks where an answer begins and ends"
_CHOICE = "a head that chooses among several texts"
_EMBEDDING = "the head of an embedding model, which makes a vector of a text"

#: Parts of tensor names outside the layers, and what they are. Of `transformers`, `trl`, and llama.cpp (`cls`).
HEADS = {
    "score": _CLASSIFIER,
    "classifier": _CLASSIFIER,
    "classification_head": _CLASSIFIER,
    "cls": _CLASSIFIER,
    "cls_head": _CLASSIFIER,
    "reward_head": _REWARD,
    "rm_head": _REWARD,
    "regression_head": _REWARD,
    "v_head": _VALUE,
    "value_head": _VALUE,
    "critic_head": _VALUE,
    "qa_outputs": _ANSWERS,
    "multiple_choice_head": _CHOICE,
    "pooler": _EMBEDDING,
    "embedding_head": _EMBEDDING,
}
#: Endings of the class names in a config's ``architectures``.
TASKS = {
    "ForSequenceClassification": _CLASSIFIER,
    "ForTokenClassification": _CLASSIFIER,
    "ForQuestionAnswering": _ANSWERS,
    "ForMultipleChoice": _CHOICE,
    "RewardModel": _REWARD,
}
#: What the library sentence-transformers writes beside a model.
EMBEDDING_FILES = ("config_sentence_transformers.json", "1_Pooling/config.json")
#: A head with so many times fewer rows than the embedding is none of a language model (no padding comes near).
_FEWER = 4
#: A head's name stands first, or behind the name of the model that it sits on.
_DEEP = 2


def refuse_other_heads(tables: Iterable[MappingTable], tensors: Mapping[str, Sequence[TensorSpec]]) -> None:
    """Stop where tensors outside the layers are named like another head than a language model's.

    Args:
        tables: The tables that may describe the checkpoint; what one of them has a name for is no other head.
        tensors: Every tensor's parts.

    Raises:
        ConvertError: What it is, and what can be done.
    """
    ours = {part for t in tables for row in t.rows.values() for name in row.names.values() for part in name.split(".")}
    found: dict[str, list[str]] = {}
    for name in tensors:
        part = next((p for p in name.split(".")[:_DEEP] if p in HEADS and p not in ours), None)
        if part is not None:
            found.setdefault(part, []).append(name)
    if not found:
        return
    part, names = next(iter(found.items()))
    weight = next((n for n in names if n.endswith(".weight")), names[0])
    shape = tensors[weight][0].shape
    what = _REWARD if HEADS[part] == _CLASSIFIER and shape[:1] == (1,) else HEADS[part]
    more = f" ({len(names)} tensors)" if len(names) > 1 else ""
    said = f"{weight!r} {list(shape)}{more} is {what}"
    raise ConvertError(_problem(said, what, tensor=weight, found=list(shape), drop=part))


def refuse_other_models(
    table: MappingTable,
    layout: str,
    tensors: Mapping[str, Sequence[TensorSpec]],
    config: Mapping[str, Any] | None,
    *,
    folder: Path,
    tie: str | None = None,
) -> None:
    """Stop where shapes, the config or the files beside it say that a checkpoint is no language model.

    Args:
        table: The family's table.
        layout: The layout of the names.
        tensors: Every tensor's parts.
        config: The config as its file has it.
        folder: Where the files lie, for what stands beside them.
        tie: ``"share"`` is what a user says who wants an embedding model's transformer with its embedding as head.

    Raises:
        ConvertError: It is something else; what it is, and what can be done.
    """
    problem = _few_rows(table, layout, tensors) or _by_task(table, layout, tensors, config)
    if problem is None and tie != "share":
        problem = _embedding_model(config, folder)
    if problem is not None:
        raise ConvertError(problem)


def _few_rows(table: MappingTable, layout: str, tensors: Mapping[str, Sequence[TensorSpec]]) -> Problem | None:
    """A head under a language model's name, with rows for a few classes: what chapter 6 of the book makes."""
    head = next((r for r in table.rows.values() if r.tied_to and not r.in_block), None)
    if head is None or layout not in head.names:
        return None
    name, base = head.names[layout], table.rows[str(head.tied_to)].names.get(layout, "")
    if name not in tensors or base not in tensors:
        return None
    shape, rows = tensors[name][0].shape, tensors[base][0].shape[0]
    # Model-parallel files hold a part of the head's rows each.
    if not shape or shape[0] * len(tensors[name]) * _FEWER > rows:
        return None
    bias = name.removesuffix("weight") + "bias"
    also = f", with the bias {bias!r}," if bias in tensors else ""
    book = " (chapter 6 of the book)" if layout == "scratch" else ""
    said = f"{name!r} {list(shape)}{also} is {_CLASSIFIER}{book}, where a language model has one per token ({rows})"
    return _problem(said, _CLASSIFIER, tensor=name, found=list(shape), drop=None)


def _by_task(
    table: MappingTable, layout: str, tensors: Mapping[str, Sequence[TensorSpec]], config: Mapping[str, Any] | None
) -> Problem | None:
    """A class of another task in the config, and no head of a language model."""
    stated = (config or {}).get("architectures")
    heads = {r.names[layout] for r in table.rows.values() if r.tied_to and layout in r.names}
    if not isinstance(stated, list) or heads & set(tensors):
        return None
    for name in (a for a in stated if isinstance(a, str)):
        for ending, what in TASKS.items():
            if name.endswith(ending):
                return _problem(f"the config says {name}, which has {what}", what, found=name, drop=None)
    return None


def _embedding_model(config: Mapping[str, Any] | None, folder: Path) -> Problem | None:
    """What sentence-transformers writes beside a model, or a GGUF file's own word about pooling."""
    arch = (config or {}).get("general.architecture")
    pooling = (config or {}).get(f"{arch}.pooling_type") if arch else None
    beside = None if arch else next((f for f in EMBEDDING_FILES if (folder / f).is_file()), None)
    if beside is None and not pooling:
        return None
    said = f"{beside} stands beside the weights" if beside else f"the file says {arch}.pooling_type = {pooling}"
    return Problem(
        "other_head",
        f"this is no language model: {said}, so it is an embedding model, which makes a vector of a text.",
        file=str(folder / beside) if beside else None,
        found=beside or pooling,
        wanted="a language model",
        hint="No layout here says how its vectors are made, so a conversion would lose that. --tie share converts the "
        "transformer under it all the same, as a language model whose head is the embedding.",
    )


def _problem(said: str, what: str, *, found: Any, drop: str | None, tensor: str | None = None) -> Problem:
    keep = "Use it with the class that wrote it; what can be converted is the language model that it was trained from."
    if what == _VALUE:
        keep = f"Save the language model without {drop}.* (in trl: model.pretrained_model.save_pretrained(folder))."
    elif drop is not None:
        keep += f" A copy without {drop}.* converts with --tie share, which takes the embedding as its head."
    elif tensor is not None:
        keep += f" To convert the trained transformer, put that model's {tensor!r} in its place and drop the bias."
    return Problem(
        "other_head",
        f"this is no language model: {said}.",
        tensor=tensor,
        found=found,
        wanted="a language model",
        hint=f"No layout has a place for it. {keep}",
    )
