"""Makes the checkpoints that are measured: Llama 3.2 1B's shape, random bfloat16 of std 0.02, written block by block.

Run as its own process, so that the memory it takes is not counted for anything else:
``python -m tests.benchmark.checkpoint hf|meta FOLDER [LAYERS]``.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

DIM, FF, HEADS, KV, HEAD_DIM, VOCAB, LAYERS = 2048, 8192, 32, 8, 64, 128256, 16
BLOCK = 1 << 24  # elements drawn at once

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": FF,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "torch_dtype": "bfloat16",
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
PARAMS: dict[str, Any] = {
    "dim": DIM,
    "n_heads": HEADS,
    "n_kv_heads": KV,
    "vocab_size": VOCAB,
    "multiple_of": 256,
    "ffn_dim_multiplier": 1.5,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_scaled_rope": True,
}


def hf_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tied model, in the order in which they are stored."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM)}
    for layer in range(layers):
        p = f"model.layers.{layer}."
        shapes |= {
            p + "input_layernorm.weight": (DIM,),
            p + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, DIM),
            p + "self_attn.k_proj.weight": (KV * HEAD_DIM, DIM),
            p + "self_attn.v_proj.weight": (KV * HEAD_DIM, DIM),
            p + "self_attn.o_proj.weight": (DIM, HEADS * HEAD_DIM),
            p + "post_attention_layernorm.weight": (DIM,),
            p + "mlp.gate_proj.weight": (FF, DIM),
            p + "mlp.up_proj.weight": (FF, DIM),
            p + "mlp.down_proj.weight": (DIM, FF),
        }
    return shapes | {"model.norm.weight": (DIM,)}


def draw(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Blocks of random bfloat16 as ``uint16``, flat; norms around one."""
    left = int(np.prod(shape))
    while left:
        count = min(left, BLOCK)
        values = rng.standard_normal(count, np.float32)
        values *= 0.02
        if len(shape) == 1:
            values += 1
        yield (values.view(np.uint32) >> 16).astype(np.uint16)
        left -= count


def make_hf(folder: Path, layers: int) -> None:
    """One safetensors file and its config; 2.47 GB with 16 layers."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = hf_shapes(layers)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in shapes.values():
            for block in draw(shape, rng):
                file.write(memoryview(block).cast("B"))
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}, indent=2))


def make_meta(folder: Path, layers: int) -> None:
    """One ``consolidated.00.pth`` with ``output.weight`` stored, as Meta's own file has it; 3.0 GB with 16 layers."""
    import torch

    names = {
        "self_attn.q_proj": "attention.wq",
        "self_attn.k_proj": "attention.wk",
        "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    state = {}
    for name, shape in hf_shapes(layers).items():
        flat = np.concatenate(list(draw(shape, rng)))
        tensor = torch.from_numpy(flat).view(torch.bfloat16).view(shape)
        if ".layers." not in name:
            new = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}[name]
        else:
            _, _, layer, *stem = name.removesuffix(".weight").split(".")
            new = f"layers.{layer}.{names['.'.join(stem)]}.weight"
        if new.endswith(("wq.weight", "wk.weight")):
            tensor = tensor.view(-1, 2, HEAD_DIM // 2, DIM).transpose(1, 2).reshape(shape)
        state[new] = tensor
    state["output.weight"] = state["tok_embeddings.weight"].clone()
    torch.save(state, folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS | {"n_layers": layers}))


if __name__ == "__main__":
    layout, where, *rest = sys.argv[1:]
    {"hf": make_hf, "meta": make_meta}[layout](Path(where), int(rest[0]) if rest else LAYERS)
