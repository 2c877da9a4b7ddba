"""One rank of a training run of the reference Llama on the CPU, which saves itself as a distributed checkpoint.

``torchrun … -m tests.ranks.train OUT KIND``, where OUT holds a from-scratch folder ``start`` and KIND is ``fsdp1``,
``fsdp2`` or ``mesh`` (FSDP2 and tensor parallelism of the head). Two steps of AdamW; the full state dict after them is
stored beside it by rank 0, as ``full.pt``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

import convert


class App:
    """What trainers hand over: the model and its optimizer under one name."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.parts = (model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(*self.parts)
        return {"model": model, "optim": optimizer, "step": 2}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise NotImplementedError


def main(out: Path, kind: str) -> None:
    """Wrap, train, save."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    from convert.checkpoint import open_checkpoint
    from convert.reference.loading import load_reference

    with open_checkpoint(out / "start") as opened:
        model = load_reference(opened, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        model = FullyShardedDataParallel(
            model, use_orig_params=True, device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.FULL_SHARD
        )
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        if kind == "mesh":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
            from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

            for block in model.trf_blocks:
                plan = {"ff.fc1": ColwiseParallel(), "ff.fc2": ColwiseParallel(), "ff.fc3": RowwiseParallel()}
                parallelize_module(block, mesh["tensor"], plan)
            mesh = mesh["data"]
        for block in model.trf_blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        logits = model(torch.arange(12).view(1, -1))
        logits.float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    offload = kind != "fsdp1"  # which torch 2.13 cannot do where there is no accelerator
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    if dist.get_rank() == 0:
        torch.save({k: v.clone() for k, v in full.items()}, out / "full.pt")
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=out / "dcp")
    dist.barrier()
    os._exit(0)  # torch's own end, with a process group and its threads, has been seen to abort


if __name__ == "__main__":
    assert convert.__version__
    main(Path(sys.argv[1]), sys.argv[2])
