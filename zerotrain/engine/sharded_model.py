"""A model in buckets: what is held where, what trains, and how that changes between two steps."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPools
from zerotrain.device.kinds import device_of
from zerotrain.device.memory import give_back_freed, set_heap
from zerotrain.engine.agreement import require_same
from zerotrain.engine.buckets.home import Homes
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.build import Builder, share_unmanaged
from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE, OptimizerFactory, sampled_nbytes
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.model.checks import Newcomers, require_leaves, require_own_memory, require_plain, require_values
from zerotrain.engine.model.deferred import InitialValues
from zerotrain.engine.model.forward import makes_memory, offload_saved, round_at_entry
from zerotrain.engine.model.live_parameter import LiveParameter, UnreadyParameter, settle
from zerotrain.engine.model.precision import cast_around_kept, dtypes_of
from zerotrain.engine.optimizer_step import written_to
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.results import StageSwitch
from zerotrain.engine.schedule.hooks import complete_before_encoders, connect, next_node, require_no_engine
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.state.fill import Source
from zerotrain.engine.state.from_buckets import Described, OtherBuckets, described_state
from zerotrain.engine.state.named import Holdings
from zerotrain.engine.state.save import SaveUnderWay
from zerotrain.engine.state.together import agreed, shared_error
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.sharding.plan import Plan, Volume
from zerotrain.sharding.units import WalkedModel, cut_units, walk

# How a moving average of weights follows them: by which share, at which steps.


@dataclass(kw_only=True)
class Average:
    """The average of an engine, but for its numbers, which lie in the buckets.

    Raises:
        ConfigError: a value that it cannot have.
    """

    decay: float
    every: int
    """Steps from one update to the next."""
    warmup: bool
    """Lets the decay grow to its value, so that the first weights are forgotten sooner."""
    num_updates: int = 0
    """So far; 0: it has no numbers yet, and is the weights."""
    is_in_use: bool = False
    """Whether weights and average have changed places."""

    def __post_init__(self) -> None:
        if problems := average_problems(decay=self.decay, every=self.every, warmup=self.warmup):
            raise ConfigError(*(f"engine.keep_average: {problem}" for problem in problems))
        self.decay, self.every = float(self.decay), int(self.every)  # of numpy's numbers too

    def share(self, step: int) -> float | None:
        """The share of what lies between weights and average by which step `step`, from 1, brings it nearer; None: the
        average is not due.

        With a warm-up the decay after t updates is min(decay, (1 + t) / (10 + t)), as in TensorFlow's
        ExponentialMovingAverage and in diffusers' EMAModel.
        """
        if step % self.every:
            return None
        grown = (1 + self.num_updates) / (10 + self.num_updates) if self.warmup else 1.0
        return 1 - min(self.decay, grown)

    def require_out_of_use(self, what: str) -> None:
        """Make sure that it has not taken the place of the weights.

        Raises:
            EngineStateError: it has.
        """
        if self.is_in_use:
            raise EngineStateError(
                f"{what} inside `with engine.averaged()`, where the average is in use; leave it first"
            )


def average_problems(*, decay: object, every: object, warmup: object) -> list[str]:
    """A line for each of these values that an average cannot have."""
    problems = []
    if isinstance(decay, bool) or not isinstance(decay, Real) or decay < 0 or not decay < 1:
        problems.append(f"decay={decay}; it must be at least 0 and below 1, such as 0.999")
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        problems.append(f"every={every}; it must be a whole number of steps, at least 1")
    if not isinstance(warmup, bool):
        problems.append(f"warmup={warmup}; it must be true or false")
    return problems


# The bytes that an engine holds and sends on this rank, beside those of ZeRO's formulas.


@dataclass(frozen=True)
class Offloaded:
    """A rank's bytes on one tier, and their cost in a step."""

    where: str
    """In words."""
    nbytes: int
    fetched_nbytes: int
    """In a step."""
    stored_nbytes: int
    fetched_per_s: float
    """Bytes a second of this rank, measured when the engine was built, on all ranks at once."""
    stored_per_s: float
    has_activations: bool
    """Whether what forwards save goes there too, which the bytes do not count."""

    @property
    def step_s(self) -> float:
        """Seconds of a step's transfers, beside which it computes."""
        return self.fetched_nbytes / self.fetched_per_s + self.stored_nbytes / self.stored_per_s


