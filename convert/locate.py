"""Finding a checkpoint's files: which weights belong together, and what lies beside them.

Looks at names, headers of index files and the first bytes; a suffix is never trusted. Two complete sets of weights
in one folder are an error, because every tool would take another one of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from convert import hub_cache
from convert.adapters import adapter_folder
from convert.errors import ConvertError, FormatError, Problem, UsageError
from convert.formats.sniff import refuse_non_weights, sniff
from convert.json_file import AGAIN, read_json
from convert.links import refuse_links, refuse_side_links, refuse_weight_links
from convert.neighbours import hint_of
from convert.numbered_files import number_of, numbered_files, row_of
from convert.report import human_bytes
from convert.trainers import refuse_folder

INDEX_NAMES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
CONFIG_NAMES = ("config.json", "params.json", "scratch_config.json")
#: Beside OpenAI's TensorFlow checkpoint; other programs write files of that name, so it counts nowhere else.
_HPARAMS = "hparams.json"
RECORD_NAME = "conversion.json"
#: What torch.distributed.checkpoint writes last.
_DCP = ".metadata"
SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt", ".gguf", ".index")
#: What trainers leave beside weights.
NOT_WEIGHTS = (
    "rng_state",
    "training_args.",
    "scaler.",
    "random_states",
    # accelerate numbers further ones
    *(name + end for name in ("optimizer", "scheduler", "sampler", "dl_state_dict") for end in "._"),
)
FORMATS = ("safetensors", "torch", "gguf", "tensorflow")
#: What the files of a TensorFlow checkpoint end in beside its index.
_TENSORFLOW = (".meta", ".data-")


@dataclass(slots=True)
class Found:
    """The files of one checkpoint.

    Attributes:
        folder: Where configs and tokenizers lie.
        format: Container format of the weights.
        files: The weights, in order.
        weight_map: Tensor → file name, from an index; empty without one.
        config: Config file beside the weights, or None.
        record: ``conversion.json`` of an earlier conversion, or None.
        notes: What was seen and left alone.
    """

    folder: Path
    format: str
    files: list[Path]
    weight_map: dict[str, str] = field(default_factory=dict)
    config: Path | None = None
    record: Path | None = None
    notes: list[str] = field(default_factory=list)


def locate(src: Path, *, follow_links: bool = False) -> Found:
    """Find the checkpoint at ``src``, a folder or one of its files.

    Args:
        src: The folder or file; if it is a link, it is followed.
        follow_links: Follow links in the folder that lead out of it, wherever they lead (:mod:`convert.links`).

    Raises:
        UsageError: Nothing is there.
        ConvertError: Ambiguous, incomplete, or no weights.
    """
    said: list[str] = []
    src = _tensorflow_index(hub_cache.resolve(src, said))
    if src.is_symlink() and not src.exists():
        raise ConvertError(_dangling([src]))
    if not src.exists():
        raise UsageError(f"{src} does not exist.", hint=hint_of(src))
    if not src.is_dir() and not src.is_file():  # opening a pipe would wait for its writer
        raise UsageError(f"{src} is a pipe, socket or device, not a file.", hint="Give a checkpoint folder or file.")
    if not follow_links:
        refuse_side_links(src if src.is_dir() else src.parent)
        refuse_weight_links(src, ends=SUFFIXES, skip=NOT_WEIGHTS)
    found = _from_folder(src) if src.is_dir() else _from_file(src)
    if not follow_links:
        refuse_links((p for p in found.files if p != src), found.folder)
    _audit_links(found)
    found.notes = said + found.notes + hub_cache.audit_downloads(found.files, folder=src if src.is_dir() else None)
    if found.config is None:
        names = (_HPARAMS, *CONFIG_NAMES) if found.format == "tensorflow" else CONFIG_NAMES
        found.config = next((found.folder / n for n in names if (found.folder / n).exists()), None)  # read_json looks
    beside = found.folder / RECORD_NAME
    if src.is_file():
        own = src.with_name(src.name + "." + RECORD_NAME)
        beside = own if own.is_file() else beside
    found.record = beside if beside.is_file() else None
    return found


def _tensorflow_index(src: Path) -> Path:
    """The index of a TensorFlow checkpoint, by any of its names: ``model.ckpt`` is no file at all."""
    if not src.name:  # `.` and `/`, whose name nothing can follow
        return src
    stem = next((src.name.partition(end)[0] for end in _TENSORFLOW if end in src.name), src.name)
    index = src.with_name(f"{stem}.index")
    return index if (stem != src.name or not src.exists()) and index.is_file() else src


def _from_file(src: Path) -> Found:
    if src.name in INDEX_NAMES or src.name.endswith(".index.json"):
        return _indexed(src)
    if src.name == _DCP or src.suffix == ".distcp":
        return _distributed(src.parent)
    kind = sniff(src)
    if kind not in FORMATS:
        raise refuse_non_weights(src, kind)
    for name in INDEX_NAMES:
        index = src.with_name(name)
        if index.is_file() and src.name in set(weight_map(index).values()):
            found = _indexed(index)
            found.notes.append(f"{src.name} is one shard of {len(found.files)}; all of them are read")
            return found
    if kind == "torch" and number_of(src) is not None:
        files = numbered_files(src)
        if len(files) > 1:
            return Found(src.parent, kind, files)
    if kind != "gguf" and _shard_count(src) > 1:  # whose pieces need no index
        alone = [p for p in src.parent.iterdir() if p.suffix == src.suffix and _split_stem(p) == _split_stem(src)]
        if problem := _no_index(src.parent, {src.name: alone}):
            raise ConvertError(problem)
    return Found(src.parent, kind, [src])


def _from_folder(folder: Path) -> Found:
    names = sorted(p for p in folder.iterdir() if p.is_file() and p.suffix in SUFFIXES)
    names = [p for p in names if not p.name.startswith(NOT_WEIGHTS)]
    names = [p for p in names if p.suffix != ".index" or any(folder.glob(f"{p.stem}.data-*"))]
    refuse_folder(folder, names)
    indexes = [folder / n for n in INDEX_NAMES if (folder / n).is_file()]
    adapters = [p for p in names if p.name.startswith("adapter_model")]
    gone = [p for p in hub_cache.dangling(folder) if p.suffix in SUFFIXES or p.name in INDEX_NAMES]
    gone = [p for p in gone if not p.name.startswith(NOT_WEIGHTS)]
    if gone:
        raise ConvertError(_dangling(gone))
    if adapters or (folder / "adapter_config.json").is_file():
        raise adapter_folder(folder)
    sets: dict[str, list[Path]] = {}
    for index in indexes:
        mapped = set(weight_map(index).values())
        sets[index.name] = [p for p in names if p.name in mapped]
    claimed = {p for files in sets.values() for p in files}
    notes = []
    for path in names:
        if path in claimed:
            continue
        if number_of(path) is not None:
            sets.setdefault(row_of(path), []).append(path)
        elif path.suffix == ".gguf":
            sets.setdefault(_split_stem(path), []).append(path)
        elif indexes and path.stem not in ("model", "pytorch_model", "consolidated"):
            notes.append(f"{path.name} lies beside the indexed shards and is not part of them; it was left alone")
        else:
            sets[path.name] = [path]
    if len(sets) > 1:
        raise ConvertError(_no_index(folder, sets) or _stale_index(folder, sets) or _two_sets(folder, sets))
    if indexes:
        found = _indexed(indexes[0])
        found.notes += notes
        return found
    if not sets:
        if (folder / _DCP).is_file() or any(folder.glob("*.distcp")):
            return _distributed(folder)
        raise _nothing(folder)
    (files,) = sets.values()
    if number_of(files[0]) is not None:
        return Found(folder, "torch", numbered_files(files[0]))
    kind = sniff(files[0])
    if kind not in FORMATS:
        raise refuse_non_weights(files[0], kind)
    if kind != "gguf" and _shard_count(files[0]) > 1 and (problem := _no_index(folder, sets)):
        raise ConvertError(problem)
    return Found(folder, kind, files[:1] if kind == "gguf" else files, notes=notes)


def _distributed(folder: Path) -> Found:
    """A folder of torch.distributed.checkpoint; its reader says what is missing."""
    return Found(folder, "dcp", [*sorted(folder.glob("*.distcp")), folder / _DCP])


def _dangling(links: list[Path]) -> Problem:
    """Links without what they lead to, as a pruned cache or a copy of its snapshot alone leaves them."""
    names = ", ".join(p.name for p in links[:8]) + (" …" if len(links) > 8 else "")
    where = links[0].readlink()
    more = hub_cache.unfinished(links[0].parent)
    many = len(links) > 1
    return Problem(
        "missing_file",
        f"{names} {'are links' if many else 'is a link'} to what is not there ({where}){'; ' if more else ''}{more}.",
        file=str(links[0]),
        found=str(where),
        hint="The cache was pruned, or its snapshot was copied without its blobs; download the model again, or copy "
        "with links followed (cp -rL).",
    )


def _audit_links(found: Found) -> None:
    """Small files that are links to nothing: without its config a model would be taken for another one."""
    gone = hub_cache.dangling(found.folder)
    needed = [p for p in gone if p.name in CONFIG_NAMES]
    if needed and found.format != "gguf":
        raise ConvertError(_dangling(needed))
    if gone:
        found.notes.append(f"links to nothing: {', '.join(p.name for p in gone[:8])}")


def weight_map(index: Path) -> dict[str, str]:
    """The index's map, with every file name checked to lie in the index's own folder."""
    raw = read_json(index)
    mapping = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise FormatError(Problem("index", f"{index.name} has no weight_map.", file=str(index), hint=AGAIN))
    names = sorted(set(map(_text, mapping.values())))
    if len(names) > 10_000:
        raise FormatError(Problem("index", f"{index.name} names {len(names):,} files.", file=str(index)))
    for name in names:
        if Path(name).name != name or len(name) > 1000 or name in ("", ".", "..") or "\\" in name or "\0" in name:
            raise FormatError(
                Problem(
                    "index",
                    f"{index.name} points outside its own folder: {name!r:.200}.",
                    file=str(index),
                    found=name[:200],
                    hint="An index names plain files beside it; this one is damaged or hostile.",
                )
            )
    return mapping


def _text(value: object) -> str:
    """A file name, or one that is refused: JSON also has numbers and lists."""
    return value if isinstance(value, str) else f"/{value}"


def _indexed(index: Path) -> Found:
    mapping = weight_map(index)
    files = [index.parent / n for n in sorted(set(mapping.values()))]
    missing = [p.name for p in files if not p.is_file()]
    if missing:
        more = hub_cache.unfinished(index.parent)
        raise ConvertError(
            Problem(
                "missing_file",
                f"{index.name} names {len(files)} files and {len(missing)} of them are absent: "
                f"{', '.join(missing[:8])}." + (f" There are {more}." if more else ""),
                file=str(index),
                found=len(files) - len(missing),
                wanted=len(files),
                hint="An incomplete download? Fetch the missing files.",
            )
        )
    kinds = {p: sniff(p) for p in files}
    bad = [refuse_non_weights(p, k).problems[0] for p, k in kinds.items() if k not in FORMATS]
    if bad:
        raise FormatError(bad)
    return Found(index.parent, kinds[files[0]], files, mapping)


def _split_stem(path: Path) -> str:
    """``name`` of ``name-00001-of-00003.gguf``, else the file's own name."""
    parts = path.stem.rsplit("-", 3)
    if len(parts) == 4 and parts[2] == "of" and parts[1].isdecimal() and parts[3].isdecimal():
        return parts[0]
    return path.name


