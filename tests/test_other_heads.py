"""Classifiers, reward, value and embedding models, and adapters: named and refused. Real classes made them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.cli import cli, run
from convert.errors import ConvertError
from convert.other_heads import HEADS, TASKS
from convert.skeleton import skeleton
from convert.table import load_table
from tests.fixtures import make_gguf, make_meta

transformers = pytest.importorskip("transformers")

LLAMA = {
    **{"vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "rms_norm_eps": 1e-5},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0},
}
GPT2 = {
    "vocab_size": 96,
    "n_positions": 64,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 8,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
BOOK_GPT2 = {
    **{"vocab_size": 96, "context_length": 64, "emb_dim": 48, "n_heads": 8, "n_layers": 2},
    **{"drop_rate": 0.0, "qkv_bias": True},
}
BOOK_LLAMA = {
    **{"vocab_size": 96, "context_length": 64, "emb_dim": 48, "n_heads": 8, "n_layers": 2, "hidden_dim": 80},
    **{"n_kv_groups": 2, "rope_base": 10000.0, "dtype": torch.float32, "rope_freq": None},
}


def saved(folder: Path, name: str, **more: Any) -> Path:
    """A model of a transformers class, in a folder."""
    is_llama = name.startswith("Llama")
    config = transformers.LlamaConfig(**LLAMA, **more) if is_llama else transformers.GPT2Config(**GPT2, **more)
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


def book(family: str) -> Any:
    """The book's class, from its package."""
    if family == "gpt2":
        return pytest.importorskip("llms_from_scratch.ch04").GPTModel(BOOK_GPT2)
    return pytest.importorskip("llms_from_scratch.llama3").Llama3Model(BOOK_LLAMA)


def store(folder: Path, family: str, state: dict[str, torch.Tensor]) -> Path:
    """A from-scratch state dict with the book's config beside it."""
    folder.mkdir()
    torch.save(state, folder / "model.pth")
    config = BOOK_GPT2 if family == "gpt2" else {**BOOK_LLAMA, "dtype": "float32"}
    (folder / "scratch_config.json").write_text(json.dumps(config))
    return folder


def refused(source: Path, to: str = "gguf", kind: str = "other_head", **options: Any) -> str:
    """The one problem's text; nothing is written beside the source."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(ConvertError) as error:
        convert.convert_checkpoint(source, source.parent / "out", to=to, **options)
    (problem,) = error.value.problems
    assert problem.kind == kind and problem.hint
    assert sorted(source.parent.iterdir()) == before
    return f"{problem.message} {problem.hint}"


# ---- Hugging Face's classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "more", "tensor", "what"),
    [
        ("LlamaForSequenceClassification", {"num_labels": 2}, "'score.weight' [2, 48]", "classifier"),
        ("LlamaForSequenceClassification", {"num_labels": 1}, "'score.weight' [1, 48]", "reward model"),
        ("LlamaForTokenClassification", {"num_labels": 5}, "'score.weight' [5, 48] (2 tensors)", "classifier"),
        ("LlamaForQuestionAnswering", {}, "'qa_outputs.weight' [2, 48]", "answer begins"),
        ("GPT2ForSequenceClassification", {"num_labels": 2}, "'score.weight' [2, 48]", "classifier"),
        ("GPT2ForTokenClassification", {"num_labels": 5}, "'classifier.weight' [5, 48]", "classifier"),
        ("GPT2ForQuestionAnswering", {}, "'qa_outputs.weight' [2, 48]", "answer begins"),
        ("GPT2DoubleHeadsModel", {}, "'multiple_choice_head.summary.weight'", "chooses"),
    ],
)
def test_classes_of_transformers(tmp_path, name, more, tensor, what):
    said = refused(saved(tmp_path / "hf", name, **more))
    assert tensor in said and what in said and "no language model" in said
    control = saved(tmp_path / "control", "LlamaForCausalLM" if name.startswith("Llama") else "GPT2LMHeadModel")
    assert convert.open_checkpoint(control).match.problems == []


def test_without_its_head_the_config_says_it(tmp_path):
    source = saved(tmp_path / "hf", "LlamaForSequenceClassification", num_labels=2)
    state = load_file(source / "model.safetensors")
    del state["score.weight"]
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    assert "LlamaForSequenceClassification" in refused(source)
    state["lm_head.weight"] = torch.zeros(96, 48)  # control: a language model under a config of another task
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    assert convert.open_checkpoint(source).layout == "hf"


def test_a_base_model_is_no_mistake_but_a_question(tmp_path):
    source = saved(tmp_path / "hf", "LlamaModel")
    with pytest.raises(ConvertError, match="base model without a head") as error:
        convert.convert_checkpoint(source, tmp_path / "out", to="scratch")
    assert "--tie share" in str(error.value) and not (tmp_path / "out").exists()
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch", tie="share")


@pytest.mark.parametrize(
    "name", ["v_head.summary.weight", "value_head.weight", "reward_head.0.weight", "model.pooler.w"]
)
def test_heads_beside_a_language_models(tmp_path, name):
    source = saved(tmp_path / "hf", "LlamaForCausalLM")
    state = load_file(source / "model.safetensors")
    save_file(state | {name: torch.zeros(1, 48)}, source / "model.safetensors", metadata={"format": "pt"})
    said = refused(source)
    assert repr(name) in said
    assert ("pretrained_model.save_pretrained" in said) == name.startswith("v")
    deep = name.replace("model.", "").replace("v_", "layers.0.v_")  # control: inside a layer it is only unexpected
    save_file(state | {f"model.layers.0.{deep}": torch.zeros(1, 48)}, source / "model.safetensors")
    with pytest.raises(ConvertError, match="has no place"):
        convert.convert_checkpoint(source, tmp_path / "out", to="scratch")


def test_embedding_models(tmp_path):
    source = saved(tmp_path / "hf", "LlamaModel", tie_word_embeddings=True)
    convert.convert_checkpoint(source, tmp_path / "control", to="scratch")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    said = refused(source)
    assert "embedding model" in said and "1_Pooling/config.json" in said and "--tie share" in said
    convert.convert_checkpoint(source, tmp_path / "out", to="scratch", tie="share")


def test_gguf_files_of_embedding_models(tmp_path):
    from convert.cli import cli as commands

    source = make_gguf(tmp_path / "in.gguf").path
    convert.convert_checkpoint(source, tmp_path / "control", to="hf", tokenizer=False)
    assert run(commands, ["metadata", str(source), "--set", "llama.pooling_type=u32:1"]) == 0
    folder = tmp_path / "alone"
    folder.mkdir()
    moved = Path(shutil.move(str(source), str(folder / "in.gguf")))
    assert "llama.pooling_type = 1" in refused(moved, to="hf")


# ---- the book's ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_classifier_of_chapter_6(tmp_path, family, bias):
    model = book(family)
    convert.convert_checkpoint(store(tmp_path / "control", family, model.state_dict()), tmp_path / "sound", to="hf")
    model.out_head = torch.nn.Linear(48, 2, bias=bias)
    said = refused(store(tmp_path / "book", family, model.state_dict()), to="hf")
    assert "'out_head.weight' [2, 48]" in said and "one per token (96)" in said and "chapter 6" in said
    assert ("'out_head.bias'" in said) == bias


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_module_with_another_head_is_not_saved(tmp_path, family):
    model, config = book(family), BOOK_GPT2 if family == "gpt2" else BOOK_LLAMA
    convert.save_model(model, tmp_path / "control", layout="hf", config=config)
    model.out_head = torch.nn.Linear(48, 2)
    with pytest.raises(ConvertError, match=r"no language model.*chapter 6") as error:
        convert.save_model(model, tmp_path / "out", layout="hf", config=config)
    assert len(error.value.problems) == 1 and not (tmp_path / "out").exists()


def test_a_module_of_another_task_is_not_saved(tmp_path):
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**LLAMA, num_labels=2))
    with pytest.raises(ConvertError, match=r"'score\.weight' \[2, 48\] is the head of a classifier"):
        convert.save_model(model, tmp_path / "out", layout="scratch")
    assert not list(tmp_path.iterdir())


def test_model_parallel_heads_are_none(tmp_path):
    source = make_meta(tmp_path / "meta", mp=2).path
    assert convert.open_checkpoint(source).match.problems == []


def test_names_of_ones_own_win(tmp_path):
    """A head that somebody calls `score` or `classifier` is a language model's, where a names file says so."""
    source = saved(tmp_path / "hf", "LlamaForCausalLM")
    names = tmp_path / "names.toml"
    names.write_text(skeleton(load_table("llama"), {"top.output": "classifier.weight"}))
    convert.convert_checkpoint(source, tmp_path / "own", to="scratch", names=names)
    again = convert.open_checkpoint(tmp_path / "own", names=names)
    assert "classifier.weight" in again.tensors and again.match.problems == []


