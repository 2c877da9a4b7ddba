"""A sound little model in every container, written by hand: what the hostile ones are made from.

No library of any format is used, so that what they would refuse to write can be written.
"""

from __future__ import annotations

import io
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

HIDDEN, HEADS, KV, FF, VOCAB = 32, 4, 2, 48, 40
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FF,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_L = "model.layers.0."
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    _L + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    _L + "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    _L + "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
    _L + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    _L + "mlp.gate_proj.weight": (FF, HIDDEN),
    _L + "mlp.up_proj.weight": (FF, HIDDEN),
    _L + "mlp.down_proj.weight": (HIDDEN, FF),
    _L + "input_layernorm.weight": (HIDDEN,),
    _L + "post_attention_layernorm.weight": (HIDDEN,),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    _L + "self_attn.q_proj.weight": "blk.0.attn_q.weight",
    _L + "self_attn.k_proj.weight": "blk.0.attn_k.weight",
    _L + "self_attn.v_proj.weight": "blk.0.attn_v.weight",
    _L + "self_attn.o_proj.weight": "blk.0.attn_output.weight",
    _L + "mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    _L + "mlp.up_proj.weight": "blk.0.ffn_up.weight",
    _L + "mlp.down_proj.weight": "blk.0.ffn_down.weight",
    _L + "input_layernorm.weight": "blk.0.attn_norm.weight",
    _L + "post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
}


def count(shape: tuple[int, ...]) -> int:
    """Elements."""
    out = 1
    for n in shape:
        out *= n
    return out


def values(name: str) -> bytes:
    """Some float32 numbers for a tensor."""
    rng = Random(name)
    return struct.pack(
        f"<{count(SHAPES[name])}f", *(rng.gauss(1 if "norm" in name else 0, 0.2) for _ in range(count(SHAPES[name])))
    )


#: Every tensor's bytes.
DATA = {name: values(name) for name in SHAPES}


def header() -> dict[str, Any]:
    """The safetensors header of the model."""
    out: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in SHAPES.items():
        out[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(DATA[name])]}
        at += len(DATA[name])
    return out


def safetensors(head: Any = None, *, length: int | None = None, body: bytes | None = None) -> bytes:
    """A safetensors file; ``head`` may be a dict, or the text itself."""
    text = head if isinstance(head, bytes) else json.dumps(head or header()).encode()
    rest = b"".join(DATA.values()) if body is None else body
    return struct.pack("<Q", len(text) if length is None else length) + text + rest


def hf(folder: Path, weights: bytes | None = None, config: Any = None, name: str = "model.safetensors") -> Path:
    """A Hugging Face folder; ``config`` may be a dict, or the text itself."""
    text = config if isinstance(config, bytes) else json.dumps(CONFIG if config is None else config).encode()
    (folder / "config.json").write_bytes(text)
    (folder / name).write_bytes(safetensors() if weights is None else weights)
    return folder


# ---- torch ---------------------------------------------------------------------------------------------------------


def text(value: str) -> bytes:
    """A text in a pickle."""
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def whole(value: int) -> bytes:
    """A whole number in a pickle."""
    return b"\x8a" + bytes([16]) + value.to_bytes(16, "little", signed=True)


def tensor(
    key: str,
    shape: tuple[int, ...],
    *,
    numel: int | None = None,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
    kind: str = "FloatStorage",
) -> bytes:
    """A tensor in a pickle."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.insert(0, step)
        step *= n
    numel = count(shape) if numel is None else numel
    out = b"ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + b"ctorch\n" + kind.encode() + b"\n"
    out += text(key) + text("cpu") + whole(numel) + b"tQ" + whole(offset)
    out += b"(" + b"".join(map(whole, shape)) + b"t(" + b"".join(map(whole, strides or steps)) + b"t"
    return out + b"\x89ccollections\nOrderedDict\n)RtR"


def state(more: bytes = b"") -> bytes:
    """The model's state dict as a pickle; ``more`` are further keys and values."""
    items = b"".join(text(name) + tensor(str(i), shape) for i, (name, shape) in enumerate(SHAPES.items()))
    return b"\x80\x02}(" + items + more + b"u."


