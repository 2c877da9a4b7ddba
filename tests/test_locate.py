"""Finding a checkpoint's files: one set or an error, whole or an error, nothing outside the folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError, FormatError, UsageError
from convert.locate import locate
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    make_hf(root / "one", "std")
    make_hf(root / "three", "std", sharded=3)
    make_hf(root / "bin", "std", sharded=2, format="bin")
    make_meta(root / "meta", "gqa8", mp=2)
    make_scratch(root / "scratch", "std")
    make_gguf(root / "model.gguf", "std")
    return root


@pytest.fixture
def copy(made, tmp_path):
    def make(name: str) -> Path:
        return Path(shutil.copytree(made / name, tmp_path / name))

    return make


def names(found) -> list[str]:
    return [p.name for p in found.files]


def test_what_lies_where(made):
    assert names(locate(made / "one")) == ["model.safetensors"]
    three = locate(made / "three")
    assert len(three.files) == 3 and len(three.weight_map) == 21
    assert locate(made / "bin").format == "torch"
    assert names(locate(made / "meta")) == ["consolidated.00.pth", "consolidated.01.pth"]
    assert locate(made / "scratch").config == made / "scratch" / "scratch_config.json"
    assert locate(made / "model.gguf").format == "gguf"


def test_a_shard_or_an_index_stands_for_all(made):
    for name in ("model-00002-of-00003.safetensors", "model.safetensors.index.json"):
        assert len(locate(made / "three" / name).files) == 3
    assert len(locate(made / "meta" / "consolidated.01.pth").files) == 2


def test_content_counts_and_not_the_suffix(copy):
    folder = copy("one")
    (folder / "model.safetensors").rename(folder / "model.bin")
    assert locate(folder).format == "safetensors"
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.layout == "hf"


def test_nothing_there(tmp_path):
    with pytest.raises(UsageError, match="Give a checkpoint folder or file"):
        locate(tmp_path / "absent")
    with pytest.raises(UsageError, match="Give a checkpoint folder or file"):
        locate(tmp_path / "no" / "such" / "folder")
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(UsageError, match=r"no weights in .*README\.md"):
        locate(tmp_path)


def test_two_sets_are_named_with_size_and_date(copy, made):
    folder = copy("one")
    for file in (made / "bin").glob("pytorch_model*"):
        shutil.copy(file, folder)
    with pytest.raises(ConvertError, match="2 candidate sets") as error:
        locate(folder)
    text = str(error.value)
    assert "model.safetensors (1 file," in text and "pytorch_model.bin.index.json (2 files" in text
    assert error.value.problems[0].kind == "two_sets"
    assert names(locate(folder / "model.safetensors")) == ["model.safetensors"]
    assert len(locate(folder / "pytorch_model.bin.index.json").files) == 2


def test_a_stray_file_beside_shards_is_left_alone_and_said(copy):
    folder = copy("three")
    shutil.copy(folder / "model-00001-of-00003.safetensors", folder / "extra.safetensors")
    found = locate(folder)
    assert len(found.files) == 3
    assert any("extra.safetensors" in n for n in found.notes)


def test_a_whole_model_beside_shards_is_a_second_set(copy, made):
    folder = copy("three")
    shutil.copy(made / "one" / "model.safetensors", folder)
    with pytest.raises(ConvertError, match="2 candidate sets"):
        locate(folder)


def test_what_trainers_leave_is_no_second_set(copy):
    folder = copy("one")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "scaler.pt"):
        (folder / name).write_bytes(b"PK\x03\x04 not read")
    assert names(locate(folder)) == ["model.safetensors"]


def test_an_incomplete_download_names_the_missing_files(copy):
    folder = copy("three")
    for number in (1, 3):
        (folder / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(ConvertError, match="2 of them are absent") as error:
        locate(folder)
    assert "model-00001-of-00003" in str(error.value) and "model-00003-of-00003" in str(error.value)
    assert error.value.problems[0].kind == "missing_file"


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b", "x\0y"])
def test_an_index_cannot_point_elsewhere(copy, name):
    folder = copy("three")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(raw))
    with pytest.raises(FormatError, match="outside its own folder"):
        locate(folder)


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {}}', "{", "nul", ""])
def test_an_index_that_is_none(copy, content):
    folder = copy("three")
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        locate(folder)


def test_index_against_headers_both_ways(copy):
    folder = copy("three")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    moved, gone = "model.norm.weight", "lm_head.weight"
    raw["weight_map"][moved] = "model-00001-of-00003.safetensors"
    raw["weight_map"]["invented.weight"] = "model-00002-of-00003.safetensors"
    del raw["weight_map"][gone]
    index.write_text(json.dumps(raw))
    with open_checkpoint(folder) as checkpoint:
        said = {p.tensor: p.message for p in checkpoint.problems}
    assert set(said) == {moved, gone, "invented.weight"}
    assert "(model-00003-of-00003.safetensors does)" in said[moved]
    assert "no shard does" in said["invented.weight"]
    assert "does not know" in said[gone]


def test_the_current_folder_and_the_root(made, monkeypatch):
    monkeypatch.chdir(made / "one")
    assert names(locate(Path("."))) == ["model.safetensors"]
    with pytest.raises(UsageError, match="no weights"):
        locate(Path("/"))


@pytest.mark.parametrize("other", ["consolidated.pth", "consolidated.00.pt"])
def test_two_sets_of_metas_files(copy, other):
    """Both are number 0 to somebody: which one wins is not for the order of a directory to say."""
    folder = copy("meta")
    shutil.copy(folder / "consolidated.00.pth", folder / other)
    with pytest.raises(ConvertError, match="2 candidate sets") as caught:
        locate(folder)
    assert other in str(caught.value) or "consolidated.*.pt" in str(caught.value)
    assert names(locate(folder / other)) == [other]
    assert names(locate(folder / "consolidated.01.pth")) == ["consolidated.00.pth", "consolidated.01.pth"]
    (folder / "consolidated.00.pth").unlink()
    (folder / "consolidated.01.pth").unlink()
    assert names(locate(folder)) == [other]


@pytest.mark.parametrize(("ranks", "gone"), [(2, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("axis", ["llama2", "llama3"])
def test_metas_last_files_are_absent(tmp_path, ranks, gone, axis):
    """Without a vocab_size the rest looks like a whole model with smaller heads; it was converted as one."""
    folder = make_meta(tmp_path / "m", "h32kv4", mp=ranks, embedding_axis=axis).path
    params = json.loads((folder / "params.json").read_text())
    for vocab in (params["vocab_size"], -1):
        (folder / "params.json").write_text(json.dumps(params | {"vocab_size": vocab}))
        with open_checkpoint(folder) as whole:  # the control
            assert whole.config["head_dim"] == 8
    for number in range(ranks - gone, ranks):
        (folder / f"consolidated.{number:02d}.pth").unlink()
    for vocab in (params["vocab_size"], -1):
        (folder / "params.json").write_text(json.dumps(params | {"vocab_size": vocab}))
        with pytest.raises(ConvertError, match=f"{ranks - gone} of {ranks} model-parallel files") as caught:
            open_checkpoint(folder)
        assert [p.kind for p in caught.value.problems] == ["missing_file"]


def test_a_number_twice(copy):
    folder = copy("meta")
    shutil.copy(folder / "consolidated.01.pth", folder / "consolidated.1.pth")
    for src in (folder, folder / "consolidated.00.pth"):
        with pytest.raises(ConvertError, match=r"number 1 2 times: consolidated.01.pth, consolidated.1.pth"):
            locate(src)


def test_what_accelerate_numbers_is_no_model(copy):
    folder = copy("one")
    for name in ("optimizer.bin", "optimizer_1.bin", "scheduler_1.bin", "sampler_1.bin", "dl_state_dict_1.bin"):
        shutil.copy(folder / "model.safetensors", folder / name)
    assert names(locate(folder)) == ["model.safetensors"]
    shutil.copy(folder / "model.safetensors", folder / "model_1.safetensors")  # a second model is one
    with pytest.raises(ConvertError, match="2 candidate sets"):
        locate(folder)


def test_a_gap_in_metas_files(copy, made):
    folder = copy("meta")
    (folder / "consolidated.01.pth").rename(folder / "consolidated.03.pth")
    with pytest.raises(ConvertError, match="number 1, 2 is absent"):
        locate(folder)
    (folder / "consolidated.00.pth").unlink()
    with pytest.raises(ConvertError, match="number 0, 1, 2"):
        locate(folder)


@pytest.mark.parametrize("where", ["file", "shard"])
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 2471645608\n",
            "Git-LFS pointer",
        ),
        (b"<!DOCTYPE html><html><head><title>Log in</title></head></html>", "web page"),
        (b"", "empty"),
        (b"\0" * 4096, "zero"),
        (b"just some text\n", "text"),
    ],
)
def test_files_that_are_no_weights(copy, where, content, word):
    folder = copy("one" if where == "file" else "three")
    name = "model.safetensors" if where == "file" else "model-00002-of-00003.safetensors"
    (folder / name).write_bytes(content)
    with pytest.raises(FormatError, match=f"(?i){name}.*{word}"):
        locate(folder)


def test_a_git_lfs_pointer_says_how_large_the_real_file_is(copy):
    folder = copy("one")
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 2471645608\n"
    (folder / "model.safetensors").write_bytes(pointer)
    with pytest.raises(FormatError, match=r"2\.47 GB.*git lfs pull"):
        locate(folder)


def test_a_lora_folder_names_its_base(tmp_path, made):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    shutil.copy(made / "one" / "model.safetensors", tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConvertError, match="LoRA adapter for someone/base") as error:
        locate(tmp_path)
    assert "merge" in str(error.value)


def test_the_record_of_a_conversion(copy, made, tmp_path):
    folder = copy("one")
    assert locate(folder).record is None
    (folder / "conversion.json").write_text("{}")
    assert locate(folder).record == folder / "conversion.json"
    own = tmp_path / "model.gguf.conversion.json"
    shutil.copy(made / "model.gguf", tmp_path / "model.gguf")
    own.write_text("{}")
    assert locate(tmp_path / "model.gguf").record == own


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UsageError, match="pipe, socket or device"):
            locate(place)


@pytest.mark.parametrize("gone", [0, 1])
def test_shards_without_their_index(tmp_path, gone):
    for name, format in (("model.safetensors", "safetensors"), ("pytorch_model.bin", "bin")):
        folder = make_hf(tmp_path / format, "std", sharded=3, format=format).path
        (folder / f"{name}.index.json").unlink()
        for path in sorted(folder.glob("*-of-*"))[:gone]:
            path.unlink()
        with pytest.raises(ConvertError, match=rf"{3 - gone} of 3 shards and no {name}.index.json") as error:
            locate(folder)
        assert ("other shards" in str(error.value)) == bool(gone)


def test_one_shard_alone(tmp_path):
    folder = make_hf(tmp_path / "m", "std", sharded=3).path
    (folder / "model.safetensors.index.json").unlink()
    first, *others = sorted(folder.glob("*-of-*"))
    with pytest.raises(ConvertError, match=r"holds 3 of 3 shards and no model.safetensors.index.json"):
        locate(first)
    for path in others:
        path.unlink()
    for place in (folder, first):
        with pytest.raises(ConvertError, match=r"holds 1 of 3 shards and no model.safetensors.index.json"):
            locate(place)
    for name in ("model-00001-of-00001.safetensors", "mine.safetensors"):  # the control: no shard, by its name
        first = first.rename(folder / name)
        assert locate(first).files == locate(folder).files == [first]


def test_an_index_file_without_data_beside_it_is_of_no_matter(tmp_path):
    """Search libraries write `.index` files too; TensorFlow's have their data beside them."""
    make_hf(tmp_path, "gqa8")
    (tmp_path / "vectors.index").write_bytes(b"IxFI" + bytes(64))
    assert [p.name for p in locate(tmp_path).files] == ["model.safetensors"]
    for name in ("model.ckpt.index", "model.ckpt.data-00000-of-00001"):
        shutil.copy(Path(__file__).parent / "data" / "openai" / name, tmp_path / name)
    with pytest.raises(ConvertError, match="2 candidate sets"):
        locate(tmp_path)
    assert locate(tmp_path / "model.ckpt").format == "tensorflow"


def test_hparams_count_beside_a_tensorflow_checkpoint_only(tmp_path):
    make_hf(tmp_path, "gqa8")
    (tmp_path / "config.json").rename(tmp_path / "hparams.json")
    assert locate(tmp_path).config is None
    data = Path(__file__).parent / "data" / "openai"
    assert locate(data).config == data / "hparams.json"