def _shard_count(path: Path) -> int:
    """3 for ``name-00001-of-00003.safetensors``; 1 for a name that tells of no further shards."""
    parts = path.stem.rsplit("-", 3)
    numbered = len(parts) == 4 and parts[2] == "of" and parts[1].isdecimal() and parts[3].isdecimal()
    return int(parts[3]) if numbered else 1


def _no_index(folder: Path, sets: dict[str, list[Path]]) -> Problem | None:
    """Shards of one save whose index is absent; None where the sets are something else."""
    parts = [p.stem.rsplit("-", 3) for files in sets.values() for p in files]
    if not all(len(p) == 4 and p[2] == "of" and p[1].isdecimal() and p[3].isdecimal() for p in parts):
        return None
    saves = {(p[0], p[3]) for p in parts}
    if len(saves) != 1:
        return None
    count = int(parts[0][3])
    name = next((n for n in INDEX_NAMES if n.split(".")[0] == parts[0][0]), INDEX_NAMES[0])
    return Problem(
        "missing_file",
        f"{folder} holds {len(parts)} of {count} shards and no {name}, which says what lies where.",
        file=str(folder),
        found=len(parts),
        wanted=name,
        hint="An incomplete download? Fetch the index" + ("." if len(parts) == count else " and the other shards."),
    )


