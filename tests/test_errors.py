"""Findings: one or many, their words for people, their keys for programs, their exit codes."""

from __future__ import annotations

import pytest

from convert.errors import ConvertError, FormatError, Problem, TableError, UsageError

FULL = Problem("shape", "'w' is [3], wanted [4].", tensor="w", file="a.pth", found=[3], wanted=[4], hint="Look.")


def test_a_sentence_is_a_finding():
    error = ConvertError("it broke.", hint="Mend it.")
    assert [(p.kind, p.message, p.hint) for p in error.problems] == [("error", "it broke.", "Mend it.")]
    assert str(error) == "it broke. Mend it."


def test_all_findings_at_once_and_in_order():
    others = [Problem("dtype", "second."), Problem("missing_tensor", "third.", hint="Fetch it.")]
    error = ConvertError(p for p in [FULL, *others])
    assert error.problems == (FULL, *others)
    assert str(error).splitlines() == ["'w' is [3], wanted [4]. Look.", "second.", "third. Fetch it."]
    assert ConvertError(FULL).problems == (FULL,)


def test_keys_that_are_documented():
    assert FULL.as_json() == {
        "kind": "shape",
        "message": "'w' is [3], wanted [4].",
        "tensor": "w",
        "file": "a.pth",
        "found": [3],
        "wanted": [4],
        "hint": "Look.",
    }
    assert set(Problem("a", "b").as_json()) == set(FULL.as_json())
    with pytest.raises(AttributeError):
        FULL.kind = "other"  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "code"), [(ConvertError, 1), (FormatError, 1), (TableError, 1), (UsageError, 2)])
def test_exit_codes(kind, code):
    error = kind("x")
    assert error.exit_code == code and isinstance(error, ConvertError)
