"""The commands that write and show GGUF files: options, exit codes, what is left behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import pytest

from convert.cli import COMMANDS, cli, run
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.fixtures.tokenizer import EOS, save_tokenizer
from tests.gguf_files import keys, pieces, tensors


@pytest.fixture
def said(capsys):
    """Runs the command line; returns exit code, standard output, standard error."""

    def call(*args: object) -> tuple[int, str, str]:
        code = run(cli, [str(a) for a in args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


@pytest.fixture
def hf(tmp_path):
    return make_hf(tmp_path / "hf", "gqa8", dtype="bfloat16", tokenizer=True)


@pytest.fixture
def tokenizer(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(tmp_path / "tokenizer", 128)
    return tmp_path / "tokenizer"


MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch, "gguf": make_gguf}


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("command", ["named", "to"])
def test_every_source(said, tmp_path, tokenizer, source, command):
    path = tmp_path / "m.gguf" if source == "gguf" else tmp_path / "source"
    made = MAKERS[source](path, "gqa8")
    words = [f"{source}-to-gguf"] if command == "named" else ["to", "gguf"]
    code, out, err = said(*words, made.path, tmp_path / "a.gguf", "--type", "q8_0", "--tokenizer", tokenizer)
    assert code == 0, err
    assert "a.gguf" in out and f"{source}) →" in out
    kinds = [kind for kind, _ in tensors(tmp_path / "a.gguf").values()]
    assert set(kinds) == {"Q8_0", "F32"}
    assert keys(tmp_path / "a.gguf")["tokenizer.ggml.model"][1] == "gpt2"


def test_options(said, tmp_path, hf):
    out = tmp_path / "a.gguf"
    code, _, err = said(
        *("hf-to-gguf", hf.path, out, "--type", "q8_0", "--tensor-type", "*.ffn_down.weight=f16", "-q"),
        *("--metadata", "author=me", "--metadata", "my.count=u64:3", "--no-tokenizer"),
    )
    assert code == 0, err
    found = tensors(out)
    assert found["blk.0.ffn_down.weight"][0] == "F16" and found["blk.0.ffn_up.weight"][0] == "Q8_0"
    assert keys(out)["general.author"][1] == "me" and keys(out)["my.count"] == ("UINT64", 3)
    assert keys(out)["tokenizer.ggml.model"][1] == "none"
    assert said("hf-to-gguf", hf.path, out, "--type", "f32")[0] == 2  # it exists
    assert said("hf-to-gguf", hf.path, out, "--type", "f32", "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dtype", "float16"], "--type"),
        (["--type", "iq3_m"], "importance matrix"),
        (["--imatrix", "x.dat"], "importance matrices are not taken"),
        (["--type", "q7_9"], "q4_k_m"),
        (["--tensor-type", "blk.*"], "PATTERN=TYPE"),
        (["--metadata", "author"], "KEY=VALUE"),
        (["--tensor-type", "nothing.*=f16"], "fits no tensor"),
        (["--tokenizer", "nowhere"], "no such file"),
        (["--tokenizer", ".", "--no-tokenizer"], "exclude"),
        (["--pre", "nonsense"], "nonsense"),
        (["--ollama", "--split-max-size", "20K"], "one file"),
    ],
)
def test_refusals_are_usage_errors_and_leave_nothing(said, tmp_path, hf, options, words):
    code, _, err = said("hf-to-gguf", hf.path, tmp_path / "a.gguf", *options)
    assert code == 2 and words in err, err
    assert "Traceback" not in err and not list(tmp_path.glob("a*"))


def test_findings_are_exit_code_1(said, tmp_path):
    made = make_hf(tmp_path / "hf", "gqa8")
    code, _, err = said("hf-to-gguf", made.path, tmp_path / "a.gguf")
    assert code == 1 and "--tokenizer PATH" in err and "--no-tokenizer" in err
    code, _, err = said("meta-to-gguf", made.path, tmp_path / "a.gguf")
    assert code == 2 and "hf-to-gguf" in err
    assert not list(tmp_path.glob("a*"))


def test_dry_run_tells_everything_and_writes_nothing(said, tmp_path):
    made = make_hf(tmp_path / "hf", "kquant", tokenizer=True)
    arguments = (
        "hf-to-gguf",
        made.path,
        tmp_path / "a.gguf",
        "--type",
        "q8_0",
        "--dry-run",
        "--split-max-size",
        "500K",
    )
    code, out, _ = said(*arguments)
    assert code == 0 and "a-00001-of-" in out and "Q8_0 (" in out and "Nothing was written" in out
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    _, text, _ = said(*arguments, "--json")
    plan = json.loads(text)
    assert said(*arguments[:5], "--split-max-size", "500K")[0] == 0
    assert [f["name"] for f in plan["files"]] == [p.name for p in pieces(tmp_path / "a.gguf")]
    assert [f["bytes"] for f in plan["files"]] == [p.stat().st_size for p in pieces(tmp_path / "a.gguf")]
    assert all(f["bytes"] <= 500_000 for f in plan["files"])
    made = make_hf(tmp_path / "odd", "std", tokenizer=True)
    _, out, _ = said("hf-to-gguf", made.path, tmp_path / "b.gguf", "--type", "q8_0", "--dry-run")
    assert "F16 in place of Q8_0" in out and "bytes in all" in out
    code, _, err = said("hf-to-gguf", made.path, tmp_path / "b.gguf", "--type", "q8_0", "--no-fallback")
    assert code == 2 and "rows of 48 are not a multiple of 32" in err and "Without --no-fallback" in err


def test_a_modelfile_for_ollama(said, tmp_path, hf):
    out = tmp_path / "out" / "a.gguf"
    assert said("hf-to-gguf", hf.path, out, "--ollama", "-q")[0] == 0
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.splitlines()[0] == "FROM ./a.gguf" and f'PARAMETER stop "{EOS}"' in text
    assert 'TEMPLATE """{{ .Prompt }}"""' in text
    (hf.path / "chat_template.jinja").write_text("{{ messages }}")
    assert said("hf-to-gguf", hf.path, out, "--ollama", "-q", "--overwrite")[0] == 0
    assert "TEMPLATE" not in (tmp_path / "out" / "Modelfile").read_text()


def test_a_tokenizer_from_elsewhere_for_a_hugging_face_folder(said, tmp_path, tokenizer):
    made = make_scratch(tmp_path / "source", "gqa8")
    assert said("scratch-to-hf", made.path, tmp_path / "out", "--tokenizer", tokenizer, "-q")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


# ---- metadata --------------------------------------------------------------------------------------------------


def data_of(path: Path) -> bytes:
    return path.read_bytes()[gguf.GGUFReader(path).data_offset :]


def test_metadata_shows(said, tmp_path, hf):
    said("hf-to-gguf", hf.path, tmp_path / "a.gguf", "-q")
    code, out, _ = said("metadata", tmp_path / "a.gguf")
    assert code == 0 and "llama.block_count" in out and "u32" in out and "(128)" in out
    assert all(len(line) < 220 for line in out.splitlines())
    code, out, _ = said("metadata", tmp_path / "a.gguf", "--json")
    shown = json.loads(out)["metadata"]
    wanted = keys(tmp_path / "a.gguf")
    assert shown.keys() == wanted.keys()
    differing = [k for k in shown if shown[k]["value"] != wanted[k][1] and shown[k]["type"] != "f32"]
    assert not differing


def test_metadata_changes_without_touching_data(said, tmp_path, hf):
    path = tmp_path / "a.gguf"
    said("hf-to-gguf", hf.path, path, "-q")
    before, inode = data_of(path), path.stat().st_ino
    code, out, _ = said(
        "metadata",
        path,
        "--set",
        "llama.context_length=99",
        "--set",
        "general.name=a",
        "--remove",
        "general.size_label",
    )
    assert code == 0 and "in place" in out
    assert path.stat().st_ino == inode and data_of(path) == before
    found = keys(path)
    assert found["llama.context_length"] == ("UINT32", 99) and found["general.name"][1] == "a"
    assert "general.size_label" not in found
    code, out, _ = said("metadata", path, "--set", f"tokenizer.chat_template={'x' * 3000}", "--json")
    assert code == 0 and json.loads(out)["in_place"] is False and data_of(path) == before
    assert "convert.padding" in keys(path) and "convert.padding" not in said("metadata", path)[1]  # spaces
    assert said("metadata", path, "--set", "general.author=later", "--json")[1].count('"in_place": true') == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "llama.context_length=many"], "'many' is no u32, which is a whole number from 0 to 4,294,967,295"),
        (["--set", "llama.context_length=4294967296"], "from 0 to 4,294,967,295"),
        (["--set", "a.b=i8:-129"], "'-129' is no i8, which is a whole number from -128 to 127"),
        (["--set", "a.b=u16:1.5"], "'1.5' is no u16"),
        (["--set", "llama.rope.freq_base=many"], "'many' is no number"),
        (["--set", "general.alignment=64"], "alignment"),
        (["--remove", "not.there"], "no such key"),
        (["--set", "nothing"], "has no '='"),
        (["--set", "=5"], "nothing before the '='"),
    ],
)
def test_metadata_refuses_and_changes_nothing(said, tmp_path, hf, options, words):
    path = tmp_path / "a.gguf"
    said("hf-to-gguf", hf.path, path, "-q")
    before = path.read_bytes()
    code, _, err = said("metadata", path, *options)
    assert code == 2 and words in err and path.read_bytes() == before
    assert "invalid literal" not in err and "format requires" not in err
    assert said("metadata", path, "--set", "a.b=i8:-128")[0] == 0  # the control
    assert said("metadata", tmp_path / "absent.gguf")[0] == 2
    assert said("metadata", hf.path / "config.json")[0] == 1


def test_a_link_is_not_written_through_unasked(said, tmp_path, hf):
    path, link = tmp_path / "a.gguf", tmp_path / "link.gguf"
    said("hf-to-gguf", hf.path, path, "-q")
    before = path.read_bytes()
    os.symlink(path, link)
    code, _, err = said("metadata", link, "--set", "general.name=b")
    assert code == 2 and "is a link" in err and path.read_bytes() == before
    assert said("metadata", link)[0] == 0
    assert said("metadata", link, "--set", "general.name=b", "--force")[0] == 0
    assert link.is_symlink() and keys(path)["general.name"][1] == "b"


def test_every_command_is_listed():
    wanted = {"hf-to-gguf", "meta-to-gguf", "scratch-to-gguf", "gguf-to-gguf", "metadata"}
    assert wanted <= COMMANDS.keys()
