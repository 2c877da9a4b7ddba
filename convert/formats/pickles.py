"""A pickle reader that executes nothing: it follows the opcodes and builds only plain data.

Python's pickle format is a small stack language in which a file can ask for any function to be called.
This interpreter knows every opcode but calls nothing: names outside :mod:`convert.formats.placeholders`
become inert :class:`~convert.formats.placeholders.Placeholder` objects, and what would build a tensor is
handed to a callback as numbers. Time and memory are bounded for hostile input: no length is believed that
exceeds the data, nothing is hashed but scalars, sets become lists, and operations are counted.

It does not know zip files (:mod:`convert.formats.torch_zip`) nor what a state dict is
(:mod:`convert.wrappers`). Opcodes: Python's ``pickletools`` documentation.
"""

from __future__ import annotations

import gc
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from convert.errors import FormatError, Problem
from convert.formats import placeholders as names
from convert.formats.dangerous_calls import Refusals
from convert.formats.pickle_ops import I32, MAX_MEMO, U16, U32, StackMachine
from convert.formats.placeholders import ElementType, Known, Placeholder, StorageRef, StorageType

#: A state dict of 100,000 tensors has about 20 MB; one object per operation and 72 bytes each is what the
#: counts below allow, about 250 MB in all.
MAX_BYTES = 32 << 20
MAX_OPERATIONS = 2_500_000
MAX_TENSORS = 200_000
MAX_NAMES = 10_000
MAX_NAME = 1_000
_MAX_DIMS = 64

#: ``(storage, offset, shape, strides, dtype)``, all numbers in elements, to the object that goes in the tree.
TensorBuilder = Callable[[StorageRef, int, tuple[int, ...], tuple[int, ...], str], Any]

# The opcodes of the hot loop, as integers.
_GET, _LONG_GET, _PUT, _LONG_PUT = b"hjqr"
_INT1, _INT2, _INT4, _MARK, _REDUCE, _UNICODE, _PERSID = b"KMJ(RXQ"
_TUPLE, _EMPTY_TUPLE, _TUPLE1, _TUPLE2, _FALSE = b"t)\x85\x86\x89"
_STOP = ord(".")


@dataclass(slots=True)
class Unpickled:
    """What a pickle holds.

    Attributes:
        root: The object, of plain containers and scalars, the builder's tensors, and placeholders.
        placeholders: How often an instance of each unread class was asked for, by dotted name.
    """

    root: Any
    placeholders: dict[str, int] = field(default_factory=dict)


def load(data: bytes, *, tensor: TensorBuilder, file: str, scale: int = 1) -> Unpickled:
    """Read one pickle.

    Args:
        data: The whole pickle.
        tensor: Receives every tensor's numbers; its result stands in the tree.
        file: For error messages.
        scale: How many times the bounds of a state dict are allowed, in bytes, operations and memory.

    Raises:
        FormatError: The pickle is damaged, larger than any state dict, or asks for something that would run.
    """
    check_size(len(data), file=file, scale=scale)
    machine = _Machine(data, tensor, file)
    machine.scale = scale
    collecting = gc.isenabled()
    gc.disable()  # half a million live tuples: each collection would walk them all and free none
    try:
        root = _followed(machine)
    except FormatError:
        if machine.refusals.found:  # worse than being damaged, and Python would run it before it noticed that
            machine.refusals.refuse(file)
        raise
    finally:
        if collecting:
            gc.enable()
    if machine.refusals.found:
        machine.refusals.refuse(file)
    return Unpickled(root, machine.listed)


def _followed(machine: _Machine) -> Any:
    try:
        return machine.run()
    except (IndexError, struct.error):
        raise machine.damage("it ends in the middle, or takes values that are not there") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise machine.damage(f"{type(error).__name__}: {str(error)[:200]}") from None


def check_size(count: int, *, file: str, scale: int = 1) -> None:
    """Refuse a pickle of more bytes than any state dict has, before it is read.

    Raises:
        FormatError: More than ``scale`` times :data:`MAX_BYTES`.
    """
    if count > MAX_BYTES * scale:
        raise _too_large(f"The object tree of {file} has {count:,} bytes", file)


def _too_large(message: str, file: str) -> FormatError:
    hint = "Save the state dict alone (torch.save(model.state_dict(), path)) and convert that."
    return FormatError(Problem("pickle_too_large", f"{message}; no state dict is that large.", file=file, hint=hint))


