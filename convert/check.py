"""An output against its record: what was changed since it was written; and against its source, byte for byte.

Reads headers, and whole files where the record has their full hashes. Whether a model computes the same is
:mod:`convert.verify`'s business; whether a checkpoint is whole, :mod:`convert.validate`'s.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.config import read_json
from convert.errors import ConvertError, Problem, UsageError
from convert.formats.readers import read_container
from convert.formats.spec import Container
from convert.hashing import hash_files, head_hash, header_hash
from convert.locate import RECORD_NAME, locate
from convert.record import entries, is_of
from convert.record_checks import damage
from convert.report import human_bytes

SCHEMA = "convert.check/1"
#: Findings that a terminal shows; the rest is in the JSON.
_SHOWN = 24
_AGAIN = "Convert again"
_HINT = f"{_AGAIN}, or compare with the source: convert check OUT --source SRC"

Progress = Callable[[int], None]


@dataclass(slots=True)
class Check:
    """The outcome of :func:`check`.

    Attributes:
        path: What was looked at.
        record: Its record; empty where there is none.
        files: One entry per file: ``name``, ``status`` (``same``, ``changed``, ``missing``), ``bytes``,
            ``recorded_name`` where it was renamed, ``compared`` (``size``, ``header``, ``head``, ``sha256``).
        source: With a source: its ``path``, whether it is the ``recorded`` one (None: nothing tells), and how many
            ``tensors`` and ``bytes`` were compared.
        problems: What is not as it was written.
        notes: What is odd but no change.
    """

    path: Path
    record: dict[str, Any] = field(default_factory=dict)
    files: list[dict[str, Any]] = field(default_factory=list)
    source: dict[str, Any] | None = None
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything is as it was written; notes do not count."""
        return not self.problems

    @property
    def exit_code(self) -> int:
        """What the command line returns: 0 or 1."""
        return 0 if self.ok else 1

    def as_json(self) -> dict[str, Any]:
        """The object that ``check --json`` prints; its keys are documented and stable."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "out": str(self.path),
            "recorded": bool(self.record),
            "tool": self.record.get("tool"),
            "files": self.files,
            "source": self.source,
            "problems": [p.as_json() for p in self.problems],
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """The verdict first, then what was compared, findings and notes."""
        count = len(self.problems)
        verdict = "ok" if self.ok else f"CHANGED: {count} finding{'s' if count > 1 else ''}"
        out = [f"{verdict}: {self.path}"]
        if self.record:
            out.append(f"  against its record ({self.record.get('tool')}): {self._compared()}")
        if self.source is not None:
            known = {True: "the recorded source", False: "NOT the recorded source", None: "the record names no source"}
            size = human_bytes(self.source["bytes"])
            out.append(f"  against {self.source['path']} ({known[self.source['recorded']]}): ")
            out[-1] += f"{self.source['tensors']} tensors, {size}, every byte"
        out += [f"  {p.kind}: {p.message}" for p in self.problems[:_SHOWN]]
        if count > _SHOWN:
            out.append(f"  … and {count - _SHOWN} more; --json has them all")
        hints = list(dict.fromkeys(self._hint(p.hint) for p in self.problems[:_SHOWN] if p.hint))
        out += [f"  note: {note}" for note in self.notes]
        return [*out, "What to do:", *(f"  {hint}" for hint in hints)] if hints else out

    def _hint(self, hint: str) -> str:
        """What to do, as it can be pasted here; the source has nothing to add where it was given."""
        if hint != _HINT:
            return hint
        return f"{_AGAIN}." if self.source is not None else hint.replace(" OUT ", f" {shlex.quote(str(self.path))} ")

    def _compared(self) -> str:
        counts: dict[str, int] = {}
        for file in self.files:
            for what in file["compared"]:
                counts[what] = counts.get(what, 0) + 1
        words = {"size": "sizes", "header": "headers", "head": "first MiBs", "sha256": "full hashes"}
        ones = {"size": "size", "header": "header", "head": "first MiB", "sha256": "full hash"}
        said = [f"{counts[k]} {words[k] if counts[k] != 1 else ones[k]}" for k in words if k in counts]
        return f"{len(self.files)} file{'s' if len(self.files) != 1 else ''}; {', '.join(said)}"


def check(
    out: str | Path,
    *,
    source: str | Path | None = None,
    threads: int = 2,
    progress: Progress | None = None,
    **options: Any,
) -> Check:
    """Compare an output with what was recorded when it was written and, with a source, with what it was made from.

    Args:
        out: The folder or file that a conversion made; it may have been moved or renamed since.
        source: What it was made from: every tensor is derived again and every byte compared.
        threads: Workers.
        progress: Called with the bytes read since the last call, from any thread.
        **options: About the source, as for :func:`convert.open_checkpoint`; what the record says is known already.

    Raises:
        UsageError: There is nothing at ``out``.
        ConvertError: It has no record and no source was given, or the source cannot be converted so.
    """
    path = Path(out)
    result = Check(path)
    containers = _headers(path, result, follow_links=bool(options.get("follow_links")))
    files = [file for container in containers for file in container.files]
    folder, result.record = _find_record(path, files)
    if not result.record and source is None:
        if result.problems:
            raise ConvertError(result.problems)
        raise _no_record(path, containers)
    if result.record:
        _against_record(result, folder, files, path.is_dir(), threads, progress)
    elif source is not None:
        result.notes.append("there is no record: what was asked for is guessed from the output itself")
    if source is not None and containers:
        _against_source(result, Path(source), containers, threads, progress, options)
    elif result.record and not all(_hash(item, "sha256") for item in entries(result.record["target"].get("files"))):
        result.notes.append("the record has no full hashes (--hash takes them): a changed weight may be unseen here")
    return result


def _headers(path: Path, result: Check, *, follow_links: bool) -> list[Container]:
    """The headers of the output's files; what is wrong with them is a finding."""
    containers = []
    try:
        found = locate(path, follow_links=follow_links)
    except UsageError:
        if not path.is_dir() or not (path / RECORD_NAME).is_file():
            raise
        return []  # all weights are gone, and the record tells which
    except ConvertError as error:
        if any(p.kind == "link" for p in error.problems):  # the record may be one of them, and names the others
            raise
        result.problems += error.problems
        return []
    for file in found.files:
        try:
            containers.append(read_container(file, found.format))
        except ConvertError as error:
            result.problems += error.problems
    return containers


