"""What a checkpoint is: layout, sizes, types, parameters, RoPE, tying, memory per token; from headers.

Reads headers, at most 8 MB of the embedding and of the head where nothing else tells whether they are one, and at most
32 MB of the heads of Q and K, whose numbers tell the order of their rows in a trained model.
Findings are counted here and listed by :mod:`convert.validate`; nothing is printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import config as configs
from convert import tying
from convert.checkpoint import Checkpoint, open_checkpoint
from convert.errors import ConvertError
from convert.hub.place import place
from convert.inspection import Inspection, Stored
from convert.layout import Dims, Key
from convert.locate import RECORD_NAME
from convert.opening import shapes_of
from convert.record import entries
from convert.report import fold_names
from convert.zero_tails import zero_tail_notes

if TYPE_CHECKING:
    from convert.match import Match

#: What people call the roles of a table's rows.
_COMPONENTS = {"attn": "attention", "norm": "norms", "output": "head"}
#: Config keys that do not tell one published size from another (head counts are compared by the table's dims).
_NOT_SIZES = frozenset({"max_position_embeddings", "rms_norm_eps", "sliding_window", "head_dim", "num_key_value_heads"})


def inspect(src: str | Path | Checkpoint, **options: Any) -> Inspection:
    """Say what a checkpoint is.

    Args:
        src: A folder, a file, the name of a repository on the Hub (of which headers are read, no more), or an opened
            checkpoint.
        **options: As :func:`convert.open_checkpoint`.

    Raises:
        UsageError: There is nothing.
        ConvertError: It cannot be opened as a checkpoint at all; findings about single tensors are only counted.
    """
    if isinstance(src, Checkpoint):
        return _inspect(src)
    at = place(src, layout=options.get("layout"), way="glance")
    with open_checkpoint(at, **options) as checkpoint:
        checkpoint.only_samples = True
        return _inspect(checkpoint)


def _inspect(checkpoint: Checkpoint) -> Inspection:
    matched, problems = _match(checkpoint)
    tensors = _stored(checkpoint)
    roles, dropped = _roles(matched)
    components: dict[str, int] = dict.fromkeys(roles.values(), 0)  # in the table's order
    for tensor in tensors:
        if tensor.name not in dropped:
            role = roles.get(tensor.name, "other")
            components[role] = components.get(role, 0) + math.prod(tensor.shape)
    tied, evidence = _tied(matched)
    stored = sum(components.values())
    return Inspection(
        path=checkpoint.path,
        format=checkpoint.format,
        layout=checkpoint.layout,
        family=checkpoint.family,
        size=size_name(checkpoint),
        dtypes=_dtypes(tensors),
        pairing=_pairing(checkpoint, matched),
        components={role: count for role, count in components.items() if count},
        parameters=stored - (_head_parameters(matched) if tied else 0),
        parameters_stored=stored,
        tied=tied,
        tied_evidence=evidence,
        rope=_rope(checkpoint.config),
        numbers=_numbers(checkpoint),
        tensors=tensors,
        files=[(f.name, f.stat().st_size) for f in checkpoint.files],
        problems=problems,
        notes=[
            *zero_tail_notes(checkpoint),
            *checkpoint.notes,
            *(matched.notes if matched else []),
            *_dropped(dropped),
        ],
        record=_record(checkpoint),
        title=checkpoint.title,
        origin=_hub(checkpoint),
    )


def _hub(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where on the Hub it lies, with what the Hub says of its files; empty for a path."""
    return {**checkpoint.origin, "files": checkpoint.remote_files} if checkpoint.origin else {}


def _match(checkpoint: Checkpoint) -> tuple[Match | None, int]:
    try:
        matched = checkpoint.match
    except ConvertError as error:  # the config lacks what the table's shapes need
        return None, len(error.problems)
    return matched, len(matched.problems)


def _stored(checkpoint: Checkpoint) -> list[Stored]:
    full = shapes_of(checkpoint.table, checkpoint.layout, checkpoint.tensors)
    replicated = {name for name, specs in checkpoint.tensors.items() if len(specs) > 1 and full[name] == specs[0].shape}
    return [
        Stored(
            name,
            specs[0].dtype,
            full[name],
            specs[0].nbytes if name in replicated else sum(s.nbytes for s in specs),
            tuple(dict.fromkeys(s.file.name for s in specs)),
        )
        for name, specs in checkpoint.tensors.items()
    ]


