"""Changes the metadata of a GGUF file, in place when the new header fits before the data.

There is no legal filler in a GGUF header, so spare bytes are kept in a string key of our own, ``convert.padding``,
which grows and shrinks. When nothing fits, the file is copied, with spare room for the next edit, and renamed into
place. Tensors and their order never change.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.formats.gguf import SPLIT_KEYS
from convert.formats.gguf_header import Header, padded, read_header
from convert.formats.gguf_values import KeyValues, Str, Value, encode

PADDING_KEY = "convert.padding"

#: Spare bytes left in a header that had to be rewritten with the data; a chat template fits.
ROOM = 4096
_COPY = 8 << 20

#: What other bytes of the file depend on.
_FIXED = frozenset({"general.alignment", *SPLIT_KEYS})
_ARCHITECTURE = "general.architecture"


@dataclass(frozen=True, slots=True)
class Edit:
    """A planned change of metadata.

    Attributes:
        header: The header as it is.
        metadata: The new key-values, the padding included.
        head: The new file up to its data.
        in_place: Whether ``head`` is exactly as long as what stands before the data now.
    """

    header: Header
    metadata: KeyValues
    head: bytes
    in_place: bool


def plan_edit(path: Path, changes: Mapping[str, Value | None], *, room: int = ROOM) -> Edit:
    """Work out the new header of ``path``; writes nothing.

    Args:
        path: One GGUF file (of a split model: the piece that is to be changed, the first one as a rule).
        changes: New values by key; None removes the key. Existing keys keep their place, new ones go last.
        room: Spare bytes for later edits when the data has to move.

    Raises:
        ConvertError: The file is damaged, a key fixes other bytes of the file, or a value does not fit its type.
    """
    header = read_header(path)
    fixed = sorted(_FIXED & changes.keys())
    if fixed:
        raise UsageError(
            Problem(
                "metadata",
                f"{', '.join(fixed)} cannot be changed by itself: the places of the tensors depend on it.",
                file=str(path),
                hint="Write the file anew with `convert gguf-to-gguf`.",
            )
        )
    if changes.get(_ARCHITECTURE, "") is None:
        raise UsageError(
            Problem(
                "metadata",
                f"{_ARCHITECTURE} cannot be removed: nothing could read the file any more.",
                file=str(path),
                hint="Set it to another name instead.",
            )
        )
    values = header.metadata.copy()
    values.drop(PADDING_KEY)
    for key, value in changes.items():
        if value is None:
            values.drop(key)
        else:
            values.put(key, value)
    with path.open("rb") as file:
        file.seek(header.infos_at)
        infos = file.read(header.end - header.infos_at)
    try:
        return _fit(header, values, infos, room)
    except ValueError as error:
        raise ConvertError(Problem("metadata", f"the metadata value {error}.", file=str(path))) from None


def _fit(header: Header, values: KeyValues, infos: bytes, room: int) -> Edit:
    body = b"".join(encode(key, value) for key, value in values.typed())
    bare = 24 + len(body) + len(infos)
    if padded(bare, header.alignment) == header.data_start:
        return Edit(header, values, _head(header, len(values), body, infos, header.data_start), True)
    frame = len(encode(PADDING_KEY, Str("")))
    in_place = bare + frame <= header.data_start
    start = header.data_start if in_place else padded(bare + frame + room, header.alignment)
    filler = Str(" " * (start - bare - frame))
    values.put(PADDING_KEY, filler)
    body += encode(PADDING_KEY, filler)
    return Edit(header, values, _head(header, len(values), body, infos, start), in_place)


def _head(header: Header, count: int, body: bytes, infos: bytes, start: int) -> bytes:
    head = b"".join(
        [
            b"GGUF",
            header.version.to_bytes(4, "little"),
            len(header.infos).to_bytes(8, "little"),
            count.to_bytes(8, "little"),
            body,
            infos,
        ]
    )
    return head + bytes(start - len(head))


def set_metadata(path: Path, changes: Mapping[str, Value | None], *, room: int = ROOM) -> bool:
    """Change the metadata of one GGUF file.

    The header is written over the old one when it fits; otherwise a copy with the new header takes the file's
    place when it is complete (it needs that much free space).

    Args:
        path: See :func:`plan_edit`.
        changes: See :func:`plan_edit`.
        room: See :func:`plan_edit`.

    Returns:
        Whether the edit was made in place.

    Raises:
        ConvertError: See :func:`plan_edit`; the file is then unchanged. Also when the file cannot be written.
    """
    edit = plan_edit(path, changes, room=room)
    try:
        if edit.in_place:
            with path.open("r+b") as file:
                file.write(edit.head)
                file.flush()
                os.fsync(file.fileno())
        else:
            _rewrite(path, edit)
    except OSError as error:
        raise ConvertError(
            Problem("unwritable", f"{path} cannot be changed: {error.strerror or error}.", file=str(path))
        ) from None
    return edit.in_place


def _rewrite(path: Path, edit: Edit) -> None:
    target = path.resolve()  # a link keeps pointing at the file
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with target.open("rb") as source, temporary.open("xb") as out:
            out.write(edit.head)
            source.seek(edit.header.data_start)
            shutil.copyfileobj(source, out, _COPY)
            out.flush()
            os.fsync(out.fileno())
        shutil.copymode(target, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
