# ruff: noqa: E501 (tables of inputs: one to a line)
"""safetensors and GGUF files that lie."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.trust.hostile import base
from tests.trust.hostile.harness import Case
from tests.trust.hostile.sparse import hole

_T = "model.norm.weight"


def _with(name: str = _T, **fields: Any) -> bytes:
    """The sound file with one tensor's entry changed."""
    head = base.header()
    head[name] = {**head[name], **fields}
    return base.safetensors(head)


def _textual(find: str, put: str) -> bytes:
    text = json.dumps(base.header())
    assert find in text
    return base.safetensors(text.replace(find, put, 1).encode())


def _moved(by: int, name: str = _T) -> bytes:
    begin, end = base.header()[name]["data_offsets"]
    return _with(name, data_offsets=[begin + by, end + by])


def _gapped() -> bytes:
    head = base.header()
    for name in list(head)[6:]:
        head[name]["data_offsets"] = [n + 64 for n in head[name]["data_offsets"]]
    return base.safetensors(head, body=b"".join(base.DATA.values()) + bytes(64))


SAFETENSORS: dict[str, Callable[[], bytes]] = {
    "a header of 2^63": lambda: base.safetensors(length=1 << 63),
    "a header of 2^64-1": lambda: base.safetensors(length=(1 << 64) - 1),
    "a header of 0 bytes": lambda: base.safetensors(length=0),
    "a header one byte too long": lambda: base.safetensors(length=len(base.safetensors())),
    "the same entry twice": lambda: _textual('"lm_head.weight"', '"model.norm.weight"'),
    "the same field twice": lambda: _textual('"dtype": "F32"', '"dtype": "F32", "dtype": "F32"'),
    "__metadata__ twice": lambda: _textual('{"__metadata__"', '{"__metadata__": {}, "__metadata__"'),
    "overlapping offsets": lambda: _moved(-4),
    "gapped offsets": _gapped,
    "reversed offsets": lambda: _with(data_offsets=[128, 0]),
    "offsets of 2^64": lambda: _with(data_offsets=[0, 1 << 64]),
    "offsets of 2^63": lambda: _moved(1 << 63),
    "negative offsets": lambda: _moved(-(1 << 40)),
    "two tensors in one place": lambda: _with(data_offsets=base.header()["lm_head.weight"]["data_offsets"], shape=[40, 32]),
    "offsets that are fractions": lambda: _with(data_offsets=[0.0, 128.0]),
    "offsets of 5,000 digits": lambda: _textual('"data_offsets": [0', '"data_offsets": [' + "9" * 5000),
    "one offset": lambda: _with(data_offsets=[0]),
    "offsets of null": lambda: _with(data_offsets=None),
    "a negative shape": lambda: _with(shape=[-32]),
    "a shape that overflows": lambda: _with(shape=[1 << 32, 1 << 32, 1 << 32]),
    "a shape of 2^63": lambda: _with(shape=[1 << 63]),
    "a shape that overflows to the right size": lambda: _with(shape=[(1 << 62) + 8, 4]),
    "a shape of fractions": lambda: _with(shape=[32.0]),
    "a shape of texts": lambda: _with(shape=["32"]),
    "a shape of true": lambda: _with(shape=[True] * 5),
    "a shape of 10^5000": lambda: _textual('"shape": [40', '"shape": [' + "9" * 5000),
    "100,000 dimensions": lambda: _with(shape=[1] * 100_000 + [32]),
    "a product of a megabyte": lambda: _with(shape=[1 << 63] * 20_000),
    "an unknown type": lambda: _with(dtype="F33"),
    "a type that is a list": lambda: _with(dtype=["F32"]),
    "a type that is null": lambda: _with(dtype=None),
    "a quantised type": lambda: _with(dtype="Q4_K"),
    "an entry that is a number": lambda: base.safetensors({**base.header(), _T: 5}),
    "metadata of numbers": lambda: base.safetensors({**base.header(), "__metadata__": {"format": 3}}),
    "metadata that is a list": lambda: base.safetensors({**base.header(), "__metadata__": ["pt"]}),
    "invalid UTF-8": lambda: base.safetensors(json.dumps(base.header()).encode().replace(b"norm", b"\xff\xfe\xff\xfe", 1)),
    "half a surrogate": lambda: _textual("norm", "\\ud800"),
    "terminal codes in a name": lambda: _textual("norm", "\\u001b[2J\\u0007"),
    "a name of a megabyte": lambda: _textual("norm", "n" * 1_000_000),
    "NaN": lambda: _textual("[0,", "[NaN,"),
    "deep lists": lambda: base.safetensors(b'{"a":' + b"[" * 5_000_000),
    "deep objects": lambda: base.safetensors(b'{"a":' * 1_000_000),
    "not JSON": lambda: base.safetensors(b"{" + b"x" * 1000),
    "a list for a header": lambda: base.safetensors(b'["a"]'),
    "a header with a tail": lambda: base.safetensors(json.dumps(base.header()).encode() + b"{}"),
    "no tensors": lambda: base.safetensors(b"{}", body=b""),
    "cut": lambda: base.safetensors()[:-5],
    "one byte too many": lambda: base.safetensors() + b"\0",
    "empty": lambda: b"",
    "seven bytes": lambda: b"\7\0\0\0\0\0\0",
    "200,000 tensors of nothing": lambda: base.safetensors(
        json.dumps({f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(200_000)}).encode(), body=b""
    ),
    "100,000 wrong tensors": lambda: base.safetensors({f"t{i}": 5 for i in range(100_000)}),
}  # fmt: skip


