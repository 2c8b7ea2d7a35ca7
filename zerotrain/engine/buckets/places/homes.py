"""The parts of an engine's buckets that live off the device, and their tiers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.places.home import DEVICE, Home, OffloadedHome, Tensors
from zerotrain.errors import ConfigError
from zerotrain.offload.disk import DiskTier
from zerotrain.offload.saved import SavedTensors
from zerotrain.offload.tier import Crossing, HostTier, Rates, Tier, Windows, measured
from zerotrain.settings import OffloadConfig
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.plan import Plan

NOT_ON_HOST = (
    "offload.update: got host; tensors that the optimizer updates whole are exchanged and updated on the device: it "
    "must be device"
)
OPTIMIZER_WINDOWS = 3
"""One is updated in, one fetched and one stored."""


@dataclass(frozen=True)
class _Kind:
    """How one kind of state is offloaded."""

    windows: Windows
    in_place: bool


class Homes:
    """Gives buckets their homes.

    Args:
        prefetch: units that are gathered ahead.

    Raises:
        ConfigError: something is to be on a disk, and no folder is named.
        OffloadError: no file can be made there.
    """

    rates: Mapping[Tier, Rates]
    """Speeds of the tiers, from `measure`."""

    def __init__(self, given: OffloadConfig, world: World, prefetch: int) -> None:
        self._given, self._world = given, world
        self._kept: frozenset[str] = frozenset()
        self.rates = {}
        self.tiers_by_place: dict[tuple[str, torch.device], Tier] = {}
        """By cpu or disk, and the device of their windows."""
        crosses = self.update_on_host and not device_of(world.device).is_host
        self.crossing = Crossing(world.device) if crosses else None
        """The way to the host's updates and back; None where there are none, or the host is the device."""
        # A bucket whose gradient is on its way has its window too.
        self._optimizer = self._kind(given.optimizer, OPTIMIZER_WINDOWS + crosses, given.update == "host")
        # One is gathered from, as many as units are ahead are waiting, and one more is fetched.
        self._parameters = self._kind(given.parameters, prefetch + 2, in_place=False)
        activations = self._kind(given.activations, 3, in_place=False)
        self.saved = None if activations is None else SavedTensors(activations.windows)
        """Tensors that forwards save for backwards, if these are offloaded."""

    def _kind(self, where: str, num_windows: int, in_place: bool) -> _Kind | None:
        if where == "device":
            return None
        return _Kind(Windows(self._tier(where, on_host=in_place), num_windows), in_place and where == "cpu")

    def _tier(self, where: str, *, on_host: bool) -> Tier:
        is_real = device_of(self._world.device).holds_values
        device = torch.device("cpu") if on_host and is_real else self._world.device
        if (where, device) not in self.tiers_by_place:
            on_disk = where == "disk" and is_real  # which nothing is written to in a rehearsal
            self.tiers_by_place[where, device] = self._disk(device) if on_disk else HostTier(device)
        return self.tiers_by_place[where, device]

    def _disk(self, device: torch.device) -> DiskTier:
        if self._given.path is None:
            raise ConfigError("offload.path: got None; it must be a folder on the disk to offload to")
        return DiskTier(device, Path(self._given.path), f"rank {self._world.rank}")

    def keep(self, numels: Mapping[str, int], *, has_whole: bool) -> None:
        """Decide which buckets keep their optimizer state on the device: the last, as many as `offload.keep` allows.

        Args:
            numels: of all buckets that train, in forward order.
            has_whole: whether any of them has tensors that are updated whole.

        Raises:
            ConfigError: those cannot be updated on the host.
        """
        if self.update_on_host and has_whole:
            raise ConfigError(NOT_ON_HOST)
        room, kept = self._given.keep * sum(numels.values()), set()
        for name, numel in reversed(list(numels.items())):
            room -= numel
            if room < 0:
                break
            kept.add(name)
        self._kept = frozenset(kept)

    def of_optimizer(self, spec: BucketSpec, planned_nbytes: Callable[[], int], tensors: Tensors) -> Home:
        """The home of a bucket's optimizer state."""
        if self._optimizer is None or spec.name in self._kept or (nbytes := planned_nbytes()) == 0:
            return DEVICE
        return _home(self._optimizer, nbytes, tensors)

    def of_shard(self, plan: Plan, shard: torch.Tensor) -> Home:
        """The home of a rank's shard of a bucket's weights; the device if the rank keeps them whole."""
        kind = self._parameters if plan.shards_parameters else None
        return _home(kind, shard.nbytes, lambda: iter([("shard", shard)]))

    @property
    def off_device(self) -> list[tuple[str, Tier | Crossing]]:
        """All that holds memory off the device, each with its place: cpu or disk."""
        tiers = [(where, tier) for (where, _), tier in self.tiers_by_place.items()]
        return [*tiers, *([] if self.crossing is None else [("cpu", self.crossing)])]

    @property
    def tiers(self) -> list[Tier]:
        """Those that anything may be offloaded to."""
        return list(self.tiers_by_place.values())

    def measure(self) -> None:
        """Try how fast the tiers are that hold anything, or will, which takes some hundredths of a second of each.

        Raises:
            OffloadError: a sample cannot be written or read.
        """
        if device_of(self._world.device).holds_values:
            used = [tier for tier in self.tiers if tier.placed_nbytes or self.has_activations(tier)]
            self.rates = {tier: measured(tier) for tier in used}

    def has_activations(self, tier: Tier) -> bool:
        """Whether what forwards save goes there."""
        return self.saved is not None and self.saved.windows.tier is tier

    @property
    def placed_nbytes(self) -> int:
        """Bytes off the device."""
        if self.saved is not None:
            self.saved.free_ended()
        return sum(tier.placed_nbytes for tier in self.tiers)

    @property
    def windows_nbytes(self) -> int:
        """Bytes that windows hold on the device."""
        return sum(memory.nbytes for memory in self.windows)

    @property
    def windows(self) -> list[torch.Tensor]:
        """The memory of windows on the device that are not lent."""
        kinds = (self._optimizer, self._parameters, self.saved)
        return [memory for each in kinds if each is not None for memory in each.windows.memories]

    @property
    def update_on_host(self) -> bool:
        """Whether the optimizer's step is the host's, which needs a master weight there."""
        return self._given.optimizer != "device" and self._given.update == "host"


def _home(kind: _Kind | None, planned_nbytes: int, tensors: Tensors) -> Home:
    if kind is None:
        return DEVICE
    return OffloadedHome(kind.windows, planned_nbytes, tensors, in_place=kind.in_place)
