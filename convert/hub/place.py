"""From what a user wrote to a folder that can be opened: a path as it is, a name on the Hub fetched or looked into.

Fetching is ``huggingface_hub``'s: its cache, its progress. Looking into is :mod:`convert.hub.shadow`'s.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from convert import hub_cache
from convert.choices import require_choice
from convert.errors import ConvertError, Problem, UsageError
from convert.hub.names import Name, parse, shadowed
from convert.source import FilePool

#: How a repository's files are had: ``download`` puts them into the cache, ``look`` reads headers only (``glance``:
#: without large tokenizers, too), ``stream`` prepares for reading tensors from the network.
WAYS = ("download", "look", "glance", "stream")
_SHA1 = 40


@dataclass(slots=True)
class Place:
    """Where a checkpoint lies.

    Attributes:
        path: The folder or file to open.
        name: What it is called on the Hub; None for a path.
        commit: The commit there.
        files: Of a repository's files that are needed: name, bytes, sha256 as the Hub has them.
        notes: What was decided.
        pool: Reads tensors over the network; None where the files lie here.
    """

    path: Path
    name: Name | None = None
    commit: str | None = None
    files: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pool: FilePool | None = None

    @property
    def origin(self) -> dict[str, Any]:
        """For the record: the repository and its commit; empty for a path."""
        if self.name is None:
            return {}
        inside = {"inside": self.name.inside} if self.name.inside else {}
        return {"repo": self.name.repo, "commit": self.commit, **inside}


@contextlib.contextmanager
def named(at: Place) -> Iterator[None]:
    """Let errors say of what they are.

    A repository that was looked into is called by its name, not by the folder that stands for it here.
    """
    try:
        yield
    except ConvertError as error:
        error.source = error.source or str(at.name or at.path)
        if at.name is None or at.pool is None:
            raise
        here, called = str(at.path), str(at.name)

        def told(text: str | None) -> str | None:
            return None if text is None else text.replace(here, called)

        said = [replace(p, message=str(told(p.message)), hint=told(p.hint), file=told(p.file)) for p in error.problems]
        renamed = type(error)(said)
        renamed.source = told(error.source)
        raise renamed.with_traceback(error.__traceback__) from error.__cause__


def place(
    src: str | os.PathLike[str] | Place,
    *,
    layout: str | None = None,
    way: str = "download",
    foresee: Callable[[], None] | None = None,
) -> Place:
    """Turn ``src`` into a place.

    Args:
        src: A path, the name of a repository (:func:`convert.hub.names.parse`), or a place already.
        layout: The layout that was asked for; ``meta`` takes a repository's ``original/``.
        way: One of :data:`WAYS`, for a repository.
        foresee: Called before weights are downloaded; what it raises spares the download.

    Raises:
        ConvertError: The repository cannot be had; one error with the next step.
    """
    require_choice("way", way, WAYS)
    if isinstance(src, Place):
        return src
    name = parse(src)
    if name is None:
        path = Path(src)
        said = f"{src} is a local path; no repository of that name was looked for (hf://{src} would be)"
        return Place(path, notes=[said] if shadowed(src) else [])
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(f"{name} needs the package huggingface_hub.", hint="pip install huggingface_hub") from None
    if (found := _cached(name, layout, offline_only=True)) is not None:
        return found
    if way != "download":
        from convert.hub.shadow import look

        return look(name, layout=layout, stream=way == "stream", everything=way != "glance")
    return _fetched(name, layout, foresee)


def _fetched(name: Name, layout: str | None, foresee: Callable[[], None] | None) -> Place:
    """Download what is needed into the library's cache."""
    from huggingface_hub import snapshot_download

    from convert.hub.repository import look_up, patiently
    from convert.hub.selection import index_of, select

    try:
        repository = look_up(name)
    except ConvertError as error:
        found = _cached(name, layout) if error.problems[0].kind in ("hub_unreachable", "hub_busy") else None
        if found is None:
            raise
        found.notes.append(f"{error.problems[0].message} The copy in the cache is used")
        return found

    def fetch(paths: Sequence[str]) -> Path:
        patterns = [p.replace("[", "[[]") for p in paths]
        call = lambda: snapshot_download(  # noqa: E731
            name.repo, revision=repository.commit, allow_patterns=patterns, library_name="ckpt-convert"
        )
        return Path(patiently(call, name=name))

    index = index_of(repository, layout=layout)
    weight_map = None
    if index is not None:
        from convert.locate import weight_map as read_map

        weight_map = read_map(fetch([index.path]) / index.path)
    chosen = select(repository, layout=layout, weight_map=weight_map)
    fresh = [f for f in chosen.weights if f.sha256 and not _blob(name, f.sha256).exists()]
    _room(name, sum(f.size for f in fresh))
    if fresh and foresee is not None:
        foresee()
    folder = fetch([f.path for f in chosen.files])
    _check_fetched(name, folder, fresh)
    _remember(name, repository.commit)
    path = folder / (name.inside if name.inside in repository.files else chosen.folder)
    files = [{"name": f.name, "bytes": f.size, "sha256": f.sha256} for f in chosen.weights]
    return Place(path, name, repository.commit, files, [f"{repository.title} on the Hub", *chosen.notes])


