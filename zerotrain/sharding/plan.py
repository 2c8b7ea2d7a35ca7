"""A ZeRO stage is a row of data: the placements of parameters, gradients and optimizer state.

All else follows from asking a plan where something lives; nothing compares a stage number.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Placement(Enum):
    """Whether every rank has a tensor whole between its uses, or a shard of it."""

    REPLICATED = "replicated"
    SHARDED = "sharded"


@dataclass(frozen=True)
class Plan:
    """Placement of the three kinds of model state at rest."""

    parameters: Placement
    gradients: Placement
    optimizer: Placement

    @cached_property
    def shards_parameters(self) -> bool:
        return self.parameters is Placement.SHARDED

    @cached_property
    def shards_gradients(self) -> bool:
        return self.gradients is Placement.SHARDED

    @cached_property
    def shards_optimizer(self) -> bool:
        return self.optimizer is Placement.SHARDED


_R, _S = Placement.REPLICATED, Placement.SHARDED

STAGES = (Plan(_R, _R, _R), Plan(_R, _R, _S), Plan(_R, _S, _S), Plan(_S, _S, _S))
"""The four stages of ZeRO (arXiv 1910.02054, figure 1), by number."""
