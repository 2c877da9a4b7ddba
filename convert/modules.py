"""A live module filled straight from a checkpoint of any layout, streaming, without a second copy of the model.

Everything is checked first: names, shapes and types of every tensor, ties, what would stay on ``meta``. Then each
value moves from its file into the parameter's own memory. Writing a module out is :mod:`convert.saving`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from convert.checkpoint import Checkpoint, open_checkpoint
from convert.devices import pick_device
from convert.dtypes import TORCH_NAMES
from convert.errors import ConvertError, Problem, UsageError
from convert.filling import fill_all
from convert.layout import Key
from convert.losses import loss_notes, lost
from convert.module_fit import Fit, fit
from convert.module_tensors import FLOATS, TYPES, Home, config_of, distinct, torch_dtype
from convert.plan import slot_source
from convert.report import fold_problems
from convert.run import casts_within
from convert.source import Source

_OPTIONS = ("family", "config", "size", "key", "qk_layout", "context", "follow_links")


@dataclass(slots=True)
class LoadReport:
    """What :func:`load_into` did.

    Attributes:
        missing_keys: Parameters of the module that got nothing (``strict=False``).
        unexpected_keys: Tensors of the checkpoint that have no place in the module (``strict=False``).
        mismatched_keys: Always empty: a wrong shape stops. There for code that reads all four.
        ignored_keys: Tensors that the family's table drops, with the reason in :attr:`notes`.
        tied: Whether head and embedding of the checkpoint are one.
        shared: Whether they are one parameter of the module now.
        notes: Everything assumed, converted, dropped or left alone.
        nbytes: Bytes of the filled tensors.
        seconds: Wall time.
    """

    missing_keys: list[str] = field(default_factory=list)
    unexpected_keys: list[str] = field(default_factory=list)
    mismatched_keys: list[str] = field(default_factory=list)
    ignored_keys: list[str] = field(default_factory=list)
    tied: bool = False
    shared: bool = False
    notes: list[str] = field(default_factory=list)
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Task:
    """One tensor to fill: a module's memory and where its values come from."""

    home: Home
    source: Source


def load_into(
    model: nn.Module,
    src: str | Path | Checkpoint,
    *,
    layout: str | None = None,
    names: str | Path | None = None,
    source_names: str | Path | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    tie: str = "share",
    strict: bool = True,
    threads: int = 2,
    **options: Any,
) -> LoadReport:
    """Fill a module from a checkpoint of any layout and format.

    Every tensor's name, shape and type is checked before a byte is copied; on any finding the module is as it was.
    Values go into the existing parameters, in the parameters' own types, converted on the way (rotary order,
    dequantisation, element type). Parameters on ``meta`` (:func:`convert.no_init`) get their memory here. Buffers that
    the checkpoint does not hold (masks, rotary tables) keep their values.

    Args:
        model: The module. Its names tell its layout: the book's, Hugging Face's, Meta's, or the ones of ``names``.
        src: A folder or file of any layout, or an opened checkpoint.
        layout: Layout of the *module's* names (``scratch``, ``hf``, ``meta``) where it shall not be detected. The
            source's is always detected.
        names: A names file for a module with names of its own; it also states the order of its rotary pairs.
        source_names: The names file of a source with names of its own; ``names`` is tried where this is not given.
        device: Where the module shall be (``auto``: the best there is). Parameters and buffers move there; without it
            everything stays where it is.
        dtype: Type of the parameters, instead of their own. Buffers keep theirs. The book's classes cast by
            ``model.cfg["dtype"]``, which is then replaced too (in a copy of the dict).
        tie: ``"share"``: where head and embedding of the checkpoint are one, the module's head becomes its embedding's
            parameter. ``"copy"``: it is filled as a parameter of its own.
        strict: Whether a parameter that gets nothing, and a tensor without a place, are errors. Wrong shapes always
            are.
        threads: How many pieces are moved at once.
        **options: What the source's files do not say: ``family``, ``config`` (a path or a dict), ``size``, ``key``,
            ``qk_layout``, ``context``, ``follow_links``, as for :func:`convert.open_checkpoint`. Without a config the
            module's own (``model.cfg``, ``model.config``) is used.

    Returns:
        What was done, with every assumption.

    Raises:
        UsageError: An option does not fit.
        ConvertError: The checkpoint is damaged, or does not fit the module (all findings at once); or a value does not
            fit the parameter's type, or the file ended early — only then the module is partly filled.
    """
    started = time.perf_counter()
    if tie not in ("share", "copy"):
        raise UsageError(f"tie={tie!r} is not known.", hint='tie="share" or tie="copy".')
    wanted = torch_dtype(dtype)
    place = None if device is None else pick_device(str(device))
    opened = _open(model, src, names, source_names, options)
    try:
        found = fit(opened, model, layout=layout, names=names, strict=strict, dtype=wanted)
        found.check_tie()
        problems = [*opened.match.problems, *found.problems]
        if problems:
            raise ConvertError(fold_problems(problems))
        report = _report(opened, found)
        tasks = _tasks(opened, found, tie, wanted, report)
        _materialise(model, found, tasks, place, wanted, report)
        fill_all(((t.home.tensor, t.source) for t in tasks), opened.pool, threads)
        if report.shared:
            _share(found)
        _check_losses(tasks, report)
    finally:
        if opened is not src:
            opened.close()
    for text in found.warnings:
        warnings.warn(text, stacklevel=2)
    report.seconds = time.perf_counter() - started
    return report


