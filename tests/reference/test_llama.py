from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from convert.errors import ConvertError, TableError, UsageError
from convert.reference import reference_for
from convert.reference.generation import generate, sample
from convert.reference.layers import KVCache
from convert.reference.llama import LlamaConfig
from tests.fixtures.hf import hf_config
from tests.fixtures.meta import meta_state
from tests.fixtures.scratch import scratch_state
from tests.fixtures.shapes import get_shape
from tests.fixtures.weights import hf_state, llama3_scaling, tokens
from tests.fixtures.witness import meta_logits
from tests.reference.models import interleaved, model_of, reference_names

TOLERANCE = 1e-4
LLAMA3_SHORT = {**llama3_scaling(8), "original_max_position_embeddings": 32}
LLAMA3_32 = {**llama3_scaling(32), "original_max_position_embeddings": 32}

CASES: dict[str, dict[str, Any]] = {
    "gqa 8/2": {"shape": "gqa8"},
    "gqa 6/2": {"shape": "std"},
    "gqa 32/4": {"shape": "h32kv4"},
    "mha": {"shape": "mha"},
    "head_dim 16": {"shape": "hd16"},
    "head_dim 6": {"shape": "hd6"},
    "tied": {"shape": "tied"},
    "attention bias": {"shape": "std", "attention_bias": True},
    "all biases": {"shape": "gqa8", "attention_bias": True, "mlp_bias": True},
    "llama3 x8": {"shape": "gqa8", "scaling": LLAMA3_SHORT},
    "llama3 x32": {"shape": "hd16", "scaling": LLAMA3_32},
    "yarn": {
        "shape": "gqa8",
        "scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    },
    "linear": {"shape": "gqa8", "scaling": {"rope_type": "linear", "factor": 4.0}},
}


def _make(shape: str, *, scaling: dict[str, Any] | None = None, **biases: bool):
    found = get_shape(shape)
    return found, hf_state(found, **biases), hf_config(found, dtype="float32", scaling=scaling, **biases)


def _transformers(config: dict[str, Any], state: dict[str, torch.Tensor]):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case):
    shape, state, config = _make(**CASES[case])
    ids = tokens(shape)
    wanted = _transformers(config, state)(ids).logits
    model = model_of(state, config)
    assert (model(ids) - wanted).abs().max() < TOLERANCE
    swapped = model_of(interleaved(state, shape), config, pairing="interleaved")
    assert (swapped(ids) - wanted).abs().max() < TOLERANCE
    # The negative control, a hundred times beyond: the other rotary order, and what each case is about left out.
    with model.controls[0].apply(model):
        assert (model(ids) - wanted).abs().max() > 100 * TOLERANCE
    assert (model(ids) - wanted).abs().max() < TOLERANCE  # and it is taken back
    if CASES[case].get("scaling"):
        plain = model_of(state, config | {"rope_parameters": {"rope_type": "default", "rope_theta": shape.theta}})
        assert (plain(ids) - wanted).abs().max() > 100 * TOLERANCE
    if case.endswith(("bias", "biases")):
        without = {k: torch.zeros_like(t) if k.endswith("bias") else t for k, t in state.items()}
        assert (model_of(without, config)(ids) - wanted).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("shape", ["gqa8", "mha", "std", "h32kv8", "hd6"])
@torch.no_grad()
def test_meta_weights_run_as_stored(shape):
    shape = get_shape(shape)
    state = meta_state(hf_state(shape), shape)
    ids = tokens(shape)
    wanted = meta_logits(state, shape, ids, scaling=LLAMA3_SHORT)
    names = {
        "tok_embeddings": "tok_emb",
        "layers": "trf_blocks",
        "attention_norm": "norm1",
        "ffn_norm": "norm2",
        "attention.wq": "att.W_query",
        "attention.wk": "att.W_key",
        "attention.wv": "att.W_value",
        "attention.wo": "att.out_proj",
        "feed_forward.w1": "ff.fc1",
        "feed_forward.w3": "ff.fc2",
        "feed_forward.w2": "ff.fc3",
        "output": "out_head",
    }
    book = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        book["final_norm.weight" if name == "norm.weight" else name] = tensor
    config = hf_config(shape, dtype="float32", scaling=LLAMA3_SHORT)
    model = reference_for("llama").build(config, pairing="interleaved")
    model.load_state_dict(book, strict=True)
    assert (model(ids) - wanted).abs().max() < TOLERANCE
    with model.controls[0].apply(model):
        assert (model(ids) - wanted).abs().max() > 100 * TOLERANCE


@torch.no_grad()
def test_the_two_orders_are_one_model_in_float64():
    shape, state, config = _make("gqa8", scaling=LLAMA3_SHORT)
    ids = tokens(shape)
    a = model_of(state, config).double()(ids)
    b = model_of(interleaved(state, shape), config, pairing="interleaved").double()(ids)
    torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("scaling", [None, LLAMA3_SHORT], ids=["plain", "llama3"])
@torch.no_grad()
def test_the_books_state_dict_loads_and_agrees(scaling):
    book = pytest.importorskip("llms_from_scratch.llama3")
    from tests.fixtures.scratch import scratch_config

    shape, state, config = _make("gqa8", scaling=scaling)
    theirs = book.Llama3Model({**scratch_config(shape, dtype="float32", scaling=scaling), "dtype": torch.float32})
    theirs.load_state_dict(scratch_state(state, shape), strict=True)
    ours = reference_for("llama").build(config)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    ids = tokens(shape)
    assert (ours(ids) - theirs(ids)).abs().max() < TOLERANCE
    with ours.controls[0].apply(ours):
        assert (ours(ids) - theirs(ids)).abs().max() > 100 * TOLERANCE


