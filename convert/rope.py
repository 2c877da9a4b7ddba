"""RoPE settings in one form, from and to every spelling.

The hub's form is ``{"rope_type": …, "rope_theta": …, …}``, as transformers 5 keeps it in ``rope_parameters``.
transformers 4 spells it ``rope_theta`` + ``rope_scaling`` (with ``type`` or ``rope_type``), Meta's params.json
``rope_theta`` + the flag ``use_scaled_rope``, the book ``rope_base`` + ``rope_freq``, GGUF ``rope.freq_base`` +
``rope.scaling.*`` or a tensor of divisors. Two spellings that disagree, and a type nobody here knows, stop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from convert.errors import ConvertError, Problem

#: The fields each type has beside rope_type and rope_theta (transformers 5.24, modeling_rope_utils).
FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    "proportional": ("partial_rotary_factor",),  # the slowest pairs of a head do not turn
}
#: A divisor of GGUF's tensor from which on a pair counts as one that does not turn (llama.cpp's converter: 1e30).
STANDING = 1e30
#: What Meta's code hard-wires behind `use_scaled_rope`; the factor follows from the size (below).
META_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

Rope = dict[str, Any]


def stop(message: str, *, found: Any = None, wanted: Any = None, hint: str | None = None) -> ConvertError:
    """The error for settings that cannot be taken."""
    return ConvertError(Problem("rope", message, found=found, wanted=wanted, hint=hint))


_MOST = 1e30


def _base(value: Any, default: float) -> float:
    """A stated base, or the default where none is."""
    value = default if value is None else value
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < _MOST:
        raise stop(
            f"rope_theta is {value!r:.200}, which is no base that a model has.",
            found=value,
            wanted="a finite number above 0",
            hint="Correct it in the file (other copies of the model have it), or give a config with --config FILE.",
        )
    return float(value)


def _settings(value: Any, key: str) -> Mapping[str, Any]:
    """A dict of RoPE settings, empty where none are stated."""
    if value is not None and not isinstance(value, Mapping):
        raise stop(f"{key} is {value!r}, which is no set of RoPE settings.", found=value)
    return value or {}


def clean(parameters: Mapping[str, Any], theta: float, *, context: int | None = None) -> Rope:
    """One dict of RoPE parameters, checked.

    Args:
        parameters: ``rope_type`` (or the older ``type``) and its fields.
        theta: The base where the dict has none.
        context: ``max_position_embeddings``, which transformers takes where the original length is missing.

    Raises:
        ConvertError: The type is unknown, or a field is missing or no number.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default")) or "default"
    if not isinstance(kind, str) or kind not in FIELDS:
        raise stop(
            f"the RoPE type {kind!r} is not supported, and dropping it would change the model.",
            found=kind,
            wanted=sorted(FIELDS),
            hint=f"Supported types: {', '.join(sorted(FIELDS))}.",
        )
    out: Rope = {"rope_type": kind, "rope_theta": _base(parameters.get("rope_theta"), theta)}
    parameters = _completed(parameters) if kind == "yarn" else parameters
    if kind == "proportional":
        if parameters.get("factor") not in (None, 1, 1.0):
            raise stop("a proportional RoPE with a factor is not supported.", found=parameters["factor"], wanted=1.0)
        parameters = {"partial_rotary_factor": 1.0, **parameters}
    for field in FIELDS[kind]:
        value = parameters.get(field)
        if value is None and field == "original_max_position_embeddings":
            value = parameters.get("original_context_length", context)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < _MOST:
            raise stop(
                f"the RoPE type {kind!r} needs a positive {field!r}, and the config has {value!r}.",
                found=value,
                wanted=field,
                hint=f"A {kind} RoPE has the fields {', '.join(FIELDS[kind])}.",
            )
        out[field] = int(value) if field == "original_max_position_embeddings" else float(value)
    _check_order(out)
    return out


