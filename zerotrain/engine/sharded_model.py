"""A model in buckets: what is held where, what trains, and how both change between two steps."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from threading import get_ident
from typing import Any, NoReturn, TypeVar

from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPools
from zerotrain.device.kinds import device_of
from zerotrain.device.memory import give_back_freed, set_heap
from zerotrain.engine.agreement import require_same
from zerotrain.engine.buckets.home import EngineParts, Homes
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.build import Builder, share_unmanaged
from zerotrain.engine.groups.optimizers import OptimizerFactory
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.model.checks import Newcomers, require_leaves, require_own_memory, require_plain, require_values
from zerotrain.engine.model.deferred import InitialValues
from zerotrain.engine.model.forward import offload_saved, round_at_entry
from zerotrain.engine.model.live_parameter import LiveParameter, UnreadyParameter, settle
from zerotrain.engine.model.precision import cast_around_kept, dtypes_of
from zerotrain.engine.options import EngineOptions, shard_size_of
from zerotrain.engine.schedule.hooks import complete_before_encoders, connect, next_node, require_no_engine
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.state.from_buckets import Described, OtherBuckets, described_state
from zerotrain.engine.state.named import Holdings
from zerotrain.engine.state.save import SaveUnderWay
from zerotrain.engine.state.together import agreed, shared_error
from zerotrain.errors import ConfigError, EngineStateError, noting, raise_noted
from zerotrain.settings import HOST
from zerotrain.sharding.units import WalkedModel, cut_units, walk

# How a moving average of weights follows them: its share, and its steps.


@dataclass(kw_only=True)
class Average:
    """The average of an engine, but for its numbers in the buckets.

    Raises:
        ConfigError: a value that it cannot have.
    """

    decay: float
    every: int
    """Steps from one update to the next."""
    warmup: bool
    """Lets the decay grow to its value: the first weights are forgotten sooner."""
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
        """Refuse a call while it has the place of the weights.

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


T = TypeVar("T")


@dataclass(frozen=True)
class HalfLoaded:
    """A load that failed halfway, with the engine partly changed."""

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
    first_nodes: dict[int, int]
    """The thread that has changed the weights last -> the first node of a graph that was made with those of now. Each
    thread numbers its own nodes, so others have none. See [Note: positions in a backward]."""
    last_save: SaveUnderWay | None = None
    """It may read what is held, beside the training."""
    average: Average | None = None
    """How the average of the weights follows them, if one is kept."""
    recomputes = False
    """Whether units compute their forwards again in the backward."""
    graphs: Any = None
    """`StepGraphs`, if steps may be graphs: of the memory that is held now."""
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
        walked, errors = walk(model), list[ConfigError]()
        require_no_engine(walked)
        with noting(errors):
            require_plain(walked)
            require_values(walked, world.device)
            require_own_memory(walked)
        with noting(errors):
            require_leaves(walked, options.leaves_per_rank)
        self.module = model
        self.world = world
        self.options = options
        self.precision = options.precision
        self.collectives, self.ledger = collectives, collectives.ledger
        require_same(self.collectives, options.settings())
        hosts = collectives.ranks_of_hosts() if options.zero.shard_size == HOST else ()
        collectives.split(shard_size_of(options.zero.shard_size, world.shards.size, hosts))
        units = []
        with noting(errors):
            units = cut_units(walked, options.zero.unit_patterns, options.bucket_numel)
        with noting(errors):
            dtypes = dtypes_of(walked.managed, self.precision)
        with noting(errors):
            self.groups = ParamGroups(
                walked.managed,
                units or cut_units(walked, None, options.bucket_numel),
                optimizer,
                param_groups,
                decay_all=decay_all,
                state_dtype=self.precision.state,
                device=world.device,
                warns=world.rank == 0 and device_of(world.device).holds_values,
            )
        raise_noted(errors)
        self.pools = ScratchPools(world.device, self.collectives.zeros)
        self.homes = Homes(options.offload, world, options.zero.prefetch)
        share_unmanaged(walked, self.collectives)
        parts = EngineParts(options, self.groups, collectives, self.pools, self.homes)
        self._builder = Builder(model, dtypes, parts)
        self.newcomers = Newcomers(walked, dtypes)
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
        self.first_nodes = {get_ident(): next_node()}

    def forget_graphs(self) -> None:
        """Forget the graphs of steps: their tensors, or the places of these, are about to change."""
        if self.graphs is not None:
            self.graphs.forget()

    @property
    def holdings(self) -> Holdings:
        """The contents of a checkpoint. The buckets are new after each change of what trains."""
        return Holdings(self.module, self.schedule.buckets, self.groups, self.options, self.collectives)

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
                self.forget_graphs()
                former = self.schedule.buckets
                source = OtherBuckets(former, state, self.options.plan, self.collectives)
                self._disconnect()
                for bucket in former:
                    bucket.weights.let_go()
                self.pools.clear()
                schedule = self._builder.schedule(InitialValues(), source)
                for bucket in former:
                    bucket.leave()
                self._connect(schedule)

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

    def move_to(self, options: EngineOptions) -> None:
        """Let everything lie where other options have it, between two steps. Collective."""
        with self.breaks_if_it_fails("engine.set_stage"):
            self.forget_graphs()
            self._disconnect()
            self.pools.clear()
            if device_of(self.world.device).is_host:
                set_heap(returns=True)  # buckets that go leave no holes; the new schedule sets it back
            give_back_freed()
            units, buckets = self.schedule.units, list(self.schedule.buckets)
            places = [(unit.name, unit.modules, [buckets.index(bucket) for bucket in unit.buckets]) for unit in units]
            del self.schedule, units
            schedule = self._builder.under(options, places, buckets)
            self.options = options
            self._connect(schedule)

    @contextmanager
    def replaced(self, half_loaded: HalfLoaded, *, mends: bool) -> Iterator[None]:
        """In here weights are replaced.

        Args:
            half_loaded: the engine's load in part, if that fails.
            mends: whether the engine is whole if that succeeds.
        """
        former, self.half_loaded = self.half_loaded, half_loaded
        self.forget_graphs()
        self.weights_changed()
        yield
        self.schedule.end_update()
        self.weights_changed()
        self.half_loaded = None if mends else former

    def require_whole(self) -> None:
        """Refuse a mix of two trainings.

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

    def settle_last_save(self) -> None:
        """Wait for it, raise what it has met if nobody has asked, and forget it."""
        if (save := self.last_save) is not None:
            self.last_save = None
            save.settle()
