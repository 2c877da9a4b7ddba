"""The Hugging Face client's cache on disk: from a folder at any of its levels to the snapshot that is meant.

``models--ORG--NAME`` holds ``blobs`` (contents, called after their hashes), ``snapshots/REVISION`` (links to them) and
``refs`` (names of revisions). Nothing is downloaded here, and no name is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from convert.errors import ConvertError, Problem, UsageError
from convert.formats.sniff import human_size

_PREFIX = "models--"
#: A folder with one of these is a model itself, whatever else lies in it.
_WEIGHTS = (".safetensors", ".gguf", ".pth", ".bin")
#: What programs that download append to the name of a file that is not finished.
UNFINISHED = (".incomplete", ".part", ".partial", ".crdownload", ".download", ".tmp", ".aria2", ".!qb")


def resolve(src: Path, notes: list[str]) -> Path:
    """The snapshot (or the file in it) that ``src`` stands for; ``src`` itself where it is no level of a cache above.

    Args:
        src: What the user gave.
        notes: Where it is said which revision was taken.

    Raises:
        UsageError: A whole cache of many models.
        ConvertError: Several revisions without a name that chooses one, or none at all.
    """
    if src.is_dir():
        for place in (src, src.resolve()):  # `.` and a link have other names than what they stand for
            if _is_repo(place):
                return _snapshot(place, notes)
            if place.name in ("snapshots", "blobs", "refs") and _is_repo(place.parent):
                return _snapshot(place.parent, notes)
        for root in (src, src / "hub"):  # and HF_HOME, in which the cache is one of several
            models = _models(root)
            if models and not any(p.is_file() and p.suffix in _WEIGHTS for p in src.iterdir()):
                return _only(root, models, notes)
        return src
    real = src.absolute()
    if real.parent.name == "blobs" and _is_repo(real.parent.parent) and src.is_file():
        return _linked(real, notes)
    refs = next((p for p in real.parents[:3] if p.name == "refs" and _is_repo(p.parent)), None)
    if refs is not None and src.is_file():  # refs/main, refs/pr/1
        return _snapshot(refs.parent, notes, revision=_text(real))
    return src


def _models(root: Path) -> list[str]:
    """The folders of models in a cache."""
    if not root.is_dir():
        return []
    return sorted(p.name for p in root.iterdir() if p.name.startswith(_PREFIX) and p.is_dir())


def _is_repo(folder: Path) -> bool:
    return folder.name.startswith(_PREFIX) and (folder / "snapshots").is_dir()


def _only(root: Path, models: list[str], notes: list[str]) -> Path:
    if len(models) == 1 and _is_repo(root / models[0]):
        return _snapshot(root / models[0], notes)
    names = [name.removeprefix(_PREFIX).replace("--", "/", 1) for name in models]
    raise UsageError(
        f"{root} is a cache of {len(models)} models: {', '.join(names[:12])}{' …' if len(names) > 12 else ''}.",
        hint=f"Name one of its folders, as {root / models[0]}.",
    )


def _snapshot(repo: Path, notes: list[str], revision: str | None = None) -> Path:
    """The snapshot of a revision, of ``main``, or the only one."""
    there = sorted(p for p in (repo / "snapshots").iterdir() if p.is_dir())
    main = repo / "refs" / "main"
    wanted = revision or (_text(main) if main.is_file() else None)
    found = next((p for p in there if p.name == wanted), None)
    if found is None and len(there) == 1 and revision is None:
        found = there[0]
    if found is not None:
        named = " (main)" if main.is_file() and found.name == _text(main) else ""
        others = f", of {len(there)} in the cache" if len(there) > 1 else ""
        notes.append(f"revision {found.name[:12]}{named} of {_title(repo)}{others}")
        return found
    unfinished = downloads(repo / "blobs")
    raise ConvertError(
        Problem(
            "missing_file" if not there else "revisions",
            f"{_title(repo)} has {len(there)} revisions in the cache"
            + (f": {', '.join(p.name for p in there)}" if there else "")
            + (f", and {wanted} is not among them" if wanted else "")
            + (f"; {unfinished}" if unfinished else "")
            + ".",
            file=str(repo),
            found=[p.name for p in there],
            wanted=wanted or "one",
            hint="Name one of the folders under snapshots/." if there else "Download the model again.",
        )
    )


def _title(repo: Path) -> str:
    return repo.name.removeprefix(_PREFIX).replace("--", "/", 1)


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(200).decode("utf-8", "replace").strip()


def _linked(blob: Path, notes: list[str]) -> Path:
    """The name that a blob has in a snapshot: config and tokenizer lie there."""
    snapshots = blob.parent.parent / "snapshots"
    for link in sorted(snapshots.rglob("*")):
        if link.is_symlink() and link.resolve() == blob.resolve():
            revision, *inside = link.relative_to(snapshots).parts
            notes.append(f"{blob.name[:12]} is {'/'.join(inside)} of revision {revision[:12]}")
            return link
    return blob


def downloads(folder: Path) -> str:
    """What is unfinished in a folder of the cache, in words; empty where nothing is."""
    parts = [p for p in folder.glob("*.incomplete") if p.is_file()] if folder.is_dir() else []
    if not parts:
        return ""
    size = human_size(sum(p.stat().st_size for p in parts))
    return f"{len(parts)} unfinished download{'s' if len(parts) > 1 else ''} ({size}) in {folder.name}"


def unfinished(folder: Path) -> str:
    """What tells of a download into ``folder`` that was not finished, in words; empty where nothing does."""
    beside = sorted(p.name for p in folder.iterdir() if p.name.lower().endswith(UNFINISHED))
    found = [f"unfinished downloads: {', '.join(beside[:4])}{' …' if len(beside) > 4 else ''}"] if beside else []
    found.append(downloads(folder / ".cache" / "huggingface" / "download"))
    if folder.parent.name == "snapshots" and _is_repo(folder.parent.parent):
        found.append(downloads(folder.parent.parent / "blobs"))
    return "; ".join(f for f in found if f)


def audit_downloads(files: Sequence[Path], *, folder: Path | None) -> list[str]:
    """What unfinished downloads beside weights that look whole say of them, as notes.

    Args:
        files: The weights.
        folder: Where all of what lies beside them is theirs, too; None where files were named.

    Raises:
        ConvertError: aria2 is not done with one of them. It makes a file in its full size and fills it in several
            places at once, so neither size nor end tells of the holes; it deletes its control file when it is done.
    """
    holes = [p for p in files if p.with_name(f"{p.name}.aria2").is_file()]
    if holes:
        raise ConvertError(
            [
                Problem(
                    "truncated",
                    f"{p.name} is not downloaded to its end: aria2's {p.name}.aria2 lies beside it.",
                    file=str(p),
                    found=f"{p.name}.aria2",
                    wanted="a finished download",
                    hint="Let the download finish (aria2c -c); if it has, delete the .aria2 file.",
                )
                for p in holes
            ]
        )
    names = [p.name for p in folder.iterdir() if p.is_file()] if folder else []
    odd = [n for n in names if n.lower().endswith(UNFINISHED)]
    odd += [f"{p.name}{end}" for p in files if not folder for end in UNFINISHED if p.with_name(p.name + end).is_file()]
    few = f"{', '.join(sorted(odd)[:4])}{' …' if len(odd) > 4 else ''}"
    return [f"unfinished downloads lie beside the weights and were left alone: {few}"] if odd else []


def dangling(folder: Path) -> list[Path]:
    """Links in a folder that lead to nothing: a cache that was pruned, or copied without its blobs."""
    return sorted(p for p in folder.iterdir() if p.is_symlink() and not p.exists())
