"""The time of a step, by a model that is simple enough to be checked by hand: every part waits for the one before it.

    seconds =  flops / rate of products               (what is computed again, and all micro-batches, among them)
             + operations / operations a second       (what one takes however small it is: many for small micro-batches)
             + a tenth of both                        (with a disk, which lets freed memory go back and be cleared)
             + 2 x optimizer state / rate of memory   (an update reads and writes it, wherever it lies)
             + bytes sent / rate of the link
             + bytes fetched and stored / rate of the disk, or of the way to the host's memory

A run hides much of the last two lines behind the first: the model tells which of two ways is faster, not how long it
takes. flops, operations and bytes are those of the rehearsed step, and rates come from `zerotrain.run.probe`.
"""

from dataclasses import asdict, dataclass

from zerotrain.planning.rehearsal import StagePlan

OF_ZEROED = 0.1
"""See `zerotrain.device.heap.set_heap`."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """So much a rank does in a second."""

    flops: float
    operations: float
    memory: float
    """Bytes read or written of the device's memory."""
    link: float
    """Bytes sent."""
    host: float
    """Bytes moved between the device and the host's memory."""
    disk: float
    assumed: tuple[str, ...] = ()
    """Names of those that nothing has measured."""

    def __str__(self) -> str:
        values = {name: rate for name, rate in asdict(self).items() if name != "assumed"}
        told = ", ".join(f"{rate:.2g} {name}{' (assumed)' * (name in self.assumed)}" for name, rate in values.items())
        return f"a rank does in a second: {told}"


def step_s(plan: StagePlan, rates: Speeds) -> float:
    """Seconds of a step, by the module's formula; of one whose activations are known."""
    state = plan.optimizer + plan.host + plan.disk - plan.saved
    moved = (plan.fetched + plan.stored) / (rates.disk if plan.disk else rates.host)
    compute = (plan.flops or 0) / rates.flops + (plan.operations or 0) / rates.operations
    if plan.disk:
        compute *= 1 + OF_ZEROED
    return compute + 2 * state / rates.memory + (plan.sent or 0) / rates.link + moved
