"""All hostile inputs, and for each kind of attack that was to be tried the ones that try it."""

from __future__ import annotations

from collections.abc import Iterator

from tests.trust.hostile import (
    folder_cases,
    link_cases,
    mixed_cases,
    stranger_cases,
    tensor_cases,
    text_cases,
    torch_cases,
)
from tests.trust.hostile.harness import Case

#: What was to be tried → names of inputs, or their beginnings (ending in ``*``). A test asserts that all are there.
COVERED: dict[str, tuple[str, ...]] = {
    "pickles that call os.system": ("pickle calls os.system", "pickle calls os.system, beside a model"),
    "… builtins.eval": ("pickle calls builtins.eval", "pickle calls __builtin__.eval of Python 2"),
    "… torch.load again": ("pickle calls torch.load again",),
    "… build nested objects": (
        "pickle: 2,000,000 nested lists",
        "pickle: 100,000 nested dicts",
        "pickle: nested calls",
    ),
    "… build gigantic objects": ("pickle: memo bomb*", "pickle: LONG4 of 2^31", "pickle: BINBYTES of 4 GB"),
    "… use every opcode": ("pickle: every operation",),
    "… reference cycles": ("pickle: a list in itself", "pickle: a dict in itself", "pickle: a cycle through*"),
    "the same in a DCP folder's metadata": ("dcp: os.system", "dcp: builtins.eval", "dcp: a list in itself"),
    "zip bombs": ("zip: a deflated bomb for a tree", "zip: deflated storages"),
    "zip entries with ..": ("zip: a tree in ..*", "zip: records with .. and absolute names", "zip: a root of .."),
    "duplicate names": ("zip: a name twice", "zip: two trees"),
    "overlapping members": ("zip: overlapping records", "zip: every record at one place"),
    "wrong CRC": ("zip: a wrong CRC of the tree", "zip: wrong CRC of a storage"),
    "zip64 lies": ("zip: zip64 sizes of 2^63", "zip: a zip64 offset of 2^63", "zip: zip64 without its numbers"),
    "a safetensors header of 2^63": ("safetensors: a header of 2^63", "safetensors: a header of 2^64-1"),
    "… of 100 MB + 1": ("safetensors: a header of 100 MB + 1",),
    "duplicate keys": ("safetensors: the same entry twice", "safetensors: the same field twice"),
    "overlapping, gapped, reversed offsets": tuple(
        f"safetensors: {what} offsets" for what in ("overlapping", "gapped", "reversed")
    ),
    "negative and overflowing shapes": ("safetensors: a negative shape", "safetensors: a shape that overflows*"),
    "invalid UTF-8": ("safetensors: invalid UTF-8", "gguf: a name that is no UTF-8", "index: no UTF-8, as text"),
    "deep JSON": ("safetensors: deep lists", "safetensors: deep objects", "index: deep lists, as text"),
    "GGUF with counts of 2^60": ("gguf: 2^60 tensors", "gguf: 2^60 key-values", "gguf: an array of 2^60 texts"),
    "nested arrays": ("gguf: nested arrays", "gguf: arrays nested 100,000 deep"),
    "strings past the end": ("gguf: a text past the end", "gguf: an array of texts past the end"),
    "alignment 0 / 3 / 2^31": ("gguf: alignment 0", "gguf: alignment 3", "gguf: alignment 2^31"),
    "overlapping tensors": ("gguf: overlapping tensors",),
    "type ids unknown": ("gguf: an unknown tensor type", "gguf: an unknown value type"),
    "dims product overflowing": ("gguf: dimensions that overflow", "gguf: dimensions that overflow to nothing"),
    "indexes with absolute and .. paths": ("index: an absolute path", "index: ..", "index: a path below with .."),
    "… symlinked": ("index to a link to a text elsewhere", "index to a link to itself", "index to a link to a folder"),
    "links to private files": ("model.safetensors is a link to a private*", "config.json is a link to a private file"),
    "… device": ("index: a device", "index to a link to a device"),
    "… FIFO": ("index to a pipe", "index to a link to a pipe"),
    "… a million entries": ("index: a million entries", "index: a million entries, short"),
    "config.json with 10^9 layers": ("config: 10^9 layers", "params: 10^9 layers", "gguf: 10^9 layers"),
    "… NaN": ("config: layers of NaN", "config: theta of NaN", "params: layers of NaN"),
    "… strings for numbers": ("config: layers as a text", "config: epsilon as a text"),
    "… 1 GB of nesting": ("config: 1 GB of nesting", "index: 1 GB of blanks"),
    "tokenizer files likewise": (
        *("tokenizer.json: 1 GB", "tokenizer.json: deep lists", "tokenizer.json: a unigram of NaN"),
        *("tokenizer.json: ids that are texts", "tokenizer.json: an added token of 10^9", "tokenizer.model: 1 GB"),
        *("tokenizer.model: a piece that is no UTF-8", "tokenizer.model: a field of 2^63"),
        *("tokenizer_config.json: *", "special_tokens_map.json: *", "added_tokens.json: *", "gguf tokenizer: *"),
    ),
    "tables and names files that compute": ("table: heads that are a call", "table: a dotted key of 20,000 parts"),
    "chat templates that loop or swell": ("chat template: loops for ever", "chat template: a text of 10 GB"),
}


def cases() -> Iterator[Case]:
    """Every input, one group after the other; names are unique."""
    for module in (torch_cases, tensor_cases, folder_cases, link_cases, text_cases, stranger_cases, mixed_cases):
        yield from module.cases()
