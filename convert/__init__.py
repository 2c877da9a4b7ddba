"""Checkpoint conversion between Meta, Hugging Face, from-scratch and GGUF layouts, in bounded memory, verified.

The public API; everything is imported on first use, so that ``import convert`` costs nothing and torch is loaded only
by what runs a model.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "open_checkpoint": "convert.checkpoint",
    "Checkpoint": "convert.checkpoint",
    "convert_checkpoint": "convert.conversion",
    "plan_conversion": "convert.conversion",
    "inspect": "convert.inspect",
    "validate": "convert.validate",
    "check": "convert.check",
    "verify": "convert.verify",
    "diagnose": "convert.diagnose",
    "diff": "convert.diff",
    "compare_tensors": "convert.tensor_comparison",
    "verify_engine": "convert.verify_engine",
    "push": "convert.hub.push",
    "repair": "convert.repair",
    "generate": "convert.generate",
    "load_into": "convert.modules",
    "save_model": "convert.saving",
    "no_init": "convert.no_init",
    "load_scratch_config": "convert.scratch_config",
    "ConvertError": "convert.errors",
    "UsageError": "convert.errors",
    "Problem": "convert.errors",
}

__all__ = [
    "Checkpoint",
    "ConvertError",
    "Problem",
    "UsageError",
    "__version__",
    "check",
    "compare_tensors",
    "convert_checkpoint",
    "diagnose",
    "diff",
    "generate",
    "inspect",
    "load_into",
    "load_scratch_config",
    "no_init",
    "open_checkpoint",
    "plan_conversion",
    "push",
    "repair",
    "save_model",
    "validate",
    "verify",
    "verify_engine",
]

if TYPE_CHECKING:
    from convert.check import check
    from convert.checkpoint import Checkpoint, open_checkpoint
    from convert.conversion import convert_checkpoint, plan_conversion
    from convert.diagnose import diagnose
    from convert.diff import diff
    from convert.errors import ConvertError, Problem, UsageError
    from convert.generate import generate
    from convert.hub.push import push
    from convert.inspect import inspect
    from convert.modules import load_into
    from convert.no_init import no_init
    from convert.repair import repair
    from convert.saving import save_model
    from convert.scratch_config import load_scratch_config
    from convert.tensor_comparison import compare_tensors
    from convert.validate import validate
    from convert.verify import verify
    from convert.verify_engine import verify_engine


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """A function that shares its module's name (convert.verify) is what ``convert.verify`` means, always.

    Python binds a submodule to its package whenever anything imports it, which would hide the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
