"""Model configs: from each layout's spelling into the hub's (``config.json`` names), and back.

Plain quantities are renamed by the table's ``[config]`` rows. What is not a plain quantity has code here or in
:mod:`convert.rope`: RoPE settings, Meta's FFN formula and vocabulary of −1. Nothing is guessed: what a config does
not say is filled from tensor shapes (:mod:`convert.shapes`), the table's stated defaults, or asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from convert import layered_rope, rope
from convert.config_values import check_params, check_relations, check_values
from convert.dtypes import TORCH_NAMES
from convert.errors import ConvertError, Problem, UsageError
from convert.expr import Expr
from convert.json_file import read_json as read_json  # a config is read and understood by one module's functions
from convert.normalisers import MAX_LAYERS, NORMALISERS, PERIODS, ROPE_EXTRAS
from convert.table import MappingTable

Config = dict[str, Any]

#: Keys of ``config.json`` whose null says something: not there, instead of a family's default.
NULLABLE = ("sliding_window",)


def plain(config: Mapping[str, Any]) -> Config:
    """A config given as a dict, as its JSON file would hold it (a ``torch.dtype`` becomes its name)."""
    return {str(k): _plain(v) for k, v in config.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, (list, tuple, set)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return str(value).removeprefix("torch.")


def layout_of(raw: Mapping[str, Any], tables: Iterable[MappingTable]) -> str | None:
    """Whose spelling a config is in: ``hf``, ``meta``, ``scratch`` or ``openai``; None for neither."""
    if "hidden_size" in raw or "model_type" in raw or "architectures" in raw:
        return "hf"
    best: tuple[int, str | None] = (1, None)
    for table in tables:
        for layout in ("meta", "scratch", "openai"):
            keys = {row.names[layout] for row in table.config.values() if layout in row.names} - {"vocab_size"}
            count = len(keys & set(raw))
            if count > best[0]:
                best = (count, layout)
    return best[1]


def to_hub(
    table: MappingTable, layout: str, raw: Mapping[str, Any], recorded: Mapping[str, Any] | None = None
) -> Config:
    """Bring a config into the hub's form.

    Args:
        table: The family.
        layout: Whose spelling ``raw`` is in.
        raw: The config as its file holds it.
        recorded: The hub config that an earlier conversion kept in its record; fills what ``layout`` cannot say.

    Returns:
        ``config.json`` names, with ``rope_parameters``, ``rope_theta`` and ``rope_type`` in one form. Keys that the
        source does not state are absent, except the table's defaults for this layout.
    """
    if layout == "meta":
        raw = raw["model"] if isinstance(raw.get("model"), Mapping) else raw
        check_params(raw)
    nulls = [key for key in NULLABLE if key in raw and raw[key] is None] if layout == "hf" else []
    if layout == "hf":
        raw = _normalised(table, layout, _hub_words(table, {k: v for k, v in raw.items() if v is not None}))
        hub = dict(raw)
    else:
        hub = _renamed(table, layout, raw)
        if layout == "gguf" and hub.get("sliding_window") == 0:  # how llama.cpp says that there is none
            del hub["sliding_window"]
        hub = _normalised(table, layout, hub)
    check_values(table, layout, hub)
    defaults = table.defaults.get(layout, {})
    theta = float(defaults.get("rope_theta", 10000.0))
    kept = dict(recorded or {})
    settings = _rope(table, layout, raw, hub, theta, kept.get("rope_parameters")) if table.has_rope else {}
    kept = {key: value for key, value in kept.items() if key not in hub}
    check_values(table, "hf", kept)  # whoever wrote the one file may have written the other
    hub |= kept
    for key, row_id in table.presence.items():
        if layout in table.rows[row_id].zeros:
            hub[key] = True
    first = rope.primary(settings) if settings else {}
    for key, value in defaults.items():
        if key in nulls or (key in PERIODS and table.normalise):
            continue  # none of it; or read by the normalisers
        hub.setdefault(key, _default(value, {**hub, **first}, f"{table.source}: defaults.{layout}.{key}"))
    if layout == "meta" and int(hub.get("vocab_size", -1)) <= 0:
        hub.pop("vocab_size", None)
    check_relations(hub)
    return with_rope(hub, settings)


def _hub_words(table: MappingTable, raw: Mapping[str, Any]) -> Config:
    """``config.json`` of a family with words of its own (``n_embd``), in those that are the hub's here."""
    own = {row.names["hf"]: row.key for row in table.config.values() if "hf" in row.names}
    return {own[k]: v for k, v in raw.items() if k in own} | {k: v for k, v in raw.items() if k not in own}


