"""What Python code does with a checkpoint from somebody: the library's functions, run as if they were commands.

An error is told as the command line tells it, so that the same bars hold; what else comes out of a call is a traceback.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import Any

from convert.cli import _show
from convert.errors import ConvertError


def _module() -> Any:
    """A module with the sound model's parameters, under its names, all zeros."""
    import torch

    from tests.trust.hostile import base

    model: Any = torch.nn.Module()
    model.config = dict(base.CONFIG)
    for name, shape in base.SHAPES.items():
        at: Any = model
        *way, leaf = name.split(".")
        for part in way:
            if part not in at._modules:
                at.add_module(part, torch.nn.Module())
            at = at._modules[part]
        at.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape), requires_grad=False))
    return model


def load_into(src: str, _: str) -> None:
    """Fill a module; one that was refused must not have changed."""
    import convert

    model = _module()
    try:
        convert.load_into(model, src)
    except ConvertError:
        changed = [name for name, value in model.named_parameters() if value.any()]
        if changed:
            raise AssertionError(f"a refused checkpoint changed {changed[0]}") from None
        raise


def open_checkpoint(src: str, _: str) -> None:
    """Open it, and read every tensor as it is stored."""
    import convert
    from convert.source import read_rows

    with convert.open_checkpoint(src) as opened:
        repr(opened), opened._repr_html_()
        opened.require_sound()
        for _name, source in opened.reference_tensors():
            read_rows(source, 0, source.shape[0])


def scratch_config(src: str, _: str) -> None:
    """The dict of the book's classes."""
    import convert

    convert.load_scratch_config(src)


def compare_tensors(src: str, good: str) -> None:
    """Tensor by tensor."""
    import convert

    with convert.open_checkpoint(src) as a, convert.open_checkpoint(good) as b:
        convert.compare_tensors(a, b)


def noted_imports() -> list[str]:
    """From now on: the imports of torch, or of a module that has it; both are there already, so nothing else tells."""
    seen: list[str] = []
    imports = builtins.__import__

    def noting(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "torch" or hasattr(sys.modules.get(name), "torch"):
            seen.append(name)
        return imports(name, *rest, **more)

    builtins.__import__ = noting
    return seen


#: Name → what is called with the input and a sound model.
CALLS: dict[str, Callable[[str, str], None]] = {
    "load-into": load_into,
    "open": open_checkpoint,
    "scratch-config": scratch_config,
    "compare-tensors": compare_tensors,
}


def main(argv: Sequence[str]) -> int:
    """Call it; the exit code of a command."""
    name, src, good = argv
    try:
        CALLS[name](src, good)
    except ConvertError as error:
        _show(error, False)
        return error.exit_code
    return 0
