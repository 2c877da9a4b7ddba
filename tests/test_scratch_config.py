"""load_scratch_config: what it returns builds the book's class as it is, from a from-scratch folder or any other."""

from __future__ import annotations

import inspect
import json

import pytest

torch = pytest.importorskip("torch")
book = pytest.importorskip("llms_from_scratch.llama3")

from convert import ConvertError, convert_checkpoint, load_into, load_scratch_config, no_init  # noqa: E402
from convert.errors import FormatError, UsageError  # noqa: E402
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch  # noqa: E402
from tests.fixtures.scratch import scratch_config  # noqa: E402


def test_the_dict_a_conversion_wrote_is_the_books_own(tmp_path):
    """Key for key what the package publishes for its class, with the type a string cannot stand for."""
    made = make_hf(tmp_path / "hf", "gqa8", scaling=8, dtype="bfloat16")
    convert_checkpoint(made.path, tmp_path / "s", to="scratch")
    found = load_scratch_config(tmp_path / "s")
    assert found.keys() == book.LLAMA32_CONFIG_1B.keys()
    assert found["rope_freq"].keys() == book.LLAMA32_CONFIG_1B["rope_freq"].keys()
    assert {k: type(v) for k, v in found.items()} == {k: type(v) for k, v in book.LLAMA32_CONFIG_1B.items()}
    assert found["dtype"] is torch.bfloat16
    assert found["rope_freq"] == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context_length": 8192,
    }
    assert found == load_scratch_config(tmp_path / "s" / "scratch_config.json")
    assert found == load_scratch_config(tmp_path / "s" / "model.safetensors")
    model = book.Llama3Model(found)
    assert model.tok_emb.weight.dtype == torch.bfloat16 and model.cfg["rope_base"] == made.shape.theta
    # the control: the string in the file is what the class cannot take
    said = json.loads((tmp_path / "s" / "scratch_config.json").read_text())
    with pytest.raises(TypeError):
        book.Llama3Model(said)
    assert {"family", "layout", "class"} <= said.keys()


@pytest.mark.parametrize("kind", ["hf", "meta", "gguf", "scratch"])
def test_from_any_checkpoint(tmp_path, kind):
    makers = {
        "hf": lambda: make_hf(tmp_path / "x", "std"),
        "meta": lambda: make_meta(tmp_path / "x", "std"),
        "gguf": lambda: make_gguf(tmp_path / "x.gguf", "std"),
        "scratch": lambda: make_scratch(tmp_path / "x", "std"),
    }
    made = makers[kind]()
    found = load_scratch_config(made.path)
    wanted = {**scratch_config(made.shape, dtype="float32"), "dtype": torch.float32}
    if kind == "meta":  # params.json does not say for how many positions
        assert found.pop("context_length") > 0
        wanted.pop("context_length")
    assert found == wanted
    if kind == "hf":
        assert load_scratch_config(made.path / "config.json") == wanted
        with no_init():
            model = book.Llama3Model(found)
        load_into(model, made.path)
        assert torch.equal(model.out_head.weight, made.hf["lm_head.weight"])


def test_dtype_of_choice_and_of_quantised_files(tmp_path):
    made = make_gguf(tmp_path / "m.gguf", "kquant", type="q8_0")
    assert load_scratch_config(made.path)["dtype"] is torch.float16
    assert load_scratch_config(made.path, dtype="bfloat16")["dtype"] is torch.bfloat16
    assert load_scratch_config(make_scratch(tmp_path / "s").path, dtype=torch.float64)["dtype"] is torch.float64
    with pytest.raises(UsageError):
        load_scratch_config(tmp_path / "s", dtype="int4")


def test_what_the_class_hard_wires_is_kept_and_ignored(tmp_path):
    made = make_hf(tmp_path / "hf", "hd16")
    with pytest.raises(ConvertError, match="head_dim"):
        load_scratch_config(made.path)
    convert_checkpoint(made.path, tmp_path / "s", to="scratch", allow_reference=True)
    assert load_scratch_config(tmp_path / "s")["head_dim"] == 16
    # every key of the class's own dict is one that its code reads
    source = inspect.getsource(book)
    assert all(f'cfg["{key}"]' in source for key in load_scratch_config(make_scratch(tmp_path / "t").path))


def test_files_that_are_no_such_dict(tmp_path):
    for text in ('{"a": 1}', "[1, 2]", json.dumps({"hidden_size": 3, "model_type": "llama"})):
        (tmp_path / "scratch_config.json").write_text(text)
        with pytest.raises(FormatError, match="not the dict"):
            load_scratch_config(tmp_path)
    (tmp_path / "scratch_config.json").write_text("{")
    with pytest.raises(FormatError, match="JSON"):
        load_scratch_config(tmp_path)
    with pytest.raises(UsageError):
        load_scratch_config(tmp_path / "nothing")