@torch.no_grad()
def test_sliding_window_is_mistrals():
    transformers = pytest.importorskip("transformers")
    shape, state, config = _make("gqa8")
    config = config | {"sliding_window": 24}
    own = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    theirs = transformers.MistralForCausalLM(transformers.MistralConfig(**own, attn_implementation="eager"))
    theirs.load_state_dict(state)
    ids = tokens(shape)
    wanted = theirs.eval()(ids).logits
    assert (model_of(state, config)(ids) - wanted).abs().max() < TOLERANCE
    unlimited = model_of(state, config | {"sliding_window": None})(ids)
    assert (unlimited - wanted)[:, :24].abs().max() < TOLERANCE
    assert (unlimited - wanted)[:, 24:].abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("window", [None, 20])
@torch.no_grad()
def test_cached_steps_equal_the_full_pass(window):
    shape, state, config = _make("hd16")
    model = model_of(state, config | {"sliding_window": window})
    ids = tokens(shape)
    full = model(ids)
    cache = KVCache(model.n_layers)
    parts = [model(ids[:, a:b], cache) for a, b in ((0, 70), (70, 71), (71, 130), (130, 160))]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=1e-5, atol=2e-5)
    assert cache.length == 160


@torch.no_grad()
def test_layer_by_layer_is_the_forward_pass():
    shape, state, config = _make("std")
    model, ids = model_of(state, config), tokens(shape)
    x, context = model.embed(ids), model.context(160)
    for layer in range(model.n_layers):
        x = model.block(layer)(x, context)
    assert torch.equal(model.head(x), model(ids))


def test_tied_head_is_one_parameter():
    _, state, config = _make("tied")
    model = model_of(state, config)
    assert model.out_head.weight is model.tok_emb.weight
    assert len(list(model.parameters())) == len(reference_names(state))


def test_config_reads_what_normalised_configs_hold():
    _, _, config = _make("hd16", scaling=LLAMA3_32, attention_bias=True)
    got = LlamaConfig.from_hf(config, rope_pairing="interleaved")
    assert (got.head_dim, got.n_heads, got.n_kv_groups, got.hidden_dim) == (16, 6, 2, 80)
    assert got.biases == frozenset("qkvo")
    assert got.rope_scaling["factor"] == 32.0
    assert replace(got, biases=frozenset()) == LlamaConfig.from_hf(config, rope_pairing="interleaved", biases=())
    without = {k: v for k, v in config.items() if k not in ("head_dim", "num_key_value_heads")}
    assert (LlamaConfig.from_hf(without).head_dim, LlamaConfig.from_hf(without).n_kv_groups) == (8, 6)


def test_config_findings_come_all_at_once():
    with pytest.raises(ConvertError) as caught:
        LlamaConfig.from_hf({"hidden_size": 64, "hidden_act": "gelu", "num_attention_heads": 8})
    text = str(caught.value)
    for word in ("vocab_size", "intermediate_size", "num_hidden_layers", "rope_theta", "gelu"):
        assert word in text
    _, _, config = _make("std")
    with pytest.raises(ConvertError, match="6 query heads cannot share 4"):
        LlamaConfig.from_hf(config | {"num_key_value_heads": 4})


@pytest.mark.parametrize("name", ["nosuch", "../llama", "layers", ""])
def test_unknown_reference_is_a_table_error(name):
    with pytest.raises(TableError, match="no reference model"):
        reference_for(name)


def test_greedy_generation_is_transformers():
    shape, state, config = _make("gqa8", scaling=LLAMA3_SHORT)
    ids = tokens(shape, 60)
    theirs = _transformers(config | {"eos_token_id": None}, state)
    wanted = theirs.generate(ids, max_new_tokens=30, do_sample=False)[0, 60:].tolist()
    model = model_of(state, config)
    assert list(generate(model, ids, max_new_tokens=30)) == wanted
    stop = wanted.index(wanted[12])
    assert list(generate(model, ids[0].tolist(), max_new_tokens=30, eos_ids=[wanted[12]])) == wanted[:stop]
    with model.controls[0].apply(model):
        assert list(generate(model, ids, max_new_tokens=30)) != wanted


def test_sampling_keeps_to_its_limits_and_its_seed():
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0, -1.0])

    def draw(**options: Any) -> set[int]:
        generator = torch.Generator().manual_seed(7)
        return {sample(logits, generator=generator, **options) for _ in range(300)}

    assert draw() == {1}
    assert draw(temperature=1.5) == {0, 1, 2, 3, 4}
    assert draw(temperature=1.5, top_k=2) == {1, 2}
    assert draw(temperature=1.0, top_p=0.6) == {1}  # 0.636 of the mass
    assert draw(temperature=1.0, top_p=0.7) == {1, 2}
    assert draw(temperature=1.0, top_p=0.0) == {1}
    _, state, config = _make("std")
    model = model_of(state, config)
    runs = [
        list(generate(model, [3], max_new_tokens=20, temperature=1.0, generator=torch.Generator().manual_seed(s)))
        for s in (1, 1, 2)
    ]
    assert runs[0] == runs[1] != runs[2]


def test_bad_prompts_are_told():
    _, state, config = _make("std")
    model = model_of(state, config)
    with pytest.raises(UsageError, match="empty"):
        generate(model, [], max_new_tokens=1)
    with pytest.raises(UsageError, match="0 to 95"):
        generate(model, [96], max_new_tokens=1)
