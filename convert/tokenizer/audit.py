"""Whether the tokenizer beside (or inside) a checkpoint can be used, and belongs to it.

Every file is read as its kind, its ids are compared with the rows of the embedding, and what several files say is
compared. Nothing is tokenised, no template is run. Which files there are, :mod:`convert.carried` knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.carried import carried, unsound
from convert.errors import ConvertError, Problem
from convert.tokenizer import hf_checks, hf_json, json_text, merges_file, ranks, sentencepiece_model, sidecar_checks
from convert.tokenizer.hf_checks import brief
from convert.tokenizer.source import read_tokenizer

#: Files up to this size are read whole by default; of larger ones the merges are only counted (those of 128,000 tokens
#: take a third of a second).
WHOLE_BYTES = 4 << 20
#: What only a conversion to GGUF needs to know; a checkpoint is sound without.
_UNKNOWN = frozenset({"pre_tokenizer", "tokenizer_kind", "tokenizer_missing"})
_HINT = "Fetch the tokenizer's files again, all from one place; --no-tokenizer converts the weights alone."
_CONFIG, _GENERATION = "config.json", "generation_config.json"


@dataclass(slots=True)
class Audit:
    """The outcome of :func:`audit` and :func:`audit_gguf`.

    Attributes:
        rows: Rows of the embedding.
        problems: What is wrong.
        notes: What is odd but no fault.
        checked: What was checked, in words; empty where there is no tokenizer.
        ids: Text to id, as the main file has them; texts beyond ASCII may be missing.
    """

    rows: int
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    checked: str = ""
    ids: dict[str, int] = field(default_factory=dict)

    def add(self, file: Path, what: str, found: Any = None, wanted: Any = None) -> None:
        """A finding about one file."""
        message = f"{file.name}: {what}."
        self.problems.append(Problem("tokenizer", message, file=str(file), found=found, wanted=wanted, hint=_HINT))


def audit(folder: Path, *, rows: int, config: Mapping[str, Any], full: bool = False) -> Audit:
    """Check the tokenizer's files in a folder; nothing is raised.

    Args:
        folder: The checkpoint's.
        rows: Rows of the embedding.
        config: Its ``config.json``, whose token ids are checked.
        full: Read files of any size whole; also a ``tokenizer.model`` beside a ``tokenizer.json``.
    """
    out = Audit(rows)
    files = carried(folder, folder)
    for name, path in list(files.items()):
        problem = unsound(path)
        if problem is not None:
            out.problems.append(problem)
            del files[name]
    main = _main(out, files, full)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", _GENERATION):
        if name in files:
            _beside(out, files[name])
    if "chat_template.jinja" in files:
        path = files["chat_template.jinja"]
        for what in sidecar_checks.template_file_damage(path.read_bytes()):
            out.add(path, what)
    _ids(out, folder / _CONFIG, config, fatal=main is not None)
    if main is not None and main in files and not out.checked:
        out.checked = f"{main} and what is beside it"
    if out.checked and not out.problems:
        _whole_range(out)
    return out


def _main(out: Audit, files: Mapping[str, Path], full: bool) -> str | None:
    """Check the files that hold a vocabulary; returns the name of the first of them."""
    first = next((name for name in ("tokenizer.json", "tokenizer.model", "vocab.json") if name in files), None)
    if "tokenizer.json" in files:
        _tokenizer_json(out, files["tokenizer.json"], full)
    if "tokenizer.model" in files and (full or first == "tokenizer.model"):
        _model(out, files["tokenizer.model"], first == "tokenizer.model")
    if "vocab.json" in files:
        _vocabulary(out, files["vocab.json"], files.get("merges.txt"), first == "vocab.json")
    elif "merges.txt" in files:
        _merges(out, files["merges.txt"], None)
    return first


def _object(out: Audit, path: Path, **how: bool) -> dict[str, Any] | None:
    """The object that a file holds; None, and a finding, where it holds none."""
    try:
        value = json_text.load(path.read_bytes(), **how)
    except ValueError as error:
        out.add(path, f"it cannot be read: {error}", wanted="JSON")
        return None
    if not isinstance(value, dict):
        out.add(path, f"it is {hf_checks.what(value)}", wanted="an object")
        return None
    return value


def _tokenizer_json(out: Audit, path: Path, full: bool) -> None:
    whole = full or path.stat().st_size <= WHOLE_BYTES
    tree = _object(out, path, texts=whole)
    if tree is None:
        return
    wrong = hf_checks.damage(tree)
    for what in wrong:
        out.add(path, what)
    if wrong:
        return
    model = tree["model"]
    vocab = model["vocab"]
    own = {text: i for i, (text, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab
    added = {entry["content"]: entry["id"] for entry in tree.get("added_tokens") or ()}
    for text, index in added.items():
        if text in own and own[text] != index:
            out.add(path, f"the added token {brief(text)} has the id {index}, the vocabulary has it as {own[text]}")
    _range(out, path, own.values(), added)
    count = f"{len(own):,} tokens and {len(added):,} added ones"
    if whole:
        try:
            hf_json.parse(tree, origin=path.name, checked=True)
        except ConvertError as error:
            _found(out, path, error)
    out.ids = own
    out.ids.update(added)
    depth = (
        "ids, merges, steps" if whole else f"types and ids; --scan reads its {len(model.get('merges') or ()):,} merges"
    )
    out.checked = f"{path.name} ({count}; {depth}) and what is beside it"


def _found(out: Audit, path: Path, error: ConvertError) -> None:
    """A reader's findings, but for what only a conversion would have to know."""
    for problem in error.problems:
        if problem.kind in _UNKNOWN:
            out.notes.append(f"{path.name} cannot be converted to GGUF as it is: {problem.message}")
        else:
            out.problems.append(problem)