@pytest.mark.parametrize("json_", [False, True])
def test_the_command_line_says_it_in_one_error(tmp_path, capsys, json_):
    source = saved(tmp_path / "hf", "LlamaForSequenceClassification", num_labels=2)
    arguments = ["hf-to-scratch", str(source), str(tmp_path / "out"), *(["--json"] if json_ else [])]
    assert run(cli, arguments) == 1
    shown = capsys.readouterr()
    assert "no language model" in " ".join((shown.out + shown.err).split())
    assert not (tmp_path / "out").exists() and "Traceback" not in shown.err


def test_every_word_is_a_head_s():
    assert all(isinstance(what, str) and " " in what for what in (*HEADS.values(), *TASKS.values()))


# ---- adapters of appendix E ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_adapters_of_appendix_e_and_the_formula_that_merges_them(tmp_path, family):
    """Refused as they are; merged as the message says, they convert and compute the same."""
    appendix = pytest.importorskip("llms_from_scratch.appendix_e")
    torch.manual_seed(0)
    model, alpha, rank = book(family), 6, 3
    appendix.replace_linear_with_lora(model, rank=rank, alpha=alpha)
    for name, value in model.named_parameters():
        if name.endswith("lora.B"):
            torch.nn.init.normal_(value, std=0.2)
    state = model.eval().state_dict()
    said = refused(store(tmp_path / "lora", family, state), to="hf", kind="adapter")
    formula = "x.weight = x.linear.weight + s * (x.lora.A @ x.lora.B).T (and x.bias = x.linear.bias)"
    assert formula in said
    assert "s = alpha / rank in the book's current code" in said and "s = alpha in the package" in said

    def merged(s: float) -> dict[str, torch.Tensor]:
        out = {}
        for name, value in state.items():
            layer, _, leaf = name.partition(".linear.")
            if leaf == "weight":
                value = value + s * (state[f"{layer}.lora.A"] @ state[f"{layer}.lora.B"]).T
            if ".lora." not in name:
                out[f"{layer}.{leaf}" if leaf else name] = value
        return out

    ids = torch.randint(0, 96, (1, 40))

    def off(s: float) -> float:
        plain = book(family).eval()
        plain.load_state_dict(merged(s))
        with torch.no_grad():
            return float((plain(ids) - model(ids)).abs().max())

    installed, other = sorted((alpha, alpha / rank), key=off)
    assert 1e4 * off(installed) < off(other)
    convert.convert_checkpoint(store(tmp_path / "merged", family, merged(installed)), tmp_path / "out", to="hf")
