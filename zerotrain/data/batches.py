"""The sequences of each rank in each step.

The row at position k of a run is a function of the seed and k alone (`zerotrain.data.batches`). A step reads
the next `global_batch_size` positions. How many ranks and micro-batches share them changes who reads a row, never which
rows are read:

    global batch, 8 rows          0   1 | 2   3 | 4   5 | 6   7      micro_batch_size 2
    1 rank,  4 micro-batches      r0 m0 | r0 m1 | r0 m2 | r0 m3
    2 ranks, 2 micro-batches      r0 m0 | r1 m0 | r0 m1 | r1 m1
    4 ranks, 1 micro-batch        r0 m0 | r1 m0 | r2 m0 | r3 m0
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

# The order in which a dataset's rows are read: a permutation for each epoch, of which any part is computed by
# itself.
#
# A Feistel network on pairs (left, right): each round adds to one half a hash of the other one and of the round's
# key, which can be undone, so all of it is a permutation of the pairs, whatever the hash. The rows 0..num_rows - 1
# are the first of these pairs. A row that is sent beyond them is sent on until it comes back (cycle walking); there
# are fewer than sqrt(num_rows) + 2 pairs too many, so hardly any is. Nothing is kept: an array of 1e8 shuffled rows
# took 26 s and 2 GB on each rank (2026-11-22).
#
# J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 4 and 5.


ORDER_VERSION = 2
"""The version of the function below: the same seed, epoch and number of rows give the same rows in every release with
it. 1 was the sorting of random bits."""
_NUM_ROUNDS = 12
"""Six would do where there are many rows. With few, each round has few ways to go: with 6 rounds some of the 24 orders
of 4 rows come 1.1 times as often as others, and with 12 rounds 1.001 times."""
_HASH = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64's last part, by which each bit of the input changes each bit of the output
(G. Steele and others, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""


def rows_at(positions: ArrayLike, *, seed: int, num_rows: int) -> NDArray[np.int64]:
    """The rows at some positions of a run, counted from the start of its first epoch.

    Args:
        positions: at least 0, of any shape and in any order.
        seed: 0 to 2**64 - 1; another one is another order.
        num_rows: of the dataset, 1 to 2**62.

    Returns:
        int64 of the same shape. Over all places of an epoch each row occurs once.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_rows)
    distinct_epochs, of_position = np.unique(epochs, return_inverse=True)
    keys = np.stack([_keys(seed, epoch) for epoch in distinct_epochs.tolist()], axis=1)
    return _permute(places.flatten(), keys[:, of_position.flatten()], num_rows).reshape(places.shape)


