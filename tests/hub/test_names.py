"""What is a name on the Hub, and what is a path: decided without the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from convert.errors import UsageError
from convert.hub.names import parse, shadowed

NAMES = {
    "org/name": ("org/name", None, ""),
    "meta-llama/Llama-3.2-1B@main": ("meta-llama/Llama-3.2-1B", "main", ""),
    "hf://org/name/sub": ("org/name", None, "sub"),
    "hf://org/name@v1.0/sub/file.gguf": ("org/name", "v1.0", "sub/file.gguf"),
    "hf:/org/name/sub": ("org/name", None, "sub"),  # what Path makes of it
    "hf://models/org/name": ("org/name", None, ""),
}
PATHS = ["./org/name", "/org/name", "../org/name", "~/org/name", "name", "org/name/sub", "org/", "a b/c", "org/name@",
         ".org/name", "C:\\org\\name", "org//name", ""]  # fmt: skip


@pytest.mark.parametrize("text", NAMES)
def test_names(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = parse(text)
    assert found is not None
    assert (found.repo, found.revision, found.inside) == NAMES[text]


@pytest.mark.parametrize("text", PATHS)
def test_paths(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse(text) is None


def test_what_is_there_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("org/name") is not None
    Path("org").mkdir()
    assert parse("org/name") is None  # a slip in a path is not looked up
    assert parse("hf://org/name") is not None
    assert not shadowed("org/name")
    Path("org/name").mkdir()
    assert parse("org/name") is None and shadowed("org/name")
    assert not shadowed("./org/name")


@pytest.mark.parametrize("text", ["hf://", "hf://org", "hf://org/na me", "hf://org/name/../x"])
def test_no_names(text):
    with pytest.raises(UsageError):
        parse(text)