def _find_record(path: Path, files: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The folder that the record speaks of, and the record; a renamed file's has kept its old name."""
    folder = path if path.is_dir() else path.parent
    single = [p for p in (path, *files[:1]) if p.suffix == ".gguf" and not p.is_dir()]
    places = [file.with_name(f"{file.name}.{RECORD_NAME}") for file in single] or [folder / RECORD_NAME]
    for place in places:
        if place.is_file():
            return folder, _read(place)
    if single:
        for place in sorted(folder.glob(f"*.{RECORD_NAME}")):
            try:
                found = _read(place)
            except ConvertError:  # of something else
                continue
            if entries(found["target"].get("files")) and is_of(found, files):
                return folder, found
    return folder, {}


def _read(place: Path) -> dict[str, Any]:
    raw = read_json(place)
    if wrong := damage(raw):
        message = f"{place.name} cannot be used: {'; '.join(wrong)}."
        raise ConvertError(Problem("record", message, file=str(place), hint=_HINT))
    return dict(raw)


def _no_record(path: Path, containers: Sequence[Container]) -> ConvertError:
    said = containers[0].metadata.get("convert.version") if containers else None
    own = f" (the file says that ckpt-convert {str(said).removeprefix('ckpt-convert ')} wrote it)" if said else ""
    return ConvertError(
        Problem(
            "no_record",
            f"{path} has no record beside it{own}, so there is nothing to compare it with.",
            file=str(path),
            wanted=RECORD_NAME,
            hint="--source SRC derives every tensor again and compares it.",
        )
    )


# ---- against the record ----------------------------------------------------------------------------------------


def _against_record(
    result: Check, folder: Path, files: Sequence[Path], whole: bool, threads: int, progress: Progress | None
) -> None:
    target = result.record["target"]
    weights = entries(target.get("files"))
    present = {p.name: p for p in files}
    for item in weights:  # where headers could not be read, the names still tell
        if (named := _named(folder, item)) is not None:
            present.setdefault(named.name, named)
    paired = _pair(weights, present)
    beside = entries(target.get("beside"))
    there = [(item, _named(folder, item)) for item in beside]
    wanted = [(item, place) for item, place in (*paired, *there) if place is not None]
    hashes = hash_files([p for item, p in wanted if _hash(item, "sha256")], threads=threads, progress=progress)
    for item, place in paired:
        if place is None:
            _missing(result, item, kind="missing_file")
        else:
            _compare(result, item, place, hashes)
    for item, place in there:
        if place is not None:
            _compare(result, item, place, hashes)
        elif whole:
            _missing(result, item, kind="missing_file")
        else:
            result.notes.append(f"{item.get('name')} is not beside it any more")
    taken = {place.name for _, place in paired if place is not None}
    extra = [p.name for p in files if p.name not in taken]
    if whole:
        known = {str(item.get("name")) for item in (*weights, *beside)} | {RECORD_NAME} | taken
        extra += sorted(p.name for p in folder.iterdir() if p.name not in known and p not in files)
    if extra:
        result.notes.append(f"not of this conversion: {', '.join(extra[:8])}{' …' if len(extra) > 8 else ''}")


def _named(folder: Path, item: Mapping[str, Any]) -> Path | None:
    """The file that an entry names, if it is there; a record cannot point out of its folder."""
    name = str(item.get("name"))
    plain = Path(name).name == name and name not in ("", ".", "..")
    return folder / name if plain and (folder / name).is_file() else None


def _pair(weights: Sequence[Mapping[str, Any]], present: Mapping[str, Path]) -> list[tuple[Any, Path | None]]:
    """Recorded files with real ones: by name, then, renamed, by size and header, at last by order."""
    left = dict(present)
    out: dict[int, Path] = {}
    for number, item in enumerate(weights):
        if (name := str(item.get("name"))) in left:
            out[number] = left.pop(name)
    for number, item in enumerate(weights):
        if number in out:
            continue
        alike = [p for p in left.values() if p.stat().st_size == item.get("bytes")]
        exact = [p for p in alike if head_hash(p) == item.get("head_sha256")]
        if found := (exact or alike):
            out[number] = left.pop(found[0].name)
    rest = [number for number in range(len(weights)) if number not in out]
    if len(rest) == len(left) == 1:  # the only one there can be
        out[rest[0]] = next(iter(left.values()))
    return [(item, out.get(number)) for number, item in enumerate(weights)]


def _hash(item: Mapping[str, Any], key: str) -> str | None:
    value = item.get(key)
    return value if isinstance(value, str) and len(value) == 64 and value.strip("0") else None


def _missing(result: Check, item: Mapping[str, Any], *, kind: str) -> None:
    name = str(item.get("name"))
    result.files.append({"name": name, "status": "missing", "bytes": None, "compared": []})
    result.problems.append(Problem(kind, f"{name} is not there any more.", file=name, hint=_HINT))


def _compare(result: Check, item: Mapping[str, Any], path: Path, hashes: Mapping[Path, str]) -> None:
    size = path.stat().st_size
    entry: dict[str, Any] = {"name": path.name, "status": "same", "bytes": size, "compared": ["size"]}
    if path.name != item.get("name"):
        entry["recorded_name"] = item.get("name")
    result.files.append(entry)

    def changed(kind: str, what: str, found: Any, wanted: Any) -> None:
        entry["status"] = "changed"
        message = f"{path.name} {what}."
        result.problems.append(Problem(kind, message, file=str(path), found=found, wanted=wanted, hint=_HINT))

    if size != item.get("bytes"):
        changed("size", f"has {size:,} bytes; {item.get('bytes')} were written", size, item.get("bytes"))
        return
    found: str | None
    if wanted := _hash(item, "header_sha256"):
        entry["compared"].append("header")
        try:
            found = header_hash(path, str(item.get("format")))
        except ConvertError as error:
            changed("header", f"cannot be read any more: {error.problems[0].message}", None, wanted)
            return
        if found != wanted:
            changed("header", "has another header than was written: names, types, places or metadata", found, wanted)
    if wanted := _hash(item, "sha256"):
        entry["compared"].append("sha256")
        if hashes[path] != wanted:
            changed("sha256", "has other bytes than were written: its SHA-256 differs", hashes[path], wanted)
    elif wanted := _hash(item, "head_sha256"):
        entry["compared"].append("head")
        if head_hash(path) != wanted and entry["status"] == "same":
            changed("head", "has other bytes than were written, within its first MiB", None, wanted)


# ---- against the source ----------------------------------------------------------------------------------------


def _against_source(
    result: Check,
    src: Path,
    containers: Sequence[Container],
    threads: int,
    progress: Progress | None,
    options: Mapping[str, Any],
) -> None:
    from convert.rederive import rederive
    from convert.replan import Places, open_source, plan_again
    from convert.source import FilePool

    pool = FilePool()
    with open_source(src, result.record, options) as source:
        try:
            recorded = _is_recorded(source.files, result.record, containers)
            if recorded is False:
                result.notes.append(
                    f"{src} is not what this was made from: its files are others than the recorded ones"
                )
            plan = plan_again(source, result.record, containers)
            places = Places(plan, containers, pool)
            found = rederive(plan, places, threads=threads, progress=progress)
        finally:
            pool.close()
    result.source = {"path": str(src), "recorded": recorded, "tensors": found.tensors, "bytes": found.nbytes}
    result.problems += places.problems
    for item in found.differences:
        result.problems.append(
            Problem(
                "bytes",
                f"{item.tensor!r}: {item.nbytes:,} of {item.total:,} bytes are not what the source gives, the first in "
                f"row {item.row}.",
                tensor=item.tensor,
                file=item.file,
                found=item.nbytes,
                wanted=0,
                hint=_HINT,
            )
        )


def _is_recorded(files: Sequence[Path], record: Mapping[str, Any], containers: Sequence[Container]) -> bool | None:
    """Whether these are the files that the output was made from; None where nothing tells."""
    wanted = [(f.get("bytes"), f.get("head_sha256")) for f in entries(record["source"].get("files"))] if record else []
    if not wanted:  # a GGUF file says it itself
        metadata = containers[0].metadata
        sizes, heads = metadata.get("convert.source.bytes"), metadata.get("convert.source.head_sha256")
        wanted = list(zip(sizes or (), heads or (), strict=False))
    if not wanted:
        return None
    return sorted(map(str, wanted)) == sorted(str((f.stat().st_size, head_hash(f))) for f in files)
