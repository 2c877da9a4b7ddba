"""save_model: a live module to every layout, bit for bit, and back through what others wrote to read it."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
book = pytest.importorskip("llms_from_scratch.llama3")
from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

from convert import ConvertError, UsageError, load_into, no_init, save_model  # noqa: E402
from tests.fixtures import make_hf, make_meta, make_scratch, tokens  # noqa: E402
from tests.fixtures.ggml import gguf_state  # noqa: E402
from tests.own_module import NAMES, Mine, book_model, logits, problems  # noqa: E402


def filled(made, dtype=torch.float32, **changes):
    model = book_model(made.shape, dtype, meta=False, **changes)
    state = {k: v for k, v in made.tensors.items()}
    model.load_state_dict(state, strict=True)
    if made.shape.tied:
        model.out_head.weight = model.tok_emb.weight
    return model


def stored(folder):
    """Every tensor of a folder, read by safetensors or torch."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    for path in sorted(folder.glob("*.pth")):
        for name, part in torch.load(path, weights_only=True).items():
            tensors.setdefault(name, []).append(part)
    return tensors


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gqa8", "tied"])
def test_every_layout_bit_for_bit(tmp_path, shape, dtype):
    made = make_scratch(tmp_path / "s", shape, dtype=dtype)
    model = filled(made, getattr(torch, dtype))
    save_model(model, tmp_path / "hf", layout="hf", config=model.cfg)
    same(stored(tmp_path / "hf"), made.hf)
    save_model(model, tmp_path / "scratch", layout="scratch")
    same(stored(tmp_path / "scratch"), made.tensors)
    meta = make_meta(tmp_path / "m", shape, dtype=dtype, mp=2)
    save_model(model, tmp_path / "meta", layout="meta", model_parallel=2)
    for rank in range(2):
        name = f"consolidated.{rank:02d}.pth"
        ours = torch.load(tmp_path / "meta" / name, weights_only=True)
        same(ours, torch.load(meta.path / name, weights_only=True))
    config = json.loads((tmp_path / "scratch" / "scratch_config.json").read_text())
    assert config["dtype"] == dtype and config["rope_base"] == made.shape.theta


@pytest.mark.parametrize("shape", ["std", "tied"])
def test_transformers_computes_the_same(tmp_path, shape):
    made = make_scratch(tmp_path / "s", shape, scaling=8)
    model = filled(made, rope_freq=made.config["rope_freq"])
    save_model(model, tmp_path / "hf", layout="hf")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float64, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = tokens(made.shape)
    model = model.double()
    model.cfg = {**model.cfg, "dtype": torch.float64}
    assert (logits(model, ids) - logits(theirs, ids).logits).abs().max() < 1e-5
    theirs.model.layers[0].self_attn.k_proj.weight.data[:8] *= -1
    assert (logits(model, ids) - logits(theirs, ids).logits).abs().max() > 0.1


def test_training_then_saving_then_loading(tmp_path):
    made = make_hf(tmp_path / "hf", "std")
    model = book_model(made.shape, torch.float32)
    load_into(model, made.path)
    model(tokens(made.shape)).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    save_model(model, tmp_path / "out", layout="hf", config=made.path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, model.out_head.weight)
    assert not torch.equal(again.lm_head.weight, made.hf["lm_head.weight"])
    assert torch.equal(again.model.layers[1].self_attn.q_proj.weight, model.trf_blocks[1].att.W_query.weight)


