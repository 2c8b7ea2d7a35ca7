"""A ZeRO stage is a row of data: which of parameters, gradients and optimizer state are sharded.

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


@dataclass(frozen=True)
class Volume:
    """The numbers the theory is computed from (ZeRO, sections 5 and 7), without padding.

    Args:
        trainable_nbytes: of all trainable parameters, tied ones counted once, each in the dtype it is held in; as
            many bytes are those of their gradients, and of either on the wire.
        frozen_nbytes: of all frozen parameters.
        num_shards: ranks that share them.
    """

    trainable_nbytes: int
    frozen_nbytes: int
    num_shards: int
    reduced_nbytes: int | None = None
    """Bytes of all gradients as they are reduced; None: as many as `trainable_nbytes`."""

    def memory_nbytes(self, plan: Plan, optimizer_nbytes: int) -> dict[str, int]:
        """Bytes one rank holds at rest, by kind.

        Args:
            optimizer_nbytes: of the optimizer state of all trainable parameters, with master weights that are copies.
        """

        def held(placement: Placement, nbytes: int) -> int:
            return round(nbytes / (self.num_shards if placement is Placement.SHARDED else 1))

        return {
            "parameters": held(plan.parameters, self.trainable_nbytes + self.frozen_nbytes),
            "gradients": held(plan.gradients, self.trainable_nbytes),
            "optimizer": held(plan.optimizer, optimizer_nbytes),
        }

    def sent_nbytes(
        self, plan: Plan, num_micro_batches: int, reshard_after_forward: bool, num_reductions: int = 1
    ) -> int:
        """Bytes one rank sends in one optimizer step: its reduce-scatters, and the gathers the plan asks for.

        Replicated parameters: one gather (of gradients where the optimizer is replicated, of updated parameters
        where it is sharded). Sharded parameters: one for each forward and one for each backward, or one a step
        where they are kept.
        """
        share = (self.num_shards - 1) / self.num_shards
        gathers = 1
        if plan.shards_parameters and reshard_after_forward:
            gathers = 2 * num_micro_batches
        frozen = self.frozen_nbytes * gathers if plan.shards_parameters else 0
        reduced = self.trainable_nbytes if self.reduced_nbytes is None else self.reduced_nbytes
        return round(share * (reduced * num_reductions + self.trainable_nbytes * gathers + frozen))
