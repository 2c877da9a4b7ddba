"""The command line from outside: exit codes, what is printed where, what is imported, and what signals leave behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.cli import COMMANDS, cli, run
from tests.fixtures import make_gguf, make_hf, make_meta, make_scratch
from tests.reference.models import one_thread  # noqa: F401

PYTHON = [sys.executable, "-m", "convert"]
ROOT = Path(__file__).parents[1]
#: A conversion whose every piece takes a while, so that there is a middle to look at.
SLOW = """
import sys, time
from convert import writer
real = writer.Writer.write_piece
def slow(self, *piece):
    time.sleep(0.15)
    return real(self, *piece)
writer.Writer.write_piece = slow
from convert.cli import main
main(sys.argv[1:])
"""
#: One that comes to no end by itself, so that a signal finds its middle however late it is sent.
HELD = """
import sys
from convert import writer
real = writer.Writer.write_piece
def held(self, *piece):
    found = real(self, *piece)
    self.failed.wait(100)
    return found
writer.Writer.write_piece = held
from convert.cli import main
main(sys.argv[1:])
"""
#: Seconds until something counts as hanging: a busy machine may need many for what takes half of one.
PATIENCE = 100


def until(child: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Wait for what ``child`` is to do."""
    end = time.monotonic() + PATIENCE
    while not condition() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.02)
    assert condition(), child.communicate(timeout=PATIENCE)


def shell(*args: object, **options: object) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    command = [*PYTHON, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, **options)  # type: ignore[call-overload]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """As on a machine without one: `--verify auto` says how to verify."""
    monkeypatch.setattr("convert.devices.gpu_present", lambda: False)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    return make_hf(tmp_path_factory.mktemp("cli") / "model", "gqa8", dtype="bfloat16", tokenizer=120).path


def call(*args: object) -> int:
    return run(cli, [str(a) for a in args])


# --- exit codes -------------------------------------------------------------------------------------------------------


def test_0_and_what_is_said(hf, tmp_path, capsys):
    assert call("hf-to-scratch", hf, tmp_path / "out") == 0
    out, err = capsys.readouterr()
    assert "21 tensors" in out and "Checked after writing: sizes, headers, 21 sampled blocks." in out
    assert f"convert verify {hf} {tmp_path / 'out'}" in out
    assert err == ""


