"""A hub on loopback for each test, an empty cache, and a way to call the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.server import Hub, Repo


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A server, with ``huggingface_hub`` turned to it."""
    from huggingface_hub import constants
    from huggingface_hub.utils import close_session

    server = Hub()
    for name, value in {
        "HF_HUB_OFFLINE": False,
        "ENDPOINT": server.url,
        "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DISABLE_SHARED_BLOBS": True,
        "HF_TOKEN_PATH": str(tmp_path / "no token"),
    }.items():
        if hasattr(constants, name):
            monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    close_session()
    monkeypatch.chdir(tmp_path)
    yield server
    close_session()
    server.close()


def put(hub: Hub, name: str, folder: Path, **more: Any) -> Repo:
    """A folder as a repository."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    hub.repos[name] = Repo(files, **more)
    return hub.repos[name]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process: exit code, standard output, standard error."""
    from convert.cli import cli as group
    from convert.cli import run

    def call(*args: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run(group, [str(a) for a in args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file of an output, the record without where it came from."""
    out = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    for name in [n for n in out if n.endswith("conversion.json")]:
        record = json.loads(out[name])
        record["source"].pop("hub", None)
        record["notes"] = [n for n in record["notes"] if "on the Hub" not in n and "not fetched" not in n]
        out[name] = json.dumps(record).encode()
    return out
