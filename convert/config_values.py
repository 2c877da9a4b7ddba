"""What the values of a config may be: a type and a range for every quantity that a table reads.

JSON and GGUF hold anything under any key. A value of a wrong type or range is refused even where nothing here computes
with it: the file was damaged or made up, and the next reader would compute with it. What quantities mean, and what
each layout calls them, is the tables' matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from convert.errors import ConvertError, Problem
from convert.normalisers import FULL, LINEAR, MAX_LAYERS, SLIDING
from convert.table import MappingTable

_MOST = 2**40
_HINT = "Correct it in the file (other copies of the model have the value), or give a sound config with --config FILE."
#: Numbers that count something of which there must be one at least.
_SIZES = frozenset(
    {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
        *("num_key_value_heads", "num_global_key_value_heads", "global_head_dim", "max_position_embeddings"),
        *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step", "rotary_dim"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "sliding_window"),
    }
)
#: Numbers that may also count nothing.
_COUNTS = frozenset(
    {
        *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "nextn_predict_layers"),
        *("full_attention_interval", "max_window_layers"),
    }
)
#: Real numbers: their bounds, and whether the lower one and the upper one may be reached.
_RANGES: Mapping[str, tuple[float, float, bool, bool]] = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), (0, 1, False, False)),
    **dict.fromkeys(("attention_dropout", "resid_pdrop"), (0, 1, True, True)),
    **dict.fromkeys(("logit_scale", "query_pre_attn_scalar"), (0, _MOST, False, False)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (0, _MOST, True, False)),
    "partial_rotary_factor": (0, 1, False, True),
}
#: What params.json holds beside the table's quantities. Tensors say how wide a layer is, and the flag's truth is all
#: that counts, but Meta's own code computes with all of it: a list, a 0 or a text is no value of theirs.
_META: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(
        ("multiple_of", "max_batch_size", "max_seq_len"),
        ("whole number from 1 to 2^31", lambda v: type(v) is int and 0 < v < 2**31),
    ),
    "ffn_dim_multiplier": ("number above 0 and below 1000", lambda v: is_number(v) and 0 < v < 1000),
    "use_scaled_rope": ("true or false", lambda v: is_flag(v)),
}


def is_number(value: Any) -> bool:
    """Whether it is a number; true and false are none, although Python counts with them."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_flag(value: Any) -> bool:
    """Whether it is true or false, which some writers spell 1 and 0."""
    return isinstance(value, int) and value in (0, 1)


def _sensible(value: Any) -> bool:
    return is_number(value) and 0 <= value < _MOST  # false for no-number and infinity, too


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


#: What the values of a ``[config]`` row's kind are, for messages and checks.
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "flag": ("true or false", lambda v: isinstance(v, bool)),
    "text": ("text", lambda v: isinstance(v, str)),
    "numbers": ("list of whole numbers", lambda v: isinstance(v, list) and all(map(_whole, v))),
    "texts": ("list of texts", lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v)),
    "ids": ("token id, or a list of them", lambda v: all(type(x) is int for x in (v if isinstance(v, list) else [v]))),
}


def check_values(table: MappingTable, layout: str, hub: Mapping[str, Any]) -> None:
    """Every quantity of the table must be of its kind and in bounds that some model could have.

    Args:
        table: The family.
        layout: Whose spelling the file has, for messages.
        hub: A config in the hub's words; what it lacks, or has as None, is not judged.

    Raises:
        ConvertError: All that cannot be.
    """
    problems = [*_quantities(table, layout, hub), *_flags(table, hub), *_kinds_of_layers(table, hub)]
    if problems:
        raise ConvertError(problems)


def _quantities(table: MappingTable, layout: str, hub: Mapping[str, Any]) -> Iterator[Problem]:
    for key, row in table.config.items():
        value = hub.get(key)
        if value is None or (key == "vocab_size" and value == -1 and layout == "meta"):
            continue
        what, fits = _wanted(key, row.kind, row.gguf_type or "")
        if not fits(value):
            own = row.names.get(layout, key).replace("{arch}", table.gguf_arch or "")
            yield wrong(key if own == key else f"{key} ({own})", value, what)


