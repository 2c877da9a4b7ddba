"""Opens GGUF files, whole or split, as a :class:`~convert.formats.spec.Container`.

Headers only, by our own parser (:mod:`convert.formats.gguf_header`); shapes are turned to torch order. What the
tensors mean belongs to the tables in ``mappings/``, what their blocks hold to :mod:`convert.quants`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from convert.dtypes import DTYPES
from convert.errors import FormatError, Problem
from convert.formats.gguf_header import SPOILT, Header, TensorInfo, padded, read_header
from convert.formats.spec import Container, TensorSpec
from convert.ggml import TYPE_IDS

TYPE_NAMES = {number: name for name, number in TYPE_IDS.items()}

#: Type ids of ggml that no file of today's llama.cpp has, or that we cannot read, for the message.
_OTHER_TYPES = {
    4: "Q4_2, removed in 2023",
    5: "Q4_3, removed in 2023",
    31: "Q4_0_4_4, removed in 2024",
    32: "Q4_0_4_8, removed in 2024",
    33: "Q4_0_8_8, removed in 2024",
    36: "IQ4_NL_4_4, removed in 2024",
    37: "IQ4_NL_4_8, removed in 2024",
    38: "IQ4_NL_8_8, removed in 2024",
    41: "Q1_0",
    42: "Q2_0",
}

#: ggml keeps names in 64 bytes with the closing zero.
MAX_NAME = 63
_MOST = 2**63 - 1  # of elements and of bytes: readers count both in 64 bits with a sign
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")


def read(path: Path) -> Container:
    """Open a GGUF file, any piece of a split one, or a folder that holds exactly one of either.

    Args:
        path: The file or folder.

    Returns:
        A container of format ``gguf``; ``metadata`` is a :class:`~convert.formats.gguf_values.KeyValues` (of a split
        model: the first piece's, without the ``split.*`` keys).

    Raises:
        FormatError: Every problem of all pieces: damaged, truncated, missing, inconsistent.
    """
    if path.is_dir():
        path = _only_model(path)
    header = read_header(path)
    headers = [header]
    if _number(header, "split.count") > 1:
        headers = _pieces(header)
    problems: list[Problem] = []
    tensors: dict[str, TensorSpec] = {}
    for piece in headers:
        for spec in _tensors(piece, problems):
            if spec.name in tensors:
                problems.append(_duplicate(spec, tensors[spec.name]))
            tensors[spec.name] = spec
    if len(headers) > 1:
        problems += _check_split(headers, len(tensors))
    if problems:
        raise FormatError(problems)
    metadata = headers[0].metadata
    notes = _notes(headers)
    if len(headers) > 1:
        notes.append(f"split into {len(headers)} files")
        for key in SPLIT_KEYS:
            metadata.drop(key)
    return Container("gguf", tuple(h.path for h in headers), tensors, metadata, notes)


def _duplicate(spec: TensorSpec, first: TensorSpec) -> Problem:
    return Problem(
        "duplicate_tensor",
        f"{spec.name!r} occurs twice, in {first.file.name} and in {spec.file.name}.",
        tensor=spec.name,
        file=str(spec.file),
        hint=SPOILT,
    )


def _tensors(header: Header, problems: list[Problem]) -> Iterator[TensorSpec]:
    """The file's tensors; a tensor with a problem is reported and left out."""
    expected: int | None = 0
    for info in header.infos:
        found = _check_info(header, info)
        nbytes = None
        if found is None:
            shape = tuple(reversed(info.dims))
            kind = DTYPES[TYPE_NAMES[info.type_id]]
            nbytes = math.prod(info.dims) // kind.block * kind.block_bytes
            found = _check_place(header, info, nbytes, expected)
        # After a tensor of unknown size the running sum is unknown too: take it up at the next one.
        expected = None if nbytes is None else info.offset + padded(nbytes, header.alignment)
        if found is not None:
            problems.append(found)
            continue
        yield TensorSpec(info.name, kind.name, shape, header.path, header.data_start + info.offset)


def _check_info(header: Header, info: TensorInfo) -> Problem | None:
    name = TYPE_NAMES.get(info.type_id)
    where = {"tensor": info.name, "file": str(header.path)}
    if name is None:
        known = _OTHER_TYPES.get(info.type_id)
        what = f"type {info.type_id} ({known})" if known else f"the unknown type id {info.type_id}"
        hint = "Quantise the original model again." if known and "removed" in known else "A newer version may read it."
        return Problem(
            "type", f"{info.name!r} has {what}, which is not readable here.", found=info.type_id, hint=hint, **where
        )
    kind = DTYPES[name]
    count = math.prod(max(d, 1) for d in info.dims)  # a dimension of 0 hides none of the others
    if count > _MOST or count // kind.block * kind.block_bytes > _MOST:
        what = f"{info.name!r} has dimensions {list(info.dims)}, whose product overflows 63 bits."
        return Problem("shape", what, hint=SPOILT, **where)
    block = kind.block
    if block > 1 and (not info.dims or info.dims[0] % block):
        row = info.dims[0] if info.dims else 1
        return Problem(
            "shape",
            f"{info.name!r} is {name} with rows of {row:,} elements, not a multiple of the block of {block}.",
            found=row,
            wanted=f"a multiple of {block}",
            hint=SPOILT,
            **where,
        )
    return None


def _check_place(header: Header, info: TensorInfo, nbytes: int, expected: int | None) -> Problem | None:
    where = {"tensor": info.name, "file": str(header.path)}
    if info.offset % header.alignment:
        return Problem(
            "offset",
            f"{info.name!r} lies at offset {info.offset:,}, not a multiple of the alignment {header.alignment}.",
            found=info.offset,
            wanted=f"a multiple of {header.alignment}",
            hint=SPOILT,
            **where,
        )
    if expected is not None and info.offset != expected:
        what = "overlaps the tensor before it" if info.offset < expected else "leaves a gap after the tensor before it"
        return Problem(
            "offset",
            f"{info.name!r} {what}: offset {info.offset:,}, wanted {expected:,} (the padded sizes so far).",
            found=info.offset,
            wanted=expected,
            hint="llama.cpp refuses such a file too; it was not written by a sound tool.",
            **where,
        )
    end = header.data_start + info.offset + nbytes
    if end > header.size:
        return Problem(
            "truncated",
            f"{header.path.name} ends {end - header.size:,} bytes early: {info.name!r} needs bytes up to {end:,}, "
            f"the file has {header.size:,}.",
            found=header.size,
            wanted=end,
            hint="The download or copy is incomplete; get the file again.",
            **where,
        )
    return None


def _notes(headers: Sequence[Header]) -> list[str]:
    notes = []
    for header in headers:
        long = [info.name for info in header.infos if len(info.name.encode("utf-8", "surrogateescape")) > MAX_NAME]
        if long:
            notes.append(f"{header.path.name}: {len(long)} names are too long for llama.cpp ({long[0]!r})")
        last = max(
            (i.offset + padded(_nbytes(i), header.alignment) for i in header.infos if i.type_id in TYPE_NAMES),
            default=0,
        )
        extra = header.size - header.data_start - last
        if extra > 0 and header.infos:
            notes.append(f"{header.path.name}: {extra:,} bytes follow the last tensor")
    return notes


def _nbytes(info: TensorInfo) -> int:
    kind = DTYPES[TYPE_NAMES[info.type_id]]
    return math.prod(info.dims) // kind.block * kind.block_bytes


# ---- split files -----------------------------------------------------------------------------------------------


def split_name(stem: str, number: int, count: int) -> str:
    """The name of piece ``number`` (from 0) of ``count``: ``stem-00001-of-00003.gguf``."""
    return f"{stem}-{number + 1:05d}-of-{count:05d}.gguf"


def parse_split_name(name: str) -> tuple[str, int, int] | None:
    """``(stem, number from 0, count)`` of a split file's name, or None."""
    body, dot, ending = name.rpartition(".")
    if not dot or ending != "gguf":
        return None
    parts = body.rsplit("-", 3)
    if len(parts) != 4 or parts[2] != "of":
        return None
    number, count = parts[1], parts[3]
    digits = number.isascii() and number.isdigit() and count.isascii() and count.isdigit()
    if not digits or len(number) != 5 or len(count) != 5 or not 1 <= int(number) <= int(count):
        return None
    return parts[0], int(number) - 1, int(count)


def _only_model(folder: Path) -> Path:
    """The one model in a folder: a file, or the first piece that is there of a split one."""
    models: dict[tuple[str, int], Path] = {}
    for path in sorted(folder.glob("*.gguf")):
        parsed = parse_split_name(path.name)
        models.setdefault((parsed[0], parsed[2]) if parsed else (path.name, 0), path)
    if len(models) != 1:
        names = ", ".join(path.name for path in models.values())
        message = f"{folder} holds {len(models)} GGUF models ({names})." if models else f"{folder} holds no GGUF file."
        hint = "Name the one you mean." if models else None
        raise FormatError(Problem("which_file", message, file=str(folder), hint=hint))
    return next(iter(models.values()))


def _number(header: Header, key: str) -> int:
    value = header.metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _pieces(header: Header) -> list[Header]:
    """Every piece of a split model, given one."""
    path, count = header.path, _number(header, "split.count")
    parsed = parse_split_name(path.name)
    if parsed is None or parsed[2] != count:
        raise FormatError(
            Problem(
                "split_name",
                f"{path.name} is one of {count} pieces (split.count), but its name does not say which.",
                file=str(path),
                wanted=split_name("NAME", _number(header, "split.no"), count),
                hint="Give the pieces back the names they were published under.",
            )
        )
    names = [split_name(parsed[0], number, count) for number in range(count)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise FormatError(
            Problem(
                "missing_file",
                f"{len(missing)} of {count} pieces are missing beside {path.name}: {', '.join(missing[:8])}"
                + (" …" if len(missing) > 8 else "")
                + ".",
                file=str(path.parent / missing[0]),
                found=count - len(missing),
                wanted=count,
                hint="Put all pieces into one folder.",
            )
        )
    headers: list[Header] = []
    problems: list[Problem] = []
    for number, name in enumerate(names):
        if number == parsed[1]:
            headers.append(header)
            continue
        try:
            headers.append(read_header(path.parent / name))
        except FormatError as error:
            problems += error.problems
    if problems:
        raise FormatError(problems)
    return headers


def _check_split(headers: Sequence[Header], tensors: int) -> list[Problem]:
    """Whether the pieces' own numbers agree with their names and with each other."""
    problems = []
    for number, header in enumerate(headers):
        wanted = {"split.no": number, "split.count": len(headers)}
        for key, value in wanted.items():
            found = header.metadata.get(key)
            if found != value:
                problems.append(
                    Problem(
                        "split",
                        f"{header.path.name} says {key} = {found}, wanted {value}: the pieces do not belong together.",
                        file=str(header.path),
                        found=found,
                        wanted=value,
                        hint="Put the pieces of one model into one folder, and no others.",
                    )
                )
    total = headers[0].metadata.get("split.tensors.count")
    infos = sum(len(h.infos) for h in headers)
    if total is not None and total != infos:
        problems.append(
            Problem(
                "split",
                f"{headers[0].path.name} says split.tensors.count = {total}, the pieces hold {infos} tensors.",
                file=str(headers[0].path),
                found=infos,
                wanted=total,
                hint="Put the pieces of one model into one folder, and no others.",
            )
        )
    return problems
