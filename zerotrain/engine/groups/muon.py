"""Muon for the matrices inside a model's blocks, AdamW for all else: torch's own optimizers, each where it belongs."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zerotrain.errors import ConfigError
from zerotrain.sharding.units import ModelParameter, Unit


@dataclass(frozen=True, kw_only=True)
class MuonWithAdamW:
    """Makes torch.optim.Muon for matrices and torch.optim.AdamW for all other parameters.

    Muon (K. Jordan et al. 2024) takes the momentum of a whole matrix and replaces it by the nearest orthogonal one.
    The convention is to leave embeddings and output layers to AdamW, whatever their shape.

    Args:
        lr, momentum, weight_decay, nesterov, adjust_lr_fn: as torch.optim.Muon has them.
        matrices: name patterns of the parameters for Muon, such as ["blocks.*.weight"]; of those that match, the
            two-dimensional ones. auto: all two-dimensional parameters in the model's repeated blocks that are no
            embeddings.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay, fused: as torch.optim.AdamW has them.
    """

    lr: float
    adamw_lr: float
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    adjust_lr_fn: str | None = None
    matrices: Sequence[str] | str = "auto"
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float = 0.1
    fused: bool = True

    def needs_whole(self, units: Sequence[Unit[ModelParameter]]) -> list[ModelParameter]:
        """The parameters for Muon.

        Raises:
            ConfigError: there are none, a pattern matches none, or `matrices` is neither auto nor a list.
        """
        trainable = [(unit, each) for unit in units for each in unit.parameters if each.parameter.requires_grad]
        two_dimensional = [(unit, each) for unit, each in trainable if each.parameter.ndim == 2]
        if isinstance(self.matrices, str):
            if self.matrices != "auto":
                raise ConfigError(
                    f"MuonWithAdamW(matrices={self.matrices!r}): must be auto, or a list of name patterns such as "
                    f"MuonWithAdamW(matrices=[{self.matrices!r}])"
                )
            chosen = [each for unit, each in two_dimensional if not unit.is_root and not _is_embedding(each)]
            if not chosen:
                raise ConfigError(
                    "MuonWithAdamW(matrices='auto'): found no two-dimensional parameter in a repeated block of the "
                    "model; name some, such as MuonWithAdamW(matrices=['*.weight']), or the blocks with zero.units"
                )
            return chosen
        for pattern in self.matrices:
            if not any(_matches(each, pattern) for _, each in two_dimensional):
                known = ", ".join(each.names[0] for _, each in two_dimensional[:3])
                raise ConfigError(
                    f"MuonWithAdamW(matrices=...): no trainable two-dimensional parameter matches {pattern!r}; there "
                    f"are {known or 'none'} and so on"
                )
        return [each for _, each in two_dimensional if any(_matches(each, pattern) for pattern in self.matrices)]

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of groups that are all updated whole, or all by elements."""
        if groups[0]["name"].startswith("whole "):
            return torch.optim.Muon(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                nesterov=self.nesterov,
                adjust_lr_fn=self.adjust_lr_fn,
            )
        return torch.optim.AdamW(
            groups,
            lr=self.adamw_lr,
            betas=(self.adamw_betas[0], self.adamw_betas[1]),  # a list, where it comes from a yaml
            eps=self.adamw_eps,
            weight_decay=self.adamw_weight_decay,
            fused=self.fused,
        )


def _is_embedding(managed: ModelParameter) -> bool:
    return any(isinstance(owner, nn.Embedding) for owner, _ in managed.owners)


def _matches(managed: ModelParameter, pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in managed.names)