def test_1_for_findings(tmp_path, capsys):
    made = make_hf(tmp_path / "m", "gqa8")
    with (made.path / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    assert call("hf-to-scratch", made.path, tmp_path / "out") == 1
    assert call("validate", made.path) == 1
    err = capsys.readouterr().err
    assert "error: " in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_2_for_usage(hf, tmp_path, capsys):
    for args in (
        ["hf-to-scratch", tmp_path / "nowhere", tmp_path / "out"],
        ["hf-to-scratch", hf],
        ["hf-to-scratch", hf, tmp_path / "out", "--dtype", "int3"],
        ["hf-to-hf-to-hf"],
        ["to", "paper", hf, tmp_path / "out"],
        ["hf-to-scratch", hf, hf],
        ["hf-to-scratch", hf, tmp_path / "out", "--names", "no_such_names"],
        ["hf-to-hf", hf, tmp_path / "out", "--max-shard-size", "much"],
        ["to", "hf", hf, tmp_path / "out", "--max-shard-size", "1e400GB"],
        ["hf-to-meta", hf, tmp_path / "out", "--model-parallel", "0"],
    ):
        assert call(*args) == 2, args
        err = capsys.readouterr().err
        assert ("rror" in err or "Usage" in err) and "Traceback" not in err, args
    assert not list(tmp_path.iterdir())
    assert call("to", "paper", hf, tmp_path / "out") == 2
    err = capsys.readouterr().err
    assert "No such layout 'paper'. It comes first, and is one of: gguf, hf, meta, scratch." in err
    assert call("to", "hf", hf) == 2 and "Missing argument 'OUT'" in capsys.readouterr().err  # the control


@pytest.mark.parametrize("what", ["qk", "key", "config", "names"])
def test_the_line_it_prints_verifies_what_was_said_of_the_source(tmp_path, capsys, what, one_thread):  # noqa: F811
    """Rows of Q and K in Hugging Face's order under Meta's names: as the names say, verify would see another model."""
    import shlex

    import torch

    made = make_meta(tmp_path / "a", "gqa8") if what == "qk" else make_scratch(tmp_path / "a", "gqa8", format="pth")
    place = next(made.path.glob("*.pth"))
    said = {"qk": ["--qk-layout", "hf"], "key": ["--key", "model"], "names": ["--names", "litgpt"]}.get(what, [])
    if what == "qk":
        pairs = {"wq": "q_proj", "wk": "k_proj"}
        state = {
            n: made.hf[f"model.layers.{n.split('.')[1]}.self_attn.{p}.weight"]
            if (p := pairs.get(n.split(".")[-2]))
            else t
            for n, t in made.tensors.items()
        }
        torch.save(state, place)
    elif what == "key":
        torch.save({"model": made.tensors, "ema": {n: t.flip(0) for n, t in made.tensors.items()}}, place)
    elif what == "config":
        (made.path / "scratch_config.json").rename(tmp_path / "said.json")
        said = ["--config", str(tmp_path / "said.json")]
    else:
        hf = make_hf(tmp_path / "hf", "gqa8")
        place.unlink()
        assert call("hf-to-scratch", hf.path, tmp_path / "lit", "--names", "litgpt") == 0
        (tmp_path / "lit" / "model.safetensors").rename(made.path / "model.safetensors")
        capsys.readouterr()
    assert call("to", "hf", made.path, tmp_path / "out", *said) == 0
    line = capsys.readouterr().out.split("To verify it on the CPU: ")[1].splitlines()[0]
    args = shlex.split(line)[1:]
    assert args[-2:] == said
    assert call(*args, "--quiet") == 0
    if what != "names":  # the control: without what was said it does not pass
        assert call(*args[:-2], "--quiet") in (1, 2)


def test_names_given_to_verify_win_over_the_record(hf, tmp_path, capsys, one_thread):  # noqa: F811
    """Rows stored in another order than the names given say: the record must not decide in their place."""
    lie = (ROOT / "mappings" / "names" / "litgpt.toml").read_text().replace('rope = "half"', 'rope = "interleaved"')
    (tmp_path / "mine.toml").write_text(lie)
    assert call("hf-to-scratch", hf, tmp_path / "out", "--names", tmp_path / "mine.toml", "--quiet") == 0
    for names, code in ((["--names", tmp_path / "mine.toml"], 0), (["--names", "litgpt"], 1), ([], 0)):
        assert call("verify", hf, tmp_path / "out", "--quiet", *names) == code, names
        assert call("verify", tmp_path / "out", hf, "--quiet", *names) == code, names


MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch, "gguf": make_gguf}


@pytest.mark.parametrize("source", MAKERS)
@pytest.mark.parametrize("said", ["hf", "meta", "scratch", "gguf"])
def test_the_wrong_command_names_the_right_one(tmp_path, capsys, source, said):
    """Every command that there is, on every other source."""
    made = MAKERS[source](tmp_path / "m.gguf" if source == "gguf" else tmp_path / "m", "gqa8")
    for target in ("hf", "meta", "scratch"):
        if said in (source, target):
            continue
        assert call(f"{said}-to-{target}", made.path, tmp_path / "out") == 2
        err = capsys.readouterr().err
        assert f"in the {source} layout, not {said}" in err
        assert (f"`convert {source}-to-{target}`" in err) or (source == target and "already" in err)
    assert not (tmp_path / "out").exists()


def test_a_misspelt_command(capsys):
    assert call("hf-to-scrach", "a", "b") == 2
    assert "Did you mean hf-to-scratch" in capsys.readouterr().err
    assert call("verfy", "a", "b") == 2
    assert "verify" in capsys.readouterr().err
    assert call("xyzzy") == 2
    assert "Did you mean" not in capsys.readouterr().err


def test_3_for_a_weak_verdict_and_1_for_fail(hf, tmp_path, capsys, monkeypatch):
    """Real verdicts: equal models whose weights could not show a fault, and another model."""
    weak = make_hf(tmp_path / "weak", "gqa8")
    from safetensors.torch import load_file, save_file

    state = load_file(weak.path / "model.safetensors")
    save_file({k: t * 0 if "embed" in k else t for k, t in state.items()}, weak.path / "model.safetensors")
    assert call("hf-to-meta", weak.path, tmp_path / "meta", "--verify", "always") == 3
    assert "verify: weak" in capsys.readouterr().out
    assert (tmp_path / "meta").is_dir()  # weak is kept
    assert call("verify", weak.path, tmp_path / "meta") == 3
    other = make_hf(tmp_path / "other", "gqa8", seed=5)
    assert call("verify", hf, other.path, "--quiet") == 1
    assert capsys.readouterr().out.count("verify: weak") == 1


