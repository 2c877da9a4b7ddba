"""What a pickle's calls would do, seen without doing them: the refusal of files that would run something.

:class:`Refusals` is told every name and every call while a pickle is followed (:mod:`convert.formats.pickles`), judges
the names by :mod:`convert.formats.dangerous_names`, and sees through the few ways in which harmless names reach
others: ``getattr``, ``functools.partial`` and ``reduce``, and attributes set on what the loading program owns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from convert.errors import FormatError, Problem
from convert.formats.dangerous_names import reason, reason_called
from convert.formats.placeholders import GETATTR, ElementType, Known, Placeholder, StorageRef, StorageType

_TYPE = frozenset(("builtins.type", "__builtin__.type"))
_PARTIAL = frozenset(("functools.partial", "_functools.partial"))
#: They call their first argument.
_APPLY = frozenset(
    (
        "functools.reduce",
        "_functools.reduce",
        "__builtin__.reduce",
        "builtins.iter",
        "__builtin__.iter",
        "torch._tensor._rebuild_from_type",
    )
)
_PLAIN = (str, bytes, int, float, complex, list, tuple, dict, type(None))
_MOST_LISTED = 20
_MOST_SHOWN = 4
#: How many values are looked at in search of a hidden ``getattr``; honest files need none or a few.
_MOST_WORK = 2_000_000


class Refusals:
    """What a pickle asks for that nobody should run; empty for an honest file."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self._places: dict[str, tuple[str, str]] = {}
        self._reaches = False
        self._work = 0

    def named(self, module: str, name: str, shown: str) -> None:
        """Judge a name; ``shown`` is its dotted form, safe to print."""
        if shown in GETATTR:
            self._reaches = True
        place = self._places.get(shown)
        if place is None or len(module) < len(place[0]):
            self._places[shown] = (module, name)
        if why := reason(module, name):
            self._add(shown, why)

    def attribute(self, args: tuple[Any, ...]) -> str | None:
        """The dotted name of what ``getattr(*args)`` gives, judged; None for an attribute of plain data."""
        if not 2 <= len(args) <= 3 or type(args[1]) is not str:
            self._add("builtins.getattr", "reaches for a name that is no text")
            return None
        base, attribute = args[:2]
        shown = attribute if attribute.isprintable() else ascii(attribute)
        place = self._places.get(base.name) if isinstance(base, Placeholder) else _place(base)
        if isinstance(base, _PLAIN) or place is None:  # also "bytes" of Python 2 and the like
            if why := reason("object", f"C.{attribute}"):
                self._add(f"the attribute {shown[:100]!r}", why)
            return None
        module, name = place
        path = f"{base.name if isinstance(base, Placeholder) else '.'.join(place)}.{shown}"
        self._places.setdefault(path, (module, f"{name}.{attribute}"))
        instance = isinstance(base, Placeholder) and base.called
        if why := reason(module, f"{name}.{attribute}", of_instance=instance):
            self._add(path, why)
        return path

    def called(self, func: Any, args: Any) -> None:
        """Judge a call of anything but a tensor's maker."""
        if self._reaches:
            self.values(args)
        for _ in range(50):
            if not isinstance(func, Placeholder) or not isinstance(args, tuple):
                return
            if func.name in _TYPE and not func.called and len(args) != 1:
                self._add(func.name, "makes a class")
            if func.name in _APPLY and not func.called and args:
                func, args = args[0], ()
            elif func.name in _PARTIAL and func.called:
                given = func.state if isinstance(func.state, tuple) else func.args
                func = given[0] if isinstance(given, tuple) and given else None
            else:
                break
        if isinstance(func, Placeholder) and not func.called and (why := reason_called(func.name)):
            self._add(func.name, why)

    def values(self, given: Any) -> None:
        """Judge what a call or an object is given: ``getattr`` is only ever called, by honest pickles."""
        if not self._reaches:
            return
        inner = given.values() if isinstance(given, dict) else given if isinstance(given, list | tuple) else (given,)
        for value in inner:
            self._work += 1
            self._hidden((value,))
            if isinstance(value, list | tuple):
                self._hidden(value)
            elif isinstance(value, dict):
                self._hidden(value.values())

    def changed(self, target: Any) -> None:
        """Judge attributes or items set on an object: a name's own object belongs to the program that loads."""
        owned = isinstance(target, Known | StorageType | ElementType)
        if owned or (isinstance(target, Placeholder) and not target.called):
            self._add(target.name, "is changed for the whole program that loads the file")

    def refuse(self, file: str) -> NoReturn:
        """Raise the one error about all that was found.

        Raises:
            FormatError: Always.
        """
        listed = [f"{name[:160]} ({why})" for name, why in list(self.found.items())[:_MOST_SHOWN]]
        more = f" and {len(self.found) - len(listed)} more" if len(self.found) > len(listed) else ""
        raise FormatError(
            Problem(
                "pickle_names",
                f"{file} asks for {', '.join(listed)}{more}: torch.load without weights_only would run it; nothing was "
                "run here.",
                file=file,
                found=[name[:160] for name in self.found],
                wanted="tensors, plain values, and classes of data",
                hint="Do not load the file in torch, and fetch the model from another place, as safetensors where "
                "there is one (torch.load with weights_only=True refuses it, too). If it is a file of your own, save "
                "the state dict alone: torch.save(model.state_dict(), path).",
            )
        )

    def _add(self, name: str, why: str) -> None:
        if len(self.found) < _MOST_LISTED:
            self.found.setdefault(name, why)

    def _hidden(self, values: Iterable[Any]) -> None:
        for value in values:
            self._work += 1
            if isinstance(value, Placeholder) and value.name in GETATTR and not value.called:
                self._add(value.name, "is given away, to reach for names unseen")
            if self._work > _MOST_WORK:
                self._add("builtins.getattr", "is given too much to look through")
                return


def _place(value: Any) -> tuple[str, str]:
    """Module and name of something that the reader knows; of tensors, which are whatever the caller made of them."""
    if isinstance(value, Known):
        module, _, name = value.name.rpartition(".")
        return module, name
    if isinstance(value, StorageType | ElementType):
        return "torch", value.name.rpartition(".")[2]
    return "torch", "UntypedStorage" if isinstance(value, StorageRef) else "Tensor"