def _check_order(rope: Rope) -> None:
    """Fields that stand in an order: the other way round, frequencies would be divided by zero or turned about."""
    pairs = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    low, high = pairs.get(rope["rope_type"], ("", ""))
    if low and not rope[low] < rope[high]:
        raise stop(f"{low} is {rope[low]:g} and {high} is {rope[high]:g}; it must be the smaller one.", found=rope[low])
    if rope["rope_type"] == "yarn" and rope["rope_theta"] <= 1:  # whose ramp is over its logarithm
        raise stop(
            f"a YaRN RoPE has a base above 1, and rope_theta is {rope['rope_theta']:g}.", found=rope["rope_theta"]
        )
    if rope.get("original_max_position_embeddings", 1) < 1:
        raise stop("original_max_position_embeddings is less than 1, which is no length.", found=0, wanted="1 or more")
    if rope.get("partial_rotary_factor", 1) > 1:
        part = rope["partial_rotary_factor"]
        raise stop(f"partial_rotary_factor is {part:g}: more than all of a head cannot turn.", found=part, wanted=1.0)


def primary(settings: Mapping[str, Any]) -> Rope:
    """The settings; of the first kind of layer where each kind has its own (:mod:`convert.layered_rope`)."""
    return dict(settings) if "rope_type" in settings else dict(next(iter(settings.values())))


def _completed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's settings with what transformers (5.24) takes where a config is silent.

    Raises:
        ConvertError: The config asks for a variant that nothing here computes.
    """
    if parameters.get("truncate", True) is not True:
        raise stop(
            "this YaRN RoPE does not round the range of its ramp (truncate is false), which is not supported.",
            found=parameters["truncate"],
            wanted=True,
        )
    out = {"beta_fast": 32.0, "beta_slow": 1.0} | {k: v for k, v in parameters.items() if v is not None}
    factor = out.get("factor")
    if out.get("attention_factor") is None and isinstance(factor, (int, float)) and factor > 0:
        one, other = out.get("mscale"), out.get("mscale_all_dim")
        numbers = all(isinstance(v, (int, float)) and v > 0 for v in (one, other))
        out["attention_factor"] = yarn_amplitude(factor, one) / yarn_amplitude(factor, other) if numbers else None
        out["attention_factor"] = out["attention_factor"] or yarn_amplitude(factor)
    return out


def yarn_amplitude(factor: float, scale: Any = 1.0) -> float:
    """What YaRN's authors recommend to multiply cos and sin by."""
    return 1.0 if factor <= 1 else 0.1 * float(scale) * math.log(factor) + 1.0


def from_hf(config: Mapping[str, Any], default_theta: float) -> Rope:
    """From ``config.json`` in the spellings of transformers 4 and 5.

    Raises:
        ConvertError: Both spellings are there and disagree, or the settings are not supported.
    """
    context = config.get("max_position_embeddings")
    old_theta, old_scaling = config.get("rope_theta"), config.get("rope_scaling")
    theta, scaling = _base(old_theta, default_theta), _settings(old_scaling, "rope_scaling")
    new = config.get("rope_parameters")
    if new is None:
        return clean(scaling, theta, context=context)
    if not isinstance(new, Mapping) or any(isinstance(v, Mapping) for v in new.values()):
        raise stop("rope_parameters is nested by layer type, which this family does not have.", found=new)
    rope = clean(new, theta, context=context)
    if old_theta is not None and theta != rope["rope_theta"]:
        raise _disagree("rope_theta", old_theta, rope["rope_theta"])
    if old_scaling is not None:
        old = clean(scaling, rope["rope_theta"], context=context)
        if old != rope:
            raise _disagree("rope_scaling", dict(scaling), dict(new))
    return rope


def _disagree(key: str, old: Any, new: Any) -> ConvertError:
    return stop(
        f"config.json states RoPE twice and differently: {key} = {old}, rope_parameters = {new}.",
        found=old,
        wanted=new,
        hint="Delete the wrong one; transformers itself would pick one silently.",
    )


def to_hf(rope: Rope) -> dict[str, Any]:
    """Both spellings, equal: transformers 5.24 lets the older one win silently where they differ."""
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": dict(rope),
    }


def meta_factor(dim: int) -> float:
    """The factor behind Meta's flag: 32 for 3.2 1B and 3B (dim 2048, 3072), else 8 (as HF's script and torchtune)."""
    return 32.0 if dim in (2048, 3072) else 8.0