def check_module(
    ckpt: Checkpoint, model: nn.Module, *, layout: str | None = None, names: str | Path | None = None
) -> list[Problem]:
    """Why :func:`load_into` would refuse this pair, beyond what is wrong with the checkpoint (``ckpt.match.problems``).

    Reads no weights, except head and embedding where the module has them tied or has no head.

    Args:
        ckpt: The opened checkpoint.
        model: The module.
        layout: Layout of the module's names, where it shall not be detected.
        names: A names file for a module with names of its own.
    """
    try:
        found = fit(ckpt, model, layout=layout, names=names)
        if found.head is not None and found.base is not None and found.head.home is found.base.home:
            found.check_tie()
    except ConvertError as error:
        return list(error.problems)
    return fold_problems(found.problems)


def _open(
    model: nn.Module,
    src: str | Path | Checkpoint,
    names: str | Path | None,
    source_names: str | Path | None,
    options: dict[str, Any],
) -> Checkpoint:
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UsageError(f"load_into has no option {unknown[0]!r}.", hint=f"Known: {', '.join(_OPTIONS)}.")
    chosen = {k: v for k, v in options.items() if v is not None}
    if isinstance(src, Checkpoint):
        if chosen or source_names:
            raise UsageError("options of the source were given with a checkpoint that is open already.")
        return src
    if source_names is not None:
        chosen["names"] = source_names
    for _ in range(2):
        try:
            return open_checkpoint(src, **chosen)
        except ConvertError as error:
            kinds = {(p.kind, p.wanted if isinstance(p.wanted, str) else None) for p in error.problems}
            own = config_of(model)
            if names is not None and "names" not in chosen and any(k == "unknown_names" for k, _ in kinds):
                chosen["names"] = names
            elif own is not None and not {"config", "size"} & set(chosen) and ("config", "a config") in kinds:
                chosen["config"] = own
            else:
                raise
    return open_checkpoint(src, **chosen)


def _report(opened: Checkpoint, found: Fit) -> LoadReport:
    matched = opened.match
    dropped = sorted({reason for _, reason in matched.ignored})
    return LoadReport(
        missing_keys=list(found.missing),
        unexpected_keys=list(found.unexpected),
        ignored_keys=[name for name, _ in matched.ignored],
        notes=[*opened.notes, *matched.notes, *(f"ignored: {reason}" for reason in dropped), *found.notes],
    )


def _tasks(opened: Checkpoint, found: Fit, tie: str, dtype: torch.dtype | None, report: LoadReport) -> list[_Task]:
    """What is to be filled, each piece of memory once."""
    report.tied = found.tied
    head, base = found.head, found.base
    together = found.tied and head is not None and base is not None and head.home is not base.home
    if together and tie == "share":
        assert head is not None and base is not None
        alike = dtype is not None or head.home.tensor.dtype == base.home.tensor.dtype
        report.shared = alike and head.home.parameter and base.home.parameter
        if report.shared:
            report.notes.append(f"tied: {head.slot.name} is now the parameter {base.slot.name}")
        else:
            report.notes.append(f"tied, but {head.slot.name} has another type than {base.slot.name}: filled as a copy")
    elif head is not None and base is not None and head.home is base.home:
        report.shared = True
    tasks, seen = [], set()
    for pair in found.pairs:
        skipped = pair is head and report.shared
        if id(pair.home) in seen or skipped:
            continue
        seen.add(id(pair.home))
        kind = TYPES[dtype] if dtype is not None and pair.home.parameter else pair.home.dtype
        source = slot_source(opened, pair.slot, table=found.table, layout=found.layout, dtype=kind)
        tasks.append(_Task(pair.home, source))
    _note_types(opened, found, tasks, report)
    return tasks


