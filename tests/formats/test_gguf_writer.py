"""Written files, read back by the gguf package; the same bytes as that package writes; splitting; metadata edits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.errors import ConvertError, UsageError
from convert.formats import gguf as reader
from convert.formats import gguf_writer as writer
from convert.formats.gguf_edit import PADDING_KEY, plan_edit, set_metadata
from convert.formats.gguf_header import read_header
from convert.formats.gguf_values import (
    F32,
    I32,
    U8,
    U16,
    U32,
    U64,
    Array,
    Bool,
    KeyValues,
    Str,
    StringArray,
    Value,
    encode,
    infer,
)
from convert.formats.spec import Entry, FileLayout

gguf = pytest.importorskip("gguf")

METADATA: dict[str, Value] = {
    "general.architecture": Str("llama"),
    "general.name": Str("Größe ▁ 模型"),
    "a.u8": U8(200),
    "a.i8": Value("i8", -100),
    "a.u16": U16(60000),
    "a.i16": Value("i16", -30000),
    "a.u32": U32(4_000_000_000),
    "a.i32": I32(-2_000_000_000),
    "a.f32": F32(1e-5),
    "a.u64": U64(2**63 + 7),
    "a.i64": Value("i64", -(2**60)),
    "a.f64": Value("f64", 0.1),
    "a.bool": Bool(True),
    "b.ints": Array("i32", [1, -2, 3]),
    "b.u32": Array("u32", [1, 2]),
    "b.floats": Array("f32", [0.5, -1000.0]),
    "b.bools": Array("bool", [True, False, True]),
    "b.strings": Array("str", ["", "a", "Ġthe", "日本"]),
    "b.no_strings": Array("str", []),
    "b.no_ints": Array("i32", []),
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {
        "token_embd.weight": rng.standard_normal((96, 24)).astype(np.float32),
        "blk.0.attn_q.weight": rng.standard_normal((40, 24)).astype(np.float16),
        "blk.0.attn_norm.weight": rng.standard_normal(7).astype(np.float32),
        "experts": rng.standard_normal((3, 5, 24)).astype(np.float32),
        "ids": np.arange(5, dtype=np.int32),
        "last": rng.standard_normal((1, 5)).astype(np.float32),
    }


def entries(arrays: dict[str, np.ndarray]) -> list[Entry]:
    names = {"float32": "F32", "float16": "F16", "int32": "I32"}
    return [Entry(name, names[a.dtype.name], a.shape) for name, a in arrays.items()]


def save(folder: Path, layout: FileLayout, arrays: dict[str, np.ndarray]) -> Path:
    """Write a layout as the engine does: frame and data at their places, into a file that was full of rubbish."""
    path = folder / layout.name
    buffer = bytearray(b"\xaa" * layout.size)
    covered = np.zeros(layout.size, bool)
    for at, raw in layout.frame({}):
        buffer[at : at + len(raw)] = raw
        assert not covered[at : at + len(raw)].any()
        covered[at : at + len(raw)] = True
    for entry in layout.entries:
        at, raw = layout.offsets[entry.name], arrays[entry.name].tobytes()
        assert len(raw) == entry.nbytes
        buffer[at : at + len(raw)] = raw
        assert not covered[at : at + len(raw)].any()
        covered[at : at + len(raw)] = True
    assert len(buffer) == layout.size and covered.all()
    path.write_bytes(buffer)
    return path


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


@pytest.mark.parametrize("alignment", [32, 64, 4096])
def test_the_gguf_package_reads_it(tmp_path: Path, alignment: int) -> None:
    arrays = tensors()
    path = save(tmp_path, writer.layout("m.gguf", entries(arrays), METADATA, alignment=alignment), arrays)
    oracle = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        field = oracle.get_field(key)
        found = field.contents()
        types = [t.name.lower().replace("int", "i").replace("ui", "u") for t in field.types]
        types = [t.replace("float", "f").replace("string", "str").replace("array", "arr") for t in types]
        empty = value.type.startswith("arr") and not len(value.value)
        assert types == (["arr"] if empty else value.type.split(":")), key
        if value.type == "f32":
            assert np.float32(found) == np.float32(value.value)
        else:
            assert plain(found) == value.value or (empty and not found), key
    assert (oracle.get_field("general.alignment") is None) == (alignment == 32)
    assert [t.name for t in oracle.tensors] == list(arrays)
    for tensor in oracle.tensors:
        assert tensor.data_offset % alignment == 0
        assert tensor.data.tobytes() == arrays[tensor.name].tobytes()
        assert tuple(reversed([int(n) for n in tensor.shape])) == arrays[tensor.name].shape


def test_the_bytes_are_those_of_the_gguf_package(tmp_path: Path) -> None:
    arrays = tensors()
    metadata = {k: v for k, v in METADATA.items() if k in ("general.architecture", "general.name", "a.u32", "a.f32")}
    metadata["b.strings"] = METADATA["b.strings"]
    ours = save(tmp_path, writer.layout("ours.gguf", entries(arrays), metadata), arrays)
    theirs = gguf.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    theirs.add_string("general.name", METADATA["general.name"].value)
    theirs.add_uint32("a.u32", METADATA["a.u32"].value)
    theirs.add_float32("a.f32", 1e-5)
    theirs.add_array("b.strings", METADATA["b.strings"].value)
    for name, array in arrays.items():
        theirs.add_tensor(name, array)
    theirs.write_header_to_file()
    theirs.write_kv_data_to_file()
    theirs.write_tensors_to_file()
    theirs.close()
    assert ours.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()


def test_our_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    arrays = tensors()
    path = save(tmp_path, writer.layout("m.gguf", entries(arrays), METADATA), arrays)
    container = reader.read(path)
    assert dict(container.metadata) == {k: v.value for k, v in METADATA.items()}
    assert container.metadata.types == {k: v.type for k, v in METADATA.items()}
    assert container.notes == []
    again = writer.layout("n.gguf", entries(arrays), container.metadata)
    assert save(tmp_path, again, arrays).read_bytes() == path.read_bytes()


def test_a_llama_3_vocabulary_is_laid_out_fast() -> None:
    tokens = [f"Ġtoken{i}" for i in range(128_256)]
    merges = [f"Ġmer ge{i}" for i in range(280_147)]
    metadata = KeyValues(
        {
            "tokenizer.ggml.tokens": Array("str", tokens),
            "tokenizer.ggml.token_type": Array("i32", [1] * len(tokens)),
            "tokenizer.ggml.merges": Array("str", merges),
        }
    )
    seconds = []
    for _ in range(2):
        start = time.thread_time()
        writer.layout("m.gguf", [], metadata)
        seconds.append(time.thread_time() - start)
    assert min(seconds) < 0.3
    assert StringArray.of(tokens) == tokens


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (Entry("n" * 64, "F32", (2, 2)), "a name of 64 bytes"),
        (Entry("w", "F32", (1,) * 5), "5 dimensions"),
        (Entry("w", "BOOL", (4,)), "the type BOOL"),
        (Entry("w", "Q8_0", (4, 48)), "rows of 48 elements"),
        (Entry("ok", "F32", (4,)), "a name that another tensor has"),
    ],
)
def test_what_ggml_cannot_load_is_not_written(entry: Entry, words: str) -> None:
    with pytest.raises(ConvertError) as caught:
        writer.layout("m.gguf", [Entry("ok", "F32", (4,)), entry], {})
    assert len(caught.value.problems) == 1 and words in str(caught.value)
    writer.layout("m.gguf", [Entry("ok", "F32", (4,)), Entry("n" * 63, "Q8_0", (4, 64))], {})


@pytest.mark.parametrize(
    "value",
    [
        U8(256),
        U32(-1),
        U32(2**32),
        Value("u32", 1.5),
        Value("u32", True),
        F32("1"),  # type: ignore[arg-type]
        Bool(1),
        Str(5),  # type: ignore[arg-type]
        Array("i32", [1, "2"]),
        Array("str", [1]),
        Array("str", "text"),
        Value("arr:arr", [[1]]),
        Value("complex", 1),
    ],
)
def test_a_value_that_does_not_fit_its_type_is_refused(value: Value) -> None:
    with pytest.raises(ConvertError, match="'k'"):
        writer.layout("m.gguf", [], {"k": value})


# ---- split files -----------------------------------------------------------------------------------------------


def many(count: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {f"blk.{n}.w": rng.standard_normal((7 + n, 16)).astype(np.float32) for n in range(count)}


@pytest.mark.parametrize("alignment", [32, 128])
def test_split_files_hold_the_same_model(tmp_path: Path, alignment: int) -> None:
    arrays = many()
    layouts = writer.split_layouts("m.gguf", entries(arrays), METADATA, max_size=2600, alignment=alignment)
    paths = [save(tmp_path, layout, arrays) for layout in layouts]
    count = len(paths)
    assert count > 3 and all(layout.size <= 2600 for layout in layouts)
    assert [p.name for p in paths] == [f"m-{n:05d}-of-{count:05d}.gguf" for n in range(1, count + 1)]
    found = {}
    for number, path in enumerate(paths):
        oracle = gguf.GGUFReader(path)
        found |= {t.name: t.data.tobytes() for t in oracle.tensors}
        keys = [k for k in oracle.fields if not k.startswith("GGUF.") and k != "general.alignment"]
        split = ["split.no", "split.count", "split.tensors.count"]
        assert keys == ([*METADATA, *split] if number == 0 else split)
        assert [oracle.get_field(k).contents() for k in split] == [number, count, len(arrays)]
        assert [oracle.get_field(k).types[0].name for k in split] == ["UINT16", "UINT16", "INT32"]
    assert found == {name: array.tobytes() for name, array in arrays.items()}
    container = reader.read(paths[-1])
    assert container.files == tuple(paths) and list(container.tensors) == list(arrays)
    assert dict(container.metadata) == {k: v.value for k, v in METADATA.items()} | (
        {"general.alignment": alignment} if alignment != 32 else {}
    )


def test_what_fits_is_not_split() -> None:
    arrays = many()
    whole = writer.layout("m.gguf", entries(arrays), METADATA)
    assert [p.name for p in writer.split_layouts("m.gguf", entries(arrays), METADATA, max_size=whole.size)] == [
        "m.gguf"
    ]
    assert len(writer.split_layouts("m.gguf", entries(arrays), METADATA, max_size=whole.size - 1)) == 2


def test_a_large_vocabulary_or_tensor_gets_its_own_file(tmp_path: Path) -> None:
    arrays = many(3)
    arrays["big"] = np.zeros((100, 64), np.float32)
    metadata = {"tokens": Array("str", ["x" * 100] * 50)}
    layouts = writer.split_layouts("m.gguf", entries(arrays), metadata, max_size=2000)
    assert layouts[0].entries == ()
    assert [len(p.entries) for p in layouts[-1:]] == [1] and layouts[-1].size > 2000
    for layout in layouts:
        save(tmp_path, layout, arrays)
    assert list(reader.read(tmp_path).tensors) == list(arrays)


def test_more_files_than_can_be_counted_are_refused() -> None:
    wanted = [Entry(f"t{n}", "F32", (8,)) for n in range(66_000)]
    with pytest.raises(ConvertError, match="66,00"):
        writer.split_layouts("m.gguf", wanted, {}, max_size=150)


# ---- metadata edits --------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    arrays = tensors()
    return save(tmp_path, writer.layout("m.gguf", entries(arrays), METADATA), arrays)


def same_tensors(path: Path) -> bool:
    container = reader.read(path)
    oracle = {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}
    return list(container.tensors) == list(tensors()) and oracle == {n: a.tobytes() for n, a in tensors().items()}


def test_an_edit_of_equal_length_is_made_in_place(model: Path) -> None:
    before, inode = model.read_bytes(), model.stat().st_ino
    assert set_metadata(model, {"a.u32": U32(7), "general.architecture": Str("qwen3")})
    after = model.read_bytes()
    assert len(after) == len(before) and model.stat().st_ino == inode
    assert sum(a != b for a, b in zip(before, after, strict=True)) <= 9
    metadata = reader.read(model).metadata
    assert metadata["a.u32"] == 7 and metadata["general.architecture"] == "qwen3" and PADDING_KEY not in metadata
    assert same_tensors(model)


def test_a_shrunk_header_is_filled(model: Path) -> None:
    size = model.stat().st_size
    assert set_metadata(model, {"b.strings": None, "b.ints": None, "b.floats": None})
    metadata = reader.read(model).metadata
    assert model.stat().st_size == size and "b.ints" not in metadata and set(metadata[PADDING_KEY]) == {" "}
    assert same_tensors(model)
    assert set_metadata(model, {"b.ints": METADATA["b.ints"], "b.floats": METADATA["b.floats"]})
    assert model.stat().st_size == size and same_tensors(model)


def test_a_grown_header_moves_the_data_once(model: Path) -> None:
    size, mode = model.stat().st_size, 0o640
    model.chmod(mode)
    template = "{% for m in messages %}" * 20
    assert not plan_edit(model, {"tokenizer.chat_template": Str(template)}).in_place
    assert model.stat().st_size == size  # planning writes nothing
    assert not set_metadata(model, {"tokenizer.chat_template": Str(template)})
    assert model.stat().st_mode & 0o777 == mode and not list(model.parent.glob(".*"))
    assert reader.read(model).metadata["tokenizer.chat_template"] == template and same_tensors(model)
    larger = model.stat().st_size
    assert set_metadata(model, {"tokenizer.chat_template": Str(template * 8)})  # there is room now
    assert model.stat().st_size == larger and same_tensors(model)
    assert reader.read(model).metadata["tokenizer.chat_template"] == template * 8


def test_every_header_length_comes_out_right(model: Path) -> None:
    """Lengths around the edges of the alignment and of the padding key's own size, in place or not."""
    for length in range(0, 140):
        set_metadata(model, {"general.name": Str("x" * length)}, room=0)
        assert reader.read(model).metadata["general.name"] == "x" * length
        header = read_header(model)
        assert header.data_start - header.end < 32
    assert same_tensors(model)


