"""Uploading: what the record names and a card, made of what the files say; private, dry, continued, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import convert
from convert.errors import ConvertError, UsageError
from tests.fixtures.hf import make_hf
from tests.hub.conftest import files_of, put
from tests.hub.server import Fault


@pytest.fixture
def made(hub, tmp_path, monkeypatch):
    """An output, and a token that may write."""
    make_hf(tmp_path / "m", tokenizer=True)
    (tmp_path / "m" / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- en\n---\n# Tiny\n")
    put(hub, "org/tiny", tmp_path / "m")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    convert.convert_checkpoint("org/tiny", "out", to="scratch", hashes=True)
    (tmp_path / "out" / "notes.txt").write_text("not for everybody")
    return tmp_path / "out"


def front(card: str) -> dict:
    """The card's YAML, read by a library that is not ours."""
    import yaml

    return yaml.safe_load(card.split("---\n")[1])


def test_upload_and_open_again(hub, made):
    done = convert.push(made, "me/new")
    repo = hub.repos["me/new"]
    own = {p.name: p.read_bytes() for p in made.iterdir() if p.name not in ("notes.txt", "README.md")}
    card = repo.files["README.md"].decode()
    assert {k: v for k, v in repo.files.items() if k != "README.md"} == own
    assert not repo.private and "/me/new/commit/" in str(done.url)
    told = front(card)
    assert told["base_model"] == "org/tiny" and "ckpt-convert" in told["tags"]
    record = json.loads((made / "conversion.json").read_text())
    assert hub.repos["org/tiny"].sha() in card and "hf-to-scratch" in card
    assert record["target"]["files"][0]["sha256"] in card
    assert "not run as a model" in card
    with convert.open_checkpoint("me/new") as again:
        assert again.layout == "scratch"
    assert convert.check("out", source="org/tiny").ok


def files_of_weights(hub, name: str) -> dict:
    return {k: v for k, v in hub.repos[name].files.items() if k.endswith(".safetensors")}


def test_private_and_verdict(hub, made):
    convert.push(made, "me/new", private=True, verified={"verdict": "pass", "message": "Equal to 1e-6."})
    assert hub.repos["me/new"].private
    assert "**pass**. Equal to 1e-6." in hub.repos["me/new"].files["README.md"].decode()


def test_dry_run_sends_nothing(hub, made, cli):
    hub.log.clear()
    code, out, _ = cli("push", "out", "me/new", "--dry-run")
    assert code == 0 and "Would upload" in out and "notes.txt" not in out and "base_model: org/tiny" in out
    code, out, _ = cli("push", "out", "me/new", "--dry-run", "--json")
    assert json.loads(out)["url"] is None
    assert hub.log == [] and "me/new" not in hub.repos


def test_with_the_conversion(hub, made, cli):
    code, out, err = cli(
        "hf-to-gguf", "org/tiny", "tiny.gguf", "--push-to", "me/tiny-GGUF", "--private", "--type", "f16"
    )
    assert code == 0, err
    repo = hub.repos["me/tiny-GGUF"]
    assert repo.private and set(repo.files) == {"tiny.gguf", "tiny.gguf.conversion.json", "README.md"}
    assert repo.files["tiny.gguf"] == Path("tiny.gguf").read_bytes()
    told = front(repo.files["README.md"].decode())
    assert told["base_model_relation"] == "quantized" and told["library_name"] == "gguf"
    code, out, _ = cli("hf-to-scratch", "org/tiny", "o2", "--push-to", "me/o2", "--dry-run")
    assert code == 0 and "would be uploaded to me/o2" in out and "me/o2" not in hub.repos
    code, _, err = cli("hf-to-scratch", "org/tiny", "o3", "--push-to", "nonsense")
    assert code == 2 and "no repository's name" in err and not Path("o3").exists()


def test_goes_on(hub, made):
    hub.faults = [
        Fault("/upload/", 1, status=503, headers={"Retry-After": "0"}),
        Fault("/commit/", 1, status=500),
    ]
    try:
        convert.push(made, "me/new")
    except ConvertError as error:
        assert "convert push" in str(error)
        convert.push(made, "me/new")
    sent = hub.find(lambda r: r.method == "PUT" and not r.sent)
    assert len(sent) == 2  # the one that was refused, and the one that was not; nothing a third time
    assert files_of_weights(hub, "me/new") == {"model.safetensors": (made / "model.safetensors").read_bytes()}


def test_refusals(hub, made, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    with pytest.raises(ConvertError, match=r"write to me/new.*HF_TOKEN.*convert push") as error:
        convert.push(made, "me/new")
    assert error.value.problems[0].kind == "hub_forbidden"
    (tmp_path / "bare").mkdir()
    with pytest.raises(UsageError, match="no record"):
        convert.push("bare", "me/new")
    with pytest.raises(UsageError, match="does not exist"):
        convert.push("nowhere", "me/new")
    (made / "model.safetensors").unlink()
    with pytest.raises(ConvertError, match=r"lacks model.safetensors"):
        convert.push(made, "me/new")
    assert "me/new" not in hub.repos and files_of(tmp_path / "bare") == {}
