"""A model in buckets: what is held where, what trains, and how its weights come out."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from torch import nn

from zerotrain.comm.accounts.ledger import Ledger
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ranks.world import World
from zerotrain.comm.scratch import ScratchPools
from zerotrain.deferred.freed import give_back_freed
from zerotrain.deferred.init import InitialValues
from zerotrain.engine.agreement import require_same
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.buckets.places.homes import Homes
from zerotrain.engine.build import Builder, share_unmanaged
from zerotrain.engine.groups.optimizer_factory import OptimizerFactory
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.model.checks import require_leaves, require_plain, require_values
from zerotrain.engine.model.engine_call import makes_memory
from zerotrain.engine.model.newcomers import Newcomers
from zerotrain.engine.model.one_memory import require_own_memory
from zerotrain.engine.model.unit_forward import offload_saved
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.precision.kept_fp32 import cast_around_kept, dtypes_of
from zerotrain.engine.results import StageSwitch
from zerotrain.engine.schedule.fast_path import complete_before_encoders
from zerotrain.engine.schedule.hooks import connect, next_node, require_no_engine
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.state.full_weights import full_state_dict, weights_sha256
from zerotrain.engine.state.load import Target
from zerotrain.engine.state.together import agreed
from zerotrain.engine.state.transfer import Described, StateTransfer, described_state
from zerotrain.engine.usage import (
    Offloaded,
    memory_bytes,
    offloaded,
    planned_nbytes,
    sums_nbytes,
    switch_nbytes,
    volume_of,
)
from zerotrain.errors import EngineStateError
from zerotrain.sharding.units import model_parameters

T = TypeVar("T")


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are held as a plan says.

    Args:
        model: built alike on every rank; rank 0's weights and buffers are used. It is changed in place: its parameters
            become views of the engine's buckets, on `world.device`, in the compute precision.
        optimizer: makes an optimizer from a list of parameter groups: an element-wise one, or one that is declared to
            update whole tensors (see `zerotrain.engine.groups.optimizer_factory`).
        decay_all, param_groups: as for `build_engine`.
        initial: of a model that `deferred_init` has built; default: the values that the parameters have.

    Raises:
        ConfigError: the model or the optimizer cannot be trained so.
    """

    schedule: Schedule
    """Units and buckets, and where the model is among them. Another one after each change of what trains."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory,
        world: World,
        options: EngineOptions,
        decay_all: bool = True,
        param_groups: Sequence[dict[str, Any]] | None = None,
        initial: InitialValues | None = None,
    ) -> None:
        require_plain(model)
        require_values(model)
        require_no_engine(model)
        require_leaves(model, options.leaves_per_rank)
        require_own_memory(model)
        self.module = model
        self.world = world
        self.options = options
        self.plan, self.precision, self.max_grad_norm = options.plan, options.precision, options.given.max_grad_norm
        self.ledger = Ledger()
        self.collectives = Collectives(world, ledger=self.ledger, ordered=options.ordered, overlap=options.zero.overlap)
        require_same(self.collectives, options.settings())
        parameters = model_parameters(model)
        dtypes = dtypes_of(parameters, self.precision)
        self._groups = ParamGroups(
            parameters, optimizer, param_groups, decay_all=decay_all, device=world.device, warns=world.rank == 0
        )
        self._pools = ScratchPools(world.device, self.collectives.zeros)
        self._homes = Homes(options.offload, world, options.zero.prefetch)
        share_unmanaged(model, parameters, self.collectives)
        self._builder = Builder(
            model,
            parameters,
            dtypes,
            options=options,
            groups=self._groups,
            collectives=self.collectives,
            pools=self._pools,
            homes=self._homes,
        )
        self._newcomers = Newcomers(model, [each.parameter for each in parameters])
        if self._homes.saved is not None:
            restore = offload_saved(model, options.zero.unit_patterns, self._homes.saved, options.offload.activations)
            weakref.finalize(self, restore).atexit = False
        self._connect(self._builder.schedule(initial or InitialValues()))
        self._homes.measure()
        cast_around_kept(model, dtypes, self.precision)
        complete_before_encoders(model, self)

    def _connect(self, schedule: Schedule) -> None:
        """Let the model tell a schedule of buckets, which were just cut, where it is."""
        self.schedule = schedule
        if self._homes.saved is not None:
            self._homes.saved.leave_alone([*self.module.parameters(), *self.module.buffers()])
        self._disconnect = connect(self, schedule, self._newcomers.watch())
        self._first_node_after_update = next_node()

    def __reduce_ex__(self, _: Any) -> Any:
        raise EngineStateError(
            "an engine can be neither copied nor pickled, since it is a part of its process group: copy or pickle "
            "engine.module, or take what engine.full_state_dict() gives"
        )

    # ---- what trains

    @makes_memory
    def freeze(self, *named: str | nn.Parameter) -> None:
        """Let parameters train no more: only their weights in the compute precision are kept.

        Args:
            named: names, patterns such as "blocks.0.*", or parameters; the same on all ranks, between two steps.

        Raises:
            ConfigError: one of them is nothing the model has, or nothing would be left to train.
            EngineStateError: gradients of a step are waiting.
        """
        self._change("engine.freeze", lambda: self._groups.freeze(named))

    @makes_memory
    def unfreeze(self, *named: str | nn.Parameter) -> None:
        """Let frozen parameters train, in the group they have, as new to the optimizer. Otherwise as `freeze`."""
        self._change("engine.unfreeze", lambda: self._groups.unfreeze(named))

    @makes_memory
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Let the frozen parameters of `group`, as in `build_engine`, train in a group of their own. As `unfreeze`."""
        self._change("engine.add_param_group", lambda: self._groups.add(group))

    def _require_no_gradient(self, what: str) -> None:
        if not all(bucket.gradient.is_empty for bucket in self.schedule.trained):
            raise EngineStateError(f"{what} while a gradient waits; call engine.step() first")

    def _require_between_steps(self, what: str) -> None:
        if self.schedule.phase is not Phase.IDLE:
            raise EngineStateError(f"{what} in the midst of a {self.schedule.phase.value}; call it between two steps")
        self._require_no_gradient(what)

    def _between_steps(
        self, call: str, what: str, plan: Callable[[], tuple[T, Mapping[str, object]]], given: str = ""
    ) -> T:
        """Let a call that all ranks make between two steps go on on all of them, or on none; see `agreed`.

        Args:
            what: cannot be done, if it comes elsewhere.
        """
        under_way = self.schedule.phase in (Phase.BACKWARD, Phase.UPDATE)
        if under_way or any(bucket.gradient.is_reduced for bucket in self.schedule.trained):
            # All ranks are there, and would refuse it alike. One that calls it alone must wait for no other.
            self._require_between_steps(what)

        def planned() -> tuple[T, Mapping[str, object]]:
            self._require_between_steps(what)
            return plan()

        return agreed(self.collectives, call, planned, given)

    def _change(self, call: str, change: Callable[[], bool]) -> None:
        """Make a change of what trains and, if it changed anything, cut the buckets anew."""

        def plan() -> tuple[tuple[bool, Described], Mapping[str, object]]:
            is_change, facts = self._groups.change(change)
            return (is_change, described_state(self.schedule.buckets) if is_change else {}), facts

        with self._groups.undone_if_refused():
            is_change, kept = self._between_steps(call, "what trains cannot change", plan)
        if is_change:
            self._cut_anew(StateTransfer(self.schedule.buckets, kept, self.collectives))

    def _cut_anew(self, transfer: StateTransfer) -> None:
        self._disconnect()
        former = self.schedule.buckets
        for bucket in former:
            bucket.weights.let_go()
        self._pools.clear()
        schedule = self._builder.schedule(InitialValues(), transfer.fill)
        transfer.restore_state(schedule.trained)
        for bucket in former:
            bucket.leave()
        self._connect(schedule)

    def _move_to(self, options: EngineOptions) -> StageSwitch:
        """Let everything lie where other options have it, between two steps. Collective."""
        theory = switch_nbytes(self.schedule, self._groups.factory, self.world.shards.size, options.plan)
        before = self.ledger.outside_steps.sent_nbytes
        self._disconnect()
        self._pools.clear()
        give_back_freed()
        move = self._builder.under(options, self.schedule)
        del self.schedule
        schedule = move()
        self.options, self.plan = options, options.plan
        self._connect(schedule)
        return StageSwitch(options.zero.stage, self.ledger.outside_steps.sent_nbytes - before, theory)

    # ---- weights in

    @makes_memory
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replace the model's weights and buffers by those that rank 0 gives; other ranks may give {}. What the
        optimizer keeps stays. Collective, between steps; one bucket is whole meanwhile.

        Args:
            state: full tensors of any floating dtype by the names of the model's own `state_dict()`, such as
                `full_state_dict` gives; a tied parameter by any of its names.
            strict: False leaves what is missing as it is, and what is unknown out.

        Raises:
            ConfigError: names are missing or unknown, or shapes are others; nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """
        target = Target(self.module, self.schedule.buckets, self.collectives)
        given = self._between_steps(
            "engine.load_state_dict", "weights cannot be loaded", lambda: (target.look_at(state, strict=strict), {})
        )
        target.take(given)
        self.schedule.end_update()
        self._first_node_after_update = next_node()

    # ---- what is held, and what the theory says

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyperparameters; a schedule sets group["lr"] from group["initial_lr"]."""
        return self._groups.hyperparameters

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self.schedule.buckets)

    def group_sizes(self) -> list[tuple[int, int]]:
        """(parameters, their elements) that train in each of the `param_groups`."""
        sizes = [(0, 0) for _ in self.param_groups]
        for bucket in self.schedule.trained:
            for managed, slot in zip(bucket.spec.parameters, bucket.layout.slots, strict=True):
                num_parameters, numel = sizes[managed.group]
                sizes[managed.group] = (num_parameters + 1, numel + slot.numel)
        return sizes

    def planned_nbytes(self) -> dict[str, int]:
        """Bytes a rank is to hold at rest by ZeRO's formulas: {parameters, gradients, optimizer} on the device, and
        what of them is offloaded. Known before the
        first step, from a step of the optimizer on a sample, and to no byte where it keeps factors of a matrix."""
        return planned_nbytes(self.schedule, self._groups.factory, self.world.shards.size)

    def sums_nbytes(self, num_micro_batches: int) -> int:
        """Bytes that a rank holds beside those, while a step adds up micro-batches and virtual ranks.

        Of P elements, with L virtual ranks on each rank, log2(L) sums of P in fp32. With several micro-batches one more
        (of fp32 at stages 0 and 1 none, where it is the gradient itself), or with zero.accumulate='reduced' a shard of
        it (of fp32 none).

        Args:
            num_micro_batches: of a virtual rank.
        """
        return sums_nbytes(self.schedule, self.options, num_micro_batches)

    def memory_bytes(self) -> dict[str, Any]:
        """Bytes this rank holds now, by kind, and under "theory" what ZeRO's formulas give without padding.

        "offloaded" lies off the device, all others on it; "scratch" is what the buffers reused from step to step hold
        beside the model state.
        """
        return memory_bytes(self.schedule, self._groups.factory, self._pools, self._homes, self.world.shards.size)

    def offloaded(self, num_micro_batches: int) -> list[Offloaded]:
        """What this rank has off the device, by tier, and what it costs a step.

        Args:
            num_micro_batches: of a step.
        """
        return offloaded(self.schedule, self.options, self._homes, num_micro_batches)

    def theoretical_sent_nbytes(self, num_micro_batches: int) -> int:
        """Bytes this rank sends in a step by ZeRO's count, without padding and without the norm's few bytes; and
        those of tensors that are updated whole, on their way to their owners and back."""
        volume, reshards = volume_of(self.schedule, self.world.shards.size), self.options.zero.reshard_after_forward
        whole_tensors = sum(bucket.update.sent_nbytes for bucket in self.schedule.trained)
        num_reductions = num_micro_batches if self.options.reduces_each else 1
        return volume.sent_nbytes(self.plan, num_micro_batches, reshards, num_reductions) + whole_tensors

    # ---- the model

    def train(self) -> Self:
        """Put the model into training mode."""
        self.module.train()
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        self.module.eval()
        return self

    # ---- weights out

    @makes_memory
    def full_state_dict(self) -> dict[str, Any]:
        """What `model.state_dict()` gives in plain PyTorch, hooks and extra state included: full fp32 parameters on the
        CPU, on rank 0; {} elsewhere. Collective: all ranks call it.
        """
        agreed(self.collectives, "engine.full_state_dict", lambda: (None, {}))
        return full_state_dict(self.module, self.schedule.buckets, self.collectives)

    @makes_memory
    def weights_sha256(self) -> str:
        """SHA-256 over the full fp32 master weights in name order, the same on every rank. Collective."""
        agreed(self.collectives, "engine.weights_sha256", lambda: (None, {}))
        return weights_sha256(self.schedule.buckets, self.collectives)
