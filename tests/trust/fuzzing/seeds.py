"""Small valid files of every format, made by the formats' own libraries: where mutation begins."""

from __future__ import annotations

import io
import json
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.torch import save as save_safetensors

from convert.formats import sstable

DATA = Path(__file__).parent.parent.parent / "data"


def safetensors() -> list[bytes]:
    """Every type, a scalar, an empty tensor, metadata, no tensor at all."""
    types = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    many = {f"t{i}": torch.arange(6).reshape(2, 3).to(kind) for i, kind in enumerate(types)}
    some = {"a": torch.tensor(3.0), "b": torch.zeros(0, 4), "ä": torch.ones(2, 1, 2)}
    return [save_safetensors(many), save_safetensors(some, {"format": "pt", "x": "y"}), save_safetensors({})]


def torch_files() -> list[bytes]:
    """State dicts, views, shared storages, parameters, training states, and objects that are left unread."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    module = torch.nn.Linear(3, 2)
    trees = [
        OrderedDict(w=base, b=torch.ones(3, dtype=torch.bfloat16)),
        {"model": {"a": base.T, "b": base[1:3], "c": base[:, ::2], "d": base[0].expand(3, 6)}, "step": 7, "lr": 1e-3},
        {"p": torch.nn.Parameter(torch.ones(2)), "e": torch.zeros(0, 3), "s": torch.tensor(1, dtype=torch.int64)},
        {"state_dict": module.state_dict(), "args": {"x": [1, (2, None), "y", True]}, "size": torch.Size([1, 2])},
        {"set": {1, 2}, "bytes": b"ab", "big": 1 << 70, "neg": -5, "dev": torch.device("cpu"), "t": torch.float16},
        {"f8": torch.ones(4).to(torch.float8_e4m3fn), "u16": torch.ones(3, dtype=torch.uint16), "bool": base > 3},
    ]
    out = []
    for tree in trees:
        for protocol in (2, 4):
            file = io.BytesIO()
            torch.save(tree, file, pickle_protocol=protocol)
            out.append(file.getvalue())
    return out


def gguf() -> list[bytes]:
    """Every value type, arrays, plain and quantised tensors, another alignment."""
    out = []
    for alignment in (None, 8):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "m.gguf")
            writer = GGUFWriter(path, "llama")
            if alignment:
                writer.add_custom_alignment(alignment)
            writer.add_uint8("a.u8", 1)
            writer.add_int8("a.i8", -1)
            writer.add_uint16("a.u16", 2)
            writer.add_int16("a.i16", -2)
            writer.add_uint32("a.u32", 3)
            writer.add_int32("a.i32", -3)
            writer.add_float32("a.f32", 1e-5)
            writer.add_float64("a.f64", 0.1)
            writer.add_uint64("a.u64", 2**40)
            writer.add_int64("a.i64", -(2**40))
            writer.add_bool("a.bool", True)
            writer.add_string("a.str", "grün")
            writer.add_array("a.strs", ["x", "", "yz"])
            writer.add_array("a.ints", [1, 2, 3])
            writer.add_array("a.floats", [0.5, 1.5])
            writer.add_array("a.bools", [True, False])
            writer.add_tensor("w", np.arange(12, dtype=np.float32).reshape(3, 4))
            writer.add_tensor("h", np.ones((2, 5), np.float16))
            writer.add_tensor("i", np.arange(3, dtype=np.int32))
            writer.add_tensor("q", np.zeros((2, 34), np.uint8), raw_dtype=GGMLQuantizationType.Q8_0)
            writer.add_tensor("d", np.ones((2, 1, 3, 2), np.float32))
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            out.append(path.read_bytes())
    return out


def index() -> list[bytes]:
    """Indexes as transformers writes them."""
    names = ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"]
    files = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    whole = {"metadata": {"total_size": 123456}, "weight_map": dict(zip(names, files, strict=True))}
    return [json.dumps(whole, indent=2).encode(), json.dumps({"weight_map": {"w": "m.safetensors"}}).encode()]


def configs() -> list[bytes]:
    """Configs of the layouts and several families."""
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 133,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    }
    meta = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "multiple_of": 16, "ffn_dim_multiplier": 1.3}
    meta |= {"norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 133, "use_scaled_rope": True}
    book = {"emb_dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_groups": 2, "hidden_dim": 176, "vocab_size": 133}
    book |= {"context_length": 256, "rope_base": 5e5, "dtype": "torch.bfloat16", "rope_freq": None}
    qwen = hf | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_scaling": None}
    gemma = hf | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
    gemma |= {"rope_scaling": None, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    new = {k: v for k, v in hf.items() if not k.startswith("rope")}
    new["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    return [json.dumps(x).encode() for x in (hf, meta, book, qwen, gemma, new)]


def sentencepiece() -> list[bytes]:
    """A trained model of each kind that is read."""
    import sentencepiece as sp

    text = ["the quick brown fox jumps over the lazy dog", "ab ba abba baab", "0123456789 hello world"] * 5
    out = []
    for kind in ("bpe", "unigram"):
        model = io.BytesIO()
        sp.SentencePieceTrainer.train(
            sentence_iterator=iter(text), model_writer=model, vocab_size=40, model_type=kind, minloglevel=2
        )
        out.append(model.getvalue())
    return out


def tensorflow() -> list[bytes]:
    """Indexes that real TensorFlow wrote."""
    return [path.read_bytes() for path in sorted(DATA.glob("*/*.index"))]


def checksummed(data: bytes) -> bytes:
    """A sorted table with the checksum of every block that can still be found made right."""
    out = bytearray(data)

    def mend(offset: int, size: int) -> None:
        end = offset + size
        if end + 5 <= len(out):
            crc = sstable.masked(sstable.crc32c(bytes(out[offset : end + 1])))
            out[end + 1 : end + 5] = crc.to_bytes(4, "little")

    try:
        _, at = sstable._handle(data, len(data) - sstable._FOOTER)
        (offset, size), _ = sstable._handle(data, at)
        for _, handle in sstable._entries(bytes(out[offset : offset + size])):
            mend(*sstable._handle(handle, 0)[0])
        mend(offset, size)
    except (sstable.Truncated, IndexError, ValueError):
        pass
    return bytes(out)
