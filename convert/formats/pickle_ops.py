"""The opcodes of the pickle format that are rare in a checkpoint, and the primitives they share.

:mod:`convert.formats.pickles` derives its interpreter from :class:`StackMachine`, adds the frequent opcodes
inline and says what a name or a call means. Nothing here imports, calls or hashes what a file names, and
every value made is bounded by the bytes it consumes (opcodes: Python's ``pickletools``).
"""

from __future__ import annotations

import codecs
import pickle
import struct
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

from convert.errors import FormatError, Problem
from convert.formats.placeholders import Placeholder

MAX_MEMO = 1_000_000
#: Python stores one rare letter's whole text with four bytes a letter: the sum of such texts is bounded.
MAX_WIDE_TEXT = 100 << 20

U32 = struct.Struct("<I").unpack_from
U16 = struct.Struct("<H").unpack_from
I32 = struct.Struct("<i").unpack_from
U64 = struct.Struct("<Q").unpack_from
F64 = struct.Struct(">d").unpack_from


class StackMachine(ABC):
    """The stack, the marks, the memo, and every opcode that needs no speed.

    Attributes:
        pos: The next byte, valid when a handler runs.
        scale: How many times the usual bounds are allowed.
        handlers: The handler of each opcode in this class, by its byte.
    """

    def __init__(self, data: bytes, file: str) -> None:
        self.data = data
        self.file = file
        self.pos = 0
        self.scale = 1
        self.wide = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.handlers: dict[int, Callable[[], None]] = {
            code: getattr(self, name) for name, codes in _HANDLERS.items() for code in codes
        }

    @abstractmethod
    def call(self, func: Any, args: Any) -> Any:
        """What a call of ``func`` stands for."""

    @abstractmethod
    def named(self, module: Any, name: Any) -> Any:
        """What stands for ``module.name``."""

    @abstractmethod
    def changed(self, target: Any, values: Any) -> None:
        """Attributes or items are about to be set on an object."""

    def damage(self, why: str) -> FormatError:
        """The error for a pickle that cannot be followed."""
        return FormatError(
            Problem(
                "pickle_damaged",
                f"The object tree of {self.file} is damaged near byte {self.pos:,} of {len(self.data):,} ({why}).",
                file=self.file,
                hint="Download or save the file again.",
            )
        )

    def fail(self, why: str) -> NoReturn:
        """Raise :meth:`damage`."""
        raise self.damage(why)

    def take(self, width: int, read: Callable[[bytes, int], tuple[Any, ...]]) -> Any:
        """One fixed-width number."""
        value = read(self.data, self.pos)[0]
        self.pos += width
        return value

    def byte(self) -> int:
        """One byte."""
        self.pos += 1
        return self.data[self.pos - 1]

    def block(self, count: int) -> bytes:
        """``count`` bytes, never more than there are."""
        end = self.pos + count
        if count < 0 or end > len(self.data):
            self.fail(f"a value of {count:,} bytes is longer than the data")
        start, self.pos = self.pos, end
        return self.data[start:end]

    def line(self) -> bytes:
        """A text line without its newline."""
        end = self.data.find(b"\n", self.pos)
        if end < 0:
            self.fail("a text line does not end")
        start, self.pos = self.pos, end + 1
        return self.data[start:end]

    def weighed(self, text: str) -> str:
        """A text whose memory is counted."""
        if not text.isascii():
            self.wide += sys.getsizeof(text)
            if self.wide > MAX_WIDE_TEXT:
                self.fail(f"more than {MAX_WIDE_TEXT >> 20} MB of text")
        return text

    def since_mark(self) -> list[Any]:
        """The values pushed since the last MARK."""
        start = self.marks.pop()
        if start > len(self.stack):
            self.fail("values from before a MARK were taken after it")
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, index: int) -> None:
        """Remember the top of the stack."""
        if not 0 <= index < MAX_MEMO * self.scale:
            self.fail(f"memo number {index:,}")
        self.memo[index] = self.stack[-1]

    def key(self, key: Any) -> Any:
        """A dict key that hashes in constant time (a nested tuple, a crafted integer need not)."""
        kind = type(key)
        if kind in (str, bool, float, bytes) or key is None or (kind is int and -(1 << 63) <= key < 1 << 63):
            return key
        return key if isinstance(key, Placeholder) else Placeholder("key", args=(key,))

    def extend_dict(self, target: Any, flat: list[Any]) -> None:
        """SETITEM, SETITEMS, DICT."""
        if len(flat) % 2:
            self.fail("a key without a value")
        if type(target) is not dict:
            self.changed(target, flat)
        if isinstance(target, Placeholder):
            if target.items is None:
                target.items = {}
            target = target.items
        if type(target) is not dict:
            self.fail(f"items for {type(target).__name__}")
        for at in range(0, len(flat), 2):
            target[flat[at] if type(flat[at]) is str else self.key(flat[at])] = flat[at + 1]

    def extend_list(self, target: Any, items: list[Any]) -> None:
        """APPEND, APPENDS, ADDITEMS."""
        if type(target) is not list:
            self.changed(target, items)
        if isinstance(target, Placeholder):
            if target.items is None:
                target.items = []
            target = target.items
        if type(target) is not list:
            self.fail(f"elements for {type(target).__name__}")
        target.extend(items)

    def op_number(self) -> None:
        """INT and LONG, as text."""
        text = self.line().rstrip(b"L")
        self.stack.append({b"00": False, b"01": True}.get(text) if text in (b"00", b"01") else int(text))

    def op_long(self) -> None:
        """LONG1 and LONG4, little-endian two's complement."""
        width = self.byte() if self.data[self.pos - 1] == 0x8A else self.take(4, I32)
        self.stack.append(int.from_bytes(self.block(width), "little", signed=True))

    def op_text(self) -> None:
        """SHORT_BINUNICODE and BINUNICODE8."""
        count = self.byte() if self.data[self.pos - 1] == 0x8C else self.take(8, U64)
        self.stack.append(self.weighed(str(self.block(count), "utf-8")))

    def op_bytes(self) -> None:
        """SHORT_BINBYTES, BINBYTES, BINBYTES8, BYTEARRAY8."""
        code = self.data[self.pos - 1]
        count = self.byte() if code == 0x43 else self.take(4, U32) if code == 0x42 else self.take(8, U64)
        self.stack.append(self.block(count))

    def op_string(self) -> None:
        """STRING, BINSTRING and SHORT_BINSTRING of Python 2."""
        code = self.data[self.pos - 1]
        if code == 0x53:
            text = self.line()
            if len(text) < 2 or text[:1] not in (b"'", b'"') or text[-1:] != text[:1]:
                self.fail("a text without quotes")
            raw = codecs.escape_decode(text[1:-1])[0]
        else:
            raw = self.block(self.byte() if code == 0x55 else self.take(4, I32))
        self.stack.append(str(raw, "latin-1"))

    def op_global(self) -> None:
        """GLOBAL."""
        module = str(self.line(), "utf-8")
        self.stack.append(self.named(module, str(self.line(), "utf-8")))

    def op_stack_global(self) -> None:
        """STACK_GLOBAL."""
        name = self.stack.pop()
        self.stack[-1] = self.named(self.stack[-1], name)

    def op_inst(self) -> None:
        """INST."""
        module = str(self.line(), "utf-8")
        func = self.named(module, str(self.line(), "utf-8"))
        self.stack.append(self.call(func, tuple(self.since_mark())))

    def op_obj(self) -> None:
        """OBJ."""
        func, *args = self.since_mark()
        self.stack.append(self.call(func, tuple(args)))

    def op_newobj(self) -> None:
        """NEWOBJ; and NEWOBJ_EX, whose keywords are kept beside the arguments."""
        keywords = self.stack.pop() if self.data[self.pos - 1] == 0x92 else None
        args = self.stack.pop()
        made = self.stack[-1] = self.call(self.stack[-1], args)
        if keywords is not None and isinstance(made, Placeholder):
            self.changed(made, keywords)
            made.args = (args, keywords)  # nested, not joined: joining would copy a large tuple each time

    def op_build(self) -> None:
        """BUILD: a placeholder keeps the state; attributes of plain data mean nothing here."""
        state = self.stack.pop()
        self.changed(self.stack[-1], state)
        if isinstance(self.stack[-1], Placeholder):
            self.stack[-1].state = state

    def op_dict(self) -> None:
        """DICT."""
        made: dict[Any, Any] = {}
        self.extend_dict(made, self.since_mark())
        self.stack.append(made)

    def op_setitem(self) -> None:
        """SETITEM."""
        value, key = self.stack.pop(), self.stack.pop()
        self.extend_dict(self.stack[-1], [key, value])

    def op_setitems(self) -> None:
        """SETITEMS."""
        items = self.since_mark()
        self.extend_dict(self.stack[-1], items)

    def op_append(self) -> None:
        """APPEND."""
        value = self.stack.pop()
        self.extend_list(self.stack[-1], [value])

    def op_appends(self) -> None:
        """APPENDS and, since sets are lists here, ADDITEMS."""
        items = self.since_mark()
        self.extend_list(self.stack[-1], items)

    def op_list(self) -> None:
        """LIST and, since sets are lists here, FROZENSET."""
        self.stack.append(self.since_mark())

    def op_tuple3(self) -> None:
        """TUPLE3."""
        if len(self.stack) < 3:
            self.fail("too few values on the stack")
        items = tuple(self.stack[-3:])
        self.stack[-3:] = [items]

    def op_pop(self) -> None:
        """POP, which takes a MARK when that is on top."""
        if self.marks and self.marks[-1] == len(self.stack):
            self.marks.pop()
        else:
            self.stack.pop()

    def op_frame(self) -> None:
        """FRAME: a length that must not exceed the data."""
        if self.take(8, U64) > len(self.data) - self.pos:
            self.fail("a frame is longer than the data")

    def op_proto(self) -> None:
        """PROTO."""
        if (version := self.byte()) > pickle.HIGHEST_PROTOCOL:
            self.fail(f"pickle protocol {version}")

    def op_refused(self) -> None:
        """PERSID as text, extension codes, out-of-band buffers: torch writes none of them."""
        if self.data[self.pos - 1] in b"\x82\x83\x84":
            self.named("copyreg", "_extension_registry")  # a number that stands for any name at all
        self.fail(f"operation 0x{self.data[self.pos - 1]:02x}, which torch.save never writes")

    def op_constant(self) -> None:
        """NONE, NEWTRUE, and the empty containers that are rare."""
        code = self.data[self.pos - 1]
        self.stack.append([] if code in b"]\x8f" else {} if code == 0x7D else True if code == 0x88 else None)

    def op_float(self) -> None:
        """FLOAT as text and BINFLOAT."""
        text = self.data[self.pos - 1] == 0x46
        self.stack.append(float(self.line()) if text else self.take(8, F64))

    def op_unicode(self) -> None:
        """UNICODE."""
        self.stack.append(self.weighed(str(self.line(), "raw-unicode-escape")))

    def op_dup(self) -> None:
        """DUP."""
        self.stack.append(self.stack[-1])

    def op_pop_mark(self) -> None:
        """POP_MARK."""
        self.since_mark()

    def op_get(self) -> None:
        """GET."""
        self.stack.append(self.memo[int(self.line())])

    def op_put(self) -> None:
        """PUT."""
        self.put(int(self.line()))

    def op_memoize(self) -> None:
        """MEMOIZE."""
        self.put(len(self.memo))


#: Handlers and their opcodes.
_HANDLERS: dict[str, bytes] = {
    "op_append": b"a",
    "op_appends": b"e\x90",
    "op_build": b"b",
    "op_bytes": b"CB\x8e\x96",
    "op_constant": b"N]}\x88\x8f",
    "op_dict": b"d",
    "op_dup": b"2",
    "op_float": b"FG",
    "op_frame": b"\x95",
    "op_get": b"g",
    "op_global": b"c",
    "op_inst": b"i",
    "op_list": b"l\x91",
    "op_long": b"\x8a\x8b",
    "op_memoize": b"\x94",
    "op_newobj": b"\x81\x92",
    "op_number": b"IL",
    "op_obj": b"o",
    "op_pop": b"0",
    "op_pop_mark": b"1",
    "op_proto": b"\x80",
    "op_put": b"p",
    "op_refused": b"P\x82\x83\x84\x97\x98",
    "op_setitem": b"s",
    "op_setitems": b"u",
    "op_stack_global": b"\x93",
    "op_string": b"STU",
    "op_text": b"\x8c\x8d",
    "op_tuple3": b"\x87",
    "op_unicode": b"V",
}