def _stale_index(folder: Path, sets: dict[str, list[Path]]) -> Problem | None:
    """An index whose files are all gone, beside one other set: the rest of an earlier save."""
    stale = [key for key, files in sets.items() if not files]
    if len(sets) != 2 or len(stale) != 1:
        return None
    other = next(key for key in sets if key not in stale)
    return Problem(
        "stale_index",
        f"{stale[0]} names files of which none is there, beside {other}.",
        file=str(folder / stale[0]),
        found=stale[0],
        wanted="the files that it names, or no index",
        hint=f"If {other} is the model, delete the index or name the file; else fetch the files that are named.",
    )


_MOST_SETS = 8  # that a message names


def _two_sets(folder: Path, sets: dict[str, list[Path]]) -> Problem:
    lines = []
    for key, files in sets.items():
        size = sum(p.stat().st_size for p in files)
        newest = max((p.stat().st_mtime for p in files), default=0)
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest))
        lines.append(f"{key} ({len(files)} file{'s' if len(files) != 1 else ''}, {human_bytes(size)}, {date})")
    shown = "; ".join(lines[:_MOST_SETS]) + " …" * (len(lines) > _MOST_SETS)
    return Problem(
        "two_sets",
        f"{folder} holds {len(sets)} candidate sets of weights: {shown}.",
        file=str(folder),
        found=list(sets)[:_MOST_SETS],
        wanted="one set",
        hint="Name the file (or the index) that is meant, or move the others away.",
    )


