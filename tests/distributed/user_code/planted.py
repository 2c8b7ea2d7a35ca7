"""A model, and data with bad rows in known places, for tests of what a replay finds."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

NUM_ROWS = 96


class Rows(torch.utils.data.Dataset):
    """(features, labels) of a plane, read in the order of their numbers.

    Args:
        causes: what is wrong with a row, by its number.
    """

    draws = False

    def __init__(self, causes: Mapping[int, str]) -> None:
        self.causes = causes

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = 0.5 + torch.rand(4, generator=torch.Generator().manual_seed(row))
        label, cause = features.sum().view(1), self.causes.get(row)
        place, value = {
            "no_number": (slice(4), float("nan")),
            "infinite": (slice(1, 2), float("inf")),
            "huge": (slice(1, 2), 1e6),
            "exponent": (slice(1), 200.0),
            "zero": (slice(1, 2), 0.0),
            "flat": (slice(2, 4), 1.0),
        }.get(cause or "", (slice(0), 0.0))
        features[place] = value
        return features, label + (1000.0 if cause == "label" else 0.0)

    def order(self, positions: Any, *, seed: int) -> tuple[Any, Any]:
        return positions % NUM_ROWS, positions // NUM_ROWS


class Data:
    def __init__(self, causes: Mapping[int, str]) -> None:
        self.train = Rows({int(row): cause for row, cause in causes.items()})
        self.validation = torch.utils.data.Subset(Rows({}), range(4))


class Exponent(nn.Module):
    """Overflows where its input is large."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.exp()


class Normal(nn.Module):
    """0 / 0 where all values of a row are equal."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        centred = values - values.mean(dim=1, keepdim=True)
        return centred / centred.norm(dim=1, keepdim=True)


class Root(nn.Module):
    """Its slope is infinite at 0. In the backward it comes before `gain`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.abs().sqrt()


class Net(nn.Module):
    """Takes the arguments of model=mlp, and needs none."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.first, self.gain, self.last = nn.Linear(4, 4), nn.Linear(1, 1, bias=False), nn.Linear(8, 1)
        self.exponent, self.normal, self.root = Exponent(), Normal(), Root()

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        parts = (
            self.first(features),
            self.exponent(features[:, :1]),
            self.root(self.gain(features[:, 1:2])),
            self.normal(features[:, 2:4]),
        )
        wanted = self.last(torch.cat([each.to(self.last.weight.dtype) for each in parts], dim=1))
        return (wanted.float() - labels.float()).square().mean()
