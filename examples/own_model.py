"""A Llama of one's own, with its own names, filled straight from any checkpoint.

    bash examples/quickstart.sh
    .venv-quickstart/bin/python examples/own_model.py out/quickstart/hf "The capital of France is"

Nothing here is from the product but ``no_init`` and ``load_into``; the names are in ``own_names.toml``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import convert

NAMES = Path(__file__).with_name("own_names.toml")


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring pairs ``(2i, 2i + 1)`` of ``[batch, heads, n, d]``."""
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)


class Block(nn.Module):
    """Attention with q, k and v in one matrix, then SwiGLU with gate and up in one."""

    def __init__(self, dim: int, heads: int, kv_heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, dim // heads
        self.norm_a = nn.RMSNorm(dim, eps=eps)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.size, bias=False)
        self.mix = nn.Linear(dim, dim, bias=False)
        self.norm_b = nn.RMSNorm(dim, eps=eps)
        self.grow = nn.Linear(dim, 2 * width, bias=False)
        self.shrink = nn.Linear(width, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``[batch, n, dim]`` to the same shape."""
        batch, n, dim = x.shape
        heads = self.qkv(self.norm_a(x)).view(batch, n, -1, self.size).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, n, dim))
        gate, up = self.grow(self.norm_b(x)).chunk(2, dim=-1)
        return x + self.shrink(silu(gate) * up)


class OwnLlama(nn.Module):
    """Takes the numbers of a Hugging Face ``config.json`` (without RoPE scaling)."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        dim, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        shape = (dim, heads, config["num_key_value_heads"], config["intermediate_size"], eps)
        self.embedding = nn.Embedding(config["vocab_size"], dim)
        self.blocks = nn.ModuleList(Block(*shape) for _ in range(config["num_hidden_layers"]))
        self.last_norm = nn.RMSNorm(dim, eps=eps)
        self.to_logits = nn.Linear(dim, config["vocab_size"], bias=False)
        rope = config.get("rope_parameters") or config
        size = dim // heads
        frequencies = rope["rope_theta"] ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(config["max_position_embeddings"]).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[batch, n, vocabulary]`` of token ids ``[batch, n]``."""
        x, n = self.embedding(ids), ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:n], self.sin[:n])
        return self.to_logits(self.last_norm(x))


def load(source: Path) -> OwnLlama:
    """The model of a Hugging Face folder, built without random initialisation and filled from the file."""
    config = json.loads((source / "config.json").read_text())
    with convert.no_init():
        model = OwnLlama(config)
    convert.load_into(model, source, names=NAMES)
    return model.eval()


def main() -> None:
    """Continue a prompt, greedily."""
    from tokenizers import Tokenizer

    source = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    ids = tokenizer.encode(sys.argv[2] if len(sys.argv) > 2 else "The capital of France is").ids
    model = load(source)
    with torch.no_grad():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    print(tokenizer.decode(ids))


if __name__ == "__main__":
    main()
