"""Types of the values in a mapping table or a names file: a number where a text belongs is named, not tripped over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from convert.errors import TableError

_TEXTS = ("family", "title", "extends", "gguf_arch", "gguf_tokenizer", "reference")
_LISTS_OF_TEXTS = ("model_types", "architectures", "layouts", "normalise", "anew")
_MAPS = (
    "dims",
    "config",
    "defaults",
    "presence",
    "convention",
    "top",
    "block",
    "classes",
    "sizes",
    "template",
    "rope",
    "buffers",
)
_MAPS_OF_MAPS = ("config", "defaults", "classes", "sizes", "template", "buffers")
_LISTS_OF_MAPS = ("fused", "ignore", "refuse", "alias", "metadata")
_ROW_TEXTS = ("role", "tied_to", "copy", "twin")
_EXPRESSIONS = (str, int, float, bool)


def check_types(raw: Mapping[str, Any], source: str, *, names_file: bool = False) -> None:
    """Check every value that has a fixed type.

    Args:
        raw: A table or names file as TOML gives it.
        source: Its name, for the message.
        names_file: Prefix and convention are those of one layout, without its name.

    Raises:
        TableError: The first value of a wrong type, with its place.
    """
    for key, value in raw.items():
        where = f"{source}: {key}"
        if key in _TEXTS:
            _want(isinstance(value, str), where, value, "a text")
        elif key in _LISTS_OF_TEXTS:
            _want(_all(value, str), where, value, "a list of texts")
        elif key in _LISTS_OF_MAPS:
            _want(_all(value, dict), where, value, f"a list of tables, [[{key}]]")
            for item in value:
                _item(item, where)
        elif key in _MAPS:
            _want(isinstance(value, dict), where, value, f"a table, [{key}]")
        if key in _MAPS_OF_MAPS:
            for name, inner in value.items():
                removed = key == "config" and inner is False
                _want(removed or isinstance(inner, dict), f"{where}.{name}", inner, "a table")
    if not names_file or isinstance(raw.get("prefix"), dict):
        _texts(raw.get("prefix", {}), f"{source}: prefix")
    conventions = raw.get("convention", {})
    for name, inner in {"": conventions}.items() if names_file else conventions.items():
        _texts(inner, f"{source}: convention.{name}".rstrip("."))
    for name, inner in raw.get("config", {}).items():
        for layout, value in (inner or {}).items():
            good = isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("key"), str))
            _want(good, f"{source}: config.{name}.{layout}", value, "a key, or a table with a key")
    for name, value in raw.get("dims", {}).items():
        texts = value if isinstance(value, list) else [value]
        _want(bool(texts) and _all(texts, *_EXPRESSIONS), f"{source}: dims.{name}", value, "an expression, or several")
    for name, value in raw.get("presence", {}).items():
        _want(isinstance(value, str), f"{source}: presence.{name}", value, "the id of a row")
    for section in ("top", "block"):
        _rows(raw.get(section, {}), f"{source}: {section}")


def _want(good: bool, where: str, value: Any, what: str) -> None:
    if not good:
        raise TableError(f"{where}: {value!r} is not {what}.")


def _texts(value: Any, where: str) -> None:
    _want(isinstance(value, dict), where, value, "a table")
    for key, inner in value.items():
        _want(isinstance(inner, str), f"{where}.{key}", inner, "a text")


def _all(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(isinstance(v, kinds) for v in value)


def _item(item: Mapping[str, Any], where: str) -> None:
    checks: dict[str, Callable[[Any], bool]] = {
        "parts": lambda v: _all(v, str) and len(v) > 0,
        "axis": lambda v: type(v) is int,
        "when": lambda v: isinstance(v, _EXPRESSIONS),
        "reference": lambda v: isinstance(v, bool),
        "note": lambda v: isinstance(v, bool),
        "alternative": lambda v: isinstance(v, bool),
        "each": lambda v: isinstance(v, bool),
        "value": lambda v: isinstance(v, _EXPRESSIONS) or (_all(v, *_EXPRESSIONS) and len(v) > 0),
    }
    for key in ("layout", "name", "reason", "class", "check", "found", "key", "type"):
        checks[key] = lambda v: isinstance(v, str)
    for key, value in item.items():  # an unknown key is named by the loader
        _want(key not in checks or checks[key](value), f"{where}.{key}", value, "of the right type")


def _rows(tree: Mapping[str, Any], where: str) -> None:
    for key, value in tree.items():
        place = f"{where}.{key}"
        if not isinstance(value, dict):
            continue  # a name in a names file, a condition, `false`; the loader judges what it is
        if "shape" not in value:
            _rows(value, place)
            continue
        for name, inner in value.items():
            if name == "shape":
                _want(_all(inner, *_EXPRESSIONS), f"{place}.shape", inner, "a list of expressions")
            elif name in ("when", "rope", "rotary", "parallel"):
                _want(isinstance(inner, _EXPRESSIONS), f"{place}.{name}", inner, "an expression")
            elif name in ("norm", "linear"):
                _want(isinstance(inner, bool), f"{place}.{name}", inner, "true or false")
            elif name == "always":
                _want(_all(inner, str), f"{place}.always", inner, "a list of layouts")
            elif name == "zeros":
                _want(_all(inner, str), f"{place}.zeros", inner, "a list of layouts")
            elif name == "to":
                _operations(inner, f"{place}.to")
            elif name in _ROW_TEXTS or isinstance(inner, (list, dict, int, float)):
                _want(isinstance(inner, str) or inner is False, f"{place}.{name}", inner, "a text")


def _operations(value: Any, where: str) -> None:
    _want(isinstance(value, dict), where, value, "a table of layouts")
    for layout, operations in value.items():
        good = _all(operations, dict) and all(isinstance(o.get("op"), str) for o in operations)
        _want(good, f"{where}.{layout}", operations, 'a list of operations, [{ op = "…" }]')
