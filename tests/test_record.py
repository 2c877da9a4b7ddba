"""The record of a conversion: what was decided, asked for and hashed, in the folder, beside a file, inside files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

import convert
from convert.cli import cli, run
from convert.decisions import lines
from convert.inspect import inspect
from tests.fixtures import make_hf, make_meta


def record_of(out: Path) -> dict:
    place = out / "conversion.json" if out.is_dir() else out.with_name(out.name + ".conversion.json")
    return json.loads(place.read_text())


def converted(source: Path, out: Path, **options) -> dict:
    convert.convert_checkpoint(source, out, **options)
    return record_of(out)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_hf(tmp_path_factory.mktemp("source") / "model", "gqa8", dtype="bfloat16", tokenizer=120, sharded=2).path


def test_order_types_and_head(source, tmp_path):
    found = converted(source, tmp_path / "out", to="meta", dtype="float32")["decisions"]
    assert found["qk_layout"] == {"from": "half", "to": "interleaved", "tensors": 4}
    assert found["tied"] is False and found["head"] == "stored"
    (change,) = found["dtypes"]
    assert (change["from"], change["to"], change["tensors"]) == ("BF16", "F32", 21)
    with convert.open_checkpoint(tmp_path / "out") as opened:
        assert change["bytes"] == sum(s.nbytes for parts in opened.tensors.values() for s in parts)
    same = converted(source, tmp_path / "same", to="scratch")["decisions"]  # the control
    assert "dtypes" not in same and same["qk_layout"]["tensors"] == 0


def test_a_tied_head(tmp_path):
    stored = make_hf(tmp_path / "stored", "gqa8", tied=True, head="equal").path
    absent = make_hf(tmp_path / "absent", "gqa8", tied=True, head="absent").path
    found = converted(stored, tmp_path / "a", to="hf", max_shard_size=10**9)["decisions"]
    assert found["tied"] is True and "not stored" in found["head"]
    (dropped,) = found["dropped"]
    assert (
        dropped["count"] == 1
        and dropped["tensors"] == ["lm_head.weight"]
        and "equal to the embedding" in dropped["reason"]
    )
    found = converted(absent, tmp_path / "b", to="hf")["decisions"]
    assert "dropped" not in found  # there was nothing to drop
    found = converted(absent, tmp_path / "c", to="scratch")["decisions"]
    assert found["head"] == "stored, equal to the embedding"


def test_ignored_tensors_are_named_with_their_reason(tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    made = make_hf(tmp_path / "m", "gqa8").path
    state = load_file(made / "model.safetensors")
    for layer in range(2):
        state[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = 500000.0 ** (-torch.arange(0, 8, 2) / 8)
    save_file(state, made / "model.safetensors", metadata={"format": "pt"})
    found = converted(made, tmp_path / "out", to="scratch")["decisions"]
    (dropped,) = found["dropped"]
    assert dropped["count"] == 2 and dropped["tensors"] == ["model.layers.{0-1}.self_attn.rotary_emb.inv_freq"]
    assert dropped["reason"]


def test_what_gguf_fills_and_substitutes(tmp_path):
    made = make_hf(tmp_path / "m", "std", tokenizer=90).path
    found = converted(made, tmp_path / "a.gguf", to="gguf", type="q8_0")["decisions"]
    assert found["padded"] == [{"what": "unused tokens, up to the rows of the embedding", "count": 6}]
    items = found["substituted"]
    assert items and all((s["from"], s["to"]) == ("Q8_0", "F16") and s["bytes"] > 0 and s["reason"] for s in items)
    assert any("attn_q" in n for s in items for n in s["tensors"])
    whole = make_hf(tmp_path / "w", "gqa8", tokenizer=True).path
    found = converted(whole, tmp_path / "b.gguf", to="gguf", type="q8_0")["decisions"]
    assert "padded" not in found and "substituted" not in found  # the control


def test_hashes_of_sources_and_outputs(source, tmp_path):
    found = converted(source, tmp_path / "out", to="hf", max_shard_size=60_000)
    for place, files in ((source, found["source"]["files"]), (tmp_path / "out", found["target"]["files"])):
        assert len(files) > 1
        for item in files:
            data = (place / item["name"]).read_bytes()
            length = int.from_bytes(data[:8], "little")
            assert item["bytes"] == len(data)
            assert item["header_sha256"] == hashlib.sha256(data[: 8 + length]).hexdigest()
            assert item["head_sha256"] == hashlib.sha256(data[: 1 << 20]).hexdigest()
            assert "sha256" not in item
    beside = {f["name"]: f for f in found["target"]["beside"]}
    assert set(beside) == {p.name for p in (tmp_path / "out").glob("*.json")} - {"conversion.json"}
    for name, item in beside.items():
        assert item["sha256"] == hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest()


def test_equal_conversions_leave_equal_records(source, tmp_path):
    """Wherever they ran, whenever, and however many threads did it."""
    # A GGUF file is called after the folder inside, or after the one around it.
    moved = tmp_path / "somewhere" / source.parent.name / source.name
    moved.parent.mkdir(parents=True)
    shutil.copytree(source, moved)
    for to, name in (("meta", "a"), ("gguf", "m.gguf")):
        one, two = tmp_path / "one" / name, tmp_path / "two" / name
        convert.convert_checkpoint(source, one, to=to, hashes=True)
        convert.convert_checkpoint(moved, two, to=to, hashes=True, threads=1)
        a = {p.name: p.read_bytes() for p in (one.parent).rglob("*") if p.is_file()}
        b = {p.name: p.read_bytes() for p in (two.parent).rglob("*") if p.is_file()}
        assert a == b
        assert str(tmp_path).encode() not in b"".join(a.values())


def test_a_plan_may_be_carried_out_twice(source, tmp_path):
    from convert.run import run as carry_out

    plan = convert.plan_conversion(source, "meta")
    carry_out(plan, tmp_path / "a", hashes=True)
    carry_out(plan, tmp_path / "b")
    plan.source.close()
    assert "sha256" not in record_of(tmp_path / "b")["target"]["files"][0]
    assert convert.check(tmp_path / "b").ok and convert.check(tmp_path / "a").ok


def test_what_was_asked_for(source, tmp_path):
    found = converted(source, tmp_path / "out", to="meta", dtype="float16", model_parallel=2)
    assert found["target"]["options"] == {"dtype": "F16", "model_parallel": 2}
    found = converted(source, tmp_path / "a.gguf", to="gguf", type="q4_0", tensor_types=[("blk.*.attn_q.*", "q8_0")])
    assert found["target"]["options"]["gguf"] == {"type": "q4_0", "tensor_types": [["blk.*.attn_q.*", "q8_0"]]}
    meta = make_meta(tmp_path / "meta", "gqa8").path
    found = converted(meta, tmp_path / "b", to="hf", qk_layout="hf", context=99)
    assert found["source"]["options"] == {"qk_layout": "hf", "context": 99}


def test_the_files_say_it_themselves(source, tmp_path):
    from gguf import GGUFReader
    from safetensors import safe_open

    record = converted(source, tmp_path / "out", to="scratch", dtype="float32")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        said = file.metadata()
    assert said["convert.table"] == record["table"] and json.loads(said["convert.decisions"]) == record["decisions"]
    record = converted(source, tmp_path / "m.gguf", to="gguf", type="q8_0")
    fields = GGUFReader(tmp_path / "m.gguf").fields
    assert json.loads(fields["convert.decisions"].contents()) == record["decisions"]
    assert fields["convert.table"].contents() == record["table"]
    assert list(fields["convert.source.bytes"].contents()) == [f["bytes"] for f in record["source"]["files"]]
    assert fields["convert.qk_layout"].contents() == "interleaved" == record["decisions"]["qk_layout"]["to"]


def test_inspect_shows_it(source, tmp_path, capsys):
    converted(source, tmp_path / "out", to="meta", dtype="float32", hashes=True)
    converted(source, tmp_path / "m.gguf", to="gguf", type="q8_0")
    for place, hashes in ((tmp_path / "out", "full"), (tmp_path / "m.gguf", "headers")):
        found = inspect(place)
        assert found.record["hashes"] == hashes and found.record["source"]["layout"] == "hf"
        assert found.record["source"]["files"] == 2 and found.record["decisions"]["qk_layout"]["tensors"] == 4
        assert run(cli, ["inspect", str(place)]) == 0
        text = capsys.readouterr().out
        assert "from the hf layout" in text and "interleaved order from half order, 4 tensors moved" in text
        assert "convert check" in text
    for file in tmp_path.rglob("*conversion.json"):
        file.unlink()
    config = {"config": str(source / "config.json")}
    assert inspect(tmp_path / "out", **config).record is None  # a .pth says nothing of itself
    assert inspect(tmp_path / "m.gguf").record["hashes"] is None
    assert inspect(source).record is None


@pytest.mark.parametrize(
    "found",
    [{}, {"qk_layout": 3}, {"dtypes": "x"}, {"dtypes": [3, {}]}, {"dropped": [{"tensors": 5}]}, {"padded": [{}]}],
    ids=str,
)
def test_any_decisions_can_be_shown(found):
    assert all(isinstance(line, str) for line in lines(found))


def test_one_tensor_is_one():
    types = [{"from": "Q8_0", "to": "F16", "tensors": n} for n in (1, 2)]
    assert [line.rpartition(", ")[2] for line in lines({"dtypes": types})] == ["1 tensor", "2 tensors"]
