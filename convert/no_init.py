"""Building a module without its random initialisation, for a module that a checkpoint fills next.

Under :func:`no_init` parameters are made on torch's ``meta`` device: they have a shape and a type, but no memory.
Buffers are left alone, so that what a class computes (rotary tables, masks) is real when its constructor returns,
unlike under ``torch.device("meta")``. :func:`convert.load_into` gives the parameters their memory. Nothing is loaded
here.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

_lock = threading.RLock()
_users = 0
_originals: dict[tuple[Any, str], Any] = {}
_patches: dict[tuple[Any, str], Any] = {}


class _Here(threading.local):
    """What this thread is in: how deep, and which parameters it has already moved to ``meta``."""

    depth = 0

    def __init__(self) -> None:
        self.moved: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter]] = {}


_here = _Here()


@contextlib.contextmanager
def no_init() -> Iterator[None]:
    """Build modules without random initialisation; computed buffers stay real.

    Covered:

    * every ``torch.nn.init.*_`` function does nothing to a parameter (and works as always on any other tensor);
    * every :class:`torch.nn.Parameter` that a module takes is replaced by one on ``meta``, whoever made it
      (``torch.nn`` layers, ``nn.Parameter(torch.randn(…))``, ``ParameterList``). One parameter that is given to two
      modules stays one, so a tie made in the constructor is kept;
    * in-place calls on a registered parameter (``self.weight.data.normal_()``) happen on ``meta`` and cost nothing.

    Not covered, and harmless: a tensor that is filled *before* it becomes a parameter
    (``nn.Parameter(torch.randn(…))``) costs the time of filling it; its memory is freed at once. Left as they are:
    subclasses of ``Parameter`` (lazy or quantised ones), and parameters put into ``module._parameters`` by hand. A
    buffer that the constructor computes *from a parameter* ends up on ``meta``; :func:`convert.load_into` reports it.

    Blocks may be nested. The patches are installed for the process while any thread is inside, but act only in the
    threads that are; they are removed when the last one leaves, also by an exception. May be used as a decorator.

    Example:
        >>> with convert.no_init():
        ...     model = Llama3Model(cfg)
        >>> convert.load_into(model, "path/to/checkpoint")
    """
    _install()
    _here.depth += 1
    try:
        yield
    finally:
        _here.depth -= 1
        if _here.depth == 0:
            _here.moved.clear()
        _uninstall()


def _install() -> None:
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        for name in dir(nn.init):
            function = getattr(nn.init, name)
            if name.endswith("_") and not name.startswith("_") and callable(function):
                _patch(nn.init, name, _skipping(function))
        _patch(nn.Module, "register_parameter", _on_meta(nn.Module.register_parameter))


def _patch(owner: Any, name: str, wrapper: Any) -> None:
    _originals[owner, name] = getattr(owner, name)
    _patches[owner, name] = wrapper
    setattr(owner, name, wrapper)


def _uninstall() -> None:
    global _users
    with _lock:
        _users -= 1
        if _users:
            return
        for (owner, name), original in _originals.items():
            # Somebody may have patched on top of us meanwhile; then ours stays below theirs, doing nothing.
            if getattr(owner, name) is _patches[owner, name]:
                setattr(owner, name, original)
        _originals.clear()
        _patches.clear()


def _skipping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if _here.depth and (isinstance(tensor, nn.Parameter) or (isinstance(tensor, torch.Tensor) and tensor.is_meta)):
            return tensor
        return function(*args, **kwargs)

    return wrapper


def _on_meta(register: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(register)
    def wrapper(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, _moved(param) if _here.depth and type(param) is nn.Parameter else param)

    return wrapper


def _moved(param: nn.Parameter) -> nn.Parameter:
    """The parameter's twin on ``meta``; the same one whenever the same parameter comes again."""
    if param.is_meta:
        return param
    known = _here.moved.get(id(param))
    if known is not None and known[0]() is param:
        return known[1]
    twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
    # A weak reference: a strong one would keep the memory that this is meant to save.
    _here.moved[id(param)] = (weakref.ref(param), twin)
    return twin
