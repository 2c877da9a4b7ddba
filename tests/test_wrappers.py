"""The model's state dict is found in what training scripts save, through real ``torch.save`` files."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.adapters import refuse_adapters
from convert.errors import FormatError, UsageError
from convert.formats import torch_zip
from convert.source import FilePool, open_source
from convert.wrappers import Unwrapped, candidates, strip_prefixes, unwrap


class Model(torch.nn.Module):
    """Two layers under the from-scratch names."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok_emb = torch.nn.Embedding(11, 6)
        self.trf_blocks = torch.nn.ModuleList([torch.nn.Linear(6, 6), torch.nn.Linear(6, 9)])
        self.norm = torch.nn.BatchNorm1d(6)
        self.out_head = torch.nn.Linear(6, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out_head(self.norm(self.trf_blocks[0](self.tok_emb(ids))))


@dataclass
class Config:
    emb_dim: int
    dtype: Any


MODEL = Model()
STATE = MODEL.state_dict()
CONFIG = {"emb_dim": 6, "n_layers": 2, "rope_base": 500000.0, "dtype": torch.bfloat16}
PLAIN_CONFIG = {"emb_dim": 6, "n_layers": 2, "rope_base": 500000.0, "dtype": "torch.bfloat16"}


def stepped() -> dict[str, Any]:
    """The state of an optimizer that holds moments for every parameter."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.tensor([1, 2, 3])).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


OPTIMIZER = stepped()


def opened(tree: Any, folder: Path, key: str | None = None, **more: Any) -> Unwrapped:
    path = folder / "checkpoint.pth"
    torch.save(tree, path)
    return unwrap(torch_zip.read(path).metadata["tree"], key, file=path, **more)


def check(found: Unwrapped, state: dict[str, torch.Tensor]) -> None:
    """Names, order and values equal to torch's."""
    assert list(found.tensors) == list(state)
    pool = FilePool()
    for name, tensor in state.items():
        spec = found.tensors[name]
        assert spec.name == name
        source = open_source(spec, pool)
        assert np.array_equal(source.read(0, source.shape[0]).reshape(tensor.shape), tensor.numpy())
    pool.close()


SHAPES: dict[str, tuple[Any, str, dict[str, Any] | None]] = {
    "plain": (STATE, "", None),
    "book": ({"model_state_dict": STATE, "optimizer_state_dict": OPTIMIZER}, "model_state_dict", None),
    "nanogpt": (
        {"model": STATE, "optimizer": OPTIMIZER, "model_args": CONFIG, "iter_num": 5, "config": {"lr": 1e-3}},
        "model",
        PLAIN_CONFIG,
    ),
    "config": ({"model": STATE, "optimizer": OPTIMIZER, "config": CONFIG}, "model", PLAIN_CONFIG),
    "namespace": ({"net": STATE, "args": argparse.Namespace(**CONFIG)}, "net", PLAIN_CONFIG),
    "dataclass": (
        {"model": STATE, "config": Config(6, torch.float16)},
        "model",
        {"emb_dim": 6, "dtype": "torch.float16"},
    ),
    "lightning": (
        {
            "epoch": 1,
            "state_dict": STATE,
            "optimizer_states": [OPTIMIZER],
            "lr_schedulers": [{"last_epoch": 1}],
            "hyper_parameters": CONFIG,
            "callbacks": {"best": {"x.y": torch.tensor(1.0)}},
        },
        "state_dict",
        PLAIN_CONFIG,
    ),
    "nested": ({"run": {"step": 3, "weights": {"model": STATE}, "cfg": CONFIG}}, "run.weights.model", PLAIN_CONFIG),
    "rng": ({"model": STATE, "rng_state": torch.get_rng_state(), "loss": torch.tensor(0.5)}, "model", None),
    "listed": ({"models": [STATE]}, "models.0", None),
    "pair": ((STATE, OPTIMIZER), "0", None),
    "triple": ((5, {"model": STATE, "config": CONFIG}, OPTIMIZER), "1.model", PLAIN_CONFIG),
    "optimizer by name": ({"model": STATE, "optimizer": {"adam": {"x.m": torch.ones(2)}}}, "model", None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_known_shapes(tmp_path: Path, shape: str) -> None:
    tree, key, config = SHAPES[shape]
    found = opened(tree, tmp_path)
    check(found, STATE)
    assert found.key == key
    assert found.config == config
    assert found.stripped == []
    again = opened(tree, tmp_path, key)  # asked for, the same
    assert again.tensors == found.tensors


def test_what_is_left_is_listed(tmp_path: Path) -> None:
    tree = {"model": dict(STATE, step=7), "optimizer": OPTIMIZER, "epoch": 3, "args": argparse.Namespace(lr=1)}
    found = opened(tree, tmp_path)
    assert found.others == [
        "step (7) in the state dict",
        "optimizer (dict of 2)",
        "epoch (3)",
        "args (object argparse.Namespace)",
    ]
    assert "not converted: epoch (3)" in found.notes
    assert opened((STATE, OPTIMIZER, 7), tmp_path).others == ["1 (dict of 2)", "2 (7)"]
    assert "norm.num_batches_tracked" in found.tensors


def test_no_optimizer_tensor_is_ever_taken(tmp_path: Path) -> None:
    found = opened({"model": STATE, "optimizer": OPTIMIZER}, tmp_path)
    moments = {id(tensor) for state in OPTIMIZER["state"].values() for tensor in state.values()}
    assert len(moments) > len(STATE)  # control: it has stepped
    assert len(found.tensors) == len(STATE)


def test_two_candidates_are_a_question(tmp_path: Path) -> None:
    other = Model(1).state_dict()
    tree = {"model": STATE, "ema": other, "optimizer": OPTIMIZER}
    with pytest.raises(UsageError) as caught:
        opened(tree, tmp_path)
    assert caught.value.exit_code == 2
    for word in ("2 state dicts", "model (", "ema (", "--key model", f"{len(STATE)} tensors"):
        assert word in str(caught.value)
    check(opened(tree, tmp_path, "ema"), other)
    check(opened(tree, tmp_path, "model"), STATE)


def test_an_average_beside_the_model_in_one_dict(tmp_path: Path) -> None:
    """Under first parts, as EMA modules save themselves; an average without buffers is one, too."""
    other = Model(1).state_dict()
    less = {name: tensor for name, tensor in other.items() if "running" not in name}
    for average in (other, less):
        tree = {f"net.{n}": t for n, t in STATE.items()} | {f"ema.module.{n}": t for n, t in average.items()}
        with pytest.raises(UsageError, match="2 models with the same names: net and ema"):
            opened(tree, tmp_path)
        found = opened(tree, tmp_path, "net")
        check(found, STATE)
        assert not any("net." in item for item in found.others)  # what is converted is not listed as left behind
        assert sum("ema." in item for item in found.others) == len(average)
        assert {n: list(t.shape) for n, t in average.items()} == {
            n: list(t.shape) for n, t in opened(tree, tmp_path, "ema").tensors.items()
        }
    half = {f"ema.{n}": t for n, t in list(other.items())[:4]}  # an encoder and a decoder have as much in common
    assert len(opened({f"net.{n}": t for n, t in STATE.items()} | half, tmp_path).tensors) == len(STATE) + 4


def test_a_model_beside_dotted_tensors_is_a_question(tmp_path: Path) -> None:
    """But a module's extra state inside the model is none."""
    with pytest.raises(UsageError, match="2 state dicts"):
        opened({"model": STATE, "rng.state": torch.ones(3)}, tmp_path)
    extra = dict(STATE, **{"trf_blocks.0._extra_state": {"scale": torch.ones(1)}})
    assert list(opened(extra, tmp_path).tensors) == list(STATE)


@pytest.mark.parametrize("key", ["nothing", "model.x", "optimizer.state.9"])
def test_a_key_that_is_not_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(UsageError, match="nothing under the key") as caught:
        opened({"model": STATE, "optimizer": OPTIMIZER}, tmp_path, key)
    assert "model (" in str(caught.value.problems[0].hint)


def test_a_key_with_dots_in_it(tmp_path: Path) -> None:
    check(opened({"a.b": {"c.d": STATE}, "ema": Model(1).state_dict()}, tmp_path, "a.b.c.d"), STATE)


PREFIXES = [
    lambda name: f"_orig_mod.{name}",
    lambda name: f"module.{name}",
    lambda name: f"_orig_mod.module.{name}",
    lambda name: f"module._orig_mod.{name}",
    lambda name: f"_fsdp_wrapped_module._fpw_module.{name}",
    lambda name: name.replace("trf_blocks.1.", "trf_blocks.1._forward_module."),
    lambda name: f"_fsdp_wrapped_module.{name}",
    lambda name: name.replace("trf_blocks.0.", "trf_blocks.0._orig_mod."),
    lambda name: name.replace("trf_blocks.", "_fsdp_wrapped_module.trf_blocks.") if "1" in name else name,
    lambda name: name.replace("trf_blocks.1.", "trf_blocks.1._fsdp_wrapped_module._checkpoint_wrapped_module."),
    lambda name: f"base_model.model.{name}",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes_of_wrappers(tmp_path: Path, prefix: Any) -> None:
    changed = {prefix(name): tensor for name, tensor in STATE.items()}
    assert list(changed) != list(STATE)
    found = opened({"model": changed}, tmp_path)
    check(found, STATE)
    count = sum(prefix(name) != name for name in STATE)
    assert any(f"({count} names)" in line for line in found.stripped)


def test_real_wrappers() -> None:
    """The names that torch itself makes."""
    compiled = torch.compile(Model())
    wrapped = torch.nn.DataParallel(Model())
    both = torch.compile(torch.nn.DataParallel(Model()))
    for module in (compiled, wrapped, both):
        mapping, stripped = strip_prefixes(module.state_dict())  # type: ignore[attr-defined]
        assert list(mapping.values()) == list(STATE)
        assert stripped


def test_names_that_only_look_like_prefixes() -> None:
    names = ["model.module_list.0.weight", "modules.weight", "x._orig_model.bias", "a.module", "model.embed.weight"]
    mapping, stripped = strip_prefixes(names)
    assert mapping == {name: name for name in names}
    assert stripped == []


def test_collisions_are_errors() -> None:
    with pytest.raises(FormatError) as caught:
        strip_prefixes(["_orig_mod.a.weight", "a.weight", "a.module.bias", "a.bias"])
    assert [problem.kind for problem in caught.value.problems] == ["collision", "collision"]
    assert "'a.weight'" in str(caught.value)


def test_a_common_first_part_goes_only_when_asked(tmp_path: Path) -> None:
    changed = {f"net.{name}": tensor for name, tensor in STATE.items()}
    assert list(opened(changed, tmp_path).tensors) == list(changed)
    found = opened(changed, tmp_path, drop_prefix="net.")
    check(found, STATE)
    assert found.stripped == [f"net. ({len(STATE)} names)"]
    mixed = {**changed, "head.weight": torch.ones(2)}
    assert list(opened(mixed, tmp_path, drop_prefix="net.").tensors) == list(mixed)


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"model": m, "epoch": 1}])
def test_whole_models_are_refused(tmp_path: Path, wrap: Any) -> None:
    with pytest.raises(FormatError) as caught:
        opened(wrap(torch.nn.Sequential(torch.nn.Linear(2, 3))), tmp_path)
    for word in ("whole pickled Python object", "Sequential", "torch.save(model.state_dict(), path)"):
        assert word in str(caught.value)


@pytest.mark.parametrize("tree", [OPTIMIZER, {"epoch": 1}, {}, [], 5, "text", {"optimizer": OPTIMIZER}])
def test_no_state_dict(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(FormatError, match="no state dict"):
        opened(tree, tmp_path)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (torch.zeros(3), "it holds one tensor without a name."),
        ([torch.zeros(3)], "it holds a list."),
        ([], "it holds an empty list."),
        ({}, "it holds an empty dict."),
        (5, "it holds a number."),
        ({"epoch": 1}, "it holds 'epoch'."),
    ],
)
def test_what_is_there_in_place_of_a_state_dict_is_said_in_words(tmp_path: Path, tree: Any, words: str) -> None:
    with pytest.raises(FormatError) as caught:
        opened(tree, tmp_path)
    assert words in str(caught.value)


