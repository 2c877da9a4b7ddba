"""What a GGUF file that we wrote says beyond GGUF's own keys, read back: the hub config, RoPE settings, generation.

GGUF's own keys win over the record: other tools edit those. A file from elsewhere has no record, and llama3 scaling
then follows from its tensor of divisors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from convert import config as configs
from convert.errors import FormatError, Problem
from convert.formats.spec import TensorSpec

CONFIG_KEY = "convert.config"
ROPE_KEY = "convert.rope_parameters"
GENERATION_KEY = "convert.generation_config"


def record_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The record in a header's key-values, in the form of ``conversion.json``; empty for a file from elsewhere."""
    config = _object(metadata, CONFIG_KEY)
    rope = _object(metadata, ROPE_KEY)
    if rope:
        config["rope_parameters"] = rope
    out: dict[str, Any] = {"config": config} if config else {}
    generation = _object(metadata, GENERATION_KEY)
    return out | ({"generation_config": generation} if generation else {})


def _object(metadata: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A JSON object kept as a text; one that is damaged counts as absent, since it is only a record."""
    text = metadata.get(key)
    try:
        value = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def with_scaling(
    hub: dict[str, Any], tensors: Mapping[str, list[TensorSpec]], record: Mapping[str, Any]
) -> dict[str, Any]:
    """The hub config with llama3 scaling, which lies in a tensor of divisors (facts: gguf.md section 3).

    Raises:
        FormatError: The tensor is no vector of float32.
        ConvertError: No llama3 scaling gives these divisors.
    """
    from convert import rope_divisors

    spec = next(iter(tensors.get("rope_freqs.weight", ())), None)
    if spec is None or hub.get("rope_type") not in ("default", "proportional"):
        return hub
    if spec.dtype != "F32" or len(spec.shape) != 1:
        raise FormatError(
            Problem(
                "rope",
                f"{spec.name!r} is {spec.dtype} {list(spec.shape)}, not a vector of F32.",
                tensor=spec.name,
                file=str(spec.file),
            )
        )
    with spec.file.open("rb") as file:
        file.seek(spec.offset)
        raw = file.read(spec.nbytes)
    import numpy as np

    values = np.frombuffer(raw, "<f4").astype(float).tolist()
    if hub["rope_type"] == "default" and all(v == 1.0 for v in values):
        return hub  # divides nothing: a file that says so is not scaled
    if hub["rope_type"] == "proportional":
        settings = hub["rope_parameters"]
        kind = next(iter(settings))
        return configs.with_rope(hub, {**settings, kind: rope_divisors.proportion(values, settings[kind])})
    recorded = record.get("config", {}).get("rope_parameters")
    return configs.with_rope(hub, rope_divisors.from_divisors(values, hub["rope_theta"], 2 * len(values), recorded))
