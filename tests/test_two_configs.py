"""A config beside the weights against one inside their file: the former counts, and a difference is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from convert.checkpoint import open_checkpoint
from tests.fixtures import make_meta, make_scratch


def inside(folder: Path, change: dict[str, object]) -> Path:
    """Put the model's config into the weights' file, with some values changed; the folder."""
    config = json.loads((folder / "scratch_config.json").read_text())
    state = torch.load(folder / "model.pth", weights_only=True)
    torch.save({"model": state, "config": config | change}, folder / "model.pth")
    return folder


def notes(folder: Path) -> list[str]:
    with open_checkpoint(folder) as opened:
        assert opened.config["num_attention_heads"] == 8 and opened.config["rope_theta"] == 500000
        return [note for note in opened.notes if "inside" in note]


def test_what_differs_is_said_and_the_file_beside_counts(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    (note,) = notes(inside(made.path, {"n_heads": 4, "rope_base": 10000.0, "dtype": torch.bfloat16}))
    assert note.startswith("scratch_config.json counts")
    assert "n_heads = 8 (inside 4), rope_base = 500000.0 (inside 10000.0)" in note and "dtype" not in note


@pytest.mark.parametrize("change", [{}, {"learning_rate": 1e-3}])
def test_what_agrees_is_not_mentioned(tmp_path, change):
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    assert notes(inside(made.path, change)) == []


def test_a_trainers_settings_are_no_models_config(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    state = torch.load(made.path / "model.pth", weights_only=True)
    torch.save({"model": state, "config": {"learning_rate": 1e-3, "vocab_size": 5}}, made.path / "model.pth")
    assert notes(made.path) == []


def test_two_spellings_are_compared(tmp_path):
    """params.json beside weights that hold the book's dict."""
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    inside(made.path, {"n_layers": 7, "rope_base": 10000.0})
    (made.path / "scratch_config.json").unlink()
    params = make_meta(tmp_path / "meta", "gqa8").path / "params.json"
    (made.path / "params.json").write_text(params.read_text())
    (note,) = notes(made.path)
    assert note.startswith("params.json counts") and "num_hidden_layers = 2 (inside 7)" in note
    assert "rope_theta = 500000.0 (inside 10000.0)" in note and "hidden_size" not in note