def _nothing(folder: Path) -> ConvertError:
    there = sorted(p.name for p in folder.iterdir())
    odd = [n for n in there if (n.endswith(SUFFIXES) or n in INDEX_NAMES) and not n.startswith(NOT_WEIGHTS)]
    if odd := [n for n in odd if not (folder / n).is_file()]:
        what = "a folder" if (folder / odd[0]).is_dir() else "a pipe, socket or device, or leads to one"
        return ConvertError(
            Problem("no_file", f"{folder / odd[0]} is no file: it is {what}.", file=str(folder / odd[0]))
        )
    more = hub_cache.unfinished(folder)
    if more:
        what = f"no weights in {folder}, but {more}."
        hint = "Let the download finish, or start it again."
        return ConvertError(Problem("missing_file", what, file=str(folder), found=more, wanted="weights", hint=hint))
    return UsageError(
        f"no weights in {folder}: it holds {', '.join(there[:10]) or 'nothing'}{' …' if len(there) > 10 else ''}.",
        hint=f"Looked for {', '.join(SUFFIXES)} files and for {INDEX_NAMES[0]}.",
    )


def audit_index(found: Found, headers: dict[Path, Iterable[str]]) -> list[Problem]:
    """Index against headers, both ways."""
    problems = []
    where = {name: path.name for path, names in headers.items() for name in names}
    for name, file in found.weight_map.items():
        if where.get(name) != file:
            actual = where.get(name)
            problems.append(
                Problem(
                    "index",
                    f"the index maps {name!r} to {file}, which does not hold it"
                    + (f" ({actual} does)." if actual else "; no shard does."),
                    tensor=name,
                    file=file,
                    found=actual,
                    wanted=file,
                    hint="The index and the shards are of different saves; fetch both again.",
                )
            )
    for name, file in where.items():
        if name not in found.weight_map:
            problems.append(
                Problem(
                    "index",
                    f"{file} holds {name!r}, which the index does not know.",
                    tensor=name,
                    file=file,
                    hint="A stale index? Fetch it again, or delete it if the shards are complete.",
                )
            )
    return problems
