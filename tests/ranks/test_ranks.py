"""Several ranks on this machine: the same bytes as one process, one failure that stops all, and resuming."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import convert
from convert.journal import JOURNAL_NAME
from tests.fixtures import make_hf, make_meta
from tests.trust.kinds import KINDS, SHAPE, Kind, hashes, make_source

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def environment(batch: list[list[str]], **more: str) -> dict[str, str]:
    return os.environ | {"BATCH": json.dumps(batch), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def torchrun(world: int, batch: list[list[str]], **more: str) -> subprocess.CompletedProcess[str]:
    """The batch by so many ranks, as a user starts them."""
    words = [*TORCHRUN, "--nproc-per-node", str(world), "-m", "tests.ranks.child"]
    return subprocess.run(words, env=environment(batch, **more), cwd=ROOT, capture_output=True, text=True)


def alone(world: int, batch: list[list[str]], **more: str) -> list[tuple[int, str, str]]:
    """The batch by so many ranks, started one by one as srun does: exit code, output and errors of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = environment(batch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, SLURM_NTASKS=str(world), **more)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks.child"],
            env=env
            | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    found = [rank.communicate(timeout=300) for rank in ranks]
    return [(rank.returncode, out, err) for rank, (out, err) in zip(ranks, found, strict=True)]


def words(kind: Kind, source: Path, out: Path, *more: str) -> list[str]:
    """The command line of a kind of conversion."""
    options = []
    for name, value in kind.options.items():
        if name == "tokenizer":
            options.append("--no-tokenizer")
        else:
            options += [f"--{name.replace('_', '-')}", str(value)]
    return ["to", kind.to, str(source), str(out), "--verify", "never", *options, *more]


def plain(kind: Kind, source: Path, out: Path, *more: str) -> dict[str, str]:
    """Hashes of what one process makes."""
    done = subprocess.run(
        [sys.executable, "-m", "convert", *words(kind, source, out, *more), "--quiet"], cwd=ROOT, env=environment([])
    )
    assert done.returncode == 0
    found = hashes(out.parent)
    shutil.rmtree(out.parent)
    return found


def kind(name: str) -> Kind:
    return next(k for k in KINDS if k.name == name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def place(folder: Path, name: str) -> Path:
    where = folder / name
    where.mkdir(parents=True)
    return where


def test_two_ranks_write_what_one_process_writes(folder, tmp_path):
    """CRCs, hashes, counted losses and a full check, joined from two ranks; rank 0 speaks alone."""
    pth, narrow = kind("hf-to-scratch --format pth"), kind("hf-to-scratch --dtype float16")
    source = make_source("hf", folder)
    wanted = [
        plain(pth, source, place(tmp_path, "a") / "out", "--hash"),
        plain(narrow, source, place(tmp_path, "b") / "out", "--check", "full"),
    ]
    a, b = place(tmp_path, "a") / "out", place(tmp_path, "b") / "out"
    done = torchrun(
        2,
        [
            words(pth, source, a, "--hash"),
            words(narrow, source, b, "--check", "full"),
            words(pth, source, a),
            ["inspect", str(a)],
        ],
        CODES=str(tmp_path / "codes"),
    )
    assert done.returncode == 0, done.stderr
    assert [hashes(a.parent), hashes(b.parent)] == wanted
    assert json.loads((tmp_path / "codes").read_text()) == [0, 0, 2, 0]
    assert done.stdout.count("Checked after writing") == 2
    assert done.stderr.count("exists already") == 1  # the control: a run that fails, and is told once
    assert done.stdout.count("layout") >= 1 and done.stdout.count("qk") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_any_number_of_ranks_writes_the_same_bytes(folder, tmp_path, world):
    batch, wanted, outs = [], {}, {}
    for number, k in enumerate(k for k in KINDS if not k.overwrite):
        source = make_source(k.source, folder)
        out = k.out(place(tmp_path, str(number)))
        wanted[k.name] = plain(k, source, out, "--hash")
        outs[k.name] = k.out(place(tmp_path, str(number)))
        batch.append(words(k, source, outs[k.name], "--hash", "--quiet"))
    done = torchrun(world, batch, CODES=str(tmp_path / "codes"))
    assert done.returncode == 0, done.stderr
    assert {name: hashes(out.parent) for name, out in outs.items()} == wanted
    assert json.loads((tmp_path / "codes").read_text()) == [0] * len(batch)


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 2, 3])
def test_a_killed_rank_stops_the_others_and_the_work_goes_on_from_there(folder, tmp_path, again):
    k = kind("hf-to-gguf --type q8_0")
    source = make_source("hf", folder)
    wanted = plain(k, source, k.out(place(tmp_path, "x")))
    out = k.out(place(tmp_path, "x"))
    began = time.monotonic()
    done = torchrun(3, [words(k, source, out, "--resume", "--threads", "1")], FAULT="kill:1:12")
    assert time.monotonic() - began < 90
    assert done.returncode != 0
    assert "rank 1 (" in done.stderr and "gave no sign of life" in done.stderr
    assert "--resume goes on from there" in done.stderr
    assert [p.name for p in out.parent.iterdir()] == [f"{out.name}.partial"]
    with pytest.raises(convert.ConvertError):
        convert.open_checkpoint(out.with_name(f"{out.name}.partial") / out.name)
    journals = {p.name for p in out.with_name(f"{out.name}.partial").glob(f"{JOURNAL_NAME}*")}
    assert journals == {JOURNAL_NAME, f"{JOURNAL_NAME}.1", f"{JOURNAL_NAME}.2"}
    last = words(k, source, out, "--resume", "--json")
    if again == 1:
        run = [sys.executable, "-m", "convert", *last]
        done = subprocess.run(run, cwd=ROOT, env=environment([]), capture_output=True, text=True)
    else:
        done = torchrun(again, [last])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed"] > 0
    assert hashes(out.parent) == wanted


