"""Where output may go, what stands in its way, and what is left when a run fails."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import convert
from convert import claim, output, platform
from convert.claim import Claim
from convert.errors import ConvertError, UsageError
from convert.journal import JOURNAL_NAME
from convert.output import check_target
from convert.run import run
from tests.fixtures import make_hf, make_scratch


@pytest.fixture
def made(tmp_path):
    return make_hf(tmp_path / "source", "gqa8")


@pytest.fixture
def plan(made):
    found = convert.plan_conversion(made.path, "scratch")
    yield found
    found.source.close()


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


FINISHED = {"model.safetensors", "scratch_config.json", "conversion.json"}


def test_an_existing_output_is_kept(plan, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists already") as caught:
        run(plan, out)
    assert "--overwrite" in str(caught.value) and caught.value.exit_code == 2
    assert (out / "model.safetensors").read_bytes() == b"mine"


def test_overwrite_replaces_a_checkpoint_as_a_whole(plan, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in (
        "model.safetensors",
        "stale-00002-of-00002.safetensors",
        "config.json",
        "tokenizer.model",
        "README.md",
    ):
        (out / name).write_bytes(b"old")
    run(plan, out, overwrite=True)
    assert names(out) >= FINISHED and "stale-00002-of-00002.safetensors" not in names(out)
    assert names(tmp_path) == {"source", "out"}
    run(plan, out, overwrite=True)  # a plan may be carried out again
    assert names(tmp_path) == {"source", "out"}


@pytest.mark.parametrize("other", ["photos/", "thesis.docx", ".git/"])
def test_overwrite_never_replaces_other_things(plan, tmp_path, other):
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"old")
    (out / other).mkdir() if other.endswith("/") else (out / other).write_bytes(b"work")
    with pytest.raises(UsageError, match="more than a checkpoint") as caught:
        run(plan, out, overwrite=True)
    assert other.rstrip("/") in str(caught.value)
    assert (out / other).exists() and (out / "model.safetensors").read_bytes() == b"old"


def test_an_empty_folder_is_no_obstacle(plan, tmp_path):
    (tmp_path / "out").mkdir()
    run(plan, tmp_path / "out")
    assert names(tmp_path / "out") >= FINISHED


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_not_replaced_by_a_folder(plan, tmp_path, overwrite):
    (tmp_path / "out").write_bytes(b"a letter")
    with pytest.raises(UsageError, match="is a file; this layout is a folder"):
        run(plan, tmp_path / "out", overwrite=overwrite)
    assert (tmp_path / "out").read_bytes() == b"a letter"


@pytest.mark.parametrize("how", ["same", "dots", "link", "file", "inside"])
def test_the_source_is_never_the_output(plan, made, tmp_path, how, monkeypatch):
    (tmp_path / "link").symlink_to(made.path)
    out = {
        "same": made.path,
        "dots": made.path / ".." / "source",
        "link": tmp_path / "link",
        "file": made.path / "model.safetensors",
        "inside": tmp_path,
    }[how]
    before = {p: p.read_bytes() for p in made.path.iterdir()}
    with pytest.raises(UsageError, match=r"is the source itself|holds|is a file|more than a checkpoint"):
        run(plan, out, overwrite=True)
    assert {p: p.read_bytes() for p in made.path.iterdir()} == before


def test_a_source_that_is_one_file_in_the_output_folder(tmp_path):
    made = make_scratch(tmp_path / "out", "gqa8", format="pth")
    with pytest.raises(UsageError, match=r"source"):
        convert.convert_checkpoint(made.path / "model.pth", tmp_path / "out", to="hf", overwrite=True)
    assert (tmp_path / "out" / "model.pth").exists()


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_an_output_that_holds_links_to_the_source_is_refused(plan, made, tmp_path, link):
    out = tmp_path / "out"
    out.mkdir()
    link(made.path / "model.safetensors", out / "model.safetensors")
    before = (made.path / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="is a file of the source"):
        run(plan, out, overwrite=True)
    assert (made.path / "model.safetensors").read_bytes() == before
    assert (out / "model.safetensors").samefile(made.path / "model.safetensors")
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").write_bytes(before)  # the control: a copy is no link
    run(plan, out, overwrite=True)


def test_a_source_in_the_partial_folder_is_not_cleared_away(plan, made, tmp_path):
    run(plan, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "next.partial")
    before = (tmp_path / "next.partial" / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="would be prepared"):
        convert.convert_checkpoint(tmp_path / "next.partial", tmp_path / "next", to="hf")
    assert (tmp_path / "next.partial" / "model.safetensors").read_bytes() == before
    convert.convert_checkpoint(tmp_path / "next.partial", tmp_path / "other", to="hf")


def test_through_a_link_the_folder_behind_it_is_replaced(plan, tmp_path):
    big = tmp_path / "big disk"
    (big / "model").mkdir(parents=True)
    (big / "model" / "config.json").write_bytes(b"{}")
    (tmp_path / "out").symlink_to(big / "model")
    run(plan, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out").is_symlink() and names(big / "model") >= FINISHED
    assert names(big) == {"model"} and names(tmp_path) == {"source", "out", "big disk"}
    (tmp_path / "new").symlink_to(big / "not yet")
    run(plan, tmp_path / "new")
    assert (tmp_path / "new").is_symlink() and names(big / "not yet") >= FINISHED


def test_folders_on_the_way_are_made_and_taken_back(plan, tmp_path, monkeypatch):
    out = tmp_path / "a" / "b" / "out"
    run(plan, out)
    assert names(out) >= FINISHED
    monkeypatch.setattr("convert.run.read_back", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(plan, tmp_path / "c" / "d" / "out")
    with pytest.raises(ZeroDivisionError):
        run(plan, tmp_path / "a" / "e" / "out")
    assert names(tmp_path) == {"source", "a"} and names(tmp_path / "a") == {"b"}


def test_the_current_folder(plan, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in (".", "", "../here", "../here/."):
        with pytest.raises(UsageError, match="current folder"):
            run(plan, Path(name))
    run(plan, Path("x/../out"))
    assert names(Path(".")) == {"out"}
    run(plan, Path("../beside"))
    assert names(tmp_path / "beside") >= FINISHED


def test_places_that_cannot_be_written(plan, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file, so"):
        run(plan, tmp_path / "file" / "out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UsageError, match="may not be written"):
        run(plan, tmp_path / "out")
    assert names(tmp_path) == {"source", "file"}


def test_a_full_disk_is_seen_before_writing(plan, tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(ConvertError, match=r"needs [\d,]+ bytes .* 1,000 free") as caught:
        run(plan, tmp_path / "out")
    assert caught.value.problems[0].wanted == plan.nbytes and caught.value.exit_code == 1
    assert names(tmp_path) == {"source"}
    check_target(plan, tmp_path / "out", overwrite=False, force=True)


def test_two_runs_to_one_output_in_one_process(plan, tmp_path):
    """The second is refused while the first is at work, and allowed afterwards."""
    out = tmp_path / "out"
    seen: list[BaseException] = []

    def second(_: int) -> None:
        if not seen:
            try:
                run(plan, out)
            except BaseException as error:
                seen.append(error)

    run(plan, out, progress=second)
    assert isinstance(seen[0], ConvertError) and "another conversion is writing" in str(seen[0])
    assert names(out) >= FINISHED
    run(plan, out, overwrite=True)


HOLD = """
import sys, time
from pathlib import Path
from convert.claim import Claim
claim = Claim(Path(sys.argv[1]), single=False)
claim.take()
(claim.folder / "model.safetensors").write_bytes(b"half")
print("claimed", flush=True)
time.sleep(60)
"""


def test_another_process_and_its_remains(plan, tmp_path):
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "claimed\n"
        with pytest.raises(ConvertError, match="another conversion is writing"):
            run(plan, out)
        assert (tmp_path / "out.partial" / "model.safetensors").read_bytes() == b"half"
    finally:
        child.kill()
        child.wait()
    assert names(tmp_path) == {"source", "out.partial"}  # a killed process cleans nothing
    run(plan, out)  # and the next run does
    assert names(tmp_path) == {"source", "out"} and ".lock" not in names(out)


def test_without_locks_a_run_works_too(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "DISABLED", {"flock"})
    run(plan, tmp_path / "out")
    assert names(tmp_path) == {"source", "out"} and ".lock" not in names(tmp_path / "out")


def test_a_rename_that_fails_gives_the_old_folder_back(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "DISABLED", {"renameat2"})
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_bytes(b"old")
    real = os.replace

    def fail(a, b):
        if str(a).endswith(".partial"):
            raise KeyboardInterrupt
        real(a, b)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        run(plan, out, overwrite=True)
    monkeypatch.undo()
    assert (out / "model.safetensors").read_bytes() == b"old"
    assert names(tmp_path) == {"source", "out"}


def test_claims_of_many_threads(tmp_path):
    """Whoever comes first has it; nobody else gets in until it is given up."""
    got, refused = [], []
    barrier = threading.Barrier(8)

    def one() -> None:
        barrier.wait()
        try:
            claim = Claim(tmp_path / "out", single=False)
            claim.take()
            got.append(claim)
        except ConvertError:
            refused.append(1)

    threads = [threading.Thread(target=one) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(got) == 1 and len(refused) == 7
    got[0].abandon()
    assert not names(tmp_path)


@pytest.mark.parametrize("how", ["folder", "file", "link"])
def test_what_lies_where_the_partial_folder_belongs_is_not_cleared_away(plan, tmp_path, how):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "model.bin").write_bytes(b"half a download")
    place = tmp_path / "out.partial"
    if how == "file":
        place.write_bytes(b"half a download")
    else:
        theirs.rename(place) if how == "folder" else place.symlink_to(theirs)
    kept = place if how == "file" else place / "model.bin"
    with pytest.raises(UsageError, match="in the way"):
        run(plan, tmp_path / "out")
    assert kept.read_bytes() == b"half a download" and not (tmp_path / "out").exists()


def test_a_run_killed_before_the_rename_is_cleared_away(plan, tmp_path):
    run(plan, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")  # complete, its lock released
    run(plan, tmp_path / "out")
    assert names(tmp_path) == {"source", "out"}


def test_a_folder_called_replaced_is_kept(plan, tmp_path):
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "thesis.txt").write_bytes(b"work")
    run(plan, tmp_path / "out")
    run(plan, tmp_path / "out", overwrite=True)
    assert names(tmp_path) == {"source", "out", "out.replaced"}
    assert (tmp_path / "out.replaced" / "thesis.txt").read_bytes() == b"work"


def test_overwrite_does_not_replace_a_folder_of_notes(plan, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "diary.md").write_bytes(b"work")
    (out / "data.json").write_bytes(b"{}")
    with pytest.raises(UsageError, match="more than a checkpoint"):
        run(plan, out, overwrite=True)
    assert names(out) == {"diary.md", "data.json"}


def test_links_that_go_in_circles(plan, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")
    with pytest.raises((UsageError, OSError)):
        run(plan, tmp_path / "out", overwrite=True)
    assert names(tmp_path) == {"source", "out"}


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
def test_what_comes_into_the_output_meanwhile_is_never_replaced(plan, tmp_path, before, resume):
    """It was not there to be asked about, with --overwrite or without."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    finished = names(run(plan, out).out)
    if before == "nothing":
        shutil.rmtree(out)

    def somebody(_):
        out.mkdir(exist_ok=True)
        (out / "thesis.tex").write_text("years of work")

    with pytest.raises(ConvertError, match=r"thesis\.tex was put there while this ran") as caught:
        run(plan, out, overwrite=before != "nothing", resume=resume, progress=somebody)
    assert (out / "thesis.tex").read_text() == "years of work"
    assert names(out) == {"thesis.tex"} | (finished if before != "nothing" else set())
    assert partial.exists() and "with --resume gives it its name" in str(caught.value)
    (out / "thesis.tex").rename(tmp_path / "safe.tex")
    assert run(plan, out, overwrite=True, resume=True).resumed == sum(e.nbytes for f in plan.files for e in f.entries)
    assert names(out) == finished and not partial.exists()


