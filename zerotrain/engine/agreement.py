"""Whether all ranks train the same thing: compared once when an engine is built, and once a step.

The comparison of a step rides on the exchange of the norm, so it costs no collective and no wait of its own.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.whereabouts import by_rank
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.buckets.norm import add_digit_sums, norm_of_digit_sums
from zerotrain.engine.groups.hyperparameters import mixed, plain_values, shown_groups
from zerotrain.errors import ConfigError, DisagreementError

STAMP = (
    "number of the step",
    "backwards since the last step",
    "hyperparameters",
    "order of the collectives, as a hash",
    "weights written in place, as a hash",
)
"""Values of a step, sent by each rank as fp64 numbers; they must be equal."""
HYPERPARAMETERS = STAMP.index("hyperparameters")
"""A hash, which tells nothing: what differs is asked for."""


CANNOT_REPLAY = 1
"""The wish of a rank with a step that its graph is not of."""
_SIGNALS = 2**32
"""More than any signal; times 2**20 it is still a whole number of fp64."""


def parted(numbers: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The signals of all ranks and their wishes, which travel as one number each."""
    return tuple(number % _SIGNALS for number in numbers), tuple(number // _SIGNALS for number in numbers)


class Exchanged(NamedTuple):
    """Numbers of all ranks in a step, on the device."""

    norm: torch.Tensor
    """0-dim fp64."""
    digit_sums: torch.Tensor
    """(4,) fp64, the ingredients of the norm."""
    loss: torch.Tensor
    """0-dim fp64, the mean."""
    signals: torch.Tensor
    """(ranks,) each with its rank's wish: see `parted`."""
    stamps: torch.Tensor
    """(ranks, len(STAMP))"""


class StepStamps:
    """How far this rank has come: what it stamps a step with, and what it says when a collective fails."""

    num_steps = 0
    """Optimizer steps made, the skipped ones included."""
    num_backwards = 0
    """Since the last step."""
    phase = Phase.IDLE
    writes_digest = 0
    """Hash of writes to the weights by others than the engine since the last step; see `Writes`."""
    signal = 0
    """This rank's signal to the others in the step: see `ZeroEngine.signal`. Behind the stamp, and not compared."""
    wish = 0
    """This rank's word on graphs, from 0 to 2**20 - 1: see `zerotrain.engine.graphs`. It rides on the signal."""

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        collectives.world.whereabouts.ask(self.describe)

    def describe(self) -> str:
        """Such as "step 3, forward"."""
        return f"step {self.num_steps + 1}, {self.phase.value}"

    def stamp(self, param_groups: Sequence[Mapping[str, object]]) -> torch.Tensor:
        """(len(STAMP) + 1,) fp64 on the device: the numbers of `STAMP`, as this rank has them, and its signal."""
        text, unread = plain_values(param_groups)
        hyperparameters = _hash(text, num_bytes=6)
        numbers = [self.num_steps + 1, self.num_backwards, hyperparameters, self._collectives.journal.order]
        numbers += [self.writes_digest, self.signal + _SIGNALS * self.wish]
        # Made on the CPU and sent: a tensor made of Python numbers on a GPU waits for the device.
        stamp = torch.tensor(numbers, dtype=torch.float64).to(self._collectives.world.device, non_blocking=True)
        if unread:
            stamp[HYPERPARAMETERS] += mixed(unread)
        return stamp

    def exchanged(
        self, digit_sums: torch.Tensor, loss: torch.Tensor, param_groups: Sequence[Mapping[str, object]]
    ) -> "Exchanged":
        """Exchange the norm, and what rides on it. Collective.

        Stamps that differ make the norm NaN. A step with a norm of NaN is skipped anyway, and reads the stamps
        back from the device; no other step does. So comparing them costs a step nothing.

        Args:
            digit_sums: (4,) of this rank.
            loss: 0-dim fp64, this rank's mean.
        """
        numbers = torch.cat([digit_sums, self.stamp(param_groups), loss.view(1)])
        everyone = self._collectives.gather_small(numbers, name="norm")
        digits, stamps, signals, losses = everyone.split([len(digit_sums), len(STAMP), 1, 1], dim=1)
        sums = add_digit_sums(digits)
        norm = torch.where((stamps == stamps[0]).all(), norm_of_digit_sums(sums), float("nan"))
        return Exchanged(norm, sums, losses.mean(), signals.flatten(), stamps)

    def require_same(self, stamps: torch.Tensor, param_groups: Sequence[Mapping[str, object]]) -> None:
        """Compare the stamps of all ranks, (ranks, len(STAMP)). Collective where hyperparameters differ.

        Raises:
            DisagreementError: on every rank, if any two differ.
        """
        columns = list(zip(STAMP, stamps.T.tolist(), strict=True))
        del columns[HYPERPARAMETERS]
        differences = [f"{what}: {by_rank(values)}" for what, values in columns if len(set(values)) > 1]
        if (stamps[:, HYPERPARAMETERS] != stamps[0, HYPERPARAMETERS]).any():
            groups_by_rank = self._collectives.gather_objects(shown_groups(param_groups), name="hyperparameters")
            names = dict.fromkeys(name for on_rank in groups_by_rank for name in on_rank)
            rows = {name: [on_rank.get(name, "none") for on_rank in groups_by_rank] for name in names}
            lines = [f"{name}: {by_rank(values)}" for name, values in rows.items() if len(set(values)) > 1]
            differences += lines or ["the order of the hyperparameters in engine.param_groups"]
        if differences:
            raise DisagreementError(
                f"rank {self._collectives.world.rank}, {self.describe()}: the ranks have not done the same since the "
                f"last step; {'; '.join(differences)}"
            )


def require_same(collectives: Collectives, facts: Mapping[str, object]) -> None:
    """Compare settings over the ranks. Collective: one small exchange, and one more where they differ.

    Args:
        facts: value by the name the user knows it by; the same names on every rank. Of a list the first of its texts
            that differs is told.

    Raises:
        ConfigError: on every rank, with a line for each setting that differs.
    """
    hashes = [_hash(str(value), num_bytes=7) for value in facts.values()]
    numbers = torch.tensor(hashes, dtype=torch.int64, device=collectives.world.device)
    columns = collectives.gather_small(numbers, name="settings").T.tolist()
    different = [name for name, column in zip(facts, columns, strict=True) if len(set(column)) > 1]
    if not different:
        return
    local_values = [value if isinstance(value, list) else [str(value)] for value in map(facts.__getitem__, different)]
    values_by_rank = collectives.gather_objects(local_values, name="settings")
    problems = []
    for name, *lists in zip(different, *values_by_rank, strict=True):
        texts = next(row for row in zip_longest(*lists, fillvalue="nothing more") if len(set(row)) > 1)
        problems.append(f"{name}: differs between the ranks: {by_rank(texts)}; give all ranks the same")
    raise ConfigError(*problems)


def _hash(text: str, *, num_bytes: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes])