class _Machine(StackMachine):
    """The frequent opcodes, and what names and calls stand for."""

    def __init__(self, data: bytes, tensor: TensorBuilder, file: str) -> None:
        super().__init__(data, file)
        self.tensor = tensor
        self.tensors = 0
        self.listed: dict[str, int] = {}
        self.refusals = Refusals()
        self.globals: dict[tuple[str, str], Any] = dict(names.KNOWN)
        self.storages: dict[tuple[str, str], StorageRef] = {}

    def run(self) -> Any:
        """Follow the opcodes to STOP. The frequent ones are inline: a large model needs a million of them."""
        data, stack, marks, memo, rare = self.data, self.stack, self.marks, self.memo, self.handlers
        push, pop, call, size, pos = stack.append, stack.pop, self.call, len(self.data), 0
        for _ in range(MAX_OPERATIONS * self.scale):
            op = data[pos]
            pos += 1
            if op == _LONG_PUT:
                (index,) = U32(data, pos)
                if index >= MAX_MEMO * self.scale:
                    self.fail(f"memo number {index:,}")
                memo[index] = stack[-1]
                pos += 4
            elif op == _GET:
                push(memo[data[pos]])
                pos += 1
            elif op == _INT2:
                push(U16(data, pos)[0])
                pos += 2
            elif op == _INT1:
                push(data[pos])
                pos += 1
            elif op == _MARK:
                marks.append(len(stack))
            elif op == _TUPLE2:
                last = pop()
                stack[-1] = (stack[-1], last)
            elif op == _TUPLE:
                start = marks.pop()
                if start > len(stack):
                    self.fail("values from before a MARK were taken after it")
                stack[start:] = [tuple(stack[start:])]
            elif op == _UNICODE:
                end = pos + 4 + U32(data, pos)[0]
                if end > size:
                    self.fail("a text is longer than the data")
                text = str(data[pos + 4 : end], "utf-8")
                push(text if text.isascii() else self.weighed(text))
                pos = end
            elif op == _REDUCE:
                args = pop()
                self.pos = pos
                stack[-1] = call(stack[-1], args)
            elif op == _PERSID:
                stack[-1] = self.storage(stack[-1])
            elif op == _FALSE:
                push(False)
            elif op == _EMPTY_TUPLE:
                push(())
            elif op == _INT4:
                push(I32(data, pos)[0])
                pos += 4
            elif op == _PUT:
                memo[data[pos]] = stack[-1]
                pos += 1
            elif op == _TUPLE1:
                stack[-1] = (stack[-1],)
            elif op == _LONG_GET:
                push(memo[U32(data, pos)[0]])
                pos += 4
            elif op == _STOP:
                self.pos = pos
                return pop()
            else:
                self.pos = pos
                handler = rare.get(op)
                if handler is None:
                    self.fail(f"unknown operation 0x{op:02x}")
                handler()
                pos = self.pos
        raise _too_large(
            f"The object tree of {self.file} needs more than {MAX_OPERATIONS * self.scale:,} operations", self.file
        )

    # --- calls: the only place where a name means something ------------------------------------------------

    def call(self, func: Any, args: Any) -> Any:
        """What REDUCE, OBJ, INST and NEWOBJ give: plain data for known names, else a placeholder."""
        if type(args) is not tuple:
            self.fail("the arguments of a call are no tuple")
        if func is names.REBUILD_V2:
            return self.rebuild(args, 6, None)
        self.refusals.called(func, args)
        if func is names.DICT:
            if not args or args[0] is None or isinstance(args[0], Placeholder | Known):  # a defaultdict's factory
                return {}
            return args[0] if type(args[0]) is dict else self.unread(func.name, args)
        if func is names.REBUILD_V3:
            if not 7 <= len(args) <= 8:
                self.fail("a tensor lacks its numbers")
            return self.rebuild(args[:6] + args[7:], 6, args[6])
        if func is names.PARAMETER or func is names.PARAMETER_WITH_STATE:
            return args[0]
        if func is names.SIZE or func is names.SET:
            return args[0] if args else ()
        if func is names.DEVICE:
            return args[0] if args else "cpu"
        if func is names.FROM_TYPE and args[1] is names.TENSOR_TYPE and isinstance(args[0], Known):
            if args[0] is names.FROM_TYPE:
                self.fail("a tensor type inside a tensor type")
            return self.call(args[0], args[2])
        if func is names.FROM_TYPE:
            self.refusals.called(args[0], args[2])
        if func is names.ENCODE:
            return Placeholder("bytes", called=True, args=args)
        if func is names.RECONSTRUCT and len(args) == 3 and isinstance(args[0], Placeholder):
            made = self.unread(args[0].name, args)  # an object of protocols 0 and 1: class, base, base's value
            made.items = args[2] if type(args[2]) in (dict, list) else None
            return made
        if isinstance(func, Placeholder) and not func.called and func.name in names.GETATTR:
            path = self.refusals.attribute(args)
            return self.unread(func.name, args) if path is None else self.reached(path, args)
        if isinstance(func, Placeholder | Known):
            return self.unread(func.name, args)
        if isinstance(func, StorageType | ElementType):
            return self.unread(f"torch.{func.name}", args)
        self.fail(f"a call of {type(func).__name__}")

    def unread(self, name: str, args: Any) -> Placeholder:
        """A listed placeholder for an instance."""
        self.listed[name] = self.listed.get(name, 0) + 1
        return Placeholder(name, called=True, args=args)

    def reached(self, path: str, args: Any) -> Placeholder:
        """What ``getattr`` finds in a class or an object: a name of its own, such as a class inside a class."""
        self.listed.setdefault(path, 0)
        return Placeholder(path, args=args)

    def rebuild(self, args: tuple[Any, ...], least: int, element: Any) -> Any:
        """A tensor from ``(storage, offset, size, stride, requires_grad, hooks[, metadata])``."""
        if len(args) < least:
            self.fail("a tensor lacks its numbers")
        self.tensors += 1
        if self.tensors > MAX_TENSORS:
            self.fail(f"more than {MAX_TENSORS:,} tensors")
        storage, offset, shape, strides = args[:4]
        if type(storage) is not StorageRef or type(offset) is not int:
            self.fail("a tensor without a storage")
        if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides):
            self.fail("a tensor's shape and strides do not fit each other")
        if len(shape) > _MAX_DIMS:
            self.fail(f"a tensor of {len(shape)} dimensions")
        if len(args) > 6 and args[6]:  # lazily conjugated or negated: the stored numbers are not its values
            return self.unread("torch._utils._rebuild_tensor with a pending conjugation or negation", ())
        dtype = storage.dtype
        if element is not None:
            if type(element) is not ElementType:
                self.fail("a tensor's type is no torch.dtype")
            if element.dtype is None:
                return self.unread(f"torch._utils._rebuild_tensor of torch.{element.name}", ())
            dtype = element.dtype
        return self.tensor(storage, offset, shape, strides, dtype)

    def storage(self, pid: Any) -> StorageRef:
        """A storage from its persistent id ``("storage", class, key, location, numel)``."""
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage":
            self.fail("a persistent id that is no storage")
        kind, key, _, numel = pid[1:]
        if isinstance(kind, Placeholder):
            kind = StorageType(kind.name, kind.name)  # a quantised storage: an error only if a tensor uses it
        if type(kind) is not StorageType or type(key) is not str or type(numel) is not int or numel < 0:
            self.fail("a storage without type, key or size")
        found = self.storages.get((key, kind.dtype))
        if found is None:
            found = self.storages[key, kind.dtype] = StorageRef(key, kind.dtype, numel, kind.untyped)
        elif found.numel != numel or found.untyped != kind.untyped:
            self.fail(f"storage {key[:100]!r} is said to have both {found.numel} and {numel} elements")
        return found

    def named(self, module: Any, name: Any) -> Any:
        """What stands for ``module.name``; nothing is imported."""
        if type(module) is not str or type(name) is not str:
            self.fail("a name that is no text")
        found = self.globals.get((module, name))
        if found is None:
            if len(module) + len(name) > MAX_NAME:
                self.fail("a name of more than a thousand characters")
            if len(self.globals) > MAX_NAMES:
                self.fail("more than ten thousand different names")
            dotted = f"{module}.{name}"  # a hostile name may hold terminal escapes
            found = self.globals[module, name] = Placeholder(dotted if dotted.isprintable() else ascii(dotted))
            self.listed.setdefault(found.name, 0)
            self.refusals.named(module, name, found.name)
        return found

    def changed(self, target: Any, values: Any) -> None:
        """Attributes or items are about to be set."""
        self.refusals.changed(target)
        self.refusals.values(values)
