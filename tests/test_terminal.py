"""The results on a terminal: one screen of 80 columns, plain where there is no terminal, and names that stay text."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.cells import cell_len
from rich.text import Text

from convert import terminal
from convert.terminal import render, render_lines, show
from tests.html.synthetic import HOSTILE, Made, comparison, diagnose_result, verify_result

SCREENS = {
    "pass": verify_result,
    "fail": lambda: verify_result("fail", layers=126, positions=5000),
    "weak": lambda: verify_result("weak", layers=2, positions=17),
    "broken": diagnose_result,
    "good": lambda: diagnose_result("good", against=False),
}


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [80, 60])
def test_fits_the_screen(name, width):
    lines = render(SCREENS[name](), width=width).split("\n")
    assert max(map(cell_len, lines)) <= width
    if width == 80:
        assert len(lines) <= (40 if name in ("broken", "good") else 26)
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("name", SCREENS)
def test_colours_are_all_that_a_terminal_adds(name):
    plain, coloured = (render(SCREENS[name](), width=80, colour=c) for c in (False, True))
    assert "\x1b" not in plain and "\x1b[" in coloured
    bare = Text.from_ansi(coloured).plain.rstrip("\n").split("\n")
    assert [line.rstrip() for line in bare] == plain.rstrip("\n").split("\n")


def test_verdict_first_and_the_control_beside_the_result():
    lines = render(verify_result("fail"), width=80).split("\n")
    assert lines[0].startswith("verify: fail (on cpu, float32, 128 tokens)")
    row = next(line for line in lines if line.lstrip().startswith("KL mean"))
    assert row.split() == ["KL", "mean", "2.8", "2.9"]
    assert any("Its Q and K differ" in line for line in lines)
    assert any("trf_blocks.{3-29}.att.W_value.weight" in line for line in lines)


def test_bars_are_as_long_as_the_losses():
    lines = render(diagnose_result(), width=80).split("\n")
    names = ("rows of Q and K put back", "as it is", "the two norms")
    best, own, worst = (next(line for line in lines if line.startswith(f"  {name}")) for name in names)
    assert "2.900" in best and "5.310" in own and "10.800" in worst
    lengths = [line.count("█") for line in (best, own, worst)]
    assert lengths[2] == 24 and abs(lengths[0] - 24 * 2.9 / 10.8) <= 1 and abs(lengths[1] - 24 * 5.31 / 10.8) <= 1
    assert any("convert repair 'my model' OUT --fix unpermute-qk" in line for line in lines)


def test_lines_of_blocks_show_where_the_models_part():
    detail = comparison(layers=10, broken_from=5)
    lines = render(Made(verify_result("fail").as_json(), detail), width=80).split("\n")
    row = next(line for line in lines if line.lstrip().startswith("error by layer, B")).split("B ", 1)[1].strip(" ")
    assert set(row[:5]) <= set("▁▂▃") and set(row[-5:]) <= set("▆▇█")
    equal = comparison(layers=10)
    for step in equal["layers"]:
        step["error"] = 0.0
    assert "0 everywhere" in render(Made(verify_result().as_json(), equal), width=80)


def test_names_are_no_markup():
    value = verify_result("fail").as_json()
    value["hints"] = ["[bold red]x[/bold red] :smile: \x1b[31mred\x1b[0m", HOSTILE]
    text = render(Made(value, {}), width=80)
    assert "[bold red]x[/bold red] :smile:" in text
    assert "\x1b" not in text and "\\x1b[31m" in text and "\u202e" not in text and "\\u202e" in text
    text.encode("utf-8")


class Screen(io.StringIO):
    """A terminal, as far as anybody asks."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("made", "environment", "coloured"),
    [
        (Screen, {}, True),
        (Screen, {"NO_COLOR": "1"}, False),
        (Screen, {"TERM": "dumb"}, False),
        (io.StringIO, {}, False),
    ],
)
def test_colour_only_where_it_is_wanted(made, environment, coloured, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    for key, text in environment.items():
        monkeypatch.setenv(key, text)
    out = made()
    monkeypatch.setattr(sys, "stdout", out)
    show(verify_result("fail"))
    assert ("\x1b[" in out.getvalue()) == coloured
    assert out.getvalue().startswith(("verify: fail", "verify: \x1b[1;31mfail"))


def test_lines_are_fitted_to_the_screen():
    lines = ["diff: different", "  " + "word " * 40, "    \x1b[31mmodel.layers.0\x1b[0m  [red]1[/red]", "  short"]
    found = render_lines(lines, width=60, colour=True).split("\n")
    assert found[0] == "diff: \x1b[1;31mdifferent\x1b[0m"
    assert max(map(len, found[1:])) <= 60 and all(line.startswith("  word") for line in found[1:5])
    assert "    \\x1b[31mmodel.layers.0\\x1b[0m  [red]1[/red]" in found
    assert render_lines(lines).split("\n")[1].rstrip() == lines[1].rstrip()


def test_sentences_are_not_broken_in_a_pipe():
    message = verify_result("fail").as_json()["message"]
    assert f"  {message}" in render(verify_result("fail")).split("\n")
    assert f"  {message}" not in render(verify_result("fail"), width=80).split("\n")


def test_without_letters_for_bars(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert not terminal._can_draw()
    text = render(diagnose_result(against=False), width=80)
    assert "####" in text and "█" not in text


def test_a_conversion_does_not_import_it():
    code = (
        "import sys, convert.conversion, convert.run, convert.cli; "
        "assert not {'rich', 'matplotlib', 'convert.terminal', 'convert.html'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
