"""Promise 1 under the worst timing: a reduction that is done on one rank alone. Late ranks: test_parameters.py."""

from typing import Any

import cases
import torch
import torch.distributed as dist
from torch import nn

from zerotrain.comm.handles import Handle
from zerotrain.settings import ZeroConfig

CASE = cases.Case(ZeroConfig(reduction="native", bucket_mb=0.05))
"""Whether gloo's own reduce-scatter is done can be asked, which cannot be said of an ordered reduction on gloo."""


def be_done_on_rank_0_alone() -> None:
    """From now on a collective is done on rank 0 as soon as that asks, and on no other rank before it waits. Gathers
    are gloo's own, as of many ranks, and not sends and receives, whose order does not matter."""
    cases.post_no_receives()

    def is_done(handle: Handle) -> bool:
        if dist.get_rank() == 0:
            handle.wait()
        return dist.get_rank() == 0

    assert hasattr(Handle, "is_done")
    setattr(Handle, "is_done", is_done)  # noqa: B010


class SumOverRanks(torch.autograd.Function):
    """A model's own collective, as batch norm over ranks has one: the mean of the gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        mean = gradient.clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()


class Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = cases.make_model()
        for block in self.inner.blocks:
            block.register_forward_hook(lambda _module, _inputs, output: SumOverRanks.apply(output))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(*inputs)


def collectives_of_the_model(stage: int) -> str:
    be_done_on_rank_0_alone()
    rank, size = cases.place()
    engine = cases.build(CASE.with_zero(stage=stage), Summing())
    for step in range(2):
        engine.train_step(cases.micro_batches(cases.batch(step, size, 1), rank))
    return engine.weights_sha256()


def test_where_a_reduction_is_done_on_one_rank_alone_the_models_collectives_have_their_order() -> None:
    hashes = cases.run_over([*range(4)], collectives_of_the_model, 2)
    assert len({hash_ for by_rank in hashes for hash_ in by_rank}) == 1
