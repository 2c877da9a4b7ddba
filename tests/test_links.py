"""Links that lead out of a checkpoint's folder: refused, but for stores that are known, and where the user says so."""

from __future__ import annotations

import shutil

import pytest

import convert
from convert.cli import main
from convert.errors import ConvertError
from tests.fixtures import make_hf


@pytest.fixture
def model(tmp_path):
    return make_hf(tmp_path / "m", "gqa8", sharded=2).path


def moved(path, to):
    """The file lies elsewhere, and a link in its place."""
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path, to)
    path.symlink_to(to)
    return path


NAMES = ["model-00002-of-00002.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_elsewhere_is_refused_unless_followed(model, tmp_path, name):
    if name == "tokenizer.json":
        (model / name).write_text("{}")
    moved(model / name, tmp_path / "private" / "secret")
    with pytest.raises(ConvertError, match="leads out of its folder") as error:
        convert.open_checkpoint(model)
    (problem,) = error.value.problems
    assert name in problem.message and "private/secret" in problem.message and "--follow-links" in problem.hint
    with convert.open_checkpoint(model, follow_links=True) as found:
        assert len(found.tensors) == 21


@pytest.mark.parametrize("command", ["inspect", "validate", "to"])
def test_the_commands_option(model, tmp_path, command, capsys):
    moved(model / "config.json", tmp_path / "private" / "secret")
    argv = ["to", "scratch", str(model), str(tmp_path / "out")] if command == "to" else [command, str(model)]
    for more, code in (([], 1), (["--follow-links"], 0)):
        with pytest.raises(SystemExit) as end:
            main([*argv, *more])
        assert (end.value.code or 0) == code, capsys.readouterr()
        assert (tmp_path / "out").exists() == (command == "to" and code == 0)


@pytest.mark.parametrize("command", [["diff"], ["verify", "--tensors"]])
def test_the_option_of_a_comparison_is_for_both_sides(model, tmp_path, command, capsys):
    shutil.copytree(model, tmp_path / "whole")
    moved(model / "config.json", tmp_path / "private" / "secret")
    for sides in ((model, tmp_path / "whole"), (tmp_path / "whole", model)):
        for more, code in (([], 1), (["--follow-links"], 0)):
            with pytest.raises(SystemExit) as end:
                main([*command, *map(str, sides), *more])
            told = capsys.readouterr()
            assert (end.value.code or 0) == code, told
            assert ("leads out of its folder" in told.err) == bool(code)


def test_the_option_of_load_into(model, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(model)
    moved(model / "model-00002-of-00002.safetensors", tmp_path / "private" / "secret")
    module = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConvertError, match="leads out of its folder"):
        convert.load_into(module, model)
    convert.load_into(module, model, follow_links=True)


def test_the_option_of_check(model, tmp_path, capsys):
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as end:
        main(["to", "scratch", str(model), str(out)])
    assert not end.value.code
    weights = next(out.glob("*.safetensors"))
    moved(weights, tmp_path / "private" / "secret")
    for more, code in (([], 1), (["--follow-links"], 0)):
        with pytest.raises(SystemExit) as end:
            main(["check", str(out), *more])
        assert (end.value.code or 0) == code, capsys.readouterr()


@pytest.mark.parametrize(
    "store",
    [
        "hub/models--a--b/blobs/" + "a" * 64,
        "hub/models--a--b/blobs/" + "b" * 40,
        "hub/blobs/ab/ab" + "c" * 62,
        "m/inside/secret",
    ],
)
def test_known_stores(model, tmp_path, store):
    moved(model / NAMES[0], tmp_path / store)
    with convert.open_checkpoint(model) as found:
        assert len(found.tensors) == 21


@pytest.mark.parametrize("store", ["hub/models--a--b/blobs/id_rsa", "hub/blobs/ab/cd" + "c" * 62, "blobs/" + "a" * 64])
def test_what_only_looks_like_a_store(model, tmp_path, store):
    moved(model / NAMES[0], tmp_path / store)
    with pytest.raises(ConvertError, match="leads out"):
        convert.open_checkpoint(model)


def test_a_git_work_tree_but_no_home_that_is_one(model, tmp_path, monkeypatch):
    moved(model / NAMES[0], tmp_path / ".git" / "annex" / "objects" / "x")
    monkeypatch.setenv("HOME", "/nonexistent")
    with convert.open_checkpoint(model) as found:
        assert len(found.tensors) == 21
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConvertError, match="leads out"):
        convert.open_checkpoint(model)


def test_what_the_user_names_is_followed(model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    with convert.open_checkpoint(tmp_path / "link") as found:
        assert len(found.tensors) == 21


def test_a_link_to_itself_is_no_crash(model):
    (model / "tokenizer.json").symlink_to("tokenizer.json")
    with convert.open_checkpoint(model) as found:
        assert any("links to nothing: tokenizer.json" in n for n in found.notes)
