"""Files are told apart by content; the error for what is no weights says what it is and what to do."""

from __future__ import annotations

import errno
import gzip
import io
import os
import pickle
import tarfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from convert.errors import FormatError
from convert.formats.sniff import refuse_non_weights, sniff
from convert.io_errors import io_problem

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:68a2e4be76fa709455a60272fba8e512c02d81c46e6c671cc9449e374fd6809a\nsize 4976698672\n"
)
PAGE = b"\n<!DOCTYPE html>\n<html><head><meta charset='utf-8'><title>\n Login &middot; Hub </title></head></html>"


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_weights_under_a_wrong_suffix(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "x.pth")
    torch.save({"a": torch.ones(3)}, tmp_path / "y.safetensors")
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "z.bin", "llama")
    writer.add_tensor("a", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [sniff(tmp_path / name) for name in ("x.pth", "y.safetensors", "z.bin")] == ["safetensors", "torch", "gguf"]


@pytest.mark.parametrize("start", [b"\x80\x02", b"\x80\x04", b"\x80\x05", b"\x1f\x8b"])
def test_safetensors_whose_length_looks_like_another_magic(tmp_path: Path, start: bytes) -> None:
    """The file begins with the header's length, whose low bytes may be those of a pickle or of gzip."""
    header = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'.ljust(int.from_bytes(start, "little"))
    (tmp_path / "x").write_bytes(len(header).to_bytes(8, "little") + header + np.ones(3, np.float32).tobytes())
    assert (tmp_path / "x").read_bytes().startswith(start)
    assert load_file(tmp_path / "x")["a"].tolist() == [1, 1, 1]
    assert sniff(tmp_path / "x") == "safetensors"


def test_large_torch_file_and_foreign_zip(tmp_path: Path) -> None:
    torch.save({f"layers.{i}.weight": torch.ones(2) for i in range(3000)}, tmp_path / "m.bin")
    with open(tmp_path / "a.pth", "wb") as file:
        np.savez(file, a=np.ones(3))
    assert sniff(tmp_path / "m.bin") == "torch"
    assert sniff(tmp_path / "a.pth") == "zip"


@pytest.mark.parametrize("protocol", [2, 4])
def test_legacy_torch_and_bare_pickles(tmp_path: Path, protocol: int) -> None:
    torch.save(
        OrderedDict(a=torch.ones(3)), tmp_path / "l.pth", _use_new_zipfile_serialization=False, pickle_protocol=protocol
    )
    (tmp_path / "p.pth").write_bytes(pickle.dumps({"a": 1}, protocol))
    assert sniff(tmp_path / "l.pth") == "torch-legacy"
    assert sniff(tmp_path / "p.pth") == "pickle"
    error = refuse_non_weights(tmp_path / "l.pth", "torch-legacy").problems[0]
    assert "torch.save(torch.load(" in str(error.hint)


def _tar() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model/config.json"))
    return out.getvalue()


@pytest.mark.parametrize(
    ("kind", "data", "words"),
    [
        ("lfs", POINTER, ["Git-LFS pointer to a 4.98 GB file", "git lfs pull"]),
        ("html", PAGE, ["web page (title: Login &middot; Hub)"]),
        ("empty", b"", ["empty"]),
        ("zeros", bytes(100_000), ["nothing but zero bytes"]),
        ("json", b'{"hidden_size": 64}', ["JSON"]),
        ("text", b"Invalid username or password.\n", ["Invalid username or password."]),
        ("gzip", gzip.compress(b"x" * 100, mtime=0), ["gunzip"]),
        ("tar", _tar(), ["tar -xf"]),
        ("hdf5", b"\x89HDF\r\n\x1a\n" + bytes(100), ["HDF5"]),
        ("ggml", b"tjgg" + bytes(20), ["before GGUF"]),
        ("unknown", bytes(range(1, 256)) * 40, ["no format"]),
    ],
)
def test_not_weights(tmp_path: Path, kind: str, data: bytes, words: list[str]) -> None:
    for suffix in ("safetensors", "bin", "pth", "gguf"):
        path = _write(tmp_path / f"model.{suffix}", data)
        assert sniff(path) == kind
        error = refuse_non_weights(path, kind)
        assert isinstance(error, FormatError)
        assert path.name in str(error)
        for word in words:
            assert word in str(error)


def test_zeros_with_one_real_byte_at_the_end_are_not_zeros(tmp_path: Path) -> None:
    assert sniff(_write(tmp_path / "a", bytes(1 << 20) + b"\1")) == "unknown"


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.pth", tmp_path):
        with pytest.raises(FormatError, match="cannot be read"):
            sniff(path)


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EACCES, "chmod"), (errno.EIO, "failing"), (errno.ENOENT, "existing file")]
)
def test_what_to_do_about_a_file_that_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    assert sniff(path) == "gguf"  # the control
    monkeypatch.setattr("convert.formats.sniff.open", refuse, raising=False)
    with pytest.raises(FormatError, match="cannot be read") as error:
        sniff(path)
    assert words in str(error.value.problems[0].hint)
    problem = io_problem(OSError(number, "x"), path, writing=False)
    assert (words in str(problem.hint)) == (number != errno.ENOENT)
    assert "chmod" not in str(io_problem(OSError(number, "x"), path, writing=True).hint)
