"""An opened checkpoint: headers, config, layout and family. Nothing but headers is read on opening.

:func:`open_checkpoint` is the one way in, for every layout and format. Matching the tensors with the family's table
is :mod:`convert.match`; this module decides what the source *is*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from convert import config as configs
from convert.choices import require_choice, require_positive
from convert.detect import candidates, detect, refuse_special, stated_family
from convert.errors import ConvertError, FormatError, Problem, UsageError
from convert.float8_scales import attach_scales
from convert.formats.readers import read_container
from convert.formats.spec import Container, TensorSpec
from convert.gguf_record import record_of
from convert.hub.place import Place, named, place
from convert.index_size import total_size_notes
from convert.layout import Dims
from convert.locate import RECORD_NAME, Found, audit_index, locate
from convert.names import load_names, names_table
from convert.opening import find_config, hub_config
from convert.other_heads import refuse_other_heads, refuse_other_models
from convert.prefixes import aliased, chosen_part, common_first_parts
from convert.record import is_of
from convert.record_checks import damage
from convert.source import FilePool, Source
from convert.stamps import Stamp, stamps
from convert.table import LAYOUTS, MappingTable
from convert.two_configs import disagreement

if TYPE_CHECKING:
    from convert.match import Match


@dataclass(slots=True)
class Options:
    """What a user can say about a source that its files do not (the ``--family`` … options).

    Attributes:
        layout: Layout of the names.
        family: Family of the model.
        names: A names file, or the name of a ready-made one.
        config: A config file of any spelling, or such a config as a dict.
        size: A published size that fills a missing config.
        key: Which dict of a training checkpoint.
        qk_layout: ``"meta"`` or ``"hf"``: the order Q and K really are in, whatever the names say.
        tie: ``"share"`` accepts a missing head as tied; ``"copy"`` keeps an equal head as a tensor of its own.
        context: Maximum positions, where the source does not say.
        table: A family's table that is not among ours.
        follow_links: Follow links that lead out of the folder (:mod:`convert.links`).
    """

    layout: str | None = None
    family: str | None = None
    names: str | Path | None = None
    config: str | Path | Mapping[str, Any] | None = None
    size: str | None = None
    key: str | None = None
    qk_layout: str | None = None
    tie: str | None = None
    context: int | None = None
    table: MappingTable | None = None
    follow_links: bool = False

    def __post_init__(self) -> None:
        """Refuse values that an option does not have."""
        require_choice("layout", self.layout, LAYOUTS)
        require_choice("qk_layout", self.qk_layout, ("meta", "hf"))
        require_choice("tie", self.tie, ("share", "copy"))
        require_positive("context", self.context)


@dataclass
class Checkpoint:
    """A checkpoint, opened.

    Attributes:
        path: What was opened.
        format: ``safetensors``, ``torch``, ``gguf`` or ``tensorflow``.
        layout: ``hf``, ``meta``, ``scratch``, ``gguf`` or ``openai``.
        table: The family's table.
        config: The hub config: ``config.json`` names, RoPE in one form.
        raw_config: The config as its file holds it.
        tensors: Tensor name → its parts (one, or one per model-parallel file).
        files: All weight files.
        record: What an earlier conversion wrote beside the weights.
        notes: Everything assumed, stripped or left alone.
        pairing: The order of rotary rows in Q and K as stored: ``half`` or ``interleaved``.
        stamps: What the weight files were before anything was read from them.
        origin: The repository on the Hub and its commit, if it comes from there: ``repo``, ``commit``, ``inside``.
        remote_files: Name, bytes and SHA-256 of its weight files, as the Hub states them.
        called: What the user called it there.
        only_samples: Samples decide whether two tensors are one (head and embedding, repeated heads), not every byte:
            for a look or a plan that is not carried out. To be set before anything is matched.
    """

    path: Path
    format: str
    layout: str
    table: MappingTable
    config: dict[str, Any]
    raw_config: dict[str, Any]
    tensors: dict[str, list[TensorSpec]]
    files: list[Path]
    folder: Path
    record: dict[str, Any]
    pairing: str
    options: Options
    metadata: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    pool: FilePool = field(default_factory=FilePool)
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    origin: Mapping[str, Any] = field(default_factory=dict)
    remote_files: list[dict[str, Any]] = field(default_factory=list)
    called: str | None = None
    only_samples: bool = False

    @property
    def title(self) -> str:
        """What a user calls it: the path, or the name on the Hub that they wrote."""
        return self.called or str(self.path)

    @property
    def family(self) -> str:
        """The family's name."""
        return self.table.family

    @property
    def dtype(self) -> str:
        """The type that most bytes of the weights have."""
        return _common_type(self.tensors)

    @property
    def norm(self) -> str:
        """How norm weights are stored: ``plain`` or ``zero_centered``."""
        return self.table.convention_of(self.layout, "norm")

    @cached_property
    def dims(self) -> Dims:
        """The table's dims for this config."""
        return Dims(self.table, self.config)

    @cached_property
    def match(self) -> Match:
        """The tensors matched with the table."""
        from convert.match import match

        return match(self)

    def require_sound(self) -> None:
        """Go on only with tensors that fit the family's table.

        Raises:
            ConvertError: Some do not; all of them.
        """
        if self.match.problems:
            error = ConvertError(self.match.problems)
            error.source = self.title
            raise error

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one, from the tensors (reads both where headers do not tell)."""
        return self.match.tied(sampled=False)

    def reference_tensors(self) -> Iterator[tuple[str, Source]]:
        """Every tensor as stored, under the name that the reference model has for it."""
        return self.match.reference_tensors()

    def close(self) -> None:
        """Close the files."""
        self.pool.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = f"{self.family}, {self.layout} layout, {self.format}, {len(self.tensors)} tensors"
        return f"<Checkpoint {self.path.name!r}: {what}>"

    def _repr_html_(self) -> str:
        """A table for notebooks: what ``convert inspect`` says."""
        from html import escape

        from convert.inspect import inspect

        found = inspect(self)
        left = "style='text-align:left'"
        rows = "".join(f"<tr><th {left}>{escape(k)}</th><td {left}>{escape(v)}</td></tr>" for k, v in found.lines())
        return f"<table><caption>{escape(self.path.name)}</caption>{rows}</table>"


def open_checkpoint(src: str | Path | Place, **options: Any) -> Checkpoint:
    """Open a checkpoint of any layout and format; reads headers only.

    Args:
        src: A folder, a file, or the name of a repository on the Hub (``org/name@revision``), which is fetched into
            the library's cache; or what :func:`convert.hub.place.place` returned.
        **options: The fields of :class:`Options`.

    Raises:
        UsageError: There is nothing, or an option does not fit.
        ConvertError: It is no checkpoint of a known family, or is damaged; all problems at once.
    """
    chosen = Options(**options)
    at = place(src, layout=chosen.layout)
    try:
        with named(at):
            return _open(at, chosen)
    except BaseException:
        if at.pool is not None:
            at.pool.close()
        raise


def _open(at: Place, chosen: Options) -> Checkpoint:
    path = at.path
    found = locate(path, follow_links=chosen.follow_links)
    found.notes = [*at.notes, *found.notes]
    seen = stamps(found.files)
    containers = _read_all(found)
    notes = [*found.notes, *(n for c in containers for n in c.notes)]
    wrapped: dict[str, Any] = {}
    if found.format in ("torch", "dcp"):
        for container in containers:
            wrapped = _unwrap(container, chosen.key, notes) or wrapped
    problems = audit_index(found, {c.files[0]: c.tensors for c in containers}) if found.weight_map else []
    notes += total_size_notes(found, containers)
    tensors = _gather(containers)
    if not tensors:
        raise ConvertError(
            Problem("empty", f"{path} holds no tensors.", file=str(path), hint="Is this the right file?")
        )
    if found.format == "safetensors":
        tensors = chosen_part(_strip(tensors, notes), chosen.key, notes)
    elif chosen.key and found.format in ("gguf", "tensorflow"):
        raise UsageError(f"--key names a part of a training checkpoint, and {path.name} is none.", hint="Leave it out.")
    raw, config_layout = find_config(found, containers, chosen, wrapped)
    record = (record_of(containers[0].metadata) if found.format == "gguf" else {}) or _record(found, containers, notes)
    record = {k: v for k, v in record.items() if k not in ("source", "target", "config") or isinstance(v, dict)}
    table = _names_table(chosen, record, notes)
    if table is not None and chosen.family and chosen.family != table.family:
        raise UsageError(f"--names extends {table.family!r}, but --family says {chosen.family!r}.")
    tensors, raw = attach_scales(tensors, raw, notes)
    refuse_special(tensors, raw)
    family = chosen.family or (stated_family(raw) if config_layout == "scratch" else None)
    tables = candidates(raw, format=found.format, family=family, table=table, names=tensors)
    refuse_other_heads(tables, tensors)
    tensors = aliased(common_first_parts(tensors, tables, notes), tables, notes)
    try:
        table, layout = detect(
            tensors,
            raw or None,
            format=found.format,
            family=family,
            layout=chosen.layout or ("scratch" if table is not None and table.names_file else None),
            table=table,
        )
    except ConvertError as error:
        raise _with_record(error, notes) from None
    refuse_other_models(table, layout, tensors, raw, folder=found.folder, tie=chosen.tie)
    config, raw = hub_config(table, layout, raw, config_layout, chosen, record, tensors, containers, notes)
    counts = "the config given" if chosen.config is not None else found.config.name if found.config else None
    if wrapped and counts and (note := disagreement(table, config_layout, raw, wrapped, name=counts)):
        notes.append(note)
    pairing = "interleaved" if chosen.qk_layout == "meta" else table.convention_of(chosen.qk_layout or layout, "rope")
    if chosen.qk_layout:
        notes.append(f"Q and K are taken to be in {pairing} order, as --qk-layout {chosen.qk_layout} says")
    return Checkpoint(
        path=path,
        format=found.format,
        layout=layout,
        table=table,
        config=config,
        raw_config=raw,
        tensors=tensors,
        files=[f for c in containers for f in c.files],
        folder=found.folder,
        record=record,
        pairing=pairing,
        options=chosen,
        metadata=containers[0].metadata if found.format not in ("torch", "dcp") else {},
        notes=notes,
        problems=problems,
        stamps=seen,
        origin=at.origin,
        remote_files=at.files,
        called=str(at.name) if at.name is not None else None,
        pool=at.pool or FilePool(),
    )


def _names_table(chosen: Options, record: Mapping[str, Any], notes: list[str]) -> MappingTable | None:
    """The table of a names file: given by the user, or kept in the record of the conversion that used it."""
    if chosen.names:
        return load_names(chosen.names)
    kept = record.get("target", {}).get("names")
    if chosen.table is None and isinstance(kept, dict) and chosen.layout in (None, "scratch"):
        notes.append(f"module names as {RECORD_NAME} keeps them")
        return names_table(kept, RECORD_NAME)
    return chosen.table


def _read_all(found: Found) -> list[Container]:
    """Every file's header; the problems of all damaged files at once."""
    if found.format == "dcp":  # one file speaks of all
        from convert.formats import dcp

        return [dcp.read(found.folder)]
    containers: list[Container] = []
    problems: list[Problem] = []
    for path in found.files:
        try:
            containers.append(read_container(path, found.format))
        except ConvertError as error:
            problems += error.problems
    if problems:
        raise FormatError(problems)
    return containers