def _v(*extra: bytes, drop: str | None = None) -> list[bytes]:
    kept = [v for v in base.gguf_values() if drop is None or drop.encode() not in v[:60]]
    return [*kept, *extra]


def _info(number: int, raw: bytes) -> list[bytes]:
    infos = base.gguf_infos()
    infos[number] = raw
    return infos


_U64 = struct.Struct("<Q").pack


def _array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return base.keyed("a", 9, struct.pack("<IQ", kind, count) + raw)


def _nested(depth: int) -> bytes:
    return base.keyed("a", 9, struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0))


GGUF: dict[str, Callable[[], bytes]] = {
    "2^60 tensors": lambda: base.gguf(counts=(1 << 60, 15)),
    "2^60 key-values": lambda: base.gguf(counts=(12, 1 << 60)),
    "2^64-1 of both": lambda: base.gguf(counts=((1 << 64) - 1,) * 2),
    "one tensor too many": lambda: base.gguf(counts=(13, 15)),
    "one key-value too many": lambda: base.gguf(counts=(12, 16)),
    "nested arrays": lambda: base.gguf(_v(_nested(2))),
    "arrays nested 100,000 deep": lambda: base.gguf(_v(_nested(100_000))),
    "an array of 2^60 texts": lambda: base.gguf(_v(_array(8, 1 << 60))),
    "an array of 2^63 bytes": lambda: base.gguf(_v(_array(0, 1 << 63))),
    "an array of 2^62 numbers, whose bytes overflow": lambda: base.gguf(_v(_array(4, 1 << 62))),
    "an array of an unknown type": lambda: base.gguf(_v(_array(77, 1))),
    "an array of texts past the end": lambda: base.gguf(_v(_array(8, 3, base.string("a") + _U64(1 << 40)))),
    "a text past the end": lambda: base.gguf(_v(base.keyed("a", 8, _U64(1 << 40)))),
    "a text of 2^63": lambda: base.gguf(_v(base.keyed("a", 8, _U64(1 << 63)))),
    "a key of 2^63": lambda: base.gguf(_v(_U64(1 << 63))),
    "a key of 2^64-1": lambda: base.gguf(_v(_U64((1 << 64) - 1))),
    "an unknown value type": lambda: base.gguf(_v(base.keyed("a", 99, b"1234"))),
    "a key twice": lambda: base.gguf(_v(base.u32("llama.block_count", 1))),
    "alignment 0": lambda: base.gguf(_v(base.u32("general.alignment", 0))),
    "alignment 3": lambda: base.gguf(_v(base.u32("general.alignment", 3))),
    "alignment 2^31": lambda: base.gguf(_v(base.u32("general.alignment", 1 << 31))),
    "an alignment that is a text": lambda: base.gguf(_v(base.keyed("general.alignment", 8, base.string("32")))),
    "an alignment that is an array": lambda: base.gguf(_v(base.keyed("general.alignment", 9, struct.pack("<IQ", 4, 0)))),
    "overlapping tensors": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 0, 0))),
    "an offset of 2^63": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 0, 1 << 63))),
    "an offset past the end": lambda: base.gguf(infos=_info(11, base.info("output.weight", (32, 40), 0, 1 << 30))),
    "an offset that is no multiple": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 0, 33))),
    "an unknown tensor type": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 200))),
    "a tensor type of 2^32-1": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 2**32 - 1))),
    "a removed tensor type": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32, 16), 4))),
    "dimensions that overflow": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (1 << 32, 1 << 32, 1 << 32)))),
    "dimensions that overflow to nothing": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (1 << 63, 2)))),
    "dimensions of zero": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (0, 1 << 62)))),
    "2^31 dimensions": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (32,), n_dims=1 << 31))),
    "five dimensions": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (1,) * 5))),
    "a quantised row of 33": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (33, 16), 8))),
    "a quantised scalar": lambda: base.gguf(infos=_info(3, base.info("blk.0.attn_v.weight", (), 8))),
    "a name twice": lambda: base.gguf(infos=_info(3, base.info("output.weight", (32, 16), 0, 9216))),
    "a name of 2^63": lambda: base.gguf(infos=_info(11, _U64(1 << 63))),
    "a name that is no UTF-8": lambda: base.gguf(infos=_info(3, base.info(b"\xff\xfe\x1b[2J", (32, 16), 0, 9216))),
    "an architecture with terminal codes": lambda: base.gguf(_v(base.keyed("general.architecture", 8, base.string("\x1b[2J")), drop="general.arch")),
    "an architecture that is a number": lambda: base.gguf(_v(base.u32("general.architecture", 3), drop="general.arch")),
    "an architecture that is an array": lambda: base.gguf(_v(base.keyed("general.architecture", 9, struct.pack("<IQ", 8, 1) + base.string("llama")), drop="general.arch")),
    "10^9 layers": lambda: base.gguf(_v(base.u32("llama.block_count", 10**9), drop="block_count")),
    "heads of zero": lambda: base.gguf(_v(base.u32("llama.attention.head_count", 0), drop="head_count\x04")[:]),
    "layers as a text": lambda: base.gguf(_v(base.keyed("llama.block_count", 8, base.string("1")), drop="block_count")),
    "layers as an array": lambda: base.gguf(_v(base.keyed("llama.block_count", 9, struct.pack("<IQI", 4, 1, 1)), drop="block_count")),
    "layers as NaN": lambda: base.gguf(_v(base.f32("llama.block_count", float("nan")), drop="block_count")),
    "pieces of 65,535": lambda: base.gguf(_v(base.keyed("split.count", 2, b"\xff\xff"), base.keyed("split.no", 2, b"\0\0"))),
    "2^63 pieces": lambda: base.gguf(_v(base.keyed("split.count", 10, _U64(1 << 63)))),
    "the other byte order": lambda: base.gguf(order=">"),
    "version 0": lambda: base.gguf(version=0),
    "version 1": lambda: base.gguf(version=1),
    "version 2^31": lambda: base.gguf(version=1 << 31),
    "only the magic": lambda: b"GGUF",
    "cut in the header": lambda: base.gguf(cut=500),
    "cut in the data": lambda: base.gguf(cut=len(base.gguf()) - 40),
    "a predecessor": lambda: b"tjgg" + bytes(1000),
}  # fmt: skip
VOCABULARY: dict[str, Callable[[], bytes]] = {
    "tokens that are numbers": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 4, 40) + bytes(160)), drop="ggml.tokens")),
    "tokens that are a number": lambda: base.gguf(_v(base.u32("tokenizer.ggml.tokens", 40), drop="ggml.tokens")),
    "types that are texts": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.token_type", 8, base.string("x")), drop="token_type")),
    "too few types": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.token_type", 9, struct.pack("<IQI", 5, 1, 1)), drop="token_type")),
    "types of 10^9": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, 40) + struct.pack("<40i", *[10**9] * 40)), drop="token_type")),
    "merges that are none": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + base.string("x")), drop="ggml.merges")),
    "merges of numbers": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.merges", 9, struct.pack("<IQI", 4, 1, 1)), drop="ggml.merges")),
    "an end beyond the vocabulary": lambda: base.gguf(_v(base.u32("tokenizer.ggml.eos_token_id", 2**32 - 1))),
    "an end that is a text": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.eos_token_id", 8, base.string("x")))),
    "a kind that is an array": lambda: base.gguf(_v(base.keyed("tokenizer.ggml.model", 9, struct.pack("<IQ", 4, 0)), drop="ggml.model")),
    "a template that is a number": lambda: base.gguf(_v(base.u32("tokenizer.chat_template", 3))),
    "a template of 20 MB": lambda: base.gguf(_v(base.keyed("tokenizer.chat_template", 8, base.string("{" * (20 << 20))))),
}  # fmt: skip