def _wanted(key: str, kind: str, gguf_type: str) -> tuple[str, Callable[[Any], bool]]:
    """In words, and as a check, what a key's value must be."""
    if kind in _KINDS:
        return _KINDS[kind]
    if key == "num_hidden_layers":
        return f"whole number from 1 to {MAX_LAYERS:,}", lambda v: _whole(v) and 0 < v <= MAX_LAYERS
    if key in _SIZES:
        return "sensible number (a whole one above 0, written without a point)", lambda v: _whole(v) and v > 0
    if key in _RANGES:
        low, high, from_low, to_high = _RANGES[key]
        said = f"{'from' if from_low else 'above'} {low:g}"
        said += "" if high == _MOST else f" {'to' if to_high else 'and below'} {high:g}"

        def inside(v: Any) -> bool:
            return is_number(v) and (low <= v if from_low else low < v) and (v <= high if to_high else v < high)

        return f"sensible number ({said})", inside
    if key in _COUNTS or gguf_type.startswith("u"):
        return "whole number (write it without a point)", _whole
    if key == "sliding_window_pattern":  # a period, or GGUF's flags per layer
        return "period, or list of flags", lambda v: _whole(v) or (isinstance(v, list) and all(map(is_flag, v)))
    if key == "recurrent_layers":
        return "list of flags", lambda v: isinstance(v, list) and all(map(is_flag, v))
    return "sensible number", _sensible


def _flags(table: MappingTable, hub: Mapping[str, Any]) -> Iterator[Problem]:
    """Python takes every text for true."""
    for key in ("tie_word_embeddings", "use_sliding_window", *table.presence):
        value = hub.get(key)
        stated = table.config.get(key)
        if value is not None and not is_flag(value) and (stated is None or stated.kind != "flag"):
            yield wrong(key, value, "true or false")


def _kinds_of_layers(table: MappingTable, hub: Mapping[str, Any]) -> Iterator[Problem]:
    """A kind of layer that nobody knows would be taken for the one that is not asked for."""
    kinds = hub.get("layer_types")
    if "layer_types" not in table.config or not isinstance(kinds, list):
        return
    known = set(table.rope) or {SLIDING, FULL, LINEAR}
    strange = sorted({k for k in kinds if isinstance(k, str)} - known)
    if strange:
        yield wrong("layer_types", strange[:4], f"list of {', '.join(sorted(known))}")


def check_relations(hub: Mapping[str, Any]) -> None:
    """What two quantities must be to one another.

    Raises:
        ConvertError: More experts are asked than there are, or heads cannot share keys and values evenly.
    """
    problems = []
    number, used = hub.get("num_experts"), hub.get("num_experts_per_tok")
    if isinstance(number, int) and isinstance(used, int) and used > number:
        problems.append(wrong("num_experts_per_tok", used, f"number of some of the {number} experts"))
    heads = hub.get("num_attention_heads")
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        groups = hub.get(key)
        if type(heads) is int and type(groups) is int and groups > 0 and heads % groups:
            problems.append(wrong(key, groups, f"divisor of the {heads} heads, which share keys and values evenly"))
    if problems:
        raise ConvertError(problems)


def check_params(raw: Mapping[str, Any]) -> None:
    """What ``params.json`` says beside the table's quantities; null is as good as absent, as in Meta's own code.

    Raises:
        ConvertError: Something is of a type or in a range that no model has.
    """
    bad = [wrong(k, raw[k], what) for k, (what, fits) in _META.items() if raw.get(k) is not None and not fits(raw[k])]
    if bad:
        raise ConvertError(bad)


def check_frame(raw: Mapping[str, Any], file: str) -> Iterable[Problem]:
    """What a config says about the files rather than the model: class names, types, packing.

    Args:
        raw: The config as its file holds it.
        file: Its path, for messages.
    """
    stated = raw.get("architectures")
    if stated is not None and not (isinstance(stated, list) and all(isinstance(name, str) for name in stated)):
        # A class name that is not in a list would be passed over, and the family guessed.
        hint = 'It looks like this: "architectures": ["SomeModelForCausalLM"].'
        yield wrong("architectures", stated, "list of class names", file=file, hint=hint)
    for key in ("quantization_config", "quantization_args", "quantization"):
        value = raw.get(key)
        if value is not None and not isinstance(value, Mapping):
            hint = "Take it out if the weights are plain; else fetch the config again."
            yield wrong(key, value, "object that tells how weights are packed", file=file, hint=hint)
    for key in ("dtype", "torch_dtype"):
        value = raw.get(key)
        # The tensors' own types count; parts of a model may have one each.
        if value is None or isinstance(value, Mapping):
            continue
        if not isinstance(value, str) or not value.removeprefix("torch.").isidentifier():
            yield wrong(key, value, "name of a type, as float32", file=file)


def wrong(key: str, value: Any, what: str, *, file: str | None = None, hint: str = _HINT) -> Problem:
    """The problem of a value that cannot be."""
    shown = f"{value!r:.200}"
    said = f"the config's {key} is {shown}, which is no {what}."
    return Problem("config", said, file=file, found=value, wanted=what, hint=hint)
