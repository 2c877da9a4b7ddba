"""The pages as text: what is in them, what must not be, and that hostile names stay text."""

from __future__ import annotations

import base64
import hashlib
import itertools
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from convert.errors import UsageError
from convert.html import check_report, render, write_report
from convert.html.page import MARK
from convert.html.style import style_sheet
from convert.html.svg import COLOURS
from tests.html.synthetic import COLUMNS, HOSTILE, Made, comparison, diagnose_result, diff_result, verify_result

VOID = {"meta", "br", "link", "img", "input", "hr"}
RESULTS = {"verify": verify_result, "diagnose": diagnose_result, "diff": diff_result}


class Reader(HTMLParser):
    """Elements with their attributes and texts; complains of what is not closed or closed twice."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({k for k, _ in attrs}) == len(attrs), (tag, attrs)
        self.found.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attrs for name, attrs in self.found if name == tag]

    def said(self, *tags: str) -> str:
        return " ".join(t for tag in tags or self.texts for t in self.texts.get(tag, ()) if tag != "style")


@pytest.fixture(scope="module", params=list(RESULTS))
def page(request):
    text = render(RESULTS[request.param]())
    return request.param, text, Reader(text)


def test_nothing_is_loaded_and_nothing_runs(page):
    _, text, read = page
    for tag, attrs in read.found:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base", "form", "image"), tag
        for key, value in attrs.items():
            assert not key.startswith("on") and key not in ("style", "src", "srcset", "action"), (tag, key)
            if key in ("href", "xlink:href"):
                assert value.startswith("#")
            if "url(" in value:
                assert value.startswith("url(#")
            assert "://" not in value or HOSTILE[:5] in value, (tag, key, value)
    style = "".join(read.texts["style"])
    assert "@import" not in style and "url(" not in style and "//" not in style
    assert text.startswith(MARK)


def test_no_address_at_all():
    text = render(verify_result("pass")).replace("https://evil.example", "")
    assert "//" not in text and "http:" not in text.replace("http-equiv", "")


def test_policy_names_the_one_style_sheet(page):
    _, _, read = page
    policy = next(m["content"] for m in read.all("meta") if m.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy and "script-src" not in policy
    digest = base64.b64encode(hashlib.sha256("".join(read.texts["style"]).encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy and len(read.texts["style"]) == 1


def test_verdict_comes_first(page):
    kind, _, read = page
    order = [tag for tag, _ in read.found]
    assert order.index("h1") < order.index("section") < min(order.index("table"), order.index("svg"))
    heading = read.texts["h1"][0]
    assert {"verify": "Pass", "diagnose": "Broken: qk-permuted", "diff": "Different"}[kind] in heading


def test_ids_are_unique_and_links_lead_somewhere(page):
    _, _, read = page
    ids = [a["id"] for _, a in read.found if "id" in a]
    assert len(ids) == len(set(ids))
    targets = [a[k] for _, a in read.found for k in ("href", "clip-path", "aria-labelledby") if k in a]
    wanted = {part.removeprefix("url(").removesuffix(")").removeprefix("#") for t in targets for part in t.split()}
    assert wanted <= set(ids), wanted - set(ids)


def test_every_drawing_has_words_and_numbers(page):
    _, _, read = page
    drawings = read.all("svg")
    assert len(drawings) % 2 == 0 and len(drawings) >= 2
    for svg in drawings:
        assert svg["role"] == "img" and svg["aria-labelledby"]
    assert len(read.all("figure")) == len(drawings) // 2
    sections = [i for i, (tag, _) in enumerate(read.found) if tag == "section"]
    for start, stop in zip(sections, [*sections[1:], len(read.found)], strict=True):
        tags = [tag for tag, _ in read.found[start:stop]]
        if "svg" in tags:
            assert "details" in tags and "table" in tags[tags.index("details") :]
    assert all(a["tabindex"] == "0" and a["aria-label"] for _, a in read.found if a.get("class") == "scroll")


def test_colours_come_from_the_style_sheet(page):
    _, text, read = page
    body = text[text.index("<body") :]
    assert not [c for c in COLOURS.values() if c in body]
    for tag, attrs in read.found:
        assert not ({"fill", "stroke"} & set(attrs)), (tag, attrs)
    classes = {c for _, a in read.found for c in a.get("class", "").split() if c.startswith(("fill-", "stroke-"))}
    assert classes and all(f".{c}{{" in style_sheet() for c in classes)


def test_hostile_names_stay_text(page):
    kind, text, read = page
    assert "<script" not in text and "\u202e" not in text and "\x00" not in text
    assert "\\u202e" in text and "&lt;script&gt;" in text
    text.encode("utf-8")  # no lone surrogates
    if kind != "verify":
        assert any("<script>alert(1)</script>" in t for t in read.texts.get("th", []) + read.texts.get("li", []))


def test_hostile_names_in_drawings():
    """A row or a column of the map may have any name; none is taken for a formula, and none breaks the drawing."""
    detail = comparison(layers=3)
    for tensor in detail["tensors"]:
        tensor["row"], tensor["column"] = HOSTILE + tensor["row"], "$\\frac{1}{" + tensor["column"]
    detail["tensors"][0]["name"] = "x" * 5000
    text = render(Made(verify_result().as_json(), detail))
    read = Reader(text)
    assert any("$\\frac{1}{" in t for t in read.texts["text"])
    assert "<script" not in text and "x" * 500 not in text


def test_the_same_result_gives_the_same_bytes(tmp_path):
    code = (
        "from convert.html import render; from tests.html.synthetic import *; print(render(diagnose_result(layers=3)))"
    )
    root = Path(__file__).parents[2]
    pages = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(root), "PYTHONIOENCODING": "utf-8"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
        pages.append(done.stdout)
    assert pages[0] == pages[1] and len(pages[0]) > 10_000


def test_the_users_style_has_no_say(tmp_path):
    import matplotlib

    made = diff_result(layers=3)
    before = render(made)
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path", "text.usetex": True}):
        assert render(made) == before


def test_the_largest_model_gives_a_small_file():
    made = verify_result("fail", layers=126, positions=4096)
    text = render(made)
    assert len(text.encode()) < 2_000_000
    read = Reader(text)
    cells = [t for t in read.texts["title"] if t.startswith("layer ")]
    assert len(cells) == 2 * 126 * len(COLUMNS)
    paths = [a["d"] for a in read.all("path") if a.get("stroke-linecap") == "round"]
    assert [p.count("M") for p in paths] == [2000] * 4


def test_too_many_of_everything_is_thinned_out():
    detail = comparison(layers=170, positions=60_000)
    extra = [{"name": f"e{i}", "row": f"layer {i % 170}", "column": f"expert {i}", "error": 0.5} for i in range(20_000)]
    detail["tensors"] += extra
    detail["logits"]["a"] = detail["logits"]["a"] * 20
    text = render(Made(verify_result().as_json(), detail))
    assert len(text.encode()) < 2_000_000
    assert "largest errors only" in text and "Neighbouring positions are joined" in text


def cells(detail):
    """Name of each cell of the map → its colour."""
    read = Reader(render(Made(verify_result().as_json(), {"tensors": detail["tensors"]})))
    titles, found, name = iter(read.texts["title"]), {}, ""
    for tag, attrs in read.found:
        if tag == "title":
            name = next(titles)
        elif tag == "path" and name.startswith("layer "):
            found[name.partition(":")[0]], name = attrs["class"].split()[0], ""
    return found


def test_the_map_shows_where_the_error_is():
    """A cell's colour and text are that tensor's; the same map of equal tensors is the control."""
    detail = comparison(layers=4)
    assert set(cells(detail).values()) == {"fill-heat0"}
    for tensor in detail["tensors"]:
        if tensor["name"] == "trf_blocks.2.ff.fc1.weight":
            tensor["error"] = 3e-4
        if tensor["name"] == "trf_blocks.1.norm1.weight":
            tensor["error"] = math.nan
    found = cells(detail)
    assert {k: v for k, v in found.items() if v != "fill-heat0"} == {
        "layer 2 ff.fc1": "fill-heat5",
        "layer 1 norm1": "fill-heat8",
    }


def test_curves_are_where_their_values_are():
    """The height of every point, read back through the axis' own ticks."""
    from convert.html.figures import Curve, curves

    values = [10.0**-p for p in (1, 2, 3, 4, 5, 6)]
    text = curves([Curve("B", values, "result")], name="t", title="t", description="d", x="x", y="y")
    read = Reader(text)
    drawn = [a["d"] for a in read.all("path") if "stroke-result" in a.get("class", "")]
    line = next(d.split() for d in drawn if d.count("L") == 5)
    heights = [float(v) for v in line[2::3]]
    steps = [b - a for a, b in itertools.pairwise(heights)]
    assert max(steps) - min(steps) < 0.05 and steps[0] > 5  # equal factors, equal distances
    lefts = [float(v) for v in line[1::3]]
    assert lefts == sorted(lefts)


