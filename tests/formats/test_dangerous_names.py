"""What a pickle may name: real objects of real libraries pass, what torch would execute is refused by every command."""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import io
import ipaddress
import itertools
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import types
import typing
import uuid
import zoneinfo
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.cli import cli, run
from convert.errors import FormatError
from convert.formats import dangerous_calls, pickles, torch_zip
from convert.formats.dangerous_names import reason
from tests.trust.hostile import base, torch_cases


class Colour(enum.Enum):
    RED = 1


class Mode(enum.Flag):
    A = 1
    B = 2


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.x = 1

    def method(self) -> int:
        return 1

    @classmethod
    def made(cls) -> Outer:
        return cls()

    @staticmethod
    def alone() -> int:
        return 1


class Keywords:
    def __new__(cls, **more: int) -> Keywords:
        return object.__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        return (), {"a": 1}


@dataclasses.dataclass
class Config:
    width: int = 4
    names: list[str] = dataclasses.field(default_factory=list)
    where: pathlib.Path = pathlib.Path("runs") / "1"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    rate: float = 0.1


class Triple(typing.NamedTuple):
    a: int
    b: str


T = typing.TypeVar("T")


class Box(typing.Generic[T]):
    pass


class Subdict(dict[str, int]):
    pass


def warm(step: int) -> float:
    return min(1.0, step / 10)