def test_what_places_depend_on_is_not_edited(model: Path) -> None:
    before = model.read_bytes()
    for changes in ({"general.alignment": U32(64)}, {"split.count": U16(2)}):
        with pytest.raises(UsageError, match="cannot be changed"):
            set_metadata(model, changes)
    with pytest.raises(ConvertError, match=r"'a\.u32'"):
        set_metadata(model, {"a.u32": U32(-1)})
    with pytest.raises(UsageError, match="cannot be removed"):
        set_metadata(model, {"general.architecture": None})
    assert model.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "like", "value"),
    [
        ("5", None, U32(5)),
        ("-5", None, I32(-5)),
        ("5000000000", None, Value("i64", 5_000_000_000)),
        ("1e-5", None, F32(1e-5)),
        ("true", None, Bool(True)),
        ("Infinity", None, Str("Infinity")),
        ("a: b", None, Str("a: b")),
        ("u64:5", None, U64(5)),
        ("arr:i32:1,2", None, Array("i32", [1, 2])),
        ("5", "str", Str("5")),
        ("5", "f32", F32(5.0)),
        ("1,2", "arr:i32", Array("i32", [1, 2])),
        ("", "arr:str", Array("str", [])),
    ],
)
def test_values_from_a_command_line(text: str, like: str | None, value: Value) -> None:
    found = infer(text, like=like)
    assert found == value
    encode("k", found)


@pytest.mark.parametrize(("text", "like"), [("x", "u32"), ("yes", "bool"), ("arr:foo:1", None), ("u8:300x", None)])
def test_text_that_does_not_fit_is_refused(text: str, like: str | None) -> None:
    with pytest.raises(ValueError):
        infer(text, like=like)
