"""Which sequences each rank reads in each step.

The sequences of global batch k are a function of (seed, k, global batch size) alone. How many ranks and micro-batches
share them changes who reads a row, never which rows are read:

    global batch k, 8 rows        0   1 | 2   3 | 4   5 | 6   7      micro_batch_size 2
    1 rank,  4 micro-batches      r0 m0 | r0 m1 | r0 m2 | r0 m3
    2 ranks, 2 micro-batches      r0 m0 | r1 m0 | r0 m1 | r1 m1
    4 ranks, 1 micro-batch        r0 m0 | r1 m0 | r2 m0 | r3 m0
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler

IGNORED_LABEL = -100
"""A label that stands for "nothing to learn here"; torch's cross entropy skips it by default."""


class GlobalBatchSampler(Sampler[list[int]]):
    """Batch sampler that yields, for each step, the rows of one rank: its virtual ranks one after another, and of each
    the micro-batches.

    The batches run through one permutation of the dataset after another, so every sequence is read once before any is
    read again. Endless; `next_step` is the step whose rows come next.

    Args:
        num_sequences: items of the dataset.
        micro_batch_size: sequences of one rank's forward.
        num_micro_batches: forwards of one virtual rank in a step.
        rank: which rank's rows to yield.
        num_ranks: ranks that share each global batch.
        leaves_per_rank: virtual ranks of each.
        seed: at least 0; another seed is another order.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        num_sequences: int,
        micro_batch_size: int,
        num_micro_batches: int,
        rank: int,
        num_ranks: int,
        seed: int,
        leaves_per_rank: int = 1,
    ) -> None:
        if min(num_sequences, micro_batch_size, num_micro_batches, num_ranks) < 1:
            raise ValueError(
                f"num_sequences={num_sequences}, micro_batch_size={micro_batch_size}, "
                f"num_micro_batches={num_micro_batches} and num_ranks={num_ranks} must all be at least 1"
            )
        if not 0 <= rank < num_ranks or seed < 0:
            raise ValueError(f"rank={rank} must be in 0..{num_ranks - 1} and seed={seed} at least 0")
        self.num_sequences = num_sequences
        self.micro_batch_size = micro_batch_size
        self.num_micro_batches = num_micro_batches
        self.rank = rank
        self.num_ranks = num_ranks
        self.leaves_per_rank = leaves_per_rank
        self.seed = seed
        self.next_step = 0
        self._epoch = -1
        self._epoch_order = np.empty(0, dtype=np.int64)

    @property
    def global_batch_size(self) -> int:
        """Sequences of one step over all ranks."""
        return self.num_virtual_ranks * self.num_micro_batches * self.micro_batch_size

    @property
    def num_virtual_ranks(self) -> int:
        """Of all ranks."""
        return self.num_ranks * self.leaves_per_rank

    def global_batch(self, step: int) -> list[int]:
        """The `global_batch_size` sequences of a step, in row order. A batch may reach over the end of an epoch."""
        return self._sequences_at(step * self.global_batch_size + np.arange(self.global_batch_size))

    def rank_rows(self, step: int) -> list[int]:
        """This rank's sequences of a step, virtual rank by virtual rank: `micro_batch_size` for each micro-batch.

        Only these are computed: a thousand ranks would each list a thousand times what they read.
        """
        virtual_ranks = self.rank * self.leaves_per_rank + np.arange(self.leaves_per_rank)
        blocks = np.arange(self.num_micro_batches) * self.num_virtual_ranks + virtual_ranks[:, None]
        rows = blocks.reshape(-1, 1) * self.micro_batch_size + np.arange(self.micro_batch_size)
        return self._sequences_at(step * self.global_batch_size + rows.flatten())

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            step = self.next_step
            self.next_step += 1
            yield self.rank_rows(step)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to read the same batches; the number of ranks may change, the rest may not."""
        return {"next_step": self.next_step, "seed": self.seed, "global_batch_size": self.global_batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the run that gave `state` was.

        Raises:
            ValueError: the global batch size differs, so that "step" means something else.
        """
        if state["global_batch_size"] != self.global_batch_size:
            raise ValueError(
                f"the saved run had {state['global_batch_size']} sequences in a global batch, this one has "
                f"{self.global_batch_size}; keep ranks x gradient_accumulation_steps x micro_batch_size equal"
            )
        self.next_step = state["next_step"]
        self.seed = state["seed"]
        self._epoch = -1

    def _sequences_at(self, positions: np.ndarray) -> list[int]:
        """What is read at these rising positions, counted from the start of the first epoch."""
        epochs, indices = np.divmod(positions, self.num_sequences)
        places = zip(epochs.tolist(), indices.tolist(), strict=True)
        return [int(self._order_of(epoch)[index]) for epoch, index in places]

    def _order_of(self, epoch: int) -> np.ndarray:
        """The permutation of an epoch; the last one asked for is kept."""
        if epoch != self._epoch:
            self._epoch_order = epoch_order(seed=self.seed, epoch=epoch, num_sequences=self.num_sequences)
            self._epoch = epoch
        return self._epoch_order


def epoch_order(*, seed: int, epoch: int, num_sequences: int) -> np.ndarray:
    """A permutation of the dataset, (num_sequences,) int64.

    Sorts raw bits of a counter-based generator: numpy promises these bits for all its versions, but not what its
    `permutation` makes of them.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_sequences)
    return np.argsort(bits, kind="stable")
