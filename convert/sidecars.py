"""The files beside the weights: configs, index, tokenizer, and the record of the conversion.

Everything small is decided and built here before any weight is touched, so that a missing tokenizer or a config that
the target cannot hold stops in the first second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert import config as configs
from convert import rope
from convert.carried import carried, unsound_files
from convert.errors import ConvertError, Problem, UsageError
from convert.formats.spec import Entry
from convert.links import refuse_side_links
from convert.plan import ConversionPlan
from convert.record import dump, record, stated_keys
from convert.unstated import note_context, note_theta


def add_sidecars(plan: ConversionPlan) -> None:
    """Put the target layout's files into ``plan.sidecars``.

    Raises:
        ConvertError: The config cannot be written, or a tokenizer is there and cannot be converted.
    """
    dtype = _common_type(plan)
    target = plan.request.target
    note_theta(plan)
    if target == "gguf":  # the rest lies inside the file, :mod:`convert.gguf_plan`
        note_context(plan)
        return
    ids = _tokenizer(plan)
    if target == "hf":
        config = configs.to_hf(plan.table, plan.config, dtype, stated_keys(plan.source))
        for key, value in ids.items():
            config.setdefault(key, value)
        plan.config.setdefault("bos_token_id", config.get("bos_token_id"))
        plan.sidecars["config.json"] = dump(config)
        if "generation_config.json" not in plan.sidecars:
            plan.sidecars["generation_config.json"] = dump(_generation(config, source_generation(plan)))
        if len(plan.files) > 1:
            plan.sidecars["model.safetensors.index.json"] = dump(_index(plan))
        note_context(plan)
    elif target == "meta":
        plan.sidecars["params.json"] = dump(configs.to_meta(plan.table, plan.config))
        _note_flag(plan)
        plan.config |= {k: v for k, v in ids.items() if plan.config.get(k) is None}
    elif target == "scratch":
        config = configs.to_scratch(
            plan.table,
            plan.config,
            dtype,
            book_class=plan.request.book_class,
            reference=plan.request.allow_reference,
        )
        if plan.table.names_file:
            config |= {"names": plan.table.names_file, "class": None}
        plan.sidecars["scratch_config.json"] = dump(config)
        plan.config |= {k: v for k, v in ids.items() if plan.config.get(k) is None}
        note_context(plan)
    plan.sidecars["conversion.json"] = dump(record(plan))


def _note_flag(plan: ConversionPlan) -> None:
    """Meta's flag has no numbers: what its readers take it for may not be what this model has."""
    scaling = plan.config["rope_parameters"]
    if scaling["rope_type"] != "llama3":
        return
    usual = {"factor": rope.meta_factor(int(plan.config["hidden_size"])), **rope.META_SCALING}
    differing = [f"{key} = {scaling[key]:g} (not {value:g})" for key, value in usual.items() if scaling[key] != value]
    if differing:
        plan.notes.append(
            f"use_scaled_rope is usually read as other numbers than this model's {', '.join(differing)}; only "
            "conversion.json keeps them, and a reader without it computes another model"
        )


def _common_type(plan: ConversionPlan) -> str:
    count: dict[str, int] = {}
    for file in plan.files:
        for entry in file.entries:
            count[entry.dtype] = count.get(entry.dtype, 0) + entry.nbytes
    return max(count, key=lambda k: count[k])


def _index(plan: ConversionPlan) -> dict[str, Any]:
    entries: list[tuple[str, Entry]] = [(f.name, e) for f in plan.files for e in f.entries]
    return {
        "metadata": {
            "total_parameters": sum(_count(e) for _, e in entries),
            "total_size": sum(e.nbytes for _, e in entries),
        },
        "weight_map": {e.name: name for name, e in entries},
    }


def _count(entry: Entry) -> int:
    out = 1
    for n in entry.shape:
        out *= n
    return out


def source_generation(plan: ConversionPlan) -> dict[str, Any]:
    """Generation settings that an earlier conversion kept in its record; empty without one."""
    kept = plan.source.record.get("generation_config")
    return dict(kept) if isinstance(kept, dict) else {}


def _generation(config: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """The settings of the source, or what transformers would write for a model without its own."""
    if kept:
        return kept
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {"_from_model_config": True} | {k: config[k] for k in keys if config.get(k) is not None}


def _tokenizer(plan: ConversionPlan) -> dict[str, Any]:
    """Carry or rebuild the tokenizer; returns the special token ids it knows.

    A tokenizer that cannot be rebuilt from a GGUF file stops a conversion to Hugging Face, whose folders should load as
    they are; the other layouts have no place for one, and it is a remark. Files that are not what their names say stop
    every conversion.
    """
    if not plan.request.tokenizer:
        return {}
    source = plan.source
    ids: dict[str, Any] = {}
    try:
        if source.layout == "gguf" and plan.request.tokenizer_path is None:
            from convert.tokenizer.from_gguf import hf_files, special_ids

            plan.sidecars |= hf_files(source.metadata)
            ids = dict(special_ids(source.metadata))
        else:
            place = tokenizer_place(plan)
            _carry(plan, place)
            if plan.request.target == "hf" and "tokenizer.json" not in plan.sidecars:
                ids = _built(plan, place)
    except ConvertError as error:
        if plan.request.target == "hf" or source.layout != "gguf":
            raise
        plan.notes.append(f"no tokenizer files: {error.problems[0].message}")
    return ids


def tokenizer_place(plan: ConversionPlan) -> Path:
    """The folder or file where the tokenizer lies.

    Raises:
        UsageError: ``--tokenizer`` names nothing.
    """
    place = Path(plan.request.tokenizer_path or plan.source.folder)
    if not place.exists():
        raise UsageError(f"--tokenizer {place}: there is no such file or folder.")
    if place.is_dir() and not plan.source.options.follow_links:
        refuse_side_links(place)
    return place


def _carry(plan: ConversionPlan, place: Path) -> None:
    """Put the tokenizer's files beside the output; none that only bears the name of one travels along."""
    found = carried(place, plan.source.folder)
    if problems := unsound_files(found):
        raise ConvertError(problems)
    plan.sidecars |= found


def _built(plan: ConversionPlan, place: Path) -> dict[str, Any]:
    """Hugging Face files from ``tokenizer.model`` (SentencePiece or tiktoken) or vocab and merges."""
    from convert.tokenizer.source import find, read_tokenizer
    from convert.tokenizer.to_hf import hf_files_from

    if find(place) is None:
        plan.notes.append("no tokenizer lies beside the source; none is written")
        return {}
    tokenizer = read_tokenizer(place)
    plan.notes += tokenizer.notes
    rows = int(plan.config["vocab_size"])
    if len(tokenizer.tokens) > rows:
        raise ConvertError(
            Problem(
                "vocabulary",
                f"the tokenizer has {len(tokenizer.tokens):,} tokens, but the embedding has {rows:,} rows.",
                found=len(tokenizer.tokens),
                wanted=rows,
                hint="The tokenizer belongs to another model; --no-tokenizer converts the weights alone.",
            )
        )
    plan.sidecars |= {name: data for name, data in hf_files_from(tokenizer).items() if name not in plan.sidecars}
    return {f"{role}_token_id": i for role, i in tokenizer.special.items() if role in ("bos", "eos", "pad")}
