"""Steps that a GPU is told as a whole: recorded once as graphs of the device, and replayed.

A step has three of them: forward, backward, reductions and digit sums; the update and the weights in 16 bits, told
before the norm is read; and the gathers of stages 1 and 2, told behind it. The norm over ranks is exchanged between the
first and the second, as in any step: ranks that differ must learn of it. Behind each replay the host brings its own
state about again: the life of each bucket, counts, the order of collectives.

[Note: one key on all ranks]
A graph computes what was recorded. Another shape, hyperparameter or attribute of the model needs another graph, and so
each step has a key. NCCL asks for more: a collective is in a graph on all ranks, or on none. So ranks tell in the
exchange of a step what they would record in the next, as a hash, and record once all have told the same. From then on
all of them replay. A rank whose step has another key replays too, with inputs from before, and tells so in the exchange
(`CANNOT_REPLAY`): no rank updates then, and all compute that step anew without graphs. One rank alone need not: it
computes such a step without graphs at once.
"""

import ctypes
import hashlib
import os
import pickle
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.hooks import RemovableHandle

from zerotrain.comm.ledger import Recorded
from zerotrain.comm.world import World
from zerotrain.device.device import DONE, Graph, lies_on_host
from zerotrain.device.kinds import device_of
from zerotrain.engine.agreement import CANNOT_REPLAY
from zerotrain.engine.buckets.bucket import JointUpdate
from zerotrain.engine.groups.hyperparameters import PLAIN_TYPES, plain_values
from zerotrain.engine.optimizer_step import UpdateAhead, can_go_ahead
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.results import StepResult
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.engine.state.together import shared_error
from zerotrain.errors import EngineStateError, argument
from zerotrain.settings import AUTO

Key = dict[str, Any]
"""The parts that make a step another, by their names for the user. One graph computes all steps with equal keys."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NUM_WISHES = 2**20
MAX_ANEW = 2
"""So many steps in a row, computed anew on all ranks, end a graph."""
MAX_RECORDINGS = 4
"""More for the same buckets, and steps are of too many kinds."""


def why_never(options: EngineOptions, world: World) -> str:
    """Why no step of an engine can be a graph; nothing where some may."""
    device = device_of(world.device)
    if device.graph(device.stream()) is None:
        return "graphs need a GPU"
    if options.precision.name == "fp16":
        return f"with {argument('precision', 'fp16')} the host changes the scale of the loss"
    if set(options.offload.tiers) != {"device"}:
        return "the host moves what is offloaded"
    return ""


BeforeEach = Callable[[int, int], object]
"""Called with the numbers of a virtual rank, and of a micro-batch in it."""
AfterEach = Callable[[int, int, torch.Tensor, Any], object]
"""Called with the same numbers, the loss of the micro-batch, and the model's outputs beside it."""


def no_seed(virtual_rank: int, micro_batch: int) -> None:
    """Nothing is done before a forward."""


no_seed.only_seeds = True  # type: ignore[attr-defined]


class Calls(NamedTuple):
    """The calls of a user around each forward of a step: see `ZeroEngine.train_step`."""

    before_each: BeforeEach = no_seed
    after_each: AfterEach | None = None
    with_outputs: bool = False


def graphs_of(held: ShardedModel) -> "tuple[StepGraphs | None, list[str]]":
    """The graphs of an engine's steps, if there may be any; and the list of reasons why there are none."""
    if held.options.config.graphs != AUTO or not device_of(held.world.device).holds_values:
        return None, []
    if reason := why_never(held.options, held.world):
        tell(reason, held.world)
        return None, [reason]
    # Buffers that NCCL registers for a graph hang with expandable memory (pytorch#158029).
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    graphs = StepGraphs(held)
    return graphs, graphs.reasons


def tell(reason: str, world: World) -> None:
    """Say why steps are computed without graphs, on rank 0."""
    if world.rank == 0:
        text = f"{argument('graphs', AUTO)}: steps are computed without graphs: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


class AnewError(Exception):
    """A rank has another step than its graph: all compute theirs anew. It does not leave the engine."""


