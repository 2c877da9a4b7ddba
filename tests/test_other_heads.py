"""Models with another head than a language model's, as transformers and the book make them, are named and refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import convert
from convert.checkpoint import open_checkpoint
from convert.errors import FormatError
from convert.other_heads import HEADS, refuse_other_heads
from tests.fixtures import make_hf

transformers = pytest.importorskip("transformers")
TINY = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**TINY)), "classifier or reward"),
        (lambda: transformers.LlamaForTokenClassification(transformers.LlamaConfig(**TINY)), "classifier|score"),
        (lambda: transformers.LlamaForQuestionAnswering(transformers.LlamaConfig(**TINY)), "marks answers"),
        (
            lambda: transformers.GPT2ForSequenceClassification(
                transformers.GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8)
            ),
            "classifier or reward",
        ),
    ],
)
def test_transformers_other_models(tmp_path, make, what):
    make().save_pretrained(tmp_path / "m")
    with pytest.raises(FormatError, match=what):
        open_checkpoint(tmp_path / "m")
    with pytest.raises(FormatError, match=what):
        convert.convert_checkpoint(tmp_path / "m", tmp_path / "out", to="scratch", tokenizer=False)
    assert not (tmp_path / "out").exists()


def test_the_books_chapter_6(tmp_path):
    ch04 = pytest.importorskip("llms_from_scratch.ch04")
    cfg = {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_heads": 2, "n_layers": 1}
    cfg |= {"drop_rate": 0.0, "qkv_bias": True}
    model = ch04.GPTModel(cfg)
    model.out_head = torch.nn.Linear(16, 2)
    torch.save(model.state_dict(), tmp_path / "review_classifier.pth")
    with pytest.raises(FormatError, match="chapter 6") as error:
        open_checkpoint(tmp_path / "review_classifier.pth", config=cfg)
    assert error.value.problems[0].tensor == "out_head.bias"
    model.out_head = torch.nn.Linear(16, 32, bias=False)  # the control: the language model itself
    torch.save(model.state_dict(), tmp_path / "model.pth")
    assert not open_checkpoint(tmp_path / "model.pth", config=cfg).match.problems


def test_a_value_head(tmp_path):
    made = make_hf(tmp_path / "m", "mha")
    save_file({**made.hf, "v_head.summary.weight": torch.zeros(1, 48)}, made.path / "model.safetensors")
    with pytest.raises(FormatError, match="value head"):
        open_checkpoint(made.path)


def test_names_that_only_end_alike():
    refuse_other_heads(["my_score.weight", "lm_head.weight", "x.scores.weight"])
    for head in HEADS:
        with pytest.raises(FormatError, match=head.replace(".", r"\.")):
            refuse_other_heads(["a.weight", f"model.{head}"])
