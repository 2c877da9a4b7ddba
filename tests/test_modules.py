"""load_into: every layout into the book's class, Hugging Face's and one's own, against transformers' logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
book = pytest.importorskip("llms_from_scratch.llama3")
from torch import nn  # noqa: E402

import convert  # noqa: E402
from convert import ConvertError, UsageError, load_into, no_init  # noqa: E402
from convert.modules import check_module  # noqa: E402
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch, tokens  # noqa: E402
from tests.fixtures.scratch import scratch_config  # noqa: E402

MAKERS = {
    "hf": lambda p, s, **k: make_hf(p / "hf", s, **k),
    "bin": lambda p, s, **k: make_hf(p / "bin", s, format="bin", sharded=2, **k),
    "meta": lambda p, s, **k: make_meta(p / "meta", s, **k),
    "meta2": lambda p, s, **k: make_meta(p / "meta2", s, mp=2, **k),
    "meta2 llama2": lambda p, s, **k: make_meta(p / "meta2l2", s, mp=2, embedding_axis="llama2", rope_freqs=True, **k),
    "scratch": lambda p, s, **k: make_scratch(p / "scratch", s, **k),
    "strided pth": lambda p, s, **k: make_scratch(p / "pth", s, format="pth", strided=True, **k),
    "training": lambda p, s, **k: make_scratch(p / "train", s, format="pth", wrapper="model_state_dict", **k),
    "gguf": lambda p, s, **k: make_gguf(p / "m.gguf", s, **k),
}


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


@pytest.fixture(scope="module", params=["gqa8", "tied"])
def family(request, tmp_path_factory):
    """A shape, its Hugging Face folder, token ids and what transformers makes of them."""
    made = make_hf(tmp_path_factory.mktemp("oracle"), request.param)
    ids = tokens(made.shape)
    return made, ids, oracle(made.path, ids)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_source_layout_gives_transformers_logits(tmp_path, family, kind):
    made, ids, wanted = family
    source = MAKERS[kind](tmp_path, made.shape).path
    model = book_model(made.shape)
    report = load_into(model, source)
    assert (logits(model, ids) - wanted).abs().max() < 1e-5
    assert all(p.dtype == torch.float64 and p.requires_grad and not p.is_meta for p in model.parameters())
    assert (report.missing_keys, report.unexpected_keys, report.mismatched_keys) == ([], [], [])
    assert report.tied == report.shared == made.shape.tied == (model.out_head.weight is model.tok_emb.weight)
    assert report.ignored_keys == (["rope.freqs"] if "llama2" in kind else [])
    # the control: the other rotary order is another model
    with torch.no_grad():
        w = model.trf_blocks[0].att.W_key.weight
        w.copy_(w.view(made.shape.kv_heads, 2, -1, w.shape[1]).transpose(1, 2).reshape(w.shape).clone())
    assert (logits(model, ids) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_values_are_torchs_own_conversion_bit_for_bit(tmp_path, dtype, stored):
    made = make_hf(tmp_path, "hd6", dtype=stored)
    model = book_model(made.shape, dtype, meta=False)
    before = {n: (p, p.data_ptr()) for n, p in model.named_parameters()}
    report = load_into(model, made.path)
    state = make_scratch(tmp_path / "s", made.shape, dtype=stored).tensors
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, state[name].to(dtype)), name
    for name, p in model.named_parameters():  # an optimizer that holds them goes on holding them
        assert p is before[name][0] and p.data_ptr() == before[name][1]
    assert any("converted" in n for n in report.notes) == (stored != str(dtype).removeprefix("torch."))


def test_parameters_with_strides_and_an_explicit_head_dim(tmp_path):
    made = make_hf(tmp_path, "hd16")
    config = transformers.LlamaConfig.from_pretrained(made.path)
    with no_init():
        model = transformers.LlamaForCausalLM(config)
    # strides, as a user's own code may have them: not what a file can be read into
    weight = torch.empty(made.shape.hidden, made.shape.ff).T
    model.model.layers[1].mlp.up_proj.weight = nn.Parameter(weight)
    load_into(model, made.path)
    assert model.model.layers[1].mlp.up_proj.weight.stride() == weight.stride()
    for name, tensor in made.hf.items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_tie_copy_and_a_module_that_cannot_be_tied(tmp_path):
    tied = make_meta(tmp_path / "tied", "tied")
    model = book_model(tied.shape)
    report = load_into(model, tied.path, tie="copy")
    assert report.tied and not report.shared and model.out_head.weight is not model.tok_emb.weight
    assert torch.equal(model.out_head.weight, model.tok_emb.weight)
    model.tok_emb.weight.data.zero_()
    assert model.out_head.weight.abs().max() > 0
    untied = make_meta(tmp_path / "untied", "std")
    model = book_model(untied.shape, meta=False)
    model.out_head.weight = model.tok_emb.weight
    before = model.tok_emb.weight.clone()
    assert "tied_module" in problems(lambda: load_into(model, untied.path))
    assert torch.equal(model.tok_emb.weight, before)
    load_into(model, tied.path)
    assert model.out_head.weight is model.tok_emb.weight


def test_parameters_that_share_memory_without_being_one(tmp_path):
    made = make_hf(tmp_path, "std")
    model = book_model(made.shape, torch.float32, meta=False)
    model.out_head.weight = nn.Parameter(model.tok_emb.weight.data)
    assert "tied_module" in problems(lambda: load_into(model, made.path))
    model = book_model(made.shape, torch.float32, meta=False)
    model.trf_blocks[1].att.W_value.weight = model.trf_blocks[1].att.W_key.weight
    assert "shared_parameter" in problems(lambda: load_into(model, made.path))


@pytest.mark.parametrize("type", ["q8_0", "q4_k"])
def test_quantised_gguf(tmp_path, type):
    made = make_gguf(tmp_path / "m.gguf", "kquant", type=type)
    model = book_model(made.shape)
    report = load_into(model, made.path)
    assert f"{type.upper()} tensors are dequantised" in report.notes
    wanted = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**json.loads((make_hf(tmp_path / "hf", "kquant").path / "config.json").read_text()))
    )
    wanted.load_state_dict(made.hf)
    ids = tokens(made.shape)
    wanted = logits(wanted.double().eval(), ids).logits
    assert (logits(model, ids) - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_a_wrong_shape_leaves_the_module_untouched_and_names_everything(tmp_path):
    made = make_hf(tmp_path, "std")
    model = book_model(made.shape, torch.float32, meta=False)
    model.trf_blocks[1].ff.fc1 = nn.Linear(48, 81, bias=False)
    model.trf_blocks[0].att.W_query = nn.Linear(48, 48, bias=True)
    model.extra = nn.Linear(2, 2, bias=False)
    del model.final_norm
    before = {n: p.clone() for n, p in model.named_parameters()}
    found = problems(lambda: load_into(model, made.path))
    assert found["shape"].tensor == "trf_blocks.1.ff.fc1.weight"
    assert (found["shape"].found, found["shape"].wanted) == ([81, 48], [80, 48])
    assert found["unexpected_tensor"].tensor == "model.norm.weight"
    assert "missing_tensor" in found
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    # without strict the shape still stops; the rest is reported
    assert set(problems(lambda: load_into(model, made.path, strict=False))) == {"shape"}
    model.trf_blocks[1].ff.fc1 = nn.Linear(48, 80, bias=False)
    report = load_into(model, made.path, strict=False)
    assert sorted(report.missing_keys) == ["extra.weight", "trf_blocks.0.att.W_query.bias"]
    assert report.unexpected_keys == ["model.norm.weight"]
    assert torch.equal(model.extra.weight, before["extra.weight"])
    assert torch.equal(model.tok_emb.weight, made.hf["model.embed_tokens.weight"])


def test_a_damaged_checkpoint_is_reported_with_the_rest(tmp_path):
    made = make_hf(tmp_path, "std")
    from safetensors.torch import save_file

    save_file({k: v for k, v in made.hf.items() if "layers.1" not in k}, made.path / "model.safetensors")
    model = book_model(made.shape, torch.float32, meta=False)
    before = model.tok_emb.weight.clone()
    assert set(problems(lambda: load_into(model, made.path))) == {"missing_tensor"}
    assert torch.equal(before, model.tok_emb.weight)


def test_other_layers_and_other_heads(tmp_path):
    made = make_hf(tmp_path, "mha")
    found = problems(lambda: load_into(book_model(made.shape, n_layers=3), made.path))
    assert found["missing_tensor"].tensor.startswith("trf_blocks.2.")
    found = problems(lambda: load_into(book_model(made.shape, n_layers=1), made.path))
    assert found["unexpected_tensor"].tensor.startswith("model.layers.1.")
    # the same shapes, so that nothing but the config tells
    for wrap in (lambda m: m, torch.nn.DataParallel):
        model = wrap(book_model(made.shape, n_heads=3, n_kv_groups=3))
        found = problems(lambda model=model: load_into(model, made.path))
        assert set(found) == {"config"} and (found["config"].found, found["config"].wanted) == (3, 6)
    # a class that calls its numbers otherwise is not judged by them
    model = book_model(made.shape, torch.float32)
    model.cfg = {"emb_dim": 48, "n_layers": 2, "n_heads": 6, "dtype": torch.float32, "kv": 6, "base": 500_000}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_into(model, made.path)


def test_another_rope_base_is_warned_about(tmp_path):
    made = make_hf(tmp_path, "std", scaling=8)
    ours = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 8192}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_into(book_model(made.shape, rope_freq=ours), made.path)
    for wrong in ({"rope_freq": ours, "rope_base": 10_000.0}, {"rope_freq": {**ours, "factor": 32.0}}):
        with pytest.warns(UserWarning, match="built with RoPE"):
            load_into(book_model(made.shape, **wrong), made.path)
    # a class that tells nothing but its table
    model = book_model(made.shape, rope_base=10_000.0)
    del model.cfg
    with pytest.warns(UserWarning, match="'cos' of the module"):
        load_into(model, made.path)


def test_a_buffer_on_meta_is_an_error_that_names_no_init(tmp_path):
    made = make_hf(tmp_path, "std")
    with torch.device("meta"):
        model = book_model(made.shape, meta=False)
    found = problems(lambda: load_into(model, made.path))
    assert set(found) == {"meta_buffer"} and "no_init" in found["meta_buffer"].hint
    model.cos, model.sin = book.compute_rope_params(8, made.shape.theta, made.shape.context)
    load_into(model, made.path)
    ids = tokens(made.shape)
    assert (logits(model, ids) - oracle(made.path, ids)).abs().max() < 1e-5


def test_dtype_retypes_parameters_and_the_books_cfg_but_no_tables(tmp_path):
    made = make_hf(tmp_path, "std")
    ids = tokens(made.shape)
    for meta in (True, False):
        shared = {**scratch_config(made.shape, dtype="float32"), "dtype": torch.bfloat16}
        with no_init() if meta else torch.device("cpu"):
            model = book.Llama3Model(shared)
        weights = list(model.parameters())
        report = load_into(model, made.path, dtype="float64", device="cpu")
        assert {p.dtype for p in model.parameters()} == {torch.float64} and model.cos.dtype == torch.float32
        assert meta or all(a is b for a, b in zip(weights, model.parameters(), strict=True))
        assert (logits(model, ids) - oracle(made.path, ids)).abs().max() < 1e-5
        assert shared["dtype"] == torch.bfloat16 and any("cfg" in n for n in report.notes)


def test_values_that_do_not_fit_are_an_error(tmp_path):
    made = make_hf(tmp_path, "std", dtype="bfloat16")
    from safetensors.torch import save_file

    state = {**made.hf, "lm_head.weight": made.hf["lm_head.weight"].clone()}
    state["lm_head.weight"][3, 4] = 1e6
    save_file(state, made.path / "model.safetensors")
    found = problems(lambda: load_into(book_model(made.shape, torch.float16), made.path))
    assert found["overflow"].tensor == "out_head.weight" and found["overflow"].found == 1
    load_into(book_model(made.shape, torch.bfloat16), made.path)


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


def test_a_users_own_module(tmp_path, family):
    made, ids, wanted = family
    names = tmp_path / "mine.toml"
    names.write_text(NAMES)
    for kind in ("hf", "meta2", "gguf"):
        with no_init():
            model = Mine(made.shape, head=not made.shape.tied)
        load_into(model, MAKERS[kind](tmp_path, made.shape).path, names=names, dtype=torch.float64)
        assert (logits(model, ids) - wanted).abs().max() < 1e-5
        assert model.rotary.mask[0, 1] == -math.inf
    # a file of the module's own state dict, whose config nobody wrote down
    model_file = tmp_path / "mine.pth"
    torch.save(model.state_dict(), model_file)
    with no_init():
        again = Mine(made.shape, head=not made.shape.tied).double()
    load_into(again, model_file, names=names, config=made.path / "config.json")
    assert torch.equal(logits(again, ids), logits(model, ids))
    # controls: without the names file, and with the wrong convention
    assert "unknown_names" in problems(lambda: load_into(model, made.path))
    names.write_text(NAMES.replace("interleaved", "half"))
    load_into(model, made.path, names=names)
    assert (logits(model, ids) - wanted).abs().max() > 0.1


def test_a_module_without_a_head_takes_no_untied_checkpoint(tmp_path):
    made = make_hf(tmp_path, "std")
    (tmp_path / "mine.toml").write_text(NAMES)
    found = problems(lambda: load_into(Mine(made.shape, head=False), made.path, names=tmp_path / "mine.toml"))
    assert set(found) == {"unexpected_tensor"} and found["unexpected_tensor"].tensor == "lm_head.weight"


def test_hugging_face_and_wrapped_modules(tmp_path, family):
    made, ids, wanted = family
    config = transformers.LlamaConfig.from_pretrained(made.path)
    source = make_meta(tmp_path / "meta", made.shape, mp=2).path
    with no_init():
        model = transformers.LlamaForCausalLM(config)
    load_into(model, source, layout="hf", dtype=torch.float64)
    assert (logits(model.eval(), ids).logits - wanted).abs().max() < 1e-5
    base = transformers.LlamaModel(config)
    if made.shape.tied:
        load_into(base, source)
    else:
        assert "unexpected_tensor" in problems(lambda: load_into(base, source))
        load_into(base, source, strict=False)
    assert torch.equal(base.layers[1].self_attn.k_proj.weight, made.hf["model.layers.1.self_attn.k_proj.weight"])
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = book_model(made.shape)
    load_into(wrapped, source)
    assert (logits(wrapped.module._orig_mod, ids) - wanted).abs().max() < 1e-5


def test_a_bare_state_dict_uses_the_modules_own_config(tmp_path):
    made = make_scratch(tmp_path, "std", format="pth", config=False)
    model = book_model(made.shape, torch.float32)
    load_into(model, made.path / "model.pth")
    assert torch.equal(model.trf_blocks[1].att.W_key.weight, made.tensors["trf_blocks.1.att.W_key.weight"])
    del model.cfg
    assert "config" in problems(lambda: load_into(model, made.path / "model.pth"))


def test_qk_layout_of_the_source(tmp_path):
    made = make_hf(tmp_path, "std")
    model = book_model(made.shape, torch.float32)
    load_into(model, made.path, qk_layout="meta")
    rows = made.hf["model.layers.0.self_attn.k_proj.weight"]
    half = rows.view(2, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
    assert torch.equal(model.trf_blocks[0].att.W_key.weight, half)


def test_check_module_says_what_load_into_would(tmp_path):
    made = make_hf(tmp_path, "std")
    with convert.open_checkpoint(made.path) as ckpt:
        assert check_module(ckpt, book_model(made.shape)) == []
        found = check_module(ckpt, book_model(made.shape, hidden_dim=81))
        assert {p.kind for p in found} == {"shape"} and len(found) == 3  # folded over the layers
        assert [p.kind for p in check_module(ckpt, nn.Linear(3, 4))] == ["unknown_names"]
        load_into(model := book_model(made.shape, torch.float32), ckpt)  # left open by both
        assert torch.equal(model.tok_emb.weight, made.hf["model.embed_tokens.weight"])


def test_options_that_do_not_fit(tmp_path):
    made = make_hf(tmp_path, "std")
    model = book_model(made.shape)
    for wrong in ({"tie": "maybe"}, {"dtype": "int8"}, {"dtype": "q8_0"}, {"colour": 1}, {"device": "warp"}):
        with pytest.raises(UsageError):
            load_into(model, made.path, **wrong)
    with pytest.raises(UsageError):
        load_into(model, made.path, names="litgpt", layout="hf")
    assert all(p.is_meta for p in model.parameters())


def test_memory_is_that_of_the_model(tmp_path):
    """In a process of its own: the peak grows by little more than the model, from files that need all the work."""
    script = """
        import resource, sys
        from pathlib import Path
        import torch
        from llms_from_scratch.llama3 import Llama3Model
        import convert, convert.modules, convert.match, convert.formats.torch_zip
        sys.path.insert(0, sys.argv[2])
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        cfg = convert.load_scratch_config(sys.argv[1])
        before = peak()
        with convert.no_init():
            model = Llama3Model(cfg)
        convert.load_into(model, sys.argv[1], tie="copy")
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        print(size, (peak() - before) / size)
    """
    from safetensors.torch import save_file

    from tests.fixtures.scratch import scratch_config
    from tests.fixtures.shapes import Shape

    shape = Shape(1024, 16, 4, 64, 4096, 24000, layers=4, context=64)
    state = {}
    with no_init():
        model = book.Llama3Model({**scratch_config(shape, dtype="bfloat16"), "dtype": torch.bfloat16})
    for name, p in model.named_parameters():
        state[name] = torch.empty(p.shape, dtype=torch.bfloat16)
    save_file(state, tmp_path / "model.safetensors")
    del state
    (tmp_path / "scratch_config.json").write_text(json.dumps(scratch_config(shape, dtype="bfloat16")))
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), str(root)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, ratio = map(float, done.stdout.split())
    assert size > 180 and ratio < 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cuda(tmp_path, dtype):
    made = make_hf(tmp_path, "gqa8")
    ids = tokens(made.shape)
    on_cpu = book_model(made.shape, dtype)
    load_into(on_cpu, MAKERS["meta2"](tmp_path, made.shape).path)
    for meta in (True, False):
        model = book_model(made.shape, dtype, meta=meta)
        load_into(model, MAKERS["meta2"](tmp_path, made.shape).path, device="cuda")
        assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {"cuda"}
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.cpu(), on_cpu.state_dict()[name]), name
        assert logits(model, ids.cuda()).isfinite().all()


def test_validate_with_a_module(tmp_path):
    made = make_hf(tmp_path / "hf", "std")
    assert convert.validate(made.path, model=book_model(made.shape)).ok
    found = convert.validate(made.path, model=book_model(made.shape, hidden_dim=81))
    assert not found.ok and {p.kind for p in found.problems} == {"shape"}
    (tmp_path / "mine.toml").write_text(NAMES)
    mine = Mine(made.shape, head=True)
    assert convert.validate(made.path, model=mine, names=tmp_path / "mine.toml").ok
    assert [p.kind for p in convert.validate(made.path, model=mine).problems] == ["unknown_names"]
