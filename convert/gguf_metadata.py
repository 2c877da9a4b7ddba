"""The key-values of a GGUF file: complete, and typed as llama.cpp's loader wants them.

What the loader needs follows from the table's ``[config]`` rows; ``general.*`` is a courtesy and never stops a
conversion. Under ``convert.*`` lies what GGUF has no word for, so that the way back restores it
(:mod:`convert.gguf_record`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from convert import layered_rope, rope
from convert.carried import carried as carried_files
from convert.carried import unsound_files
from convert.checkpoint import Checkpoint
from convert.config import read_json
from convert.errors import ConvertError, Problem, UsageError
from convert.expr import Expr
from convert.formats.gguf_values import F32, U32, Array, Bool, KeyValues, Str, Value, encode, infer
from convert.formats.spec import Entry
from convert.gguf_record import CONFIG_KEY, GENERATION_KEY, ROPE_KEY
from convert.layout import Dims
from convert.model_card import many, one, read_card
from convert.plan import ConversionPlan, Request
from convert.record import carried, compact, head_hash, stated_keys, table_hash
from convert.table import Metadata

#: ``general.quantization_version``: of ggml's block types, 2 since 2023 (GGML_QNT_VERSION).
QUANTIZATION_VERSION = 2

#: What other keys, or the places of the tensors, depend on.
_FIXED = ("general.architecture", "general.alignment", "split.", "convert.")

#: Folders that say what kind of files they hold, not which model.
_KINDS_OF_FOLDER = frozenset(
    {"original", "hf", "meta", "scratch", "gguf", "model", "weights", "checkpoint", "out", "output", "converted"}
)

#: Ends of ``{arch}.*`` keys whose numbers are the tensors' shapes and count; another one is another model.
_SHAPES = (
    *("vocab_size", "block_count", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "expert_count"),
)

#: ``general.*`` keys that readers want as texts, also where the value looks like a number.
_TEXTS = (
    *("name", "author", "version", "organization", "finetune", "basename", "description", "quantized_by"),
    *("size_label", "license", "license.name", "license.link", "url", "doi", "uuid", "repo_url"),
    *("source.url", "source.repo_url", "type"),
)
_LISTS = ("tags", "languages")

#: Sampling settings of generation_config.json that llama.cpp takes as defaults, with their types there.
_SAMPLING = {
    "top_k": ("top_k", "i32"),
    "top_p": ("top_p", "f32"),
    "min_p": ("min_p", "f32"),
    "temperature": ("temp", "f32"),
}


def metadata(plan: ConversionPlan, entries: Sequence[Entry], *, file_type: int) -> KeyValues:
    """Every key-value of the file; also kept as ``plan.metadata``.

    Args:
        plan: The plan; its tokenizer keys were found before any weight was touched.
        entries: The tensors that are written.
        file_type: ``general.file_type``.

    Raises:
        UsageError: ``--metadata`` names a key that cannot be changed, or a value that is no value.
    """
    arch = plan.table.gguf_arch or plan.table.family
    values = _carried(plan)
    values.put("general.architecture", Str(arch))
    for key, value in {**_general(plan, entries), **_architecture(plan, arch)}.items():
        values.put(key, value)
    values.put("general.file_type", U32(file_type))
    values.put("general.quantization_version", U32(QUANTIZATION_VERSION))
    for key, value in {**(plan.tokenizer_keys or {}), **_provenance(plan)}.items():
        values.put(key, value)
    _add_users(values, plan.request.gguf.metadata)
    plan.metadata = values
    return values


def _carried(plan: ConversionPlan) -> KeyValues:
    """The key-values of a GGUF source, which go on unless something here knows better."""
    from convert.tokenizer.from_gguf import FLAGS, FLAGS_KEY, NORMALIZER_KEY

    source = plan.source
    if not isinstance(source.metadata, KeyValues) or source.layout != "gguf":
        return KeyValues()
    values = source.metadata.copy()
    anew = plan.tokenizer_keys is not None
    for key in list(values):
        if key.startswith("convert.") or (anew and key.startswith("tokenizer.")):
            values.drop(key)
    flags = (f"{FLAGS_KEY}.{flag}" for flag in FLAGS)
    for key in (NORMALIZER_KEY, "convert.eos_token_ids", *flags):
        if not anew and key in source.metadata:
            values.put(key, Value(source.metadata.types[key], source.metadata[key]))
    if "tokenizer.ggml.model" not in values:
        values.put("tokenizer.ggml.model", Str("none"))
    return values


# ---- the tokenizer ---------------------------------------------------------------------------------------------


def tokenizer_keys(source: Checkpoint, request: Request, notes: list[str]) -> dict[str, Value] | None:
    """The ``tokenizer.*`` keys; None where those of a GGUF source are taken over.

    Args:
        source: The opened source; its folder, or ``request.tokenizer_path``, holds the tokenizer.
        request: What was asked for.
        notes: Where remarks go.

    Raises:
        ConvertError: There is no tokenizer, or llama.cpp cannot do what it does; nothing has been read by then.
    """
    if not request.tokenizer:
        notes.append("no tokenizer, as asked: llama.cpp cannot run the file without one")
        return {"tokenizer.ggml.model": Str("none")}
    if source.layout == "gguf" and request.tokenizer_path is None:
        return None
    from convert.tokenizer.sidecar_checks import wrong_ids
    from convert.tokenizer.source import read_tokenizer
    from convert.tokenizer.to_gguf import gguf_metadata
    from convert.tokenizer.tokenizer import SENTENCEPIECE

    path = Path(request.tokenizer_path or source.folder)
    if not path.exists():
        raise UsageError(f"--tokenizer {path}: there is no such file or folder.")
    if problems := unsound_files(carried_files(path, source.folder)):
        raise ConvertError(problems)
    pre = request.gguf.pre
    tokenizer = read_tokenizer(path, pre=pre)
    config = source.raw_config if source.layout == "hf" else source.config
    rows, generation = int(source.config["vocab_size"]), generation_config(source, notes)
    if wrong := wrong_ids(generation, rows):
        place = str(source.folder / "generation_config.json")
        hint = "Correct it, or move it away: the ids of the tokenizer and of config.json are taken then."
        raise ConvertError(
            Problem("config", f"generation_config.json: {what}.", file=place, hint=hint) for what in wrong.values()
        )
    keys = gguf_metadata(
        tokenizer,
        rows=rows,
        config=config,
        generation_config=generation,
        pre=pre,
        model=source.table.gguf_tokenizer if tokenizer.kind == SENTENCEPIECE else None,
    )
    notes += tokenizer.notes
    return keys


def generation_config(source: Checkpoint, notes: list[str] | None = None) -> dict[str, Any]:
    """``generation_config.json`` beside the source, or as a GGUF file of ours carries it; empty without one."""
    recorded = source.record.get("generation_config")
    path = source.folder / "generation_config.json"
    if source.layout == "gguf" or not path.is_file():
        return dict(recorded) if isinstance(recorded, Mapping) else {}
    try:
        raw = read_json(path)
    except ConvertError as error:
        if notes is not None:
            notes.append(f"generation_config.json was passed over: {error.problems[0].message}")
        return {}
    return raw if isinstance(raw, dict) else {}


# ---- general.* -------------------------------------------------------------------------------------------------


def _general(plan: ConversionPlan, entries: Sequence[Entry]) -> dict[str, Value]:
    """What people read about a file. Nothing here may raise."""
    out: dict[str, Value] = {"general.type": Str("model")}
    if plan.source.layout == "gguf":
        return out
    card = read_card(plan.source.folder)
    name = one(card, "model_name") or _own_name(plan)
    if name:
        out["general.name"] = Str(name)
    out["general.size_label"] = Str(size_label(sum(Entry("", "I8", e.shape).nbytes for e in entries)))
    for key, field in (("license", "license"), ("license.name", "license_name"), ("license.link", "license_link")):
        value = one(card, field)
        if value:
            out[f"general.{key}"] = Str(value)
    bases = many(card, "base_model")
    if bases:
        out["general.base_model.count"] = U32(len(bases))
    for number, base in enumerate(bases):
        organization, _, short = base.strip("/").rpartition("/")
        out[f"general.base_model.{number}.name"] = Str(short)
        if organization:
            out[f"general.base_model.{number}.organization"] = Str(organization.rpartition("/")[2])
    for key, fields in (("tags", ("tags", "pipeline_tag")), ("languages", ("language",))):
        found = list(dict.fromkeys(item for field in fields for item in many(card, field)))
        if found:
            out[f"general.{key}"] = Array("str", found)
    generation = generation_config(plan.source)
    for field, (key, kind) in _SAMPLING.items():
        value = generation.get(field)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            out[f"general.sampling.{key}"] = Value(kind, int(value) if kind == "i32" else float(value))
    return out


def _own_name(plan: ConversionPlan) -> str | None:
    """What the config, or else the folder, is called; a folder that only says what is in it gives its parent's."""
    stated = plan.config.get("_name_or_path")
    if isinstance(stated, str) and stated:
        return stated.rstrip("/").rpartition("/")[2] or None
    if plan.source.format == "module":  # in memory; called as its caller calls the output
        return plan.source.path.parent.name or None
    if plan.source.origin:
        return str(plan.source.origin["repo"]).rpartition("/")[2]
    folder = plan.source.folder.absolute()
    if folder.parent.name == "snapshots":  # a hub cache: models--OWNER--NAME/snapshots/COMMIT
        return folder.parent.parent.name.rpartition("--")[2] or None
    names = [folder.name, folder.parent.name] if folder.parent.name else [folder.name]
    told = next((n for n in names if not _says_kind(n)), None)
    return told or folder.name or None


