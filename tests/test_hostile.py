"""Hostile inputs of every kind, through the commands: one clear error, nothing run, nothing left, nothing large.

The inputs are made by :mod:`tests.trust.hostile`; how they are watched is in its ``harness``, and tested here with
readers that do what must not be done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import islice

import pytest

import convert
from tests.trust.hostile import bad_reader, base, catalogue, library, link_cases
from tests.trust.hostile.harness import COMMANDS, LATER, ROOT, Seen, Server
from tests.trust.hostile.tally import good_model, run_case, tally

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is measured by /proc")

CASES = list(catalogue.cases())
#: Of the groups of like inputs, every so-many-th by default; all of them with --all.
SHARE = 6
#: These take a second each, most of it to be made.
LARGE = [c for c in CASES if any(w in c.name for w in ("MB", "GB", "million", "000"))]
SMALL = [c for c in CASES if c not in LARGE]


def shm():
    """In memory where there is such a place: thousands of small files are made."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


@pytest.fixture(autouse=True)
def temporary(monkeypatch):
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", shm())


def test_names_are_unique_and_there_are_hundreds():
    assert not [n for n, k in Counter(c.name for c in CASES).items() if k > 1]
    assert len(CASES) > 350


def missing(covered, names):
    """What has no input: each entry is a name, or its beginning and ``*``."""
    said = [(kind, name) for kind, given in covered.items() for name in given]
    return [
        (kind, name)
        for kind, name in said
        if name not in names and not (name.endswith("*") and any(n.startswith(name[:-1]) for n in names))
    ]


def test_each_attack_that_was_to_be_tried_has_its_inputs():
    names = {c.name for c in CASES}
    assert all(catalogue.COVERED.values()) and not missing(catalogue.COVERED, names)
    assert missing(catalogue.COVERED, names - {"gguf: alignment 3"}) == [
        ("alignment 0 / 3 / 2^31", "gguf: alignment 3")
    ]


@pytest.mark.timeout(1200)  # a dozen seconds of processor; on a machine that others use, minutes
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, SHARE))])
def test_small_inputs(part):
    """Every usual command on a part of the inputs: by default one; the rest is slow."""
    cases = [c for i, c in enumerate(SMALL) if i % SHARE == part]
    counts, bad = tally(cases)
    assert not bad, "\n".join(bad)
    assert counts["refused"] > len(cases)


def test_some_large_inputs():
    counts, bad = tally(islice(LARGE, 0, None, 12))
    assert not bad, "\n".join(bad)
    assert counts["inputs"] >= 4


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(8))
def test_everything(part):
    _, bad = tally((c for i, c in enumerate(CASES) if i % 8 == part), everything=True)
    assert not bad, "\n".join(bad)


