"""Registered functions that bring what differs between versions of a config into one form before tables see it.

A table names those it needs in ``normalise``; each takes the config as a source's layout spells it (after renaming into
the hub's keys, RoPE still untouched) and returns the hub's form. They know config keys and no family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convert.errors import ConvertError, Problem

Config = dict[str, Any]
Normaliser = Callable[[Config], Config]

#: Layer kinds as transformers spells them in ``layer_types``.
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
#: Defaults of a table that must be known before layer kinds can be told from a period.
PERIODS = ("sliding_window_pattern", "full_attention_interval")
#: Keys that transformers 5 keeps among the RoPE settings without being fields of a RoPE type.
ROPE_EXTRAS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
#: Ten times the deepest published models; a damaged config must neither fill the memory nor take a minute to refuse.
MAX_LAYERS = 2_000


def text_config(config: Config) -> Config:
    """The text part of a multimodal config, with the root's token ids and tie flag where the text part is silent."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return config
    shared = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype", "dtype")
    out = {k: v for k, v in inner.items() if v is not None}
    for key in shared:
        if config.get(key) is not None:
            out.setdefault(key, config[key])
    return out


def _period(config: Config, *keys: str) -> None:
    """Stop at a period that is none: a text would leave all layers to be of one kind. 0 says, in GGUF, that none is."""
    for key in keys:
        value = config.get(key)
        if value is None or isinstance(value, list) or (type(value) is int and 0 <= value < 2**31):
            continue
        raise ConvertError(
            Problem(
                "config",
                f"the config's {key} is {value!r:.200}, which is no whole number of layers.",
                found=value,
                wanted="a whole number",
                hint="Correct it in the file, or give a sound config with --config FILE.",
            )
        )


def layer_types_from_pattern(config: Config) -> Config:
    """``layer_types`` from the period that older versions state (every n-th layer is a full one), or GGUF's flags.

    The period's keys are taken out: two statements of one thing could come to disagree.
    """
    _period(config, "_sliding_window_pattern", "sliding_window_pattern")
    stated = [config.get(key) for key in ("_sliding_window_pattern", "sliding_window_pattern")]
    config = {k: v for k, v in config.items() if k not in ("_sliding_window_pattern", "sliding_window_pattern")}
    if config.get("layer_types"):
        return _checked(config)
    period = next((p for p in stated if p), None)
    layers = config.get("num_hidden_layers")
    if isinstance(period, list):  # one flag per layer, as llama.cpp's converter writes for some architectures
        return _checked({**config, "layer_types": [SLIDING if flag else FULL for flag in period]})
    if not isinstance(period, int) or not isinstance(layers, int) or period < 1 or not 0 <= layers <= MAX_LAYERS:
        return config
    kinds = [FULL if (i + 1) % period == 0 else SLIDING for i in range(layers)]
    return {**config, "layer_types": kinds}


def layer_types_from_interval(config: Config) -> Config:
    """``layer_types`` of models that mix linear and full attention: stated, from GGUF's flags, or from the interval.

    ``full_attention_interval`` and the flags are taken out: two statements of one thing could come to disagree.
    """
    _period(config, "full_attention_interval")
    interval, flags = config.get("full_attention_interval"), config.get("recurrent_layers")
    config = {k: v for k, v in config.items() if k not in ("full_attention_interval", "recurrent_layers")}
    layers = config.get("num_hidden_layers")
    if config.get("layer_types"):
        return _checked(config)
    if isinstance(flags, list):
        return _checked({**config, "layer_types": [LINEAR if flag else FULL for flag in flags]})
    if type(interval) is not int or type(layers) is not int or interval < 1 or not 0 <= layers <= MAX_LAYERS:
        return config
    kinds = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]
    return {**config, "layer_types": kinds}


def no_prediction_layers(config: Config) -> Config:
    """A config without the layers that predict further tokens, which no model here runs; GGUF counts them as blocks."""
    config = dict(config)
    extra, layers = config.pop("nextn_predict_layers", None), config.get("num_hidden_layers")
    if type(extra) is int and type(layers) is int and 0 < extra < layers:
        config["num_hidden_layers"] = layers - extra
        if isinstance(config.get("recurrent_layers"), list):
            config["recurrent_layers"] = config["recurrent_layers"][: layers - extra]
    if config.get("mtp_num_hidden_layers"):
        config["mtp_num_hidden_layers"] = 0
    return config