def _model(out: Audit, path: Path, first: bool) -> None:
    """Check a ``tokenizer.model``: a list of ranks, a SentencePiece model, or JSON of that name."""
    raw = path.read_bytes()
    ids: dict[str, int] = {}
    try:
        if raw.lstrip()[:1] == b"{":
            ids = {text: i for i, text in enumerate(read_tokenizer(path).tokens)}
        elif ranks.is_ranks(raw):
            ids = {str(index): index for index in ranks.read(raw, path.name).values()}
        elif sentencepiece_model.is_model(raw):
            ids = {text: i for i, text in enumerate(sentencepiece_model.parse(raw, origin=path.name).tokens)}
            if first:
                out.ids = ids
        else:
            out.add(path, "it is neither JSON, nor a list of ranks, nor a SentencePiece model")
            return
    except ConvertError as error:
        _found(out, path, error)
        return
    _range(out, path, ids.values(), {})
    if first:
        out.checked = f"{path.name} ({len(ids):,} tokens) and what is beside it"


def _vocabulary(out: Audit, path: Path, merges: Path | None, first: bool) -> None:
    try:
        vocab = json_text.load(path.read_bytes())
    except ValueError as error:
        out.add(path, f"it cannot be read: {error}", wanted="JSON")
        return
    wrong = [*hf_checks.vocabulary_damage(vocab)] if vocab else ["it is empty"]
    wrong = wrong or hf_checks.spread_damage(vocab.values())
    for what in wrong:
        out.add(path, what)
    if wrong:
        return
    _range(out, path, vocab.values(), {})
    if merges is not None:
        _merges(out, merges, vocab)
    if first:
        out.ids = vocab
        out.checked = f"{path.name} ({len(vocab):,} tokens) and what is beside it"


def _merges(out: Audit, path: Path, vocab: Mapping[str, int] | None) -> None:
    wrong = merges_file.damage(path.read_bytes(), vocab)
    if wrong:
        out.add(path, wrong)


def _range(out: Audit, path: Path, ids: Iterable[int], added: Mapping[str, int], elsewhere: Iterable[int] = ()) -> None:
    """Ids against the rows of the embedding; added tokens directly after the vocabulary may lack them.

    Gemma 3's text models have ``<image_soft_token>`` so, a row beyond their embedding. No text has it by chance, and
    :mod:`convert.tokenizer.beyond` leaves it out of a GGUF. ``elsewhere`` are the ids that another file has.
    """
    ids = list(ids)
    most = max(ids, default=-1)
    if most >= out.rows:
        out.add(
            path,
            f"its ids go up to {most:,}, the embedding has {out.rows:,} rows: it belongs to another model",
            found=most,
            wanted=f"less than {out.rows}",
        )
        return
    beyond = {text: index for text, index in added.items() if index >= out.rows}
    if not beyond:
        return
    count = len({*ids, *added.values(), *elsewhere})
    said = ", ".join(f"{brief(text)} ({index:,})" for text, index in list(beyond.items())[:3])
    if max(beyond.values()) < count:
        out.notes.append(
            f"{path.name}: {len(beyond)} added token{'s' * (len(beyond) > 1)} without a row in the embedding of "
            f"{out.rows:,} rows, {said}: a text that holds one cannot be read; a GGUF leaves such tokens out"
        )
    else:
        out.add(path, f"the embedding has {out.rows:,} rows, too few for {said}", wanted=f"less than {out.rows}")


