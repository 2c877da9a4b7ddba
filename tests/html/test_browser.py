"""The pages in a real browser: light and dark, telephone and wide screen, with JavaScript switched off.

SCREENSHOTS=FOLDER keeps what the browser showed, to be looked at.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from convert.html import write_report
from tests.html.browser import Browser, find_browser
from tests.html.synthetic import diagnose_result, diff_result, verify_result

PAGES = {
    "pass": lambda: verify_result(layers=8),
    "fail": lambda: verify_result("fail", layers=126, positions=1500),
    "weak": lambda: verify_result("weak", layers=2, positions=17),
    "broken": lambda: diagnose_result(layers=8),
    "good": lambda: diagnose_result("good", against=False),
    "diff": lambda: diff_result(layers=12),
}
LOOKS = [(1600, False), (1600, True), (800, False), (375, False), (375, True)]

#: Texts with less contrast than 4.5 (large ones 3) to what lies behind them, and lines of drawings with less than 3.
CONTRAST = """
(() => {
  const lin = c => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4 };
  const lum = c => 0.2126 * lin(c[0]) + 0.7152 * lin(c[1]) + 0.0722 * lin(c[2]);
  const rgb = s => (s.match(/[\\d.]+/g) || []).map(Number);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05) };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const style = getComputedStyle(e), svg = e.closest('svg');
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own && !['title', 'desc'].includes(e.tagName)) {
      const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
      const found = ratio(rgb(svg ? style.fill : style.color), behind(e));
      if (found < (large ? 3 : 4.5)) bad.push([e.tagName, e.textContent.slice(0, 30), found]);
    }
    if (svg && /stroke-(result|control|noise|limit)/.test(e.getAttribute('class') || '')) {
      const found = ratio(rgb(style.stroke), behind(e));
      if (found < 3) bad.push([e.tagName, e.getAttribute('class'), found]);
    }
  }
  return bad;
})()
"""
#: Labels of a drawing that leave it, and labels that lie on each other.
LABELS = """
(() => {
  const bad = [];
  for (const svg of document.querySelectorAll('svg.plot')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    for (const [text, b] of boxes)
      if (b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)
        bad.push(['cut', text]);
    boxes.forEach(([text, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && tall > 3) bad.push(['overlap', text, other]);
    }));
  }
  return bad;
})()
"""
SMALL = "[...document.querySelectorAll('svg.plot')].filter(s => s.getBoundingClientRect().width).length"


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if program is None:
        pytest.skip(
            "no Chromium here: install one, or name it in CHROMIUM (Debian: apt install chromium-headless-shell)"
        )
    with Browser(program) as running:
        yield running


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_report(make(), folder / f"{name}.html") for name, make in PAGES.items()}


def complaints(browser: Browser) -> list[object]:
    kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
    return [event["params"] for event in browser.events if event.get("method") in kinds]


def requests(browser: Browser) -> list[str]:
    sent = [e["params"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
    return [params["request"]["url"] for params in sent]


@pytest.mark.parametrize("name", PAGES)
def test_how_it_looks(browser, pages, name):
    for width, dark in LOOKS:
        browser.open(pages[name], width=width, dark=dark)
        where = (width, dark)
        assert complaints(browser) == [], where
        assert requests(browser) == [pages[name].as_uri()], where
        assert browser.evaluate("document.documentElement.scrollWidth") <= width, where
        assert browser.evaluate(CONTRAST) == [], where
        assert browser.evaluate(LABELS) == [], where
        assert browser.evaluate("document.querySelector('h1').getBoundingClientRect().bottom") < 250, where
        shown = browser.evaluate(SMALL)
        assert shown * 2 == browser.evaluate("document.querySelectorAll('svg.plot').length") > 0, where
        folder = os.environ.get("SCREENSHOTS")
        if folder:
            picture = Path(folder) / f"{name}-{width}-{'dark' if dark else 'light'}.png"
            picture.write_bytes(browser.screenshot())


@pytest.mark.parametrize("name", ["fail", "broken"])
def test_everything_open_still_fits(browser, pages, name):
    """All tables of numbers unfolded, on a telephone."""
    browser.open(pages[name], width=375)
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true })")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
    assert browser.evaluate(CONTRAST) == []


@pytest.mark.parametrize("name", PAGES)
def test_javascript_changes_nothing(browser, pages, name):
    browser.open(pages[name], width=1000, scripts=True)
    with_scripts = browser.screenshot(), browser.evaluate("document.body.innerText")
    browser.open(pages[name], width=1000, scripts=False)
    without = browser.screenshot(), browser.evaluate("document.body.innerText")
    assert with_scripts == without
    assert len(without[1]) > 500 and browser.evaluate("document.querySelector('h1').innerText") in without[1]


def test_the_checks_can_see_faults(browser, pages, tmp_path):
    """The control: pages that are spoiled on purpose."""
    text = pages["pass"].read_text(encoding="utf-8")

    def spoiled(old: str, new: str) -> Path:
        assert old in text
        page = tmp_path / "spoiled.html"
        page.write_text(text.replace(old, new, 1), encoding="utf-8")
        return page

    policy = text[text.index('<meta http-equiv="Content') : text.index('<meta name="viewport"')]
    grey = '<p id="grey">hardly to be read</p><style>#grey{color:#bbb}</style>'
    browser.open(spoiled(policy, "").rename(tmp_path / "a.html"), width=375)
    assert browser.evaluate(CONTRAST) == []
    page = spoiled(policy, "")
    page.write_text(page.read_text(encoding="utf-8").replace("<main>", f"<main>{grey}", 1), encoding="utf-8")
    browser.open(page, width=375)
    assert len(browser.evaluate(CONTRAST)) == 1
    page.write_text(
        text.replace(policy, "").replace("<main>", '<main><div><svg width="900" height="9"></svg></div>', 1)
    )
    browser.open(page, width=375)
    assert browser.evaluate("document.documentElement.scrollWidth") > 375
    page.write_text(text.replace("</text>", " and a label that is far too long for this drawing</text>"))
    browser.open(page, width=375)
    assert {kind[0] for kind in browser.evaluate(LABELS)} == {"cut", "overlap"}


def test_the_policy_stops_what_gets_in(browser, pages, tmp_path):
    text = pages["pass"].read_text(encoding="utf-8")
    policy = text[text.index('<meta http-equiv="Content') : text.index('<meta name="viewport"')]
    evil = '<script>document.title = "taken"</script><img src="missing.png"><p style="color:red" id="red">x</p>'
    page = tmp_path / "evil.html"
    seen = []
    for body in (text, text.replace(policy, "")):
        page.write_text(body.replace("<main>", f"<main>{evil}", 1), encoding="utf-8")
        browser.open(page, width=800)
        red = browser.evaluate("getComputedStyle(document.querySelector('#red')).color") == "rgb(255, 0, 0)"
        seen.append((browser.evaluate("document.title") == "taken", red))
    assert seen == [(False, False), (True, True)]
