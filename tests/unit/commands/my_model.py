"""A user's model and data, which know nothing of zerotrain: the script of docs/guides/fsdp2.md imports them."""

import torch
from torch import nn


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(37, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 37, bias=False))
    model[3].weight = nn.Parameter(torch.randn(37, 48) * 0.1)
    return model


def tokens_of(step: int, rank: int = 0) -> torch.Tensor:
    return torch.randint(37, (9,), generator=torch.Generator().manual_seed(100 * rank + step))


def loss_of(model: nn.Module, step: int, rank: int = 0) -> torch.Tensor:
    tokens = tokens_of(step, rank)
    return nn.functional.cross_entropy(model(tokens), tokens)
