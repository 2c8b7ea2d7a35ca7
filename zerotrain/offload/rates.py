"""How fast a tier is, measured when a run begins."""

import time
from dataclasses import dataclass

from zerotrain.offload.tier import Tier

SAMPLE_NBYTES = 32 * 2**20
"""At most; no more than is offloaded, for a disk that has just room for that, if anything is before a forward."""


@dataclass(frozen=True)
class Rates:
    """Bytes a second of one rank, measured while all others measured theirs."""

    fetched: float
    stored: float


def measured(tier: Tier) -> Rates:
    """Store a sample and fetch it again.

    Raises:
        OffloadError: there is no room for it, or it cannot be written or read.
    """
    nbytes = min(SAMPLE_NBYTES, tier.placed_nbytes or SAMPLE_NBYTES)
    place, window = tier.place(nbytes), tier.window(nbytes)
    try:
        started_s = time.perf_counter()
        tier.store(window, place).settle()
        stored_s = time.perf_counter()
        tier.fetch(place, window).settle()
        fetched_s = time.perf_counter()
    finally:
        tier.free(place)
    return Rates(nbytes / (fetched_s - stored_s), nbytes / (stored_s - started_s))
