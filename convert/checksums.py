"""What files should hash to, by whoever published them: the Hugging Face cache, Meta's checklist, a list, our record.

A damaged file of the right size passes every other check. Hashing itself is :mod:`convert.hashing`'s business.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.errors import FormatError, Problem, UsageError
from convert.hashing import GIT, hash_files
from convert.listed_files import assign

#: Beside Meta's own downloads: MD5 in the format of md5sum.
CHECKLIST = "checklist.chk"
#: Algorithms by the length of what they give in hexadecimal digits.
_ALGORITHMS = {32: "md5", 40: "sha1", 64: "sha256", 96: "sha384", 128: "sha512"}
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Expected:
    """One file's published hash.

    Attributes:
        path: The file.
        algorithm: A name that :func:`convert.hashing.hash_file` knows.
        digest: What it gives, in lower case.
        origin: Who says so, for messages.
        perhaps: Hashes of which one may be meant, with the names that a list has for them; then ``digest`` is empty.
    """

    path: Path
    algorithm: str
    digest: str
    origin: str
    perhaps: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Hashed:
    """One file's hash, and what it was compared with.

    Attributes:
        path: The file.
        algorithm: How it was hashed.
        digest: The hash.
        expected: What somebody published, or None.
        origin: Who, or None.
    """

    path: Path
    algorithm: str
    digest: str
    expected: str | None = None
    origin: str | None = None

    @property
    def ok(self) -> bool | None:
        """Whether it is as published; None where nothing was."""
        return None if self.expected is None else self.digest == self.expected

    def as_json(self) -> dict[str, Any]:
        """The keys of one item of ``hashes`` in ``validate --json``."""
        return {
            "file": self.path.name,
            "algorithm": self.algorithm,
            "digest": self.digest,
            "expected": self.expected,
            "origin": self.origin,
        }


def verify_hashes(
    files: Iterable[Path],
    *,
    checksums: str | Path | None = None,
    record: Mapping[str, Any] | None = None,
    threads: int = 2,
    progress: Any = None,
) -> tuple[list[Hashed], list[Problem]]:
    """Hash files, and compare with every published hash that is at hand.

    Args:
        files: The weight files. Small files beside them are hashed where somebody published their hashes.
        checksums: A list in the format of ``sha256sum`` or ``md5sum``; it takes the place of what lies about.
        record: The record of the conversion that wrote them.
        threads: How many files are read at a time.
        progress: Called with the bytes hashed since the last call.

    Returns:
        Every hash, and the findings: hashes that differ, listed files that are not there.

    Raises:
        UsageError: ``checksums`` is no file.
        FormatError: It is no list of hashes.
        ConvertError: A file cannot be read.
    """
    weights = list(files)
    problems: list[Problem] = []
    if checksums is not None:
        place = Path(checksums)
        if not place.is_file():
            raise UsageError(f"--checksums {place}: no such file.", hint="Give a list as sha256sum or md5sum write it.")
        wanted = _listed(place, weights, problems)
    else:
        wanted = _found(weights, record or {}, problems)
    plain = [Expected(p, "sha256", "", "") for p in weights if not any(w.path == p for w in wanted)]
    out = []
    every = [*wanted, *plain]
    for algorithm in dict.fromkeys(w.algorithm for w in every):
        group = [w for w in every if w.algorithm == algorithm]
        found = hash_files([w.path for w in group], algorithm, threads=threads, progress=progress)
        for item in group:
            digest = found[item.path]
            wanted_digest = item.digest or (digest if digest in item.perhaps else "")  # equal: then it was meant
            out.append(
                Hashed(item.path, algorithm, digest, wanted_digest or None, item.origin if wanted_digest else None)
            )
            if item.perhaps and not wanted_digest:
                problems.append(_elsewhere(item))
    return out, problems + [_differs(h) for h in out if h.ok is False]


def _differs(found: Hashed) -> Problem:
    return Problem(
        "hash",
        f"{found.path.name} is damaged or another file: its {found.algorithm} is {found.digest}, {found.origin} says "
        f"{found.expected}.",
        file=str(found.path),
        found=found.digest,
        wanted=found.expected,
        hint="Fetch the file again.",
    )


def _elsewhere(item: Expected) -> Problem:
    names = ", ".join(list(item.perhaps.values())[:3])
    return Problem(
        "checksums",
        f"{item.origin} speaks of other folders: it has {names}, and nothing says that {item.path} is meant. Its "
        f"{item.algorithm} is none of theirs.",
        file=str(item.path),
        wanted=list(item.perhaps),
        hint="Give the list of this folder, or one that names its files without folders.",
    )


def _found(weights: Sequence[Path], record: Mapping[str, Any], problems: list[Problem]) -> list[Expected]:
    """Published hashes that lie about."""
    folders = list(dict.fromkeys(p.parent for p in weights))
    out: dict[Path, Expected] = {}
    for folder in folders:
        beside = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.name.startswith(".")]
        for path in dict.fromkeys([*(p for p in weights if p.parent == folder), *beside]):
            found = _blob(path) or _downloaded(path)
            if found is not None:
                out[path] = found
        checklist = folder / CHECKLIST
        if checklist.is_file():
            for item in _listed(checklist, weights, problems):
                out.setdefault(item.path, item)
    for path, digest in _recorded(weights, record):
        out.setdefault(path, Expected(path, "sha256", digest, "the record of its conversion"))
    return list(out.values())


def _blob(path: Path) -> Expected | None:
    """A file of the Hugging Face cache is a link to a blob that is called after its hash."""
    first = path.readlink() if path.is_symlink() else path.absolute()
    for place in (first, path.resolve()):  # `blobs` may be a link itself, to where there is more room
        if place.parent.name == "blobs":
            return _by_etag(path, place.name, "the name of its blob in the cache")
    return None


def _downloaded(path: Path) -> Expected | None:
    """``hf download --local-dir`` keeps each file's hash in a hidden folder beside."""
    for folder in (path.parent, *list(path.parents)[1:3]):
        place = folder / ".cache" / "huggingface" / "download"
        if place.is_dir():
            told = place / path.relative_to(folder).parent / f"{path.name}.metadata"
            if told.is_file() and told.stat().st_size < 4096:
                lines = told.read_text(encoding="utf-8", errors="replace").split()
                return _by_etag(path, lines[1], "the hub, when it was downloaded,") if len(lines) > 1 else None
    return None


