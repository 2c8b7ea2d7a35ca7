"""Models of which each rank uses another part: what a rank leaves out gets no gradient there."""

from typing import Any

import torch
from torch import nn

WIDTH = 32


class TwoLinears(nn.Module):
    """A unit of which ranks may leave out the second linear. With small buckets each parameter has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, uses_second: bool = True) -> torch.Tensor:
        hidden = self.first(self.norm(x)).tanh()
        return x + (self.second(hidden).tanh() if uses_second else hidden)


class Uneven(nn.Module):
    """Ten blocks between an input and an output layer: deep enough to fill the wire."""

    num_blocks = 10

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(TwoLinears() for _ in range(self.num_blocks))
        self.output = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = self.input(x)
        for index, block in enumerate(self.blocks):
            x = self.call(index, block, x, **how)
        return self.output(x).float().square().mean()

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x)


class OneLinearOfOneRank(Uneven):
    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x, uses_second=not (index == 8 and rank == 0))


class EveryBlockOnAnotherRank(Uneven):
    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x, uses_second=(index + step) % 3 != rank)


class SkippedBlocks(Uneven):
    """As layer drop does it: a rank does not call a block at all."""

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return x if (index, rank) in ((4, 0), (7, 1)) and step > 0 else block(x)


class Experts(nn.Module):
    """A layer of four experts. Each row goes to one of two that this rank has chosen, by a gate that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        gates = self.router(x).softmax(-1)
        halves = x.chunk(2)
        chosen = [(rank + step) % 4, (2 * rank + step + 1) % 4]
        rows = [self.experts[each](half) for each, half in zip(chosen, halves, strict=True)]
        weights = [gate[:, each : each + 1] for each, gate in zip(chosen, gates.chunk(2), strict=True)]
        return x + torch.cat([row * weight for row, weight in zip(rows, weights, strict=True)])


class Mixture(Uneven):
    """Every block is a layer of experts."""

    num_blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(self.num_blocks))

    def call(self, index: int, block: nn.Module, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        return block(x, rank=rank + index, step=step)


class ExpertsAlone(nn.Module):
    """No other repeated blocks: the experts would be the units."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.layer, self.output = nn.Linear(7, WIDTH), Experts(), nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return self.output(self.layer(self.input(x), **how)).float().square().mean()