def _gguf(data: Callable[[], bytes]) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / "m.gguf"
        path.write_bytes(data())
        return path

    return build


def _safetensors(data: Callable[[], bytes]) -> Callable[[Path], Path]:
    return lambda folder: base.hf(folder, data())


def cases() -> Iterator[Case]:
    """Every safetensors and GGUF file."""
    for name, data in SAFETENSORS.items():
        seen = frozenset(("inspect",)) if name == "terminal codes in a name" else frozenset()  # shown escaped
        yield Case(f"safetensors: {name}", _safetensors(data), passes=seen)
    head = struct.pack("<Q", 100_000_001) + b'{"a":'
    yield Case(
        "safetensors: a header of 100 MB + 1", lambda f: hole(base.hf(f) / "model.safetensors", 200 << 20, head) and f
    )
    full = struct.pack("<Q", 100_000_000) + b'{"a":'
    yield Case(
        "safetensors: a header of 100 MB of zeros",
        lambda f: hole(base.hf(f) / "model.safetensors", 200 << 20, full) and f,
    )
    yield Case(
        "safetensors: a header of 100 MB of lists",
        _safetensors(lambda: base.safetensors(b'{"a":[' + b"[]," * 33_333_330 + b"[]]}")),
    )
    yield Case("safetensors: a header of 90 MB of names", _safetensors(
        lambda: base.safetensors(b"{" + b",".join(b'"%07d":5' % i for i in range(8_000_000)) + b"}")))  # fmt: skip
    yield Case(
        "safetensors: a header of 60 MB of numbers",
        _safetensors(lambda: base.safetensors(b'{"a":[' + b"1," * 30_000_000 + b"1]}")),
    )
    commands = ("inspect", "validate", "to-scratch", "to-gguf", "metadata")
    for name, data in GGUF.items():
        harmless = frozenset(("metadata", *_PASSES.get(name, ())))  # key-values, which may be sound
        yield Case(f"gguf: {name}", _gguf(data), commands, harmless, ("diff", "check", "diagnose", "to-hf"))
    everything = frozenset(("inspect", "validate", "to-scratch", "metadata", "to-gguf", "diff", "diagnose"))
    for name, data in VOCABULARY.items():
        yield Case(
            f"gguf vocabulary: {name}",
            _gguf(data),
            ("inspect", "validate", "to-hf", "to-gguf-vocabulary", "metadata"),
            everything | {"to-hf", "to-gguf-vocabulary"},
        )
    many = base.gguf(_v(_array(8, 20_000_000)))
    yield Case(
        "gguf: 160 MB of empty texts", lambda f: hole(f / "m.gguf", len(many) + (160 << 20), many[:-16]), commands
    )
    numbers = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + base.keyed("a", 9, struct.pack("<IQ", 5, 100_000_000))
    yield Case("gguf: 400 MB of numbers", lambda f: hole(f / "m.gguf", 500 << 20, numbers), commands)
    infos = b"GGUF" + struct.pack("<IQQ", 3, 10_000_000, 0)
    yield Case("gguf: 10 million tensors without names", lambda f: hole(f / "m.gguf", 300 << 20, infos), commands)
    values = b"GGUF" + struct.pack("<IQQ", 3, 0, 10_000_000)
    yield Case("gguf: 10 million keys without names", lambda f: hole(f / "m.gguf", 300 << 20, values), commands)


#: ``inspect`` shows what is there; one number for every layer is what some arrays are for.
_PASSES = {
    "heads of zero": ("inspect",),
    "layers as an array": ("inspect", "validate", "to-scratch", "to-gguf", "to-hf", "diff", "diagnose"),
}
