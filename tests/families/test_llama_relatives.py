"""CodeLlama's and Mistral's sizes, and Mistral's sliding window: against transformers' class and real llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from convert import config as configs
from convert.checkpoint import open_checkpoint
from convert.engines.llama_cpp import available
from convert.errors import ConvertError
from convert.layout import Dims
from convert.plan import Request, make_plan
from convert.reference.layers import KVCache
from convert.table import load_table
from tests.families import golden
from tests.families.mixed import (
    PLACES,
    Tiny,
    at_places,
    converted,
    llama_cpp,
    off,
    prompt,
    reference,
    run_reference,
    tiny,
)
from tests.reference.models import one_thread  # noqa: F401

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5},
}
WINDOW = 24
TOLERANCE = 1e-4


def make(folder: Path, **changes: Any) -> Tiny:
    settings = SIZES | {"sliding_window": WINDOW} | changes
    # transformers' fast kernels leave the window out on short prompts; its plain attention does not
    config = transformers.MistralConfig(**settings, attn_implementation="eager")
    return tiny(folder, transformers.MistralForCausalLM(config))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tiny:
    return make(tmp_path_factory.mktemp("mistral"))


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> Tiny:
    """The same, in a form that the book's and Meta's code could hold but for the window."""
    return make(tmp_path_factory.mktemp("narrow"), head_dim=8)


# ---- published sizes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "parameters", "theta", "context", "window"),
    [
        ("codellama-7b", 6_738_546_688, 1e6, 16384, None),
        ("codellama-7b-python", 6_738_415_616, 1e6, 16384, None),
        ("codellama-13b", 13_016_028_160, 1e6, 16384, None),
        ("codellama-13b-python", 13_015_864_320, 1e6, 16384, None),
        ("codellama-34b", 33_743_970_304, 1e6, 16384, None),
        ("codellama-70b", 68_976_910_336, 1e6, 16384, None),
        ("mistral-7b-v0.1", 7_241_732_096, 1e4, 32768, 4096),
        ("mistral-7b-v0.2", 7_241_732_096, 1e6, 32768, None),
        ("mistral-7b-v0.3", 7_248_023_552, 1e6, 32768, None),
    ],
)
def test_published_sizes(size, parameters, theta, context, window):
    hub = configs.published(load_table("llama"), size)
    shapes = golden.shapes("llama", "hf", hub)
    assert sum(int(np.prod(s)) for s in shapes.values()) == parameters
    assert (hub["rope_theta"], hub["max_position_embeddings"]) == (theta, context)
    assert hub.get("sliding_window") == window
    assert Dims(load_table("llama"), hub)["hd"] == 128
    # Meta's params.json has no context length: the convention gives CodeLlama's
    if size.startswith("codellama"):
        params = {"dim": 4096, "n_layers": 1, "n_heads": 32, "vocab_size": 32016, "rope_theta": theta}
        assert configs.to_hub(load_table("llama"), "meta", params)["max_position_embeddings"] == context


# ---- the window ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "window"), [({}, WINDOW), ({"sliding_window": None}, None), ({"tie_word_embeddings": True}, WINDOW)]
)
def test_logits(tmp_path, changes, window):
    found = make(tmp_path / "hf", **changes)
    assert len(prompt(128)[0]) > 128 > WINDOW
    wanted, got = found.logits, run_reference(found.path, 128)
    with torch.no_grad():
        exact = found.model.double()(prompt(128)).logits
    found.model.float()
    noise = off(wanted, exact)
    assert off(got, wanted) < TOLERANCE and off(got, exact) < 4 * noise
    assert reference(found.path).config.sliding_window == window
    other = json.loads((found.path / "config.json").read_text()) | {"sliding_window": None if window else WINDOW}
    (found.path / "config.json").write_text(json.dumps(other))
    wrong = run_reference(found.path, 128)
    assert off(wrong[:, :WINDOW], wanted[:, :WINDOW]) < TOLERANCE  # as long as the text fits the window, nothing shows
    assert off(wrong, wanted) > 100 * TOLERANCE


def test_the_cache_sees_the_window_too(made):
    model, ids = reference(made.path), prompt(128)
    cache = KVCache(3)
    with torch.no_grad():
        pieces = [model(ids[:, i : i + 16], cache) for i in range(0, ids.shape[1], 16)]
    assert off(torch.cat(pieces, 1), made.logits) < TOLERANCE


@pytest.mark.parametrize("layout", ["scratch", "meta"])
def test_what_cannot_hold_it_says_so_before_writing(narrow, tmp_path, layout):
    with pytest.raises(ConvertError, match="no sliding window"):
        converted(narrow.path, tmp_path, layout)
    assert not list(tmp_path.iterdir())
    config = json.loads((narrow.path / "config.json").read_text())
    # control: a window as long as the context, or none, is nothing to hold
    for number, window in enumerate((None, 512)):
        convert.convert_checkpoint(
            narrow.path, tmp_path / str(number), to=layout, tokenizer=False, config=config | {"sliding_window": window}
        )


def test_our_own_class_holds_it(made, tmp_path):
    """``--allow-reference``: from there back to Hugging Face it is a Mistral again, with its window."""
    out = converted(made.path, tmp_path, "scratch", allow_reference=True)
    assert off(run_reference(out, 128), made.logits) < TOLERANCE
    back = converted(out, tmp_path, "hf")
    _is_the_same_model(made, back)


def test_through_gguf_and_back(made, tmp_path):
    out = converted(made.path, tmp_path, "gguf")
    with open_checkpoint(out) as opened:
        assert opened.metadata["llama.attention.sliding_window"] == WINDOW
        assert opened.config["sliding_window"] == WINDOW
    assert off(run_reference(out, 128), made.logits) < TOLERANCE
    _is_the_same_model(made, converted(out, tmp_path, "hf"))


def _is_the_same_model(made: Tiny, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["sliding_window"] == WINDOW
    assert (config["model_type"], config["architectures"]) == ("mistral", ["MistralForCausalLM"])
    found = load_file(folder / "model.safetensors")
    wanted = load_file(made.path / "model.safetensors")
    assert found.keys() == wanted.keys() and not [k for k in wanted if not torch.equal(found[k], wanted[k])]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        assert off(model(prompt(128)).logits, made.logits) < TOLERANCE


@pytest.mark.skipif(not available(), reason="llama.cpp is not installed")
def test_llama_cpp_does_not_heed_it_and_the_plan_says_so(made, tmp_path):
    with open_checkpoint(made.path) as opened:
        request = Request("gguf", tokenizer=False)
        request.gguf.type = "f32"
        notes = " ".join(make_plan(opened, request).notes)
    assert f"sliding_window = {WINDOW}: llama.cpp attends to all positions" in notes
    out = converted(made.path, tmp_path, "gguf")
    theirs, ours = llama_cpp(out, 128), at_places(made.logits)
    inside = [i for i, n in enumerate(PLACES) if n <= WINDOW]
    assert off(theirs[inside], ours[inside]) < 2e-4
    assert off(theirs, ours) > 100 * 2e-4
    full = make(tmp_path / "full", sliding_window=None)  # control: the same without a window agrees everywhere
    (tmp_path / "again").mkdir()
    assert off(llama_cpp(converted(full.path, tmp_path / "again", "gguf"), 128), at_places(full.logits)) < 2e-4
