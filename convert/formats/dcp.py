"""Reads folders of ``torch.distributed.checkpoint`` (FSDP, FSDP2) without torch, executing nothing.

Such a folder holds a pickle, ``.metadata``, that says which tensors there are, how each is cut into chunks and where
each chunk lies; and ``*.distcp`` files, in which every chunk is a stream of ``torch.save``. The pickle is read by
:mod:`convert.formats.pickles`, and refused if it names anything that such metadata does not consist of. Chunks stay
where they are: a tensor becomes a :class:`~convert.formats.spec.TensorSpec` with parts. Written by
:mod:`convert.formats.dcp_writer`. Source of the layout: ``torch/distributed/checkpoint`` of torch 2.13.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from convert.errors import FormatError, Problem
from convert.formats import pickles
from convert.formats.placeholders import TORCH_TYPES, ElementType, Placeholder
from convert.formats.spec import Container, TensorSpec
from convert.formats.torch_zip import read_stream

METADATA = ".metadata"
SUFFIX = ".distcp"
_META = "torch.distributed.checkpoint.metadata."
#: All that the metadata of a checkpoint consists of, beside plain values.
_NAMES = frozenset(
    {
        *(
            _META + name
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "BytesStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
        *(f"{module}.{kind}Path" for module in ("pathlib", "pathlib._local") for kind in ("Posix", "Windows")),
    }
)
#: Beginnings of what a trainer saves beside the model; where the metadata has no paths, these are told by names.
_BESIDE = ("optim", "lr_sched", "scheduler", "rng", "dataloader", "train_state")
_MAX_PROBLEMS = 20
#: Metadata lists every chunk of every rank, optimizer states among them: 70B on 128 ranks has 280,000. How much of it
#: is read grows with the data that it tells of, so that little data has no metadata that takes seconds.
_MOST_SCALE, _BYTES_PER_SCALE = 12, 2 << 30
#: Stretches of data between holes that are counted in a file.
_MOST_EXTENTS = 256


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of one tensor: where it begins in it, its shape, and which bytes of which file hold its stream."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    file: Path
    start: int
    length: int


def read(folder: Path) -> Container:
    """Open a folder: its metadata, no tensor data and no stream.

    Returns:
        A container of format ``dcp`` with ``metadata={"tree": …, "chunks": …, "paths": …}``:
        :func:`convert.wrappers.unwrap` picks the model's tensors from the tree, :func:`resolve` then finds their bytes.

    Raises:
        FormatError: The metadata is absent, damaged, names what it has no use for, or contradicts the files.
    """
    path = folder / METADATA
    scale = _scale(folder)
    data = _bytes(path, scale)
    found = pickles.load(
        data, tensor=lambda *_: Placeholder("tensor", called=True), file=f"{folder.name}/{METADATA}", scale=scale
    )
    _refuse_names(found.placeholders, path)
    meta = _fields(found.root, "Metadata", path)
    stored = meta.get("state_dict_metadata")
    if not isinstance(stored, dict) or not isinstance(meta.get("storage_data"), dict):
        raise _damaged(path, "it lacks its tables")
    places = _places(meta["storage_data"], path)
    chunks: dict[str, list[Chunk]] = {}
    specs: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in stored.items():
        if not isinstance(name, str) or not isinstance(value, Placeholder):
            raise _damaged(path, "a tensor without a name")
        if value.name != _META + "TensorStorageMetadata":
            specs[name] = Placeholder("an object stored as bytes", called=True)
            continue
        dtype, shape, chunks[name] = _tensor(name, value, places, path, problems)
        specs[name] = _leaf(name, dtype, shape, path)
    if problems:
        raise FormatError(problems[:_MAX_PROBLEMS])
    files = tuple(dict.fromkeys(sorted(c.file for found in chunks.values() for c in found)))
    tensors = {name: spec for name, spec in specs.items() if isinstance(spec, TensorSpec)}
    paths = meta.get("planner_data")
    paths = {n: p for n, p in paths.items() if _is_path(p)} if isinstance(paths, dict) else {}
    more = {"tree": _tree(specs, paths), "chunks": chunks, "paths": paths}
    return Container("dcp", (*files, path), tensors, metadata=more)


def read_file(path: Path) -> Container:
    """What one file of a folder holds: its tensors by the names in the metadata, with their places.

    Raises:
        FormatError: As :func:`read` and :func:`resolve`.
    """
    whole = read(path.parent)
    chunks = whole.metadata["chunks"]
    whole.tensors = {n: s for n, s in whole.tensors.items() if any(c.file == path for c in chunks[n])}
    resolve(whole)
    return Container("dcp", (path,), whole.tensors)


def resolve(container: Container) -> None:
    """Find the bytes of ``container.tensors``: read the headers of their streams, and of no others.

    Raises:
        FormatError: Streams that are damaged or not what the metadata says, or chunks that leave gaps; all of them.
    """
    chunks: Mapping[str, list[Chunk]] = container.metadata["chunks"]
    problems: list[Problem] = []
    opened: dict[Path, BinaryIO] = {}
    try:
        for name, spec in container.tensors.items():
            try:
                container.tensors[name] = _with_parts(spec, chunks[str(spec.storage)], opened)
            except FormatError as error:
                problems += error.problems
                if len(problems) >= _MAX_PROBLEMS:
                    break
    finally:
        for file in opened.values():
            file.close()
    if problems:
        raise FormatError(problems)


# --- the metadata ------------------------------------------------------------------------------------------------


def _scale(folder: Path) -> int:
    """How many times the bounds of a state dict the metadata may have."""
    try:
        there = sum(_written(path) for path in folder.glob(f"*{SUFFIX}") if path.is_file())
    except OSError:
        there = 0  # said when they are read
    return min(_MOST_SCALE, 1 + there // _BYTES_PER_SCALE)


def _written(path: Path) -> int:
    """Bytes of a file that somebody wrote: those of a hole cost nothing, and vouch for nothing."""
    size = path.stat().st_size
    if size < _BYTES_PER_SCALE or not hasattr(os, "SEEK_DATA"):
        return size
    written = end = 0
    with path.open("rb") as file:
        for _ in range(_MOST_EXTENTS):
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            except OSError as error:  # there is no more; or this file system cannot tell
                return written if error.errno == errno.ENXIO else size
            written += end - start
            if end >= size:
                break
    return written


def _bytes(path: Path, scale: int) -> bytes:
    try:
        pickles.check_size(path.stat().st_size, file=path.name, scale=scale)
        return path.read_bytes()
    except OSError as error:
        raise FormatError(
            Problem(
                "missing_file",
                f"{path.parent} has no {METADATA} that can be read ({error.strerror}).",
                file=str(path),
                hint="It is written last: was the save, or the copy, cut off?",
            )
        ) from None


def _refuse_names(named: Mapping[str, int], path: Path) -> None:
    strange = sorted((name for name in named if name not in _NAMES), key=lambda name: (name.startswith("torch."), name))
    if strange:
        raise FormatError(
            Problem(
                "pickle_names",
                f"{path} names {', '.join(strange[:5])}, which the metadata of a checkpoint has no use for; nothing of "
                "it was executed.",
                file=str(path),
                found=strange[:20],
                wanted="the classes of torch.distributed.checkpoint.metadata",
                hint="Loading it with torch would run what it names. Where does it come from?",
            )
        )


def _damaged(path: Path, why: str) -> FormatError:
    hint = "Save or copy the checkpoint again."
    return FormatError(Problem("metadata", f"{path} is no metadata of a checkpoint: {why}.", file=str(path), hint=hint))


def _fields(value: Any, kind: str, path: Path) -> dict[str, Any]:
    fields = value.fields if isinstance(value, Placeholder) else None
    if fields is None or not value.name.endswith("." + kind):
        raise _damaged(path, f"a {kind} is missing")
    return fields


def _counts(value: Any, path: Path) -> tuple[int, ...]:
    value = tuple(value) if isinstance(value, list | tuple) else None
    if value is None or not all(type(n) is int and 0 <= n < 1 << 60 for n in value) or len(value) > 8:
        raise _damaged(path, "a shape that is no shape")
    return value


def _places(storage: dict[Any, Any], path: Path) -> dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]]:
    """Name and offset of each chunk to its file and bytes there."""
    sizes: dict[str, int] = {}
    out = {}
    for index, info in storage.items():
        key, place = _fields(index, "MetadataIndex", path), _fields(info, "_StorageInfo", path)
        name, offset = key.get("fqn"), key.get("offset")
        file, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
        if not isinstance(name, str) or not isinstance(file, str) or type(start) is not int or type(length) is not int:
            raise _damaged(path, "a chunk without a place")
        if Path(file).name != file or file in ("", ".", "..") or "\\" in file or "\0" in file:
            raise _damaged(path, f"it points outside its own folder ({file[:100]!r})")
        if place.get("transform_descriptors"):
            raise _damaged(path, f"{name!r} is compressed or encrypted, which only the program that wrote it can undo")
        at = path.with_name(file)
        if file not in sizes:
            try:
                sizes[file] = at.stat().st_size
            except OSError:
                sizes[file] = -1
        if sizes[file] < 0 or start < 0 or length < 0 or start + length > sizes[file]:
            raise FormatError(
                Problem(
                    "missing_file" if sizes[file] < 0 else "truncated",
                    f"{file} is absent." if sizes[file] < 0 else f"{file} ends before {name[:200]!r} does.",
                    file=str(at),
                    found=max(sizes[file], 0),
                    wanted=start + length,
                    hint="Was the checkpoint copied whole, from all machines that saved it?",
                )
            )
        out[name, _counts(offset or (), path)] = (at, start, length)
    return out


def _tensor(
    name: str, value: Placeholder, places: Mapping[Any, tuple[Path, int, int]], path: Path, problems: list[Problem]
) -> tuple[str, tuple[int, ...], list[Chunk]]:
    fields = _fields(value, "TensorStorageMetadata", path)
    shape = _counts(fields.get("size"), path)
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, Placeholder) else None
    element = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(element, ElementType) or not isinstance(fields.get("chunks"), list):
        raise _damaged(path, f"{name[:200]!r} has no type or no chunks")
    chunks = []
    for item in fields["chunks"]:
        cut = _fields(item, "ChunkStorageMetadata", path)
        offsets, size = _counts(cut.get("offsets"), path), _counts(cut.get("sizes"), path)
        place = places.get((name, offsets))
        if place is None or len(offsets) != len(shape) or len(size) != len(shape):
            problems.append(
                Problem(
                    "metadata", f"{path}: a chunk of {name[:200]!r} has no place.", tensor=name[:200], file=str(path)
                )
            )
        elif 0 not in size or 0 in shape:
            chunks.append(Chunk(offsets, size, *place))
    return element.dtype or f"torch.{element.name}", shape, chunks


def _leaf(name: str, dtype: str, shape: tuple[int, ...], path: Path) -> TensorSpec | Placeholder:
    if dtype not in TORCH_TYPES.values():
        return Placeholder(f"torch._utils._rebuild_tensor of {dtype}", called=True)
    return TensorSpec(name, dtype, shape, path, 0, storage=name)


def _is_path(value: Any) -> bool:
    return type(value) is tuple and 0 < len(value) <= 50 and all(type(part) in (str, int) for part in value)


def _tree(specs: Mapping[str, Any], paths: Mapping[Any, Any]) -> dict[Any, Any]:
    """The nested dicts that were saved; the metadata keeps each tensor's path through them."""
    tree: dict[Any, Any] = {}
    for name, leaf in specs.items():
        first, dot, rest = name.partition(".")
        told = (first, rest) if dot and first.startswith(_BESIDE) else (name,)
        way = paths.get(name, told)
        at = tree
        for part in way[:-1]:
            inner = at.setdefault(part, {})
            if not isinstance(inner, dict):
                inner = at[part] = {}
            at = inner
        at[way[-1]] = leaf
    return tree


