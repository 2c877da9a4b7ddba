# ruff: noqa: E501 (tables of inputs: one to a line)
"""What else people pass on: tables and names files, chat templates, folders of torch's DCP, odd names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from convert.resources import mappings_dir
from tests.trust.hostile import base, text_cases, torch_cases
from tests.trust.hostile.harness import Case
from tests.trust.hostile.sparse import hole

#: TOML that is neither a table nor a names file.
TOML: dict[str, str | bytes] = {
    "deep lists": "a = " + "[" * 200_000,
    "deep tables": "a = " + "{a=" * 200_000,
    "a dotted key of 20,000 parts": ".".join("a" * 20_000) + " = 1",
    "a dotted header of 20,000 parts": "[" + ".".join("a" * 20_000) + "]",
    "5,000 digits": "extends = " + "9" * 5000,
    "no UTF-8": b"\xff\xfe",
    "zero bytes": bytes(1000),
    "extends ..": 'extends = "../../../../etc/passwd"',
    "extends itself": 'extends = "evil"',
    "extends 10,000 letters": 'extends = "' + "a" * 10_000 + '"',
    "extends a number": "extends = 5",
    "extends a zero byte": 'extends = "a\\u0000"',
    "terminal codes": '"\\u001b[2J" = 1',
    "half a surrogate": '"\\ud800" = 1',
    "30,000 keys": "\n".join(f"k{i} = 1" for i in range(30_000)),
    "2 MB of comment": "#" * (2 << 20),
}
#: Expressions of a table, for its heads: TOML strings.
EXPRESSIONS: dict[str, str] = {
    "a call": "\"__import__('os').system('touch canary')\"",
    "an attribute": '"(1).__class__.__mro__"',
    "a comprehension": '"[x for x in (1,)]"',
    "a lambda": '"(lambda: 1)()"',
    "an f-string": "'f\"{1}\"'",
    "a power": '"9 ** 9 ** 9"',
    "a shift": '"1 << 99999999999"',
    "10,000 parentheses": '"' + "(" * 10_000 + "1" + ")" * 10_000 + '"',
    "100,000 minuses": '"' + "-" * 100_000 + '1"',
    "a sum of 100,000": '"' + "+".join("1" * 100_000) + '"',
    "a text a thousand million times": "\"'a' * 10000000000\"",
    "a text as wide": "\"'%9999999999d' % 1\"",
    "a list as long": '"(1,) * 10000000000"',
    "a zero byte": '"1\\u0000"',
    "terminal codes": '"\\u001b[2J"',
    "a date": "1979-05-27",
    "lists of lists": "[[[[1]]]]",
    "division by zero": '"1 // 0"',
    "a number of 400 digits": '"' + "9" * 400 + '"',
    "a negative size": "-5",
}
NAMES: dict[str, str] = {
    "a row of no tensor": '[block]\n"os.system" = "x"',
    "a name that is a list": '[top]\nembed = ["a"]',
    "a name that is a table": "[top.embed]\na = {b = {c = 1}}",
    "one name for all": '[top]\nembed = "x"\nnorm = "x"\nhead = "x"',
    "a prefix with ..": 'prefix = "../../{l}."',
    "a prefix of braces": 'prefix = "{l.__class__}{"',
    "a prefix of 1,000,000 letters": 'prefix = "' + "a" * 1_000_000 + '"',
    "parts without end": "[[fused]]\nname = 'x'\nlayout = 'scratch'\nparts = " + json.dumps(["top.embed"] * 20_000),
    "terminal codes": '[top]\nembed = "\\u001b[2J"',
    "a convention of nothing": 'convention = {rope = "evil"}',
}
TEMPLATES: dict[str, str] = {
    "loops for ever": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "writes without end": "{% for i in range(99999) %}{% for j in range(99999) %}aaaaaaaaaaaaaaaa{% endfor %}{% endfor %}",
    "a text of 10 GB": "{{ 'a' * 10 ** 10 }}",
    "a text that doubles": "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list of 10^10": "{{ [1] * 10 ** 10 }}",
    "a power of powers": "{{ 9 ** (9 ** 9) }}",
    "a text formatted wide": "{{ '%9999999999d' % 1 }}{{ '{:>9999999999}'.format(1) }}",
    "a date formatted wide": "{{ strftime_now('%999999999d') * 99999 }}{{ raise_exception('x') }}",
    "lorem ipsum": "{{ lipsum(n=100000) }}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "20,000 parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "20,000 nested blocks": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "Python's classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "globals by format": "{{ '{0.__class__.__init__.__globals__}'.format(namespace()) }}{{ raise_exception('x') }}",
    "an include": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "changes what it is given": "{{ messages.append(1) }}",
    "terminal codes in its refusal": "{{ raise_exception('\\x1b[2J' * 9999) }}",
    "half a surrogate": "{{ '\\ud800' }}",
    "no template": "{% for %}",
    "nothing in a list": "{{ messages[5].content }}",
    "division by zero": "{{ 1 / 0 }}",
    "2 MB": "x" * (2 << 20),
    "more than the model's positions": "{{ 't1' * 4000 }}",
}


def _file(name: str, content: str | bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return build


def _table(expression: str) -> str:
    text = (mappings_dir() / "llama.toml").read_text(encoding="utf-8")
    assert "\n[dims]\nV = " in text or "[dims]" in text
    rows = text.splitlines()
    at = next(i for i, row in enumerate(rows) if row.startswith("H ") or row.startswith("H="))
    rows[at] = f"H = {expression}"
    return "\n".join(rows)


def chatting(folder: Path, template: str) -> Path:
    """A sound model with a tokenizer and this chat template."""
    base.hf(folder)
    (folder / "tokenizer.json").write_text(json.dumps(text_cases._bpe()))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def _dcp(pickle: bytes) -> Callable[[Path], Path]:
    def build(folder: Path) -> Path:
        (folder / "config.json").write_text(json.dumps(base.CONFIG))
        (folder / ".metadata").write_bytes(pickle)
        (folder / "__0_0.distcp").write_bytes(base.archive())
        return folder

    return build


def _odd_names(folder: Path) -> Path:
    """Files beside a model whose names a terminal would obey."""
    base.hf(folder, name="model-00001-of-00001.safetensors")
    index = {"weight_map": dict.fromkeys(base.SHAPES, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "\x1b[2Jextra.safetensors").write_bytes(base.safetensors())
    (folder / "\x1b]0;x\x07.txt").write_text("x")
    (folder / "\x1b[2J.json").symlink_to("nowhere\x1b[2J")
    return folder


def cases() -> Iterator[Case]:
    """Every one of them."""
    for name, text in TOML.items():
        yield Case(
            f"table: {name}",
            _file("evil.toml", text),
            ("tables-check", "tables-against", "tables-show"),
            more=("names",),
        )
    for name, text in EXPRESSIONS.items():
        computed = frozenset(("tables-check", "tables-show"))  # nothing is computed there
        yield Case(f"table: heads that are {name}", _file("evil.toml", _table(text)), ("tables-check", "tables-against"), computed, ("tables-show",))  # fmt: skip
    for what in ("a link to a device", "a pipe", "a link to itself", "a folder"):
        from tests.trust.hostile.folder_cases import LINKS

        def special(folder: Path, make: Callable[[Path], None] = LINKS[what]) -> Path:
            make(folder / "evil.toml")
            return folder / "evil.toml"

        usage = frozenset(("names", "tables-check", "tables-against", "tables-show"))
        yield Case(f"names file: {what}", special, ("names", "tables-check"), more=(), usage=usage)
    yield Case(
        "names file: 1 GB",
        lambda f: hole(f / "evil.toml", 1 << 30, b"a"),
        ("names", "tables-check"),
        more=("tables-show",),
    )
    for name, text in NAMES.items():
        seen = frozenset(("names", "tables-check", "tables-show")) if name == "terminal codes" else frozenset()
        yield Case(f"names file: {name}", _file("evil.toml", f'extends = "llama"\n{text}'), ("names", "tables-check"), seen, ("tables-show", "tables-against"))  # fmt: skip
    for name, text in TEMPLATES.items():
        harmless = frozenset(("validate", "to-gguf-vocabulary", "to-hf"))  # a text, where nothing runs it
        yield Case(f"chat template: {name}", lambda f, text=text: chatting(f, text), ("generate",), harmless, ("to-gguf-vocabulary", "to-hf"), frozenset(("generate",) if "positions" in name else ()))  # type: ignore[misc]  # fmt: skip
    for name, call in torch_cases.CALLS.items():
        yield Case(f"dcp: {name}", _dcp(b"\x80\x02" + call("touch canary") + b"."), ("inspect", "to-scratch"))
    for name, tree in torch_cases.TREES.items():
        yield Case(f"dcp: {name}", _dcp(tree()), ("inspect", "to-scratch"))
    yield Case("dcp: a state dict", _dcp(base.state()), ("inspect", "validate", "to-scratch"))
    everything = frozenset(("inspect", "validate", "to-scratch", "to-hf", "to-gguf", "diff", "diagnose"))
    yield Case("files beside the model with terminal codes for names", _odd_names, ("inspect", "validate", "to-scratch", "to-hf"), everything)  # fmt: skip
