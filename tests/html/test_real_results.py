"""Pages of real results: everything a verification, a difference and a diagnosis hold is drawn, none of it made up."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")

from convert import cli
from tests.fixtures.hf import make_hf
from tests.fixtures.scratch import make_scratch
from tests.html.test_pages import Reader


def run(*arguments: object) -> int:
    return cli.run(cli.cli, [str(a) for a in arguments])


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    return make_hf(folder / "a", "gqa8").path, make_scratch(folder / "b", "gqa8").path


def headings(text: str) -> set[str]:
    return set(Reader(text).texts["h2"])


DRAWN = {"Position by position", "Logits against logits", "Layer by layer", "Tensor by tensor"}


@pytest.mark.parametrize("broken", [False, True])
def test_verify(sides, broken, tmp_path, capsys):
    page = tmp_path / "report.html"
    options = ["--qk-layout", "meta"] if broken else []
    code = run("verify", *sides, "--device", "cpu", "--json", "--report", page, *options)
    value = json.loads(capsys.readouterr().out)
    assert code == (1 if broken else 0), value["message"]
    text = page.read_text(encoding="utf-8")
    read = Reader(text)
    assert headings(text) >= DRAWN | {"The figures"} and "Not in this report" not in text
    assert read.texts["h1"] == ["Fail: different models" if broken else "Pass: the same model"]
    assert len(read.all("svg")) == 8
    cells = [t for t in read.texts["title"] if t.startswith("layer ")]
    assert any("q_proj: 0" in t for t in cells) != broken  # the map has the values that were compared


def test_diff(sides, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert run("diff", sides[0], sides[1], "--qk-layout", "meta", "--report", page) == 1
    assert capsys.readouterr().out.startswith("diff: different\n")
    text = page.read_text(encoding="utf-8")
    assert Reader(text).texts["h1"] == ["Different"] and "reordered" in text
    assert run("verify", *sides, "--tensors", "--report", page) == 0
    assert Reader(page.read_text(encoding="utf-8")).texts["h1"] == ["Equal"]


def test_diagnose(sides, tmp_path, capsys):
    page = tmp_path / "report.html"
    code = run("diagnose", sides[0], "--probe-only", "--json", "--report", page)
    value = json.loads(capsys.readouterr().out)
    assert code == {"good": 0, "broken": 1, "undecided": 3}[value["verdict"]]
    text = page.read_text(encoding="utf-8")
    assert "Order of the rows of Q and K" in headings(text)
    assert "Hypotheses" in text and "Not in this report" in text