def test_a_conversion_that_fails_verification_is_renamed(hf, tmp_path, capsys, monkeypatch):
    from convert.source import RopePermuted

    monkeypatch.setattr(RopePermuted, "read", lambda self, a, b: self.source.read(a, b))  # a fault of ours
    (tmp_path / "out.failed").mkdir()
    (tmp_path / "out.failed" / "thesis.tex").write_text("somebody's")
    for number in (1, 2):
        assert call("hf-to-meta", hf, tmp_path / "out", "--verify", "always") == 1
        out = capsys.readouterr().out
        assert "verify: fail" in out and f"renamed to {tmp_path / 'out.failed'}{number}." in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.failed", "out.failed1", "out.failed2"]
    assert (tmp_path / "out.failed" / "thesis.tex").read_text() == "somebody's"


def test_always_passes_on_a_good_conversion(hf, tmp_path, capsys):
    assert call("hf-to-meta", hf, tmp_path / "out", "--verify", "always", "--json") == 0
    assert json.loads(capsys.readouterr().out)["verify"]["verdict"] == "pass"


def _listening() -> None:
    """The tests may run under nohup or in a background job, whose children ignore these signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("target", ["scratch", "meta"])
def test_signals_in_the_middle_leave_nothing(hf, tmp_path, number, code, target):
    child = subprocess.Popen(
        [sys.executable, "-c", HELD, f"hf-to-{target}", str(hf), str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=_listening,
    )
    partial = tmp_path / "out.partial"
    until(child, lambda: any(p.suffix in (".pth", ".safetensors") for p in partial.glob("*")))
    time.sleep(0.2)
    child.send_signal(number)
    out, err = child.communicate(timeout=PATIENCE)
    assert child.returncode == code, err
    assert "Nothing was left behind" in err and "Traceback" not in err and out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("signals", [(signal.SIGINT,) * 9, (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) * 3])
def test_impatience_does_not_stop_the_cleaning_up(hf, tmp_path, signals):
    """What it says of what is left has to stay true."""
    child = subprocess.Popen(
        [sys.executable, "-c", HELD, "hf-to-scratch", str(hf), str(tmp_path / "out"), "--threads", "4"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=_listening,
    )
    until(child, (tmp_path / "out.partial" / "model.safetensors").exists)
    time.sleep(0.1)
    for number in signals:
        child.send_signal(number)
        time.sleep(0.01)
    err = child.communicate(timeout=PATIENCE)[1]
    assert child.returncode == 128 + signals[0], err
    assert "Nothing was left behind" in err and "Traceback" not in err and not list(tmp_path.iterdir())


def test_a_hangup_that_the_caller_ignores_is_ignored(hf, tmp_path):
    """As under nohup: the conversion goes on."""
    out = tmp_path / "out"
    command = ["nohup", sys.executable, "-c", SLOW, "hf-to-scratch", str(hf), str(out)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    until(child, lambda: out.with_name("out.partial").exists() or out.exists())
    child.send_signal(signal.SIGHUP)
    assert child.wait(PATIENCE) == 0 and (out / "conversion.json").is_file()


# --- what is printed --------------------------------------------------------------------------------------------------


def test_json_is_all_there_is_on_stdout(hf, tmp_path, capsys):
    assert call("hf-to-meta", hf, tmp_path / "out", "--json", "--dtype", "float16") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert set(found) == {
        *("schema", "out", "files", "tensors", "bytes", "seconds", "underflowed", "clamped", "resumed", "check"),
        *("checked_blocks", "notes", "verify"),
    }
    assert found["schema"] == "convert.conversion/1" and found["out"] == str(tmp_path / "out")
    assert sorted(found["files"]) == sorted(p.name for p in (tmp_path / "out").iterdir())
    assert found["bytes"] == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


def test_documented_keys_of_the_other_commands(hf, tmp_path, capsys):
    """The keys that the README documents; more may come, none may go."""
    wanted = {
        ("inspect", hf): "schema format layout family dtype parameters parameters_stored tied rope n_layers n_heads "
        "n_kv_heads head_dim vocab_size tensors notes",
        ("validate", hf): "schema ok problems",
        ("verify", hf, hf): "schema verdict device max_abs nmse kl_max kl_mean top1 first_diff_position control",
    }
    for args, keys in wanted.items():
        assert call(*args, "--json") == 0
        out, err = capsys.readouterr()
        assert set(keys.split()) <= set(json.loads(out)) and err == ""


def test_a_dry_run_sees_a_full_disk(hf, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.output.shutil.disk_usage", lambda _: shutil._ntuple_diskusage(9, 0, 9))
    assert call("hf-to-meta", hf, tmp_path / "out", "--dry-run") == 1
    assert "would stop here: the output needs" in capsys.readouterr().out
    assert call("hf-to-meta", hf, tmp_path / "out", "--dry-run", "--force") == 0


def test_options_that_would_change_nothing(hf, tmp_path, capsys):
    assert call("hf-to-meta", hf, tmp_path / "a", "--class", "Llama3Model") == 2
    assert "only applies to a from-scratch target" in capsys.readouterr().err
    assert call("hf-to-scratch", hf, tmp_path / "b", "--class", "Llama3Model", "--tie", "share") == 0  # the control
    assert "--tie share changes nothing" in capsys.readouterr().out
    tied = make_hf(tmp_path / "tied", "tied").path
    assert call("hf-to-meta", tied, tmp_path / "c", "--tie", "share") == 0
    assert "--tie share changes" not in capsys.readouterr().out


def test_json_of_a_failure(hf, tmp_path, capsys):
    """One object on standard output there too; the text and the exit code are as without --json."""
    bias = make_hf(tmp_path / "bias", "gqa8", attention_bias=True).path
    cases = [
        (("hf-to-meta", bias, tmp_path / "x"), 1, "no biases"),
        (("hf-to-meta", tmp_path / "nothing", tmp_path / "x"), 2, "does not exist"),
        (("inspect", tmp_path / "nothing"), 2, "does not exist"),
        (("verify", hf, tmp_path / "nothing"), 2, "does not exist"),
        (("verify", hf), 2, "Missing argument 'B'"),
        (("hf-to-meta", hf, tmp_path / "x", "--colour"), 2, "No such option"),
    ]
    keys = {"kind", "message", "tensor", "file", "found", "wanted", "hint"}
    for args, code, words in cases:
        assert call(*args) == code  # the control
        plain = capsys.readouterr()
        assert plain.out == ""
        assert call(*args, "--json") == code
        out, err = capsys.readouterr()
        found = json.loads(out)
        assert found["schema"] == "convert.error/1" and found["ok"] is False and err == plain.err
        assert all(set(p) == keys for p in found["problems"])
        assert words in found["problems"][0]["message"]


def test_quiet_prints_nothing(hf, tmp_path, capsys):
    assert call("hf-to-scratch", hf, tmp_path / "a", "--quiet") == 0
    assert call("to", "meta", hf, tmp_path / "b", "-q", "--verify", "always") == 0
    assert call("verify", hf, tmp_path / "b", "-q") == 0
    assert call("validate", hf, "-q") == 0
    assert capsys.readouterr() == ("", "")
    assert call("hf-to-scratch", hf, tmp_path / "a", "--quiet") == 2  # errors are still told
    assert "exists already" in capsys.readouterr().err


def test_dry_run_writes_nothing_and_tells_all(hf, tmp_path, capsys):
    before = sorted(p.name for p in tmp_path.iterdir())
    assert call("hf-to-meta", hf, tmp_path / "out", "--model-parallel", 2, "--dry-run") == 0
    text = capsys.readouterr().out
    for part in ("consolidated.00.pth", "consolidated.01.pth", "params.json", "free", "peak memory", "interleaved"):
        assert part in text
    assert "Nothing was written" in text
    assert call("hf-to-meta", hf, tmp_path / "out", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert {
        *("schema", "source", "source_layout", "family", "target_layout", "out", "files", "sidecars", "bytes_read"),
        *("bytes_written", "bytes_free", "peak_memory", "tied", "notes"),
    } <= set(plan)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    assert call("hf-to-meta", hf, tmp_path / "out", "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == plan["bytes_written"]
    assert plan["problems"] == []  # the control
    # and what cannot be done is refused in a dry run too
    there = sorted((tmp_path / "out").iterdir())
    for out, said in ((tmp_path / "out", "exists already"), (hf, "is the source itself")):
        assert call("hf-to-meta", hf, out, "--dry-run") == call("hf-to-meta", hf, out) == 2
        assert f"would stop here: {out} {said}" in capsys.readouterr().out
    assert call("hf-to-meta", hf, tmp_path / "out", "--dry-run", "--json") == 2
    assert "exists already" in json.loads(capsys.readouterr().out)["problems"][0]["message"]
    assert call("hf-to-meta", hf, tmp_path / "out", "--dry-run", "--overwrite") == 0
    assert sorted((tmp_path / "out").iterdir()) == there
    bias = make_hf(tmp_path / "bias", "gqa8", attention_bias=True)
    assert call("hf-to-meta", bias.path, tmp_path / "x", "--dry-run") == 1


@pytest.mark.parametrize("where", ["before", "after"])
def test_debug_shows_the_traceback(hf, tmp_path, capsys, where):
    args = ["hf-to-meta", tmp_path / "nothing", tmp_path / "out"]
    assert call(*(["--debug", *args] if where == "before" else [*args, "--debug"])) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_is_one_line(hf, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("convert.run.read_back", lambda *_, **__: 1 / 0)
    assert call("hf-to-meta", hf, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError" in err and "--debug" in err and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_no_memory_for_a_thread_is_no_bug(hf, tmp_path, capsys, monkeypatch):
    """Python raises RuntimeError then, with these words."""

    def none(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("convert.run.read_back", none)
    assert call("hf-to-meta", hf, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "out of memory. Use fewer --threads." in err and "bug" not in err
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line(hf, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("convert.writer.write_at", full)
    assert call("hf-to-meta", hf, tmp_path / "out") == 1
    err = capsys.readouterr().err
    assert "consolidated.00.pth could not be written: No space left on device." in err and len(err.splitlines()) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize("closed", ["full", "pipe"])
def test_standard_output_that_cannot_be_written(hf, tmp_path, words, closed):
    """The conversion is complete all the same, and says so where it can; no traceback at the end either."""
    out = tmp_path / "out"
    if closed == "full":
        target = os.open("/dev/full", os.O_WRONLY)
    else:
        read, target = os.pipe()
        os.close(read)
    command = [*PYTHON, "hf-to-scratch", str(hf), str(out), "--verify", "never", *words]
    done = subprocess.run(command, stdout=target, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE)
    os.close(target)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert f"the conversion itself is complete: {out}." in done.stderr
    assert (out / "conversion.json").is_file() and shell("validate", out).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", [("inspect",), ("validate",), ("inspect", "--json")])
def test_a_full_disk_behind_standard_output_is_called_that(hf, words):
    """The system's words name no file: it could have been any."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PYTHON, *words, str(hf)], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: No space left on device (standard output")
    assert shell(*words, hf).returncode == 0  # the control


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_standard_streams_that_are_closed(hf, tmp_path, closed):
    """As in some service managers: no file of the conversion gets their numbers."""
    out = tmp_path / "out"
    seen = (
        "import os, sys; from convert import writer; real = writer.Writer.write_piece\n"
        "def piece(self, *a): os.write(2, b'x'); assert min(self.fds) > 2; return real(self, *a)\n"
        "writer.Writer.write_piece = piece\nfrom convert.cli import main; main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", seen, "hf-to-scratch", str(hf), str(out), "--verify", "never", "--check", "full"]
    done = subprocess.run(
        command, cwd=ROOT, timeout=PATIENCE, preexec_fn=lambda: [os.close(number) for number in closed]
    )
    assert done.returncode == 0 and (out / "conversion.json").is_file()