# --- the streams -------------------------------------------------------------------------------------------------


class _Slice(io.RawIOBase):
    """A range of an open file, as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (self._length if whence == io.SEEK_END else self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if count < 0 else min(count, left)) or b""
        self._at += len(data)
        return data


def _with_parts(spec: TensorSpec, chunks: list[Chunk], opened: dict[Path, BinaryIO]) -> TensorSpec:
    found = [(chunk, _chunk_spec(spec, chunk, opened)) for chunk in chunks]
    whole = _tile(spec, found, 0, spec.shape)
    return replace(whole, name=spec.name, shape=spec.shape)


def _chunk_spec(spec: TensorSpec, chunk: Chunk, opened: dict[Path, BinaryIO]) -> TensorSpec:
    if chunk.file not in opened:
        opened[chunk.file] = open(chunk.file, "rb", buffering=0)  # noqa: SIM115, closed by resolve
    stream = _Slice(opened[chunk.file], chunk.start, chunk.length)
    tree = read_stream(stream, chunk.file).root  # type: ignore[arg-type]
    if not isinstance(tree, TensorSpec) or (tree.dtype, tree.shape) != (spec.dtype, chunk.shape):
        held = f"{tree.dtype} {list(tree.shape)}" if isinstance(tree, TensorSpec) else "no tensor"
        raise FormatError(
            Problem(
                "metadata",
                f"{chunk.file.name} holds {held} at byte {chunk.start:,}, where the metadata has {spec.dtype} "
                f"{list(chunk.shape)} of {spec.name!r}.",
                tensor=spec.name,
                file=str(chunk.file),
                hint="Metadata and files are of different saves.",
            )
        )
    return replace(tree, name=spec.name, offset=chunk.start + tree.offset, storage=f"{spec.name} {chunk.offsets}")


def _tile(spec: TensorSpec, found: list[tuple[Chunk, TensorSpec]], axis: int, shape: tuple[int, ...]) -> TensorSpec:
    """The chunks as one tensor: joined along ``axis``, each of what is joined cut along the later ones."""
    if len(found) == 1 and found[0][1].shape == shape:
        return found[0][1]
    groups: dict[int, list[tuple[Chunk, TensorSpec]]] = {}
    for chunk, part in found:
        groups.setdefault(chunk.offsets[axis] if axis < len(shape) else 0, []).append((chunk, part))
    parts, at = [], 0
    for offset in sorted(groups):
        size = groups[offset][0][0].shape[axis] if axis < len(shape) else 0
        if offset != at or not size or any(chunk.shape[axis] != size for chunk, _ in groups[offset]):
            break
        parts.append(_tile(spec, groups[offset], axis + 1, (*shape[:axis], size, *shape[axis + 1 :])))
        at += size
    if axis >= len(shape) or at != shape[axis] or len(parts) != len(groups):
        raise FormatError(
            Problem(
                "chunks",
                f"the {len(found)} chunks of {spec.name!r} do not make up {list(shape)}: there are gaps or overlaps.",
                tensor=spec.name,
                file=str(spec.file),
                hint="Was it saved by all ranks?",
            )
        )
    if len(parts) == 1:
        return replace(parts[0], shape=shape)
    first = parts[0]
    return TensorSpec(
        spec.name, spec.dtype, shape, first.file, first.offset, storage=spec.storage, parts=tuple(parts), axis=axis
    )
