"""The place of some of a bucket's tensors while nothing is computed with them, and their way to the device.

The tensors stay the objects they are, with another memory under them: at rest a place on a tier, for the host to read
and write, and between `open` and `close` a window.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPools
from zerotrain.comm.world import World
from zerotrain.device.device import DONE, Event, lies_on_host
from zerotrain.device.kinds import device_of
from zerotrain.device.memory import give_back_freed
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.options import EngineOptions
from zerotrain.errors import ConfigError
from zerotrain.offload.disk import DiskTier
from zerotrain.offload.saved import SavedTensors
from zerotrain.offload.tier import Crossing, Place, Rates, Tier, Window, Windows, measured, whole_pages
from zerotrain.settings import OffloadConfig
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import round_up
from zerotrain.sharding.plan import Plan

ALIGN_NBYTES = 256
"""Between tensors of a place: that of 64 elements of fp32, as in buckets, since kernels choose by it."""

Tensors = Callable[[], Iterator[tuple[Hashable, torch.Tensor]]]
"""The tensors that are to be at home, each by a key of its own: some may come later, and an optimizer may replace
one by another."""


class Home:
    """This one is the device: what is there stays there."""

    moves: bool = False
    """Whether the tensors are elsewhere at rest: where they are not, nothing below does anything."""
    device: torch.device | None = None
    """On which the tensors are when they are open; None: on the device."""

    @property
    def nbytes(self) -> int:
        """Size of the place, off the device."""
        return 0

    def tell(self, moved: Callable[[], None]) -> None:
        """Have this called whenever the tensors have got other memory under them."""

    def fetch(self) -> None:
        """Begin to bring the tensors to the device, if they are not there."""

    def open(self, *, replaced: bool = False) -> None:
        """Have the tensors on the device.

        Args:
            replaced: all of them are about to be written to, so they need not be fetched.
        """

    def close(self, *, changed: bool = True) -> None:
        """Begin to bring them back; new ones come along."""

    def put_away(self) -> None:
        """At rest: bring in what others have made on the device or the host, and wait for what is under way. The next
        fetch brings what the host writes to the tensors afterwards."""

    def at_rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """For a reader, the values of a tensor without gaps from the memory at rest; the tensor itself if it lies
        elsewhere. On any thread, while nothing changes them.

        Raises:
            OffloadError: they cannot be read.
        """
        return tensor

    def forget(self) -> None:
        """At rest: the host has looked at the tensors, and goes on to others."""

    def leave(self) -> None:
        """The tensors are used no more, or have another home."""


DEVICE = Home()


@dataclass(frozen=True)
class _Slot:
    """The position of a tensor in the place."""

    start: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def for_tensor(cls, tensor: torch.Tensor, start: int) -> "_Slot":
        dense = torch.empty_like(tensor, device="meta")  # of the same strides, if it is without gaps
        return cls(round_up(start, ALIGN_NBYTES), tensor.shape, dense.stride(), tensor.dtype)

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel() * self.dtype.itemsize

    def fits(self, tensor: torch.Tensor) -> bool:
        return self.shape == tensor.shape and self.dtype == tensor.dtype

    def lies_in(self, memory: torch.Tensor, tensor: torch.Tensor) -> bool:
        return tensor.device == memory.device and tensor.data_ptr() == memory.data_ptr() + self.start

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.start : self.stop].view(self.dtype).as_strided(self.shape, self.stride)


class OffloadedHome(Home):
    """A place on a tier.

    Args:
        planned_nbytes: that the tensors will have; if they come to have more, another place is made for them.
        in_place: what is computed with the tensors is computed on the host, where they lie.

    Raises:
        OffloadError: the tier has no room.
    """

    moves = True

    def __init__(self, windows: Windows, planned_nbytes: int, tensors: Tensors, *, in_place: bool) -> None:
        self._windows, self._tensors = windows, tensors
        self._moved: list[Callable[[], None]] = []
        self.device, self._in_place = windows.tier.device, in_place
        self._slots: dict[Hashable, _Slot] = {}
        self._place: Place = windows.tier.place(max(planned_nbytes, 1))
        self._window: Window | None = None
        self._arriving: Event = DONE
        """The fetch without a wait for it yet; behind it `_arrived`, with a wait of the device alone."""
        self._arrived: Event = DONE
        self._leaving: Event = DONE
        self._is_open = False
        self._took_in = False
        """Whether tensors came, and their memory is not given back yet."""

    @property
    def nbytes(self) -> int:
        return self._place.nbytes

    def tell(self, moved: Callable[[], None]) -> None:
        self._moved.append(moved)

    def fetch(self) -> None:
        if self._window is None and not self._in_place:
            tier = self._windows.tier
            stored = tier.settled(self._leaving)
            self._window = self._windows.take(self._place.nbytes)
            self._arriving = tier.fetch(self._place, self._window, stored)

    def open(self, *, replaced: bool = False) -> None:
        if not self._in_place:
            self._bring(replaced=replaced)
        self._is_open = True

    def _bring(self, *, replaced: bool) -> None:
        if replaced and self._window is None:
            self._windows.tier.settled(self._leaving)  # the next store to the place comes behind it in any case
            self._window = self._windows.take(self._place.nbytes)
            self._window.unused.wait()
        self.fetch()
        assert self._window is not None
        self._arrived, self._arriving = self._arriving, DONE
        self._arrived.wait()
        if not self._take_in(self._window.memory, from_outside=self._place.memory):
            self._drop_fetched()
            self._bring(replaced=False)
            return
        self._point_to(self._window.memory)

    def close(self, *, changed: bool = True) -> None:
        if not self._is_open:
            return
        self._is_open = False
        window, self._window = self._window, None
        if window is None:  # computed where they lie
            self.put_away()
            return
        tier, transfer = self._windows.tier, DONE
        if self._take_in(window.memory, from_outside=window.memory):
            transfer = tier.store(window, self._place) if changed else tier.read()
            self._leaving = transfer if changed else self._leaving
            self._point_to(self._place.memory)
        self._windows.give_back(window, transfer)

    def put_away(self) -> None:
        if self._is_open:
            return
        self._drop_fetched()
        self._settle()
        memory = self._place.memory
        if self._outside(memory) and self._take_in(memory, from_outside=memory):
            self._point_to(memory)

    def at_rest(self, tensor: torch.Tensor) -> torch.Tensor:
        place = self._place
        start = tensor.data_ptr() - place.memory.data_ptr()
        if not (lies_on_host(tensor) and 0 <= start < place.nbytes):
            return tensor
        stored = self._windows.tier.look(place, start, tensor.nbytes)
        return stored.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def forget(self) -> None:
        self._windows.tier.forget(self._place)

    def leave(self) -> None:
        self._drop_fetched()
        self._settle()
        self._windows.tier.free(self._place)
        self._tensors, self._moved = lambda: iter(()), []

    def _settle(self) -> None:
        """Wait on the host for all transfers of the place."""
        self._arrived.settle()
        self._leaving.settle()
        self._arrived = DONE

    def _drop_fetched(self) -> None:
        if self._window is not None:
            self._arriving.settle()
            self._windows.give_back(self._window, self._windows.tier.read())
            self._window, self._arriving = None, DONE

    def _take_in(self, into: torch.Tensor, *, from_outside: torch.Tensor) -> bool:
        """Bring those tensors that do not lie in `from_outside` into `into`; both are laid out as the place is. Returns
        False if the place is too small: all tensors are then at rest in a larger one."""
        strangers = self._outside(from_outside)
        for key, tensor in strangers:
            if key not in self._slots or not self._slots[key].fits(tensor):
                start = max((slot.stop for slot in self._slots.values()), default=0)
                self._slots[key] = _Slot.for_tensor(tensor, start)
        if any(self._slots[key].stop > self._place.nbytes for key, _ in strangers):
            self._move_to_larger()
            return False
        for key, tensor in strangers:
            self._slots[key].view(into).copy_(tensor)
        self._took_in |= bool(strangers)
        return True

    def _outside(self, memory: torch.Tensor) -> list[tuple[Hashable, torch.Tensor]]:
        """The tensors that do not lie in `memory`, or not where they belong."""
        return [
            (key, tensor)
            for key, tensor in self._tensors()
            if (slot := self._slots.get(key)) is None or not slot.fits(tensor) or not slot.lies_in(memory, tensor)
        ]

    def _move_to_larger(self) -> None:
        self._settle()
        tensors = list(self._tensors())
        self._slots.clear()
        stop = 0
        for key, tensor in tensors:
            slot = self._slots[key] = _Slot.for_tensor(tensor, stop)
            stop = slot.stop
        place = self._windows.tier.place(whole_pages(stop))
        for key, tensor in tensors:
            self._slots[key].view(place.memory).copy_(tensor)
        self._point_to(place.memory)
        self._windows.tier.free(self._place)
        self._place = place

    def _point_to(self, memory: torch.Tensor) -> None:
        for key, tensor in self._tensors():
            if (slot := self._slots.get(key)) is not None:
                tensor.data = slot.view(memory)
        for moved in self._moved:
            moved()
        if self._took_in:
            self._took_in = False
            give_back_freed()


# The parts of an engine's buckets off the device, and their tiers.


NOT_ON_HOST = (
    "offload.update: got host; tensors that the optimizer updates whole are exchanged and updated on the device: it "
    "must be device"
)
OPTIMIZER_WINDOWS = 3
"""One is updated in, one fetched and one stored."""


class Homes:
    """Gives buckets their homes.

    Args:
        prefetch: units that are gathered ahead.

    Raises:
        ConfigError: something is to be on a disk, and no folder is named.
        OffloadError: no file can be made there.
    """

    def __init__(self, settings: OffloadConfig, world: World, prefetch: int) -> None:
        self._settings, self._world = settings, world
        self._on_device: set[str] = set()
        """Buckets with their optimizer state on the device."""
        self.rates: Mapping[Tier, Rates] = {}
        """Speeds of the tiers, from `measure`."""
        self.tiers_by_place: dict[tuple[str, torch.device], Tier] = {}
        """By cpu or disk, and the device of their windows."""
        crosses = self.update_on_host and not device_of(world.device).is_host
        self.crossing = Crossing(world.device) if crosses else None
        """The way to the host's updates and back; None where there are none, or the host is the device."""
        # A bucket whose gradient is on its way has its window too.
        self._optimizer = self._windows(settings.optimizer, OPTIMIZER_WINDOWS + crosses, settings.update == "host")
        # One is gathered from, as many as units are ahead are waiting, and one more is fetched.
        self._parameters = self._windows(settings.parameters, prefetch + 2)
        activations = self._windows(settings.activations, 3)
        self.saved = None if activations is None else SavedTensors(activations)
        """Tensors that forwards save for backwards, if these are offloaded."""

    def _windows(self, where: str, number: int, on_host: bool = False) -> Windows | None:
        if where == "device":
            return None
        is_real = device_of(self._world.device).holds_values
        device = torch.device("cpu") if on_host and is_real else self._world.device
        if (where, device) not in self.tiers_by_place:
            if where != "disk" or not is_real:  # a rehearsal writes nothing to a disk
                self.tiers_by_place[where, device] = Tier(device)
            elif self._settings.path is None:
                raise ConfigError("offload.path: got None; it must be a folder on the disk to offload to")
            else:
                folder, whose = Path(self._settings.path), f"rank {self._world.rank}"
                self.tiers_by_place[where, device] = DiskTier(device, folder, whose)
        return Windows(self.tiers_by_place[where, device], number)

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
        room, self._on_device = self._settings.keep * sum(numels.values()), set()
        for name, numel in reversed(list(numels.items())):
            room -= numel
            if room < 0:
                break
            self._on_device.add(name)

    def of_optimizer(self, spec: BucketSpec, planned_nbytes: Callable[[], int], tensors: Tensors) -> Home:
        """The home of a bucket's optimizer state."""
        if self._optimizer is None or spec.name in self._on_device or (nbytes := planned_nbytes()) == 0:
            return DEVICE
        in_place = self.update_on_host and self._settings.optimizer == "cpu"
        return OffloadedHome(self._optimizer, nbytes, tensors, in_place=in_place)

    def of_shard(self, plan: Plan, shard: torch.Tensor) -> Home:
        """The home of a rank's shard of a bucket's weights; the device if the rank keeps them whole."""
        if self._parameters is None or not plan.shards_parameters:
            return DEVICE
        return OffloadedHome(self._parameters, shard.nbytes, lambda: iter([("shard", shard)]), in_place=False)

    @property
    def off_device(self) -> list[tuple[str, Tier | Crossing]]:
        """All holders of memory off the device, each with its place: cpu or disk."""
        tiers = [(where, tier) for (where, _), tier in self.tiers_by_place.items()]
        return [*tiers, *([] if self.crossing is None else [("cpu", self.crossing)])]

    @property
    def tiers(self) -> list[Tier]:
        """The tiers in use."""
        return list(self.tiers_by_place.values())

    def measure(self) -> None:
        """Measure the speed of the tiers in use, in some hundredths of a second each.

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
        """Bytes of windows on the device."""
        return sum(memory.nbytes for memory in self.windows)

    @property
    def windows(self) -> list[torch.Tensor]:
        """The memory of windows on the device, but for lent ones."""
        kinds = (self._optimizer, self._parameters, None if self.saved is None else self.saved.windows)
        return [memory for windows in kinds if windows is not None for memory in windows.memories]

    @property
    def update_on_host(self) -> bool:
        """Whether the optimizer's step is the host's. It needs a master weight there."""
        return self._settings.optimizer != "device" and self._settings.update == "host"


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine that each of its buckets uses."""

    options: EngineOptions
    groups: ParamGroups
    collectives: Collectives
    pools: ScratchPools
    """Lend buffers for a part of a step."""
    homes: Homes
