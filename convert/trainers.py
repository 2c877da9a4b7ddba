"""Names checkpoints of trainers that hold a model in pieces or in another shape, and says how to get it out.

DeepSpeed (ZeRO), Megatron, sharded tensors of FSDP, whole pickled modules, and folders that hold a trainer's
checkpoints. What one file holds whole is read by :mod:`convert.wrappers`; nothing is read here but names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from convert.errors import FormatError, Problem, UsageError
from convert.formats.placeholders import TENSOR_MAKERS, Placeholder, as_mapping
from convert.formats.spec import TensorSpec

_ZERO = (
    "Make one file of it with the script that lies in the checkpoint: `python zero_to_fp32.py FOLDER OUT` (FOLDER is "
    "the one with the file `latest`), put the model's config beside it, and convert OUT."
)
_MEGATRON = (
    "Bring it into Hugging Face's layout with Megatron's own tools (Megatron Bridge: export_ckpt; or "
    "tools/checkpoint/convert.py with the saver for it), and convert that."
)
_SHARDED = (
    "Save whole tensors: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
    "StateDictOptions(full_state_dict=True, cpu_offload=True)), or save with torch.distributed.checkpoint."
)
_LISTED = 12
_DEPTH = 5
_MOST_LEAVES = 100_000
#: Names of parts of layers that only Megatron has.
_MEGATRON_PARTS = ("self_attention.query_key_value.", "self_attention.linear_qkv.", "mlp.dense_h_to_4h.")


def refuse_folder(folder: Path, names: list[Path]) -> None:
    """Stop at folders of DeepSpeed and Megatron, and at those that hold nothing but a trainer's checkpoints.

    Args:
        folder: What was given.
        names: The files in it that may be weights.

    Raises:
        FormatError: One of the first two.
        UsageError: There are checkpoints in folders below.
    """
    zero = [p for p in names if p.name.endswith(("_model_states.pt", "_optim_states.pt"))]
    steps = [] if names else sorted(p.name for p in folder.glob("global_step*") if p.is_dir())
    if zero or steps:
        raise FormatError(
            _problem(
                "deepspeed",
                f"{folder.name} is a checkpoint of DeepSpeed, whose weights lie in pieces, one per rank.",
                folder,
                found=[p.name for p in zero[:4]] or steps[-1],
                hint=_ZERO + " With ZeRO stage 1 or 2, mp_rank_00_model_states.pt alone can be converted as well.",
            )
        )
    megatron = (folder / "latest_checkpointed_iteration.txt").is_file()
    if megatron or any(p.name in ("model_optim_rng.pt", "model_rng.pt") for p in names) or _ranks(folder, names):
        raise FormatError(
            _problem("megatron", f"{folder.name} is a checkpoint of Megatron-LM.", folder, found=None, hint=_MEGATRON)
        )
    if names:
        return
    steps = sorted((p.name for p in folder.glob("checkpoint-*") if p.is_dir()), key=lambda n: (len(n), n))
    if steps:
        raise UsageError(
            f"no weights in {folder}, but checkpoints of a trainer in folders below: {', '.join(steps[-8:])}.",
            hint=f"Give one of them, for example {folder / steps[-1]}.",
        )


def _ranks(folder: Path, names: list[Path]) -> bool:
    return not names and any((p / "model_optim_rng.pt").is_file() for p in folder.glob("mp_rank_*"))


def refuse_megatron(tree: Any, file: str | None) -> None:
    """Stop where a torch file's tensors are named as Megatron names them.

    Raises:
        FormatError: They are.
    """
    named = next(
        (
            n
            for n, leaf in _leaves(tree)
            if isinstance(leaf, TensorSpec) and any(part in f"{n}." for part in _MEGATRON_PARTS)
        ),
        None,
    )
    if named is not None:
        said = f"This is a checkpoint of Megatron-LM, by the name {named[:80]!r}."
        raise FormatError(_problem("megatron", said, file, found=named, hint=_MEGATRON))


def refuse_pieces(tree: Any, state: Mapping[Any, Any], file: str | None) -> None:
    """Stop where the dict that was taken for a model is one rank's piece of it.

    Args:
        tree: All that the file holds.
        state: That dict.
        file: For the message.

    Raises:
        FormatError: It is.
    """
    tensors = {str(n): leaf for n, leaf in state.items() if isinstance(leaf, TensorSpec)}
    empty = [n for n, spec in tensors.items() if spec.shape == (0,)]
    if _is_zero(tree) and len(empty) * 2 > len(tensors) > 0:
        said = f"This file of a DeepSpeed checkpoint holds names only ({len(empty)} empty tensors; ZeRO stage 3)."
        raise FormatError(_problem("deepspeed", said, file, found=len(empty), hint=_ZERO))
    flat = next((n for n in tensors if n.rpartition(".")[2] in ("_flat_param", "flat_param")), None)
    if flat is not None:
        said = f"{flat!r} is a flat parameter of FSDP: one rank's part of many tensors in a row."
        raise FormatError(_problem("sharded_tensors", said, file, found=flat, hint=_SHARDED))


def _is_zero(tree: Any) -> bool:
    return isinstance(tree, Mapping) and ("ds_version" in tree or "ds_config" in tree)


def no_model(tree: Any, key: str, value: Any, where: str | None) -> FormatError:
    """Why there is no state dict: a whole pickled module, one rank's tensors, only an optimizer, or nothing."""
    sharded = [name for name, leaf in _leaves(tree) if _is_sharded(leaf)]
    if len(sharded) > 1:
        said = (
            f"The {len(sharded)} tensors of the file are distributed ones (DTensor or ShardedTensor), of which it "
            f"holds one rank's part: {sharded[0]!r} …"
        )
        return FormatError(_problem("sharded_tensors", said, where, found=len(sharded), hint=_SHARDED))
    if _is_zero(tree):
        said = "This file of a DeepSpeed checkpoint holds optimizer state in pieces, one per rank."
        return FormatError(_problem("deepspeed", said, where, found=None, hint=_ZERO))
    module = next(_modules(value if key else tree), None)
    at = f" under {key!r}" if key else ""
    if module is not None:
        return FormatError(
            Problem(
                "whole_model",
                f"The file holds a whole pickled Python object ({module.name}){at}, not a state dict; "
                "reading it would mean executing its code, which is never done.",
                file=where,
                found=module.name,
                wanted="a dict of tensors",
                hint="Where its class is importable, save the weights alone: torch.save(model.state_dict(), path).",
            )
        )
    items = as_mapping(value)
    keys = [str(name)[:60] for name in items][:_LISTED] if items else []
    kind = type(value).__name__
    alone = {"TensorSpec": "one tensor without a name", "NoneType": "nothing", "int": "a number", "float": "a number"}
    empty = "an empty" if isinstance(value, (dict, list, tuple)) and not value else "a"
    what = f"it holds {', '.join(map(repr, keys)) or alone.get(kind, f'{empty} {kind}')}"
    return FormatError(
        Problem(
            "no_tensors",
            f"There is no state dict in the file{at}: {what}.",
            file=where,
            found=keys or alone.get(kind, kind),
            wanted="a dict of tensors",
            hint="An optimizer or scheduler file holds no model; give the file that does.",
        )
    )


