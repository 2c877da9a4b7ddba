"""A deliberately wrong table is caught: what is converted with it fails verification, and the right one passes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import convert
from convert.checkpoint import open_checkpoint
from convert.errors import ConvertError, TableError
from convert.names import load_names
from convert.plan import Request, make_plan
from convert.resources import mappings_dir
from convert.run import run
from convert.table import read_table
from tests.fixtures import make_hf, make_meta, make_scratch
from tests.reference.models import one_thread  # noqa: F401

MAKERS = {"hf": make_hf, "meta": make_meta, "scratch": make_scratch}
#: Two names of each layout that change places; all of them have equal shapes in plain multi-head attention.
SWAPS = {
    "gate and up": {
        "hf": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "meta": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
        "scratch": ("ff.fc1.weight", "ff.fc2.weight"),
    },
    "norms": {
        "hf": ("input_layernorm.weight", "post_attention_layernorm.weight"),
        "meta": ("attention_norm.weight", "ffn_norm.weight"),
        "scratch": ("norm1.weight", "norm2.weight"),
    },
    "q and k": {
        "hf": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
        "meta": ("attention.wq.weight", "attention.wk.weight"),
        "scratch": ("att.W_query.weight", "att.W_key.weight"),
    },
    "v and o": {
        "hf": ("self_attn.v_proj.weight", "self_attn.o_proj.weight"),
        "meta": ("attention.wv.weight", "attention.wo.weight"),
        "scratch": ("att.W_value.weight", "att.out_proj.weight"),
    },
    "embedding and head": {
        "hf": ("model.embed_tokens.weight", "lm_head.weight"),
        "meta": ("tok_embeddings.weight", "output.weight"),
        "scratch": ("tok_emb.weight", "out_head.weight"),
    },
}
PAIRS = [("hf", "meta"), ("meta", "hf"), ("hf", "scratch"), ("scratch", "meta")]


def wrong_table(folder: Path, layout: str, fault: str | None):
    """The llama table with one fault in what it says of ``layout``."""
    text = (mappings_dir() / "llama.toml").read_text(encoding="utf-8")
    if fault == "rope":
        old = next(line for line in text.splitlines() if line.startswith(f"{layout} ") and "rope =" in line)
        flipped = old.replace("half", "?").replace("interleaved", "half").replace("?", "interleaved")
        assert old != flipped
        text = text.replace(old, flipped)
    elif fault is not None:
        one, other = (f'= "{name}"' for name in SWAPS[fault][layout])
        exchange = {one: other, other: one}
        lines = [line.partition("  #")[0].rstrip() for line in text.splitlines()]
        places = [i for i, line in enumerate(lines) if line.startswith(f"{layout} ") and line.endswith((one, other))]
        assert len(places) == 2
        for i in places:
            old = next(name for name in exchange if lines[i].endswith(name))
            lines[i] = lines[i].removesuffix(old) + exchange[old]
        text = "\n".join(lines)
    path = folder / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def converted(tmp_path: Path, source: str, target: str, fault: str | None) -> tuple[Path, Path]:
    made = MAKERS[source](tmp_path / "source", "mha")
    with open_checkpoint(made.path) as opened:
        run(make_plan(opened, Request(target), table=wrong_table(tmp_path, target, fault)), tmp_path / "out")
    return made.path, tmp_path / "out"


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda v: v)
@pytest.mark.parametrize("fault", ["rope", *SWAPS])
def test_a_wrong_table_is_caught(tmp_path, source, target, fault):
    a, b = converted(tmp_path, source, target, fault)
    result = convert.verify(a, b, device="cpu")
    assert result.verdict == "fail", (fault, result.message)
    if fault == "rope":  # nothing turns at position 0
        assert result.first_diff_position == 1
    else:
        assert result.first_diff_position == (1 if fault == "q and k" else 0)


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda v: v)
def test_the_right_table_passes(tmp_path, source, target):
    a, b = converted(tmp_path, source, target, None)
    result = convert.verify(a, b, device="cpu")
    assert result.verdict == "pass", result.message


@pytest.mark.parametrize("fault", ["rope", "gate and up", "norms"])
def test_the_whole_tool_being_wrong_is_caught_by_a_right_one(tmp_path, fault):
    """The source read by the wrong table too: its faults do not cancel out."""
    made = make_hf(tmp_path / "source", "gqa8")
    with open_checkpoint(made.path, table=wrong_table(tmp_path, "hf", fault)) as opened:
        run(make_plan(opened, Request("meta")), tmp_path / "out")
    assert convert.verify(made.path, tmp_path / "out", device="cpu").verdict == "fail"


#: Files that no table is, of strangers: the words that refuse them.
HOSTILE = {
    "deep lists": ("a = " + "[" * 100_000, "nested too deep"),
    "deep tables": ("a = " + "{a=" * 100_000, "nested too deep"),
    "twenty levels": ("a = " + "[" * 20 + "]" * 20, "nested too deep"),
    "dotted key": (".".join("a" * 20_000) + " = 1", "19,999 dots"),
    "dotted header": ("[" + ".".join("a" * 20_000) + "]", "19,999 dots"),
    "digits": ("a = " + "9" * 5000, "not valid TOML"),
    "large": ("#" * (2 << 20), "more than 1,048,576 bytes"),
    "no UTF-8": (b"\xff\xfe", "not valid TOML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_at_once(name, tmp_path):
    """As a table and as a names file; a dotted key of 40 KB once took 1.5 GB."""
    import time

    text, said = HOSTILE[name]
    path = tmp_path / "evil.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (read_table, load_names):
        start = time.process_time()
        with pytest.raises(TableError, match=said) as error:
            read(path)
        assert time.process_time() - start < 5 and len(str(error.value)) < 300


@pytest.mark.parametrize("base", ["../evil", "/etc/passwd", "a" * 5000, "a\0", "", ".."])
def test_extends_is_a_plain_name(base, tmp_path):
    path = tmp_path / "evil.toml"
    path.write_text(f"extends = {json.dumps(base)}")
    with pytest.raises(TableError, match="no plain name"):
        read_table(path)
    with pytest.raises(ConvertError, match="there is no family") as error:
        load_names(path)
    assert len(str(error.value)) < 400