def from_meta(params: Mapping[str, Any], default_theta: float, recorded: Rope | None = None) -> Rope:
    """From params.json. ``recorded`` are the exact numbers that an earlier conversion kept beside it."""
    theta = _base(params.get("rope_theta"), default_theta)
    kept = _settings(recorded, "rope_parameters of the record")
    flag = bool(params.get("use_scaled_rope"))
    if kept.get("rope_theta") == theta and (kept.get("rope_type") == "llama3") == flag:
        return clean(kept, theta)
    if not flag:
        return clean({}, theta)
    dim = params.get("dim")
    if not isinstance(dim, (int, float)):
        raise stop(f"use_scaled_rope needs the model's dim, which is {dim!r}.", found=dim, wanted="dim")
    return clean({"rope_type": "llama3", "factor": meta_factor(int(dim)), **META_SCALING}, theta)


def to_meta(rope: Rope, dim: int) -> dict[str, Any]:
    """For params.json.

    Raises:
        ConvertError: The scaling is not what the flag stands for.
    """
    if rope["rope_type"] == "default":
        return {"rope_theta": rope["rope_theta"]}
    fits = rope["rope_type"] == "llama3" and rope["factor"] in (8.0, 32.0) and rope["factor"] == meta_factor(dim)
    # Factor 8 fits at any size: it is what Meta's code itself computes, whatever others read into the flag.
    fits = fits or (rope["rope_type"] == "llama3" and rope["factor"] == 8.0)
    if not fits:
        shown = {k: v for k, v in rope.items() if k != "rope_theta"}
        raise stop(
            f"Meta's params.json cannot hold this RoPE scaling: {shown}.",
            found=shown,
            wanted="llama3 with factor 8 (or 32 with dim 2048 or 3072)",
            hint="params.json has only the flag use_scaled_rope; convert to another layout.",
        )
    return {"rope_theta": rope["rope_theta"], "use_scaled_rope": True}


def from_scratch(config: Mapping[str, Any], default_theta: float) -> Rope:
    """From the book's dict: ``rope_base`` and ``rope_freq`` (None, or llama3 factors)."""
    theta = _base(config.get("rope_base"), default_theta)
    stated = config.get("rope_freq")
    freq = _settings(config.get("rope_scaling") if stated is None else stated, "rope_freq")
    if not freq:
        return clean({}, theta)
    kind = freq.get("rope_type", "llama3")
    return clean({**freq, "rope_type": kind}, theta, context=config.get("context_length"))


def to_scratch(rope: Rope, *, reference: bool = False) -> dict[str, Any]:
    """For the book's dict.

    Raises:
        ConvertError: The book's class has no such scaling.
    """
    out: dict[str, Any] = {"rope_base": rope["rope_theta"]}
    if rope["rope_type"] == "default":
        return {**out, "rope_freq": None}
    if rope["rope_type"] != "llama3":
        if reference:
            return {**out, "rope_freq": {k: v for k, v in rope.items() if k != "rope_theta"}}
        raise stop(
            f"the book's class has no {rope['rope_type']!r} RoPE scaling, only llama3's.",
            found=rope["rope_type"],
            wanted="llama3",
            hint="--allow-reference writes it for our own reference class.",
        )
    return {
        **out,
        "rope_freq": {
            "factor": rope["factor"],
            "low_freq_factor": rope["low_freq_factor"],
            "high_freq_factor": rope["high_freq_factor"],
            "original_context_length": rope["original_max_position_embeddings"],
        },
    }


def from_gguf(raw: Mapping[str, Any]) -> Rope:
    """RoPE keys of a GGUF file, not yet cleaned; llama3 scaling lies in a tensor and is added by the file's reader."""
    arch = raw.get("general.architecture", "")

    def key(name: str) -> Any:
        return raw.get(f"{arch}.rope.{name}")

    out: Rope = {"rope_theta": key("freq_base")}
    kind, factor = key("scaling.type") or "none", key("scaling.factor")
    factor = key("scale_linear") if factor is None else factor
    if kind == "yarn":
        out |= {"rope_type": kind, "factor": factor, "original_context_length": key("scaling.original_context_length")}
        fields = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        out |= {field: key(f"scaling.yarn_{word}") for field, word in fields.items()}
        usual = yarn_amplitude(factor) if isinstance(factor, (int, float)) else None
        stated = out["attention_factor"]
        if usual is not None and isinstance(stated, float) and math.isclose(stated, usual, rel_tol=1e-6):
            out["attention_factor"] = usual  # of which the file has the float32
        return out
    if kind not in ("none", "linear"):
        return {**out, "rope_type": kind}
    return {**out, "rope_type": "linear", "factor": factor} if factor not in (None, 0, 1, 1.0) else out


