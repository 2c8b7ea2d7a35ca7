"""The order in which a dataset's rows are read: a permutation for each epoch, of which any part is computed by itself.

A Feistel network on pairs (left, right): each round adds to one half a hash of the other one and of the round's key,
which can be undone, so all of it is a permutation of the pairs, whatever the hash. The rows 0..num_rows - 1 are the
first of these pairs. A row that is sent beyond them is sent on until it comes back (cycle walking); there are fewer
than sqrt(num_rows) + 2 pairs too many, so hardly any is. Nothing is kept: an array of 1e8 shuffled rows took 26 s and
2 GB on each rank (2026-11-22).

J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002, sections 4 and 5.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

ORDER_VERSION = 2
"""The version of the function below: the same seed, epoch and number of rows give the same rows in every release with
it. 1 was the sorting of random bits."""
MAX_NUM_ROWS = 1 << 62
_NUM_ROUNDS = 12
"""Six would do where there are many rows. With few, each round has few ways to go: with 6 rounds some of the 24 orders
of 4 rows come 1.1 times as often as others, and with 12 rounds 1.001 times."""
_HASH = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Multipliers of SplitMix64's last part, in which each bit of what goes in changes each bit of what comes out
(G. Steele and others, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014)."""


def permuted(indices: ArrayLike, *, seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    """Which rows of a dataset are read at some places of an epoch.

    Args:
        indices: places in 0..num_rows - 1, of any shape and in any order.
        seed: 0 to 2**64 - 1; another one is another order.
        epoch: 0 to 2**64 - 1; likewise.
        num_rows: 1 to 2**62.

    Returns:
        int64 of the same shape. Over all places each row occurs once.

    Raises:
        ValueError: an argument is out of range.
    """
    places = np.asarray(indices, dtype=np.int64)
    if not 1 <= num_rows <= MAX_NUM_ROWS:
        raise ValueError(f"num_rows={num_rows} must be in 1..2**62")
    if places.size and not 0 <= int(places.min()) <= int(places.max()) < num_rows:
        raise ValueError(f"indices={indices!r} must all be in 0..{num_rows - 1}, below num_rows")
    if not (0 <= seed < 1 << 64 and 0 <= epoch < 1 << 64):
        raise ValueError(f"seed={seed} and epoch={epoch} must be in 0..2**64 - 1")
    rows = _sent_to(places.flatten(), _keys(seed, epoch)[:, None], num_rows)
    return rows.reshape(places.shape)


def rows_at(positions: ArrayLike, *, seed: int, num_rows: int) -> NDArray[np.int64]:
    """Which rows are read at some positions of a run, counted from the start of its first epoch.

    Args:
        positions: at least 0, of any shape and in any order.
        seed, num_rows: as `permuted` takes them.
    """
    epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), num_rows)
    each, of_position = np.unique(epochs, return_inverse=True)
    keys = np.stack([_keys(seed, epoch) for epoch in each.tolist()], axis=1)
    return _sent_to(places.flatten(), keys[:, of_position.flatten()], num_rows).reshape(places.shape)


def _sent_to(places: NDArray[np.int64], keys: NDArray[np.uint64], num_rows: int) -> NDArray[np.int64]:
    """Args: places: (n,); keys: (_NUM_ROUNDS, n), of each place, or (_NUM_ROUNDS, 1)."""
    # An even number of left halves: with two odd ones no round could make an odd permutation.
    num_left = 2 * math.ceil((math.isqrt(num_rows - 1) + 1) / 2)
    num_right = -(-num_rows // num_left)
    keys = np.broadcast_to(keys, (_NUM_ROUNDS, len(places)))
    rows = _shuffled_pairs(places.astype(np.uint64), num_left, num_right, keys)
    while len(beyond := np.flatnonzero(rows >= num_rows)):
        rows[beyond] = _shuffled_pairs(rows[beyond], num_left, num_right, keys[:, beyond])
    return rows.astype(np.int64)


def _shuffled_pairs(
    pairs: NDArray[np.uint64], num_left: int, num_right: int, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """The numbers left * num_right + right that some others are sent to."""
    left, right = np.divmod(pairs, np.uint64(num_right))
    for left_key, right_key in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _hashed(right + left_key)) % np.uint64(num_left)
        right = (right + _hashed(left + right_key)) % np.uint64(num_right)
    return left * np.uint64(num_right) + right


def _hashed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """63 bits, each of which depends on all bits of a value; to 64 no half could be added."""
    values = (values ^ (values >> np.uint64(30))) * _HASH[0]
    values = (values ^ (values >> np.uint64(27))) * _HASH[1]
    return (values ^ (values >> np.uint64(31))) >> np.uint64(1)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Keys of all rounds: raw bits of a counter-based generator, which numpy promises to keep in all its versions."""
    bits: NDArray[np.uint64] = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(_NUM_ROUNDS)
    return bits