def test_through_a_process_of_its_own(tmp_path):
    """Some of it as a user would see it, with the memory that the kernel would give."""
    canary = tmp_path / "canary"
    picked = [c for c in SMALL if c.name in PICKED]
    assert len(picked) == len(PICKED)
    for number, case in enumerate(picked):
        folder = tmp_path / str(number) / "in"
        folder.mkdir(parents=True)
        src = case.build(folder)
        out = folder.parent / "out"
        done = subprocess.run(
            [sys.executable, "-m", "convert", "to", "scratch", str(src), str(out)],
            capture_output=True, text=True, timeout=300, cwd=ROOT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 1, (case.name, done)
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr and not done.stdout, case.name
        assert not out.exists() and not list(out.parent.glob("out*")) and not canary.exists()
        assert not list(tmp_path.glob("**/canary")), case.name


PICKED = {
    "pickle calls os.system",
    "pickle: a cycle through a state dict",
    "zip: zip64 sizes of 2^63",
    "safetensors: a header of 2^63",
    "index: ..",
    "index to a pipe",
    "config: 10^9 layers",
}


# ---- the harness sees what must not be -------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", bad_reader.FAULTS)
def test_a_bad_reader_is_seen(fault, tmp_path, monkeypatch):
    """The control: the same inputs, and a reader that runs pickles, writes beside, leaks, hangs, or leaves things."""
    monkeypatch.setenv("BAD_READER", fault)
    box = tmp_path / "box"
    (box / "in").mkdir(parents=True)
    (box / "out").mkdir()
    src = base.torch_folder(box / "in", base.archive(b"\x80\x02cos\nsystem\n(" + base.text("touch canary") + b"tR."))
    with Server(reader="tests.trust.hostile.bad_reader") as server:
        argv = [a.format(src=src, out=box / "out") for a in COMMANDS["to-scratch"]]
        faults = server.run(argv, box, box / "out").faults()
    assert any(bad_reader.FAULTS[fault] in f for f in faults), faults


def test_a_private_file_that_is_read_is_seen(tmp_path):
    """The control of the links: what is refused is read where the user says so, and that does not go unseen."""
    case = next(c for c in CASES if c.name == "config.json is a link to a private file")
    box = tmp_path / "box"
    (box / "in").mkdir(parents=True)
    (box / "out").mkdir()
    src = case.build(box / "in")
    with Server() as server:
        refused, read = (
            server.run(["inspect", str(src), *more], box, box / "out") for more in ([], ["--follow-links"])
        )
    assert refused.code == 1 and not refused.faults()
    assert read.code == 0 and any("decoys/config.json" in e for e in read.events)


@pytest.mark.timeout(400)  # a second server, which imports torch
def test_a_sound_model_passes_every_command(tmp_path):
    """The other control: what the inputs are made from is no fault of theirs."""
    good = good_model(tmp_path / "good")
    from tests.trust.hostile.harness import Case

    def gguf(folder):
        (folder / "m.gguf").write_bytes(base.gguf())
        return folder / "m.gguf"

    usual = ("inspect", "inspect-json", "validate", "scan", "to-scratch", "to-hf", "to-gguf")
    sound = [
        Case("sound safetensors", lambda f: base.hf(f), (*usual, "diff", "check-source"), frozenset(COMMANDS), ()),
        Case("sound torch", lambda f: base.torch_folder(f, base.archive()), usual, frozenset(COMMANDS), ()),
        Case("sound Hub cache", link_cases.cached, link_cases.COMMANDS, frozenset(COMMANDS), ()),
        Case("sound gguf", gguf, (*usual, "metadata", "repair", "open", "load-into"), frozenset(COMMANDS), ()),
        Case("sound output", link_cases.sound, (*LATER, "verify-text", "push", "hash"), frozenset(COMMANDS), ()),
    ]
    with Server() as server:
        for case in sound:
            for command, seen, faults in run_case(server, case, tmp_path, good, everything=False):
                # The model is not run, or would be the same with a fault.
                undecided = 3 if command.startswith(("diagnose", "verify")) else 0
                assert seen.code in (0, undecided) and not faults, (case.name, command, seen)


def test_a_module_that_a_refused_checkpoint_changed_is_seen(tmp_path, monkeypatch):
    def hasty(model, src):
        model.lm_head.weight.data.fill_(1)
        raise convert.ConvertError("the second tensor does not fit.")

    good = good_model(tmp_path / "good")
    assert library.main(["load-into", str(good), str(good)]) == 0
    (good / "model.safetensors").write_bytes(base.safetensors()[:-1])
    assert library.main(["load-into", str(good), str(good)]) == 1
    monkeypatch.setattr(convert, "load_into", hasty)
    with pytest.raises(AssertionError, match=r"changed lm_head\.weight"):
        library.main(["load-into", str(good), str(good)])


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (1, "", "error: a.bin: it is damaged.\n", None),
        (1, "NOT ok: a.bin: 1 problem\n", "", "does not begin"),
        (2, "", "error: a.bin: it is damaged.\n", "exit code 2"),
        (1, "", "warning: a.bin\nerror: a.bin: it is damaged.\n", "does not begin"),
        (1, "", "error: it is damaged.\n", "names no file"),
        (1, "a.bin\n", "error: a.bin: it is damaged.\n", "words on standard output"),
        (1, "", "error: a.bin: it is damaged.\nerror: a.bin: it is damaged.\n", "said twice"),
        (1, "", "error: a.bin: \x1b[2J\n", "control characters"),
        (0, "ok: a.bin\n", "", "exit code 0"),
    ],
)
def test_what_is_no_clear_error_is_seen(code, out, err, fault):
    late = Seen(code, 0.1, 30, out, err, late=True).faults(about=["a.bin"])
    assert ("torch was loaded before it refused" in late) == (code == 1 and "error: " in err)
    found = Seen(code, 0.1, 30, out, err).faults(about=["a.bin"])
    assert found == [] if fault is None else any(fault in f for f in found), found
    if out.startswith("NOT ok"):
        assert not Seen(code, 0.1, 30, out, err).faults(report=True, about=["a.bin"])
