"""Opening: what a source is, from whatever a user points at, and what is asked when it cannot be known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.checkpoint import Checkpoint, open_checkpoint
from convert.errors import ConvertError, UsageError
from tests.fixtures import Fixture, make_gguf, make_hf, make_meta, make_scratch


def values(opened: Checkpoint) -> dict[str, bytes]:
    """Every logical tensor's bytes."""
    return {f"{k[0]}.{k[1]}": s.read(0, s.shape[0]).tobytes() for k, s in opened.match.logical.items()}


def content(src: Path, **options: object) -> dict[str, bytes]:
    with open_checkpoint(src, **options) as opened:
        assert not opened.match.problems, opened.match.problems
        return values(opened)


# --- what one can point at --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["safetensors", "bin"])
def test_folder_index_and_any_shard_are_one_checkpoint(tmp_path, format):
    made = make_hf(tmp_path / "m", "gqa8", sharded=3, format=format)
    whole = content(made.path)
    assert len(whole) == len(made.tensors)
    for path in made.path.iterdir():
        if path.name.startswith(("model", "pytorch_model")):
            assert content(path) == whole, path
    single = make_hf(tmp_path / "s", "gqa8", format=format)
    assert content(single.path) == content(next(single.path.glob("*model.*"))) == whole


def test_a_metas_folder_and_any_of_its_files(tmp_path):
    made = make_meta(tmp_path / "m", "h32kv8", mp=4)
    whole = content(made.path)
    for path in made.path.glob("*.pth"):
        assert content(path) == whole
    with open_checkpoint(made.path) as opened:
        assert opened.layout == "meta" and len(opened.files) == 4 and opened.pairing == "interleaved"


@pytest.mark.parametrize("name", ["weights.bin", "model.pt", "final", "model.ckpt", "model.safetensors", "x.gguf"])
def test_suffixes_are_not_trusted(tmp_path, name):
    """Content decides: safetensors, a torch file and a GGUF file under any name."""
    for make, original in ((make_hf, "model.safetensors"), (make_scratch, "model.pth")):
        folder = tmp_path / make.__name__
        made = make(folder, "gqa8", **({"format": "pth"} if make is make_scratch else {}))
        whole = content(made.path)
        (folder / original).rename(folder / name)
        assert content(folder / name) == whole
    file = make_gguf(tmp_path / "g.gguf", "gqa8")
    whole = content(file.path)
    (tmp_path / "gguf").mkdir()
    shutil.copy(file.path, tmp_path / "gguf" / name)
    assert content(tmp_path / "gguf" / name) == whole


def test_nothing_there(tmp_path):
    with pytest.raises(UsageError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(ConvertError):
        open_checkpoint(tmp_path)
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(ConvertError, match="holds no tensors"):
        open_checkpoint(tmp_path / "model.safetensors")


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["safetensors", "pth"])
@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "net.", "trainer.model.net."]
)
def test_prefixes_of_trainers(tmp_path, format, prefix):
    made = make_scratch(tmp_path / "m", "gqa8", format="safetensors")
    whole = content(made.path)
    state = {prefix + k: v for k, v in load_file(made.path / "model.safetensors").items()}
    (made.path / "model.safetensors").unlink()
    if format == "pth":
        torch.save(state, made.path / "model.pth")
    else:
        save_file(state, made.path / "model.safetensors")
    with open_checkpoint(made.path) as opened:
        assert values(opened) == whole
        assert any("stripped" in n for n in opened.notes)


