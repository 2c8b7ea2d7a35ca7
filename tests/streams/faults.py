"""Faults of order, each planted into one method of the engine's for as long as a training runs."""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.wires import Works
from zerotrain.device.kinds import Cuda
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import OffloadedHome
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.state.save import ChunkReader, Snapshot
from zerotrain.offload.saved import _Stored
from zerotrain.offload.tier import Crossing, Tier, _Pinned


@dataclass(frozen=True)
class Planted:
    """One text of one method, replaced."""

    owner: Any
    method: str
    old: str
    new: str
    training: str
    """By its name in `test_training.py`."""
    says: str
    """A part of what is found."""
    size: int = 2

    @contextmanager
    def planted(self) -> Iterator[None]:
        """In here the method has the fault."""
        original = inspect.getattr_static(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(original)).replace("super()", f"super({self.owner.__name__}, self)")
        assert source.count(self.old) == 1, f"{self.owner.__name__}.{self.method} holds {self.old!r} not once"
        made: dict[str, Any] = {}
        exec(source.replace(self.old, self.new), original.__globals__, made)
        with patch.object(self.owner, self.method, made[self.method]):
            yield


OF_GATHER, OF_REDUCTION = "self.kind == 'gather' or work.wait()", "self.kind == 'reduction' or work.wait()"
FAULTS = {
    # a wait left out
    "gather-not-waited-for": Planted(
        Works, "_wait", "work.wait()", OF_GATHER, "stage 3", "gathers does in all_gather is read by compute"
    ),
    "reduction-not-waited-for": Planted(
        Works, "_wait", "work.wait()", OF_REDUCTION, "stage 2", "NCCL's stream of reductions does in reduce_scatter is"
    ),
    "parts-of-the-sum-not-waited-for": Planted(
        Works, "_wait", "work.wait()", OF_REDUCTION, "ordered", "NCCL's stream of reductions does in all_to_all is read"
    ),
    "fetch-not-waited-for": Planted(
        OffloadedHome,
        "_bring",
        "self._arrived.wait()",
        "pass",
        "offload",
        "does in copy_ is written by compute in _fused",
    ),
    "gradient-not-waited-for-on-the-host": Planted(
        Crossing, "bring", "buffer.last_use.settle()", "pass", "update on the host", "does in copy_ is read by host"
    ),
    "saved-tensor-not-waited-for": Planted(
        _Stored, "on_device", "arriving.wait()", "pass", "activations", "does in copy_ is read by compute"
    ),
    "copy-on-write-left-out": Planted(
        BucketWeights,
        "about_to_change",
        "announce()",
        "pass",
        "save",
        "compute does in _fused_adamw_ is read by stream",
    ),
    # a buffer or a window given back early
    "gradient-given-back-at-issue": Planted(
        BucketGradient,
        "reduce",
        "self.life.become(GradientState.REDUCING)",
        "self._pool.give_back(self._unreduced); self._unreduced = None; self.life.become(GradientState.REDUCING)",
        "stage 2",
        "NCCL's stream of reductions does in reduce_scatter is written by compute in",
    ),
    "window-given-back-while-it-is-gathered-from": Planted(
        OffloadedHome,
        "close",
        "self._windows.give_back(window, transfer)",
        "self._windows.give_back(window, DONE)",
        "offload",
        "all_gather is written by stream",
    ),
    "copy-of-a-save-read-before-it-is-there": Planted(
        ChunkReader, "read", ".settle()", "", "save", "does in copy_ is read by host"
    ),
    "window-written-to-while-it-is-stored": Planted(
        OffloadedHome,
        "_bring",
        "self._window.unused.wait()",
        "pass",
        "offload of parameters alone",
        "does in copy_ is written by compute in copy_",
    ),
    "host-writes-while-it-is-fetched": Planted(
        OffloadedHome,
        "_settle",
        "self._arrived.settle()",
        "pass",
        "offload, looked at between steps",
        "is written by host",
        size=1,  # where no collective has the host wait
    ),
    "weight-rounded-into-memory-that-is-still-read": Planted(
        _Pinned,
        "like",
        "self.last_use.settle()",
        "pass",
        "update on the host, looked at between steps",
        "is written by host",
    ),
    # memory freed at issue
    "memory-freed-at-issue": Planted(
        Collectives,
        "gather_now",
        "gather.finish()",
        "return",
        "stage 2",
        "freed while NCCL's stream of gathers may use it",
    ),
    "saved-tensor-freed-while-it-arrives": Planted(
        _Stored,
        "__del__",
        "None if self.arriving is DONE else self.memory",
        "None",
        "activations that no backward needs",
        "memory of compute is freed while stream",
    ),
    "window-made-of-memory-in-use": Planted(
        Cuda,
        "bytes_for",
        "torch.cuda.current_stream(self.device).synchronize()",
        "pass",
        "offload",
        "what compute does in the memory was made is written by",
    ),
    # a copy begun before its source is written
    "stored-before-it-is-computed": Planted(
        Tier, "_store", "events=(self.read(),)", "events=()", "offload", "compute does in _fused_adamw_ is read by"
    ),
    "gradient-crosses-before-it-is-scaled": Planted(
        Crossing, "bring", "events=(self._device.event(),)", "events=()", "update on the host", "is read by stream"
    ),
    "fetched-before-it-is-stored": Planted(
        Tier, "_fetch", "events=(stored, unused)", "events=(unused,)", "activations", "does in copy_ is read by"
    ),
    "fetched-into-memory-in-use": Planted(
        Tier, "_fetch", "events=(stored, unused)", "events=(stored,)", "activations", "what compute does in"
    ),
    "save-reads-before-the-update-is-done": Planted(
        ChunkReader,
        "read",
        "events=[self._copied.get(entry, self._begun)]",
        "events=[]",
        "save",
        "what compute does in",
        size=1,  # where no collective has the host wait
    ),
    "copies-not-noted": Planted(
        Snapshot, "_copy", "self._reader.was_copied(entry)", "pass", "save", "what compute does in clone is read by"
    ),
}