def _unwrap(container: Container, key: str | None, notes: list[str]) -> dict[str, Any]:
    from convert.wrappers import unwrap

    found = unwrap(container.metadata["tree"], key, file=container.files[0])
    container.tensors = found.tensors
    if container.format == "dcp":  # optimizer states are left out by now, and never looked at
        from convert.formats import dcp

        dcp.resolve(container)
    notes += found.notes
    return found.config or {}


def _strip(tensors: dict[str, list[TensorSpec]], notes: list[str]) -> dict[str, list[TensorSpec]]:
    from convert.wrappers import strip_prefixes

    file = next(iter(tensors.values()))[0].file
    mapping, stripped = strip_prefixes(list(tensors), file=file)
    notes += [f"stripped from names: {item}" for item in stripped]
    return {mapping[name]: specs for name, specs in tensors.items()}


def _gather(containers: list[Container]) -> dict[str, list[TensorSpec]]:
    tensors: dict[str, list[TensorSpec]] = {}
    for container in containers:
        for name, spec in container.tensors.items():
            tensors.setdefault(name, []).append(spec)
    return tensors


def _record(found: Found, containers: list[Container], notes: list[str]) -> dict[str, Any]:
    """What an earlier conversion wrote beside the weights; one of other weights says nothing of these."""
    if found.record is None:
        if (found.folder / RECORD_NAME).is_symlink() or (found.folder / RECORD_NAME).exists():
            notes.append(f"{RECORD_NAME} was passed over: it is no file, or leads nowhere")
        return {}
    raw = configs.read_json(found.record)
    if wrong := damage(raw):
        notes.append(f"{found.record.name} was passed over: {'; '.join(wrong)}")
        return {}
    if is_of(raw, (f for c in containers for f in c.files)):
        return raw
    notes.append(f"{found.record.name} was passed over: the files that it tells of have other sizes than these")
    return {}


def _with_record(error: ConvertError, notes: list[str]) -> ConvertError:
    """Names that nobody knows may be in a record that was passed over; then the error says so."""
    passed = next((n for n in notes if "was passed over" in n and RECORD_NAME in n), None)
    if passed is None or [p.kind for p in error.problems] != ["unknown_names"]:
        return error
    problem = error.problems[0]
    return ConvertError(replace(problem, hint=f"{problem.hint} ({passed}; it may hold the names.)"))


def _common_type(tensors: Mapping[str, list[TensorSpec]]) -> str:
    count: dict[str, int] = {}
    for specs in tensors.values():
        for spec in specs:
            count[spec.dtype] = count.get(spec.dtype, 0) + spec.nbytes
    return max(count, key=lambda d: count[d]) if count else "F32"
