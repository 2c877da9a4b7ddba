"""What is no JSON file: every refusal says what to do, and what is no file at all is not taken for an absent one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError, FormatError
from convert.json_file import MAX_BYTES, read_json
from tests.fixtures import make_hf


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p.write_text('{"a": 1'),
        lambda p: p.write_text("[" * 100_000),
        lambda p: p.write_text(f'{{"a": {"9" * 300}}}'),
        lambda p: p.write_text('{"a": [' + ",".join("[]" for _ in range(400_001)) + "]}"),
        lambda p: p.write_text('{"a": 1, "a": 2}'),
        lambda p: p.write_bytes('{"a": 1}'.encode("utf-16")),
        lambda p: p.write_bytes(b'{"a": "\xff"}'),
        sparse,
        Path.mkdir,
        os.mkfifo,
    ],
)
def test_every_refusal_says_what_to_do(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')
    assert read_json(path) == {"a": 1}  # the control
    path.unlink()
    spoil(path)
    with pytest.raises(FormatError) as caught:
        read_json(path)
    assert all(p.hint and p.file == str(path) for p in caught.value.problems)


@pytest.mark.parametrize(("spoil", "words"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe, socket or device")])
def test_a_config_that_is_no_file_is_not_taken_for_none(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = make_hf(tmp_path / "m", "gqa8").path
    config = folder / "config.json"
    kept = config.read_bytes()
    config.unlink()
    with pytest.raises(ConvertError, match="there is no config"):  # the control
        open_checkpoint(folder)
    spoil(config)
    with pytest.raises(FormatError, match=rf"config\.json is {words}, not a file"):
        open_checkpoint(folder)
    given = tmp_path / "given.json"
    given.write_bytes(kept)
    assert open_checkpoint(folder, config=given).layout == "hf"  # and one that is named counts all the same


def test_a_file_that_opens_and_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a failing disk; the system names the file only when it does not open."""
    path = tmp_path / "config.json"
    path.write_text('{"a": 1}')

    def fail(_: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match=r"config\.json") as caught:
        read_json(path)
    assert caught.value.filename == str(path)
