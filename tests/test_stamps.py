"""Whether files are still the ones that were opened, whatever was done to hide it."""

from __future__ import annotations

import os

import pytest

import convert
from convert.errors import ConvertError
from convert.run import run
from convert.stamps import changes, stamps, touched
from tests.fixtures import make_hf


@pytest.fixture
def made(tmp_path):
    return make_hf(tmp_path / "source", "gqa8", tokenizer=120)


def rewrite(path, data: bytes, at: int, mtime_ns: int) -> None:
    """Write to a file, and set its time back to what its caller saw before any thread wrote."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def test_a_time_that_was_set_back(made, tmp_path):
    """Two bytes at the end of the weights: no sampled block holds them; then the same run without it."""
    path = made.path / "model.safetensors"
    size, written = path.stat().st_size, path.stat().st_mtime_ns
    old = path.read_bytes()[-2:]

    def late(count: int) -> None:
        seen.append(count)
        if sum(seen) > size * 0.99:
            rewrite(path, b"\x12\x34", size - 2, written)

    seen: list[int] = []
    with pytest.raises(ConvertError, match="differs from the source"):
        convert.convert_checkpoint(made.path, tmp_path / "out", to="hf", max_shard_size=10**9, threads=1, progress=late)
    assert not (tmp_path / "out").exists()
    rewrite(path, old, size - 2, written)
    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="hf")
    assert summary.checked == "sampled"


def test_what_is_done_to_a_source_without_harm(made, tmp_path):
    """A backup's link, a mode: no reason to stop or to compare; the same bytes again: compared, and right."""
    path = made.path / "model.safetensors"

    def linked(_: int) -> None:
        if not (tmp_path / "backup").exists():
            os.link(path, tmp_path / "backup")
            path.chmod(0o600)

    summary = convert.convert_checkpoint(made.path, tmp_path / "out", to="scratch", threads=1, progress=linked)
    assert summary.checked == "sampled"
    again, written = path.read_bytes()[:2], path.stat().st_mtime_ns

    def rewritten(_: int) -> None:
        rewrite(path, again, 0, written)

    summary = convert.convert_checkpoint(made.path, tmp_path / "other", to="scratch", threads=1, progress=rewritten)
    assert summary.checked == "full"


def test_another_file_that_had_the_name_for_a_while(made, tmp_path):
    path, kept, other = made.path / "model.safetensors", tmp_path / "kept", tmp_path / "other"
    other.write_bytes(path.read_bytes())
    with convert.open_checkpoint(made.path) as opened:
        plan = convert.plan_conversion(opened, "scratch")
        before = stamps([path])
        path.rename(kept)
        other.rename(path)
        opened.pool.close()
        opened.pool.fd(path)  # read while it had the name
        path.rename(other)
        kept.rename(path)
        assert not changes(before) and changes(before, opened.pool.opened) and touched(before)
        with pytest.raises(ConvertError, match="replaced by another file"):
            run(plan, tmp_path / "out")
        assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
        opened.pool.close()
        run(plan, tmp_path / "out")


@pytest.mark.parametrize("target", ["scratch", "hf"])
def test_a_tokenizer_that_changes_meanwhile(made, tmp_path, target):
    """It is copied when the weights are done: hours later, perhaps."""
    path = made.path / "tokenizer.json"
    before = path.read_bytes()
    with pytest.raises(ConvertError, match=r"tokenizer\.json (changed its size|was written to)"):
        convert.convert_checkpoint(
            made.path, tmp_path / "out", to=target, progress=lambda _: path.write_bytes(b'{"model": {}}')
        )
    assert not (tmp_path / "out").exists()
    path.write_bytes(before)
    convert.convert_checkpoint(made.path, tmp_path / "out", to=target)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before
