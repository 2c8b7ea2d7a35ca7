"""FSDP2: fully_shard on each block and on the root, as its tutorial does."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.engines.plain import TorchTraining, adamw
from benchmarks.workload import Workload
from zerotrain.comm.hosts import host_name
from zerotrain.models import GPT


class FsdpTraining(TorchTraining):
    """PyTorch's training loop around modules that were fully sharded."""

    def __init__(self, model: nn.Module, workload: Workload, *, reshard: bool) -> None:
        super().__init__(model, adamw(model.parameters()), workload)
        self.reshard = reshard

    def synchronisation(self, *, last: bool) -> AbstractContextManager[Any]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(self.reshard or last)
        return nullcontext()


def build(model: GPT, workload: Workload, *, reshard: bool, by_host: bool = False) -> FsdpTraining:
    """Shard parameters, gradients and optimizer state.

    Args:
        reshard: free parameters between a block's forward and its backward (ZeRO stage 3).
        by_host: shard over the ranks of a host, and replicate on each.
    """
    mesh = init_device_mesh(workload.device, (dist.get_world_size(),))
    if by_host:
        hosts: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(hosts, host_name())
        shape = (len(set(hosts)), hosts.count(hosts[0]))
        mesh = init_device_mesh(workload.device, shape, mesh_dim_names=("replicate", "shard"))
    # The tutorial reduces in fp32; in bf16, as our engine does, fewer bytes are sent.
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    policy = bf16 if workload.precision == "bf16" else MixedPrecisionPolicy()
    if workload.compiled:  # as torchtitan does
        model.loss.compile()
    for block in model.blocks:
        if workload.compiled:
            block.compile()
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return FsdpTraining(model, workload, reshard=reshard)