def test_a_hugging_face_module_with_its_own_config_and_tokenizer(tmp_path):
    made = make_hf(tmp_path / "hf", "tied", tokenizer=True)
    model = transformers.LlamaForCausalLM.from_pretrained(made.path, dtype=torch.float32)
    save_model(model, tmp_path / "again", layout="hf", tokenizer=made.path)
    same(stored(tmp_path / "again"), made.hf)  # the head is tied, so it is not stored
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (made.path / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["eos_token_id"] == 1 and config["tie_word_embeddings"] is True
    save_model(model, tmp_path / "meta", layout="meta")
    found = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    same(found, make_meta(tmp_path / "m", "tied").tensors)
    # a scratch module, described by a Hugging Face config: what the config says beside the sizes goes along
    scratch = filled(make_scratch(tmp_path / "s", "tied"))
    save_model(scratch, tmp_path / "third", layout="hf", config=made.path / "config.json")
    assert json.loads((tmp_path / "third" / "config.json").read_text())["eos_token_id"] == 1
    with pytest.raises(UsageError, match="source itself"):
        save_model(scratch, made.path, layout="hf", tokenizer=made.path, overwrite=True)


def test_gguf_as_the_gguf_package_reads_it(tmp_path):
    gguf = pytest.importorskip("gguf")
    made = make_hf(tmp_path / "hf", "gqa8", tokenizer=True)
    model = book_model(made.shape, torch.float32)
    load_into(model, made.path)
    save_model(model, tmp_path / "mine.gguf", layout="gguf", type="f32", tokenizer=made.path)
    reader = gguf.GGUFReader(tmp_path / "mine.gguf")
    assert reader.fields["general.name"].contents() == "mine"
    assert len(reader.fields["tokenizer.ggml.tokens"].contents()) == made.shape.vocab
    found = {t.name: torch.from_numpy(t.data.copy()).reshape(tuple(t.shape.tolist())[::-1]) for t in reader.tensors}
    same(found, gguf_state(made.hf, made.shape))
    again = book_model(made.shape, torch.float32)
    load_into(again, tmp_path / "mine.gguf")
    same(again.state_dict(), model.state_dict())


def test_strides_and_equal_but_separate_heads(tmp_path):
    made = make_scratch(tmp_path / "s", "tied")
    model = filled(made)
    model.out_head.weight = nn.Parameter(model.tok_emb.weight.detach().clone())
    block = model.trf_blocks[1]
    block.ff.fc3.weight = nn.Parameter(block.ff.fc3.weight.detach().T.contiguous().T)
    block.att.W_key.weight = nn.Parameter(torch.cat([block.att.W_key.weight.detach()] * 2, 1)[:, : made.shape.hidden])
    save_model(model, tmp_path / "hf", layout="hf")
    same(stored(tmp_path / "hf"), made.hf)
    model.out_head.weight.data[5, 5] += 1
    save_model(model, tmp_path / "hf", layout="hf", overwrite=True)
    assert torch.equal(stored(tmp_path / "hf")["lm_head.weight"], model.out_head.weight)


def test_dtype_and_overflow(tmp_path):
    made = make_scratch(tmp_path / "s", "std")
    model = filled(made)
    save_model(model, tmp_path / "hf", layout="hf", dtype=torch.bfloat16)
    same(stored(tmp_path / "hf"), {k: v.to(torch.bfloat16) for k, v in made.hf.items()})
    model.tok_emb.weight.data[1, 2] = 1e6
    assert "overflow" in problems(lambda: save_model(model, tmp_path / "half", layout="hf", dtype="float16"))
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize("head", [True, False])
def test_a_users_own_module(tmp_path, head):
    """Fused qkv, interleaved pairs, a persistent mask; without a head where it computes logits by the embedding."""
    made = make_hf(tmp_path / "hf", "std" if head else "tied")
    names = tmp_path / "mine.toml"
    names.write_text(NAMES)
    with no_init():
        model = Mine(made.shape, head=head)
    load_into(model, made.path, names=names)
    done = save_model(model, tmp_path / "back", layout="hf", names=names, config=made.config)
    same(stored(tmp_path / "back"), made.hf)
    assert any("rotary.mask" in note for note in done.notes)
    save_model(model, tmp_path / "own", layout="scratch", names=names, config=made.config)
    own = stored(tmp_path / "own")
    wanted = {n: p.detach() for n, p in model.named_parameters()}
    same(own, wanted if head else wanted | {"head.weight": model.words.weight.detach()})
    save_model(model, tmp_path / "meta", layout="meta", names=names, config=made.config, tie="share")
    found = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    same(found, make_meta(tmp_path / "m", made.shape).tensors)


def test_what_cannot_be_saved(tmp_path):
    made = make_scratch(tmp_path / "s", "std")
    out = tmp_path / "out"
    assert "meta" in problems(lambda: save_model(book_model(made.shape), out, layout="hf"))
    model = filled(made)
    found = problems(lambda: save_model(model, out, layout="hf", config={**model.cfg, "hidden_dim": 88}))
    assert 80 in found["shape"].found and 88 in found["shape"].wanted
    found = problems(lambda: save_model(model, out, layout="hf", config={**model.cfg, "n_layers": 3}))
    assert set(found) == {"missing_tensor"}
    bias = {"attention_bias": False}
    model.trf_blocks[0].att.W_query = nn.Linear(48, 48)
    # its presence turns the config's silence into biases everywhere; a config that says no makes it one too many
    assert "missing_tensor" in problems(lambda: save_model(model, out, layout="hf"))
    assert "unexpected_tensor" in problems(lambda: save_model(model, out, layout="hf", config={**model.cfg, **bias}))
    whole = filled(made)
    whole.tok_emb.weight = nn.Parameter(torch.ones(96, 48, dtype=torch.int8), requires_grad=False)
    assert "dtype" in problems(lambda: save_model(whole, out, layout="hf"))
    for wrong in (
        {"colour": 1},
        {"size": "llama3-8b"},
        {"config": {"a": 1}},
        {"config": tmp_path / "nothing"},
        {"dtype": "int8"},
    ):
        with pytest.raises(UsageError):
            save_model(filled(made), out, layout="hf", **wrong)
    del model.cfg
    with pytest.raises(UsageError, match="config"):
        save_model(model, out, layout="hf")
    with pytest.raises(ConvertError):
        save_model(nn.Linear(3, 4), out, layout="hf", config=made.config)
    assert not out.exists()


@pytest.mark.gpu
def test_from_cuda(tmp_path):
    made = make_scratch(tmp_path / "s", "gqa8", dtype="bfloat16")
    model = filled(made, torch.bfloat16).cuda()
    save_model(model, tmp_path / "hf", layout="hf")
    same(stored(tmp_path / "hf"), made.hf)
