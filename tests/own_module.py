"""Live modules for tests: the book's class, a user's own with other names and numerics, and what judges them."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
book = pytest.importorskip("llms_from_scratch.llama3")
from torch import nn  # noqa: E402

from convert import ConvertError, no_init  # noqa: E402
from tests.fixtures.scratch import scratch_config  # noqa: E402


def book_model(shape, dtype=torch.float64, *, meta=True, **changes):
    config = {**scratch_config(shape, dtype="float32"), "dtype": dtype, **changes}
    if not meta:
        return book.Llama3Model(config)
    with no_init():
        return book.Llama3Model(config)


def oracle(made_hf, ids):
    """transformers' logits in float64, where orders of summation make no difference."""
    model = transformers.LlamaForCausalLM.from_pretrained(made_hf, dtype=torch.float64)
    with torch.no_grad():
        return model(ids).logits


def logits(model, ids):
    with torch.no_grad():
        return model(ids)


def problems(call):
    with pytest.raises(ConvertError) as caught:
        call()
    return {p.kind: p for p in caught.value.problems}


class Rotary(nn.Module):
    """Neighbouring pairs (2i, 2i + 1) turned by complex numbers, as Meta's code does."""

    def __init__(self, dim, theta, context):
        super().__init__()
        angles = torch.outer(torch.arange(context).double(), theta ** (-torch.arange(0, dim, 2).double() / dim))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((context, context), -math.inf), 1))

    def forward(self, x):
        pairs = torch.view_as_complex(x.double().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turn[: x.shape[2]]).flatten(3).to(x.dtype)


class Mine(nn.Module):
    """A user's own Llama: own names, fused qkv, interleaved pairs, a persistent mask, no head of its own if tied."""

    def __init__(self, s, *, head):
        super().__init__()
        self.s = s
        self.words = nn.Embedding(s.vocab, s.hidden)
        rows = (s.heads + 2 * s.kv_heads) * s.head_dim
        self.layers_ = nn.ModuleList(
            nn.ModuleDict(
                {
                    "pre": nn.RMSNorm(s.hidden, eps=s.eps),
                    "qkv": nn.Linear(s.hidden, rows, bias=False),
                    "mix": nn.Linear(s.heads * s.head_dim, s.hidden, bias=False),
                    "post": nn.RMSNorm(s.hidden, eps=s.eps),
                    "gate": nn.Linear(s.hidden, s.ff, bias=False),
                    "up": nn.Linear(s.hidden, s.ff, bias=False),
                    "down": nn.Linear(s.ff, s.hidden, bias=False),
                }
            )
            for _ in range(s.layers)
        )
        self.norm = nn.RMSNorm(s.hidden, eps=s.eps)
        self.rotary = Rotary(s.head_dim, s.theta, s.context)
        if head:
            self.head = nn.Linear(s.hidden, s.vocab, bias=False)

    def forward(self, ids):
        s, x, n = self.s, self.words(ids), ids.shape[1]
        for b in self.layers_:
            heads = b["qkv"](b["pre"](x)).view(1, n, -1, s.head_dim).transpose(1, 2)
            q, k, v = heads.split((s.heads, s.kv_heads, s.kv_heads), 1)
            q, k = self.rotary(q), self.rotary(k)
            k, v = (t.repeat_interleave(s.heads // s.kv_heads, 1) for t in (k, v))
            scores = q @ k.transpose(2, 3) / s.head_dim**0.5 + self.rotary.mask[:n, :n].to(x.dtype)
            x = x + b["mix"]((scores.softmax(-1) @ v).transpose(1, 2).reshape(1, n, -1))
            y = b["post"](x)
            x = x + b["down"](nn.functional.silu(b["gate"](y)) * b["up"](y))
        x = self.norm(x)
        return self.head(x) if hasattr(self, "head") else x @ self.words.weight.T


NAMES = """
extends = "llama"
prefix = "layers_.{l}."
convention = { rope = "interleaved" }
[top]
token_embd = "words.weight"
output_norm = "norm.weight"
output = "head.weight"
[block]
attn.norm = "pre.weight"
attn.o = "mix.weight"
mlp.norm = "post.weight"
mlp.gate = "gate.weight"
mlp.up = "up.weight"
mlp.down = "down.weight"
[[fused]]
name = "qkv.weight"
parts = ["attn.q", "attn.k", "attn.v"]
"""