def test_unreadable_tensors_inside_the_model(tmp_path: Path) -> None:
    tree = dict(STATE, **{"a.weight": torch.eye(3).to_sparse(), "b.weight": torch.zeros(2, dtype=torch.cfloat).conj()})
    with pytest.raises(FormatError) as caught:
        opened(tree, tmp_path)
    assert [problem.tensor for problem in caught.value.problems] == ["a.weight", "b.weight"]


def test_adapters_of_peft_and_of_the_book(tmp_path: Path) -> None:
    peft = {
        f"base_model.model.layers.0.q_proj.{p}.weight": torch.ones(2, 2) for p in ("lora_A.default", "lora_B.default")
    }
    book = {"trf_blocks.0.att.W_query.linear.weight": torch.ones(6, 6)}
    book |= {f"trf_blocks.0.att.W_query.lora.{p}": torch.ones(2, 2) for p in "AB"}
    with pytest.raises(FormatError, match="merge_and_unload"):
        opened(dict(STATE, **peft), tmp_path)
    with pytest.raises(FormatError, match=r"\(x\.lora\.A @ x\.lora\.B\)\.T") as caught:
        opened({"model_state_dict": book}, tmp_path)
    assert "alpha / rank" in str(caught.value)
    refuse_adapters(STATE)  # control
    for part in ("oft_R.default", "boft_s", "modules_to_save.default", "hada_w2_b", "vera_lambda_d", "lora_a"):
        with pytest.raises(FormatError, match="merge_and_unload"):
            refuse_adapters([*STATE, f"layers.0.q_proj.{part}.weight"])
    refuse_adapters(["broad_way.weight", "layers.0.soft_max.weight", "layers.0.base_layer.weight"])
    refuse_adapters(["exploration.A", "floral.weight", "model.layers.0.linear.weight"])


def test_cycles_end(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": STATE}
    tree["self"] = tree
    tree["args"] = {"again": tree}
    check(opened(tree, tmp_path), STATE)
    assert list(candidates(tree)) == []  # control: torch's own tensors are no specs


def test_a_hostile_tree_is_walked_in_bounded_time() -> None:
    """Long keys above many dicts, wide and deep nesting, a thousand thousand lists."""
    leaf: Any = []
    for _ in range(100_000):
        leaf = [leaf]
    tree = {"k" * 1_000_000: {str(i): {"a": {}} for i in range(50_000)}, "deep": leaf, "wide": [[]] * 1_000_000}
    start = time.process_time()
    with pytest.raises(FormatError) as caught:
        unwrap(tree)
    assert time.process_time() - start < 10  # a tenth of a second on a quiet machine
    assert len(str(caught.value)) < 2000