def _trained() -> dict[str, Any]:
    """What a loop of one's own saves whole: model, optimizer, schedule, scaler."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.LayerNorm(4), torch.nn.Dropout())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    return {
        "module": model,
        "encoder": torch.nn.TransformerEncoderLayer(8, 2, 16),
        "optimizer": optimizer,
        "optimizer state": optimizer.state_dict(),
        "schedule state": torch.optim.lr_scheduler.LambdaLR(optimizer, warm).state_dict(),
        "one cycle": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9).state_dict(),
        "scaler": torch.amp.GradScaler("cpu", enabled=True).state_dict(),
        "loss": torch.nn.CrossEntropyLoss(),
        "dataset": torch.utils.data.TensorDataset(torch.ones(3)),
        "sampler": torch.utils.data.RandomSampler(range(3)),
        "generator": torch.Generator(),
        "distribution": torch.distributions.Normal(0.0, 1.0),
        "version": torch.torch_version.TorchVersion("2.1"),
    }


def _accelerated() -> Any:
    from accelerate.utils import DistributedType, GradientAccumulationPlugin, ProjectConfiguration

    return [ProjectConfiguration("x"), GradientAccumulationPlugin(num_steps=2), DistributedType.NO]


def _arguments() -> Any:
    from transformers import LlamaConfig, TrainingArguments
    from transformers.trainer_callback import TrainerControl, TrainerState

    return [TrainingArguments(output_dir="runs", use_cpu=True), TrainerState(), TrainerControl(), LlamaConfig()]


#: Harmless objects as their own libraries pickle them.
HONEST: dict[str, Callable[[], Any]] = {
    "argparse": lambda: [argparse.Namespace(lr=1e-3, out=pathlib.Path("x"), seed=None)],
    "SimpleNamespace": lambda: types.SimpleNamespace(a=1, proxy=types.GenericAlias(list, (int,))),
    "dataclasses": lambda: [Config(), Frozen(), dataclasses.fields(Frozen)[0].name, dataclasses.MISSING.__class__],
    "named tuples": lambda: Triple(1, "b"),
    "enumerations": lambda: [Colour.RED, Mode.A | Mode.B, Colour, re.IGNORECASE, uuid.SafeUUID.unknown],
    "nested classes": lambda: [Outer.Inner, Outer.Inner(), Outer.alone],
    "methods": lambda: [Outer().method, Outer.made, warm, "text".upper],
    "keywords for __new__": lambda: [Keywords()],
    "partial": lambda: [functools.partial(warm, 3), functools.partial(max, 1), functools.partial(Config, width=3)],
    "collections": lambda: [
        collections.deque([1], 3),
        collections.Counter("aab"),
        collections.ChainMap({"a": 1}),
        collections.defaultdict(list, a=[1]),
        collections.UserDict(a=1),
        collections.OrderedDict(a=1),
        Subdict(a=1),
    ],
    "numbers": lambda: [1j, decimal.Decimal("1.5"), fractions.Fraction(1, 3), decimal.Context(), 1 << 90],
    "times": lambda: [
        datetime.datetime.now(datetime.UTC),
        datetime.date(2020, 1, 2),
        datetime.timedelta(3),
        datetime.timezone(datetime.timedelta(hours=2)),
        zoneinfo.ZoneInfo("Europe/Berlin"),
    ],
    "identities": lambda: [uuid.uuid4(), ipaddress.ip_address("127.0.0.1"), ipaddress.ip_network("10.0.0.0/8")],
    "paths": lambda: [pathlib.Path("a/b"), pathlib.PurePosixPath("c"), pathlib.PureWindowsPath("d")],
    "containers": lambda: [range(3), slice(1, 2), bytearray(b"x"), {1}, frozenset({2}), b"y", array.array("i", [1])],
    "singletons": lambda: [
        Ellipsis,
        NotImplemented,
        type(None),
        type(Ellipsis),
        int,
        object,
        ValueError("x"),
        OSError(2),
    ],
    "types": lambda: [list[int], int | None, typing.Any, typing.Optional[str], typing.Dict[str, int], Box[int]],  # noqa: UP006, UP045
    "signatures": lambda: inspect.signature(warm),
    "iterators": lambda: [iter([1, 2]), itertools.count(3), enumerate("ab"), reversed([1]), zip([1], [2], strict=True)],
    "functions": lambda: [len, max, abs, operator.add, np.sin, torch.relu, torch.tanh, torch.nn.functional.gelu],
    "patterns": lambda: re.compile("a.b", re.IGNORECASE),
    "loggers": lambda: [logging.getLogger("train"), logging.getLogger()],
    "memory files": lambda: [io.BytesIO(b"x"), io.StringIO("y")],
    "random states": lambda: [
        random.getstate(),
        random.Random(1),
        np.random.get_state(),
        np.random.RandomState(1),
        *(np.random.Generator(kind(1)) for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox)),
        np.random.SeedSequence(3),
        torch.get_rng_state(),
    ],
    "numpy": lambda: [
        np.float32(1),
        np.int64(2),
        np.bool_(True),
        np.arange(6).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.dtype("f4"),
        np.dtype([("a", "i4"), ("b", "U3")]),
        np.array(["a", "b"]),
        np.array([{"a": 1}], dtype=object),
        np.datetime64("2020-01-01"),
        np.ma.masked_array([1, 2], [True, False]),
        np.rec.array([(1, 2.0)], dtype=[("x", "i4"), ("y", "f8")]),
        np.float64,
        np.array(["a"], dtype=np.dtypes.StringDType()),
    ],
    "torch": lambda: [
        torch.float16,
        torch.Size([1, 2]),
        torch.device("cpu"),
        torch.strided,
        torch.ones(2).to_sparse(),
        torch.nn.Parameter(torch.ones(2)),
        torch.nn.ParameterDict({"a": torch.ones(1)}),
        torch.ones(4).max(0),
    ],
    "a training loop's": _trained,
    "accelerate": _accelerated,
    "transformers": _arguments,
}


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", HONEST)
def test_honest_objects_stay_readable(name: str, protocol: int, tmp_path: Path) -> None:
    held = HONEST[name]()
    path = tmp_path / "x.pth"
    torch.save({"model": {"w": torch.ones(2, 3)}, "more": held}, path, pickle_protocol=protocol)
    tree = torch_zip.read(path).metadata["tree"]
    assert tree["model"]["w"].shape == (2, 3)
    assert set(tree) == {"model", "more"}
    torch.load(path, weights_only=False)  # it is a pickle that torch reads


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_honest_pickles_of_every_protocol(protocol: int) -> None:
    names = ("argparse", "dataclasses", "enumerations", "collections", "numbers", "times", "paths", "containers")
    for name in (*names, "types", "functions", "numpy", "methods", "nested classes", "identities"):
        for held in HONEST[name]():
            try:
                data = pickle.dumps(held, protocol)
            except (TypeError, ValueError, pickle.PicklingError, AttributeError):
                continue  # not of this protocol
            pickles.load(data, tensor=lambda *numbers: numbers, file="x")


#: Names in checkpoints of libraries that are not at hand here.
ELSEWHERE = [
    ("omegaconf.dictconfig", "DictConfig"),
    ("omegaconf.base", "ContainerMetadata"),
    ("omegaconf.nodes", "AnyNode"),
    ("pytorch_lightning.utilities.parsing", "AttributeDict"),
    ("pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint"),
    ("lightning.fabric.wrappers", "_FabricModule"),
    ("lightning_fabric.utilities.data", "AttributeDict"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("megatron.core.enums", "ModelType"),
    ("megatron.model.enums", "AttnMaskType"),
    ("fairseq.dataclass.configs", "FairseqConfig"),
    ("fairscale.optim.grad_scaler", "ShardedGradScaler"),
    ("apex.amp.scaler", "LossScaler"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core._multiarray_umath", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy.random.mtrand", "RandomState"),
    ("transformers_modules.org.model-7b.modeling", "Config"),
    ("__main__", "Config"),
    ("__main__", "cfg.model"),
    ("mypackage", "X"),
    ("mypackage.types", "X"),
    ("mypackage.code.profile", "X.Y"),
    ("pandas._libs.internals", "_unpickle_block"),
    ("pandas.core.frame", "DataFrame"),
    ("scipy.sparse._csr", "csr_matrix"),
    ("tokenizers", "Tokenizer"),
    ("torchvision.models.resnet", "ResNet"),
    ("torchmetrics.metric", "jit_distributed_available"),
    ("easydict", "EasyDict"),
    ("box.box", "Box"),
    ("addict.addict", "Dict"),
    ("ml_collections.config_dict.config_dict", "ConfigDict"),
    ("yacs.config", "CfgNode"),
    ("packaging.version", "Version"),
    ("torch.cuda.amp.grad_scaler", "_refresh_per_optimizer_state"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed._shard.sharded_tensor.api", "ShardedTensor"),
    ("torch.nn.backends.thnn", "_get_thnn_function_backend"),
    ("torchao.dtypes.nf4tensor", "NF4Tensor"),
    ("__builtin__", "long"),
    ("__builtin__", "unicode"),
    ("__builtin__", "xrange"),
    ("exceptions", "ValueError"),
]


@pytest.mark.parametrize(("module", "name"), ELSEWHERE)
def test_names_of_other_libraries_pass(module: str, name: str) -> None:
    assert reason(module, name) is None
    assert reason(module, f"{name}.__globals__") is not None  # the control


# ---- what would run ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", torch_cases.CALLS)
def test_every_call_is_refused_by_every_command(
    name: str, beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = torch_cases.CALLS[name](f"touch '{tmp_path}/canary'")
    data = base.state(base.text("extra") + asked) if beside else b"\x80\x02" + asked + b"."
    (tmp_path / "in").mkdir()
    src = str(base.torch_folder(tmp_path / "in", base.archive(data)))
    for argv in (
        ["inspect", src],
        ["validate", src],
        *(["to", way, src, "out"] for way in ("hf", "scratch", "meta", "gguf")),
    ):
        code, output = _run(capsys, argv)
        assert code == 1, (argv, output)
        said = " ".join(output.split())
        assert "asks for " in said and "nothing was run here" in said and "weights_only" in said, (argv, said)
        assert not any(ord(c) < 32 and c != "\n" for c in output)
    assert {p.name for p in tmp_path.iterdir()} == {"in"}


def test_without_the_check_they_would_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: it is the names that refuse these files, and nothing else about them."""
    extra = base.text("extra") + torch_cases.CALLS["os.system"]("true")
    (tmp_path / "in").mkdir()
    src = str(base.torch_folder(tmp_path / "in", base.archive(base.state(extra))))
    assert _run(capsys, ["inspect", src])[0] == 1
    monkeypatch.setattr(dangerous_calls, "reason", lambda *_, **__: None)
    monkeypatch.setattr(dangerous_calls, "reason_called", lambda _: None)
    code, output = _run(capsys, ["inspect", src])
    assert code == 0 and "os.system" in output


