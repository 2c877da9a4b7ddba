"""Recognises adapters (LoRA and its relatives) by tensor names, and refuses them with the way to merge.

An adapter changes a model but is none; converting its file, or a model with unmerged adapters, would give
wrong weights without an error. Merging itself is left to the code that made the adapter. Knows names only.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from convert.config import read_json
from convert.errors import ConvertError, FormatError, Problem

#: Parts of names that ``peft`` uses for adapters' own tensors and for what it keeps of modules that were trained.
_PEFT_PARTS = frozenset({"prompt_embeddings", "modules_to_save"})
#: What such parts begin with, one of each kind of adapter.
_PEFT_BEGINNINGS = (
    *("lora_", "adapter", "adaption_", "hada_", "lokr_", "ia3_", "vera_", "vblora_", "oft_", "boft_", "fourierft_"),
    *("randlora_", "hra_", "bone_", "miss_", "road_", "c3a_", "shira_", "ln_tuning_", "trainable_tokens_"),
)
#: ``x.lora.A`` and ``x.lora.B`` beside ``x.linear.weight``: the from-scratch book's Appendix E.
_BOOK_LEAVES = frozenset({"A", "B"})


def adapter_names(names: Iterable[str]) -> tuple[list[str], bool]:
    """The names that belong to adapters.

    Returns:
        Those names, and whether they follow the from-scratch book's scheme (``x.lora.A``) rather than PEFT's.
    """
    found, book = [], False
    names = list(names)
    everything = "\n".join(names)
    if not any(word in everything for word in ("lora", *_PEFT_PARTS, *_PEFT_BEGINNINGS)):
        return [], False
    for name in names:
        parts = name.split(".")
        if len(parts) > 2 and parts[-2] == "lora" and parts[-1] in _BOOK_LEAVES:
            found.append(name)
            book = True
        elif not _PEFT_PARTS.isdisjoint(parts) or any(part.startswith(_PEFT_BEGINNINGS) for part in parts):
            found.append(name)
    return found, book


def refuse_adapters(names: Iterable[str], *, file: Path | None = None) -> None:
    """Stop where tensors belong to an adapter that is not merged.

    Args:
        names: Tensor names.
        file: For the message.

    Raises:
        FormatError: There are some; the hint says how to merge them.
    """
    found, book = adapter_names(names)
    if not found:
        return
    if book:
        # Appendix E: A is [in, r], B is [r, out]; the scale was alpha alone up to package 1.0.19.
        hint = (
            "Merge it first: for every layer x, x.weight = x.linear.weight + s * (x.lora.A @ x.lora.B).T (and "
            "x.bias = x.linear.bias), with s = alpha / rank in the book's current code and s = alpha in the package "
            "llms-from-scratch 1.0.19 and older; then save that state dict."
        )
    else:
        hint = (
            "Merge it first: peft.PeftModel.from_pretrained(base, adapter).merge_and_unload()"
            ".save_pretrained(folder), and convert that folder."
        )
    raise FormatError(
        Problem(
            "adapter",
            f"These are {len(found)} tensors of an adapter (LoRA), not merged into the model: {found[0]!r}"
            + (f" … {found[-1]!r}." if len(found) > 1 else "."),
            tensor=found[0],
            file=str(file) if file is not None else None,
            found=len(found),
            wanted="a merged model",
            hint=hint,
        )
    )


def adapter_folder(folder: Path) -> ConvertError:
    """The refusal of a folder with an adapter, with the model that it belongs to."""
    base = None
    path = folder / "adapter_config.json"
    if path.is_file():
        raw = read_json(path)
        base = raw.get("base_model_name_or_path") if isinstance(raw, dict) else None
    return ConvertError(
        Problem(
            "adapter",
            f"{folder} holds a LoRA adapter{f' for {base}' if base else ''}, not a model.",
            file=str(folder),
            hint="Merge it first (peft: model.merge_and_unload(), then save_pretrained) and convert the result.",
        )
    )
