"""The expression language: agrees with Python where both may speak, and says no to everything else."""

from __future__ import annotations

import pytest

from convert.errors import TableError
from convert.expr import Expr, MissingName

VALUES = {
    "H": 6,
    "K": 2,
    "hd": 8,
    "D": 48,
    "kinds": ("full", "sliding", "full"),
    "l": 1,
    "half": 0.5,
    "name": "x",
    "off": 0,
}


def look(name):
    if name not in VALUES:
        raise MissingName(name)
    return VALUES[name]


@pytest.mark.parametrize(
    "text",
    [
        "H*hd",
        "D // H + 1 - 7 % 4",
        "-H + 2 * (K - 1)",
        "H == 6 and K != 3",
        "1 < K <= 2 < H",
        "3 < K <= 2 < H",
        "kinds[l]",
        "kinds[l] == 'sliding'",
        "'full' in kinds",
        "K not in (1, 2, 3)",
        "H if K > 5 else D",
        "not off",
        "half * 4",
        "off or H",
        "H and K",
        "name == 'x'",
    ],
)
def test_same_value_as_python(text):
    assert Expr(text).evaluate(look) == eval(text, {}, VALUES)


def test_words_of_toml():
    assert Expr("true").evaluate(look) is True
    assert Expr("missing or false").evaluate(look) is False
    assert Expr(True).evaluate(look) is True
    assert Expr(7).evaluate(look) == 7


def test_a_missing_name_is_passed_over_by_or_unless_it_stands_last():
    assert Expr("missing or H").evaluate(look) == 6
    assert Expr("missing or other or K").evaluate(look) == 2
    for text in ("missing", "off or missing", "missing + 1", "missing and H"):
        with pytest.raises(MissingName, match="missing"):
            Expr(text).evaluate(look)


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("open('x')", "Call"),
        ("__import__('os')", "Call"),
        ("H.real", "Attribute"),
        ("().__class__", "Attribute"),
        ("[x for x in kinds]", "ListComp"),
        ("{H: 1}", "Dict"),
        ("lambda: 1", "Lambda"),
        ("f'{H}'", "JoinedStr"),
        ("(x := 3)", "NamedExpr"),
        ("2 ** 999999999", "Pow"),
        ("1 << 99999999", "LShift"),
        ("D / H", "Div"),
        ("kinds[0:1]", "Slice"),
        ("~H", "Invert"),
        ("H is K", "Is"),
    ],
)
def test_outside_the_language(text, node):
    with pytest.raises(TableError, match=node) as error:
        Expr(text, "x.toml: row")
    assert "x.toml: row" in str(error.value)


@pytest.mark.parametrize("text", ["", "H *", "1 +", "a b", "import os", "b'x' == H", "... or 1", "1j"])
def test_no_expression(text):
    with pytest.raises(TableError, match=r"x\.toml"):
        Expr(text, "x.toml")


@pytest.mark.parametrize("text", ["name - 1", "H // off", "kinds[9]", "H[0]", "H % off", "H < name"])
def test_what_cannot_be_computed_names_the_row(text):
    with pytest.raises(TableError, match=r"x\.toml: row") as error:
        Expr(text, "x.toml: row").evaluate(look)
    assert text in str(error.value)


def test_explain_shows_values():
    assert Expr("K*hd").explain(look) == "K*hd with K = 2, hd = 8"
    assert Expr("3").explain(look) == "3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(" * 5000 + "1" + ")" * 5000, "10,001 characters"),
        ("-" * 100_000 + "1", "characters"),
        ("-" * 499 + "1", None),
        ("(" * 240 + "1" + ")" * 240, "too many nested"),
        ("1\0", "not an expression"),
        ("'a' * 10000000000", "not both numbers"),
        ("(1,) * 10000000000", "not both numbers"),
        ("'%9999999999d' % 1", "not both numbers"),
        ("1.5 * " + "9" * 400, "cannot be computed"),
        ("9" * 5000, "characters"),
    ],
)
def test_an_expression_that_would_explode(text, said):
    """Of a stranger's table: refused as it is read or as it is computed, and nothing is built first."""
    if said is None:
        try:
            assert Expr(text, "row").evaluate(look) in (1, -1)
        except TableError as error:  # as deep as the parser goes depends on Python
            assert "nested too deep" in str(error)
        return
    with pytest.raises(TableError, match=said) as error:
        Expr(text, "row").evaluate(look)
    assert len(str(error.value)) < 1000
