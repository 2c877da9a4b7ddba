"""Finding the tokenizer of a checkpoint and reading it, whatever its files are called.

The kind is decided by content: three different things are called ``tokenizer.model``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.errors import ConvertError, Problem, UsageError
from convert.tokenizer import (
    bytelevel,
    hf_checks,
    hf_json,
    json_text,
    merges_file,
    pretokenizers,
    ranks,
    sentencepiece_model,
    sidecars,
)
from convert.tokenizer.tokenizer import BYTE_LEVEL, WITHOUT, Tokenizer

#: In order of preference. ``tokenizer.json`` first: transformers takes it, and it has the tokens added later.
NAMES = ("tokenizer.json", "tokenizer.model", "*.model", "*.tiktoken", "vocab.json", "encoder.json")
_CARRIED = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    sidecars.CONFIG,
    sidecars.MAP,
    sidecars.ADDED,
    sidecars.TEMPLATE,
    sidecars.TEMPLATE_JSON,
)
_END = "<|endoftext|>"
#: Tokenizer classes whose rules are not in ``vocab.json`` and ``merges.txt``, with the rules.
_CLASSES = {None: "gpt-2", "GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}


def read_tokenizer(path: Path | str, *, pre: str | None = None) -> Tokenizer:
    """Read the tokenizer at ``path``.

    Args:
        path: A folder (Hugging Face, Meta, or any that holds one of the files), or one of the files.
        pre: The splitting rules (a name of :func:`convert.tokenizer.pretokenizers.names`), where the file does not
            hold them or they are not in the table. It wins over what was recognised.

    Raises:
        ConvertError: Nothing usable is there; says what was looked for, what is there, and why it does not do.
        UsageError: ``pre`` is not a name of the table.
    """
    path = Path(path)
    row = None if pre is None else pretokenizers.by_name(pre)
    if pre is not None and row is None:
        raise UsageError(
            Problem(
                "pre_tokenizer",
                f"--pre {pre!r} is not a known set of splitting rules.",
                found=pre,
                wanted=", ".join(pretokenizers.names()),
            )
        )
    folder = path if path.is_dir() else path.parent
    tokenizer = _read_first([path] if path.is_file() else _candidates(path), folder, pre)
    sidecars.apply(tokenizer, folder)
    if row is not None and tokenizer.kind == BYTE_LEVEL:
        tokenizer.pre = row
    return tokenizer


def find(path: Path | str) -> Path | None:
    """The file that :func:`read_tokenizer` would read first, without reading it, or None."""
    path = Path(path)
    if path.is_file():
        return path
    candidates = _candidates(path)
    return candidates[0] if candidates else None


def _candidates(folder: Path) -> list[Path]:
    places = [folder]
    if (folder / "params.json").is_file():  # Meta's download keeps one tokenizer for all sizes, a level up
        places.append(folder.parent)
    found: dict[Path, None] = {}
    for place in places:
        for name in NAMES:
            for path in sorted(place.glob(name)):
                if path.is_file():
                    found[path] = None
    return list(found)


def _read_first(candidates: list[Path], folder: Path, pre: str | None) -> Tokenizer:
    refused: list[str] = []
    for path in candidates:
        if path.stat().st_size > json_text.MAX_BYTES:
            refused.append(f"{path.name} has more bytes than any tokenizer")
            continue
        raw = path.read_bytes()
        reason = _not_a_tokenizer(raw)
        if reason is None:
            tokenizer, reason = _parse(path, raw, pre)
            if tokenizer is not None:
                return tokenizer
        refused.append(f"{path.name} {reason}")
    there = sorted(entry.name for entry in folder.iterdir())[:12] if folder.is_dir() else []
    raise ConvertError(
        Problem(
            "tokenizer_missing",
            "No usable tokenizer: " + ("; ".join(refused) if refused else f"none of its files is in {folder}") + ".",
            file=str(folder),
            found=", ".join(there) or "nothing",
            wanted=", ".join(NAMES),
            hint=f"Put a tokenizer there, or name one with --tokenizer PATH. {WITHOUT}",
        )
    )


def _not_a_tokenizer(raw: bytes) -> str | None:
    start = raw[:256].lstrip().lower()
    if not start:
        return "is empty"
    if start.startswith(b"version https://git-lfs"):
        return "is a Git LFS pointer, not the file (fetch it with `git lfs pull`)"
    if start.startswith((b"<!doctype", b"<html")):
        return "is a web page, saved in place of the file (most likely a refused download)"
    return None


def _parse(path: Path, raw: bytes, pre: str | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or None and why there is none."""
    if raw.lstrip()[:1] == b"{":
        try:
            tree = json_text.load(raw)
        except ValueError as error:
            return None, f"is not whole JSON ({error})"
        return _json(path, tree, pre)
    if ranks.is_ranks(raw):
        return ranks.parse(raw, origin=path.name, pre=pre), ""
    if sentencepiece_model.is_model(raw):
        return sentencepiece_model.parse(raw, origin=path.name), ""
    return None, "is neither JSON, nor a list of ranks, nor a SentencePiece model"


