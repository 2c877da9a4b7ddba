"""Whether a checkpoint fits a module: everything that does not, at once, and the module as it was."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")
book = pytest.importorskip("llms_from_scratch.llama3")
from torch import nn  # noqa: E402

import convert  # noqa: E402
from convert import load_into  # noqa: E402
from convert.errors import ConvertError  # noqa: E402
from convert.modules import check_module  # noqa: E402
from tests.fixtures import make_hf, tokens  # noqa: E402
from tests.own_module import NAMES, Mine, book_model, logits, oracle, problems  # noqa: E402


def test_parameters_that_share_memory_without_being_one(tmp_path):
    made = make_hf(tmp_path, "std")
    model = book_model(made.shape, torch.float32, meta=False)
    model.out_head.weight = nn.Parameter(model.tok_emb.weight.data)
    assert "tied_module" in problems(lambda: load_into(model, made.path))
    model = book_model(made.shape, torch.float32, meta=False)
    model.trf_blocks[1].att.W_value.weight = model.trf_blocks[1].att.W_key.weight
    assert "shared_parameter" in problems(lambda: load_into(model, made.path))


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


def test_one_sentence_for_all_layers(tmp_path):
    made = make_hf(tmp_path, "gqa6")
    with pytest.raises(ConvertError) as error:
        load_into(book_model(made.shape, n_layers=1), made.path)
    said = [p.message for p in error.value.problems]
    assert len(said) == 9 and all("layers.{1-2}" in text and "has no 'trf_blocks.*." in text for text in said)


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


def test_a_module_without_a_head_takes_no_untied_checkpoint(tmp_path):
    made = make_hf(tmp_path, "std")
    (tmp_path / "mine.toml").write_text(NAMES)
    found = problems(lambda: load_into(Mine(made.shape, head=False), made.path, names=tmp_path / "mine.toml"))
    assert set(found) == {"unexpected_tensor"} and found["unexpected_tensor"].tensor == "lm_head.weight"


def test_check_module_says_what_load_into_would(tmp_path):
    made = make_hf(tmp_path, "std")
    with convert.open_checkpoint(made.path) as ckpt:
        assert check_module(ckpt, book_model(made.shape)) == []
        found = check_module(ckpt, book_model(made.shape, hidden_dim=81))
        assert {p.kind for p in found} == {"shape"} and len(found) == 3  # folded over the layers
        assert [p.kind for p in check_module(ckpt, nn.Linear(3, 4))] == ["unknown_names"]
        load_into(model := book_model(made.shape, torch.float32), ckpt)  # left open by both
        assert torch.equal(model.tok_emb.weight, made.hf["model.embed_tokens.weight"])


def test_validate_with_a_module(tmp_path):
    made = make_hf(tmp_path / "hf", "std")
    assert convert.validate(made.path, model=book_model(made.shape)).ok
    found = convert.validate(made.path, model=book_model(made.shape, hidden_dim=81))
    assert not found.ok and {p.kind for p in found.problems} == {"shape"}
    (tmp_path / "mine.toml").write_text(NAMES)
    mine = Mine(made.shape, head=True)
    assert convert.validate(made.path, model=mine, names=tmp_path / "mine.toml").ok
    assert [p.kind for p in convert.validate(made.path, model=mine).problems] == ["unknown_names"]


def test_masks_and_tables_that_a_class_keeps_in_its_state_dict(tmp_path):
    """As the book's Llama 2 and GPT-2 do: they keep their values, and are not written."""
    made = make_hf(tmp_path / "hf", "mha")
    model = book_model(made.shape, torch.float32)
    cos, sin = book.compute_rope_params(8, made.shape.theta, 32)
    for block in model.trf_blocks:
        block.att.register_buffer("mask", torch.triu(torch.ones(32, 32), diagonal=1))
        block.att.register_buffer("cos", cos)
        block.att.register_buffer("sin", sin)
    before = model.trf_blocks[1].att.mask.clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = load_into(model, made.path)
    assert (report.missing_keys, report.unexpected_keys) == ([], [])
    assert torch.equal(model.trf_blocks[1].att.mask, before) and torch.equal(model.trf_blocks[0].att.cos, cos)
    done = convert.save_model(model, tmp_path / "out", layout="scratch")
    assert any("trf_blocks.{0-1}.att.mask" in note for note in done.notes)
    with convert.open_checkpoint(tmp_path / "out") as written:
        assert not any(name.endswith(("mask", "cos", "sin")) for name in written.tensors)
    # a state dict that torch saved holds them, and they are ignored by name
    torch.save(model.state_dict(), tmp_path / "model.pth")
    report = load_into(book_model(made.shape, torch.float32), tmp_path / "model.pth")
    assert len(report.ignored_keys) == 6