def _storage(name: Name) -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / ("models--" + name.repo.replace("/", "--"))


def _blob(name: Name, sha256: str) -> Path:
    return _storage(name) / "blobs" / sha256


def _room(name: Name, needed: int) -> None:
    """Refuse before the first byte what cannot fit."""
    import shutil

    from convert.report import human_bytes

    folder = _storage(name)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConvertError(
            Problem(
                "hub_disk_full",
                f"{name} needs {human_bytes(needed)} in the cache ({_storage(name).parent}), where {human_bytes(free)} "
                "are free.",
                file=str(name),
                found=free,
                wanted=needed,
                hint="Set HF_HOME to a larger disk, free space (hf cache prune), or convert with --no-download.",
            )
        )


def _check_fetched(name: Name, folder: Path, fresh: Sequence[Any]) -> None:
    """Sizes and SHA-256 of what came just now; what is wrong is taken out of the cache again."""
    from convert.hashing import hash_file

    def wrong(file: Any) -> Problem | None:
        path = folder / file.path
        size = path.stat().st_size
        found: Any = size
        wanted: Any = file.size
        if size == file.size:
            found, wanted = hash_file(path), file.sha256
        if found == wanted:
            return None
        real = path.resolve()
        path.unlink()
        real.unlink(missing_ok=True)
        what = "bytes" if isinstance(found, int) else "SHA-256"
        return Problem(
            "hub_damaged",
            f"{file.name} came with the {what} {found}, and the Hub says {wanted}.",
            file=str(name),
            found=found,
            wanted=wanted,
            hint="It was removed from the cache; try again. If it stays so, something between here and the Hub "
            "(a proxy, a mirror) changes files.",
        )

    with ThreadPoolExecutor(2) as pool:
        problems = [p for p in pool.map(wrong, fresh) if p is not None]
    if problems:
        raise ConvertError(problems)


def _cached(name: Name, layout: str | None, *, offline_only: bool = False) -> Place | None:
    """The copy in the cache, for when the Hub cannot be asked; None where there is none (or nothing forbids asking)."""
    from huggingface_hub import constants

    if offline_only and not constants.HF_HUB_OFFLINE:
        return None
    storage = _storage(name)
    commit = _commit_of(storage, name.revision or "main")
    folder = storage / "snapshots" / commit if commit else None
    if folder is None or not folder.is_dir():
        if not offline_only:
            return None
        there = hub_cache.downloads(storage / "blobs")
        more = f" ({there})" if there else ""
        raise ConvertError(
            Problem(
                "hub_offline",
                f"{name} is not in the cache{more}, and HF_HUB_OFFLINE is set.",
                file=str(name),
                hint="Unset HF_HUB_OFFLINE to fetch it, or give a local folder.",
            )
        )
    path = folder / name.inside
    if not name.inside and layout == "meta" and (folder / "original").is_dir():
        path = folder / "original"
    return Place(path, name, commit, notes=[f"{name.repo}@{str(commit)[:12]} from the cache, offline"])


def _remember(name: Name, commit: str) -> None:
    """Note which commit a branch is, as the library does, so that the copy is found offline."""
    ref = _storage(name) / "refs" / (name.revision or "main")
    if name.revision == commit or ".." in ref.parts:
        return
    with contextlib.suppress(OSError):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


def _commit_of(storage: Path, revision: str) -> str | None:
    ref = storage / "refs" / revision
    if ref.is_file():
        return ref.read_text(encoding="utf-8").strip()
    if len(revision) == _SHA1 and (storage / "snapshots" / revision).is_dir():
        return revision
    return None