def _modules(value: Any) -> Iterator[Placeholder]:
    """Unread objects that have parameters or submodules, at the top or one or two levels below."""
    level, seen = [value], 0
    for _ in range(3):
        below: list[Any] = []
        for item in level:
            if (
                isinstance(item, Placeholder)
                and item.fields
                and not {"_parameters", "_modules"}.isdisjoint(item.fields)
            ):
                yield item
            elif (items := as_mapping(item)) is not None:
                below += items.values()
            seen += 1
            if seen > 10_000:
                return
        level = below
    if isinstance(value, Placeholder) and value.called:
        yield value


def _is_sharded(leaf: Any) -> bool:
    made = isinstance(leaf, Placeholder) and leaf.called and leaf.name.startswith(TENSOR_MAKERS)
    return made and ("_rebuild_from_type" in leaf.name or "distributed" in leaf.name)


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """``(name, leaf)`` of a dict and of those below, optimizers passed over; a hostile tree is not walked whole."""
    level: list[Any] = [tree]
    seen: set[int] = set()
    count = 0
    for _ in range(_DEPTH):
        below: list[Any] = []
        for items in level:
            if not isinstance(items, Mapping) or id(items) in seen:
                continue
            seen.add(id(items))
            for name, value in items.items():
                count += 1
                if count > _MOST_LEAVES:
                    return
                if isinstance(value, Mapping):
                    if not (isinstance(name, str) and name.startswith("optim")):
                        below.append(value)
                elif isinstance(name, str):
                    yield name[:200], value
        level = below


def _problem(kind: str, message: str, file: Path | str | None, *, found: Any, hint: str) -> Problem:
    return Problem(
        kind, message, file=str(file) if file is not None else None, found=found, wanted="a model", hint=hint
    )