@pytest.mark.slow
def test_without_resume_a_killed_rank_leaves_nothing(folder, tmp_path):
    k = kind("hf-to-meta, 8 files")
    source = make_source("hf", folder)
    out = k.out(place(tmp_path, "x"))
    done = torchrun(2, [words(k, source, out)], FAULT="kill:1:5")
    assert done.returncode != 0
    assert "rank 1 (" in done.stderr and "gave no sign of life" in done.stderr
    assert not list(out.parent.iterdir())


@pytest.mark.slow
def test_when_the_first_rank_is_killed_the_next_one_says_so(folder, tmp_path):
    k = kind("hf-to-scratch")
    source = make_source("hf", folder)
    out = k.out(place(tmp_path, "x"))
    done = torchrun(3, [words(k, source, out)], FAULT="kill:0:5")
    assert done.returncode != 0
    assert done.stderr.count("rank 0 was lost") == 1
    assert [p.name for p in out.parent.iterdir()] == ["out.partial"]
    assert plain(k, source, out)  # clears it away


@pytest.mark.slow
def test_one_rank_s_failure_is_told_by_the_first_and_ends_all(folder, tmp_path):
    """No launcher here: the ranks end each other."""
    k = kind("hf-to-scratch")
    source = make_source("hf", folder)
    out = k.out(place(tmp_path, "x"))
    lead, *others = alone(3, [words(k, source, out, "--json")], FAULT="full:2:4")
    assert [code for code, _, _ in (lead, *others)] == [1, 1, 1]
    problem = json.loads(lead[1])["problems"][0]
    assert problem["kind"] == "disk_full" and problem["message"].startswith("rank 2 (")
    assert [o[1:] for o in others] == [("", ""), ("", "")]
    assert not list(out.parent.iterdir())
    lead, *others = alone(2, [words(k, source, out)], FAULT="blind:1")
    assert (lead[0], others[0][0]) == (1, 1)
    assert "a filesystem that all machines share" in lead[2]
    assert not list(out.parent.iterdir())


@pytest.mark.slow
def test_after_a_failure_the_same_processes_convert_again(folder, tmp_path):
    """They leave what they met in, and meet anew: a run that failed, one that is refused, two that succeed."""
    k = kind("hf-to-scratch")
    source = make_source("hf", folder)
    wanted = plain(k, source, place(tmp_path, "x") / "out")
    a, b = place(tmp_path, "a") / "out", place(tmp_path, "b") / "out"
    batch = [words(k, source, out, "--quiet") for out in (a, a, a, b)]
    lead, other = alone(2, batch, FAULT="full:1:4", CODES=str(tmp_path / "codes"))
    assert json.loads((tmp_path / "codes").read_text()) == [1, 0, 2, 0], lead[2] + other[2]
    assert (lead[0], other[0]) == (0, 0) and lead[2].count("No space left") == 1
    assert hashes(a.parent) == hashes(b.parent) == wanted


