"""RoPE settings of families whose kinds of layers turn differently: one set of settings per kind.

The hub's form is transformers 5's nested ``rope_parameters``: ``{"full_attention": {…}, "sliding_attention": {…}}``.
The table's ``[rope.<kind>]`` sections say which kinds a family has, what a config that is silent means, and what other
spellings call each field. One set of settings, its types and its fields are :mod:`convert.rope`'s matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert import rope
from convert.errors import ConvertError, Problem, TableError

#: Settings by kind of layer.
Layered = dict[str, rope.Rope]


@dataclass(frozen=True, slots=True)
class RopeKind:
    """What a table says about the RoPE of one kind of layers.

    Attributes:
        default: Settings where a config says nothing (``rope_theta`` at least).
        names: Layout, then field, to the keys that hold it, the one that is written first. Under ``hf`` stand the
            keys of transformers 4, at the top of ``config.json``.
        scaled: Whether the unnamed scaling of older spellings (``rope_scaling``, GGUF's ``rope.scaling.*``) is meant
            for this kind.
        head_dim: The dim that is the size of a head of this kind of layer.
    """

    default: Mapping[str, Any]
    names: Mapping[str, Mapping[str, tuple[str, ...]]]
    scaled: bool = False
    head_dim: str = "hd"


def read_section(section: Mapping[str, Any], source: str) -> dict[str, RopeKind]:
    """The ``[rope]`` section of a table.

    Raises:
        TableError: It is not of the form above.
    """
    out = {}
    for kind, value in section.items():
        where = f"{source}: rope.{kind}"
        if not isinstance(value, Mapping) or not isinstance(value.get("default"), Mapping):
            raise TableError(f"{where}: needs default = {{ rope_theta = … }}.")
        names: dict[str, Mapping[str, tuple[str, ...]]] = {}
        for layout, fields in value.items():
            if layout in ("default", "scaled", "head_dim"):
                continue
            if layout not in ("hf", "scratch", "gguf") or not isinstance(fields, Mapping):
                raise TableError(f"{where}: {layout!r} is none of default, scaled, hf, scratch, gguf.")
            names[layout] = {f: tuple(k) if isinstance(k, list) else (k,) for f, k in fields.items()}
        out[kind] = RopeKind(value["default"], names, bool(value.get("scaled")), str(value.get("head_dim", "hd")))
    return out


def read(
    kinds: Mapping[str, RopeKind],
    layout: str,
    raw: Mapping[str, Any],
    *,
    arch: str = "",
    scaling: Mapping[str, Any] | None = None,
    context: int | None = None,
) -> Layered:
    """Settings of every kind of layer.

    Args:
        kinds: The table's ``[rope]``.
        layout: Whose spelling ``raw`` is in.
        raw: The config as its file holds it.
        arch: What ``{arch}`` in GGUF's keys stands for.
        scaling: Unnamed scaling, meant for the kinds that are ``scaled``.
        context: ``max_position_embeddings``.

    Raises:
        ConvertError: Two spellings disagree, settings are flat or of other kinds, or are not supported.
    """
    nested = raw.get("rope_parameters")
    nested = _checked(kinds, nested) if nested is not None else None
    out: Layered = {}
    for kind, told in kinds.items():
        stated = {k: v for k, v in (scaling or {}).items() if k != "rope_theta"} if told.scaled else {}
        stated |= _stated(told.names.get(layout, {}), raw, arch)
        stated.setdefault("rope_type", stated.pop("type", None))
        stated = {k: v for k, v in stated.items() if v is not None}
        if nested is not None and nested.get(kind) is not None:
            out[kind] = rope.clean(_filled(told, nested[kind]), told.default["rope_theta"], context=context)
            _compare(kind, stated, out[kind], context)
        else:
            out[kind] = rope.clean(_filled(told, stated), told.default["rope_theta"], context=context)
    return out


def _checked(kinds: Mapping[str, RopeKind], nested: Any) -> Mapping[str, Any]:
    good = isinstance(nested, Mapping) and all(v is None or isinstance(v, Mapping) for v in nested.values())
    if not good or set(nested) - set(kinds):
        raise ConvertError(
            Problem(
                "rope",
                f"rope_parameters must have one set of settings per kind of layer ({', '.join(kinds)}) in this "
                f"family, and is {nested!r}.",
                found=nested,
                wanted=list(kinds),
                hint="transformers leaves settings that stand there flat unused; put them under the kind they are for.",
            )
        )
    return nested  # type: ignore[no-any-return]


def _stated(names: Mapping[str, tuple[str, ...]], raw: Mapping[str, Any], arch: str) -> dict[str, Any]:
    out = {}
    for field, keys in names.items():
        value = next((raw[k] for k in (key.replace("{arch}", arch) for key in keys) if raw.get(k) is not None), None)
        if value is not None:
            out[field] = value
    return out


def _filled(told: RopeKind, stated: Mapping[str, Any]) -> dict[str, Any]:
    """The default's scaling belongs to its type: it fills nothing where another type is stated."""
    kind = stated.get("rope_type", stated.get("type"))
    if kind is None or kind == told.default.get("rope_type"):
        return {**told.default, **stated}
    return {"rope_theta": told.default["rope_theta"], **stated}


def _compare(kind: str, older: Mapping[str, Any], new: rope.Rope, context: int | None) -> None:
    """An older spelling beside the nested one must say the same."""
    if not older:
        return
    both = {**new, **older} if "rope_type" not in older else {"rope_theta": new["rope_theta"], **older}
    old = rope.clean(both, new["rope_theta"], context=context)
    if old != new:
        raise ConvertError(
            Problem(
                "rope",
                f"config.json states the RoPE of {kind} layers twice and differently: {old} and {new}.",
                found=old,
                wanted=new,
                hint="Delete the wrong one; transformers itself would pick one silently.",
            )
        )


def to_hf(kinds: Mapping[str, RopeKind], settings: Layered) -> dict[str, Any]:
    """Both spellings, equal; transformers 4's only where the family has keys for it there."""
    out: dict[str, Any] = {"rope_parameters": {kind: dict(value) for kind, value in settings.items()}}
    for kind, told in kinds.items():
        for field, keys in told.names.get("hf", {}).items():
            if field in settings[kind]:
                out[keys[0]] = settings[kind][field]
    for kind, told in kinds.items():  # one key for several kinds cannot say different things
        for field, keys in told.names.get("hf", {}).items():
            if out.get(keys[0]) != settings[kind].get(field):
                out.pop(keys[0], None)
    for kind, told in kinds.items():
        if told.scaled and "hf" in told.names:
            scaling = {k: v for k, v in settings[kind].items() if k != "rope_theta"}
            out["rope_scaling"] = None if settings[kind]["rope_type"] == "default" else scaling
    return out


def to_scratch(kinds: Mapping[str, RopeKind], settings: Layered, *, reference: bool = False) -> dict[str, Any]:
    """For the book's dict.

    Raises:
        ConvertError: The book's class has no word for a setting (our own reference class takes ``rope_parameters``).
    """
    out: dict[str, Any] = {}
    whole = False
    for kind, told in kinds.items():
        names = told.names.get("scratch", {})
        for field, value in settings[kind].items():
            if field in names and out.get(names[field][0], value) == value:
                out[names[field][0]] = value
            elif field in names or value != told.default.get(field, "default" if field == "rope_type" else None):
                if not reference:
                    raise ConvertError(
                        Problem(
                            "rope",
                            f"the book's class has no word for {field} = {value!r} of {kind} layers.",
                            found=value,
                            hint="--allow-reference writes it for our own reference class.",
                        )
                    )
                whole = True
    return {**out, **({"rope_parameters": {k: dict(v) for k, v in settings.items()}} if whole else {})}


def to_gguf(kinds: Mapping[str, RopeKind], settings: Layered, arch: str) -> dict[str, float]:
    """Fields by GGUF key, beside the first kind's ``rope.freq_base`` and scaling; all are float32 there.

    Raises:
        ConvertError: A setting of another kind that GGUF has no key for.
    """
    out: dict[str, float] = {}
    for number, (kind, told) in enumerate(kinds.items()):
        names = told.names.get("gguf", {})
        for field, value in settings[kind].items():
            if field in names:
                out[names[field][0].replace("{arch}", arch)] = float(value)
            elif number and value != told.default.get(field, "default" if field == "rope_type" else None):
                raise ConvertError(
                    Problem(
                        "rope",
                        f"GGUF has no key for {field} = {value!r} of {kind} layers in this architecture.",
                        found=value,
                        wanted=told.default.get(field, "default"),
                    )
                )
    return out