def _says_kind(name: str) -> bool:
    """Whether a folder is called after a kind of files, or after a step of training (``checkpoint-500``)."""
    stem, dash, number = name.rpartition("-")
    return (stem if dash and number.isdecimal() else name).lower() in _KINDS_OF_FOLDER


def size_label(parameters: int) -> str:
    """``1.2B``: at least two figures, as llama.cpp's converter labels sizes."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    unit, letter = next((u for u in units if parameters >= u[0]), units[-1])
    scaled = parameters / unit
    return f"{scaled:.1f}{letter}" if scaled < 9.5 else f"{scaled:.0f}{letter}"


# ---- the architecture ------------------------------------------------------------------------------------------


def _architecture(plan: ConversionPlan, arch: str) -> dict[str, Value]:
    """``{arch}.*`` from the table's rows and the RoPE settings."""
    table, dims = plan.table, Dims(plan.table, plan.config)
    out: dict[str, Value] = {}
    for row in table.config.values():
        if "gguf" not in row.names or row.gguf_type is None:
            continue
        value = plan.config.get(row.key)
        value = _derived(dims, row.key) if value is None else value
        if not value:  # absent, or a zero that means "none" (a sliding window)
            continue
        typed = F32(float(value)) if row.gguf_type == "f32" else Value(row.gguf_type, int(value))
        for key in (row.names["gguf"], *row.also.get("gguf", ())):
            out[key.replace("{arch}", arch)] = typed
    if table.has_rope:
        out |= _rope(plan, arch)
    for item in table.metadata:
        if item.when is None or dims.value(item.when):
            out[item.key.replace("{arch}", arch)] = _computed(item, dims)
    return out