@dataclass(frozen=True)
class Usage:
    """The bytes that an engine holds and sends, as its schedule is now."""

    schedule: Schedule
    options: EngineOptions
    factory: OptimizerFactory
    pools: ScratchPools
    homes: Homes
    num_shards: int
    averages: bool = False
    """Whether an average of weights is kept, which counts as state of the optimizer."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self.schedule.buckets)

    def group_sizes(self, num_groups: int) -> list[tuple[int, int]]:
        """(parameters, their elements) that train in each group."""
        sizes = [(0, 0) for _ in range(num_groups)]
        for bucket in self.schedule.trained:
            for managed, slot in zip(bucket.spec.parameters, bucket.layout.slots, strict=True):
                num_parameters, numel = sizes[managed.group]
                sizes[managed.group] = (num_parameters + 1, numel + slot.numel)
        return sizes

    def planned_nbytes(self) -> dict[str, int]:
        """Bytes a rank is to hold at rest by ZeRO's formulas: {parameters, gradients, optimizer} on the device, and
        what of them is offloaded. Known before the first step, from a step of the optimizer on a sample, and to no byte
        where it keeps factors of a matrix."""
        trained, num_whole = self.schedule.trained, self._num_whole
        num_by_elements = sum(bucket.layout.numel for bucket in trained) - num_whole
        copies = sum(bucket.layout.numel * 4 for bucket in trained if bucket.update.state.separate_master_nbytes)
        state = self._sampled_nbytes(num_whole, is_whole=True) + self._sampled_nbytes(num_by_elements, is_whole=False)
        average = 4 * sum(bucket.layout.numel for bucket in trained) if self.averages else 0
        return self._split(self._volume.memory_nbytes(self.schedule.plan, state + copies + average))

    def sums_nbytes(self, num_micro_batches: int) -> int:
        """Bytes that a rank holds beside those, while a step adds up micro-batches and virtual ranks.

        For P elements and L virtual ranks on each rank these are log2(L) sums of P in fp32. With several micro-batches
        there is one more (in fp32 at stages 0 and 1 none, where it is the gradient itself), or with
        zero.accumulate='reduced' a shard of it (in fp32 none).

        Args:
            num_micro_batches: of a virtual rank.
        """
        leaves = of_micro_batches = shards = 0
        for bucket in self.schedule.trained:
            numel, precision = bucket.layout.padded_numel, bucket.gradient.precision
            leaves += numel * precision.master.itemsize * (self.options.leaves_per_rank.bit_length() - 1)
            if precision.separate_master or self.options.plan.shards_gradients:
                of_micro_batches += numel * precision.master.itemsize
            if precision.separate_master:
                shards += bucket.layout.shard_numel * precision.master.itemsize
        if num_micro_batches == 1:
            return leaves
        return leaves + (shards if self.options.reduces_each else of_micro_batches)

    def memory_bytes(self) -> dict[str, Any]:
        """Bytes this rank holds now, by kind, and under "theory" what ZeRO's formulas give without padding.

        "offloaded" lies off the device, all others on it; "scratch" is what the buffers reused from step to step hold
        beside the model state.
        """
        schedule, trained = self.schedule, self.schedule.trained
        return {
            "parameters": sum(bucket.weights.held_nbytes for bucket in schedule.buckets),
            "gradients": sum(bucket.gradient.held_nbytes for bucket in trained),
            "optimizer": sum(bucket.update.held_nbytes for bucket in trained),
            "offloaded": self.homes.placed_nbytes,
            "scratch": self.pools.held_nbytes
            + self.homes.windows_nbytes
            + sum(bucket.gradient.accumulator_nbytes for bucket in trained),
            "theory": self._split(self._volume.memory_nbytes(schedule.plan, self._optimizer_nbytes())),
        }

    def offloaded(self, num_micro_batches: int) -> list[Offloaded]:
        """This rank's bytes off the device, by tier, and their cost in a step.

        Args:
            num_micro_batches: of a step.
        """
        rows = []
        for tier, rates in self.homes.rates.items():
            fetched, stored = self.moved_nbytes(num_micro_batches, tier.name)
            activations = self.homes.has_activations(tier)
            rows.append(
                Offloaded(tier.where, tier.placed_nbytes, fetched, stored, rates.fetched, rates.stored, activations)
            )
        return rows

    def theoretical_sent_nbytes(self, num_micro_batches: int) -> int:
        """Bytes this rank sends in a step by ZeRO's count, without padding and without the norm's few bytes; and
        those of tensors that are updated whole, on their way to their owners and back."""
        whole_tensors = sum(bucket.update.sent_nbytes for bucket in self.schedule.trained)
        num_reductions = num_micro_batches if self.options.reduces_each else 1
        reshards = self.options.zero.reshard_after_forward
        return self._volume.sent_nbytes(self.options.plan, num_micro_batches, reshards, num_reductions) + whole_tensors

    def switch_nbytes(self, plan: Plan) -> int:
        """Bytes a rank sends so that everything lies as a plan has it: its share of what was sharded, and is held
        whole."""
        volume, old = self._volume, self.schedule.plan
        gathered = 0
        if old.shards_parameters and not plan.shards_parameters:
            gathered += volume.trainable_nbytes + volume.frozen_nbytes
        if old.shards_optimizer and not plan.shards_optimizer:
            gathered += self._optimizer_nbytes()
        return gathered * (self.num_shards - 1) // self.num_shards

    @property
    def _volume(self) -> Volume:
        return volume_of(self.schedule, self.num_shards)

    @property
    def _num_whole(self) -> int:
        """Elements that are updated whole."""
        trained = self.schedule.trained
        return sum(slot.numel for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole])

    def _sampled_nbytes(self, numel: int, *, is_whole: bool) -> int:
        """Bytes that the optimizer keeps of so many elements, as measured on a sample."""
        if numel == 0:
            return 0
        return numel * sampled_nbytes(self.factory, is_whole=is_whole) // (SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1])

    def _optimizer_nbytes(self) -> int:
        """Bytes of all ranks together, without padding: optimizer state, master weights if they are copies,
        and the average of weights."""
        trained, num_whole = self.schedule.trained, self._num_whole
        numel = sum(bucket.layout.numel for bucket in trained)
        # By elements, as measured on what this rank updates; of whole tensors, of which it may own none, on a sample.
        updated = sum(span.target.numel() for bucket in trained for span in bucket.update.spans)
        held = sum(bucket.update.state.element_state_nbytes() for bucket in trained)
        state = (numel - num_whole) * (held // updated if updated else 0)
        state += self._sampled_nbytes(num_whole, is_whole=True)
        copies = [bucket for bucket in trained if bucket.update.state.separate_master_nbytes]
        copies += [bucket for bucket in trained if bucket.update.state.average is not None]
        return state + sum(bucket.layout.numel * bucket.update.master_weight.itemsize for bucket in copies)

    def moved_nbytes(self, num_micro_batches: int, tier: str) -> tuple[int, int]:
        """(fetched, stored) in a step, of what lies on a tier: the optimizer's, for the update and back; shards, for
        each gather and behind the update."""
        offload, trained = self.options.offload, self.schedule.trained
        state = sum(bucket.update.home.nbytes for bucket in trained) if offload.optimizer == tier else 0
        if offload.parameters != tier:
            return state, state
        num_gathers = 2 * num_micro_batches if self.options.zero.reshard_after_forward else 1
        gathered = sum(bucket.weights.home.nbytes for bucket in self.schedule.buckets)
        masters = sum(bucket.weights.home.nbytes for bucket in trained if not bucket.update.has_copy)
        updated = sum(bucket.weights.home.nbytes for bucket in trained)
        return state + num_gathers * gathered + masters, state + updated

    def _split(self, theory: dict[str, int]) -> dict[str, int]:
        """Bytes by kind, with those that lie off the device as a kind of their own."""
        trained = self.schedule.trained
        numel = sum(bucket.layout.numel for bucket in trained)
        moved = sum(bucket.layout.numel for bucket in trained if bucket.update.home.nbytes)
        shards_are_off = any(bucket.weights.home.nbytes for bucket in self.schedule.buckets)
        offloaded = {
            "parameters": theory["parameters"] if shards_are_off else 0,
            "optimizer": theory["optimizer"] * moved // max(numel, 1),
        }
        on_device = {kind: nbytes - offloaded.get(kind, 0) for kind, nbytes in theory.items()}
        return on_device | {"offloaded": sum(offloaded.values())}


def volume_of(schedule: Schedule, num_shards: int) -> Volume:
    """The bytes of all parameters, each in the dtype it is held in, and of gradients in that they are reduced in."""
    nbytes = {True: 0, False: 0}
    for bucket in schedule.buckets:
        nbytes[bucket.spec.trainable] += bucket.layout.numel * bucket.spec.dtype.itemsize
    return Volume(
        trainable_nbytes=nbytes[True],
        frozen_nbytes=nbytes[False],
        num_shards=num_shards,
        reduced_nbytes=sum(
            bucket.layout.numel * bucket.gradient.reduction.wire_itemsize for bucket in schedule.trained
        ),
    )


T = TypeVar("T")


@dataclass(frozen=True)
class HalfLoaded:
    """A load that failed when it had begun to change the engine."""

    path: Path
    with_optimizer: bool
    """Whether it had begun with the optimizer's state too, which no weights alone make whole."""


