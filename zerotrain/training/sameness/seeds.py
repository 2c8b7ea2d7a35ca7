"""The random numbers of a run: a function of where they are drawn, so that no generator's state need ever be kept."""

import hashlib
import random

import numpy as np

from zerotrain.device.kinds import seed_torch

_NUMPY_SEEDS = 1 << 32


def seed_leaf(seed: int, step: int, virtual_rank: int, micro_batch: int) -> None:
    """Seed torch's, Python's and numpy's generators for one micro-batch, whichever rank runs it and whatever has been
    drawn before.

    Args:
        seed: of the run.
        step: number of the global batch, from 0.
        micro_batch: number within the virtual rank, from 0.
    """
    place = f"{seed} {step} {virtual_rank} {micro_batch}"
    number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8])
    seed_torch(number)
    random.seed(number)
    np.random.seed(number % _NUMPY_SEEDS)