def _run(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, str]:
    code = run(cli, argv)
    told = capsys.readouterr()
    return code, told.out + told.err


def _by(func: Any, *args: Any) -> Any:
    """An object whose pickle calls ``func``."""
    return type("_Call", (), {"__reduce__": lambda self: (func, args)})()


def _real() -> dict[str, Any]:
    import code
    import ctypes
    import importlib
    import shutil
    import socket
    import subprocess
    import webbrowser

    return {
        "os.system": _by(os.system, "true"),
        "os.fork": _by(os.getcwd),
        "subprocess": _by(subprocess.check_output, ["true"]),
        "eval": _by(eval, "1"),
        "exec": _by(exec, "pass"),
        "import_module": _by(importlib.import_module, "this"),
        "ctypes": _by(ctypes.CDLL, "x"),
        "socket": _by(socket.socket),
        "code": _by(code.InteractiveInterpreter),
        "rmtree": _by(shutil.rmtree, "x"),
        "webbrowser": _by(webbrowser.open, "x"),
        "open": _by(open, "x"),
        "pathlib method": pathlib.Path("x").unlink,
        "method of an array": np.arange(3).tofile,
        "partial": functools.partial(os.system, "true"),
        "partial in partial": functools.partial(functools.partial, os.system),
        "attrgetter": operator.attrgetter("system"),
        "methodcaller": operator.methodcaller("system", "x"),
        "torch.load": _by(torch.load, "x"),
        "torch.save": _by(torch.save, 1, "x"),
        "torch.hub": _by(torch.hub.load, "x"),
        "torch.compile": _by(torch.jit.load, "x"),
        "numpy.load": _by(np.load, "x"),
        "numpy.save": _by(np.save, "x", 1),
        "numpy.memmap": _by(np.memmap, "x"),
        "numpy.fromfile": _by(np.fromfile, "x"),
        "factory": collections.defaultdict(os.getpid),
        "sort key": {"key": os.unlink},
        "storage": _by(torch.UntypedStorage.from_file, "x", True, 1),
    }


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_real_pickles_of_calls_are_refused(protocol: int) -> None:
    passed = 0
    for name, held in _real().items():
        try:
            data = pickle.dumps({"a": [held]}, protocol)
        except (TypeError, pickle.PicklingError, AttributeError):
            continue
        with pytest.raises(FormatError, match="asks for") as caught:
            pickles.load(data, tensor=lambda *numbers: numbers, file=name)
        assert len(caught.value.problems) == 1
        passed += 1
    assert passed >= 25


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth", "scaler.pt"])
def test_hostile_files_beside_a_model_are_never_opened(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = torch_cases.CALLS["os.system"](f"touch '{tmp_path}/canary'")
    (tmp_path / "in").mkdir()
    src = base.hf(tmp_path / "in")
    (src / file).write_bytes(base.archive(b"\x80\x02" + asked + b"."))
    opened: list[Path] = []
    real = torch_zip.read
    monkeypatch.setattr(torch_zip, "read", lambda path: opened.append(path) or real(path))
    for argv in (["inspect", str(src)], ["validate", str(src)], ["to", "scratch", str(src), str(tmp_path / "out")]):
        code, output = _run(capsys, argv)
        assert code == 0, (argv, output)
    assert not opened
    assert not (tmp_path / "canary").exists()
    assert not list((tmp_path / "out").rglob(file))