def rope_extras(config: Config) -> Config:
    """What stands among the RoPE settings and is none (:data:`ROPE_EXTRAS`), as keys of the config itself.

    GGUF says how many dimensions of a head turn where others say which part of it, and has a fourth, empty section.
    """
    config = dict(config)
    for settings in (config.get("rope_parameters"), config.get("rope_scaling")):
        if isinstance(settings, Mapping):
            config |= {k: settings[k] for k in ROPE_EXTRAS if settings.get(k) is not None}
    turning, head = config.pop("rotary_dim", None), config.get("head_dim")
    if isinstance(turning, int) and isinstance(head, int) and head > 0:
        config["partial_rotary_factor"] = turning / head
    sections = config.get("mrope_section")
    if isinstance(sections, list) and len(sections) == 4 and sections[3] == 0:
        config["mrope_section"] = sections[:3]
    elif isinstance(sections, list) and len(sections) != 3:
        raise ConvertError(
            Problem(
                "rope",
                f"mrope_section has {len(sections)} numbers, not one each for time, height and width.",
                found=sections,
                wanted=3,
            )
        )
    return config


def sliding_window_if_used(config: Config) -> Config:
    """No ``sliding_window`` unless ``use_sliding_window`` says that there is one (some configs state both)."""
    if config.get("use_sliding_window") not in (None, False, True):
        return config  # refused by :mod:`convert.config_values`
    if config.get("use_sliding_window"):
        return config
    return {k: v for k, v in config.items() if k != "sliding_window"}


def layer_types_from_max_window_layers(config: Config) -> Config:
    """``layer_types`` where only layers from ``max_window_layers`` on slide; no window where none of them does."""
    _period(config, "max_window_layers")
    layers, first = config.get("num_hidden_layers"), config.get("max_window_layers")
    if config.get("layer_types"):
        config = _checked(config)
    elif config.get("sliding_window") and isinstance(layers, int) and isinstance(first, int) and layers <= MAX_LAYERS:
        config = {**config, "layer_types": [SLIDING if i >= first else FULL for i in range(layers)]}
    if SLIDING in (config.get("layer_types") or (SLIDING,)):  # null is as good as absent
        return config
    return {k: v for k, v in config.items() if k != "sliding_window"}


def num_experts(config: Config) -> Config:
    """``num_experts``, which transformers 5 writes as ``num_local_experts``."""
    new, old = config.get("num_local_experts"), config.get("num_experts")
    if new is not None and old is not None and new != old:
        raise ConvertError(
            Problem(
                "config",
                f"the config states num_experts = {old} and num_local_experts = {new}.",
                found=new,
                wanted=old,
                hint="They are two names of one number; delete the wrong one.",
            )
        )
    out = {k: v for k, v in config.items() if k != "num_local_experts"}
    return out if new is None else {**out, "num_experts": new}


def heads_from_layers(config: Config) -> Config:
    """``global_head_dim`` and ``num_global_key_value_heads``, which transformers 5 writes into ``per_layer_config``.

    Its keys are the numbers of the full layers, as texts, padded with zeros in some versions.
    """
    layers, kinds = config.get("per_layer_config"), config.get("layer_types")
    config = {k: v for k, v in config.items() if k != "per_layer_config"}
    if not isinstance(layers, Mapping) or not isinstance(kinds, list):
        return config
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    known = all(isinstance(v, Mapping) and set(v) <= set(names) for v in layers.values())
    full = [str(i) for i, kind in enumerate(kinds) if kind == FULL]
    said = sorted(str(k).lstrip("0") or "0" for k in layers)
    if not known or said != sorted(full) or len({tuple(sorted(v.items())) for v in layers.values()}) > 1:
        raise ConvertError(
            Problem(
                "config",
                "per_layer_config must say one head_dim (and number of key and value heads) for all full layers, and "
                f"nothing else; it says {dict(layers)}.",
                found=dict(layers),
                wanted=full,
            )
        )
    for key, value in next(iter(layers.values()), {}).items():
        if config.setdefault(names[key], value) != value:
            raise ConvertError(
                Problem(
                    "config",
                    f"{names[key]} is {config[names[key]]}, and per_layer_config says {value}.",
                    found=config[names[key]],
                    wanted=value,
                )
            )
    return config


