"""The package's public names: what is promised is there at run time, and a type checker sees it too."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

import convert


def imported_for_type_checkers(text: str) -> dict[str, str]:
    """``name: module`` of the imports below ``if TYPE_CHECKING``."""
    blocks = [n for n in ast.parse(text).body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    lines = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {name.name: str(line.module) for line in lines for name in line.names}


def test_type_checkers_see_every_public_name():
    """What only ``__getattr__`` gives is ``Any`` to them: a wrong call passes ``mypy --strict``."""
    text = Path(str(convert.__file__)).read_text(encoding="utf-8")
    assert imported_for_type_checkers(text) == convert._HOMES
    without = "\n".join(line for line in text.split("\n") if "import repair" not in line)  # the control
    assert imported_for_type_checkers(without) != convert._HOMES


@pytest.mark.parametrize("name", sorted(convert._HOMES))
def test_each_is_documented_and_typed(name):
    found = getattr(convert, name)
    assert name in convert.__all__ and found is getattr(import_module(convert._HOMES[name]), name)
    assert inspect.getdoc(found)
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())
        # each argument by its name in the docstring, but for **options, whose names are those of open_checkpoint
        said = inspect.getdoc(found) or ""
        named = [p.name for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        assert [n for n in named if f"{n}:" not in said] == []
