"""Checkpoints that real TensorFlow wrote, read without it: every value, and what is damaged or no plain tensor."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from convert.errors import FormatError
from convert.formats import sstable, tf_checkpoint
from convert.source import FilePool, open_source

DATA = Path(__file__).parent.parent / "data"
GPT2, ODD = DATA / "openai", DATA / "tensorflow"


def test_every_value_as_tensorflow_reads_it():
    made = tf_checkpoint.read(GPT2 / "model.ckpt.index")
    expected = {k.replace("|", "/"): v for k, v in np.load(GPT2 / "expected.npz").items()}
    assert set(made.tensors) == set(expected) and len(expected) == 28
    pool = FilePool()
    for name, spec in made.tensors.items():
        want = expected[name]
        assert spec.shape == (want.shape[1:] if want.ndim == 3 else want.shape), name
        assert np.array_equal(open_source(spec, pool).read(0, spec.shape[0]), want.reshape(spec.shape)), name
    pool.close()
    assert made.format == "tensorflow" and [f.name for f in made.files] == ["model.ckpt.data-00000-of-00001"]


def test_other_types_and_scalars():
    found = tf_checkpoint.read(ODD / "odd.ckpt.index").tensors
    assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
        "half": ("F16", (3, 5)),
        "brain": ("BF16", (4, 6)),
        "step": ("I64", ()),
    }
    pool = FilePool()
    assert open_source(found["step"], pool).read(0, 1).tolist() == [7]
    pool.close()


def test_a_partitioned_variable_is_named():
    with pytest.raises(FormatError, match="'parted' is stored in 2 slices"):
        tf_checkpoint.read(ODD / "parted.ckpt.index")


@pytest.fixture
def copy(tmp_path):
    for path in GPT2.glob("model.ckpt.*"):
        shutil.copy(path, tmp_path / path.name)
    return tmp_path / "model.ckpt.index"


def test_a_missing_data_file(copy):
    (copy.parent / "model.ckpt.data-00000-of-00001").unlink()
    with pytest.raises(FormatError, match=r"1 data files, and model\.ckpt\.data-00000-of-00001 is absent"):
        tf_checkpoint.read(copy)


def test_a_short_data_file(copy):
    data = copy.parent / "model.ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(FormatError, match="lies beyond the end of its data file"):
        tf_checkpoint.read(copy)


def test_every_single_damaged_byte_of_the_index_is_noticed_or_harmless(copy):
    """Blocks have checksums; what has none is the footer's padding."""
    good = copy.read_bytes()
    whole = tf_checkpoint.read(copy).tensors
    unnoticed = 0
    for at in range(len(good)):
        copy.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            assert tf_checkpoint.read(copy).tensors == whole
            unnoticed += 1
        except FormatError:
            pass
    assert unnoticed < 60


def test_every_truncation_of_the_index(copy):
    good = copy.read_bytes()
    for size in range(len(good)):
        copy.write_bytes(good[:size])
        with pytest.raises(FormatError, match="does not end as a table"):
            tf_checkpoint.read(copy)


# ---- tables ----------------------------------------------------------------------------------------------------


def number(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def table(blocks: list[list[tuple[bytes, bytes]]], *, kind: int = 0, shared: int = 0) -> bytes:
    """A table written by hand from LevelDB's description, with a block for each list."""
    data, index = b"", []

    def block(items: list[tuple[bytes, bytes]], shared: int) -> bytes:
        nonlocal data
        content = b""
        for i, (key, value) in enumerate(items):
            keep = shared if i else 0
            content += number(keep) + number(len(key) - keep) + number(len(value)) + key[keep:] + value
        content += bytes(4) + (1).to_bytes(4, "little")
        handle = number(len(data)) + number(len(content))
        crc = sstable.masked(sstable.crc32c(content + bytes([kind])))
        data += content + bytes([kind]) + crc.to_bytes(4, "little")
        return handle

    for items in blocks:
        index.append((items[-1][0], block(items, shared)))
    meta = block([], 0)
    footer = meta + block(index, 0)
    return data + footer.ljust(40, b"\0") + sstable.MAGIC


def test_several_blocks_and_shared_beginnings():
    blocks = [[(b"ab%04d" % (100 * b + i), bytes([i]) * i) for i in range(90)] for b in range(3)]
    assert sstable.read(Path("x"), table(blocks, shared=2)) == dict(item for block in blocks for item in block)


def test_compressed_blocks_are_named():
    with pytest.raises(FormatError, match="compressed blocks"):
        sstable.read(Path("x"), table([[(b"a", b"b")]], kind=1))


def test_checksum():
    assert sstable.crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C (RFC 3720, B.4)
    assert sstable.crc32c(bytes(32)) == 0x8A9136AA
