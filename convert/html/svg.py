"""From matplotlib's SVG to one that lives inside a page: coloured by its style sheet, readable by a screen reader.

Figures are painted in marker colours (:data:`COLOURS`), which become classes here (``fill-result``, ``stroke-grid``),
so that one drawing serves light and dark. Inline styles become attributes, so that the page can forbid them; ids get
the drawing's own prefix; name spaces, metadata and their addresses go. This module paints nothing.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping

#: Names of colours, as the style sheet defines them → what matplotlib is given. Their values are arbitrary marks.
COLOURS: dict[str, str] = {
    name: f"#00a0{number:02x}"
    for number, name in enumerate(
        (
            "ink",
            "muted",
            "grid",
            "paper",
            "result",
            "control",
            "noise",
            "limit",
            "none",
            *(f"heat{i}" for i in range(9)),
        )
    )
}
_NAMES = {value: name for name, value in COLOURS.items()}
_XLINK = "{http://www.w3.org/1999/xlink}"
#: Parts of inline styles that are attributes of their own in SVG; colours apart.
_KEPT = (
    "stroke-width",
    "stroke-dasharray",
    "stroke-dashoffset",
    "stroke-linecap",
    "stroke-linejoin",
    "text-anchor",
    "opacity",
    "fill-opacity",
    "stroke-opacity",
)
_DECIMALS = 2


def inline(raw: str, *, prefix: str, title: str, description: str, classes: str, tips: Mapping[str, str]) -> str:
    """An ``<svg>`` element for a page.

    Args:
        raw: What matplotlib wrote.
        prefix: Put before every id.
        title: A short name, for those who do not see the drawing.
        description: What it shows, in a sentence or two.
        classes: Classes of the element.
        tips: Group id (matplotlib's ``gid``) → text shown while the pointer rests on that group.

    Raises:
        ValueError: A colour is none of :data:`COLOURS`.
    """
    root = ET.fromstring(raw)
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        _rewrite(element, prefix, tips)
    view = root.get("viewBox")
    root.attrib.clear()
    root.attrib.update(
        {
            "class": classes,
            "viewBox": str(view),
            "role": "img",
            "aria-labelledby": f"{prefix}title {prefix}desc",
            "stroke-linejoin": "round",
            "stroke-linecap": "butt",
        }
    )
    for number, (tag, text) in enumerate((("title", title), ("desc", description))):
        made = ET.Element(tag, {"id": f"{prefix}{tag}"})
        made.text = text
        root.insert(number, made)
    return ET.tostring(root, encoding="unicode", short_empty_elements=False)


def _local(tag: str) -> str:
    return tag.rpartition("}")[2]


def _rewrite(element: ET.Element, prefix: str, tips: Mapping[str, str]) -> None:
    element.tag = _local(element.tag)
    if element.tag == "g" and element.get("id") in tips:
        tip = ET.Element("title")
        tip.text = tips[element.attrib["id"]]
        element.insert(0, tip)
    attributes = dict(element.attrib)
    element.attrib.clear()
    classes: list[str] = []
    for key, value in attributes.items():
        if key == "style":
            _split_style(element, value, classes)
        elif key in ("fill", "stroke"):
            classes += _colour(key, value)
        elif key == "id":
            if element.tag != "g":  # nothing refers to groups
                element.set("id", prefix + value)
        elif key in (f"{_XLINK}href", "href"):
            element.set("href", "#" + prefix + value.removeprefix("#"))
        elif key == "clip-path":
            element.set("clip-path", f"url(#{prefix}{value.removeprefix('url(#').removesuffix(')')})")
        elif key == "d":
            element.set("d", _shorter(value))
        elif not key.startswith("{"):
            element.set(key, value)
    if classes:
        element.set("class", " ".join(dict.fromkeys(classes)))


def _split_style(element: ET.Element, style: str, classes: list[str]) -> None:
    for declaration in style.split(";"):
        key, _, value = (part.strip() for part in declaration.partition(":"))
        if key in ("fill", "stroke"):
            classes += _colour(key, value)
        elif key == "font":
            size = next(part for part in value.split() if part.endswith("px"))
            element.set("font-size", size.removesuffix("px"))
        elif key == "font-size":
            element.set("font-size", value.removesuffix("px"))
        elif key in _KEPT:
            element.set(key, value)


def _colour(kind: str, value: str) -> list[str]:
    if value == "none":
        return [f"{kind}-none"]
    if value not in _NAMES:
        raise ValueError(f"a figure is painted in {value}, which is none of the page's colours")
    return [f"{kind}-{_NAMES[value]}"]


def _shorter(path: str) -> str:
    """A path's data with as many decimals as can be seen."""
    out = []
    for token in path.split():
        if token.isalpha():
            out.append(token)
            continue
        number = f"{float(token):.{_DECIMALS}f}".rstrip("0").rstrip(".")
        out.append("0" if number == "-0" else number)
    return " ".join(out)
