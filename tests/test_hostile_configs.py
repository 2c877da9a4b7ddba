"""Any value in any key of a config or a record ends in a finding or in an answer, never in a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from convert.errors import ConvertError
from convert.inspect import inspect
from convert.validate import validate
from tests.fixtures import make_hf, make_meta, make_scratch

FILES = {"hf": "config.json", "meta": "params.json", "scratch": "scratch_config.json"}
VALUES = [None, 0, -1, "x", [1], {"a": 1}, float("nan")]
MORE = [
    *("rope_scaling", "rope_theta", "rope_parameters", "quantization_config", "quantization_args", "sliding_window"),
    *("head_dim", "model", "n_kv_heads", "use_scaled_rope", "rope_freq", "family", "attention_bias", "torch_dtype"),
]
RECORDS = [
    {"schema": "convert.record/1", "config": 3, "source": [], "target": "x"},
    {"schema": "convert.record/1", "config": {"rope_parameters": 3}},
    {"schema": "convert.record/1", "config": {"rope_parameters": {}}},
    {"schema": "convert.record/1", "config": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0}}},
    {"schema": "convert.record/1", "config": {"hidden_size": "x", "vocab_size": -5}},
    {"schema": 3},
    [],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {
        "hf": make_hf(root / "hf", "std", scaling=8).path,
        "meta": make_meta(root / "meta", "gqa8", use_scaled_rope=True).path,
        "scratch": make_scratch(root / "scratch", "std", scaling=8).path,
    }


def look(folder: Path) -> bool:
    """Whether nothing is wrong; anything but an answer or our own error fails the test."""
    found = validate(folder)
    json.dumps(found.as_json())
    found.lines()
    try:
        said = inspect(folder)
    except ConvertError:
        assert not found.ok
        return False
    json.dumps(said.as_json())
    said.lines()
    return found.ok


@pytest.mark.parametrize("layout", FILES)
def test_config(made, tmp_path, layout):
    folder = Path(shutil.copytree(made[layout], tmp_path / "m"))
    path = folder / FILES[layout]
    good = json.loads(path.read_text())
    assert look(folder)
    seen = 0
    for key in dict.fromkeys([*good, *MORE]):
        for value in VALUES:
            path.write_text(json.dumps(good | {key: value}))
            seen += not look(folder)
    for key in ("rope_parameters", "rope_freq"):
        for inner in good.get(key) or ():
            for value in VALUES:
                path.write_text(json.dumps(good | {key: good[key] | {inner: value}}))
                seen += not look(folder)
    assert seen > 50  # most of these are findings
    for text in ("[]", "3", "null", '"x"', "{}", '{"model_type": ["llama"]}', '{"architectures": 3}', "", "{"):
        path.write_text(text)
        assert not look(folder)


@pytest.mark.parametrize("layout", FILES)
@pytest.mark.parametrize("record", RECORDS, ids=str)
def test_record(made, tmp_path, layout, record):
    folder = Path(shutil.copytree(made[layout], tmp_path / "m"))
    (folder / "conversion.json").write_text(json.dumps(record))
    look(folder)