@pytest.mark.parametrize("how", ["new", "exchange", "two renames"])
def test_what_is_complete_is_kept_when_it_cannot_get_its_name(plan, tmp_path, monkeypatch, how):
    """Hours of work are not thrown away for a rename that fails: not asked to resume, too."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    if how != "new":
        out.mkdir()
        (out / "model.safetensors").write_bytes(b"old")

    def refuse(a, b):
        if Path(a) == partial:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(a, b)

    if how == "exchange":
        real = claim.exchange
        monkeypatch.setattr(claim, "exchange", refuse)
    else:
        monkeypatch.setattr(platform, "DISABLED", {"renameat2"})
        real = os.replace
        monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(ConvertError, match="Permission denied") as caught:
        run(plan, out, overwrite=True)
    assert "All of it is written and checked" in str(caught.value) and caught.value.exit_code == 1
    monkeypatch.undo()
    assert names(tmp_path) == {"source", "out.partial", *(["out"] if how != "new" else [])}
    assert how == "new" or (out / "model.safetensors").read_bytes() == b"old"
    before = {p.name: p.stat().st_mtime_ns for p in partial.glob("*.safetensors")}
    assert run(plan, out, overwrite=True, resume=True).resumed == sum(e.nbytes for f in plan.files for e in f.entries)
    assert names(tmp_path) == {"source", "out"} and names(out) >= FINISHED and JOURNAL_NAME not in names(out)
    assert before and all((out / name).exists() for name in before)


def test_what_is_not_yet_checked_is_not_kept(plan, tmp_path, monkeypatch):
    """The control: the same failure a step before."""

    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(sys.modules["convert.run"], "read_beside", refuse)
    with pytest.raises(ConvertError, match="Permission denied") as caught:
        run(plan, tmp_path / "out")
    assert "--resume" not in str(caught.value) and names(tmp_path) == {"source"}


@pytest.mark.parametrize("split", [False, True])
def test_a_file_that_comes_meanwhile_is_never_replaced(made, tmp_path, split):
    sizes = {"split_max_size": 60_000} if split else {}
    with convert.plan_conversion(made.path, "gguf", tokenizer=False, **sizes).source as source:
        plan = convert.plan_conversion(source, "gguf", tokenizer=False, **sizes)
        out = tmp_path / "out" / "out.gguf"
        plan.bind(out)
        last = out.with_name(plan.files[-1].name)
        assert split == (last != out)
        with pytest.raises(ConvertError, match="was put there while this ran"):
            run(plan, out, progress=lambda _: last.write_text("mine"))
        assert names(out.parent) == {last.name, "out.gguf.partial"} and last.read_text() == "mine"
        out.with_name("other.txt").write_text("in nobody's way")
        with pytest.raises(UsageError, match="exists already"):  # nor is it by going on
            run(plan, out, resume=True)
        run(plan, out, overwrite=True, progress=lambda _: out.with_name("another.txt").write_text("nor is this"))
    assert {"other.txt", "another.txt", *(f.name for f in plan.files)} < names(out.parent)


def test_a_file_where_the_folder_belongs_meanwhile(plan, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConvertError, match="was put there while this ran"):
        run(plan, out, progress=lambda _: out.write_text("mine"))
    assert out.read_text() == "mine" and names(tmp_path) == {"out", "source", "out.partial"}
    out.unlink()
    assert run(plan, out, resume=True).resumed and names(tmp_path) == {"out", "source"}


def test_an_output_called_like_a_partial_folder(plan, made, tmp_path):
    """The run to the name without the ending would clear it away."""
    with pytest.raises(UsageError, match=r"names in \.partial"):
        run(plan, tmp_path / "out.partial")
    with pytest.raises(UsageError, match=r"names in \.partial"):
        convert.convert_checkpoint(made.path, tmp_path / "out.partial", to="meta", overwrite=True)


def test_the_root_is_no_output(plan, tmp_path):
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="no name for an output"):
            run(plan, Path("/"), overwrite=overwrite)


@pytest.mark.parametrize("how", ["a disk", "a folder of the same disk"])
def test_a_mount_point_is_told_before_the_work(plan, tmp_path, monkeypatch, how):
    """As a container's volume is one: a rename onto it fails, in the end."""
    out = tmp_path / "a b\\c"
    out.mkdir()
    mounted = tmp_path.resolve() / "a\\040b\\134c"
    if how == "a disk":
        monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == out)
    else:
        table = tmp_path / "mountinfo"
        table.write_text(f"36 35 98:0 / / rw - ext4 /dev/root rw\n37 36 98:0 /x {mounted} rw - ext4 /dev/root rw\n")
        monkeypatch.setattr(platform, "MOUNTS", str(table))
    with pytest.raises(UsageError, match="is a mount point"):
        run(plan, out)
    with pytest.raises(UsageError, match="is a mount point"):
        check_target(plan, out, overwrite=True)
    run(plan, out / "model")
    assert names(out) == {"model"}