def _dtypes(tensors: list[Stored]) -> dict[str, int]:
    count: dict[str, int] = {}
    for tensor in tensors:
        count[tensor.dtype] = count.get(tensor.dtype, 0) + tensor.nbytes
    return dict(sorted(count.items(), key=lambda item: -item[1]))


def _roles(matched: Match | None) -> tuple[dict[str, str], dict[str, str]]:
    """Component of each stored name, and the reason of each dropped one."""
    if matched is None:
        return {}, {}
    rows = matched.checkpoint.table.rows
    roles = {}
    for slot in matched.slots.values():
        role = rows[slot.keys[0][0]].role
        roles[slot.name] = _COMPONENTS.get(role, role)
    return roles, dict(matched.ignored)


def _tied(matched: Match | None) -> tuple[bool | None, str]:
    pair = matched.tied_pair() if matched else None
    if matched is None or pair is None:
        return None, "the tensors do not fit the config" if matched is None else "the family has no head that could be"
    head, base = (matched.specs.get(key) for key in pair)
    names = [_name(matched, key) for key in pair]
    tensors = matched.checkpoint.tensors
    if head is None or base is None:
        absent = [n for n, s in zip(names, (head, base), strict=True) if s is None]
        unfit = [n for n in absent if n in tensors or any(p.tensor == n for p in matched.problems)]
        if unfit:
            return None, f"{unfit[0]!r} is missing or does not fit"
        return True, f"{absent[0]!r} is not stored"
    if head is base:
        return True, f"only {names[0]!r} is stored"
    if len(head) == len(base) == 1:
        known = tying.quick(head[0], base[0])
        if known is True:
            return True, "both are one storage"
        if known is False:
            return False, "types, shapes or checksums differ"
        if head[0].crc is not None and head[0].crc == base[0].crc:
            return True, "both are stored, with equal checksums"
    if matched.tied(sampled=True):
        return True, "both are stored; sampled rows are equal"
    return False, "sampled rows differ"


def _name(matched: Match, key: Key) -> str:
    return next((s.name for s in matched.slots.values() if key in s.keys), key[0])


def _head_parameters(matched: Match | None) -> int:
    """Parameters that a tied model stores twice."""
    pair = matched.tied_pair() if matched else None
    if matched is None or pair is None:
        return 0
    head, base = (matched.logical.get(key) for key in pair)
    return 0 if head is None or base is None or head is base else math.prod(head.shape)


