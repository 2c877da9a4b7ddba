"""The files beside the weights: folders that load as they are, in a process that knows nothing of us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import convert
from convert.errors import ConvertError, UsageError
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch, save_tokenizer
from tests.fixtures.tokenizer import TEXT

LOAD = """
import json, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
folder, other, words = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
out = {k: sorted(map(str, info[k])) for k in ("missing_keys", "unexpected_keys", "mismatched_keys")}
out["dtype"] = str(model.dtype)
out["class"] = type(model).__name__
out["tied"] = model.get_output_embeddings().weight is model.get_input_embeddings().weight
out["eos"] = model.generation_config.eos_token_id
out["theta"] = model.config.rope_parameters["rope_theta"]
out["scaling"] = model.config.rope_parameters.get("factor")
out["context"] = model.config.max_position_embeddings
try:
    out["ids"] = AutoTokenizer.from_pretrained(folder)(words).input_ids
except Exception as error:
    out["ids"] = None
if other:
    wanted = AutoModelForCausalLM.from_pretrained(other, dtype=model.dtype)
    ids = torch.arange(2, 90)[None]
    with torch.no_grad():
        out["difference"] = float((model(ids).logits - wanted(ids).logits).abs().max())
print(json.dumps(out))
"""
WORDS = TEXT.splitlines()[2]


def load(folder: Path, other: Path | str = "") -> dict[str, object]:
    """What transformers makes of a folder, in a clean process; how its logits differ from another's."""
    pytest.importorskip("transformers")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(other), WORDS],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def said(folder: Path, name: str = "config.json") -> dict[str, object]:
    return json.loads((folder / name).read_text())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_meta, {"shape": "h32kv8", "mp": 2, "use_scaled_rope": True, "dtype": "bfloat16"}),
        (make_scratch, {"shape": "tied", "scaling": 8}),
        (make_gguf, {"shape": "gqa8", "tokenizer": 120}),
        (make_hf, {"shape": "hd16", "attention_bias": True, "mlp_bias": True, "tokenizer": 100}),
    ],
    ids=["meta", "scratch", "gguf", "hf"],
)
def test_from_pretrained_in_a_clean_process(tmp_path, make, options):
    made = make(tmp_path / ("m.gguf" if make is make_gguf else "m"), **options)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", max_shard_size=40_000)
    scaling = 8 if "scaling" in options or "use_scaled_rope" in options else None
    wanted = make_hf(
        tmp_path / "wanted",
        options["shape"],
        dtype=options.get("dtype", "float32"),
        scaling=scaling,
        attention_bias=bool(options.get("attention_bias")),
        mlp_bias=bool(options.get("mlp_bias")),
    )
    found = load(tmp_path / "out", wanted.path)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    assert found["class"] == "LlamaForCausalLM" and found["theta"] == made.shape.theta
    assert found["dtype"] == "torch." + str(options.get("dtype", "float32"))
    assert found["tied"] == (options["shape"] == "tied")
    assert found["scaling"] == scaling
    assert found["difference"] == 0  # to what the fixture itself gives
    if make is not make_meta:
        assert found["context"] == made.shape.context
    if "tokenizer" in options:
        from tests.fixtures import train_tokenizer

        assert found["ids"] == train_tokenizer(options["tokenizer"]).encode(WORDS).ids


@pytest.mark.parametrize("scaling", [None, 8, 32, {"rope_type": "linear", "factor": 3.0}])
@pytest.mark.parametrize("style", ["v4", "v5"])
def test_both_rope_spellings_are_there_and_equal(tmp_path, style, scaling):
    made = make_hf(tmp_path / "m", "gqa8", config_style=style, scaling=scaling)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    config = said(tmp_path / "out")
    new, old = config["rope_parameters"], config["rope_scaling"]
    assert config["rope_theta"] == new["rope_theta"] == made.shape.theta
    if scaling is None:
        assert old is None and new["rope_type"] == "default"
    else:
        assert {k: v for k, v in new.items() if k != "rope_theta"} == {
            k: v for k, v in old.items() if k != "rope_theta"
        }
        assert new["factor"] == (scaling["factor"] if isinstance(scaling, dict) else scaling)
    assert config["dtype"] == config["torch_dtype"] == "float32"
    assert config["head_dim"] == made.shape.head_dim


