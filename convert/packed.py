"""Recognises weights that somebody has quantised already, by tensor names, types and config, and says what to do.

Their numbers are packed integers with tables beside them; read as plain numbers they would give a wrong model without
an error. What is dequantised here: FP8 with scales (:mod:`convert.float8`) and GGUF's block types.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from convert.errors import ConvertError, Problem
from convert.formats.spec import TensorSpec

_LOAD = "transformers.AutoModelForCausalLM.from_pretrained(folder, dtype='bfloat16'{more}){then}"
_INSTEAD = "or take the repository of the unquantised model"


@dataclass(frozen=True, slots=True)
class Scheme:
    """A way of packing weights.

    Attributes:
        name: What people call it.
        methods: What ``quantization_config`` calls it.
        cure: What to do.
    """

    name: str
    methods: tuple[str, ...]
    cure: str


def _load(more: str = "", then: str = "", *, package: str = "") -> str:
    load = _LOAD.format(more=more, then=then)
    with_ = f" (with {package} installed)" if package else ""
    return f"Load it with {load}{with_}, save_pretrained() that and convert it; {_INSTEAD}."


_ONLY = f"Its values cannot be brought back by loading alone: t{_INSTEAD[4:]}."

SCHEMES = {
    s.name: s
    for s in (
        Scheme(
            "bitsandbytes 4-bit",
            ("bitsandbytes", "bitsandbytes_4bit"),
            _load(then=".dequantize()", package="bitsandbytes"),
        ),
        Scheme("bitsandbytes int8", ("bitsandbytes_8bit",), _load(then=".dequantize()", package="bitsandbytes")),
        Scheme("GPTQ", ("gptq",), _load(then=".dequantize()", package="gptqmodel")),
        Scheme("AWQ", ("awq",), _load(then=".dequantize()", package="gptqmodel or autoawq")),
        Scheme("HQQ", ("hqq",), _load(then=".dequantize()", package="hqq")),
        Scheme("MXFP4", ("mxfp4",), _load(", quantization_config=transformers.Mxfp4Config(dequantize=True)")),
        Scheme(
            "compressed-tensors with integers",
            ("compressed-tensors", "compressed_tensors", "sparseml"),
            _load(
                ", quantization_config=transformers.CompressedTensorsConfig(run_compressed=False)",
                package="compressed-tensors",
            ),
        ),
        Scheme("NVFP4", ("modelopt", "nvfp4"), _ONLY),
        Scheme("Quanto", ("quanto",), _load(then=".dequantize()", package="optimum-quanto")),
        Scheme("EETQ", ("eetq",), _ONLY),
        Scheme("AQLM", ("aqlm",), _ONLY),
        Scheme("VPTQ", ("vptq",), _ONLY),
        Scheme("SpQR", ("spqr",), _ONLY),
        Scheme("BitNet", ("bitnet",), _ONLY),
        Scheme("torchao", ("torchao",), _load(then=".dequantize()", package="torchao")),
        Scheme("MLX", ("mlx",), f"Write it plain with `mlx_lm.convert --dequantize`, and convert that; {_INSTEAD}."),
        Scheme("FP8", ("fp8", "fbgemm_fp8"), _load(then=".dequantize()")),
    )
}

#: Endings of tensor names that nothing but packed weights have, most telling first.
ENDINGS = {
    ".quant_state.bitsandbytes__nf4": "bitsandbytes 4-bit",
    ".quant_state.bitsandbytes__fp4": "bitsandbytes 4-bit",
    ".absmax": "bitsandbytes 4-bit",
    ".quant_map": "bitsandbytes 4-bit",
    ".nested_absmax": "bitsandbytes 4-bit",
    ".nested_quant_map": "bitsandbytes 4-bit",
    ".SCB": "bitsandbytes int8",
    ".weight_format": "bitsandbytes int8",
    ".g_idx": "GPTQ",
    ".W_q": "HQQ",
    ".weight_packed": "compressed-tensors with integers",
    ".weight_global_scale": "NVFP4",
    ".weight_scale_2": "NVFP4",
    ".weight_scales": "EETQ",
    ".weight._data": "Quanto",
    ".weight._scale": "Quanto",
    ".codebooks": "AQLM",
    ".centroids": "VPTQ",
    ".dense_weights": "SpQR",
    "_proj_blocks": "MXFP4",
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".weight_zero_point": "compressed-tensors with integers",
    ".qscale_weight": "FP8",
    ".weight_scale_inv": "FP8",
    ".weight_scale": "FP8",
}
#: Methods that may mean FP8; whether they do stands in the tensors, and for some in the config.
_FLOAT8_METHODS = frozenset({"fp8", "fbgemm_fp8", "modelopt", "quark", "compressed-tensors", "compressed_tensors"})


def is_float8_scheme(declared: Mapping[str, Any]) -> bool:
    """Whether a ``quantization_config`` may be one of FP8 weights, and of nothing else."""
    method = str(declared.get("quant_method", "fp8")).lower()
    if method not in _FLOAT8_METHODS:
        return False
    groups = declared.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping) and (
            weights.get("type", "float") != "float" or weights.get("num_bits", 8) != 8
        ):
            return False
    return True


def refuse_packed(tensors: Collection[str] | Mapping[str, list[TensorSpec]], config: Mapping[str, Any] | None) -> None:
    """Stop where weights are packed, before any work.

    Args:
        tensors: Tensor names, or tensors by name, whose types tell more.
        config: The config as its file holds it.

    Raises:
        ConvertError: They are; with the scheme's name, what tells it, and what to do.
    """
    name, word = _by_tensors(tensors)
    declared = _declared(config)
    if name is None and declared is None:
        return
    method = _method(declared) if declared is not None else None
    seen = SCHEMES.get(word or "")
    scheme = seen if seen is not None and word != "FP8" else _by_method(method, declared) or seen
    hint = scheme.cure if scheme else _load()
    if word == "GPTQ or AWQ" and scheme is None:
        hint = SCHEMES["GPTQ"].cure
    if name is None and not _packed_types(tensors):
        hint = (
            "Its tensors look plain: if they were dequantised already, take quantization_config out of the config. "
            f"Otherwise: {hint}"
        )
    what = scheme.name if scheme else word or "in a way unknown here"
    if method and method.lower() != what.lower():
        what += f", quant_method {method!r}"
    raise ConvertError(
        Problem(
            "quantized_source",
            f"this checkpoint is already quantised ({what}); its numbers are packed"
            + (f", as {name!r} shows." if name else ", as its config says."),
            tensor=name,
            found=what,
            wanted="plain floating-point weights, FP8 with scales, or GGUF",
            hint=hint,
        )
    )


def _declared(config: Mapping[str, Any] | None) -> Any:
    config = config or {}
    found = config.get("quantization_config") or config.get("quantization_args")
    if found is None and isinstance(config.get("quantization"), Mapping):  # MLX
        return {"quant_method": "mlx"} | dict(config["quantization"])
    if isinstance(found, Mapping) and "quant_method" not in found and {"group_size", "bits"} <= set(found):
        return {"quant_method": "mlx"} | dict(found)  # MLX writes both keys
    return found


def _method(declared: Any) -> str | None:
    return str(declared["quant_method"]) if isinstance(declared, Mapping) and declared.get("quant_method") else None


def _by_method(method: str | None, declared: Any) -> Scheme | None:
    if method is None:
        return None
    if method == "bitsandbytes" and isinstance(declared, Mapping) and declared.get("load_in_8bit"):
        return SCHEMES["bitsandbytes int8"]
    return next((s for s in SCHEMES.values() if method.lower() in s.methods), None)


def _by_tensors(tensors: Collection[str] | Mapping[str, list[TensorSpec]]) -> tuple[str | None, str | None]:
    """The first tensor that tells a scheme, and the scheme."""
    hits: dict[str, str] = {}
    last = tuple(ENDINGS)
    for name in tensors:
        if name.endswith(last):
            hits.setdefault(next(e for e in ENDINGS if name.endswith(e)), name)
    ending = next((e for e in ENDINGS if e in hits), None)
    if ending is None:
        return _mlx(tensors)
    name, word = hits[ending], ENDINGS[ending]
    if word == "GPTQ or AWQ":
        # Without an order of columns it is AWQ, but old GPTQ files lack one too: their packed dimensions differ.
        return name, _gptq_or_awq(tensors, name) or word
    if word == "FP8" and isinstance(tensors, Mapping):
        base = tensors.get(name.removesuffix("_inv").removesuffix("_scale"))
        kind = base[0].dtype if base else None
        word = {"I8": "compressed-tensors with integers", "U8": "BitNet"}.get(kind or "", word)
    return name, word


def _gptq_or_awq(tensors: Collection[str] | Mapping[str, list[TensorSpec]], name: str) -> str | None:
    """GPTQ packs 32-bit words along the inputs, AWQ along the outputs; the scales are as wide as the outputs."""
    if not isinstance(tensors, Mapping):
        return None
    stem = name.rpartition(".")[0]
    packed, scales = tensors.get(f"{stem}.qweight"), tensors.get(f"{stem}.scales")
    if not packed or not scales or len(packed[0].shape) != 2 or len(scales[0].shape) != 2:
        return None
    return "GPTQ" if packed[0].shape[1] == scales[0].shape[1] else "AWQ"


def _mlx(tensors: Collection[str] | Mapping[str, list[TensorSpec]]) -> tuple[str | None, str | None]:
    """MLX keeps ``x.weight`` of 32-bit words beside ``x.scales`` and ``x.biases``."""
    for name in tensors:
        if name.endswith(".scales") and name.removesuffix("scales") + "biases" in tensors:
            return name, "MLX"
    return None, None


def _packed_types(tensors: Collection[str] | Mapping[str, list[TensorSpec]]) -> bool:
    """Whether matrices are integers or FP8."""
    if not isinstance(tensors, Mapping):
        return False
    return any(
        s[0].dtype in ("U8", "I8", "I32", "U32", "F8_E4M3", "F8_E5M2") and len(s[0].shape) > 1 for s in tensors.values()
    )
