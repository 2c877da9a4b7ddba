"""What two checkpoints say of themselves that is not weights: configs, in one spelling, and records of conversions.

Configs are compared after every layout's words have become those of ``config.json`` (:mod:`convert.config`), so that
one quantity in two spellings is equal. Tokenizers are :mod:`convert.tokenizer.differences`' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint

#: Keys that no computation of the model depends on: of training, of the library, or decided by the tensors themselves.
_IDLE = frozenset(
    (
        *("architectures", "auto_map", "dtype", "model_type", "name_or_path", "quantization_config", "torch_dtype"),
        *("transformers_version", "initializer_range", "pretraining_tp", "use_cache", "tie_word_embeddings"),
        *(
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "hidden_dropout",
            "resid_pdrop",
            "initializer_cutoff_factor",
        ),
        *("output_router_logits", "router_aux_loss_coef", "output_attentions", "output_hidden_states", "return_dict"),
        *("chunk_size_feed_forward", "gradient_checkpointing", "problem_type", "id2label", "label2id"),
    )
)
#: Set once more from ``rope_parameters``.
_DERIVED = frozenset(("rope_theta", "rope_type"))
#: Only Hugging Face's files must state it; elsewhere it is assumed from the releases' conventions.
_ASSUMED = frozenset(("max_position_embeddings",))


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that A and B say differently.

    Attributes:
        key: What: ``config.json``'s name, a part of the tokenizer, a path in the record.
        a: What A says; None where it says nothing.
        b: What B says.
        weighs: Whether it makes them different models; else it is worth knowing only.
        note: How either side spells it, or why it does not weigh.
    """

    key: str
    a: Any
    b: Any
    weighs: bool = True
    note: str | None = None

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"key": self.key, "a": self.a, "b": self.b, "weighs": self.weighs, "note": self.note}

    def line(self) -> str:
        """For people."""
        said = f"{self.key}: A {_shown(self.a)}, B {_shown(self.b)}"
        return said + (f" ({self.note})" if self.note else "")


def _shown(value: Any, limit: int = 60) -> str:
    text = "says nothing" if value is None else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def config_differences(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Where the configs differ, those that weigh first.

    Numbers are equal when their float32 values are: GGUF keeps no more of them.
    """
    out = []
    if a.family != b.family:
        out.append(Difference("family", a.family, b.family, True, "two architectures; equal names are compared"))
    one, other = _flat(a.config), _flat(b.config)
    for key in [*one, *(k for k in other if k not in one)]:
        top = key.partition(".")[0]
        if top in _DERIVED or same_value(one.get(key), other.get(key)):
            continue
        x, y = one.get(key), other.get(key)
        weighs, note = _weight(a, b, top, x, y)
        words = [w for w in dict.fromkeys((_word(a, top), _word(b, top))) if w and w != top]
        spelled = f"also spelled {', '.join(words)}" if words and weighs else None
        out.append(Difference(key, x, y, weighs, note or spelled))
    return sorted(out, key=lambda d: not d.weighs)


def _weight(a: Checkpoint, b: Checkpoint, key: str, x: Any, y: Any) -> tuple[bool, str | None]:
    """Whether different values of a key are different models, and why not."""
    if key in _IDLE or key.startswith("_"):
        return False, "computes nothing" if key != "tie_word_embeddings" else "the tensors decide"
    if x is not None and y is not None:
        silent = [name for name, side in (("A", a), ("B", b)) if key in _ASSUMED and not _states(side, key)]
        return (False, f"{' and '.join(silent)} assume it") if silent else (True, None)
    side = a if x is None else b
    if not (y if x is None else x) or _same_dims(a, b, key):
        return False, "nothing said means the same"
    row = side.table.config.get(key)
    known = row is not None and (side.layout == "hf" or side.layout in row.names)
    if known or (side.layout == "hf" and key == "rope_parameters"):
        return True, None
    return False, f"the {side.layout} layout has no word for it" if side.layout != "hf" else None


def _same_dims(a: Checkpoint, b: Checkpoint, key: str) -> bool:
    """Whether what the tables compute from a key, with what they take where it is absent, is the same on both sides."""
    names = [name for name, exprs in a.table.dims.items() if any(key in e.names for e in exprs)]
    return bool(names) and all(same_value(a.dims.get(n), b.dims.get(n)) for n in names)


def _states(checkpoint: Checkpoint, key: str) -> bool:
    return _word(checkpoint, key) in checkpoint.raw_config


def _word(checkpoint: Checkpoint, key: str) -> str:
    """What a side's own config calls a key of the hub's."""
    row = checkpoint.table.config.get(key)
    if row is None:
        return key
    word = row.names.get(checkpoint.layout, key if checkpoint.layout in ("hf", "scratch") else "")
    return word.replace("{arch}", checkpoint.table.gguf_arch or "")


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            out |= _flat(entry, f"{prefix}{key}.")
        elif entry is not None:
            out[prefix + str(key)] = entry
    return out


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a config say the same: numbers as float32, one id as a list of one."""
    if isinstance(a, (list, tuple)) != isinstance(b, (list, tuple)) and a is not None and b is not None:
        a, b = (list(v) if isinstance(v, (list, tuple)) else [v] for v in (a, b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same_value, a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        with np.errstate(over="ignore"):
            return bool(np.float32(a) == np.float32(b))
    return bool(a == b)


def record_differences(a: Checkpoint, b: Checkpoint, *, limit: int = 40) -> list[Difference]:
    """What the records of two conversions say differently; it never weighs."""
    if not (a.record and b.record):
        return []
    one, other = _flat(a.record), _flat(b.record)
    keys = [k for k in dict.fromkeys((*one, *other)) if one.get(k) != other.get(k)]
    return [Difference(k, one.get(k), other.get(k), False) for k in keys[:limit]]
