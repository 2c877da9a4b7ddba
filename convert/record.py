"""What a conversion leaves beside its output: ``conversion.json``, the decisions that no format has a place for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import config as configs
from convert.normalisers import text_config

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.plan import ConversionPlan

SCHEMA = "convert.record/1"
_HEADER_BYTES = 1 << 20


def record(plan: ConversionPlan) -> dict[str, Any]:
    """The record of a plan: source, decisions, and the hub config with what the target layout cannot say."""
    from convert import __version__

    source = plan.source
    return {
        "schema": SCHEMA,
        "tool": f"ckpt-convert {__version__}",
        "family": plan.table.family,
        "table": table_hash(plan.table.raw),
        "source": {
            "layout": source.layout,
            "format": source.format,
            "files": [{"name": f.name, "bytes": f.stat().st_size, "head_sha256": head_hash(f)} for f in source.files],
        },
        "target": {
            "layout": plan.request.target,
            "qk_layout": plan.table.convention_of(plan.request.target, "rope"),
            "dtype": plan.request.gguf.type if plan.single_file else plan.request.dtype or "keep",
            "tied": plan.tied,
            **({"names": dict(plan.table.names)} if plan.table.names and plan.request.target == "scratch" else {}),
            "files": [{"name": f.name, "bytes": f.size, "format": f.format} for f in plan.files],
        },
        "notes": plan.notes,
        "config": carried(plan.config, stated_keys(source)),
    }


def is_of(record: Mapping[str, Any], files: Iterable[Path]) -> bool:
    """Whether a record was written with these weight files: as many, of the same sizes.

    Names do not count, since files are renamed and copied. A record that lists no files counts as theirs.
    """
    target = record.get("target")
    listed = target.get("files") if isinstance(target, Mapping) else None
    if listed is None:
        return True
    sizes = [f.get("bytes") if isinstance(f, Mapping) else None for f in listed] if isinstance(listed, list) else [None]
    return sorted(map(str, sizes)) == sorted(str(f.stat().st_size) for f in files)


def stated_keys(source: Checkpoint) -> dict[str, Any] | None:
    """What a ``config.json`` said of the model once: the source's own, or what an earlier conversion kept of it."""
    if source.layout == "hf" and configs.layout_of(source.raw_config, [source.table]) == "hf":
        # What a multimodal model's config says around the text part is not about the tensors that are taken.
        return text_config(source.raw_config) if "text_config" in source.table.normalise else source.raw_config
    kept = source.record.get("config")
    return kept if isinstance(kept, dict) else None


def carried(hub: Mapping[str, Any], more: Any = None) -> dict[str, Any]:
    """The hub config as it is kept: RoPE in one spelling, and the source's further keys."""
    out = {k: v for k, v in (more or {}).items() if k not in ("rope_scaling", "rope_theta", "quantization_config")}
    out |= {k: v for k, v in hub.items() if k not in ("rope_theta", "rope_type")}
    return out


def table_hash(raw: Mapping[str, Any]) -> str:
    """A fingerprint of the resolved table."""
    text = json.dumps(raw, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def head_hash(path: Path) -> str:
    """SHA-256 of the first MiB, which holds the header."""
    with path.open("rb") as file:
        return hashlib.sha256(file.read(_HEADER_BYTES)).hexdigest()


def dump(value: Mapping[str, Any]) -> bytes:
    """JSON as every file here is written."""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as an escape of JSON can hold it and UTF-8 cannot
        return (json.dumps(value, indent=2) + "\n").encode()
