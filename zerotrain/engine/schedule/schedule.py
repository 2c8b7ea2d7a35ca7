"""Tracks the model's place in a step, and tells gathers and reductions."""

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from zerotrain.device.device import lies_on_host
from zerotrain.device.memory import set_heap
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket, join_updates, require_unchanged
from zerotrain.engine.buckets.gradient import Gradients, Segment
from zerotrain.engine.buckets.life import Backward, Phase, WeightState
from zerotrain.engine.model.live_parameter import ENGINE_IS_GONE, left_its_unit, settle
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.schedule.live_unit import BEHIND_ALL_NODES, LiveUnit, UnitCall
from zerotrain.engine.schedule.reductions import Reductions
from zerotrain.errors import EngineStateError


class Schedule:
    """Hears from the hooks where forward and backward are, and tells `gathers` and `reductions`.

    Its methods raise EngineStateError if sharded parameters are needed while the engine is idle, where a gather would
    need all ranks to ask for it, or if what trains was changed behind the engine's back.

    Args:
        units, buckets: in forward order.
    """

    def __init__(self, units: Sequence[LiveUnit], buckets: Sequence[Bucket], options: EngineOptions) -> None:
        self.units = units
        self.buckets = buckets
        self.plan = options.plan
        self.phase = Phase.IDLE
        self.trained = [bucket for bucket in buckets if isinstance(bucket, TrainedBucket)]
        """The buckets with a gradient and an update, in list order."""
        self.updates = join_updates(self.trained)
        """Those of all trained buckets, in list order."""
        self.gathers = Gathers(units, buckets, options)
        # Buckets of the resident root are complete when all units are passed.
        blocks, freed = [unit for unit in units if unit.modules], self.trained if self.gathers.frees_after_use else []
        completing: dict[Bucket, list[LiveUnit]] = {
            bucket: [unit for unit in blocks if bucket in unit.buckets] or blocks for bucket in freed
        }
        self.reductions = Reductions(self.trained, completing)
        if lies_on_host(buckets[0].weights.shard):
            set_heap(returns=options.offload.uses_disk)
        self._owners = [BucketOwner(bucket, self) for bucket in buckets]
        self.calls: list[tuple[torch.nn.Module, int, AbstractContextManager[object]]] = []
        """Modules of units with their forward under way, outermost first, each with its first node and its range in a
        trace. A checkpoint ends a recomputation by an exception: until the next backward such a module stays here."""
        self._backward = 0
        """Number of the backward under way, or of the last."""
        self._frees_graph = True
        """Whether the backward under way frees the graph it comes through."""
        self._root_task, self._first_new_node = -1, 0
        """Autograd's number of the backward under way, and the first node that is made within it."""
        self._makes_graphs = False
        """Whether a backward may follow the forward under way."""

    # ---- forward

    def begin_forward(self) -> None:
        """The model is called: complete what it needs from the start."""
        self._makes_graphs = torch.is_grad_enabled()
        self.before_forward(self.units[0])

    def before_forward(self, unit: LiveUnit, module: torch.nn.Module | None = None) -> None:
        """A module of a unit is called, by the model or by a recomputation in the backward."""
        if self.phase is Phase.IDLE:
            self._refuse_idle(unit.name, "was called")
        if self.phase is Phase.BACKWARD:
            node = torch._C._current_autograd_node()
            self._come_to(unit, BEHIND_ALL_NODES if node is None else node._sequence_nr())
        self.gathers.before_forward(unit, self.phase, module)

    def after_forward(self, unit: LiveUnit, module: torch.nn.Module) -> None:
        """A module of a unit has returned."""
        if self.phase is Phase.FORWARD and self._makes_graphs and not torch.is_grad_enabled():
            unit.num_silent_calls += 1
        self.gathers.after_forward(unit, self.phase, module)

    def keep(self, unit: LiveUnit) -> None:
        """The unit's backward cannot be announced in time: from now on its parameters stay from forward to backward."""
        if self.phase is Phase.FORWARD:
            for bucket in unit.buckets:
                bucket.stays_full = True

    def complete_ahead(self, module: torch.nn.Module) -> None:
        """The parameters of a module are about to be asked for, and then the module is called."""
        if self.plan.shards_parameters and self.phase is Phase.IDLE:
            return  # the call itself will say what is wrong
        inside = set(module.modules())
        for unit in self.units:
            if inside.intersection(unit.modules):
                self.gathers.complete(unit.buckets, unit.ahead_in_forward)

    def touch(self, bucket: Bucket) -> None:
        """A parameter was read without a hook's announcement: complete its bucket."""
        self._refuse_idle(bucket.spec.parameters[0].names[0], "or a parameter beside it was read")
        # No hook will announce the backward of this read either, so the bucket must be there when that comes.
        bucket.stays_full = bucket.is_read_unannounced = True
        self.gathers.complete([bucket])

    # ---- backward

    def require_unchanged(self) -> None:
        """Before a backward: nobody has told parameters to train, or to train no more, behind the engine's back."""
        with torch._C.DisableTorchFunctionSubclass():  # which would be a call into Python for each
            for bucket in self.buckets:
                require_unchanged(bucket.spec, trains=bucket.spec.trainable)

    def begin_backward(self, backward: Backward) -> None:
        """A backward starts."""
        self.calls.clear()
        self._frees_graph = backward.frees_graph
        self._first_new_node = 0
        self.gathers.begin_backward()
        self._backward = self.reductions.begin(backward)

    def before_backward(self, unit: LiveUnit, call: UnitCall, position: int, _: torch.Tensor) -> None:
        """A backward has come to node `position`, the first of what a call of the unit has made."""
        # A torch.autograd.grad within the backward, which comes there itself later. (Seen: a forward that is computed
        # again takes the gradient by its input, the output of the unit before.) The backward that a reentrant
        # checkpoint makes is none: it runs over nodes made meanwhile.
        is_aside = position < self._first_new_node and torch._C._current_graph_task_id() != self._root_task
        if self.phase is not Phase.BACKWARD or is_aside:
            self._refuse_idle(unit.name, "was reached by a backward")
            # Or one within a forward. A backward through its result reads the weights without a hook, and may come when
            # the output is gone, and with it the hooks that hold the call. (Seen: forces of two forwards.)
            self.keep(unit)
            unit.add_call(call, is_held=False)
            self.gathers.complete(unit.buckets)
            return
        call.reached_in = unit.reached_in = self._backward
        call.is_used_up = self._frees_graph
        for skipped, later_units in self.gathers.skipped_before(unit, self._backward):
            self._come_to(skipped, position, within=later_units)
            self.gathers.gather_ahead(skipped)
        self._come_to(unit, position)
        self.gathers.before_backward(unit)
        self.reductions.reached(unit, position)

    def _come_to(self, unit: LiveUnit, position: int, *, within: set[LiveUnit] | None = None) -> None:
        """A backward at node `position` is about to gather for a unit: close what it has passed; of that, free what is
        gathered ahead. A bucket with a complete gradient is free already, and would be gathered on that rank alone.
        (Seen: blocks called in another order than their list, and a linear of one unused on rank 0. The ranks hung.)"""
        self.reductions.close_passed(position, within=within)
        for bucket in unit.ahead_in_backward:
            if bucket.weights.is_full and self.reductions.is_passed(bucket, position):
                self.gathers.gradient_done(bucket)

    def root_reached(self, _: torch.Tensor) -> None:
        """A backward is at its loss."""
        self._first_new_node, self._root_task = torch.autograd._get_sequence_nr(), torch._C._current_graph_task_id()

    def segment_arrived(self, bucket: TrainedBucket, segment: Segment, gradients: Gradients) -> None:
        """All gradients of a segment are there."""
        if self.phase is not Phase.BACKWARD:
            for trained in self.trained:
                trained.gradient.clear_unmoved()
            raise EngineStateError(
                "gradients arrived outside engine.backward(); call engine.backward(loss), not loss.backward(); for a "
                "loss through the models of two engines build one engine of both, as an nn.ModuleList of them"
            )
        if bucket.weights.life.state is not WeightState.FULL:
            raise EngineStateError(left_its_unit(bucket.spec.name))
        if self.reductions.arrived(bucket, segment, gradients):
            going = bucket if self.reductions.may_go(bucket) else None
            computes_again = torch.autograd._get_sequence_nr() != self._first_new_node  # as a checkpoint does
            if going is not None and not (computes_again and self.reductions.may_come_again(bucket)):
                # Freed at another place, it would be gathered again on this rank alone when its unit is reached: seen
                # where a parameter was read from outside its unit. If a unit was called twice, a reentrant checkpoint
                # of a part may have left gradients that are to come again, and the weights are read then (seen: a
                # segmentation fault). The next unit frees them, as on a rank where a gradient does not come.
                self.gathers.gradient_done(bucket)
            self.reductions.reduce_complete(going)

    def end_backward(self) -> None:
        """The backward is over: close what unused parameters left open, and bring weights back to rest."""
        self.reductions.end()
        self.gathers.end_backward()

    # ---- the step

    def end_update(self) -> None:
        """The weights were updated."""
        for unit in self.units:
            unit.forget_calls()
        self.gathers.rest()

    def drop_gradients(self) -> None:
        """Forget the gradients since the last step, and come to rest. Forwards since then may still have a backward."""
        self.reductions.drop()
        self.gathers.free()

    def drain(self) -> None:
        """Wait for all collectives under way or prepared."""
        self.drop_gradients()
        for bucket in self.buckets:
            bucket.weights.drain()

    def _refuse_idle(self, name: str, what: str) -> None:
        if self.plan.shards_parameters and self.phase is Phase.IDLE:
            raise EngineStateError(
                f"{name} {what} between engine calls, where parameters are sharded over the ranks. Call the model as "
                "engine(...); call engine.backward(loss), not loss.backward(); on all ranks call parts of the model, "
                "or torch.autograd.grad, inside `with engine.forward_scope()`; read weights with "
                "engine.full_state_dict(), and write them with engine.load_state_dict(...), or in place inside `with "
                "torch.no_grad(), engine.forward_scope()`"
            )


class BucketOwner:
    """Answers for the parameters of a bucket. It does not keep their schedule, and with it the engine, alive."""

    def __init__(self, bucket: Bucket, schedule: Schedule) -> None:
        self._bucket, self._schedule = bucket, weakref.ref(schedule)
        settle(bucket.spec.tensors, self)

    def complete(self) -> None:
        """See `Owner`, as for all."""
        schedule = self._schedule()
        if schedule is None:
            raise EngineStateError(ENGINE_IS_GONE)
        schedule.touch(self._bucket)

    def data_was_read(self) -> None:
        self._bucket.weights.data_was_read()

    def holds_gradient(self) -> bool:
        return isinstance(self._bucket, TrainedBucket) and not self._bucket.gradient.is_empty

    def name_of(self, parameter: torch.nn.Parameter) -> str:
        return next(managed.names[0] for managed in self._bucket.spec.parameters if managed.parameter is parameter)
