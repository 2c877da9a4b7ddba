"""Headers of safetensors that torch and safetensors wrote, of types that nothing here reads among them."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.errors import FormatError
from convert.formats.safetensors import read

UNREAD = {
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}


@pytest.mark.parametrize("kind", UNREAD)
@pytest.mark.parametrize("where", ["a.first", "m.between", "z.last"])
def test_an_unread_type_is_no_damage(tmp_path: Path, kind: str, where: str) -> None:
    """A whole file is not called cut or gapped because one of its types is not known here."""
    path = tmp_path / "model.safetensors"
    state = {"b.weight": torch.ones(3, 5), where: torch.ones(7, 2).to(UNREAD[kind]), "n.weight": torch.ones(5)}
    save_file(state, path)
    assert set(load_file(path)) == set(state)  # it is whole
    with pytest.raises(FormatError, match=f"unknown dtype '{kind}'") as caught:
        read(path)
    assert [(p.tensor, p.file) for p in caught.value.problems] == [(where, str(path))]
    assert "may be whole" in str(caught.value.problems[0].hint)
    path.write_bytes(path.read_bytes()[:-3])  # and here both are the case
    with pytest.raises(FormatError) as caught:
        read(path)
    assert [p.kind for p in caught.value.problems] == ["header", "truncated"]
    assert "ends 3 bytes early" in str(caught.value)


def write(path: Path, header: Any, data: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))


def spans(*offsets: tuple[int, int], shape: Any = (4,)) -> dict[str, Any]:
    kinds = {"dtype": "F32", "shape": list(shape)}
    return {name: {**kinds, "data_offsets": list(at)} for name, at in zip("abc", offsets, strict=False)}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (spans((0, 16), (8, 24)), 24),
        (spans((0, 16), (20, 36)), 36),
        (spans((16, 0)), 16),
        (spans((-16, 0)), 16),
        (spans((0, 16), shape=(-2, -2)), 16),
        (spans((0, 16), shape=(2**61,) * 60), 16),
        ({"a": {"dtype": "F32"}}, 0),
        ({"n" * 20_000: spans((0, 16))["a"]}, 16),
    ],
)
def test_every_finding_says_what_to_do(tmp_path: Path, header: Any, data: int) -> None:
    path = tmp_path / "model.safetensors"
    write(path, spans((0, 16), (16, 32)), 32)
    assert set(read(path).tensors) == {"a", "b"}  # the control
    write(path, header, data)
    with pytest.raises(FormatError) as caught:
        read(path)
    assert all(p.hint and len(p.message) < 500 for p in caught.value.problems)


def peak_of(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_long_header_is_held_twice_at_most(tmp_path: Path) -> None:
    """As text and as what it says, not as bytes besides: the longest that is allowed would take 300 MB."""
    path, size = tmp_path / "model.safetensors", 8_000_000
    write(path, {"__metadata__": {"a": "x" * size}}, 0)

    def thrice() -> Any:
        raw = path.read_bytes()[8:]
        text = raw.decode()
        return raw, text, json.loads(text)

    assert peak_of(thrice) > 2.9 * size  # the control
    assert peak_of(lambda: read(path)) < 2.5 * size
