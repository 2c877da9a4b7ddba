"""Headers of safetensors that torch and safetensors wrote, of types that nothing here reads among them."""

from __future__ import annotations

from pathlib import Path

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
