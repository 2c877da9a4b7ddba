"""On a CUDA device: the verifier in float32 and bfloat16, and a module filled where it lives. ``bash tests/gpu.sh``."""

from __future__ import annotations

import pytest
import torch

from tests.fixtures import make_hf, make_meta

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_on_cuda(tmp_path, dtype):
    import convert

    hf = make_hf(tmp_path / "hf", "gqa8")
    meta = make_meta(tmp_path / "meta", "gqa8")
    other = make_meta(tmp_path / "other", "gqa8", seed=1)
    result = convert.verify(hf.path, meta.path, device="cuda", dtype=dtype)
    print(result.as_json())
    assert result.verdict == "pass" and result.device.startswith("cuda")
    assert convert.verify(hf.path, other.path, device="cuda", dtype=dtype).verdict == "fail"


@pytest.mark.parametrize("source", ["hf", "meta"])
def test_load_into_a_module_on_cuda(tmp_path, source):
    llama3 = pytest.importorskip("llms_from_scratch.llama3")

    import convert
    from tests.fixtures.scratch import scratch_config, scratch_state

    made = (make_hf if source == "hf" else make_meta)(tmp_path, "gqa8")
    wanted = scratch_state(made.hf, made.shape)
    with convert.no_init():
        model = llama3.Llama3Model(scratch_config(made.shape, dtype="float32") | {"dtype": torch.float32}).cuda()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    convert.load_into(model, made.path)
    for name, tensor in model.state_dict().items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), wanted[name]), name
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