@pytest.mark.parametrize("encoding", ["cp1252", "latin-1"])
def test_a_console_of_another_encoding(hf, tmp_path, encoding):
    out = tmp_path / "\u65e5\u672c"
    command = [*PYTHON, "hf-to-scratch", str(hf), str(out), "--verify", "never"]
    env = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE, env=env)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "\\u65e5" in done.stdout and (out / "conversion.json").is_file()


def test_version_help_and_no_command(capsys):
    assert call("--version") == 0
    assert "version" in capsys.readouterr().out
    for args in (["--help"], ["-h"]):
        assert call(*args) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if "-to-" in c])
def test_every_conversion_has_the_common_options(command, capsys):
    assert call(command, "--help") == 0
    out = capsys.readouterr().out
    options = (
        "--dtype --overwrite --dry-run --verify --family --class --layout --qk-layout --key --tie --context --force"
    )
    options += " --names --config --size --threads --json --quiet --debug"
    missing = [o for o in options.split() if o not in out]
    if command.endswith("gguf"):
        missing = [o for o in missing if o not in ("--dtype", "--class")]
    assert not missing


# --- processes --------------------------------------------------------------------------------------------------------

IMPORTS = """
import sys
from convert.cli import cli, run
code = run(cli, sys.argv[2:])
heavy = sorted(m for m in sys.argv[1].split(",") if m in sys.modules)
print("HEAVY", code, ",".join(heavy))
"""