def test_permissions_are_those_that_the_user_asks_for(plan, tmp_path):
    """As for any new file: what the umask leaves, so that a group may share it."""
    for mask in (0o077, 0o002, 0o022):
        old = os.umask(mask)
        try:
            run(plan, tmp_path / f"{mask:o}")
        finally:
            os.umask(old)
        assert {p.stat().st_mode & 0o777 for p in (tmp_path / f"{mask:o}").iterdir()} == {0o666 & ~mask}
        assert (tmp_path / f"{mask:o}").stat().st_mode & 0o777 == 0o777 & ~mask


def test_a_gguf_file_is_not_put_among_the_weights_that_it_is_made_of(made, tmp_path, monkeypatch):
    """From then on the folder would hold two models, and nothing could open it by its name."""
    monkeypatch.chdir(made.path)
    for src, out in ((made.path, made.path / "m.gguf"), (".", "m.gguf"), (made.path, "../source/./m.gguf")):
        with pytest.raises(UsageError, match="would lie among the weights of"):
            convert.convert_checkpoint(src, out, to="gguf", tokenizer=False)
    assert names(tmp_path) == {"source"}
    convert.convert_checkpoint(".", "../m.gguf", to="gguf", tokenizer=False)
    convert.convert_checkpoint("model.safetensors", "m.gguf", to="gguf", tokenizer=False)  # the file says which
    assert (made.path / "m.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(ConvertError, match="2 candidate sets"):
        convert.open_checkpoint(made.path)
