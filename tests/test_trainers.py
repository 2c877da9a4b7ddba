"""What trainers write, made by torch, accelerate and transformers themselves: converted bit for bit, or told how."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.errors import ConvertError, UsageError
from convert.prefixes import beside_bare, side_by_side
from convert.trainers import refuse_folder
from tests.fixtures import make_hf

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_hf(tmp_path_factory.mktemp("hf") / "source", "gqa8").path


@pytest.fixture(scope="module")
def state(source) -> dict[str, torch.Tensor]:
    return load_file(source / "model.safetensors")


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A process group of one, which FSDP and DDP want; it meets in a file, so that no port can be taken."""
    place = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def model(source: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(source)


def save(tree: Any, source: Path, folder: Path, name: str = "pytorch_model.bin") -> Path:
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    torch.save(tree, folder / name)
    return folder


def converted(path: Path, state: dict[str, torch.Tensor], out: Path, **options: Any) -> list[str]:
    """The notes of a conversion whose tensors are exactly ``state``."""
    done = convert.convert_checkpoint(path, out, to="hf", tokenizer=False, **options)
    got = load_file(out / "model.safetensors")
    assert set(got) == set(state)
    assert all(torch.equal(got[n], state[n]) for n in state)
    return done.notes


def fsdp(module: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def checkpointing(module: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(module)


WRAPPERS = {
    "ddp": torch.nn.parallel.DistributedDataParallel,
    "compile": torch.compile,
    "fsdp": fsdp,
    "checkpoint": checkpointing,
    "average": torch.optim.swa_utils.AveragedModel,
}
PARTS = {
    "ddp": "module",
    "compile": "_orig_mod",
    "fsdp": "_fsdp_wrapped_module",
    "checkpoint": "_checkpoint_wrapped_module",
    "average": "module",
}


@pytest.mark.parametrize("order", [o for n in (1, 2) for o in itertools.permutations(WRAPPERS, n)], ids="-".join)
def test_wrappers_in_any_order(group, source, state, tmp_path, order):
    """Parameters by the names that the wrapped module gives them, however the wrappers are stacked."""
    wrapped = model(source)
    try:
        for name in order:
            wrapped = WRAPPERS[name](wrapped)
    except (RuntimeError, ValueError, TypeError) as error:
        pytest.skip(f"torch itself does not stack these: {error}")
    tree = {n: p.detach() for n, p in wrapped.named_parameters()}
    tree |= {n: b for n, b in wrapped.named_buffers() if n.endswith("n_averaged")}
    notes = "\n".join(converted(save(tree, source, tmp_path / "in"), state, tmp_path / "out"))
    parts = {PARTS[name] for name in order if any(f"{PARTS[name]}." in n for n, _ in wrapped.named_parameters())}
    assert parts or order == ("checkpoint",)  # which takes its own part out of names, where it is outermost
    assert all(f"stripped from names: {part}. (" in notes for part in parts)
    assert ("n_averaged (a counter)" in notes) == ("average" in order)
    # and the way in which trainers save
    converted(save(wrapped.state_dict(), source, tmp_path / "in"), state, tmp_path / "again")


@pytest.mark.parametrize("inner", ["compile", "checkpoint", "fsdp"])
def test_wrappers_of_single_layers(group, source, state, tmp_path, inner):
    whole = model(source)
    for number, layer in enumerate(whole.model.layers):
        whole.model.layers[number] = WRAPPERS[inner](layer)
    tree = dict(torch.nn.parallel.DistributedDataParallel(whole).named_parameters())
    notes = converted(save(tree, source, tmp_path / "in"), state, tmp_path / "out")
    assert f"stripped from names: {PARTS[inner]}. (18 names)" in notes


def lightning(state: dict[str, torch.Tensor], prefix: str, **more: Any) -> dict[str, Any]:
    """What Lightning's Trainer.save_checkpoint writes (keys of 2.6)."""
    return {
        "epoch": 1,
        "global_step": 5,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": {prefix + name: tensor for name, tensor in state.items()},
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(1.0)}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1},
        **more,
    }


@pytest.mark.parametrize("prefix", ["model.", "net.", "model._orig_mod.", "_forward_module.model.", "net.gpt."])
def test_lightning_modules(source, state, tmp_path, prefix):
    path = save(lightning(state, prefix), source, tmp_path / "in", "last.ckpt")
    notes = "\n".join(converted(path, state, tmp_path / "out"))
    for part in ("'state_dict'", "stripped from names", "optimizer_states (list of 1)", "callbacks (dict of 1)"):
        assert part in notes


def test_a_lightning_module_with_more_than_the_model(source, state, tmp_path):
    tree = lightning(state, "model.")
    tree["state_dict"] |= {"criterion.weight": torch.ones(128), "metric.total": torch.tensor(3)}
    path = save(tree, source, tmp_path / "in", "last.ckpt")
    with pytest.raises(ConvertError, match=r"criterion\.weight.*no place") as error:
        convert.convert_checkpoint(path, tmp_path / "out", to="hf")
    assert {p.tensor for p in error.value.problems} == {"criterion.weight", "metric.total"}
    converted(path, state, tmp_path / "out", key="state_dict.model")


OTHER = 3.0
BARE = ["beside bare names", "beside bare names, deeper"]


def averages(state: dict[str, torch.Tensor]) -> dict[str, tuple[Any, str, str]]:
    """Files with a model and its moving average: ``(tree, key of the model, key of the average)``."""
    moving = {name: tensor * OTHER for name, tensor in state.items()}

    def at(prefix: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {prefix + name: tensor for name, tensor in tensors.items()}

    flat = {"initted": torch.tensor(True), "step": torch.tensor(4)} | at("online_model.", state)
    return {
        "two dicts": ({"model": state, "model_ema": moving, "optimizer": {}}, "model", "model_ema"),
        "timm": ({"state_dict": state, "state_dict_ema": moving, "arch": "x"}, "state_dict", "state_dict_ema"),
        "ema_pytorch": (flat | at("ema_model.", moving), "online_model", "ema_model"),
        "lightning": (
            lightning(
                moving, "model.", current_model_state=at("model.", state), averaging_state={"n": torch.tensor(2)}
            ),
            "current_model_state",
            "state_dict",
        ),
        "teacher": (
            {"state_dict": at("student.", state) | at("teacher.", moving)},
            "state_dict.student",
            "state_dict.teacher",
        ),
        "beside bare names": (state | at("ema_model.module.", moving), ".", "ema_model"),
        "beside bare names, deeper": (
            {"state_dict": at("module.", state) | at("ema.", moving), "step": 3},
            "state_dict",
            "state_dict.ema",
        ),
        "under a wrapper": (at("module.student.", state) | at("module.teacher.", moving), "student", "teacher"),
    }


@pytest.mark.parametrize("case", ["two dicts", "timm", "ema_pytorch", "lightning", "teacher", *BARE, "under a wrapper"])
def test_a_moving_average_beside_the_model_is_a_question(source, state, tmp_path, case):
    tree, plain, moving = averages(state)[case]
    path = save(tree, source, tmp_path / "in")
    with pytest.raises(UsageError, match="--key") as error:
        convert.open_checkpoint(path)
    assert plain in str(error.value) and moving in str(error.value)
    converted(path, state, tmp_path / "out", key=plain)
    converted(path, {n: t * OTHER for n, t in state.items()}, tmp_path / "average", key=moving)


def test_two_models_in_one_safetensors_file(source, state, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    moving = {name: tensor * OTHER for name, tensor in state.items()}
    both = {f"module.online.{n}": t for n, t in state.items()} | {f"module.ema.{n}": t for n, t in moving.items()}
    save_file(both, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"ema and online|online and ema") as error:
        convert.open_checkpoint(folder)
    assert "--key" in str(error.value)
    notes = converted(folder, moving, tmp_path / "out", key="ema")
    assert any("under the key 'ema'; 21 other tensors" in note for note in notes)
    bare = folder.with_name("bare")
    bare.mkdir()
    shutil.copy(source / "config.json", bare)
    save_file(state | {f"ema.{n}": t for n, t in moving.items()}, bare / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"--key ema, or --key \. for the other"):
        convert.open_checkpoint(bare)
    assert "not converted: ema (21 tensors)" in converted(bare, state, tmp_path / "bare-out", key=".")
    converted(bare, moving, tmp_path / "bare-average", key="ema")
    with pytest.raises(UsageError, match="begins with 'nothing"):
        convert.open_checkpoint(folder, key="nothing")
    convert.convert_checkpoint(source, tmp_path / "x.gguf", to="gguf", tokenizer=False)
    with pytest.raises(UsageError, match="--key"):
        convert.open_checkpoint(tmp_path / "x.gguf", key="ema")


def test_what_is_no_pair_of_models(state):
    assert side_by_side(state) == [] and beside_bare(state) is None
    assert beside_bare([*state, *(f"ema.{n}" for n in list(state)[:15])]) == "ema"  # without buffers, or a tied head
    assert beside_bare([*state, *(f"part.{n}" for n in list(state)[:5])]) is None
    assert side_by_side([f"{i}.{n}" for i in range(3) for n in ("a", "b", "c")]) == []
    assert side_by_side([f"{i}.{n}" for i in "xy" for n in ("a", "b", "c")]) == ["x", "y"]


def test_distributed_tensors_are_told(group, source, tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sharded = model(source)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for tree in (sharded.state_dict(), {"model": sharded.state_dict(), "step": 3}):
        with pytest.raises(ConvertError, match="DTensor") as error:
            convert.open_checkpoint(save(tree, source, tmp_path / "in"))
        assert "full_state_dict=True" in str(error.value)


def zero(state: dict[str, torch.Tensor], stage: int) -> dict[str, Any]:
    """The keys of DeepSpeed's ``mp_rank_00_model_states.pt``."""
    return {
        "module": state if stage < 3 else {n: torch.empty(0) for n in state},
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [{n: t.shape for n, t in state.items()}],
        "ds_config": {"zero_optimization": {"stage": stage}},
        "ds_version": "0.15.4",
        "global_steps": 5,
    }


def test_deepspeed(source, state, tmp_path):
    whole = save(zero(state, 2), source, tmp_path / "two", "mp_rank_00_model_states.pt")
    converted(whole / "mp_rank_00_model_states.pt", state, tmp_path / "out")
    with pytest.raises(ConvertError, match=r"zero_to_fp32\.py"):
        convert.open_checkpoint(whole)
    with pytest.raises(ConvertError, match="ZeRO stage 3") as error:
        three = save(zero(state, 3), source, tmp_path / "three", "mp_rank_00_model_states.pt")
        convert.open_checkpoint(three / "mp_rank_00_model_states.pt")
    assert "zero_to_fp32.py" in str(error.value)
    pieces = {"optimizer_state_dict": {"fp32_flat_groups": [torch.ones(9)], "zero_stage": 3}, "ds_version": "0.15.4"}
    with pytest.raises(ConvertError, match=r"zero_to_fp32\.py"):
        torch.save(pieces, tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        convert.open_checkpoint(tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    outer = tmp_path / "checkpoint-5"
    (outer / "global_step5").mkdir(parents=True)
    (outer / "latest").write_text("global_step5")
    with pytest.raises(ConvertError, match=r"zero_to_fp32\.py"):
        convert.open_checkpoint(outer)
    shutil.copy(source / "config.json", outer)
    shutil.copy(source / "model.safetensors", outer)
    converted(outer, state, tmp_path / "gathered")  # the trainer wrote the whole model as well


def test_megatron(source, tmp_path):
    names = ["self_attention.query_key_value.weight", "mlp.dense_h_to_4h.weight"]
    layers = {f"layers.0.{name}": torch.ones(96, 64) for name in names}
    tree = {"iteration": 3, "model": {"language_model": {"encoder": layers, "embedding": {"w": torch.ones(9, 2)}}}}
    path = save(tree, source, tmp_path / "in", "model_optim_rng.pt")
    for at in (path, path / "model_optim_rng.pt"):
        with pytest.raises(ConvertError, match="Megatron") as error:
            convert.open_checkpoint(at)
        assert error.value.problems[0].kind == "megatron"
    ranks = tmp_path / "iter_0000003"
    shutil.copytree(path, ranks / "mp_rank_00")
    with pytest.raises(ConvertError, match="Megatron"):
        convert.open_checkpoint(ranks)


def test_folders_that_are_none_of_these(tmp_path):
    refuse_folder(tmp_path, [])
    refuse_folder(tmp_path, [tmp_path / "model.safetensors", tmp_path / "states.pt"])


@pytest.fixture(scope="module")
def trained(source, tmp_path_factory):
    """Folders of ``accelerate`` (both ways) and of transformers' Trainer, after a step of each."""
    accelerate = pytest.importorskip("accelerate")
    root = tmp_path_factory.mktemp("trained")
    net = model(source)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 2
    engine = accelerate.Accelerator(cpu=True)
    net, optimizer, schedule, loader = engine.prepare(
        net, optimizer, schedule, torch.utils.data.DataLoader(rows, shuffle=True)
    )
    for batch in loader:
        engine.backward(net(**batch).loss)
        optimizer.step()
    engine.save_state(root / "safe")
    engine.save_state(root / "bin", safe_serialization=False)
    engine.save_model(net, root / "model", max_shard_size="100KB")
    weights = {n: t.detach().clone() for n, t in engine.unwrap_model(net).state_dict().items()}
    options = transformers.TrainingArguments(
        output_dir=root / "trainer", max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(model=engine.unwrap_model(net), args=options, train_dataset=rows)
    trainer.train()
    return root, weights, {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}


@pytest.mark.parametrize("folder", ["safe", "bin", "model"])
def test_folders_of_accelerate(trained, source, tmp_path, folder):
    root, weights, _ = trained
    if folder != "model":
        assert {"optimizer.bin", "scheduler.bin"} <= {p.name for p in (root / folder).iterdir()}
    else:
        assert len(list((root / folder).glob("*.safetensors"))) > 1
    converted(root / folder, weights, tmp_path / "out", config=source / "config.json")


def test_folders_of_transformers_trainer(trained, tmp_path):
    root, _, weights = trained
    last = root / "trainer" / "checkpoint-2"
    assert {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"} <= {p.name for p in last.iterdir()}
    converted(last, weights, tmp_path / "out")
    with pytest.raises(UsageError, match="checkpoint-1, checkpoint-2") as error:
        convert.open_checkpoint(root / "trainer")
    assert "checkpoint-2" in str(error.value.problems[0].hint)