def _permute(places: NDArray[np.int64], keys: NDArray[np.uint64], num_rows: int) -> NDArray[np.int64]:
    """Args: places: (n,); keys: (_NUM_ROUNDS, n), of each place, or (_NUM_ROUNDS, 1)."""
    # An even number of left halves: with two odd ones no round could make an odd permutation.
    num_left = 2 * math.ceil((math.isqrt(num_rows - 1) + 1) / 2)
    num_right = -(-num_rows // num_left)
    keys = np.broadcast_to(keys, (_NUM_ROUNDS, len(places)))
    rows = _shuffle_pairs(places.astype(np.uint64), num_left, num_right, keys)
    while len(beyond := np.flatnonzero(rows >= num_rows)):
        rows[beyond] = _shuffle_pairs(rows[beyond], num_left, num_right, keys[:, beyond])
    return rows.astype(np.int64)


def _shuffle_pairs(
    pairs: NDArray[np.uint64], num_left: int, num_right: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One pass of the network over numbers left * num_right + right."""
    left_halves, right = np.divmod(pairs, np.uint64(num_right))
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        # 63 bits of the hash: to 64 no half could be added.
        left_halves = (left_halves + (mix_bits(right + left_key) >> np.uint64(1))) % np.uint64(num_left)
        right = (right + (mix_bits(left_halves + right_key) >> np.uint64(1))) % np.uint64(num_right)
    return left_halves * np.uint64(num_right) + right


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 bits for each value. Each bit depends on all bits of the value."""
    values = (values ^ (values >> np.uint64(30))) * _HASH[0]
    values = (values ^ (values >> np.uint64(27))) * _HASH[1]
    return values ^ (values >> np.uint64(31))


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Keys of all rounds: raw bits of a counter-based generator, which numpy promises to keep in all its versions."""
    bits: NDArray[np.uint64] = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(_NUM_ROUNDS)
    return bits


IGNORED_LABEL = -100
"""A label that stands for "nothing to learn here"; torch's cross entropy skips it by default."""
OF_SET = "validation set "
"""Beginning of the names of a further validation set in a fingerprint."""
_ORDER = "order of the data"
"""A hash, of a dataset with an order of its own."""
Order = Callable[..., tuple[NDArray[np.int64], NDArray[np.int64]]]


class RowsToRead(NamedTuple):
    """One micro-batch."""

    rows: list[int]
    epochs: list[int]
    """The pass over the dataset, from 0, for each row."""


@dataclass(kw_only=True, eq=False)
class GlobalBatchSampler(Sampler[list[int]]):
    """Batch sampler that yields, for each step, the rows of one rank: its virtual ranks one after another, and of each
    the micro-batches.

    The batches run through one permutation of the dataset after another, so every sequence is read once before any is
    read again. Endless.

    `rows_consumed`, the sequences that all ranks have been trained on, is where the training is, and all that a resumed
    run must know of it. The training loop sets it when a step is done. Iterating begins there and leaves it as it is,
    since a reader may be ahead of the training.

    Args:
        num_sequences: items of the dataset.
        micro_batch_size: sequences of one rank's forward.
        num_micro_batches: forwards of one virtual rank in a step.
        rank: which rank's rows to yield.
        num_ranks: ranks that share each global batch.
        leaves_per_rank: virtual ranks of each.
        seed: 0 to 2**63 - 1; another seed is another order.
        rows_consumed: sequences that all ranks have been trained on before.
        order: (positions, seed=...) -> (rows, epochs), of a dataset that has an order of its own, such as a mix; None:
            one permutation of all rows after another.
        fingerprint: further facts of the data, which a resumed run must share, such as {"tokens": 1000000}.

    Raises:
        ValueError: an argument is out of range.
    """

    num_sequences: int
    micro_batch_size: int
    num_micro_batches: int
    rank: int
    num_ranks: int
    seed: int
    leaves_per_rank: int = 1
    rows_consumed: int = 0
    order: Order | None = None
    fingerprint: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        rank, num_ranks, seed = self.rank, self.num_ranks, self.seed
        if min(self.num_sequences, self.micro_batch_size, self.num_micro_batches, num_ranks) < 1:
            raise ValueError(
                f"num_sequences={self.num_sequences}, micro_batch_size={self.micro_batch_size}, "
                f"num_micro_batches={self.num_micro_batches} and num_ranks={num_ranks} must all be at least 1"
            )
        if not 0 <= rank < num_ranks or not 0 <= seed < 1 << 63:
            raise ValueError(f"rank={rank} must be in 0..{num_ranks - 1} and seed={seed} in 0..2**63 - 1")
        _require_position(self.rows_consumed)
        self.fingerprint = {"rows": self.num_sequences} | dict(self.fingerprint or {})
        self.num_virtual_ranks = num_ranks * self.leaves_per_rank
        """Virtual ranks of all ranks together."""
        self.virtual_ranks = range(rank * self.leaves_per_rank, (rank + 1) * self.leaves_per_rank)
        """Those of this rank."""
        self.global_batch_size = self.num_virtual_ranks * self.num_micro_batches * self.micro_batch_size
        """Sequences of one step over all ranks."""

    def micro_batches(self, position: int, virtual_ranks: Sequence[int] | None = None) -> list[RowsToRead]:
        """The rows of one step, before which all ranks have read `position` sequences: the micro-batches of some
        virtual ranks, by default those of this rank, in that order.

        Only these are computed: a thousand ranks would each list the rows of all thousand.
        """
        numbers = np.array(self.virtual_ranks if virtual_ranks is None else virtual_ranks)
        blocks = np.arange(self.num_micro_batches) * self.num_virtual_ranks + numbers[:, None]
        positions = position + blocks.reshape(-1, 1) * self.micro_batch_size + np.arange(self.micro_batch_size)
        if self.order is None:
            rows = rows_at(positions, seed=self.seed, num_rows=self.num_sequences)
            epochs = positions // self.num_sequences
        else:
            rows, epochs = self.order(positions, seed=self.seed)
        return [RowsToRead(*pair) for pair in zip(rows.tolist(), epochs.tolist(), strict=True)]

    def __iter__(self) -> Iterator[list[int]]:
        for position in itertools.count(self.rows_consumed, self.global_batch_size):
            yield [row for micro_batch in self.micro_batches(position) for row in micro_batch.rows]

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run goes on at the same row, with whatever ranks and batch size."""
        return {
            "rows_consumed": self.rows_consumed,
            "seed": self.seed,
            "order_version": ORDER_VERSION,
            "fingerprint": dict(self.fingerprint or {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the run was that gave `state`.

        Raises:
            ValueError: its rows would not be those of this one: of another seed, order or dataset. Or it is no state.
        """
        try:
            rows_consumed, saved = int(state["rows_consumed"]), _values_to_compare(state)
        except (KeyError, TypeError) as error:
            raise ValueError(f"the position in the data lacks {error}; give what state_dict() has given") from error
        _require_position(rows_consumed)
        current = _values_to_compare(self.state_dict())
        different = [name for name in {**saved, **current} if saved.get(name) != current.get(name)]
        # A validation set may come or go: it changes no row that is trained on.
        different = [name for name in different if not name.startswith(OF_SET) or (name in saved and name in current)]
        if different:
            differences = "; ".join(
                "its data came in another order, as that of a mix with other weights (data.sources.*.weight) does, or "
                "that of rows grouped by length (data.group_by_length)"
                if name == _ORDER
                else f"{name}: {saved.get(name)} there, {current.get(name)} here"
                for name in different
            )
            raise ValueError(
                f"the saved run read other rows, so this one cannot go on at its row {rows_consumed}: {differences}; "
                "keep the data and the seed, or start from the first row"
            )
        self.rows_consumed = rows_consumed


def require_at_least(name: str, value: int, minimum: int) -> None:
    """Refuse too small a setting of the data, with a ValueError."""
    if value < minimum:
        raise ValueError(f"data.{name}={value} is too small; it must be at least {minimum}")


def require_fraction(fraction: float) -> None:
    """Refuse a part of the data to validate on that is none, with a ValueError."""
    if not 0 <= fraction < 1:
        raise ValueError(f"data.validation_fraction={fraction} is out of range; it must be 0 or between 0 and 1")


def _require_position(rows_consumed: int) -> None:
    if not 0 <= rows_consumed < 1 << 63:
        raise ValueError(f"rows_consumed={rows_consumed} must be in 0..2**63 - 1")


def _values_to_compare(state: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a state to compare."""
    return {"seed": state["seed"], "version of the order": state["order_version"]} | {
        f"{name.replace('_', ' ')} of the data": value for name, value in state["fingerprint"].items()
    }
