"""The model card of an output that is uploaded: what it is, from what, how it was converted, and how it was checked.

Everything in it comes from the output's own record; nothing is said that no file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.decisions import lines as decision_lines
from convert.model_card import many, one, read_card
from convert.record import entries
from convert.report import human_bytes, printable

_LAYOUTS = {
    "hf": "Hugging Face (transformers)",
    "meta": "Meta's original",
    "scratch": 'the module names of "Build a Large Language Model (From Scratch)"',
    "gguf": "GGUF",
}


def card(record: Mapping[str, Any], files: list[Path], *, verified: Mapping[str, Any] | None, base: Path | None) -> str:
    """The card's text.

    Args:
        record: What the conversion left (``conversion.json``).
        files: What is uploaded.
        verified: What ``verify`` said (its ``as_json``), if it was run.
        base: The source's folder, whose card tells the licence.
    """
    notes = record.get("notes")
    source, target = _object(record.get("source")), _object(record.get("target"))
    origin = _object(source.get("hub"))
    lines = [
        *_front(record, target, origin, base),
        "",
        f"# {_title(origin, target)}",
        "",
        _what(record, source, target, origin),
        "",
        "## How it was converted",
        "",
        f"* With {record.get('tool')}: `convert {source.get('layout')}-to-{target.get('layout')}`"
        + (f", type {target.get('dtype')}" if target.get("dtype") not in (None, "keep") else "")
        + ".",
        *(f"* {line}" for line in decision_lines(_object(record.get("decisions")))),
        *(f"* {note}" for note in (notes if isinstance(notes, list) else ()) if isinstance(note, str)),
        "",
        "## How it was checked",
        "",
        "* After writing, sizes, headers and sampled blocks (with `--check full`, every byte) were compared with "
        "what they were made from.",
        _verified(verified),
        "* `convert check` compares these files with `conversion.json`, and with the source if it is given.",
        "",
        "| file | bytes | SHA-256 |",
        "| --- | ---: | --- |",
        *(_row(item, files) for item in entries(target.get("files"))),
        "",
    ]
    return printable("\n".join(lines))  # a record may come from anybody, and the card is shown


def _front(
    record: Mapping[str, Any], target: Mapping[str, Any], origin: Mapping[str, Any], base: Path | None
) -> list[str]:
    """YAML that the Hub reads."""
    own = read_card(base) if base is not None and base.is_dir() else {}
    out = ["---"]
    for key in ("license", "license_name", "license_link"):
        if found := one(own, key):
            out.append(f"{key}: {found}")
    for key in ("language",):
        if found_many := many(own, key):
            out += [f"{key}:", *(f"- {item}" for item in found_many)]
    if origin.get("repo"):
        out += [f"base_model: {origin['repo']}"]
        if target.get("layout") == "gguf":
            out += ["base_model_relation: quantized"]
    library = {"hf": "transformers", "gguf": "gguf"}.get(str(target.get("layout")))
    out += [f"library_name: {library}"] if library else []
    out += ["tags:", f"- {record.get('family')}", "- ckpt-convert", "---"]
    return out


def _title(origin: Mapping[str, Any], target: Mapping[str, Any]) -> str:
    name = str(origin.get("repo") or "").rpartition("/")[2]
    layout = {"hf": "Hugging Face", "meta": "Meta", "scratch": "from scratch", "gguf": "GGUF"}.get(
        str(target.get("layout")), str(target.get("layout"))
    )
    return f"{name}, {layout}" if name else f"Converted weights, {layout}"


def _what(
    record: Mapping[str, Any], source: Mapping[str, Any], target: Mapping[str, Any], origin: Mapping[str, Any]
) -> str:
    files = entries(source.get("files"))
    size = human_bytes(sum(n for f in files if isinstance(n := f.get("bytes"), int)))
    count = f"{len(files)} file{'' if len(files) == 1 else 's'}"
    layout = _LAYOUTS.get(str(target.get("layout")), str(target.get("layout")))
    where = (
        f"[{origin['repo']}]({_endpoint()}/{origin['repo']}/tree/{origin.get('commit')}) "
        f"(commit `{str(origin.get('commit'))[:12]}`)"
        if origin.get("repo")
        else "a local checkpoint"
    )
    return (
        f"The same weights as {where}, a model of the {record.get('family')} family, in the layout of {layout}. "
        f"The source had the {source.get('layout')} layout ({source.get('format')}, {count}, {size})."
    )


def _verified(verified: Mapping[str, Any] | None) -> str:
    if not verified:
        return "* It was not run as a model at the time of the upload; `convert verify SOURCE OUTPUT` does that."
    said = f"**{verified.get('verdict')}**. {verified.get('message', '')}"
    return f"* Run against its source (`convert verify`): {said}".rstrip()


def _row(item: Mapping[str, Any], files: list[Path]) -> str:
    from convert.hashing import hash_file

    path = next((f for f in files if f.name == item.get("name")), None)
    digest = item.get("sha256") or (hash_file(path) if path is not None else "")
    size = item.get("bytes")
    return f"| {item.get('name')} | {f'{size:,}' if isinstance(size, int) else ''} | `{digest}` |"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