def _beside(out: Audit, path: Path) -> None:
    """Check one of the small files, and what it says of tokens against the vocabulary."""
    value = _object(out, path, constants=True)
    if value is None:
        return
    if path.name == _GENERATION:
        _ids(out, path, value, fatal=True)
        return
    plain = path.name == "added_tokens.json"
    wrong = sidecar_checks.added_file_damage(value) if plain else sidecar_checks.config_damage(value)
    for what in wrong:
        out.add(path, what)
    if wrong:
        return
    decoder = value.get("added_tokens_decoder") or {}
    said = value if plain else {entry["content"]: int(index) for index, entry in decoder.items()}
    new = {}
    for text, index in said.items():
        own = out.ids.get(text)
        if own is None:
            new[text] = index
        elif own != index:
            out.add(path, f"it gives {brief(text)} the id {index}, the vocabulary {own}", found=index, wanted=own)
    _range(out, path, (), new, out.ids.values())
    for role, text in ({} if plain else sidecar_checks.used(value)).items():
        index = said.get(text, out.ids.get(text, -1))
        if index >= out.rows:
            what = f"its {role}, {brief(text)}, has the id {index:,}, the embedding has {out.rows:,} rows"
            out.add(path, what, found=index, wanted=f"less than {out.rows}")


def _ids(out: Audit, path: Path, config: Mapping[str, Any], *, fatal: bool) -> None:
    """Token ids of a config; without a tokenizer nobody uses the model config's, and old defaults are common."""
    for what in sidecar_checks.wrong_ids(config, out.rows).values():
        if fatal:
            out.add(path, what)
        else:
            out.notes.append(f"{path.name}: {what}; without a tokenizer nothing uses it")


def _whole_range(out: Audit) -> None:
    most = max(out.ids.values(), default=-1) + 1
    if 0 < most < out.rows:
        out.notes.append(
            f"the tokenizer has {most:,} ids, the embedding {out.rows:,} rows: {out.rows - most:,} of them have no text"
        )


def audit_gguf(metadata: Mapping[str, Any], *, rows: int, full: bool = False) -> Audit:
    """Check the tokenizer in a GGUF header; nothing is raised.

    Args:
        metadata: Every key of the header with its value; long arrays may be lazy sequences.
        rows: Rows of the embedding.
        full: Read vocabularies of any size whole.
    """
    from convert.tokenizer.from_gguf import ID_KEYS, NO_IDS, read_gguf

    out = Audit(rows)
    if metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
        return out
    if not isinstance(metadata["tokenizer.ggml.model"], str):
        out.add(Path("tokenizer.ggml.model"), f"it is {brief(metadata['tokenizer.ggml.model'])}", wanted="a text")
    if not isinstance(metadata.get("tokenizer.chat_template", ""), str):
        out.add(Path("tokenizer.chat_template"), f"it is {brief(metadata['tokenizer.chat_template'])}", wanted="a text")
    held = {key: metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "scores", "merges")}
    place = Path("tokenizer.ggml.tokens")
    for key, value in held.items():
        if value is not None and (isinstance(value, (str, bytes)) or not hasattr(value, "__len__")):
            out.add(Path(f"tokenizer.ggml.{key}"), f"it is {brief(value)}", wanted="an array")
            return out
    count = len(held["tokens"] or ())
    if count > rows:
        out.add(place, f"{count:,} tokens, the embedding has {rows:,} rows", found=count, wanted=rows)
    elif count < rows:
        out.notes.append(f"the tokenizer has {count:,} tokens, the embedding {rows:,} rows; llama.cpp wants as many")
    for key in ("token_type", "scores"):
        value = held[key]
        if value is not None and len(value) != count:
            out.add(Path(f"tokenizer.ggml.{key}"), f"{len(value):,} values for {count:,} tokens", len(value), count)
    for name in ID_KEYS:
        index = metadata.get(name)
        if index not in NO_IDS and (type(index) is not int or not 0 <= index < count):
            out.add(Path(name), f"it is {brief(index)}, there are {count:,} tokens", brief(index), f"less than {count}")
    if out.problems:
        return out
    whole = full or count <= 160_000
    if whole:
        try:
            read_gguf(metadata)
        except ConvertError as error:
            _found(out, Path("the GGUF file's tokenizer"), error)
    depth = "ids, merges" if whole else "numbers of them and ids; --scan reads them"
    out.checked = f"the tokenizer ({count:,} tokens; {depth})"
    return out