def widths_from_layers(config: Config) -> Config:
    """What GGUF states per layer: the width of the feed-forward layers, doubled in some, and key and value heads."""
    widths, heads, kinds = (config.get(k) for k in ("intermediate_size", "num_key_value_heads", "layer_types"))
    out = dict(config)
    if isinstance(widths, list) and widths:
        shared = config.get("num_kv_shared_layers") or 0
        narrow = min(widths)
        double = [narrow * (2 if i >= len(widths) - shared else 1) for i in range(len(widths))]
        if widths not in ([narrow] * len(widths), double):
            raise ConvertError(Problem("config", f"no family here has layers of the widths {widths}.", found=widths))
        out |= {"intermediate_size": narrow, "use_double_wide_mlp": widths == double and shared > 0}
    if isinstance(heads, list) and isinstance(kinds, list) and len(heads) == len(kinds):
        by_kind = {kind: {h for h, k in zip(heads, kinds, strict=True) if k == kind} for kind in (SLIDING, FULL)}
        if any(len(found) > 1 for found in by_kind.values()):
            raise ConvertError(Problem("config", f"no family here has layers of {heads} key and value heads."))
        sliding, full = ((next(iter(by_kind[kind]), None)) for kind in (SLIDING, FULL))
        out["num_key_value_heads"] = sliding if sliding is not None else full
        if full is not None and full != sliding:
            out |= {"num_global_key_value_heads": full, "attention_k_eq_v": True}
    return out


def softcap_of_zero(config: Config) -> Config:
    """A cap of 0, which is how GGUF says that there is none, as None: transformers would divide by it."""
    if config.get("final_logit_softcapping") == 0:
        return {**config, "final_logit_softcapping": None}
    return config


def kv_sharing(config: Config) -> Config:
    """Stop unless every layer without keys and values of its own has one of its kind before it that has."""
    kinds, shared = config.get("layer_types"), config.get("num_kv_shared_layers")
    if not isinstance(kinds, list) or type(shared) is not int or shared == 0:
        return config
    first = len(kinds) - shared
    if shared < 0 or first < 1 or not set(map(str, kinds[first:])) <= set(map(str, kinds[:first])):
        raise ConvertError(
            Problem(
                "config",
                f"num_kv_shared_layers = {shared} of {len(kinds)} layers: some of these have no layer of their kind "
                "before them whose keys and values they could share.",
                found=shared,
                wanted=kinds,
            )
        )
    return config


def kv_donor(kinds: Any, shared: Any, layer: int) -> int:
    """The layer whose keys and values ``layer`` attends to: itself, or the last of its kind that has some of its own.

    The last ``shared`` layers have none.
    """
    first = len(kinds) - int(shared or 0)
    if layer < first:
        return layer
    return max((i for i in range(first) if kinds[i] == kinds[layer]), default=layer)


def layer_period(kinds: Any) -> int:
    """The period ``p`` of layers in which layer ``i`` is a full one if and only if ``i % p == p - 1``; 0 for none.

    It is all that llama.cpp's loaders of most such architectures can be told (facts: gguf.md section 4).
    """
    if not isinstance(kinds, (list, tuple)) or not kinds:
        return 0
    period = next((i + 1 for i, kind in enumerate(kinds) if kind == FULL), len(kinds) + 1)
    fits = all((kind == FULL) == (i % period == period - 1) for i, kind in enumerate(kinds))
    return period if fits and len(set(kinds) - {FULL}) <= 1 else 0


def _checked(config: Config) -> Config:
    kinds, layers = config["layer_types"], config.get("num_hidden_layers")
    if not isinstance(kinds, list) or (isinstance(layers, int) and len(kinds) != layers):
        found = len(kinds) if isinstance(kinds, list) else kinds
        raise ConvertError(
            Problem(
                "config",
                f"layer_types has {found} entries for {layers} layers.",
                found=found,
                wanted=layers,
                hint="One entry per layer; the config is damaged or of another model.",
            )
        )
    return config


NORMALISERS: dict[str, Normaliser] = {
    "text_config": text_config,
    "layer_types_from_pattern": layer_types_from_pattern,
    "layer_types_from_interval": layer_types_from_interval,
    "no_prediction_layers": no_prediction_layers,
    "rope_extras": rope_extras,
    "sliding_window_if_used": sliding_window_if_used,
    "layer_types_from_max_window_layers": layer_types_from_max_window_layers,
    "num_experts": num_experts,
    "heads_from_layers": heads_from_layers,
    "widths_from_layers": widths_from_layers,
    "kv_sharing": kv_sharing,
    "softcap_of_zero": softcap_of_zero,
}
