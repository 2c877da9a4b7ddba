"""load_into: every layout into the book's class, Hugging Face's and one's own, against transformers' logits."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
book = pytest.importorskip("llms_from_scratch.llama3")
from torch import nn  # noqa: E402

from convert import UsageError, load_into, no_init  # noqa: E402
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch, tokens  # noqa: E402
from tests.fixtures.scratch import scratch_config  # noqa: E402
from tests.own_module import NAMES, Mine, book_model, logits, oracle, problems  # noqa: E402

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
        import sys
        from pathlib import Path
        import torch
        from llms_from_scratch.llama3 import Llama3Model
        import convert, convert.modules, convert.match, convert.formats.torch_zip
        sys.path.insert(0, sys.argv[2])
        from tests.fixtures.peak import peak
        cfg = convert.load_scratch_config(sys.argv[1])
        before = peak()
        with convert.no_init():
            model = Llama3Model(cfg)
        convert.load_into(model, sys.argv[1], tie="copy")
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
        print(size, (peak() - before) / 2**20 / size)
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