@pytest.mark.parametrize(
    ("args", "forbidden"),
    [
        (["--help"], "numpy,torch,rich,gguf,tokenizers,huggingface_hub,safetensors,convert.plan"),
        (["hf-to-scratch", "--help"], "numpy,torch,rich,gguf,tokenizers,huggingface_hub"),
        (["--version"], "numpy,torch"),
        (["hf-to-meta", "SRC", "OUT"], "torch,gguf,tokenizers,huggingface_hub,transformers"),
        (["to", "scratch", "SRC", "OUT", "--dtype", "float16"], "torch,gguf,tokenizers,huggingface_hub"),
        (["hf-to-gguf", "SRC", "OUT.gguf"], "torch,huggingface_hub,transformers"),
        (["inspect", "SRC"], "torch,gguf,tokenizers,huggingface_hub"),
        (["validate", "SRC"], "torch,gguf,huggingface_hub"),
    ],
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_what_is_imported(hf, tmp_path, args, forbidden):
    args = [a.replace("SRC", str(hf)).replace("OUT", str(tmp_path / "out")) for a in args]
    if any("-to-" in a or a == "to" for a in args[:1]) and "--help" not in args:
        args += ["--verify", "never"]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, forbidden, *args], capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE
    )
    assert done.stdout.splitlines()[-1] == "HEAVY 0 ", done.stdout[-200:] + done.stderr