class Broken:
    """Stands in place of a schedule that a failed call has left in pieces, and owns the parameters: whatever is asked
    of it, it tells why.

    Args:
        why: the sentence, with the first cause.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, _: str) -> NoReturn:
        raise EngineStateError(self._why)


class ShardedModel:
    """A model whose parameters, gradients and optimizer state are held as a plan says.

    Args:
        model: built alike on every rank; rank 0's weights and buffers are used. It is changed in place: its parameters
            become views of the engine's buckets, on the ranks' device, in the compute precision.
        optimizer: makes an optimizer from a list of parameter groups: an element-wise one, or one that is declared to
            update whole tensors (see `zerotrain.engine.groups.optimizers`).
        decay_all, param_groups: as for `build_engine`.
        initial: of a model that `deferred_init` has built; default: the values that the parameters have.

    Raises:
        ConfigError: the model or the optimizer cannot be trained so.
    """

    schedule: Schedule
    """Units and buckets, and where the model is among them. Another one after each change of what trains; a `Broken`
    after one that failed in its midst."""
    first_node: int
    """The first node of a graph that was made with the weights of now. See [Note: positions in a backward]."""
    last_save: SaveUnderWay | None = None
    """It may read what is held, beside the training."""
    average: Average | None = None
    """How the average of the weights follows them, if one is kept."""
    half_loaded: HalfLoaded | None = None
    """Until another load succeeds nothing is trained or saved: some elements are of one training, and some of
    another."""

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory,
        collectives: Collectives,
        options: EngineOptions,
        decay_all: bool = True,
        param_groups: Sequence[dict[str, Any]] | None = None,
        initial: InitialValues | None = None,
    ) -> None:
        world = collectives.world
        walked = walk(model)
        require_plain(walked)
        require_values(walked, world.device)
        require_no_engine(walked)
        require_leaves(walked, options.leaves_per_rank)
        require_own_memory(walked)
        self.module = model
        self.world = world
        self.options = options
        self.precision = options.precision
        self.collectives, self.ledger = collectives, collectives.ledger
        require_same(self.collectives, options.settings())
        units = cut_units(walked, options.zero.unit_patterns, options.bucket_numel)
        dtypes = dtypes_of(walked.managed, self.precision)
        self.groups = ParamGroups(
            walked.managed,
            units,
            optimizer,
            param_groups,
            decay_all=decay_all,
            device=world.device,
            warns=world.rank == 0 and device_of(world.device).holds_values,
        )
        self.pools = ScratchPools(world.device, self.collectives.zeros)
        self.homes = Homes(options.offload, world, options.zero.prefetch)
        share_unmanaged(walked, self.collectives)
        self._builder = Builder(
            model,
            dtypes,
            options=options,
            groups=self.groups,
            collectives=self.collectives,
            pools=self.pools,
            homes=self.homes,
        )
        self._newcomers = Newcomers(walked, dtypes)
        round_at_entry(walked, dtypes)
        if self.homes.saved is not None:
            restore = offload_saved(walked, options.zero.unit_patterns, self.homes.saved, options.offload.activations)
            weakref.finalize(self, restore).atexit = False
        self._connect(self._builder.schedule(initial or InitialValues()), walked)
        self.homes.measure()
        cast_around_kept(walked, dtypes, self.precision)
        complete_before_encoders(walked, self)

    def _connect(self, schedule: Schedule, walked: WalkedModel | None = None) -> None:
        """Let the model tell a schedule of buckets, which were just cut, where it is.

        Args:
            walked: the model as it is now; None: it is walked again where that is needed.
        """
        self.schedule = schedule
        if self.homes.saved is not None:
            current = walked or walk(self.module)
            self.homes.saved.leave_alone(
                [*(entry.parameter for entry in current.parameters), *current.buffers.values()]
            )
        self._disconnect = connect(self, schedule)
        self.weights_changed()

    def weights_changed(self) -> None:
        """No backward may come through a graph from before: it would compute with weights it was not made with."""
        self.first_node = next_node()

    @property
    def holdings(self) -> Holdings:
        """The contents of a checkpoint. The buckets are new after each change of what trains."""
        return Holdings(self.module, self.schedule.buckets, self.groups, self.options, self.collectives)

    @property
    def usage(self) -> Usage:
        """Bytes held and sent, as they are now."""
        averages = self.average is not None
        num_shards = self.world.shards.size
        return Usage(self.schedule, self.options, self.groups.factory, self.pools, self.homes, num_shards, averages)

    # ---- what trains

    @makes_memory
    def freeze(self, *parameters: str | nn.Parameter) -> None:
        """Let parameters train no more: only their weights in the compute precision are kept.

        Args:
            named: names, patterns such as "blocks.0.*", or parameters; the same on all ranks, between two steps.

        Raises:
            ConfigError: one of them is nothing the model has, or nothing would be left to train.
            EngineStateError: gradients of a step are waiting.
        """
        self.change("engine.freeze", lambda: self.groups.freeze(parameters))

    @makes_memory
    def unfreeze(self, *parameters: str | nn.Parameter) -> None:
        """Let frozen parameters train, in the group they have, as new to the optimizer. Otherwise as `freeze`."""
        self.change("engine.unfreeze", lambda: self.groups.unfreeze(parameters))

    @makes_memory
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Let the frozen parameters of `group`, as in `build_engine`, train in a group of their own. As `unfreeze`."""
        self.change("engine.add_param_group", lambda: self.groups.add(group))

    @makes_memory
    def set_stage(self, stage: int) -> StageSwitch:
        """Let parameters, gradients and optimizer state lie from here on as another ZeRO stage has them; what is
        computed stays the same, to the bit.

        Collective, between steps. Buckets move one at a time, in memory: beside the larger of the two stages a rank
        holds one bucket whole.

        Args:
            stage: 0 to 3, the same on all ranks.

        Raises:
            ConfigError: there is no such stage, or the ranks were given different ones. Nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """

        def plan() -> tuple[EngineOptions, dict[str, object]]:
            self.require_whole()
            options = self.options.at_stage(stage)
            described_state(self.schedule.buckets)  # raises where something of it cannot be moved
            return options, {"weights written in place, as a hash": written_to(self.schedule.buckets)}

        options = self.between_steps("engine.set_stage", "the stage cannot change", plan, argument=repr(stage))
        if options.plan == self.options.plan:
            return StageSwitch(stage, sent_nbytes=0, theory_sent_nbytes=0)
        self.wait_until_save_ended()
        return self._move_to(options)

    # ---- between two steps, on all ranks alike

    def require_no_gradient(self, what: str) -> None:
        if not all(bucket.gradient.is_empty for bucket in self.schedule.trained):
            raise EngineStateError(f"{what} while a gradient waits; call engine.step() first")

    def _require_between_steps(self, what: str) -> None:
        if self.schedule.phase is not Phase.IDLE:
            raise EngineStateError(f"{what} during a {self.schedule.phase.value}; call it between two steps")
        if self.average is not None:
            self.average.require_out_of_use(what)
        self.require_no_gradient(what)
        self.groups.require_usable()

    def between_steps(
        self, call: str, what: str, plan: Callable[[], tuple[T, Mapping[str, object]]], argument: str = ""
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

        return agreed(self.collectives, call, planned, argument)

    def change(self, call: str, change: Callable[[], bool]) -> None:
        """Make a change of what trains and, if it changed anything, cut the buckets anew."""

        def plan() -> tuple[tuple[bool, Described], Mapping[str, object]]:
            is_change, facts = self.groups.change(change)
            return (is_change, described_state(self.schedule.buckets) if is_change else {}), facts

        with self.groups.undone_if_refused():
            is_change, state = self.between_steps(call, "what trains cannot change", plan)
            if is_change and self.last_save is not None:
                self.last_save.wait_until_read()
        if is_change:
            with self.breaks_if_it_fails(call):
                self._cut_anew(OtherBuckets(self.schedule.buckets, state, self.options.plan, self.collectives))

    @contextmanager
    def breaks_if_it_fails(self, call: str) -> Iterator[None]:
        """In here a call moves what the engine holds. If that fails, some is where it was and some where it was to be:
        each later call of the engine, and each look at a parameter, raises EngineStateError with the first cause."""
        try:
            yield
        except BaseException as error:
            broken: Any = Broken(
                f"{call} has failed halfway ({shared_error(error).text}), and the engine holds a part of it: build the "
                "model and its engine anew, and load the last checkpoint"
            )
            live = [parameter for parameter in self.module.parameters() if isinstance(parameter, LiveParameter)]
            settle(live, broken)
            for parameter in live:
                parameter.__class__ = UnreadyParameter
            self.schedule = broken
            raise

    def _cut_anew(self, source: Source) -> None:
        self._disconnect()
        former = self.schedule.buckets
        for bucket in former:
            bucket.weights.let_go()
        self.pools.clear()
        schedule = self._builder.schedule(InitialValues(), source)
        for bucket in former:
            bucket.leave()
        self._connect(schedule)

    def _move_to(self, options: EngineOptions) -> StageSwitch:
        """Let everything lie where other options have it, between two steps. Collective."""
        theory = self.usage.switch_nbytes(options.plan)
        former_nbytes = self.ledger.outside_steps.sent_nbytes
        with self.breaks_if_it_fails("engine.set_stage"):
            self._disconnect()
            self.pools.clear()
            if device_of(self.collectives.world.device).is_host:
                set_heap(returns=True)  # buckets that go leave no holes; the new schedule sets it back
            give_back_freed()
            move = self._builder.under(options, self.schedule)
            del self.schedule
            schedule = move()
            self.options = options
            self._connect(schedule)
        return StageSwitch(options.zero.stage, self.ledger.outside_steps.sent_nbytes - former_nbytes, theory)

    @contextmanager
    def replaced(self, half_loaded: HalfLoaded, *, mends: bool) -> Iterator[None]:
        """In here weights are replaced.

        Args:
            left: what the engine has a part of if that fails.
            mends: whether it is whole if that succeeds.
        """
        former, self.half_loaded = self.half_loaded, half_loaded
        self.weights_changed()
        yield
        self.schedule.end_update()
        self.weights_changed()
        self.half_loaded = None if mends else former

    def require_usable(self) -> None:
        """Before a forward: nothing is there that a forward cannot use."""
        self._newcomers.require_none()
        self.require_whole()

    def require_whole(self) -> None:
        """Make sure that all is of one training.

        Raises:
            EngineStateError: a load has failed in its midst.
        """
        if self.half_loaded is not None:
            raise EngineStateError(
                f"loading {self.half_loaded.path} failed halfway, and the engine holds a part of it: first load one "
                "that can be read"
            )

    def wait_until_save_ended(self) -> None:
        """Wait until its folder is there, or will never be: it may be what is to be loaded."""
        if self.last_save is not None:
            self.last_save.wait_until_ended()