class Seeding:
    """Calls a user's `before_each`, and sees whether the model draws random numbers between two calls: on the device,
    where a graph draws anew in each replay, or on the host, where it would draw once for ever."""

    def __init__(self, before_each: BeforeEach, generator: torch.Generator) -> None:
        self._before_each, self._generator = before_each, generator
        self._state: tuple[object, object] | None = None
        self.is_seeded_between = before_each is not no_seed
        self.num_calls, self.draws, self.draws_on_host = 0, False, False

    def __call__(self, virtual_rank: int, micro_batch: int) -> None:
        self.look()
        self._before_each(virtual_rank, micro_batch)
        self._state, self.num_calls = self._states(), self.num_calls + 1

    def look(self) -> None:
        """A micro-batch is over, if one has begun."""
        if self._state is not None:
            state = self._states()
            self.draws |= state[0] != self._state[0]
            self.draws_on_host |= state[1] != self._state[1]

    def _states(self) -> tuple[object, object]:
        numpy, host = sys.modules.get("numpy"), torch.default_generator
        of_numpy = None if numpy is None else pickle.dumps(numpy.random.get_state())
        of_torch = None if self._generator is host else _bytes_of(host)
        return _bytes_of(self._generator), (random.getstate(), of_numpy, of_torch)


def _bytes_of(generator: torch.Generator) -> bytes:
    state = generator.get_state()  # in the host's memory
    return ctypes.string_at(state.data_ptr(), state.nbytes)