def to_gguf(rope: Rope, arch: str) -> dict[str, str | int | float]:
    """Scaling as GGUF keys; llama3's is a tensor and has none.

    llama.cpp computes YaRN's attention factor from the factor and takes 32 and 1 for its betas, whatever the keys for
    them say (facts: gguf.md section 4); the keys are written for other readers.

    Raises:
        ConvertError: llama.cpp cannot be told these settings.
    """
    head = f"{arch}.rope.scaling."
    if rope["rope_type"] == "linear":
        return {f"{head}type": "linear", f"{head}factor": rope["factor"]}
    if rope["rope_type"] != "yarn":
        return {}
    usual = {"attention_factor": yarn_amplitude(rope["factor"]), "beta_fast": 32.0, "beta_slow": 1.0}
    other = {k: rope[k] for k, v in usual.items() if not math.isclose(rope[k], v, rel_tol=1e-6)}
    if other:
        raise stop(
            f"llama.cpp computes YaRN's numbers itself and cannot be told these: {other}.",
            found=other,
            wanted={k: usual[k] for k in other},
        )
    return {
        f"{head}type": "yarn",
        f"{head}factor": rope["factor"],
        f"{head}original_context_length": rope["original_max_position_embeddings"],
        f"{head}yarn_attn_factor": rope["attention_factor"],
        f"{head}yarn_beta_fast": rope["beta_fast"],
        f"{head}yarn_beta_slow": rope["beta_slow"],
    }


def divisors(rope: Rope, head_dim: int) -> list[float]:
    """llama3 and proportional RoPE as GGUF keeps them: what each base frequency is divided by, ``head_dim / 2``."""
    if rope["rope_type"] == "proportional":
        turning = turning_pairs(rope, head_dim)
        return [1.0] * turning + [STANDING] * (head_dim // 2 - turning)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope["original_max_position_embeddings"]
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (i / head_dim)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return out


def inverse_frequencies(rope: Rope, head_dim: int) -> list[float]:
    """The rotary frequencies of one head, scaling included (float64, ``head_dim / 2`` values)."""
    base = [rope["rope_theta"] ** (-i / head_dim) for i in range(0, head_dim, 2)]
    if rope["rope_type"] == "linear":
        return [f / rope["factor"] for f in base]
    if rope["rope_type"] == "llama3":
        return [f / d for f, d in zip(base, divisors(rope, head_dim), strict=True)]
    if rope["rope_type"] == "yarn":
        return [f * (1 - s) + f / rope["factor"] * s for f, s in zip(base, _yarn_ramp(rope, head_dim), strict=True)]
    if rope["rope_type"] == "proportional":
        turning = turning_pairs(rope, head_dim)
        return base[:turning] + [0.0] * (len(base) - turning)
    return base


def turning_pairs(rope: Rope, head_dim: int) -> int:
    """How many pairs of a head a proportional RoPE turns."""
    return int(rope["partial_rotary_factor"] * head_dim // 2)


def _yarn_ramp(rope: Rope, head_dim: int) -> list[float]:
    """How much of the factor each pair takes: from 0 where a pair turns fast to 1 where it turns slowly."""

    def dimension(rotations: float) -> float:
        periods = rope["original_max_position_embeddings"] / (rotations * 2 * math.pi)
        return head_dim * math.log(periods) / (2 * math.log(rope["rope_theta"]))

    low = max(math.floor(dimension(rope["beta_fast"])), 0)
    high = min(math.ceil(dimension(rope["beta_slow"])), head_dim - 1)
    width = high - low or 0.001
    return [min(max((i - low) / width, 0.0), 1.0) for i in range(head_dim // 2)]
