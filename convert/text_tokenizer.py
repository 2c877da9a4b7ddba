"""Text to token ids and back for a checkpoint that is being run, whichever layout it is in.

The ``tokenizers`` library does the work, on the ``tokenizer.json`` that lies beside the checkpoint or is built from
what does (``tokenizer.model``, vocabulary and merges, a GGUF header). Only what runs a model needs this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert.errors import ConvertError, Problem
from convert.tokenizer import hf_checks, json_text, sidecars
from convert.tokenizer.sidecars import read_small
from convert.tokenizer.source import find, read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

    from convert.checkpoint import Checkpoint

_GENERATION = "generation_config.json"
#: What ends an answer of an instruct model, where no config says (Meta's own download; its code stops at these).
_MESSAGE_ENDS = ("<|eot_id|>", "<|eom_id|>")
#: What an incomplete character decodes to.
_UNFINISHED = "\ufffd"


@dataclass(slots=True)
class TextTokenizer:
    """A tokenizer that works on text.

    Attributes:
        library: The ``tokenizers`` object.
        origin: Where it was found, for messages.
        special: Role (``bos``, ``eos`` …) to id.
        ends: Every id that ends a text, as the tokenizer's own files say.
        chat_templates: Name to Jinja source; the plain one is ``default``.
    """

    library: Library
    origin: str
    special: dict[str, int] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()
    chat_templates: dict[str, str] = field(default_factory=dict)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text``; ``special`` adds what the tokenizer puts around a text (bos)."""
        return list(self.library.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special tokens."""
        return str(self.library.decode(list(ids), skip_special_tokens=True))

    def token(self, role: str) -> str:
        """The text of the token with this role, or an empty one."""
        index = self.special.get(role)
        return "" if index is None else str(self.library.id_to_token(index) or "")

    def stream(self, ids: Iterable[int], *, prompt: Sequence[int] = ()) -> Iterator[str]:
        """Pieces of text as ids arrive; together they are the text of all ids, as continued from ``prompt``.

        A character may be spread over several tokens, and a token's text may depend on the ones before it (a space
        that is dropped at the start): a piece is what a few earlier tokens and the new ones give, less what the
        earlier ones give alone, held back while it ends within a character.
        """
        known = list(prompt[-8:])
        start, shown = 0, len(known)
        for index in ids:
            known.append(index)
            before, now = self.decode(known[start:shown]), self.decode(known[start:])
            if now.endswith(_UNFINISHED) or len(now) <= len(before):
                continue
            yield now[len(before) :]
            start, shown = shown, len(known)
        rest = self.decode(known[start:])[len(self.decode(known[start:shown])) :]
        if rest:
            yield rest


def text_tokenizer(ckpt: Checkpoint, path: Path | str | None = None) -> TextTokenizer:
    """The tokenizer of an opened checkpoint, or the one at ``path``.

    Args:
        ckpt: The checkpoint.
        path: A folder, a tokenizer file, or a GGUF file, where the checkpoint has none or another is wanted.

    Raises:
        ConvertError: There is none, or it cannot be used; says what was looked for.
    """
    if path is not None:
        path = Path(path)
        if not path.exists():
            raise ConvertError(Problem("tokenizer_missing", f"--tokenizer {path}: no such file.", file=str(path)))
        found = _gguf_file(path)
        return _from_gguf(found, path.name) if found is not None else _from_files(path)
    if ckpt.format == "gguf":
        return _from_gguf(ckpt.metadata, ckpt.path.name)
    if find(ckpt.folder) is None:
        raise ConvertError(
            Problem(
                "tokenizer_missing",
                f"No tokenizer lies beside {ckpt.path.name}, so the prompt cannot become token ids.",
                file=str(ckpt.folder),
                wanted="tokenizer.json, tokenizer.model, or vocab.json with merges.txt",
                hint="Name one: --tokenizer PATH (a folder, a tokenizer file, or a GGUF file).",
            )
        )
    return _from_files(ckpt.folder)


def _gguf_file(path: Path) -> Mapping[str, Any] | None:
    from convert.formats import gguf

    if not path.is_file():
        return None
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            return None
    return gguf.read(path).metadata


def _from_gguf(metadata: Mapping[str, Any], origin: str) -> TextTokenizer:
    from convert.tokenizer.from_gguf import read_gguf, special_ids
    from convert.tokenizer.to_hf import hf_files_from

    content = read_gguf(metadata)
    ends = _ids(special_ids(metadata).get("eos_token_id"))
    library = _library(hf_files_from(content)["tokenizer.json"], origin)
    return TextTokenizer(library, origin, dict(content.special), ends, dict(content.chat_templates))


def _from_files(path: Path) -> TextTokenizer:
    """From a folder or a file; a ``tokenizer.json`` is taken as it is, of whatever kind it may be."""
    from convert.tokenizer.to_hf import hf_files_from

    folder = path if path.is_dir() else path.parent
    file = path if path.is_file() else find(path)
    if file is not None and file.name == "tokenizer.json":
        return _from_json(file)
    content = read_tokenizer(path)
    library = _library(hf_files_from(content)["tokenizer.json"], content.origin)
    ends = _ids(content.special.get("eos")) | _ids(sidecars.read_json(folder / _GENERATION).get("eos_token_id"))
    ends |= {token.id for token in content.added if token.special and token.content in _MESSAGE_ENDS}
    return TextTokenizer(library, content.origin, dict(content.special), ends, dict(content.chat_templates))


def _from_json(file: Path) -> TextTokenizer:
    folder = file.parent
    library = load_library(file)
    config = sidecars.sound_config(folder)
    special = {}
    for source in (sidecars.read_json(folder / sidecars.MAP), config):
        for role in ("bos", "eos", "unk", "pad"):
            value = source.get(f"{role}_token")
            text = value.get("content") if isinstance(value, Mapping) else value
            index = library.token_to_id(text) if isinstance(text, str) else None
            if index is not None:
                special[role] = index
    ends = _ids(special.get("eos")) | _ids(sidecars.read_json(folder / _GENERATION).get("eos_token_id"))
    return TextTokenizer(library, file.name, special, ends, sidecars.chat_templates(folder, config))


def load_library(file: Path) -> Library:
    """The ``tokenizers`` object of a ``tokenizer.json``.

    The file is checked first: on some that it cannot read the library takes a gigabyte, or ends in a panic.

    Raises:
        ConvertError: It cannot be read, or is no tokenizer; says why.
    """
    wrong, raw = [], b""
    try:
        raw = read_small(file)
        tree = json_text.load(raw, texts=False)
        wrong = (
            hf_checks.damage(tree) if isinstance(tree, Mapping) else [f"it is {hf_checks.what(tree)}, not an object"]
        )
        del tree
    except ValueError as error:
        wrong = [str(error)]
    if wrong:
        raise ConvertError(Problem("tokenizer_damaged", f"{file.name}: {what}.", file=str(file)) for what in wrong)
    return _library(raw, file.name)


def _library(raw: bytes, origin: str) -> Library:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_buffer(raw)
    except BaseException as error:  # the library raises plain Exception, and its panics are not even that
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ConvertError(
            Problem(
                "tokenizer_damaged", f"The tokenizer in {origin} cannot be loaded: {str(error)[:300]}.", file=origin
            )
        ) from None
    library.no_truncation()
    library.no_padding()
    return library


def _ids(value: Any) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(int(v) for v in values if isinstance(v, int) and not isinstance(v, bool))


def end_ids(ckpt: Checkpoint, tokenizer: TextTokenizer) -> frozenset[int]:
    """Every id that ends a text: config, generation config, an earlier conversion's record, and tokenizer together.

    They differ in practice: an instruct model's end of turn often stands in one of them only.
    """
    ends = set(tokenizer.ends)
    sources: list[Mapping[str, Any]] = [ckpt.config, ckpt.record.get("config") or {}]
    if ckpt.format != "gguf":
        sources += [ckpt.raw_config, sidecars.read_json(ckpt.folder / _GENERATION)]
    for source in sources:
        ends |= _ids(source.get("eos_token_id"))
    return frozenset(i for i in ends if 0 <= i < int(ckpt.config["vocab_size"]))
