"""Uploading an output to the Hub, with a model card: through the library's own upload, which can be continued.

Only what the record names is uploaded, so that a stray file beside the weights does not become public.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.config import read_json
from convert.errors import ConvertError, Problem, UsageError
from convert.hub.card import card
from convert.hub.failures import chain, status_of
from convert.hub.names import Name, parse
from convert.hub.repository import patiently
from convert.links import refuse_links, refuse_side_links
from convert.locate import RECORD_NAME
from convert.record import entries
from convert.report import human_bytes

CARD = "README.md"


@dataclass(slots=True)
class Pushed:
    """What was uploaded, or would be.

    Attributes:
        repo: ``org/name``.
        files: Names and bytes.
        private: Whether a repository that is made is private.
        url: Where the commit is to be seen; None for a dry run.
        card: The model card.
    """

    repo: str
    files: list[tuple[str, int]]
    private: bool
    url: str | None
    card: str

    def as_json(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "schema": "convert.push/1",
            "repo": self.repo,
            "private": self.private,
            "url": self.url,
            "files": [{"name": name, "bytes": size} for name, size in self.files],
            "card": self.card,
        }

    def line(self) -> str:
        """For a terminal."""
        size = human_bytes(sum(n for _, n in self.files))
        if self.url is None:
            return f"Would upload {len(self.files)} files ({size}) to {self.repo}; nothing was sent (dry run)."
        return f"Uploaded {len(self.files)} files ({size}) to {self.repo}: {self.url}"


def target_name(text: str) -> Name:
    """The repository to upload to; a folder of that name here does not matter.

    Raises:
        UsageError: It is no such name.
    """
    try:
        found = parse(text if text.startswith("hf://") else f"hf://{text}")
    except UsageError:
        found = None
    if found is None or found.inside:
        raise UsageError(f"{text!r} is no repository's name.", hint="Write org/name, or org/name@branch.")
    return found


def push(
    out: str | os.PathLike[str],
    to: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    verified: Mapping[str, Any] | None = None,
    quiet: bool = False,
    follow_links: bool = False,
) -> Pushed:
    """Upload an output with a model card.

    Args:
        out: The folder or file that a conversion made.
        to: ``org/name``; made if it is not there.
        private: A repository that is made is private.
        dry_run: Send nothing; say what would be sent.
        verified: What ``verify`` said of it, for the card.
        quiet: Show no progress.
        follow_links: Upload what links lead to, also out of ``out``'s folder (:mod:`convert.links`): it may be private.

    Raises:
        UsageError: ``to`` is no name, or ``out`` has no record.
        ConvertError: A file is a link that leads out of the folder, or the Hub does not take it.
    """
    name = target_name(to)
    path = Path(out)
    record, files = _contents(path, follow_links)
    text = card(record, files, verified=verified, base=path if path.is_dir() else None)
    sizes = [(_within(path, f), f.stat().st_size) for f in files] + [(CARD, len(text.encode()))]
    if dry_run:
        return Pushed(name.repo, sizes, private, None, text)
    import huggingface_hub
    from huggingface_hub import HfApi

    api = HfApi(library_name="ckpt-convert")
    if quiet:
        huggingface_hub.utils.disable_progress_bars()
    try:
        patiently(lambda: api.create_repo(name.repo, private=private or None, exist_ok=True), name=name)
        with tempfile.TemporaryDirectory(prefix="convert-push-") as folder:
            staged = Path(folder)
            for file in files:  # links, so that only these are seen and nothing is copied
                link = staged / _within(path, file)
                link.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(file.resolve(), link)
            (staged / CARD).write_text(text, encoding="utf-8")
            commit = patiently(
                lambda: api.upload_folder(
                    repo_id=name.repo,
                    folder_path=staged,
                    revision=name.revision,
                    commit_message=f"Converted with {record.get('tool')}",
                ),
                name=name,
            )
    except ConvertError as error:
        raise _refused(error, name, path) from error
    finally:
        if quiet:
            huggingface_hub.utils.enable_progress_bars()
    return Pushed(name.repo, sizes, private, str(getattr(commit, "commit_url", commit)), text)


def _refused(error: ConvertError, name: Name, path: Path) -> ConvertError:
    """An upload fails for other reasons than a download, and can be continued."""
    again = f"The output is complete: {path}. `convert push {path} {name}` goes on with the upload."
    status = next((s for e in chain(error) if (s := status_of(e)) is not None), None)
    if status in (401, 403, 404):
        said = f"the Hub does not let this token write to {name.repo} ({status})."
        hint = f"Log in (hf auth login) or set HF_TOKEN to a token that may write there. {again}"
        return ConvertError(Problem("hub_forbidden", said, file=str(name), found=status, hint=hint))
    first = error.problems[0]
    return ConvertError(Problem(first.kind, first.message, file=str(name), found=first.found, hint=again))


def _within(out: Path, file: Path) -> str:
    """The name of a file in the repository."""
    return file.relative_to(out if out.is_dir() else out.parent).as_posix()


def _contents(path: Path, follow_links: bool) -> tuple[dict[str, Any], list[Path]]:
    """The record of an output, and the files that it names."""
    folder = path if path.is_dir() else path.parent
    place = path / RECORD_NAME if path.is_dir() else path.with_name(f"{path.name}.{RECORD_NAME}")
    if not path.exists():
        raise UsageError(f"{path} does not exist.", hint="Give the folder or file that a conversion made.")
    if not place.is_file():
        raise UsageError(
            f"{path} has no record ({place.name}), which the model card is made of.",
            hint="Only what a conversion here has made is uploaded; for anything else there is `hf upload`.",
        )
    if not follow_links:
        refuse_links([place], folder)
        if path.is_dir():
            refuse_side_links(folder)
    record = read_json(place)
    target = record.get("target") if isinstance(record, dict) else None
    if not isinstance(target, dict):
        raise UsageError(f"{place.name} is no record of a conversion.")
    names = [str(f.get("name")) for f in (*entries(target.get("files")), *entries(target.get("beside")))]
    safe = (n for n in dict.fromkeys(names) if n != CARD and not Path(n).is_absolute() and ".." not in Path(n).parts)
    files = [folder / n for n in safe]
    if not follow_links:
        refuse_links(files, folder)
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise ConvertError(
            Problem(
                "missing_file",
                f"{path} lacks {', '.join(missing[:5])}, which its record names.",
                file=str(path),
                hint="`convert check` tells more; convert again.",
            )
        )
    return record, [*files, place]
