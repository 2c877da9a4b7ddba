"""The model's config inside a training checkpoint, as plain data.

Trainers keep it beside the state dict: as a dict, as an ``argparse.Namespace``, as a dataclass. The objects
were never built (:mod:`convert.formats.placeholders`); their attributes are plain data all the same. What the
keys mean is the business of the tables.
"""

from __future__ import annotations

from typing import Any

from convert.formats.placeholders import ElementType, Placeholder, StorageRef, as_mapping
from convert.formats.spec import TensorSpec

#: Where trainers keep the model's config, the likeliest first.
_CONFIG_KEYS = ("model_args", "model_config", "config", "cfg", "hyper_parameters", "hparams", "args", "params")
_MAX_DEPTH = 6
_MAX_VALUES = 5_000


def config_around(around: list[Any]) -> dict[str, Any] | None:
    """The model's config from the dicts around a state dict.

    Args:
        around: The objects from the top of the tree to the dict that holds the state dict.

    Returns:
        Numbers, texts, lists and dicts, from the innermost dict that has a config; a ``torch.dtype`` becomes
        ``"torch.bfloat16"``, other objects their names. None where there is none.
    """
    for value in reversed(around):
        items = as_mapping(value) or {}
        for name in _CONFIG_KEYS:
            fields = (
                items[name].fields or items[name].items if isinstance(items.get(name), Placeholder) else items.get(name)
            )
            if isinstance(fields, dict) and fields:
                plain = _plain(fields, 0, [_MAX_VALUES])
                if isinstance(plain, dict) and plain:
                    return plain
    return None


def _plain(value: Any, depth: int, budget: list[int]) -> Any:
    """Numbers, texts, lists and dicts of ``value``; anything else becomes its name. Bounded."""
    budget[0] -= 1
    if depth > _MAX_DEPTH or budget[0] < 0:
        return "…"
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ElementType):
        return f"torch.{value.name}"
    if isinstance(value, Placeholder):
        inner = value.fields or value.items
        return _plain(inner, depth + 1, budget) if inner else value.name
    if isinstance(value, dict):
        return {
            name: _plain(child, depth + 1, budget)
            for name, child in value.items()
            if isinstance(name, str) and not isinstance(child, TensorSpec | StorageRef) and budget[0] > 0
        }
    if isinstance(value, list | tuple):
        return [_plain(child, depth + 1, budget) for child in value[: max(budget[0], 0)]]
    return type(value).__name__
