"""The hub's cache at any level, and what unfinished, pruned, stale and stray files in it and elsewhere are answered."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError, UsageError
from convert.locate import locate
from tests.fixtures import make_hf
from tests.fixtures.float8 import make_float8

REVISION, OTHER = "a" * 40, "b" * 40


def cached(source: Path, hub: Path, *, name: str = "models--someone--model", revision: str = REVISION) -> Path:
    """The folder as the hub's client lays it into its cache: blobs called after their content, links to them."""
    repo = hub / name
    for part in ("blobs", f"snapshots/{revision}", "refs"):
        (repo / part).mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(revision)
    for path in source.iterdir():
        data = path.read_bytes()
        large = path.suffix == ".safetensors"
        blob = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        shutil.copy(path, repo / "blobs" / blob.hexdigest())
        (repo / "snapshots" / revision / path.name).symlink_to(f"../../blobs/{blob.hexdigest()}")
    return repo


@pytest.fixture
def repo(tmp_path):
    return cached(make_hf(tmp_path / "m", "gqa8", sharded=2).path, tmp_path / "hub")


def test_the_layout_is_the_clients(tmp_path):
    """Made by the client itself, from its own description of files."""
    from huggingface_hub import scan_cache_dir

    repo = cached(make_hf(tmp_path / "m", "gqa8").path, tmp_path / "hub")
    (found,) = scan_cache_dir(tmp_path / "hub").repos
    assert found.repo_id == "someone/model" and found.repo_path == repo
    (revision,) = found.revisions
    assert revision.commit_hash == REVISION and revision.refs == {"main"} and len(revision.files) == 3


@pytest.mark.parametrize("level", ["", "snapshots", f"snapshots/{REVISION}", "blobs", "refs", "refs/main", ".."])
def test_any_level_is_the_model(repo, level):
    with convert.open_checkpoint(repo / level) as found:
        assert found.layout == "hf" and len(found.tensors) == 21 and found.folder.name == REVISION
        assert found.config["num_attention_heads"] == 8
        assert any("someone/model" in n and REVISION[:12] in n for n in found.notes) == (level[:11] != "snapshots/a")
    assert convert.validate(repo / level, hashes=True).ok


def test_levels_above_links_and_other_refs(repo, tmp_path, monkeypatch):
    """HF_HOME, in which the cache is one of several folders; `.`; a link to the model; a ref of a pull request."""
    home = tmp_path / "home"
    (home / "xet").mkdir(parents=True)
    (home / "token").write_text("secret")
    shutil.move(tmp_path / "hub", home / "hub")
    repo = home / "hub" / repo.name
    (repo / "refs" / "pr").mkdir()
    (repo / "refs" / "pr" / "1").write_text(REVISION)
    (tmp_path / "link").symlink_to(repo)
    for place in (home, tmp_path / "link", repo / "refs" / "pr" / "1"):
        assert locate(place).folder.name == REVISION
    monkeypatch.chdir(repo)
    assert locate(Path(".")).folder.name == REVISION
    shutil.copy(tmp_path / "m" / "model-00001-of-00002.safetensors", home / "model.pth")  # now it is a model's folder
    assert locate(home).folder == home


def test_a_blob_of_a_folder_in_it(tmp_path):
    repo = cached(make_hf(tmp_path / "m", "gqa8").path, tmp_path / "hub")
    inside = repo / "snapshots" / REVISION / "original"
    inside.mkdir()
    for link in inside.parent.glob("*.*"):
        (inside / link.name).symlink_to(f"../../../blobs/{link.resolve().name}")
        link.unlink()
    found = locate((inside / "model.safetensors").resolve())
    assert found.config is not None and found.folder == inside
    assert any("is original/model.safetensors of revision aaaa" in n for n in found.notes)


def test_a_file_of_it(repo):
    for path in sorted((repo / "snapshots" / REVISION).glob("*.safetensors")):
        for place in (path, path.resolve()):  # the link, and the blob that it leads to
            found = locate(place)
            assert len(found.files) == 2 and found.config is not None
    assert any("is model-00002" in n for n in locate(path.resolve()).notes)


def test_revisions(repo, tmp_path):
    cached(make_hf(tmp_path / "n", "gqa8", seed=1).path, tmp_path / "hub", revision=OTHER)
    found = locate(repo)
    assert found.folder.name == OTHER and any("(main)" in n and "of 2" in n for n in found.notes)
    (repo / "refs" / "main").unlink()
    with pytest.raises(ConvertError, match=f"2 revisions.*{REVISION}.*{OTHER}") as caught:
        locate(repo)
    assert caught.value.problems[0].kind == "revisions" and "snapshots/" in str(caught.value)
    assert locate(repo / "snapshots" / REVISION).folder.name == REVISION
    (repo / "refs" / "pr").write_text(REVISION)
    assert locate(repo / "refs" / "pr").folder.name == REVISION
    (repo / "refs" / "pr").write_text("c" * 40)
    with pytest.raises(ConvertError, match=r"c{40} is not among them"):
        locate(repo / "refs" / "pr")