def _rope(plan: ConversionPlan, arch: str) -> dict[str, Value]:
    """``{arch}.rope.*``."""
    settings = rope.primary(plan.config["rope_parameters"])
    out: dict[str, Value] = {f"{arch}.rope.freq_base": F32(float(settings["rope_theta"]))}
    for key, value in rope.to_gguf(settings, arch).items():
        out[key] = Str(value) if isinstance(value, str) else U32(value) if isinstance(value, int) else F32(value)
    for key, number in layered_rope.to_gguf(plan.table.rope, plan.config["rope_parameters"], arch).items():
        out[key] = F32(number)
    return out


def _computed(item: Metadata, dims: Dims) -> Value:
    """The value of a ``[[metadata]]`` entry."""
    cast = {"f32": float, "bool": bool, "str": str}.get(item.type, int)
    if item.each and isinstance(item.value, Expr):
        return Array(item.type, [cast(dims.value(item.value, layer)) for layer in range(dims.n_layers)])
    if isinstance(item.value, tuple):
        return Array(item.type, [cast(dims.value(expr)) for expr in item.value])
    return Value(item.type, cast(dims.value(item.value)))


def _derived(dims: Dims, key: str) -> Any:
    """What a key that the config does not have follows from: the dim whose expression begins with it."""
    for name, alternatives in dims.table.dims.items():
        if alternatives[0].text == key or alternatives[0].text.startswith(f"{key} or "):
            return dims.get(name)
    return None


