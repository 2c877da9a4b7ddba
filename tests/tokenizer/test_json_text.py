"""A tokenizer.json with emoji is parsed by its bytes, in a third of the memory, and means the same."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert.tokenizer import json_text

TEXTS = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("aĠ▁é🦙\u0007\\\"'"), max_size=8)
TREES = st.recursive(
    TEXTS
    | st.integers(-(1 << 70), 1 << 70)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


@pytest.fixture(autouse=True, scope="module")
def _small_files_too():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_UNCOUNTED", 0)
        yield


@settings(deadline=None, max_examples=200, derandomize=True)
@given(tree=TREES, ascii_only=st.booleans(), mark=st.booleans())
def test_by_bytes_it_is_the_same(tree, ascii_only, mark):
    raw = ("\ufeff" * mark + json.dumps([tree, "🦙"], ensure_ascii=ascii_only)).encode()
    assert json_text.load(raw) == [tree, "🦙"]


def test_which_files_are_read_by_their_bytes():
    narrow = json_text._is_better_narrow
    assert narrow('["🦙", "\\u001f"]'.encode()) and narrow('["🦙", "\\\\u00e9"]'.encode()) is False
    assert not narrow('["Ġé▁"]'.encode())  # two bytes a character
    assert not narrow('["🦙", "\\u00e9"]'.encode())  # by its bytes it would be half of one
    assert not narrow('["🦙", "\\ud83e\\udd99"]'.encode())
    assert json_text.load('["🦙", "\\u00e9", "\\ud83e\\udd99"]'.encode()) == ["🦙", "é", "🦙"]


def test_what_is_no_text_is_refused_all_the_same():
    for raw in (b'["\xf0\x9f\xa6"]', b'["\xf0\x9f\xa6\x99", "\xff"]', b'["\xf0\x9f\xa6\x99", "\xc3"]'):
        with pytest.raises(ValueError, match="no UTF-8"):
            json_text.load(raw)
    with pytest.raises(ValueError, match="Expecting"):
        json_text.load("[🦙".encode())


def test_it_takes_less_memory(monkeypatch):
    raw = json.dumps(["x" * 4_000_000, "🦙"], ensure_ascii=False).encode()

    def peak():
        tracemalloc.start()
        try:
            assert json_text.load(raw)[1] == "🦙"
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak() < 2.2 * len(raw) + 2_000_000  # the text, and the value
    monkeypatch.setattr(json_text, "_is_better_narrow", lambda raw: False)
    assert peak() > 4 * len(raw)  # the control