def test_a_cache_of_many_models_lists_them(repo, tmp_path):
    cached(make_hf(tmp_path / "n", "gqa8", seed=1).path, tmp_path / "hub", name="models--other--thing")
    with pytest.raises(UsageError, match=r"2 models: someone/model, other/thing|2 models: other/thing, someone/model"):
        locate(tmp_path / "hub")


def test_a_pruned_cache(repo):
    snapshot = repo / "snapshots" / REVISION
    path = snapshot / "model-00002-of-00002.safetensors"
    path.resolve().unlink()
    for place in (repo, snapshot, path, snapshot / "model.safetensors.index.json"):
        with pytest.raises(ConvertError, match="model-00002-of-00002") as caught:
            convert.open_checkpoint(place)
        assert caught.value.problems[0].kind == "missing_file"
    with pytest.raises(ConvertError, match=r"is a link to what is not there .*blobs.*") as caught:
        convert.open_checkpoint(snapshot)
    assert "cp -rL" in str(caught.value)
    (repo / "blobs" / "dead.incomplete").write_bytes(b"x" * 2000)
    with pytest.raises(ConvertError, match=r"1 unfinished download \(2\.00 kB\) in blobs"):
        convert.open_checkpoint(snapshot)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_pruned_small_file(repo, name):
    (repo / "snapshots" / REVISION / name).resolve().unlink()
    with pytest.raises(ConvertError, match=f"{name} is a link to what is not there"):
        convert.open_checkpoint(repo)


def test_a_pruned_file_that_is_not_needed_is_said(repo):
    (repo / "snapshots" / REVISION / "generation_config.json").resolve().unlink()
    with convert.open_checkpoint(repo) as found:
        assert any("links to nothing: generation_config.json" in n for n in found.notes)


def test_a_copy_of_the_snapshot_alone(repo, tmp_path):
    copy = Path(shutil.copytree(repo / "snapshots" / REVISION, tmp_path / "copy", symlinks=True))
    with pytest.raises(ConvertError, match=r"are links to what is not there"):
        convert.open_checkpoint(copy)
    with pytest.raises(ConvertError, match=r"is a link to what is not there"):
        convert.open_checkpoint(copy / "model-00001-of-00002.safetensors")


def test_an_empty_repo(repo):
    shutil.rmtree(repo / "snapshots" / REVISION)
    (repo / "blobs" / "x.incomplete").write_bytes(b"x")
    with pytest.raises(ConvertError, match=r"0 revisions.*1 unfinished download"):
        locate(repo)


# --- downloads and leftovers elsewhere --------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [".incomplete", ".part", ".crdownload", ".tmp", ".aria2"])
def test_an_unfinished_download(tmp_path, end):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2).path
    last = folder / "model-00002-of-00002.safetensors"
    last.rename(f"{last}{end}")
    with pytest.raises(ConvertError, match=f"absent.*unfinished downloads: model-00002-of-00002.safetensors\\{end}"):
        locate(folder)
    lone = make_hf(tmp_path / "n", "gqa8").path
    (lone / "model.safetensors").rename(lone / f"model.safetensors{end}")
    with pytest.raises(ConvertError, match=r"no weights in .*, but unfinished downloads") as caught:
        locate(lone)
    assert caught.value.exit_code == 1  # the files are not what they should be; the command was used rightly


@pytest.mark.parametrize("end", [".incomplete", ".part", ".aria2"])
def test_an_unfinished_download_beside_a_whole_file_is_said(tmp_path, end):
    folder = make_hf(tmp_path / "m", "gqa8").path
    weights = folder / "model.safetensors"
    assert not any("unfinished" in n for n in locate(folder).notes + locate(weights).notes)  # the control
    (folder / f"other{end}").write_bytes(b"x")
    assert any(f"other{end}" in n for n in locate(folder).notes)
    assert not any(f"other{end}" in n for n in locate(weights).notes)  # a folder of many downloads is not its business
    (folder / f"{weights.name}{end}").write_bytes(b"x")
    for src in (folder, weights):
        if end == ".aria2":  # by size the file is whole, but it may have holes
            with pytest.raises(ConvertError, match=r"not downloaded to its end: aria2's model\.safetensors\.aria2"):
                locate(src)
        else:
            assert any(f"{weights.name}{end}" in n for n in locate(src).notes)


