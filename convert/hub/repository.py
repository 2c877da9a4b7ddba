"""One repository at one commit: what it holds, with sizes and hashes as the Hub keeps them, and patience with it.

Two questions are asked of the Hub: which commit a revision is, and its tree. Which files matter is
:mod:`convert.hub.selection`'s business, their bytes :mod:`convert.hub.ranges`'.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from convert.hub.failures import BUSY, explain, is_transport, retry_after, status_of
from convert.hub.names import Name

T = TypeVar("T")

#: How often something is tried, and how long the longest wait is that a server may ask for, seconds.
TRIES = 5
LONGEST_WAIT = 120.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file as the repository's tree describes it.

    Attributes:
        path: In the repository, with ``/``.
        size: Bytes.
        sha256: Of its contents; None for a small file that is kept in git.
        blob: Git's hash of a small file, of the pointer of a large one.
    """

    path: str
    size: int
    sha256: str | None
    blob: str | None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository at one commit.

    Attributes:
        name: What the user wrote.
        commit: The commit that the revision was when it was looked up.
        files: Every file by its path.
    """

    name: Name
    commit: str
    files: dict[str, RemoteFile]

    @property
    def title(self) -> str:
        """For people: ``org/name@0123456789ab``."""
        return f"{self.name.repo}@{self.commit[:12]}"


def patiently(call: Callable[[], T], *, name: Name) -> T:
    """Call, and again while the Hub is busy or silent, as long as it asks for.

    Raises:
        ConvertError: It stays so, or it says something else than that it is busy.
    """
    for attempt in range(TRIES):
        try:
            return call()
        except Exception as error:
            wait = retry_after(error)
            again = status_of(error) in BUSY or (status_of(error) is None and is_transport(error))
            last = attempt == TRIES - 1 or (wait or 0) > LONGEST_WAIT
            if not again or last or _refused(error):
                raise explain(error, name, near=lambda: nearest(name)) from error
            time.sleep(0.5 * 2**attempt if wait is None else wait)
    raise AssertionError("unreachable")


def _refused(error: BaseException) -> bool:
    """Whether nobody listens there: asking again in a second would only delay the message."""
    return "ConnectError" in type(error).__name__


def look_up(name: Name) -> Repository:
    """Ask the Hub which commit is meant and what it holds.

    Raises:
        ConvertError: It cannot be seen, or not now.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoFile

    api = HfApi(library_name="ckpt-convert")
    info = patiently(lambda: api.model_info(name.repo, revision=name.revision), name=name)
    commit = str(info.sha)
    tree = patiently(lambda: list(api.list_repo_tree(name.repo, revision=commit, recursive=True)), name=name)
    files = {
        item.path: RemoteFile(item.path, item.size, item.lfs.sha256 if item.lfs else None, item.blob_id)
        for item in tree
        if isinstance(item, RepoFile)
    }
    return Repository(name, commit, files)


def nearest(name: Name) -> list[str]:
    """Names of repositories that come near a misspelt one, through the Hub's own search."""
    from huggingface_hub import HfApi

    api = HfApi(library_name="ckpt-convert")
    org, _, title = name.repo.partition("/")
    found: dict[str, None] = {}
    stem = title.replace("_", "-").split("-")[0]
    for query in dict.fromkeys((title, stem)):
        found |= {m.id: None for m in api.list_models(search=query, limit=20)}
    if not difflib.get_close_matches(name.repo, found, n=1, cutoff=0.8):
        found |= {m.id: None for m in api.list_models(author=org, limit=50)}
    return difflib.get_close_matches(name.repo, list(found), n=5, cutoff=0.5)