class StepGraphs:
    """Records the steps of an engine and replays them, or lets one be computed without. It keeps nothing of the engine
    alive; each call gets that.

    Args:
        held: the model of the engine.
    """

    key: Key | None = None
    """The key of the graphs, also before they are recorded; None: the ranks have not agreed on one."""
    is_replaying = False
    """Whether the step under way is a replay."""
    num_replayed = 0
    """Steps so far."""
    _goes_ahead = False
    """Whether the optimizer's update can be told before the norm is read."""
    _candidate: Key | None = None
    """The key of the last step, if it was computed without graphs and updated the weights."""
    _num_anew = _num_changed = _num_recordings = 0
    """Steps in a row that were computed anew, or that had another key than the one before; recordings."""

    def __init__(self, held: ShardedModel) -> None:
        self._world, self._groups = held.world, held.groups
        self.is_alone = held.world.size == 1
        self._journal = held.collectives.journal
        self._device = device_of(held.world.device)
        self._stream = self._device.stream()
        self._graphs: dict[str, tuple[Graph, Recorded]] = {}
        self._heard: Sequence[int] = ()
        """The wishes of all ranks in the last step."""
        self.reasons: list[str] = []
        """Why steps were computed without graphs, each once."""
        self.forget()
        method = weakref.WeakMethod(self.forget)
        held.world.closing.append(lambda: forget() if (forget := method()) is not None else None)

    def forget(self) -> None:
        """Drop the graphs and their memory: other things are computed now, or they lie elsewhere."""
        self._drop()
        self._num_recordings, self._is_off = 0, False
        self._modules: list[torch.nn.Module] = []
        self._newest_hook = -1

    def _drop(self) -> None:
        self._graphs.clear()
        self.key = self._candidate = None
        self._num_anew = 0
        self._values: list[Any] = []
        self._inputs: list[torch.Tensor] = []
        """The values in the micro-batches of a replay, and the tensors among them."""
        self._memory: list[torch.Tensor] = []
        """Lent in a replay, and so not to be freed."""
        self._buffers: list[torch.Tensor] = []
        """Those that a step writes to."""
        self._after: dict[str, Any] = {}
        """Results that the step's graph leaves in its memory, and on the host."""

    def _tell_once(self, reason: str) -> None:
        if reason not in self.reasons:
            self.reasons.append(reason)
            tell(reason, self._world)

    def _tell_often(self, reason: str) -> None:
        """Say what has happened in so many steps in a row that no graph will come of them."""
        self._num_changed += 1
        if self._num_changed > MAX_RECORDINGS:
            self._tell_once(reason)

    # ---- a step

    def train_step(self, steps: Any, leaves: list[Any], calls: Calls) -> tuple[torch.Tensor, StepResult]:
        """One of a `Steps`, on the graphs' stream: what was told before is done before, and what is told later finds it
        done.

        Args:
            leaves: (micro-batch, weight) of each, by virtual rank.
        """
        self._stream.wait(self._device.event())
        done = DONE
        try:
            with self._stream.current():
                try:
                    key, tensors = self._key_of(steps.held, leaves, calls)
                    if self.key is not None and (key == self.key or not self.is_alone):
                        result = self._replayed(steps, leaves, calls, tensors if key == self.key else None)
                        if result is not None:
                            return result
                    self.is_replaying = False
                    return self._without(steps, leaves, calls, key)
                finally:
                    steps.stamps.wish, self.is_replaying = 0, False
                    done = self._device.event()
        finally:
            done.wait()

    def _without(self, steps: Any, leaves: list[Any], calls: Calls, key: Key | None) -> tuple[torch.Tensor, StepResult]:
        """A step without graphs. If it has the key of the last, the next may be recorded: if so all ranks say."""
        seeding, wish = Seeding(calls.before_each, self._device.generator), 0
        if key is not None and key == self._candidate and key != self.key and not self._is_off:
            wish = self._hash(key)
        elif key is not None and self._candidate is not None:
            changed = [part for part in key if key[part] != self._candidate[part]]
            self._tell_often(f"{' and '.join(changed)} change from step to step")
        buffers = list(steps.held.module.buffers()) if wish else []
        versions = [buffer._version for buffer in buffers]
        with self._device.noting_waits() if wish else nullcontext(list[str]()) as waits:
            loss = steps.run_leaves(leaves, calls._replace(before_each=seeding))
        seeding.look()
        if waits:
            self._tell_once(f"the model lets the host wait for the device {waits[0]}, as .item() does")
            wish = 0
        if seeding.draws and seeding.num_calls > 1 and seeding.is_seeded_between:
            self._tell_once("the model draws random numbers, seeded for each of several micro-batches")
            wish = 0
        if seeding.draws_on_host:
            self._tell_once("the model draws random numbers on the host")
            wish = 0
        steps.stamps.wish = wish
        result = steps.finish_step(loss)
        self._candidate = None if result.skipped else key
        if wish and any(other != wish for other in self._heard):
            self._tell_often("the ranks have steps of different shapes")
        elif wish and not result.skipped:
            self._drop()
            self._num_recordings += 1
            if self._num_recordings > MAX_RECORDINGS:
                self._is_off = True
                self._tell_once("steps are of too many kinds")
                return loss, result
            self.key = self._candidate = key
            self._values = [
                value.clone() if isinstance(value, torch.Tensor) else value for value in tree_leaves(leaves)
            ]
            self._inputs = [value for value in self._values if isinstance(value, torch.Tensor)]
            # Torch's batch norm, whose statistics are vectors, counts no version.
            changed_buffers = zip(buffers, versions, strict=True)
            self._buffers = [
                buffer for buffer, former in changed_buffers if buffer.ndim < 2 or buffer._version != former
            ]
        return loss, result

    def _replayed(
        self, steps: Any, leaves: list[Any], calls: Calls, tensors: list[torch.Tensor] | None
    ) -> tuple[torch.Tensor, StepResult] | None:
        """A step as graphs, which are recorded if there are none; None: it is to be computed without.

        Args:
            tensors: in the micro-batches; None: the graphs are not of this step.
        """
        held, schedule, stamps, after = steps.held, steps.held.schedule, steps.stamps, self._after
        assert self.key is not None
        layout = self.key["the shapes of micro-batches"][0]
        steps.require_ready()
        stamps.wish = CANNOT_REPLAY if tensors is None else self._hash(self.key)
        before = [buffer.clone() for buffer in self._buffers] if not self.is_alone else []
        drawn = self._device.generator.get_state() if not self.is_alone else None
        if tensors is not None:
            for static, tensor in zip(self._inputs, tensors, strict=True):
                static.copy_(tensor)
            for number, weighted in zip(steps.virtual_ranks, leaves, strict=True):
                for index in range(len(weighted)):
                    calls.before_each(number, index)
        schedule.gathers.settle()

        def compute() -> None:
            recorded = tree_unflatten(self._values, layout)
            after["loss"] = steps.run_leaves(recorded, Calls())
            schedule.reductions.finish()
            for bucket in schedule.trained:
                bucket.gradient.reduction.reduced()
            schedule.gathers.rest()
            after["sums"] = schedule.reductions.squares.digit_sums()

        try:
            is_new = self.tell("step", compute)
        except Exception as error:
            self._give_up(error)
            return None
        if is_new:
            after |= {"losses": list(steps.losses), "num_backwards": stamps.num_backwards}
            self._memory = held.pools.memory
        held.ledger.in_step = True
        steps.losses[:], stamps.num_backwards = after["losses"], after["num_backwards"]
        if not is_new:
            for bucket in schedule.trained:
                bucket.gradient.follow_graph()
        schedule.reductions.squares.follow_graph(after["sums"])
        loss, self.is_replaying = after["loss"].clone(), True
        try:
            result = steps.finish_step(loss)
        except AnewError:
            self._anew(before, drawn)
            return None
        self.num_replayed += 1
        self._num_anew, self._num_changed, self._candidate = 0, 0, self.key
        return loss, result

    def _anew(self, before: list[torch.Tensor], drawn: torch.Tensor | None) -> None:
        """A replayed step is to be computed without graphs, from where it began."""
        self._tell_once("the micro-batches of a rank have changed their shapes")
        self.is_replaying = False
        for buffer, former in zip(self._buffers, before, strict=True):
            buffer.copy_(former)
        if drawn is not None:
            self._device.generator.set_state(drawn)
        self._num_anew += 1
        if self._num_anew >= MAX_ANEW:
            candidate = self._candidate
            self._drop()
            self._candidate = candidate

    def _give_up(self, error: Exception) -> None:
        """A step could not be recorded.

        Raises:
            EngineStateError: other ranks replay what this one has not.
        """
        self._drop()
        self._is_off = True
        if not self.is_alone:
            raise EngineStateError(
                f"a step could not be recorded as a graph of the device ({error}); build the engine with "
                f"{argument('graphs', 'off')}"
            ) from error
        self._tell_once(f"it could not be recorded ({shared_error(error).text})")

    def tell(self, name: str, compute: Callable[[], object]) -> bool:
        """Replay a graph, recorded now if it is not there. Returns whether it was: then `compute` has left all on the
        host as it is to be."""
        is_new = name not in self._graphs
        if is_new:
            first = next(iter(self._graphs.values()), (None, None))[0]
            graph = self._device.graph(self._stream, first)
            assert graph is not None
            self._groups.is_recorded = True
            try:
                with self._journal.recording() as recorded, graph.recording():
                    compute()
            finally:
                self._groups.is_recorded = False
            self._graphs[name] = graph, recorded
        graph, recorded = self._graphs[name]
        with self._world.watching(f"graph of the {name}"):
            graph.replay()
        self._journal.repeat(recorded)
        return is_new

    # ---- of the optimizer's step

    def update(self, updates: Sequence[JointUpdate], factor: torch.Tensor | None, norm: torch.Tensor) -> UpdateAhead:
        """As the constructor of `UpdateAhead`, in a step that is replayed."""
        return ReplayedUpdate(self, updates, factor, norm)

    def begin_update(self) -> None:
        """A step is about to be made. Also a step of single calls has the rates that graphs have."""
        if self._goes_ahead:
            self._groups.bring_rates(self._world.device)

    def constants(self, factor: torch.Tensor | None, norm: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The same two in memory that stays."""
        for name, value in (("factor", factor), ("norm", norm)):
            if value is not None:
                self._after.setdefault(name, torch.empty_like(value)).copy_(value)
        return self._after.get("factor"), self._after["norm"]

    def hear(self, wishes: Sequence[int]) -> None:
        """Take the word of each rank on its graph in this step. Raises an error of its own if all compute it anew."""
        self._heard = wishes
        if CANNOT_REPLAY in wishes:
            raise AnewError

    # ---- the key

    def _key_of(self, held: ShardedModel, leaves: list[Any], calls: Calls) -> tuple[Key | None, list[torch.Tensor]]:
        """The key of a step, and the tensors in its micro-batches; None: it cannot be a graph, as is told."""
        values, layout = tree_flatten(leaves)
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        groups = []
        for group in self._groups.hyperparameters:
            groups.append({name: group[name] for name in group if name not in ("lr", "initial_lr")})
        hyperparameters, unread = plain_values(groups)
        reason = self._reason(held, calls) or _reason_in(values)
        if unread:
            reason = reason or "a hyperparameter beside the rate is a tensor of the device"
        if reason:
            self._tell_once(reason)
            return None, tensors
        if not self._modules:
            self._modules = list(held.module.modules())
        attributes, buffers = list[Any](), list[int]()
        for module in self._modules:
            attributes += [value for value in vars(module).values() if type(value) in PLAIN_TYPES]
            buffers += [value.data_ptr() for value in module._buffers.values() if value is not None]
        shapes = [
            (value.shape, value.dtype, value.stride()) if isinstance(value, torch.Tensor) else value for value in values
        ]
        return {
            "the shapes of micro-batches": (layout, shapes),
            "hyperparameters": hyperparameters,
            "settings": (held.options.plan, self._device.is_autocast),
            "attributes of the model": attributes,
            "buffers of the model": buffers,
        }, tensors

    def _reason(self, held: ShardedModel, calls: Calls) -> str:
        """Why a step of such calls cannot be a graph; nothing where it may be one."""
        if calls.after_each is not None or calls.with_outputs:
            return "train_step(after_each=...) looks at each forward"
        if not getattr(getattr(calls.before_each, "func", calls.before_each), "only_seeds", False):
            return "train_step(before_each=...) is a function that does not say `only_seeds = True`"
        if held.collectives.across.size > 1:
            return f"with {argument('zero.shard_size', held.options.zero.shard_size)} collectives go along two axes"
        if held.options.zero.compiled_update:
            return f"{argument('zero.compiled_update', True)} compiles the update, which is not recorded"
        if held.average is not None:
            return "an average of the weights is kept"
        if held.recomputes:
            return f"with {argument('activation_checkpointing', True)} the host keeps the state of random numbers"
        if self.key is None:
            self._goes_ahead = all(can_go_ahead(bucket.update) for bucket in held.schedule.trained)
        if not self._goes_ahead:
            return "the optimizer is none of torch's own with fused=True"
        if RemovableHandle.next_id != self._newest_hook:  # one was made since
            for name, module in held.module.named_modules():
                hooks = [getattr(hook, "func", hook) for kind in _HOOKS for hook in getattr(module, kind).values()]
                if any(not getattr(hook, "__module__", "").startswith("zerotrain.engine.") for hook in hooks):
                    return f"{name or 'the model'} has a hook of yours, which the host calls"
            self._newest_hook = RemovableHandle.next_id
        return ""

    @staticmethod
    def _hash(key: Key) -> int:
        """What ranks compare: a whole number above `CANNOT_REPLAY`, below 2**20. Attributes may be a rank's own."""
        shared = repr([key["the shapes of micro-batches"], key["hyperparameters"], key["settings"]])
        digest = int.from_bytes(hashlib.sha256(shared.encode()).digest()[:8])
        return CANNOT_REPLAY + 1 + digest % (_NUM_WISHES - CANNOT_REPLAY - 1)


def _reason_in(values: Sequence[Any]) -> str:
    """Why micro-batches of such values cannot be a graph's; nothing where they may be."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if lies_on_host(value):
                return "a micro-batch lies in the host's memory; move it to the GPU before train_step"
            if value.requires_grad:
                return "a micro-batch requires a gradient"
        elif type(value) not in PLAIN_TYPES:
            return f"a micro-batch holds a {type(value).__name__}"
    return ""


class ReplayedUpdate(UpdateAhead):
    """The same as a graph, and the gathers behind it as another."""

    def __init__(
        self, graphs: StepGraphs, updates: Sequence[JointUpdate], factor: torch.Tensor | None, norm: torch.Tensor
    ) -> None:
        self._graphs, self._began = graphs, []
        self._trained = [bucket for joint in updates for bucket in joint.buckets]
        for bucket in self._trained:
            bucket.weights.about_to_change()
            if bucket.weights.writes.are_new:
                bucket.update.current_weight()  # which takes them
        static_factor, static_norm = graphs.constants(factor, norm)
        graphs.tell("update", lambda: UpdateAhead(updates, static_factor, static_norm))

    def end(self, gathers: Gathers) -> None:
        if not gathers.gathers_updated or self._graphs.is_alone:
            super().end(gathers)
            return

        def gather() -> None:
            super(ReplayedUpdate, self).end(gathers)
            for bucket in self._trained:
                bucket.weights.finish_gather()

        if not self._graphs.tell("gathers", gather):
            for bucket in self._trained:
                bucket.weights.writes.count_update()
                bucket.gradient.drop()