def test_a_download_into_a_folder_that_was_not_finished(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2).path
    (folder / "model-00002-of-00002.safetensors").unlink()
    hidden = folder / ".cache" / "huggingface" / "download"
    hidden.mkdir(parents=True)
    (hidden / "abc.incomplete").write_bytes(b"x" * 5000)
    with pytest.raises(ConvertError, match=r"absent.*1 unfinished download \(5\.00 kB\)"):
        locate(folder)


def test_a_stale_index_beside_a_whole_model(tmp_path):
    three = make_hf(tmp_path / "three", "gqa8", sharded=3).path
    one = make_hf(tmp_path / "one", "gqa8").path
    shutil.copy(three / "model.safetensors.index.json", one)
    with pytest.raises(ConvertError, match=r"names files of which none is there, beside model.safetensors") as caught:
        locate(one)
    assert caught.value.problems[0].kind == "stale_index" and "delete the index" in str(caught.value)
    assert [p.name for p in locate(one / "model.safetensors").files] == ["model.safetensors"]
    shutil.copy(three / "model-00001-of-00003.safetensors", one)  # a partial set is a set
    with pytest.raises(ConvertError, match=r"2 candidate sets"):
        locate(one)


def test_stray_shards_of_another_save(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2).path
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model-00001-of-00007.safetensors")
    found = locate(folder)
    assert len(found.files) == 2 and any("model-00001-of-00007" in n for n in found.notes)


def test_a_tensor_in_two_shards(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2).path
    first, second = sorted(folder.glob("*.safetensors"))
    state = load_file(second)
    name = next(iter(load_file(first)))
    state[name] = load_file(first)[name]
    save_file(state, second, metadata={"format": "pt"})
    found = convert.validate(folder)
    assert not found.ok and any(p.tensor == name for p in found.problems)


def test_a_wrong_total_size_is_said(tmp_path):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2).path
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    assert not any("total_size" in n for n in convert.validate(folder).notes)  # the control
    raw["metadata"]["total_size"] += 1
    index.write_text(json.dumps(raw))
    found = convert.validate(folder)
    assert found.ok and any("total_size" in n for n in found.notes)
    alone = make_hf(tmp_path / "alone", "gqa8").path  # an index may name one file
    raw["weight_map"] = dict.fromkeys(raw["weight_map"], "model.safetensors")
    for size, said in ((raw["metadata"]["total_size"] - 1, False), (7, True)):
        (alone / index.name).write_text(json.dumps(raw | {"metadata": {"total_size": size}}))
        found = convert.validate(alone)
        assert found.ok and any("total_size" in n for n in found.notes) == said
    done = convert.convert_checkpoint(folder, tmp_path / "out", to="scratch")
    assert sum("total_size" in n for n in done.notes) == 1  # not only validate says it


def test_scales_of_fp8_count_in_total_size(tmp_path):
    folder = tmp_path / "m"
    make_float8(folder, "block", config={"quant_method": "fp8", "weight_block_size": [16, 32]})
    state = load_file(folder / "model.safetensors")
    size = sum(t.nbytes for t in state.values())
    scales = sum(t.nbytes for name, t in state.items() if name.endswith("_scale_inv"))
    for stated, said in ((size, False), (size - scales, True)):
        index = {"metadata": {"total_size": stated}, "weight_map": dict.fromkeys(state, "model.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        found = convert.validate(folder)
        assert found.ok and any("total_size" in n for n in found.notes) == said


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 17209530\n"
PAGE = b"<!DOCTYPE html><html><head><title>Log in</title></head></html>"


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "generation_config.json", "tokenizer.json"]
)
@pytest.mark.parametrize(("content", "word"), [(POINTER, "Git-LFS pointer"), (PAGE, "web page"), (b"", "empty")])
def test_small_files_that_are_something_else(tmp_path, name, content, word):
    folder = make_hf(tmp_path / "m", "gqa8", sharded=2, tokenizer=120).path
    (folder / name).write_bytes(content)
    found = convert.validate(folder)
    assert not found.ok
    text = "\n".join(found.lines())
    assert name in text and word.lower() in text.lower(), text


@pytest.mark.parametrize("name", ["tokenizer.model", "params.json"])
@pytest.mark.parametrize(("content", "word"), [(POINTER, "Git-LFS pointer"), (PAGE, "web page"), (b"", "empty")])
def test_metas_small_files_that_are_something_else(tmp_path, name, content, word):
    from tests.fixtures import make_meta

    folder = make_meta(tmp_path / "m", "gqa8").path
    (folder / name).write_bytes(content)
    found = convert.validate(folder)
    assert not found.ok
    text = "\n".join(found.lines())
    assert name in text and word.lower() in text.lower(), text


def test_links_in_circles(tmp_path):
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    with pytest.raises((ConvertError, UsageError)):
        locate(tmp_path / "a")
