"""no_init: parameters without memory, buffers that are real, and torch as it was afterwards."""

from __future__ import annotations

import threading

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from convert import no_init  # noqa: E402

CONFIG = {
    "vocab_size": 96,
    "context_length": 40,
    "emb_dim": 48,
    "n_heads": 6,
    "n_layers": 2,
    "hidden_dim": 80,
    "n_kv_groups": 2,
    "rope_base": 500_000.0,
    "dtype": torch.bfloat16,
    "rope_freq": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_context_length": 32},
}
PATCHED = [n for n in dir(nn.init) if n.endswith("_") and not n.startswith("_")]


def state_of_torch():
    return [getattr(nn.init, n) for n in PATCHED] + [nn.Module.register_parameter]


@pytest.fixture(autouse=True)
def torch_is_left_as_it_was():
    before = state_of_torch()
    yield
    assert all(a is b for a, b in zip(state_of_torch(), before, strict=True))


def test_the_books_class_has_real_tables_and_parameters_without_memory():
    book = pytest.importorskip("llms_from_scratch.llama3")
    usual = book.Llama3Model(CONFIG)
    with no_init():
        model = book.Llama3Model(CONFIG)
    assert all(p.is_meta for p in model.parameters())
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in usual.named_parameters()
    }
    assert torch.equal(model.cos, usual.cos) and torch.equal(model.sin, usual.sin) and model.cos.device.type == "cpu"
    # the control: what people use instead leaves the tables empty
    with torch.device("meta"):
        assert book.Llama3Model(CONFIG).cos.is_meta


def test_no_random_number_is_drawn():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with no_init():
        nn.Sequential(nn.Linear(8, 6), nn.Embedding(9, 4, padding_idx=0), nn.LayerNorm(4), nn.MultiheadAttention(8, 2))
        nn.Conv1d(4, 8, 3)
    assert torch.equal(torch.get_rng_state(), before)
    nn.Linear(8, 6)
    assert not torch.equal(torch.get_rng_state(), before)


class Odd(nn.Module):
    """What classes do in constructors."""

    def __init__(self):
        super().__init__()
        shared = nn.Parameter(torch.randn(5, 3))
        self.a, self.b = nn.Linear(3, 5), nn.Linear(3, 5)
        self.a.weight = shared
        self.b.weight = shared
        self.listed = nn.ParameterList([nn.Parameter(torch.ones(2), requires_grad=False)])
        self.own = nn.Parameter(torch.zeros(4))
        self.apply(self._init)
        self.register_buffer("drawn", nn.init.uniform_(torch.empty(64), 1.0, 2.0))
        self.register_buffer("filled", torch.full((3,), 7.0))

    def _init(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0, 0.02)
            nn.init.zeros_(tensor=module.bias)


def test_ties_gradient_flags_and_buffers_survive():
    with no_init():
        model = Odd()
    assert model.a.weight is model.b.weight and model.a.weight.is_meta
    assert [p.requires_grad for p in model.listed] == [False] and model.own.is_meta and model.own.requires_grad
    assert model.drawn.min() >= 1 and model.drawn.std() > 0.1  # nn.init on anything but a parameter is as always
    assert model.filled.tolist() == [7.0, 7.0, 7.0]


def test_nested_and_left_by_an_exception():
    with pytest.raises(ValueError, match="inside"), no_init():
        with no_init():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        raise ValueError("inside")
    layer = nn.Linear(200, 300)
    assert not layer.weight.is_meta and 0.01 < layer.weight.std() < 0.1


def test_another_thread_builds_as_always():
    inside, done, found = threading.Event(), threading.Event(), []

    def other():
        inside.wait(10)
        found.append(nn.Linear(40, 50))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with no_init():
        inside.set()
        assert done.wait(10)
        mine = nn.Linear(4, 5)
    thread.join()
    assert mine.weight.is_meta and not found[0].weight.is_meta and found[0].weight.std() > 0.05


def test_used_as_a_decorator_and_under_a_later_patch():
    @no_init()
    def build():
        return nn.Linear(3, 3)

    assert build().weight.is_meta and not nn.Linear(3, 3).weight.is_meta
    original = nn.init.normal_
    with no_init():
        ours = nn.init.normal_

        def theirs(*args, **kwargs):
            return ours(*args, **kwargs)

        nn.init.normal_ = theirs
    try:
        assert nn.init.normal_ is theirs  # not ours to take away
        assert nn.init.normal_(torch.zeros(100)).std() > 0.5
    finally:
        nn.init.normal_ = original