def _by_etag(path: Path, etag: str, origin: str) -> Expected | None:
    """The hub's name of a file's content: SHA-256 for large files, git's blob hash for small ones."""
    word = etag.strip('"').lower()
    if set(word) - set(string.hexdigits):
        return None
    algorithm = {64: "sha256", 40: GIT}.get(len(word))
    return None if algorithm is None else Expected(path, algorithm, word, origin)


def _recorded(weights: Sequence[Path], record: Mapping[str, Any]) -> list[tuple[Path, str]]:
    target = record.get("target")
    listed = target.get("files") if isinstance(target, Mapping) else None
    told = (
        {f.get("name"): f.get("sha256") for f in listed if isinstance(f, Mapping)} if isinstance(listed, list) else {}
    )
    return [(p, str(told[p.name])) for p in weights if isinstance(told.get(p.name), str)]


def _listed(place: Path, weights: Sequence[Path], problems: list[Problem]) -> list[Expected]:
    """The entries of a list, each with the file that it speaks of."""
    lines = read_list(place)
    found = assign(lines, place=place.parent, weights=weights)
    for name in found.absent:
        problems.append(
            Problem(
                "missing_file",
                f"{place.name} lists {name}, which is not there.",
                file=name,
                hint="Fetch it, or take it out of the list.",
            )
        )
    out = [_entry(path, place.name, {lines[name]: name}) for path, name in found.certain.items()]
    return out + [
        _entry(path, place.name, {lines[name]: name for name in names}, sure=False)
        for path, names in found.unsure.items()
    ]


def _entry(path: Path, origin: str, digests: dict[str, str], *, sure: bool = True) -> Expected:
    """What a list says of a file; where several lines may be meant, those of the first one's algorithm."""
    first = next(iter(digests))
    named = {digest: name for digest, name in digests.items() if len(digest) == len(first)}
    return Expected(path, _ALGORITHMS[len(first)], first if sure else "", origin, {} if sure else named)


def read_list(place: Path) -> dict[str, str]:
    """Names and hashes of a list: ``HASH  NAME``, ``HASH *NAME``, or ``SHA256 (NAME) = HASH``.

    Raises:
        FormatError: A line is none of these.
    """
    if place.stat().st_size > _MOST_BYTES:
        raise _no_list(place, f"it has {place.stat().st_size:,} bytes")
    try:
        lines = place.read_text(encoding="utf-8-sig").splitlines()
    except (UnicodeDecodeError, OSError) as error:
        raise _no_list(place, str(error)) from None
    out: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("\\")
        if not text or text.startswith("#"):
            continue
        name, digest = _parts(text)
        if len(digest) not in _ALGORITHMS or set(digest) - set(string.hexdigits) or not name or "\0" in name:
            raise _no_list(place, f"line {number} is {text[:60]!r}")
        if out.setdefault(name, digest.lower()) != digest.lower():
            raise _no_list(place, f"line {number} gives {name[:80]} another hash than a line before it")
    if not out:
        raise _no_list(place, "it is empty")
    return out


def _parts(text: str) -> tuple[str, str]:
    """Name and hash of one line."""
    head, equals, digest = text.rpartition(") = ")
    if equals and " (" in head:
        return head.partition(" (")[2], digest.strip()
    digest, *name = text.split(maxsplit=1)
    return "".join(name).removeprefix("*").removeprefix("./"), digest


def _no_list(place: Path, why: str) -> FormatError:
    return FormatError(
        Problem(
            "checksums",
            f"{place.name} is no list of hashes: {why}.",
            file=str(place),
            hint="Each line is `HASH  NAME`, as sha256sum and md5sum write it.",
        )
    )
