"""How our engine stands against its peers: the ratios that the table and the targets are made of."""

import statistics

from benchmarks.engines import DDP_WAYS, ENGINES, PEERS
from benchmarks.results import Comparison, Measurement, lowest

LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Largest relative distance from the median loss that rounding explains: Adam turns the sign of a tiny gradient, which
the order of a sum decides, into a whole step."""


class Standing:
    """The medians of one comparison, and what they are compared with. Missing engines give nan."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison
        self.medians = comparison.medians()

    @property
    def floor_ms(self) -> float:
        """Milliseconds of a step without communication: the fastest way to train alone."""
        return lowest(median.step_ms for name, median in self.medians.items() if ENGINES[name].stage is None)

    @property
    def ddp_ms(self) -> float:
        """Milliseconds of a step of DDP, set up in the fastest of its ways."""
        return lowest(median.step_ms for name, median in self.medians.items() if name in DDP_WAYS)

    def peers_of(self, engine: str) -> list[Measurement]:
        """The measurements of other libraries at the stage of `engine`."""
        stage = ENGINES[engine].stage
        names = PEERS[stage] if stage is not None else []
        return [self.medians[name] for name in names if name in self.medians]

    def best_peer_ms(self, engine: str) -> float:
        """Milliseconds of a step of the fastest peer at the stage of `engine`."""
        return lowest(peer.step_ms for peer in self.peers_of(engine))

    def lowest_peer_nbytes(self, engine: str, *, above_interpreter: bool = False) -> float:
        """Peak resident memory of the leanest peer at the stage of `engine`, whole or above the interpreter's own."""
        peers = self.peers_of(engine)
        return lowest(peer.own_peak_nbytes if above_interpreter else peer.peak_nbytes for peer in peers)

    def limit_ms(self, engine: str) -> float:
        """No step of `engine` can be faster on this link: compute alone, or the bytes at the link's rate."""
        sent_nbytes, rate = self.medians[engine].sent_nbytes, self.comparison.link_bit_per_s
        wire_ms = 1e3 * 8 * sent_nbytes / rate if sent_nbytes and rate else 0.0
        return max(self.floor_ms, wire_ms)

    def different_losses(self) -> dict[str, float]:
        """Engines whose loss is further from the median than rounding explains, with the relative distance."""
        losses = {name: median.loss for name, median in self.medians.items() if ENGINES[name].stage is not None}
        if not losses:
            return {}
        middle = statistics.median(losses.values())
        distances = {name: abs(loss - middle) / abs(middle) for name, loss in losses.items()}
        tolerance = LOSS_TOLERANCE[self.comparison.workload.precision]
        return {name: distance for name, distance in distances.items() if not distance <= tolerance}