def _normalised(table: MappingTable, layout: str, config: Config) -> Config:
    if not table.normalise:
        return config
    stated = table.defaults.get(layout, {})
    config = {**{key: stated[key] for key in PERIODS if key in stated}, **config}
    for name in table.normalise:
        config = NORMALISERS[name](config)
    return config


def _default(value: Any, known: Mapping[str, Any], where: str) -> Any:
    """A default of the table; a string is an expression over what the config does say and the RoPE settings."""
    return Expr(value, where).evaluate(known.__getitem__) if isinstance(value, str) else value


def _renamed(table: MappingTable, layout: str, raw: Mapping[str, Any]) -> Config:
    hub: Config = {}
    arch = table.gguf_arch or ""
    for row in table.config.values():
        # What the book's dict has no word for is kept under the hub's own.
        name = row.names.get(layout, row.key if layout == "scratch" else None)
        spellings = (*((name,) if name else ()), *row.also.get(layout, ()))
        values = (raw.get(spelling.replace("{arch}", arch)) for spelling in spellings)
        value = next((v for v in values if v is not None), None)
        if value is not None:
            hub[row.key] = _uniform(value) if layout == "gguf" and row.gguf_type else value
    for key in table.presence:
        if layout == "scratch" and key in raw:
            hub[key] = raw[key]
    return hub


def _uniform(value: Any) -> Any:
    """The one number of an array that gives every layer its own, where all layers have the same."""
    many = isinstance(value, Sequence) and not isinstance(value, str) and 0 < len(value) <= MAX_LAYERS
    return value[0] if many and all(type(v) is type(value[0]) and v == value[0] for v in value) else value


def _rope(
    table: MappingTable, layout: str, raw: Mapping[str, Any], hub: Mapping[str, Any], theta: float, recorded: Any
) -> rope.Rope:
    if table.rope:
        scaling = rope.from_gguf(raw) if layout == "gguf" else raw.get("rope_scaling")
        if scaling is not None and not isinstance(scaling, Mapping):
            raise ConvertError(Problem("rope", f"rope_scaling is {scaling!r}, which is no set of RoPE settings."))
        context = hub.get("max_position_embeddings")
        arch = str(raw.get("general.architecture", ""))
        return layered_rope.read(table.rope, layout, raw, arch=arch, scaling=scaling, context=context)
    if layout == "hf":
        return rope.from_hf(raw, theta)
    if layout == "meta":
        return rope.from_meta(raw, theta, recorded)
    if layout == "scratch":
        return rope.from_scratch(raw, theta)
    return rope.clean(rope.from_gguf(raw), theta, context=hub.get("max_position_embeddings"))


def with_rope(hub: Mapping[str, Any], settings: rope.Rope) -> Config:
    """A hub config with these RoPE settings, and nothing left of other spellings."""
    out = {k: v for k, v in hub.items() if k not in ("rope_scaling", "rope_parameters", "rope_theta", "rope_type")}
    if not settings:  # positions do not turn in this family
        return out
    out["rope_parameters"] = settings
    first = rope.primary(settings)
    out["rope_theta"], out["rope_type"] = first["rope_theta"], first["rope_type"]
    return out


def published(table: MappingTable, size: str) -> Config:
    """The hub config of a published size.

    Raises:
        UsageError: The family has no such size.
    """
    key = size.lower()
    if key not in table.sizes:
        raise UsageError(f"there is no published size {size!r}.", hint=f"Sizes: {', '.join(sorted(table.sizes))}.")
    return to_hub(table, "hf", table.sizes[key])