def size_name(checkpoint: Checkpoint) -> str | None:
    """The published sizes whose numbers and RoPE settings this config has; a longer context does not matter."""
    table, config = checkpoint.table, checkpoint.config
    sizes = [k for k in table.config if k not in _NOT_SIZES]
    equal: list[str] = []
    shaped: list[str] = []
    for name in table.sizes:
        published = configs.published(table, name)
        ours, theirs = Dims(table, config), Dims(table, published)
        if all(ours.get(k) == theirs.get(k) for k in (*sizes, "hd", "K")):
            same_rope = published.get("rope_parameters") == config.get("rope_parameters")
            (equal if same_rope else shaped).append(name)
    if equal:
        return " or ".join(equal)
    return f"the shape of {' or '.join(shaped)} with other RoPE settings" if shaped else None


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, and how much of a head turns where not all of it does."""
    found = dict(config.get("rope_parameters") or {})
    partial = config.get("partial_rotary_factor")
    return found | {"partial_rotary_factor": partial} if found and partial not in (None, 1) else found


def _numbers(checkpoint: Checkpoint) -> dict[str, Any]:
    """The sizes that a reader asks for; the table's dims, else the config's keys of the same meaning."""
    dims = checkpoint.dims
    names: Mapping[str, str] = {
        "n_layers": "L",
        "n_heads": "H",
        "n_kv_heads": "K",
        "head_dim": "hd",
        "vocab_size": "V",
        "width": "D",
        "ff_width": "F",
        "context": "max_position_embeddings",
    }
    found = {key: dims.get(name) for key, name in names.items()}
    keys = checkpoint.table.rows.get("block.attn.k")
    if keys is not None and keys.when and found["n_layers"] is not None:  # other layers keep no keys
        layers = range(dims.n_layers)
        found["kv_layers"] = sum(all(dims.value(w, layer) for w in keys.when) for layer in layers)
    return {k: int(v) if isinstance(v, (int, float)) else None for k, v in found.items()}


def _pairing(checkpoint: Checkpoint, matched: Match | None) -> str:
    if not checkpoint.table.has_rope:
        return "no rotary pairs"
    meaning = {"half": "pairs (i, i + d/2)", "interleaved": "pairs (2i, 2i + 1)"}[checkpoint.pairing]
    said = checkpoint.metadata.get("convert.qk_layout") or (checkpoint.record.get("target") or {}).get("qk_layout")
    if checkpoint.options.qk_layout:
        why = "as --qk-layout says"
    elif said == checkpoint.pairing:
        why = "as the conversion that wrote the file recorded"
    elif said:
        why = f"by the names; but the file's record says {said}"
    else:
        why = "by the names"
    line = f"{checkpoint.pairing} order, {meaning}; {why}"
    if matched is None:
        return line
    if not checkpoint.pool.local:
        return f"{line}; the numbers were not read"
    from convert.qk_probe import SAMPLE_BYTES, probe

    found = probe(checkpoint, max_bytes=SAMPLE_BYTES)
    but = "BUT " if found.agrees is False else ""
    return f"{line}; {but}{found.words()}" + ("; `convert diagnose` tells more" if but else "")


def _dropped(dropped: Mapping[str, str]) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for name, reason in dropped.items():
        reasons.setdefault(reason, []).append(name)
    return [f"not weights: {', '.join(fold_names(names))} ({reason})" for reason, names in reasons.items()]


def _record(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What an earlier conversion left, from the record beside the weights or from the weights' own header; short."""
    record, own = checkpoint.record, checkpoint.metadata
    source, target = record.get("source"), record.get("target")
    if isinstance(source, dict) and isinstance(target, dict):
        files = entries(source.get("files"))
        return {
            "tool": str(record.get("tool")),
            "source": _origin(source.get("layout"), source.get("format"), [f.get("bytes") for f in files]),
            "dtype": target.get("dtype"),
            "decisions": _object(record.get("decisions")),
            "hashes": _hashed(target),
        }
    if "convert.version" not in own:
        return None
    return {
        "tool": f"ckpt-convert {str(own['convert.version']).removeprefix('ckpt-convert ')}",
        "source": _origin(own.get("convert.source.layout"), own.get("convert.source.format"), _sizes(own)),
        "dtype": None,
        "decisions": _object(own.get("convert.decisions")),
        "hashes": _hashed(_beside(checkpoint).get("target")),
    }


def _beside(checkpoint: Checkpoint) -> dict[str, Any]:
    """The record beside a file that has one inside, too."""
    for file in checkpoint.files[:1]:
        place = file.with_name(f"{file.name}.{RECORD_NAME}")
        if place.is_file():
            return _object(configs.read_json(place))
    return {}


def _hashed(target: Any) -> str | None:
    written = entries(target.get("files")) if isinstance(target, Mapping) else []
    if any("sha256" in f for f in written):
        return "full"
    return "headers" if any("header_sha256" in f for f in written) else None


def _origin(layout: Any, format: Any, sizes: list[Any]) -> dict[str, Any]:
    known = [n for n in sizes if isinstance(n, int)]
    return {"layout": layout, "format": format, "files": len(sizes), "bytes": sum(known)}


def _sizes(own: Mapping[str, Any]) -> list[Any]:
    found = own.get("convert.source.bytes")
    return [int(n) if str(n).isdecimal() else None for n in found] if isinstance(found, (list, tuple)) else []


def _object(value: Any) -> dict[str, Any]:
    """A JSON object, be it as text; anything else counts as none."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return {}
    return value if isinstance(value, dict) else {}