def test_further_keys_of_a_config_are_kept_and_quantisation_is_not(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    path = made.path / "config.json"
    path.write_text(json.dumps(said(made.path) | {"initializer_range": 0.007, "pretraining_tp": 2, "my_key": [1]}))
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert {k: said(tmp_path / "out")[k] for k in ("initializer_range", "pretraining_tp", "my_key")} == {
        "initializer_range": 0.007,
        "pretraining_tp": 2,
        "my_key": [1],
    }


def test_a_config_in_metas_spelling_does_not_leak_into_hugging_faces(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    params = make_meta(tmp_path / "meta", "gqa8").path / "params.json"
    (made.path / "config.json").unlink()
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", config=params)
    assert not {"dim", "n_layers", "n_heads", "norm_eps", "multiple_of"} & set(said(tmp_path / "out"))
    assert said(tmp_path / "out")["hidden_size"] == 64


@pytest.mark.parametrize("target", ["meta", "scratch"])
def test_generation_settings_travel(tmp_path, target):
    """The source's own file is carried and comes back; without one, transformers' usual is written."""
    made = make_hf(tmp_path / "m", "gqa8")
    settings = {"bos_token_id": 0, "eos_token_id": [1, 7], "temperature": 0.6}
    (made.path / "generation_config.json").write_text(json.dumps(settings))
    convert.convert_checkpoint(made.path, tmp_path / "mid", to=target)
    convert.convert_checkpoint(tmp_path / "mid", tmp_path / "out", to="hf")
    assert said(tmp_path / "out", "generation_config.json") == settings
    plain = make_meta(tmp_path / "plain", "gqa8")
    convert.convert_checkpoint(plain.path, tmp_path / "other", to="hf")
    assert said(tmp_path / "other", "generation_config.json")["_from_model_config"] is True


# --- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["hf", "meta", "scratch"])
def test_tokenizer_files_are_carried_byte_for_byte(tmp_path, target):
    make = make_hf if target != "hf" else make_scratch
    made = make(tmp_path / "m", "gqa8")
    save_tokenizer(made.path, 120, template="{{ messages }}")
    (made.path / "chat_template.jinja").write_text("{{ messages }}")
    (made.path / "notes.txt").write_text("mine")
    convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (made.path / name).read_bytes()
    assert not (tmp_path / "out" / "notes.txt").exists()
    convert.convert_checkpoint(made.path, tmp_path / "bare", to=target, tokenizer=False)
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_metas_tokenizer_model_becomes_tokenizer_json(tmp_path):
    """A SentencePiece model beside Meta's weights: the ids of sentencepiece, in transformers too."""
    sentencepiece = pytest.importorskip("sentencepiece")
    from tests.tokenizer.trained import sentencepiece_model

    made = make_meta(tmp_path / "m", "gqa8", vocab=1000)
    raw = sentencepiece_model(TEXT, model_type="bpe", byte_fallback=True)
    (made.path / "tokenizer.model").write_bytes(raw)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    from tokenizers import Tokenizer

    oracle = sentencepiece.SentencePieceProcessor(model_proto=raw)
    ours = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for line in TEXT.splitlines():
        assert ours.encode(line, add_special_tokens=False).ids == oracle.encode(line)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == raw
    config = said(tmp_path / "out")
    assert (config["bos_token_id"], config["eos_token_id"]) == (oracle.bos_id(), oracle.eos_id())
    found = load(tmp_path / "out")
    assert found["ids"][-3:] == oracle.encode(WORDS)[-3:]


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    from tests.tokenizer.trained import sentencepiece_model

    made = make_meta(tmp_path / "m", "gqa8")
    raw = sentencepiece_model(TEXT, model_type="bpe", byte_fallback=True)
    (made.path / "tokenizer.model").write_bytes(raw)
    with pytest.raises(ConvertError, match=r"tokenizer has [\d,]+ tokens, but the embedding has 128 rows"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", tokenizer=False)
    convert.convert_checkpoint(made.path, tmp_path / "scratch", to="scratch")  # weights alone


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9085657\n"
PAGE = b"<!DOCTYPE html><html><head><title>Login</title></head></html>"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("tokenizer.json", LFS, "LFS"),
        ("tokenizer.json", PAGE, "web page"),
        ("tokenizer.json", b"", "empty"),
        ("tokenizer.json", None, "half there"),  # cut in the middle
        ("tokenizer_config.json", b"[1, 2]", "not a JSON object"),
        ("generation_config.json", b'{"eos_token_id": ', "not a JSON object"),
        ("tokenizer.model", LFS, "LFS"),
        ("merges.txt", LFS, "LFS"),
    ],
)
def test_what_only_bears_a_tokenizers_name_is_not_carried(tmp_path, name, content, sentence):
    made = make_hf(tmp_path / "m", "gqa8", tokenizer=120)
    good = (made.path / "tokenizer.json").read_bytes()
    (made.path / name).write_bytes(good[: len(good) // 2] if content is None else content)
    for target in ("hf", "meta", "scratch", "gguf"):
        with pytest.raises(ConvertError, match=sentence) as caught:
            convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
        assert name in str(caught.value) and not (tmp_path / "out").exists()
        assert "--no-tokenizer" in str(caught.value) or "again" in str(caught.value) or "lfs" in str(caught.value)
    convert.convert_checkpoint(made.path, tmp_path / "bare", to="scratch", tokenizer=False)
    (made.path / name).unlink()
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "merges.txt"])
@pytest.mark.parametrize("what", ["pipe", "folder", "dangling"])
def test_what_is_no_file_is_not_passed_over(tmp_path, name, what):
    """A link into a cache whose blob is gone, a pipe: the tokenizer would be missing, and nobody told."""
    made = make_hf(tmp_path / "m", "gqa8", tokenizer=120)
    (made.path / name).unlink(missing_ok=True)
    make = {"pipe": os.mkfifo, "folder": os.mkdir, "dangling": lambda p: p.symlink_to("../blobs/0")}
    make[what](made.path / name)
    with pytest.raises(ConvertError, match="leads nowhere" if what == "dangling" else "not a regular file"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch")
    assert not (tmp_path / "out").exists()
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", tokenizer=False)


def test_a_large_tokenizer_cut_in_the_middle(tmp_path):
    """Past a megabyte it is not parsed; that it ends as JSON does is still seen."""
    made = make_hf(tmp_path / "m", "gqa8", tokenizer=120)
    path = made.path / "tokenizer.json"
    tree = json.loads(path.read_bytes()) | {"padding_of_this_test": ["x" * 100] * 20_000}
    whole = json.dumps(tree).encode()
    path.write_bytes(whole)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == whole
    path.write_bytes(whole[:-1])
    with pytest.raises(ConvertError, match="half there"):
        convert.convert_checkpoint(made.path, tmp_path / "cut", to="hf")


def test_a_tokenizer_from_elsewhere(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8")
    (tmp_path / "tok").mkdir()
    save_tokenizer(tmp_path / "tok", 120)
    convert.convert_checkpoint(made.path, tmp_path / "a", to="hf", tokenizer_path=tmp_path / "tok")
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "tok" / "tokenizer.json").read_bytes()
    convert.convert_checkpoint(made.path, tmp_path / "b", to="hf", tokenizer_path=tmp_path / "tok" / "tokenizer.json")
    assert (tmp_path / "b" / "tokenizer.json").exists()
    with pytest.raises(UsageError, match="no such file or folder"):
        convert.convert_checkpoint(made.path, tmp_path / "c", to="hf", tokenizer_path=tmp_path / "none")
    summary = convert.convert_checkpoint(made.path, tmp_path / "d", to="hf")
    assert any("no tokenizer lies beside the source" in n for n in summary.notes)


# --- from-scratch folders ---------------------------------------------------------------------------------------------


def test_the_books_class_takes_the_written_config(tmp_path):
    llama3 = pytest.importorskip("llms_from_scratch.llama3")
    made = make_hf(tmp_path / "m", "gqa8", scaling=8)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", format="pth")
    model = llama3.Llama3Model(convert.load_scratch_config(tmp_path / "out"))
    model.load_state_dict(torch.load(tmp_path / "out" / "model.pth", weights_only=True), strict=True)
    shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [({}, ()), ({"low_freq_factor": 2.0}, ("low_freq_factor = 2 (not 1)",))],
    ids=["usual", "other"],
)
def test_numbers_that_metas_flag_does_not_stand_for_are_said(tmp_path, changed, said):
    """Meta's code has them hard-wired; the record keeps them for us alone."""
    usual = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling = usual | {"original_max_position_embeddings": 8192} | changed
    made = make_hf(tmp_path / "hf", "gqa8", scaling=scaling)
    summary = convert.convert_checkpoint(made.path, tmp_path / "meta", to="meta")
    remarks = [n for n in summary.notes if "use_scaled_rope" in n]
    assert len(remarks) == len(said) and all(word in remarks[0] for word in said)
    convert.convert_checkpoint(tmp_path / "meta", tmp_path / "back", to="hf")
    back = json.loads((tmp_path / "back" / "config.json").read_text())["rope_parameters"]
    assert back["low_freq_factor"] == scaling["low_freq_factor"]


def test_half_a_surrogate_pair_in_a_config_is_refused(tmp_path):
    """An escape of JSON can hold it; no file can be named so and no terminal can show it."""
    made = make_hf(tmp_path / "hf", "gqa8")
    place = made.path / "config.json"
    good = json.loads(place.read_text())
    place.write_text(json.dumps(good | {"remark": "\ud800", "author": "é"}))
    with pytest.raises(convert.ConvertError, match=r"config\.json is not valid JSON"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert not (tmp_path / "out").exists()
    place.write_text(json.dumps(good | {"remark": "\U0001f999", "author": "é"}))  # a whole pair
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert json.loads((tmp_path / "out" / "config.json").read_bytes())["remark"] == "\U0001f999"