def test_what_is_missing_is_said():
    full = render(verify_result(layers=2, positions=17))
    bare = render(Made(verify_result().as_json(), {"absent": {"layers": "the models ran whole, you see"}}))
    assert "Not in this report" in bare and "Not in this report" not in full
    for words in ("Position by position", "Logits against logits", "Tensor by tensor", "the models ran whole, you see"):
        assert words in bare
    assert "<svg" not in bare
    for kind in ("verify", "diagnose", "diff"):
        Reader(render(Made({"schema": f"convert.{kind}/1", "verdict": "undecided"}, {})))


def test_figures_that_are_no_numbers():
    detail = comparison(layers=3, positions=20)
    detail["positions"]["kl"] = [math.nan] * 10 + [math.inf] * 10
    detail["layers"][1]["error"] = math.inf
    detail["logits"]["b"][5] = math.nan
    value = verify_result("fail").as_json() | {"nmse": None, "control": None, "tolerance": None}
    text = render(Made(value, detail))
    Reader(text)
    assert "infinite" in text and "no number" in text and "nan" not in text.lower().replace("nano", "")


def test_a_report_replaces_a_report_and_nothing_else(tmp_path, monkeypatch):
    out = tmp_path / "report.html"
    passed, failed = (Made(verify_result(verdict).as_json(), {}) for verdict in ("pass", "fail"))
    assert write_report(passed, out) == out
    first = out.read_bytes()
    write_report(failed, out)
    assert out.read_bytes() != first and [p.name for p in tmp_path.iterdir()] == ["report.html"]

    def broken(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", broken)
    before = out.read_bytes()
    with pytest.raises(OSError, match="no space"):
        write_report(passed, out)
    assert out.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_places_that_are_none(tmp_path):
    mine = tmp_path / "notes.html"
    mine.write_text("<!doctype html>\n<p>mine")
    link = tmp_path / "link.html"
    link.symlink_to(mine)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    for place in (mine, link, weights, tmp_path, tmp_path / "no" / "such.html"):
        with pytest.raises(UsageError) as refused:
            check_report(place)
        assert refused.value.problems[0].hint
    assert mine.read_text() == "<!doctype html>\n<p>mine"
    assert check_report(tmp_path / "new.html") == tmp_path / "new.html"


@pytest.mark.parametrize("command", ["verify", "diff", "diagnose"])
def test_without_matplotlib_it_says_so_before_any_work(command, monkeypatch, capsys, tmp_path):
    from convert import cli
    from convert.html import canvas

    if command not in cli.COMMANDS:
        pytest.skip("no such command yet")
    sides = [str(tmp_path / "a"), *([str(tmp_path / "b")] if command != "diagnose" else [])]
    arguments = [command, *sides, "--report", str(tmp_path / "r.html")]
    assert cli.run(cli.cli, arguments) != 0
    assert "does not exist" in capsys.readouterr().err  # the control: with matplotlib the model is looked for
    monkeypatch.setattr(canvas, "find_spec", lambda _: None)
    assert cli.run(cli.cli, arguments) == 2
    said = capsys.readouterr().err
    assert "matplotlib" in said and "pip install" in said and "does not exist" not in said
