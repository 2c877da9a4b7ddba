"""A repository is told about from its headers: few requests, little traffic, everything that a copy would show."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.request

import pytest

import convert
from convert.errors import ConvertError
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.shapes import SHAPES
from tests.hub.conftest import put
from tests.hub.server import Fault

#: Large enough that a few headers are little of it.
WIDE = dataclasses.replace(SHAPES["gqa8"], layers=4, hidden=256, ff=768, head_dim=32, vocab=800)


def seen(found) -> dict:
    """What an inspection says of the model, without where it lies and what its numbers tell."""
    out = found.as_json()
    return {k: v for k, v in out.items() if k not in ("notes", "hub")} | {"pairing": found.pairing.split(";")[0]}


@pytest.mark.parametrize("layout", ["hf", "hf-bin", "gguf", "gguf-rope", "meta"])
def test_the_same_as_of_a_copy(hub, tmp_path, layout):
    where = tmp_path / "m"
    if layout.startswith("hf"):
        make_hf(where, WIDE, sharded=4, tokenizer=300, format="bin" if layout == "hf-bin" else "safetensors")
    elif layout == "meta":
        make_meta(where, WIDE)
    else:
        make_gguf(where / "m.gguf", WIDE, type="q8_0", scaling=8 if layout == "gguf-rope" else None)
    repo = put(hub, "org/m", where)
    assert seen(convert.inspect("org/m")) == seen(convert.inspect(where))
    size = sum(map(len, repo.files.values()))
    assert size > 3e6 and hub.sent < 0.3 * size, (hub.sent, size)
    found, copy = convert.validate("org/m"), convert.validate(where)
    assert found.ok and copy.ok
    assert {f["name"] for f in found.as_json()["hub"]["files"]} <= {p.rsplit("/")[-1] for p in repo.files}
    assert all(len(f["sha256"]) == 64 for f in found.origin["files"])
    assert not list((tmp_path / "cache").glob("**/*.safetensors"))


def thirty(hub, tmp_path):
    make_hf(tmp_path / "m", dataclasses.replace(SHAPES["gqa8"], layers=15), sharded=30)
    put(hub, "org/m", tmp_path / "m")


def test_thirty_shards_are_asked_for_side_by_side(hub, tmp_path):
    """One request each, with its redirect; a client that waits for every answer has one under way at a time."""
    thirty(hub, tmp_path)
    hub.faults = [Fault("/cdn/", 8, slow=1.5)]  # time enough for others to come
    assert convert.validate("org/m").ok
    headers = hub.find(lambda r: ".safetensors" in r.path and "/resolve/" in r.path and "index" not in r.path)
    fetched = hub.find(lambda r: "/cdn/" in r.path)
    assert len(headers) == len(fetched) == 30
    assert max(r.sent for r in fetched) <= 64 << 10
    assert hub.most >= 4, hub.most
    hub.most = 0
    for name in list(hub.repos["org/m"].files)[:3]:  # the control
        urllib.request.urlopen(f"{hub.url}/org/m/resolve/main/{name}").read()
    assert hub.most <= 2  # the end of one answer may be noted when the next request is there


@pytest.mark.slow
def test_thirty_shards_in_three_seconds(hub, tmp_path):
    thirty(hub, tmp_path)
    best, hub.latency = 60.0, 0.05
    for _ in range(3):  # other work on the machine is not what is measured
        start = time.perf_counter()
        assert convert.validate("org/m").ok
        best = min(best, time.perf_counter() - start)
    assert best <= 3, best


def test_a_long_header_takes_a_second_request(hub, tmp_path):
    make_hf(tmp_path / "m", dataclasses.replace(SHAPES["gqa8"], layers=90, hidden=16, ff=16, heads=2, kv_heads=1))
    put(hub, "org/m", tmp_path / "m")
    assert convert.validate("org/m").ok
    data = hub.repos["org/m"].files["model.safetensors"]
    length = 8 + int.from_bytes(data[:8], "little")
    assert length > 64 << 10
    assert hub.ranges_of(data)[:2] == [(0, 65536), (65536, length)]


def test_findings_of_both_directions(hub, tmp_path, cli):
    make_hf(tmp_path / "m", sharded=3)
    repo = put(hub, "org/m", tmp_path / "m")
    index = json.loads(repo.files["model.safetensors.index.json"])
    names = list(index["weight_map"])
    index["weight_map"][names[0]], gone = index["weight_map"][names[-1]], index["weight_map"].pop(names[5])
    repo.files["model.safetensors.index.json"] = json.dumps(index).encode()
    found = convert.validate("org/m")
    assert {p.tensor for p in found.problems if p.kind == "index"} == {names[0], names[5]} and gone
    assert cli("validate", "org/m", "--quiet")[0] == 1
    del repo.files[index["weight_map"][names[-1]]]
    assert "absent" in convert.validate("org/m").problems[0].message


def test_truncated_on_the_hub(hub, tmp_path):
    make_hf(tmp_path / "m")
    repo = put(hub, "org/m", tmp_path / "m")
    assert convert.validate("org/m").ok
    repo.files["model.safetensors"] = repo.files["model.safetensors"][:-1000]
    found = convert.validate("org/m")
    assert [p.kind for p in found.problems] == ["truncated"] and "ends 1,000 bytes early" in found.problems[0].message


def test_dry_run(hub, tmp_path, cli):
    make_hf(tmp_path / "m", WIDE, sharded=4, tokenizer=300)
    put(hub, "org/m", tmp_path / "m")
    for target in ("scratch", "meta", "gguf"):
        code, out, err = cli("to", target, "org/m", f"out-{target}.{target}", "--dry-run", "--json")
        assert code == 0, err
        code, wanted, _ = cli("to", target, "m", f"out-{target}.{target}", "--dry-run", "--json")
        ours, theirs = json.loads(out), json.loads(wanted)
        assert ours["files"] == theirs["files"] and ours["source"] == "org/m"
        assert ours["decisions"] == theirs["decisions"]
    assert not list(tmp_path.glob("out-*"))
    assert hub.sent < 0.4 * sum(map(len, hub.repos["org/m"].files.values()))


WRONG = {
    "length": (Fault("/cdn/", 9, total=10**9), "the server has 1,000,000,000 bytes"),
    "etag": (Fault("/cdn/", 9, cut=10, tag='"other"'), "ETag"),
    "garbage": (Fault("/cdn/", 9, flip=9), "header that is not JSON"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_answers(hub, tmp_path, what):
    make_hf(tmp_path / "m", WIDE)
    put(hub, "org/m", tmp_path / "m")
    fault, said = WRONG[what]
    if what == "etag":  # of the second request
        hub.faults = [Fault("/cdn/", 1, cut=10), fault]
    else:
        hub.faults = [fault]
    with pytest.raises(ConvertError, match=said):
        convert.inspect("org/m")
    hub.faults = []
    convert.inspect("org/m")


RIGHT_IN_THE_END = {
    "cut": Fault("/cdn/", 3, cut=1000),
    "cut at once": Fault("/cdn/", 1, cut=0),
    "429": Fault("/cdn/", 2, status=429, headers={"Retry-After": "0"}),
    "503": Fault("/resolve/", 2, status=503, headers={"Retry-After": "0"}, method="GET"),
    "500": Fault("/cdn/", 1, status=500),
    "slow": Fault("/cdn/", 2, slow=0.3),
}


@pytest.mark.parametrize("what", RIGHT_IN_THE_END)
def test_patience(hub, tmp_path, what):
    make_hf(tmp_path / "m", WIDE)
    put(hub, "org/m", tmp_path / "m")
    wanted = seen(convert.inspect(tmp_path / "m"))
    hub.faults = [dataclasses.replace(RIGHT_IN_THE_END[what])]
    assert seen(convert.inspect("org/m")) == wanted
    assert hub.faults[0].times < RIGHT_IN_THE_END[what].times


def test_silence_has_an_end(hub, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from convert.hub import ranges, repository

    make_hf(tmp_path / "m")
    put(hub, "org/m", tmp_path / "m")
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    for module in (ranges, repository):
        monkeypatch.setattr(module, "TRIES", 2)
    hub.faults = [Fault("/cdn/", 9, slow=3)]
    with pytest.raises(ConvertError, match="cannot be reached"):
        convert.inspect("org/m")


def test_an_address_that_has_expired_is_asked_for_again(hub, tmp_path):
    make_hf(tmp_path / "m", WIDE)
    put(hub, "org/m", tmp_path / "m")
    from convert.hub.place import place

    at = place("org/m", way="glance")
    hub.faults = [Fault("/cdn/", 1, status=403)]
    data = hub.repos["org/m"].files["model.safetensors"]
    buffer = bytearray(1000)
    (path,) = at.path.glob("*.safetensors")
    at.pool.read_into(path, memoryview(buffer), 1_000_000)
    assert buffer == data[1_000_000:1_001_000] and not hub.faults[0].times
    folder = at.path
    at.pool.close()
    assert not folder.exists()