def _json(path: Path, tree: Mapping[str, Any], pre: str | None) -> tuple[Tokenizer | None, str]:
    if isinstance(tree.get("model"), Mapping):
        tokenizer = hf_json.parse(tree, origin=path.name)
        _carry(tokenizer, path.parent)
        tokenizer.files["tokenizer.json"] = path.read_bytes()
        return tokenizer, ""
    if isinstance(tree.get("vocab"), list) and isinstance(tree.get("config"), Mapping):
        return None, "is Mistral's own format (tekken), which is not read; its repository also has a tokenizer.json"
    if tree and all(isinstance(index, int) for index in tree.values()):
        # OpenAI's names for the same two files are encoder.json and vocab.bpe.
        merges = path.parent / ("vocab.bpe" if path.name == "encoder.json" else "merges.txt")
        if not merges.is_file():
            return None, f"is a vocabulary without its {merges.name}"
        return _vocabulary_and_merges(path, tree, merges, pre), ""
    return None, "is JSON, but no tokenizer"


def _carry(tokenizer: Tokenizer, folder: Path) -> None:
    paths = [folder / name for name in _CARRIED]
    paths += sorted((folder / sidecars.TEMPLATES).glob("*.jinja"))
    tokenizer.files |= {str(p.relative_to(folder)): sidecars.read_small(p) for p in paths if p.is_file()}


def _vocabulary_and_merges(path: Path, vocab: Mapping[str, int], merges: Path, pre: str | None) -> Tokenizer:
    """GPT-2's two files, read as the ``tokenizer.json`` they stand for."""
    name = sidecars.read_json(path.parent / sidecars.CONFIG).get("tokenizer_class")
    name = name.removesuffix("Fast") if isinstance(name, str) else None
    rules = pretokenizers.by_name(pre or _CLASSES.get(name, ""))
    if rules is None:
        raise ConvertError(
            Problem(
                "pre_tokenizer",
                f"{path.name} and {merges.name} do not say how text is split, and the rules of {name} are not known.",
                file=str(path),
                found=name,
                wanted=", ".join(str(known) for known in _CLASSES if known),
                hint=f"Name the rules: --pre {' | '.join(pretokenizers.names())}.",
            )
        )
    if wrong := [*hf_checks.vocabulary_damage(vocab), *hf_checks.spread_damage(vocab.values())]:
        raise ConvertError(sidecars.damaged(path, what) for what in wrong)
    if what := merges_file.damage(merges.read_bytes(), None):
        raise ConvertError(sidecars.damaged(merges, what))
    body = merges_file.lines(merges.read_text(encoding="utf-8"))
    alphabet = bytelevel.char_to_byte()
    special = [text for text in vocab if text.startswith("<") and text.endswith(">") and len(text) > 2]
    made = {"".join(line.split(" ")) for line in body}
    tree = {
        "added_tokens": [
            {"id": vocab[text], "content": text, "special": True}
            for text in special
            if text not in made or any(char not in alphabet for char in text)
        ],
        "normalizer": {"type": rules.normalizer} if rules.normalizer else None,
        "pre_tokenizer": rules.hf_pre_tokenizer(),
        "model": {"type": "BPE", "vocab": vocab, "merges": body, "ignore_merges": rules.ignore_merges},
    }
    tokenizer = hf_json.parse(tree, origin=f"{path.name} and {merges.name}")
    tokenizer.pre = rules
    if merges.name == "vocab.bpe" and _END in vocab:  # its only special token begins and ends texts
        tokenizer.special |= {"bos": vocab[_END], "eos": vocab[_END]}
    return tokenizer
