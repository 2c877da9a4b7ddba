"""What a source's config leaves unsaid and a default fills: said in the plan, since a wrong one is another model.

Looks at the config as its file holds it; filling is :mod:`convert.config`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from convert import rope

if TYPE_CHECKING:
    from convert.plan import ConversionPlan
    from convert.table import MappingTable


def note_context(plan: ConversionPlan) -> None:
    """Note a number of positions that is assumed."""
    stated = plan.source.raw_config
    known = {
        row.names.get(plan.source.layout, row.key)
        for row in plan.table.config.values()
        if row.key == "max_position_embeddings"
    }
    recorded = plan.source.record.get("config", {})
    arch = plan.table.gguf_arch or ""
    said = any((k or "").replace("{arch}", arch) in stated for k in known) or "max_position_embeddings" in recorded
    if said or plan.source.options.context is not None or plan.source.options.size is not None:
        return
    plan.notes.append(
        "the source does not say how many positions it was made for; "
        f"{plan.config['max_position_embeddings']} is assumed (--context N states it)"
    )


def note_theta(plan: ConversionPlan) -> None:
    """Note a base of the rotary embedding that is assumed.

    Not for Meta's params.json: that of Llama 1 and 2 has no key for it, and their code one value.
    """
    source = plan.source
    if not source.table.has_rope or source.layout == "meta" or source.options.size is not None:
        return
    if states_theta(source.table, source.raw_config) or "rope_parameters" in source.record.get("config", {}):
        return
    theta = rope.primary(source.config["rope_parameters"])["rope_theta"]
    plan.notes.append(
        f"the config does not state the base of the rotary embedding (rope_theta); {theta:g}, which the "
        f"{source.family} family takes without one, is assumed (add it to the config if the model has another)"
    )


def states_theta(table: MappingTable, raw: Mapping[str, Any]) -> bool:
    """Whether a config of any spelling states the base, or names a class of the book's that has it hard-wired."""
    name = raw.get("class")
    if isinstance(name, str) and "rope_base" in table.classes.get(name, {}).get("drop", ()):
        return True
    keys = {"rope_theta", "rope_base", *_layered(table)}
    keys.add(f"{raw.get('general.architecture', '')}.rope.freq_base")
    return any(part.get(key) is not None for part in _parts(raw) for key in keys)


def _layered(table: MappingTable) -> Iterator[str]:
    for kind in table.rope.values():
        for fields in kind.names.values():
            yield from fields.get("rope_theta", ())


def _parts(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config and the dicts in it that may hold the base: a multimodal model's text part, RoPE settings by kind."""
    yield raw
    for key in ("text_config", "model", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention"):
        inner = raw.get(key)
        if isinstance(inner, Mapping):
            yield from _parts(inner)
