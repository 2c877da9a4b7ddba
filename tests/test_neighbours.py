"""What lies beside a path that is not there."""

from __future__ import annotations

import pytest

from convert.neighbours import hint_of


@pytest.fixture
def folder(tmp_path):
    for name in ("llama-00002-of-00002.gguf", "llama-00001-of-00002.gguf", "llama-00001-of-00002.gguf.conversion.json"):
        (tmp_path / name).touch()
    (tmp_path / "scratch").mkdir()
    return tmp_path


def test_the_first_piece_of_a_file_in_pieces(folder):
    assert hint_of(folder / "llama.gguf") == "Beside it there is llama-00001-of-00002.gguf."


def test_a_misspelt_name(folder):
    assert hint_of(folder / "scrach") == "Beside it there is scratch."


@pytest.mark.parametrize("name", ["llama.bin", "other", "llama/x/y", "llama-00001-of-00002.gguf/x"])
def test_nothing_like_it(folder, name):
    assert hint_of(folder / name) == "Give a checkpoint folder or file."