@pytest.mark.slow
def test_each_rank_compares_a_share_of_the_crcs_and_all_fail_together(tmp_path):
    """Damage in either rank's share ends both; a sound source is the control, a small one is compared by rank 0."""
    source = make_meta(tmp_path / "meta", "h32kv8", mp=2).path
    sound = plain(kind("meta-to-scratch"), source, place(tmp_path, "x") / "out")
    out = place(tmp_path, "outs") / "out"
    command = words(kind("meta-to-scratch"), source, out, "--quiet")
    assert torchrun(2, [command], LARGE="1").returncode == 0
    assert hashes(out.parent) == sound
    shutil.rmtree(out.parent)
    with convert.open_checkpoint(source) as ckpt:
        halves = ckpt.tensors["tok_embeddings.weight"]  # the largest storages, so dealt first: one to each rank
    for rank, more in ((0, {"LARGE": "1"}), (1, {"LARGE": "1"}), (1, {})):
        whole = halves[rank].file.read_bytes()
        data = bytearray(whole)
        data[halves[rank].offset] ^= 1
        halves[rank].file.write_bytes(data)
        lead, other = alone(
            2, [words(kind("meta-to-scratch"), source, place(tmp_path, "outs") / "out", "--quiet")], **more
        )
        halves[rank].file.write_bytes(whole)
        assert (lead[0], other[0]) == (1, 1)
        assert lead[2].count("tok_embeddings.weight do not have the CRC-32") == 1
        assert ("rank 1 (" in lead[2]) == bool(rank and more)
        assert not list((tmp_path / "outs").iterdir())
        (tmp_path / "outs").rmdir()


@pytest.mark.slow
def test_values_too_large_in_one_rank_s_share_stop_all(tmp_path):
    source = make_hf(tmp_path / "source", SHAPE, dtype="float32").path
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    name = list(tensors)[-2]
    tensors[name].view(-1)[-1] = 1e6
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    out = place(tmp_path, "x") / "out"
    k = kind("hf-to-scratch --dtype float16")
    alone_said = subprocess.run(
        [sys.executable, "-m", "convert", *words(k, source, out)],
        cwd=ROOT,
        env=environment([]),
        capture_output=True,
        text=True,
    )
    said = alone(2, [words(k, source, out)])
    assert [s[0] for s in said] == [1, 1]
    assert said[0][2] == alone_said.stderr and "too large for F16" in said[0][2]
    assert not list(out.parent.iterdir())
    clamped = plain(k, source, out, "--clamp")
    place(tmp_path, "x")
    assert [s[0] for s in alone(2, [words(k, source, out, "--clamp")])] == [0, 0]
    assert hashes(out.parent) == clamped


def machines(ranks: int, batch: list[list[str]], partial: Path, *pull: str, **more: str) -> list[tuple[int, str, str]]:
    """The batch on two machines (network namespaces) with so many ranks each."""
    unshare = shutil.which("unshare"), shutil.which("nsenter"), shutil.which("ip")
    if None in unshare:
        pytest.skip("there is no unshare, nsenter or ip here")
    probe = subprocess.run(
        ["unshare", "-rn", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far"],
        capture_output=True,
        text=True,
    )
    if probe.returncode:
        pytest.skip(f"this system makes no network namespaces: {probe.stderr.strip()}")
    words = ["unshare", "-rn", sys.executable, "-m", "tests.ranks.namespaces", str(ranks), *pull]
    env = environment(batch, PARTIAL=str(partial), **more)
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [(code, out, err) for code, out, err in json.loads(done.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_two_machines_write_what_one_process_writes(folder, tmp_path, ranks):
    k = kind("meta-to-hf, 8 files to shards")
    source = make_source("meta", folder)
    wanted = plain(k, source, k.out(place(tmp_path, "x")), "--hash")
    out = k.out(place(tmp_path, "x"))
    near, far = machines(ranks, [words(k, source, out, "--hash", "--json")], tmp_path / "none")
    assert (near[0], far[0]) == (0, 0), near[2] + far[2]
    assert json.loads(near[1])["tensors"] > 0 and far[1] == ""
    assert hashes(out.parent) == wanted


@pytest.mark.slow
def test_a_cable_that_is_pulled_out_ends_both_machines(folder, tmp_path):
    """Nobody is told anything, and nobody waits forever."""
    k = kind("hf-to-scratch")
    source = make_source("hf", folder)
    out = k.out(place(tmp_path, "x"))
    command = words(k, source, out, "--threads", "1")
    began = time.monotonic()
    partial = out.with_name("out.partial") / "model.safetensors"
    near, far = machines(1, [command], partial, "1", FAULT="slow:0.5", LOST="6")
    assert time.monotonic() - began < 120
    assert near[0] != 0 and far[0] != 0
    assert "rank 1 (" in near[2] and "no sign of life" in near[2]
    assert not list(out.parent.iterdir())
