"""``convert check``, ``validate --hash`` and conversions with ``--hash``, as they are typed."""

from __future__ import annotations

import hashlib
import json

import pytest

from convert.cli import cli, run
from tests.fixtures import make_hf


@pytest.fixture
def made(tmp_path, capsys):
    source = make_hf(tmp_path / "source", "gqa8", sharded=2).path
    out = tmp_path / "out"
    assert run(cli, ["hf-to-meta", str(source), str(out), "--hash", "--verify", "never", "-q"]) == 0
    capsys.readouterr()
    return source, out


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_good_and_changed(made, capsys):
    source, out = made
    assert run(cli, ["check", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"ok: {out}") and "full hashes" in text
    assert run(cli, ["check", str(out), "--source", str(source)]) == 0
    assert "the recorded source" in capsys.readouterr().out
    assert run(cli, ["check", str(out), "--source", str(source), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    path = out / "consolidated.00.pth"
    flip(path, len(path.read_bytes()) // 2)
    assert run(cli, ["check", str(out)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("CHANGED: 1 finding") and "SHA-256" in text
    assert run(cli, ["check", str(out), "--source", str(source), "--quiet"]) == 1  # findings are told all the same
    assert "1 of" in capsys.readouterr().out


def test_json(made, capsys):
    source, out = made
    assert run(cli, ["check", str(out), "--source", str(source), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = "schema ok out recorded tool files source problems notes"
    assert list(found) == keys.split() and found["schema"] == "convert.check/1" and found["recorded"] is True
    assert found["source"]["recorded"] is True and found["source"]["tensors"] == 21
    weights = [f for f in found["files"] if f["name"].endswith(".pth")]
    assert [f["compared"] for f in weights] == [["size", "header", "sha256"]]
    (out / "params.json").unlink()
    assert run(cli, ["check", str(out), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False and {p["kind"] for p in found["problems"]} == {"missing_file"}


def test_no_record_and_nothing_there(made, tmp_path, capsys):
    source, out = made
    (out / "conversion.json").unlink()
    assert run(cli, ["check", str(out)]) == 1
    assert "no record" in capsys.readouterr().err
    assert run(cli, ["check", str(out), "--source", str(source)]) == 0
    assert run(cli, ["check", str(tmp_path / "absent")]) == 2
    assert run(cli, ["check", str(out), "--source", str(tmp_path / "absent")]) == 2


def test_validate_hash(made, tmp_path, capsys):
    source, _ = made
    assert run(cli, ["validate", str(source), "--hash"]) == 0
    text = capsys.readouterr().out
    sums = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in source.glob("*.safetensors")}
    assert all(f"sha256 {digest}  {name}" in text for name, digest in sums.items()) and "nothing" in text
    (tmp_path / "SUMS").write_text("".join(f"{digest}  {name}\n" for name, digest in sums.items()))
    assert run(cli, ["validate", str(source), "--checksums", str(tmp_path / "SUMS")]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 files hash to what was published" in text and "as SUMS says" in text
    flip(next(source.glob("*.safetensors")), -1)
    assert run(cli, ["validate", str(source), "--checksums", str(tmp_path / "SUMS"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [p["kind"] for p in found["problems"]] == ["hash"] and len(found["hashes"]) == 2
    assert run(cli, ["validate", str(source), "--checksums", str(tmp_path / "absent")]) == 2


def test_a_dry_run_tells_decisions_files_and_types(made, tmp_path, capsys):
    source, _ = made
    words = ["hf-to-meta", str(source), str(tmp_path / "new"), "--dtype", "float16", "--dry-run"]
    assert run(cli, words) == 0
    text = capsys.readouterr().out
    for part in (
        "model-00002-of-00002.safetensors",
        "consolidated.00.pth",
        "conversion.json",
        "F32 → F16",
        "free",
        "made",
    ):
        assert part in text
    assert "interleaved order from half order, 4 tensors moved" in text and "head and embedding: two" in text
    assert run(cli, [*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [f["bytes"] for f in plan["reads"]] == [p.stat().st_size for p in sorted(source.glob("*.safetensors"))]
    assert sum(f["bytes"] for f in plan["reads"]) == plan["bytes_read"]
    assert sum(f["bytes"] for f in (*plan["files"], *plan["beside"])) == plan["bytes_written"]
    assert plan["decisions"]["dtypes"][0]["to"] == "F16" and plan["decisions"]["qk_layout"]["tensors"] == 4
    assert run(cli, [*words[:-1], "--verify", "never", "-q"]) == 0
    record = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert record["decisions"] == plan["decisions"]  # what was announced is what was done
