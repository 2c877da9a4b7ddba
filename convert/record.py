"""What a conversion leaves beside its output: ``conversion.json``, the decisions that no format has a place for.

It is planned with everything else (:func:`record`) and completed when the files are written (:func:`seal`): what they
hash to is known only then. Equal conversions leave equal records: no dates, no places. :mod:`convert.check` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import config as configs
from convert.hashing import Hashes, hash_file, head_hash, header_hash
from convert.locate import RECORD_NAME
from convert.normalisers import text_config

if TYPE_CHECKING:
    from convert.checkpoint import Checkpoint
    from convert.plan import ConversionPlan

SCHEMA = "convert.record/1"
#: In place of hashes until the files are written, so that the record's size is planned, too.
_PENDING = {"head_sha256": "0" * 64, "header_sha256": "0" * 64}
#: What the record says in other places, or what names a place on somebody's disk.
_NOT_KEPT = frozenset(
    {"target", "gguf", "tokenizer_path", "config", "names", "table", "layout", "family", "follow_links"}
)


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
            "files": [_source_file(f, source.format) for f in source.files],
            **({"hub": dict(source.origin)} if source.origin else {}),
            "options": source_options(source),
            **({"names": dict(source.table.names)} if source.table.names_file and source.table.names else {}),
        },
        "target": {
            "layout": plan.request.target,
            "qk_layout": plan.table.convention_of(plan.request.target, "rope"),
            "dtype": plan.request.gguf.type if plan.single_file else plan.request.dtype or "keep",
            "tied": plan.tied,
            **({"names": dict(plan.table.names)} if plan.table.names and plan.request.target == "scratch" else {}),
            "options": request_options(plan),
            "files": [{"name": f.name, "bytes": f.size, "format": f.format, **_PENDING} for f in plan.files],
            "beside": _beside(plan),
        },
        "decisions": plan.decisions,
        "notes": plan.notes,
        **({"repair": plan.repair} if plan.repair else {}),
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


def _source_file(path: Path, format: str) -> dict[str, Any]:
    size = path.stat().st_size
    return {"name": path.name, "bytes": size, "head_sha256": head_hash(path), **_header(path, format)}


def _header(path: Path, format: str, data_start: int | None = None) -> dict[str, str]:
    found = header_hash(path, format, data_start=data_start)
    return {} if found is None else {"header_sha256": found}


def source_options(source: Checkpoint) -> dict[str, Any]:
    """What was said of the source and is needed to open it alike; a config that was given is the record's own."""
    return _said(source.options) | ({"config": True} if source.options.config is not None else {})


def request_options(plan: ConversionPlan) -> dict[str, Any]:
    """What was asked for beyond the defaults, without what names a place."""
    out = _said(plan.request)
    return out | ({"gguf": _said(plan.request.gguf)} if plan.single_file else {})


def _said(options: Any) -> dict[str, Any]:
    fresh = type(options)(**({"target": options.target} if hasattr(options, "target") else {}))
    kept = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_KEPT}
    return {k: _plain(v) for k, v in kept.items() if v != getattr(fresh, k)}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if value is None or isinstance(value, (str, bool, int, float)) else str(value)


def record_name(plan: ConversionPlan) -> str:
    """The record's file among the plan's sidecars."""
    return f"{plan.files[0].name}.{RECORD_NAME}" if plan.single_file else RECORD_NAME


def seal(
    plan: ConversionPlan, folder: Path, hashes: Hashes | None = None, *, losses: Mapping[str, int] | None = None
) -> None:
    """Complete the record among ``plan.sidecars`` with what the written files hash to.

    Args:
        plan: The plan that has been carried out but for its sidecars.
        folder: Where its weight files lie.
        hashes: Full hashes, where they were asked for.
        losses: What narrowing did to values, by kind: how many.
    """
    name = record_name(plan)
    if name not in plan.sidecars:
        return
    value = plan.sidecars[name]
    out = json.loads(value if isinstance(value, bytes) else value.read_bytes())
    for file, planned in zip(out["target"]["files"], plan.files, strict=True):
        path = folder / planned.name
        file |= {
            "head_sha256": head_hash(path),
            **_header(path, planned.format, min(planned.offsets.values(), default=None)),
        }
        file.pop("sha256", None)  # of an earlier run of the same plan
        if hashes is not None:
            file["sha256"] = hashes.outputs[planned.name]
    if losses:
        out["losses"] = dict(losses)
    for file, path in zip(out["source"]["files"], plan.source.files, strict=True):
        file.pop("sha256", None)
        if hashes is not None and path in hashes.sources:  # not of one that came from elsewhere, and not whole
            file["sha256"] = hashes.sources[path]
    out["target"]["beside"] = _beside(plan)
    plan.sidecars[name] = dump(out)


def _beside(plan: ConversionPlan) -> list[dict[str, Any]]:
    own = record_name(plan)
    return [{"name": name, **_whole(value)} for name, value in sorted(plan.sidecars.items()) if name != own]


def _whole(value: bytes | Path) -> dict[str, Any]:
    """Size and hash of a small file, of which the record keeps the full hash always."""
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return {"bytes": value.stat().st_size, "sha256": hash_file(value)}


def entries(value: Any) -> list[Mapping[str, Any]]:
    """A list of files in a record, whatever somebody made of it."""
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def compact(value: Any) -> str:
    """JSON in one line, as it is kept inside a weight file."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def dump(value: Mapping[str, Any]) -> bytes:
    """JSON as every file here is written."""
    try:
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as an escape of JSON can hold it and UTF-8 cannot
        return (json.dumps(value, indent=2) + "\n").encode()