def to_hf(table: MappingTable, hub: Mapping[str, Any], dtype: str, carried: Mapping[str, Any] | None = None) -> Config:
    """``config.json``, complete for transformers 4 and 5.

    Args:
        table: The family.
        hub: The hub config.
        dtype: Canonical type of the weights.
        carried: The source's own ``config.json``, whose further keys are kept.
    """
    out: Config = {"architectures": list(table.architectures[:1]), "model_type": table.model_types[0]}
    out |= table.template.get("hf", {})
    ours = {key for key in table.presence if key.startswith("_")}  # known here only
    out |= {k: v for k, v in (carried or {}).items() if v is not None and k not in {"quantization_config"} | ours}
    skip = {"rope_type", "rope_parameters", "rope_theta", "torch_dtype", "dtype"} | ours
    out |= {k: v for k, v in hub.items() if k not in skip}
    for key, row_id in table.presence.items():
        if key in skip:
            continue
        out.setdefault(key, False)
        if "hf" in table.rows[row_id].zeros:
            del out[key]
    if table.has_rope:
        settings = hub["rope_parameters"]
        out |= layered_rope.to_hf(table.rope, settings) if table.rope else rope.to_hf(settings)
    if "rope_extras" in table.normalise:
        out["rope_parameters"] |= {key: out.pop(key) for key in ROPE_EXTRAS if key in out}
    for row in table.config.values():
        if "hf" in row.names and row.key in out:
            out[row.names["hf"]] = out.pop(row.key)
    name = TORCH_NAMES.get(dtype, "float32")
    out["dtype"] = out["torch_dtype"] = name
    if "head_dim" in table.config:
        out.setdefault("head_dim", int(hub["hidden_size"]) // int(hub["num_attention_heads"]))
    for key in NULLABLE:
        if key in (carried or {}):
            out.setdefault(key, None)  # left out, it would mean transformers' default
    return out


def to_meta(table: MappingTable, hub: Mapping[str, Any]) -> Config:
    """``params.json``.

    Raises:
        ConvertError: It has no way to say what the config says.
    """
    out: Config = {
        row.names["meta"]: hub[row.key] for row in table.config.values() if "meta" in row.names and row.key in hub
    }
    out |= ffn_formula(int(hub["hidden_size"]), int(hub["intermediate_size"]))
    return out | rope.to_meta(hub["rope_parameters"], int(hub["hidden_size"]))


def ffn_width(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Meta's width of the feed-forward layer; both truncations to int matter (facts: checked for every release)."""
    hidden = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * -(-hidden // multiple_of)


def ffn_formula(dim: int, width: int) -> Config:
    """``multiple_of`` and ``ffn_dim_multiplier`` for which Meta's formula gives ``width``.

    Takes the values of the published models where they fit, else the largest power of two that divides the width with
    the roundest multiplier, else the width itself as ``multiple_of``, which always fits.
    """
    for multiple in (256, 1024, 4096, 512, 2048, 128, 64, 32):
        for multiplier in (None, 1.3, 1.2, 1.5, 1.0):
            if ffn_width(dim, multiple, multiplier) == width:
                return _ffn(multiple, multiplier)
    power = 1
    while width % (power * 2) == 0:
        power *= 2
    base = int(2 * (4 * dim) / 3)
    for multiple in (power, width):
        for digits in range(1, 7):
            for target in (width, width - multiple / 2):
                multiplier = round(target / base, digits)
                if multiplier > 0 and ffn_width(dim, multiple, multiplier) == width:
                    return _ffn(multiple, multiplier)
    raise ConvertError(
        Problem(
            "config",
            f"no multiple_of and ffn_dim_multiplier make Meta's formula give {width} for dim {dim}.",
            found=width,
        )
    )


def _ffn(multiple: int, multiplier: float | None) -> Config:
    return {"multiple_of": multiple} | ({} if multiplier is None else {"ffn_dim_multiplier": multiplier})


def to_scratch(
    table: MappingTable, hub: Mapping[str, Any], dtype: str, *, book_class: str | None = None, reference: bool = False
) -> Config:
    """The dict that the book's classes take, dtype as a string, plus what they hard-wire when it differs."""
    out: Config = dict(table.template.get("scratch", {}))
    out |= {
        name: hub[row.key]
        for row in table.config.values()
        if "scratch" in row.names and row.key in hub
        for name in (row.names["scratch"], *row.also.get("scratch", ()))
    }
    if table.rope:
        out |= layered_rope.to_scratch(table.rope, hub["rope_parameters"], reference=reference)
    elif table.has_rope:
        out |= rope.to_scratch(hub["rope_parameters"], reference=reference)
    out["dtype"] = TORCH_NAMES.get(dtype, "float32")
    name = book_class or next(iter(table.classes), None)
    if not reference:  # ours takes them all
        for key in table.classes.get(name or "", {}).get("drop", ()):
            out.pop(key, None)
    defaults = table.defaults.get("scratch", {})
    for row in table.config.values():
        unsaid = "scratch" not in row.names and row.key in hub and hub[row.key] != defaults.get(row.key)
        if unsaid and not _follows(table, hub, row.key):
            out[row.key] = hub[row.key]
    for key in table.presence:
        if hub.get(key) and not key.startswith("_"):
            out[key] = True
    return out | {"family": table.family, "layout": "scratch", "class": name}


def _follows(table: MappingTable, hub: Mapping[str, Any], key: str) -> bool:
    """Whether a quantity is what the table would take it to be if the config did not state it (a head's size)."""
    from convert.layout import Dims
    from convert.shapes import primary_key

    dim = next((d for d in table.dims if primary_key(table, d) == key), None)
    rest = {k: v for k, v in hub.items() if k != key}
    return dim is not None and Dims(table, rest).get(dim) == hub[key]