# ---- provenance ------------------------------------------------------------------------------------------------


def _provenance(plan: ConversionPlan) -> dict[str, Value]:
    """``convert.*``: where the file comes from, and what GGUF has no key for."""
    from convert import __version__

    source = plan.source
    config = carried(plan.config, stated_keys(source))
    config = {key: value for key, value in config.items() if not key.startswith("_")}
    out = {
        "convert.version": Str(f"ckpt-convert {__version__}"),
        "convert.family": Str(plan.table.family),
        "convert.source.layout": Str(source.layout),
        "convert.source.format": Str(source.format),
        "convert.source.files": Array("str", [file.name for file in source.files]),
        "convert.source.bytes": Array("u64", [file.stat().st_size for file in source.files]),
        "convert.source.head_sha256": Array("str", [head_hash(file) for file in source.files]),
        "convert.table": Str(table_hash(plan.table.raw)),
        "convert.decisions": Str(compact(plan.decisions)),
        "convert.tied": Bool(plan.tied),
        CONFIG_KEY: Str(_json(config)),
    }
    if plan.table.has_rope:
        out["convert.qk_layout"] = Str(plan.table.convention_of("gguf", "rope"))
        out[ROPE_KEY] = Str(_json(plan.config["rope_parameters"]))
    generation = generation_config(source)
    if generation:
        out[GENERATION_KEY] = Str(_json(generation))
    return out


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


# ---- what the user adds ----------------------------------------------------------------------------------------


def _add_users(values: KeyValues, wanted: Mapping[str, Any]) -> None:
    problems = []
    shapes = {f"{values['general.architecture']}.{end}" for end in _SHAPES}
    given_as: dict[str, str] = {}
    for name, given in wanted.items():
        key = name if "." in name else f"general.{name}"
        try:
            if (twice := given_as.setdefault(key, name)) != name:
                raise ValueError(f"{key} is given twice, as {twice} too")
            if key.startswith(_FIXED):
                raise ValueError("it follows from the model and the file")
            value = typed(key, given, like=values.types.get(key))
            encode(key, value)
            if key in shapes and key in values and value.value != values[key]:
                raise ValueError(f"the tensors say {values[key]}")
        except ValueError as error:
            problems.append(Problem("metadata", f"--metadata {name}={given}: {error}.", found=str(given)))
            continue
        values.put(key, value)
    if problems:
        raise UsageError(problems)


def typed(key: str, given: Any, *, like: str | None = None) -> Value:
    """The typed value for ``key`` that a person means by ``given``: a text, or a plain Python value.

    Args:
        key: The key; well-known ``general.*`` keys have a type of their own.
        given: A text as on a command line, or a bool, int, float or list.
        like: The type that the key has already.

    Raises:
        ValueError: It does not fit.
    """
    if isinstance(given, Value):
        return given
    short = key.removeprefix("general.")
    if like is None and short != key:
        like = "str" if short in _TEXTS else "arr:str" if short in _LISTS else None
    if isinstance(given, bool):
        given = "true" if given else "false"
    if isinstance(given, (list, tuple)):
        if all(isinstance(item, str) for item in given):
            return Array("str", list(given))
        return Array("f32" if any(isinstance(item, float) for item in given) else "i32", list(given))
    return infer(str(given), like=like)
