"""Offloads the tensors saved by forwards for their backwards.

Each unit's forward runs under hooks on what autograd saves. Large tensors go to a place of a tier, once for each
memory, and are fetched again one unit ahead of the backward: when it reaches a unit, the fetch for the unit before
begins. The device holds one unit's saved tensors in a forward, and two units' in a backward, whatever the depth.
"""

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerotrain.device.device import DONE, Event
from zerotrain.errors import OffloadError
from zerotrain.offload.tier import Place, Windows

MIN_NBYTES = 64 * 2**10
"""Smallest memory to offload: it takes whole pages and two transfers."""


@dataclass(eq=False)
class _Stored:
    """The bytes of one memory as they were when a tensor in it was saved. Saved tensors of autograd hold it."""

    owner: "SavedTensors"
    source: StorageWeakRef
    """While this is held, no other memory gets the same identity."""
    version: int
    place: Place
    storing: Event
    memory: torch.Tensor | None
    """(nbytes,) uint8 on the device; None: they are in their place alone."""
    arriving: Event = DONE

    def fetch(self) -> None:
        """Begin to bring the bytes to the device, if they are not there."""
        if self.memory is None:
            self.owner.fetched_nbytes += self.place.nbytes
            self.memory, self.arriving = self.owner.windows.tier.fetched(self.place, self.storing)

    def on_device(self) -> torch.Tensor:
        """(nbytes or more,) uint8."""
        self.fetch()
        arriving, self.arriving = self.arriving, DONE
        arriving.wait()
        assert self.memory is not None
        return self.memory

    def drop(self) -> None:
        """Leave the bytes in their place alone."""
        arriving, self.arriving = self.arriving, DONE
        arriving.wait()
        self.memory = None

    def __del__(self) -> None:
        # Python may come here in any thread, and a place is not to be freed while it is being written.
        still_arriving = None if self.arriving is DONE else self.memory
        self.owner.ended.append((self.place, self.storing, self.arriving, still_arriving))


class SavingCall:
    """One forward of a unit: what autograd saved in it."""

    def __init__(self, owner: "SavedTensors", previous_call: "SavingCall | None") -> None:
        self._owner = owner
        self._previous_call = _weak(previous_call)
        self._stored: list[weakref.ref[_Stored]] = []

    def stored(self) -> list[_Stored]:
        """Those still in need by a graph, in the order of a backward."""
        alive = [stored for reference in reversed(self._stored) if (stored := reference()) is not None]
        return list(dict.fromkeys(alive))

    def drop(self, but: Collection[_Stored] = ()) -> None:
        """Leave what was saved in its places alone, but for those."""
        for stored in self.stored():
            if stored not in but:
                stored.drop()

    def pack(self, tensor: torch.Tensor) -> "_Saved | _SavedHere":
        """The object for autograd to hold in place of a saved tensor."""
        with torch._C.DisableTorchFunctionSubclass():  # a class of tensors might take this for a use of its own
            if not self._owner.takes(tensor):
                return _SavedHere(tensor)
            stored = self._owner.store(tensor)
            self._stored.append(weakref.ref(stored))
            return _Saved(self, stored, tensor)

    def reached(self) -> None:
        """Fetch all that was saved here, since a backward needs it now, and all of the forward before."""
        last_call, self._owner.reached = self._owner.reached(), weakref.ref(self)
        if last_call is self:
            return
        previous_call = self._previous_call()
        near = [*self.stored(), *(previous_call.stored() if previous_call is not None else ())]
        if last_call is not None:
            last_call.drop(but=set(near))  # of a graph that is retained; otherwise autograd has let go of them
        for stored in near:
            stored.fetch()