def test_a_prefix_in_the_middle_and_on_half_of_the_names(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8")
    whole = content(made.path)
    state = load_file(made.path / "model.safetensors")
    middle = {k.replace("trf_blocks.0.", "trf_blocks.0._orig_mod."): v for k, v in state.items()}
    save_file(middle, made.path / "model.safetensors")
    assert content(made.path) == whole
    save_file(middle | {"trf_blocks.0.norm1.weight": state["final_norm.weight"] + 1}, made.path / "model.safetensors")
    with pytest.raises(ConvertError, match="norm1"):  # two tensors would get one name
        open_checkpoint(made.path)


@pytest.mark.parametrize("head", [True, False])
def test_hugging_faces_model_prefix_may_be_missing(tmp_path, head):
    made = make_hf(tmp_path / "m", "gqa8", tie_flag=False)
    whole = content(made.path)
    state = {k.removeprefix("model."): v for k, v in load_file(made.path / "model.safetensors").items()}
    if not head:
        del state["lm_head.weight"]
    save_file(state, made.path / "model.safetensors")
    with open_checkpoint(made.path) as opened:
        assert any("'layers.' where 'model.layers.' is usual" in n for n in opened.notes)
        assert any(n.endswith("'model.norm.' is usual (1 tensor)") for n in opened.notes)
        if head:
            assert values(opened) == whole
        else:
            assert "base model without a head" in opened.match.problems[0].message


@pytest.mark.parametrize("wrapper", ["model_state_dict", "model"])
def test_training_checkpoints(tmp_path, wrapper):
    plain = make_scratch(tmp_path / "p", "gqa8", format="pth")
    made = make_scratch(tmp_path / "m", "gqa8", format="pth", wrapper=wrapper)
    assert content(made.path) == content(plain.path)


def test_two_models_in_one_file_are_a_question(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    other = {k: v + 1 for k, v in made.tensors.items()}
    torch.save({"model": made.tensors, "ema": other}, made.path / "model.pth")
    with pytest.raises(ConvertError, match="--key") as caught:
        open_checkpoint(made.path)
    assert "model" in str(caught.value) and "ema" in str(caught.value)
    a, b = content(made.path, key="model"), content(made.path, key="ema")
    assert a.keys() == b.keys() and all(a[k] != b[k] for k in a)
    with pytest.raises(ConvertError, match="'adam'"):
        open_checkpoint(made.path, key="adam")


# --- configs ----------------------------------------------------------------------------------------------------------

SAME = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size", "rope_theta")


def without_config(made: Fixture) -> Path:
    for name in ("config.json", "params.json", "scratch_config.json"):
        (made.path / name).unlink(missing_ok=True)
    return made.path


@pytest.fixture
def configs(tmp_path) -> dict[str, Path]:
    return {
        "hf": make_hf(tmp_path / "chf", "gqa8").path / "config.json",
        "meta": make_meta(tmp_path / "cmeta", "gqa8").path / "params.json",
        "scratch": make_scratch(tmp_path / "cscratch", "gqa8").path / "scratch_config.json",
    }


@pytest.mark.parametrize("layout", ["hf", "meta", "scratch"])
@pytest.mark.parametrize("spelling", ["hf", "meta", "scratch"])
def test_a_config_of_any_spelling(tmp_path, configs, layout, spelling):
    make = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch}[layout]
    made = make(tmp_path / "m", "gqa8")
    with open_checkpoint(made.path) as opened:
        wanted = {k: opened.config[k] for k in SAME}
    bare = without_config(made)
    with open_checkpoint(bare, config=configs[spelling]) as opened:
        assert {k: opened.config[k] for k in SAME} == wanted
    with open_checkpoint(bare, config=json.loads(configs[spelling].read_text())) as opened:
        assert {k: opened.config[k] for k in SAME} == wanted


@pytest.mark.parametrize("make", [make_hf, make_meta, make_scratch])
def test_without_a_config_the_head_counts_that_fit_are_listed(tmp_path, make):
    bare = without_config(make(tmp_path / "m", "gqa8"))
    with pytest.raises(ConvertError, match="no config, and head counts do not follow") as caught:
        open_checkpoint(bare)
    text = str(caught.value)
    assert "8" in text and "2" in text and "--config" in text and "--size" in text and "llama3.2-1b" in text


def test_config_errors(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8")
    with pytest.raises(UsageError, match="no such file"):
        open_checkpoint(made.path, config=tmp_path / "none.json")
    (tmp_path / "list.json").write_text("[1]")
    with pytest.raises(ConvertError, match="not a JSON object"):
        open_checkpoint(made.path, config=tmp_path / "list.json")
    (tmp_path / "other.json").write_text('{"learning_rate": 0.1}')
    with pytest.raises(ConvertError, match="no config of a kind known here: it has 'learning_rate'"):
        open_checkpoint(made.path, config=tmp_path / "other.json")
    (tmp_path / "lfs.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 700\n")
    with pytest.raises(ConvertError, match="LFS"):
        open_checkpoint(made.path, config=tmp_path / "lfs.json")


def test_a_config_inside_the_checkpoint(tmp_path):
    made = make_scratch(tmp_path / "m", "gqa8", format="pth")
    with open_checkpoint(made.path) as opened:
        wanted = {k: opened.config[k] for k in SAME}
    without_config(made)
    torch.save(
        {"model_state_dict": made.tensors, "config": {**made.config, "dtype": torch.float32}}, made.path / "model.pth"
    )
    with open_checkpoint(made.path) as opened:
        assert {k: opened.config[k] for k in SAME} == wanted


def test_a_published_size_fills_a_missing_config(tmp_path):
    """SmolLM2's shapes at a small width do not exist, so a published size must fit the tensors or be refused."""
    bare = without_config(make_hf(tmp_path / "m", "gqa8"))
    with open_checkpoint(bare, size="llama3.2-1b") as opened:
        assert "config taken from the published size llama3.2-1b" in opened.notes
        assert opened.match.problems
    with pytest.raises(UsageError, match=r"no published size 'huge'"):
        open_checkpoint(bare, size="huge")


def test_context(tmp_path):
    made = make_meta(tmp_path / "m", "gqa8")
    with open_checkpoint(made.path, context=777) as opened:
        assert opened.config["max_position_embeddings"] == 777
    with open_checkpoint(make_hf(tmp_path / "h", "gqa8").path) as opened:
        assert opened.config["max_position_embeddings"] == 512


# --- rotary order, layouts, families ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "order"), [("meta", "interleaved"), ("hf", "half")])
@pytest.mark.parametrize("make", [make_hf, make_scratch, make_meta])
def test_qk_layout_overrules_the_names(tmp_path, make, said, order):
    made = make(tmp_path / "m", "gqa8")
    with open_checkpoint(made.path, qk_layout=said) as opened:
        assert opened.pairing == order
        assert any("--qk-layout" in n for n in opened.notes)


def test_qk_layout_is_enough_for_a_trainer_with_metas_order(tmp_path):
    """Complex-RoPE trainers keep Hugging Face's names and Meta's order (pains A10)."""
    from tests.reference.models import interleaved

    made = make_hf(tmp_path / "m", "gqa8")
    save_file(interleaved(made.tensors, made.shape), made.path / "model.safetensors")
    convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", qk_layout="meta")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[k], made.tensors[k]) for k in made.tensors)
    convert.convert_checkpoint(made.path, tmp_path / "wrong", to="hf")  # the control
    assert not torch.equal(
        load_file(tmp_path / "wrong" / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"],
        made.tensors["model.layers.0.self_attn.q_proj.weight"],
    )


def test_a_forced_layout_or_family(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    with open_checkpoint(made.path, family="llama", layout="hf") as opened:
        assert opened.layout == "hf"
    with open_checkpoint(made.path, family="llama", layout="meta") as opened:
        kinds = {p.kind for p in opened.match.problems}
        assert {"missing_tensor", "unexpected_tensor"} <= kinds
    with pytest.raises(ConvertError, match="no_such"):
        open_checkpoint(made.path, family="no_such")
    with pytest.raises(TypeError):
        open_checkpoint(made.path, colour="red")


# --- the record -------------------------------------------------------------------------------------------------------


def test_the_record_carries_what_meta_has_no_word_for(tmp_path):
    """Context, scaling's exact numbers, token ids: Hugging Face → Meta → Hugging Face gives the same config."""
    made = make_hf(tmp_path / "m", "gqa8", scaling=8)
    path = made.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [1, 5], "initializer_range": 0.013}))
    convert.convert_checkpoint(made.path, tmp_path / "meta", to="meta")
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    assert params["use_scaled_rope"] is True and "max_position_embeddings" not in params
    convert.convert_checkpoint(tmp_path / "meta", tmp_path / "back", to="hf")
    first, last = (json.loads((p / "config.json").read_text()) for p in (made.path, tmp_path / "back"))
    for key in ("max_position_embeddings", "rope_parameters", "eos_token_id", "initializer_range", "rms_norm_eps"):
        assert last[key] == first[key], key
    (tmp_path / "meta" / "conversion.json").unlink()  # the control: without it the context is assumed, and said
    summary = convert.convert_checkpoint(tmp_path / "meta", tmp_path / "lost", to="hf")
    assert any("--context N" in n for n in summary.notes)


def test_the_record_says_where_it_came_from(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8", sharded=2)
    convert.convert_checkpoint(made.path, tmp_path / "out", to="meta")
    record = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert record["schema"] == "convert.record/1" and record["family"] == "llama"
    assert record["source"]["layout"] == "hf" and len(record["source"]["files"]) == 2
    import hashlib

    for file in record["source"]["files"]:
        data = (made.path / file["name"]).read_bytes()
        assert file["bytes"] == len(data)
        assert file["head_sha256"] == hashlib.sha256(data[: 1 << 20]).hexdigest()
    assert record["target"]["qk_layout"] == "interleaved" and record["target"]["files"][0]["format"] == "torch"


def test_a_foreign_record_is_not_read(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    for text in ('{"schema": "other/1", "config": {"hidden_size": 5}}', "[]", '{"schema": 3}'):
        (made.path / "conversion.json").write_text(text)
        with open_checkpoint(made.path) as opened:
            assert opened.record == {} and opened.config["hidden_size"] == 64


def test_a_record_of_other_weights_is_passed_over(tmp_path):
    """Sizes and their number decide; names do not."""
    made = make_hf(tmp_path / "m", "gqa8", scaling=8)
    convert.convert_checkpoint(made.path, tmp_path / "meta", to="meta")
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "meta", copy)
    (copy / "consolidated.00.pth").rename(copy / "renamed.pth")
    with open_checkpoint(copy / "renamed.pth") as opened:  # the control
        assert opened.record and opened.config["rope_parameters"]["factor"] == 8
        assert opened.config["max_position_embeddings"] == made.shape.context
    other = make_meta(tmp_path / "other", "gqa8", dtype="bfloat16").path
    shutil.copy(tmp_path / "meta" / "conversion.json", other)
    with open_checkpoint(other) as opened:
        assert opened.record == {} and opened.config["rope_parameters"]["rope_type"] == "default"
        assert opened.config["max_position_embeddings"] != made.shape.context
        assert any("conversion.json was passed over" in note for note in opened.notes)
    two = tmp_path / "two"
    convert.convert_checkpoint(made.path, two, to="meta", model_parallel=2)
    shutil.copy(tmp_path / "meta" / "conversion.json", two)
    with open_checkpoint(two) as opened:
        assert opened.record == {}


def test_the_record_inside_a_gguf_file_is_its_own(tmp_path):
    made = make_hf(tmp_path / "m", "gqa8")
    convert.convert_checkpoint(made.path, tmp_path / "a.gguf", to="gguf", tokenizer=False)
    convert.convert_checkpoint(made.path, tmp_path / "b.gguf", to="gguf", tokenizer=False, type="f16")
    shutil.copy(tmp_path / "b.gguf.conversion.json", tmp_path / "a.gguf.conversion.json")
    with open_checkpoint(tmp_path / "a.gguf") as opened:
        assert opened.record["config"] and not any("passed over" in note for note in opened.notes)


# --- in a notebook ----------------------------------------------------------------------------------------------------


def test_how_it_looks(tmp_path):
    made = make_hf(tmp_path / "<b>model & co", "gqa8")
    with open_checkpoint(made.path) as opened:
        assert repr(opened) == "<Checkpoint '<b>model & co': llama, hf layout, safetensors, 21 tensors>"
        page = opened._repr_html_()
        assert opened.dtype == "F32"
    assert page.startswith("<table>") and page.endswith("</table>")
    assert "&lt;b&gt;model &amp; co" in page and "<b>" not in page
    assert "llama" in page and "<th" in page
    from html.parser import HTMLParser

    class Balanced(HTMLParser):
        depth: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag, attrs):
            self.depth.append(tag)

        def handle_endtag(self, tag):
            assert self.depth.pop() == tag

    parser = Balanced()
    parser.feed(page)
    assert not parser.depth


@pytest.mark.parametrize("maker", [make_hf, make_meta, make_scratch])
def test_the_config_of_another_folder(tmp_path, maker):
    """``--config`` takes the folder that holds one, as SRC does."""
    made = make_hf(tmp_path / "m", "gqa8")
    (made.path / "config.json").unlink()
    other = maker(tmp_path / "other", "gqa8").path
    with convert.open_checkpoint(made.path, config=other) as found:
        assert (found.config["num_attention_heads"], found.config["num_key_value_heads"]) == (8, 2)
        assert not found.match.problems
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=r"config\.json, params\.json"):
        convert.open_checkpoint(made.path, config=tmp_path / "none")


def test_names_that_a_record_of_other_files_may_hold(tmp_path):
    """A model of one's own names, whose record was left behind by another save, says why its names are unknown."""
    made = make_scratch(tmp_path / "m", "gqa8")
    state = {f"part{n}.w": t for n, t in enumerate(load_file(made.path / "model.safetensors").values())}
    folder = tmp_path / "own"
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    shutil.copy(made.path / "scratch_config.json", folder)
    with pytest.raises(ConvertError, match="table does not know") as plain:
        open_checkpoint(folder)
    assert "passed over" not in str(plain.value)
    files = [{"name": "model.safetensors", "bytes": 3}]
    record = {"schema": "convert.record/1", "target": {"files": files}}
    (folder / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(ConvertError, match=r"conversion\.json was passed over.*may hold the names"):
        open_checkpoint(folder)


def test_head_counts_that_fit_a_fused_matrix_are_listed(tmp_path):
    """GPT-2's q, k and v are one matrix."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=48, n_layer=2, n_head=6, n_positions=64, vocab_size=96)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConvertError, match="These fit") as error:
        open_checkpoint(tmp_path)
    assert "6 heads, 6 kv heads of 8" in str(error.value)