def archive(
    pickle: bytes | None = None,
    *,
    extra: Mapping[str, bytes] | None = None,
    root: str = "archive",
    method: int = 0,
    storages: bool = True,
) -> bytes:
    """A torch file around a pickle."""
    records = {f"{root}/data.pkl": state() if pickle is None else pickle, f"{root}/byteorder": b"little"}
    if storages:
        records |= {f"{root}/data/{i}": data for i, data in enumerate(DATA.values())}
    records |= {f"{root}/version": b"3\n", **(extra or {})}
    return packed(list(records.items()), method)


def packed(records: list[tuple[str, bytes]], method: int = 0) -> bytes:
    """A zip archive; names may be anything, and anything twice."""
    out, listed = io.BytesIO(), []
    for name, data in records:
        raw = name.encode()
        stored = data
        if method == zipfile.ZIP_DEFLATED:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            stored = packer.compress(data) + packer.flush()
        at = out.tell()
        fields = (20, 0x800, method, 0, 0x21, zlib.crc32(data), len(stored), len(data), len(raw), 0)
        out.write(struct.pack("<IHHHHHIIIHH", 0x04034B50, *fields) + raw + stored)
        listed.append(struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, *fields, 0, 0, 0, 0, at) + raw)
    start = out.tell()
    out.write(b"".join(listed))
    length = out.tell() - start
    out.write(struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, len(listed), len(listed), length, start, 0))
    return out.getvalue()


def torch_folder(folder: Path, data: bytes) -> Path:
    """A folder with a ``pytorch_model.bin``."""
    return hf(folder, data, name="pytorch_model.bin")


# ---- GGUF ----------------------------------------------------------------------------------------------------------


def string(value: str | bytes) -> bytes:
    """A text in a GGUF file."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def keyed(key: str | bytes, kind: int, raw: bytes) -> bytes:
    """A key-value of a GGUF file."""
    return string(key) + struct.pack("<I", kind) + raw


def u32(key: str, value: int) -> bytes:
    """A 32-bit key-value."""
    return keyed(key, 4, struct.pack("<I", value))


def f32(key: str, value: float) -> bytes:
    """A float key-value."""
    return keyed(key, 6, struct.pack("<f", value))


def info(name: str | bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    """A tensor info of a GGUF file."""
    return (
        string(name)
        + struct.pack("<I", len(dims) if n_dims is None else n_dims)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


def gguf_values() -> list[bytes]:
    """The model's key-values."""
    tokens = [f"t{i}" for i in range(VOCAB)]
    strings = struct.pack("<IQ", 8, VOCAB) + b"".join(map(string, tokens))
    return [
        keyed("general.architecture", 8, string("llama")),
        u32("llama.block_count", 1),
        u32("llama.context_length", 64),
        u32("llama.embedding_length", HIDDEN),
        u32("llama.feed_forward_length", FF),
        u32("llama.attention.head_count", HEADS),
        u32("llama.attention.head_count_kv", KV),
        f32("llama.attention.layer_norm_rms_epsilon", 1e-5),
        f32("llama.rope.freq_base", 10000.0),
        u32("llama.vocab_size", VOCAB),
        keyed("tokenizer.ggml.model", 8, string("gpt2")),
        keyed("tokenizer.ggml.pre", 8, string("llama-bpe")),
        keyed("tokenizer.ggml.tokens", 9, strings),
        keyed("tokenizer.ggml.token_type", 9, struct.pack("<IQ", 5, VOCAB) + struct.pack(f"<{VOCAB}i", *[1] * VOCAB)),
        keyed("tokenizer.ggml.merges", 9, struct.pack("<IQ", 8, 1) + string("t 1")),
    ]


def gguf_infos() -> list[bytes]:
    """The model's tensor infos."""
    out, at = [], 0
    for name, shape in SHAPES.items():
        out.append(info(_GGUF_NAMES[name], tuple(reversed(shape)), 0, at))
        at += -(-len(DATA[name]) // 32) * 32
    return out


def gguf(
    values: list[bytes] | None = None,
    infos: list[bytes] | None = None,
    *,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    alignment: int = 32,
    cut: int | None = None,
    order: str = "<",
) -> bytes:
    """A GGUF file."""
    values = gguf_values() if values is None else values
    infos = gguf_infos() if infos is None else infos
    tensors, pairs = counts or (len(infos), len(values))
    head = b"GGUF" + struct.pack(order + "IQQ", version, tensors, pairs) + b"".join(values) + b"".join(infos)
    head += bytes(-len(head) % alignment)
    return (head + b"".join(d + bytes(-len(d) % 32) for d in DATA.values()))[:cut]