class _SavedHere:
    """A saved tensor, left in its place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output that is held as such holds its graph, and the graph would hold it.
        self._tensor = tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        _require_version(self._tensor, self._version, self._tensor.shape)
        return self._tensor


class _Saved:
    """A saved tensor, as a view of stored bytes."""

    def __init__(self, call: SavingCall, stored: _Stored, tensor: torch.Tensor) -> None:
        self._call, self._stored = call, stored
        self._offset, self._shape, self._stride = tensor.storage_offset(), tensor.shape, tensor.stride()
        # It shares the count of versions with the tensor, and no memory.
        self._counted = tensor.detach()
        self._counted.data = tensor.new_empty(0)
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        _require_version(self._counted, self._version, self._shape)
        self._call.reached()
        memory = self._stored.on_device().untyped_storage()
        return torch.empty_like(self._counted).set_(memory, self._offset, self._shape, self._stride)


def _require_version(tensor: torch.Tensor, saved: int, shape: torch.Size) -> None:
    """PyTorch checks this itself, but not for a tensor that went through hooks."""
    if tensor._version != saved:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(shape)}] is at version {tensor._version}; expected version {saved} instead. "
            "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )


class SavedTensors:
    """Keeps on a tier what forwards save.

    Args:
        windows: that it goes there through.
    """

    def __init__(self, windows: Windows) -> None:
        self.windows = windows
        self._device = torch.empty(0, device=windows.tier.device).device  # cuda:0, where cuda was given
        self.reached: Callable[[], SavingCall | None] = _weak(None)
        """The last call of a backward, if its graph is there."""
        self.ended: deque[tuple[Place, Event, Event, torch.Tensor | None]] = deque()
        """Places without a graph in need of them, with the last transfers begun with each."""
        self._newest: Callable[[], SavingCall | None] = _weak(None)
        self._stored: weakref.WeakValueDictionary[int, _Stored] = weakref.WeakValueDictionary()
        """By the identity of the bytes' source memory."""
        self._staying: frozenset[int] = frozenset()
        self.fetched_nbytes = self.stored_nbytes = 0
        """Bytes of all transfers so far."""
        self.placed_nbytes = self.most_placed_nbytes = 0
        """Bytes of places in use, now and when they were most."""

    def leave_alone(self, tensors: Iterable[torch.Tensor]) -> None:
        """Never offload the memory of these."""
        with torch._C.DisableTorchFunctionSubclass():
            strided = [tensor for tensor in tensors if tensor.layout == torch.strided]
            self._staying = frozenset(tensor.untyped_storage()._cdata for tensor in strided)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Run a unit's forward in here. Other hooks on saved tensors, such as those of a checkpoint around several
        units, take precedence; tensors that a backward computes again are used at once, and stay."""
        if torch._C._current_autograd_node() is not None or not _may_hook():
            yield
            return
        self.free_ended()
        newest = self._newest()
        if newest is not None:
            newest.drop()
        call = SavingCall(self, newest)
        self._newest = weakref.ref(call)
        with torch.autograd.graph.saved_tensors_hooks(call.pack, lambda saved: saved.unpack()):
            yield

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is plain numbers on the device, in a memory that is large and nobody's."""
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not is_plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            return False
        storage = tensor.untyped_storage()
        is_here = tensor.device == self._device
        return is_here and storage.nbytes() >= MIN_NBYTES and storage._cdata not in self._staying

    def store(self, tensor: torch.Tensor) -> _Stored:
        """The whole memory of a tensor, as it is now, stored; once, while no version of it is counted.

        Raises:
            OffloadError: the tier has no room, or does not take it.
        """
        storage = tensor.untyped_storage()
        stored = self._stored.get(storage._cdata)
        if stored is not None and stored.version == tensor._version:
            return stored
        self.free_ended()
        tier = self.windows.tier
        memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        place = tier.place(memory.nbytes)
        window = self.windows.take(place.nbytes)
        window.unused.wait()
        window.memory[: memory.nbytes].copy_(memory)
        storing = tier.store(window, place)
        self.windows.give_back(window, storing)
        self.stored_nbytes += place.nbytes
        self.placed_nbytes += place.nbytes
        self.most_placed_nbytes = max(self.most_placed_nbytes, self.placed_nbytes)
        stored = _Stored(self, StorageWeakRef(storage), tensor._version, place, storing, memory)
        self._stored[storage._cdata] = stored
        return stored

    def free_ended(self) -> None:
        """Give back the places of what no graph needs any more.

        Raises:
            OffloadError: it did not get there.
        """
        while self.ended:
            place, storing, arriving, _ = self.ended.popleft()
            arriving.wait()  # before its memory is given back, which is the device's to use again
            storing.settle()
            self.windows.tier.free(place)
            self.placed_nbytes -= place.nbytes

    def __del__(self) -> None:
        # The engine is gone, and the memory of what still arrives is the device's to use again.
        for _, _, arriving, _ in self.ended:
            with suppress(OffloadError):  # of what nobody needs any more
                arriving.wait()


def _may_hook() -> bool:
    """Whether no hooks but our own apply here, and hooks may be set at all (torch.func forbids it)."""
    autograd: Any = torch._C._autograd
    if not autograd._saved_tensors_hooks_is_enabled():
        return False
    hooks = autograd._top_saved_tensors_default_hooks(False)
    return hooks is None or isinstance(getattr(hooks[0], "__self__", None), SavingCall)


def _weak(call: SavingCall | None) -> Callable[[], SavingCall | None]:
    return (lambda: None) if call is None else weakref.ref(call)
