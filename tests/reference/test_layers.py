from __future__ import annotations

import math

import pytest
import torch

from convert.errors import ConvertError
from convert.reference.layers import (
    GroupedQueryAttention,
    KVCache,
    RMSNorm,
    RotaryEmbedding,
    apply_rotary,
    causal_mask,
    inverse_frequencies,
)
from convert.reference.rotary import attention_factor

SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 4.0},
    *(
        {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        for factor, original in ((8.0, 8192), (32.0, 8192), (8.0, 32))
    ),
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
    {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512, "beta_fast": 20.0, "beta_slow": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("dim", [6, 16, 64, 128])
def test_frequencies_are_those_of_transformers(scaling, dim):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=dim * 2,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=16384,
        rope_parameters={"rope_theta": 5e5, **(scaling or {"rope_type": "default"})},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = inverse_frequencies(dim, 5e5, scaling)
    torch.testing.assert_close(ours.float(), theirs.inv_freq, rtol=2e-6, atol=0)
    assert math.isclose(attention_factor(scaling), theirs.attention_scaling, rel_tol=1e-12)
    if scaling is not None and scaling["factor"] != 1.0:
        assert (ours - inverse_frequencies(dim, 5e5, None)).abs().max() > 1e-6  # the scaling does something


def test_unknown_and_incomplete_scaling_stop():
    with pytest.raises(ConvertError, match="longrope"):
        inverse_frequencies(8, 1e4, {"rope_type": "longrope", "factor": 2.0})
    with pytest.raises(ConvertError, match="low_freq_factor, high_freq_factor"):
        inverse_frequencies(8, 1e4, {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 32})
    with pytest.raises(ConvertError, match="pairs"):
        RotaryEmbedding(7, 1e4)
    with pytest.raises(ConvertError, match="sideways"):
        RotaryEmbedding(8, 1e4, pairing="sideways")


@pytest.mark.parametrize("dim", [6, 8, 16])
def test_interleaved_is_metas_complex_multiplication(dim):
    x = torch.randn(2, 3, 40, dim)
    angles = torch.outer(torch.arange(40).float(), 5e5 ** (-torch.arange(0, dim, 2).float() / dim))
    turn = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(2, 3, 40, -1, 2))
    meta = torch.view_as_real(pairs * turn).flatten(-2)
    ours = apply_rotary(x, RotaryEmbedding(dim, 5e5, pairing="interleaved")(0, 40))
    torch.testing.assert_close(ours, meta, rtol=1e-5, atol=1e-5)
    wrong = apply_rotary(x, RotaryEmbedding(dim, 5e5, pairing="half")(0, 40))
    assert (wrong - meta).abs().max() > 1.0
    assert torch.equal(wrong[:, :, 0], meta[:, :, 0])  # nothing turns at position 0


@pytest.mark.parametrize("dim", [6, 8, 16])
def test_half_is_transformers_rotation(dim):
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    q, k = torch.randn(1, 4, 30, dim), torch.randn(1, 2, 30, dim)
    rotation = RotaryEmbedding(dim, 1e4)(5, 30)
    cos, sin = (torch.cat((t, t), -1)[None] for t in (rotation.cos, rotation.sin))
    for ours, theirs in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(apply_rotary(ours, rotation), theirs, rtol=1e-6, atol=1e-6)


def test_both_orders_give_the_same_scores_on_their_own_rows():
    x = torch.randn(1, 2, 50, 8, dtype=torch.float64)
    neighbours = x.unflatten(-1, (2, 4)).transpose(-1, -2).flatten(-2)
    half = RotaryEmbedding(8, 1e4)(0, 50, dtype=torch.float64)
    inter = RotaryEmbedding(8, 1e4, pairing="interleaved")(0, 50, dtype=torch.float64)
    assert half.cos.dtype == torch.float64
    a, b = apply_rotary(x, half), apply_rotary(neighbours, inter)
    torch.testing.assert_close(a @ a.mT, b @ b.mT, rtol=1e-12, atol=1e-12)


def test_dimensions_beyond_the_rotary_ones_pass():
    x = torch.randn(1, 2, 20, 16)
    turned = apply_rotary(x, RotaryEmbedding(8, 1e4)(0, 20))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert not torch.equal(turned[..., :8], x[..., :8])


def test_tables_grow_keep_their_values_and_stay_out_of_the_state_dict():
    rope = RotaryEmbedding(8, 5e5)
    before = rope(100, 50)
    later = rope(2000, 10)
    torch.testing.assert_close(later.cos[0, 1].item(), math.cos(2000 * 5e5 ** (-2 / 8)), rtol=0, atol=1e-7)
    assert torch.equal(rope(100, 50).sin, before.sin)
    assert not rope.state_dict()
    rope.to(torch.bfloat16)  # a cast model still turns in float32
    assert torch.equal(rope(100, 50).sin, before.sin)
    with torch.device("meta"):
        assert not RotaryEmbedding(8, 5e5).cos.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_torchs(dtype):
    x = torch.randn(3, 48, dtype=dtype) * 1e-2
    ours, theirs = RMSNorm(48, 1e-5).to(dtype), torch.nn.RMSNorm(48, eps=1e-5, dtype=dtype)
    with torch.no_grad():
        ours.weight.copy_(torch.rand(48) + 0.5)
        theirs.weight.copy_(ours.weight)
    torch.testing.assert_close(ours(x), theirs(x))
    centred = RMSNorm(48, 1e-5, zero_centered=True).to(dtype)
    torch.testing.assert_close(centred(x), RMSNorm(48, 1e-5).to(dtype)(x))
    with torch.no_grad():
        theirs.eps = 1e-3
    assert (ours(x) - theirs(x)).abs().max() > 0.5  # small inputs: the epsilon matters


def test_mask_and_window():
    assert causal_mask(0, 7) is None
    assert causal_mask(9, 1) is None
    assert causal_mask(2, 3).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(0, 4, window=2).int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert causal_mask(3, 1, window=2).int().tolist() == [[0, 0, 1, 1]]


def test_attention_is_the_formula_with_groups():
    torch.manual_seed(0)
    att = GroupedQueryAttention(36, n_heads=6, n_kv_groups=2, head_dim=6, biases=frozenset("qv"))
    assert att.W_query.bias is not None
    assert att.W_key.bias is None
    x = torch.randn(1, 12, 36)
    rotation = RotaryEmbedding(6, 1e4)(0, 12)
    q, k, v = (p(x).view(12, -1, 6).transpose(0, 1) for p in (att.W_query, att.W_key, att.W_value))
    q, k = apply_rotary(q[None], rotation)[0], apply_rotary(k[None], rotation)[0]
    heads = []
    for h in range(6):
        scores = q[h] @ k[h // 3].T / math.sqrt(6) + torch.full((12, 12), -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ v[h // 3])
    torch.testing.assert_close(
        att(x, rotation=rotation, mask=None), att.out_proj(torch.cat(heads, -1))[None], rtol=1e-5, atol=1e-6
    )


def test_cache_appends_and_grows():
    cache = KVCache(1)
    parts = [torch.randn(1, 2, n, 6) for n in (5, 1, 90, 3)]
    for part in parts:
        keys, values = cache.layers[0].append(part, -part)
    assert cache.length == 99
    assert torch.equal(keys, torch.cat(parts, 2))
    assert torch.equal(values, -keys)