def _note_types(opened: Checkpoint, found: Fit, tasks: list[_Task], report: LoadReport) -> None:
    stored: dict[Key, str] = {k: s.dtype for k, s in opened.match.logical.items()}
    changes = sorted({(stored.get(p.slot.keys[0], "?"), TYPES[p.home.tensor.dtype]) for p in found.pairs})
    for a, b in changes:
        if a not in FLOATS and a != "?":
            report.notes.append(f"{a} tensors are dequantised")
        elif a != b and a != "?":
            report.notes.append(f"{TORCH_NAMES[a]} tensors are converted to the module's {TORCH_NAMES.get(b, b)}")
    to = found.table.convention_of(found.layout, "rope")
    if opened.pairing != to:
        report.notes.append(f"rows of Q and K are put from {opened.pairing} into {to} order")
    report.nbytes = sum(t.source.row_bytes * t.source.shape[0] for t in tasks)


def _materialise(
    model: nn.Module,
    found: Fit,
    tasks: list[_Task],
    device: torch.device | None,
    dtype: torch.dtype | None,
    report: LoadReport,
) -> None:
    """Give every tensor its memory, on its device and in its type; parameters stay the objects they are if they can."""
    filled = {id(t.home) for t in tasks}
    every = distinct(found.homes.values())
    place = _default_device(every) if device is None else device
    for home in every:
        old = home.tensor
        target = place if device is not None or old.is_meta else old.device
        kind = dtype if dtype is not None and home.parameter and old.dtype.is_floating_point else old.dtype
        kept = id(home) not in filled
        if old.is_meta and kept:
            continue  # a head that becomes the embedding
        if not old.is_meta and _same_device(old.device, target) and kind == old.dtype:
            continue
        # What is filled next needs memory only; the rest (buffers, parameters under strict=False) keeps its values.
        fresh = torch.empty(old.shape, dtype=kind, device=target)
        if kept:
            fresh.copy_(old.detach())
        _put(home, fresh)
    if dtype is not None:
        _retype_config(model, dtype, report)


def _default_device(every: list[Home]) -> torch.device:
    """Where parameters from ``meta`` go: to the rest of the module, if that is in one place."""
    devices = {home.tensor.device for home in every if not home.tensor.is_meta}
    return devices.pop() if len(devices) == 1 else torch.get_default_device()


def _same_device(a: torch.device, b: torch.device) -> bool:
    return a.type == b.type and (b.index is None or a.index == b.index)


def _put(home: Home, fresh: Tensor) -> None:
    """Let every place of ``home`` have ``fresh`` as its memory."""
    made: dict[int, nn.Parameter] = {}
    for owner, leaf in home.places:
        old = owner._parameters[leaf] if home.parameter else None
        if old is None:
            owner._buffers[leaf] = fresh
        elif id(old) in made:
            owner._parameters[leaf] = made[id(old)]
        elif old.is_meta:
            made[id(old)] = owner._parameters[leaf] = nn.Parameter(fresh, requires_grad=old.requires_grad)
        else:
            old.data = fresh  # as Module.to does: an optimizer that holds it goes on holding it
    home.tensor = fresh


def _retype_config(model: nn.Module, dtype: torch.dtype, report: LoadReport) -> None:
    """The book's classes cast by ``cfg["dtype"]`` in forward; the dict itself may be shared, so it is copied."""
    for module in model.modules():
        cfg = module.__dict__.get("cfg")
        if isinstance(cfg, dict) and isinstance(cfg.get("dtype"), torch.dtype) and cfg["dtype"] != dtype:
            report.notes.append(f"the module's cfg['dtype'] is {dtype} now, it was {cfg['dtype']}")
            module.cfg = {**cfg, "dtype": dtype}


def _share(found: Fit) -> None:
    head, base = found.head, found.base
    assert head is not None and base is not None
    if head.home is base.home:
        return
    owner, leaf = base.home.places[0]
    for other, name in head.home.places:
        other._parameters[name] = owner._parameters[leaf]


def _check_losses(tasks: list[_Task], report: LoadReport) -> None:
    problems = []
    for task in tasks:
        for cast in casts_within(task.source):
            if cast.loss.overflowed:
                name = task.home.names[0]
                problems.append(
                    Problem(
                        "overflow",
                        f"{name!r}: {cast.loss.overflowed:,} values are too large for {TORCH_NAMES[cast.dtype]} and "
                        "became infinite; the module is filled, and is not usable.",
                        tensor=name,
                        found=cast.loss.overflowed,
                        wanted=0,
                        hint="Load with dtype=torch.bfloat16 or torch.float32.",
                    )
                )
    if problems:
        raise ConvertError(fold_problems(problems))
    report.notes += loss_notes(lost((task.home.names[0], task.source) for task in tasks), option="dtype =")


__all__ = ["LoadReport", "check_module", "load_into"]
