"""Folding layers: nothing is lost, nothing is joined that differs."""

from __future__ import annotations

import pytest

from convert.errors import Problem
from convert.report import error_lines, fold_names, fold_problems, human_bytes, ranges, speakable


def test_ranges():
    assert ranges([0, 1, 2, 20, 21, 31]) == "0-2,20-21,31"
    assert ranges([5, 5, 4]) == "4-5"
    assert ranges([]) == ""


def test_names_fold_by_their_first_number():
    names = [f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1, 2, 20, 21)]
    assert fold_names([*names, "lm_head.weight"]) == [
        "model.layers.{0-2,20-21}.self_attn.k_proj.weight",
        "lm_head.weight",
    ]
    assert fold_names(["a.3.b"]) == ["a.3.b"]
    assert fold_names(["a.0.b", "a.0.c"]) == ["a.0.b", "a.0.c"]
    assert fold_names(["x.0", "x.1"]) == ["x.{0-1}"]
    assert fold_names(["v1.w", "v2.w"]) == ["v1.w", "v2.w"]  # not a number of its own


def test_names_fold_by_every_number():
    experts = [f"layers.{i}.experts.{e}.up.weight" for i in range(3) for e in range(8)]
    assert fold_names(experts) == ["layers.{0-2}.experts.{0-7}.up.weight"]
    assert fold_names(reversed(experts)) == ["layers.{0-2}.experts.{0-7}.up.weight"]
    del experts[12]  # layer 1 lacks expert 4
    assert fold_names(experts) == ["layers.{0,2}.experts.{0-7}.up.weight", "layers.1.experts.{0-3,5-7}.up.weight"]
    assert fold_names(["l.0.e.1", "l.1", "l.0.e.2", "l.2", "x"]) == ["l.0.e.{1-2}", "l.{1-2}", "x"]


def _problem(layer: int, found: int = 3, kind: str = "shape") -> Problem:
    name = f"layers.{layer}.wk.weight"
    return Problem(kind, f"{name!r} has {found} rows.", tensor=name, found=found, hint="look")


def test_problems_fold_only_where_they_say_the_same():
    folded = fold_problems([_problem(i) for i in range(32)])
    assert [p.message for p in folded] == ["'layers.{0-31}.wk.weight' has 3 rows."]
    assert folded[0].tensor == "layers.{0-31}.wk.weight"
    mixed = fold_problems([_problem(0), _problem(1, found=4), _problem(2), _problem(3, kind="dtype")])
    assert sorted(p.tensor or "" for p in mixed) == [
        "layers.1.wk.weight",
        "layers.3.wk.weight",
        "layers.{0,2}.wk.weight",
    ]


def test_problems_without_a_tensor_stay():
    problems = [Problem("index", "one"), Problem("index", "two"), Problem("index", "one")]
    assert [p.message for p in fold_problems(problems)] == ["one", "two"]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (2_471_645_608, "2.47 GB"),
        (3_000_000_000_000_000, "3000 TB"),
        (123_456, "123 kB"),
    ],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


def test_problems_of_experts_fold_and_none_is_left_out():
    names = [f"layers.{i}.experts.{e}.w" for i in range(2) for e in range(4)][:-1]
    problems = [Problem("missing", f"{n!r} is missing.", tensor=n) for n in names]
    folded = fold_problems(problems)
    assert [p.message for p in folded] == ["'layers.0.experts.{0-3}.w', 'layers.1.experts.{0-2}.w' is missing."]


def test_names_with_slashes_fold_by_the_number_that_ends_a_part():
    names = [f"model/h{i}/ln_{j}/g" for i in range(12) for j in (1, 2)]
    assert fold_names([*names, "model/wte"]) == ["model/h{0-11}/ln_1/g", "model/h{0-11}/ln_2/g", "model/wte"]
    assert fold_names(["model/h3/attn/c_attn/w", "a/b.c", "x1/y2/z"]) == ["model/h3/attn/c_attn/w", "a/b.c", "x1/y2/z"]


def test_an_error_names_its_file_once_and_obeys_nothing():
    found = [
        Problem("a", "3 bytes are wrong.", file="/m/x.bin"),
        Problem("b", "x.bin has \x1b[2J and \ud800 in it.", hint="one\ntwo\t\u202e", file="/m/x.bin"),
        Problem("c", "the config says 5."),
        Problem("c", "the config says 6."),
        Problem("c", "the config says 6."),
    ]
    assert error_lines(found, source="/m") == [
        "error: /m/x.bin: 3 bytes are wrong.",
        "error: x.bin has \\x1b[2J and \\ud800 in it.",
        "       one\ntwo\t\\u202e",
        "error: /m: the config says 5.",
        "error: the config says 6.",
    ]
    assert speakable("a\x1b[2J\n\u200d\x9b") == "a\\x1b[2J\n\u200d\\x9b"
    assert error_lines(found[2:3]) == ["error: the config says 5."]
    assert error_lines([Problem("x", f"{i}.") for i in range(40)])[-1] == "… and 10 more."


def test_a_hint_that_findings_in_a_row_share_stands_once():
    one, two = (Problem("x", f"{i}.", hint="Divide.") for i in (1, 2))
    other = Problem("x", "3.", hint="Add.")
    assert error_lines([one, two, other]) == ["error: 1.", "error: 2.", "       Divide.", "error: 3.", "       Add."]
    assert error_lines([one, other, two])[1::2] == ["       Divide.", "       Add.", "       Divide."]