def test_a_reader_that_goes_away(hf):
    """``| head -1``: no traceback, no complaint at exit."""
    for args in ("--help", f"inspect {hf} --tensors", "tables show llama --resolved"):
        done = subprocess.run(
            f"{sys.executable} -m convert {args} | head -1",
            shell=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE,
        )
        assert done.stdout.count("\n") == 1 and done.stderr == "", done.stderr
    # the reader is gone before the first byte
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*PYTHON, "--help"], stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=PATIENCE
    )
    os.close(write)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr, done.stderr


def test_a_bar_on_a_terminal_and_silence_elsewhere(hf, tmp_path):
    pty = pytest.importorskip("pty")
    for target, code, script in (("scratch", 0, SLOW), ("meta", 130, HELD)):
        ours, theirs = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-c", script, f"hf-to-{target}", str(hf), str(tmp_path / target)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            cwd=ROOT,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
            preexec_fn=_listening,
        )
        os.close(theirs)
        seen = b""
        while True:
            try:
                data = os.read(ours, 4096)
            except OSError:  # the terminal's other end is closed
                break
            if not data:
                break
            seen += data
            if code == 130 and b"converting" in seen and child.poll() is None:
                child.send_signal(signal.SIGINT)
                code = -130  # once
        out = child.communicate(timeout=PATIENCE)[0]
        os.close(ours)
        assert child.returncode == abs(code)
        assert b"converting" in seen and (code != 0 or b"/s" in seen)
        assert b"\x1b[?25h" in seen  # the cursor is given back
        assert b"converting" not in out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["scratch"]


def test_as_a_process(hf, tmp_path):
    done = shell("hf-to-scratch", hf, tmp_path / "out")
    assert done.returncode == 0 and "tensors" in done.stdout
    assert shell("hf-to-scratch", hf, tmp_path / "out").returncode == 2
    assert shell("meta-to-hf", hf, tmp_path / "x").returncode == 2


def test_without_ggml_the_bytes_are_the_same(hf, tmp_path):
    for name, env in (("with", {}), ("without", {"CONVERT_NO_GGML": "1"})):
        done = shell("hf-to-meta", hf, tmp_path / name, "--dtype", "float16", env=os.environ | env)
        assert done.returncode == 0, done.stderr
    files = [(tmp_path / name / "consolidated.00.pth").read_bytes() for name in ("with", "without")]
    assert files[0] == files[1]


@pytest.mark.parametrize("readable", [False, True])
def test_a_file_that_may_not_be_read_is_said_with_what_to_do(hf, capsys, monkeypatch, readable):
    path = str(hf / "config.json")

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("convert.config.read_json", refuse)
    monkeypatch.setattr("convert.checkpoint.configs.read_json", refuse)
    monkeypatch.setattr("os.access", lambda *_, **__: readable)  # root may read what it forbids
    assert call("inspect", hf) == 1
    err = capsys.readouterr().err
    assert f"error: Permission denied ({path})." in err and ("chmod u+r" in err) == (not readable)
