"""Links that lead out of a checkpoint's folder: refused, but for stores that are known, and where the user says so."""

from __future__ import annotations

import json
import shutil

import pytest

import convert
from convert.cli import main
from convert.errors import ConvertError
from convert.resources import mappings_dir
from tests.fixtures import make_hf, save_tokenizer


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


def run(*argv):
    """The command's exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in argv])
    return end.value.code or 0


COMMANDS = {
    "diagnose": ["diagnose", "{bad}", "--probe-only"],
    "diagnose against": ["diagnose", "{good}", "--against", "{bad}", "--probe-only"],
    "repair": ["repair", "{bad}", "{out}", "--fix", "swap-norms"],
    "repair --list": ["repair", "{bad}", "--list"],
    "generate": ["generate", "{bad}", "-p", "The", "-n", "1", "--device", "cpu"],
    "tables check": ["tables", "check", "{table}", "--against", "{bad}"],
    "check --source": ["check", "{made}", "--source", "{bad}"],
    "to with verification": ["to", "scratch", "{bad}", "{out}", "--verify", "always"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_other_command_has_the_option(tmp_path, command, capsys):
    good = make_hf(tmp_path / "good", "gqa8", vocab=320, sharded=2).path
    save_tokenizer(good, 320)
    assert run("to", "scratch", good, tmp_path / "made") == 0
    bad = shutil.copytree(good, tmp_path / "bad")
    moved(bad / "config.json", tmp_path / "private" / "secret")
    moved(bad / "model-00001-of-00002.safetensors", tmp_path / "private" / "weights")
    places = {"good": good, "bad": bad, "made": tmp_path / "made", "out": tmp_path / "out"}
    argv = [a.format(**places, table=mappings_dir() / "llama.toml") for a in COMMANDS[command]]
    capsys.readouterr()
    assert run(*argv) == 1
    told = capsys.readouterr()
    assert "leads out of its folder" in told.err and "--follow-links" in told.err
    assert not (tmp_path / "out").exists()
    assert run(*argv, "--follow-links") in ((0, 3) if command.startswith("diagnose") else (0,)), capsys.readouterr()


def test_the_option_of_push(tmp_path, capsys):
    make_hf(tmp_path / "m", "gqa8")
    assert run("to", "scratch", tmp_path / "m", tmp_path / "out") == 0
    whole = ["push", tmp_path / "out", "me/new", "--dry-run"]
    assert run(*whole) == 0
    moved(tmp_path / "out" / "scratch_config.json", tmp_path / "private" / "secret")
    assert run(*whole) == 1 and "leads out of its folder" in capsys.readouterr().err
    assert run(*whole, "--follow-links") == 0


def test_the_option_in_the_library(model, tmp_path):
    good = shutil.copytree(model, tmp_path / "good")
    moved(model / "config.json", tmp_path / "private" / "secret")
    calls = {
        "diff": lambda **how: convert.diff(model, good, **how).verdict == "equal",
        "diff, B": lambda **how: convert.diff(good, model, **how).verdict == "equal",
        "verify": lambda **how: convert.verify(good, model, device="cpu", **how).verdict == "pass",
        "load_scratch_config": lambda **how: convert.load_scratch_config(model, **how)["n_layers"] > 0,
    }
    for name, call in calls.items():
        with pytest.raises(ConvertError, match="leads out of its folder"):
            call()
        assert call(follow_links=True), name


def test_the_option_of_validate_with_a_module(model):
    transformers = pytest.importorskip("transformers")
    module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(model))
    moved(model / "model.safetensors.index.json", model.parent / "private" / "secret")
    assert [p.kind for p in convert.validate(model, model=module).problems] == ["link"]
    assert convert.validate(model, model=module, follow_links=True).ok


def test_the_option_of_save_model(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = make_hf(tmp_path / "m", "gqa8", vocab=320).path
    save_tokenizer(folder, 320)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    moved(folder / "tokenizer.json", tmp_path / "private" / "secret")
    with pytest.raises(ConvertError, match="leads out of its folder"):
        convert.save_model(module, tmp_path / "out", layout="hf", tokenizer=folder)
    assert not (tmp_path / "out").exists()
    convert.save_model(module, tmp_path / "out", layout="hf", tokenizer=folder, follow_links=True)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tmp_path / "private" / "secret").read_bytes()


def test_a_record_cannot_allow_them(model, tmp_path):
    """What says so may be the stranger's; and what the user once said is not kept."""
    out = tmp_path / "out"
    convert.convert_checkpoint(model, out, to="scratch")
    moved(model / "config.json", tmp_path / "private" / "secret")
    record = json.loads((out / "conversion.json").read_text())
    record["source"]["options"] = {"follow_links": True}
    (out / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(ConvertError, match="leads out of its folder"):
        convert.check(out, source=model)
    assert convert.check(out, source=model, follow_links=True).ok
    convert.convert_checkpoint(model, tmp_path / "again", to="scratch", follow_links=True)
    assert "follow_links" not in (tmp_path / "again" / "conversion.json").read_text()


@pytest.mark.parametrize("named", ["folder", "index", "piece"])
def test_no_word_of_a_private_text_is_quoted(model, tmp_path, named, capsys):
    weights = model / "model-00002-of-00002.safetensors"
    weights.write_text("my private words\n")
    moved(weights, tmp_path / "private" / "secret")
    src = {"index": model / "model.safetensors.index.json", "piece": model / "model-00001-of-00002.safetensors"}
    for more in ([], ["--follow-links"]):
        assert run("inspect", src.get(named, model), *more) == 1
        assert ("my private words" in capsys.readouterr().err) == bool(more)


def test_templates_of_a_folder_elsewhere(model, tmp_path):
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "tool_use.jinja").write_text("my private words")
    (model / "additional_chat_templates").symlink_to(tmp_path / "private")
    with pytest.raises(ConvertError, match="leads out of its folder"):
        convert.open_checkpoint(model)
    (model / "additional_chat_templates").unlink()
    convert.open_checkpoint(model).close()


def test_the_hint_for_verification_says_it_too(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.devices.gpu_present", lambda: False)
    moved(model / "config.json", tmp_path / "private" / "secret")
    assert run("to", "scratch", model, tmp_path / "out", "--follow-links", "--verify", "auto") == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if "convert verify" in x)
    assert line.count("--follow-links") == 1
    assert run("to", "scratch", tmp_path / "out", tmp_path / "again") == 0
    assert "--follow-links" not in capsys.readouterr().out


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
