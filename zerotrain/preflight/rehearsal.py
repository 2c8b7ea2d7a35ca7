"""The engine of a run at a stage, and a step of it, rehearsed: without memory, without values, without ranks."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.comm import collectives, wires
from zerotrain.comm.handles import Exchange, Gather, Reduction, ReductionSpec, Wire, Zeros
from zerotrain.comm.world import Shards, World
from zerotrain.config.schema import Config
from zerotrain.data.fetch import as_inputs, with_tensors
from zerotrain.device.kinds import device_of, rehearsing
from zerotrain.engine import SAMPLE_SHAPE, WHOLE, OptimizerFactory, ZeroEngine, build_optimizer, updates_whole
from zerotrain.engine.buckets.home import OPTIMIZER_WINDOWS, Homes
from zerotrain.engine.optimizer_step import update_all
from zerotrain.engine.options import shard_size_of
from zerotrain.engine.step import call_model
from zerotrain.engine.usage import moved_nbytes
from zerotrain.errors import ConfigError
from zerotrain.offload.tier import PAGE_NBYTES
from zerotrain.preflight.unreal import MAX_KNOWN_NUMEL, OTHERS, SCRATCH, LiveMemory, Unreal, attention_of
from zerotrain.run.factory import add_config_loss, averages_in, build_engine_of, build_on_meta, freeze

# The step of an optimizer, rehearsed on small tensors: the bytes it keeps and takes for an element.


SAMPLE_NUMEL = 2**14


@dataclass(frozen=True)
class Footprint:
    """Bytes and state of an optimizer of elements."""

    states: dict[str, tuple[torch.dtype, bool]]
    """(dtype, whether it has the shape of the weights) of each state, by name; others are a single number."""
    scratch_per_element: float
    """Bytes alive for a moment in a step, for each element of a tensor."""
    at_once: bool
    """Whether they are of all tensors at once, and not of one after the other."""


def look_at(factory: OptimizerFactory, *, on_host: bool) -> Footprint | None:
    """Make two steps on the CPU; None for an optimizer of whole tensors.

    Args:
        on_host: False: to be seen as on a GPU; where torch takes many tensors at once there, it does here.
    """
    if updates_whole(factory) and not hasattr(factory, "needs_whole"):
        return None
    samples = [_sample_steps(factory, num, on_host=on_host) for num in (1, 2)]
    (nbytes, state), (nbytes_of_two, _) = samples
    states = {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.shape in ((), (SAMPLE_NUMEL,)):
            states[name] = value.dtype, value.ndim > 0
    return Footprint(states, nbytes / SAMPLE_NUMEL, at_once=nbytes_of_two > 1.5 * nbytes)


def _sample_steps(factory: OptimizerFactory, num: int, *, on_host: bool) -> tuple[int, dict[str, Any]]:
    params = [torch.zeros(SAMPLE_NUMEL) for _ in range(num)]
    optimizer = build_optimizer(factory, [{"params": params, "name": "matrices"}])
    for group in optimizer.param_groups:
        if not on_host and group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = True
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with LiveMemory() as live:
        for param in params:
            values = (param, param.grad, *optimizer.state.get(param, {}).values())
            live.name("kept", *(value for value in values if isinstance(value, torch.Tensor)))
        start_nbytes = live.nbytes
        optimizer.step()
    return live.peak_nbytes - start_nbytes, next(iter(optimizer.state.values()), {})


class RehearsedFactory:
    """Makes the optimizers of a rehearsal. Those of tensors with values are made as ever.

    Args:
        factory: makes the optimizers of the run.
        footprint: see `look_at`.
    """

    def __init__(self, factory: OptimizerFactory, footprint: Footprint | None) -> None:
        self._factory, self._footprint = factory, footprint
        self._made: dict[str, torch.optim.Optimizer] = {}
        """On one number for each group, by the groups' settings: buckets are many and alike."""

    def __getattr__(self, name: str) -> Any:
        """The factory's other attributes, such as `needs_whole`."""
        return getattr(self._factory, name)

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """See `OptimizerFactory`."""
        if not all(tensor.is_meta for group in groups for tensor in group["params"]):
            return self._factory(groups)
        if self._footprint is None or str(groups[0].get("name")).startswith(WHOLE):
            with suppress(Exception):
                return self._factory(groups)
            # It looks at its tensors, so it gets one of the shape the engine has tried.
            optimizer = self._factory([group | {"params": [torch.zeros(SAMPLE_SHAPE)]} for group in groups])
            for group, source in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = list(source["params"])
            return optimizer
        key = repr([group | {"params": None} for group in groups])
        if key not in self._made:
            self._made[key] = self._factory([group | {"params": [torch.zeros(1)]} for group in groups])
        optimizer = self._made[key]
        pairs = zip(optimizer.param_groups, groups, strict=True)
        filled_groups = [{**group, "params": source["params"]} for group, source in pairs]
        return RehearsedOptimizer(filled_groups, optimizer.defaults, self._footprint)


class RehearsedOptimizer(torch.optim.Optimizer):
    """Has the state and takes the memory of the real one."""

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], footprint: Footprint) -> None:
        self._footprint = footprint
        super().__init__(groups, defaults)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update nothing."""
        updated = [tensor for group in self.param_groups for tensor in group["params"] if tensor.grad is not None]
        for tensor in updated:
            for name, (dtype, is_of_weights) in self._footprint.states.items():
                if name not in self.state[tensor]:
                    shape = tensor.shape if is_of_weights else ()
                    self.state[tensor][name] = torch.empty(shape, dtype=dtype, device=tensor.device)
        numels = [tensor.numel() for tensor in updated]
        for numel in [sum(numels)] if self._footprint.at_once else numels:
            torch.empty(int(numel * self._footprint.scratch_per_element), dtype=torch.uint8, device="meta")


# A wire to nobody: nothing is sent, and its handles borrow the same memory as real ones.


@dataclass(frozen=True)
class Links:
    """How the ranks of a run send: the handles of `zerotrain.comm` they would have."""

    num_ranks: int
    on_host: bool
    ordered: bool
    """Reductions are added by one tree."""
    shard_size: int | None = None
    """Of `num_ranks`; None: all."""

    @classmethod
    def of_run(cls, config: Config, num_ranks: int, *, on_host: bool, num_local: int | None = None) -> "Links":
        """The links of a run's ranks, in the host's memory or on GPUs.

        Args:
            num_local: ranks of a host; None: all.

        Raises:
            ConfigError: they cannot form the mesh of the run.
        """
        zero, hosts = config.zero, [rank // (num_local or num_ranks) for rank in range(num_ranks)]
        ordered = zero.reduction in ("ordered", "fp32") or (zero.reduction == "auto" and on_host)
        return cls(num_ranks, on_host, ordered, shard_size_of(zero.shard_size, num_ranks, hosts))

    @property
    def posts_receives(self) -> bool:
        """Whether the receives of a reduction are posted ahead."""
        return self.on_host and self.ordered and self.num_ranks <= collectives.MAX_RANKS_OF_EXCHANGE

    def wire(self, zeros: Zeros) -> Wire:
        """The wire of a rank; `zeros` makes the buffers of a step."""
        return Wire(
            gather=_Gather,
            reduction=lambda spec: _Reduction(spec, self),
            exchange=_Exchange,
            # The ranks compare equal values.
            gather_small=lambda values, _: torch.zeros(self.num_ranks, values.numel(), dtype=values.dtype),
            broadcast=lambda _values, _source: None,
            store=dist.HashStore,
            zeros=zeros,
        )

    def shards(self, rank: int, zeros: Zeros) -> Shards:
        """The ranks, seen from one of them; `zeros` makes the buffers of a step."""

        def axis(ranks: Sequence[int]) -> Shards:
            return replace(self, num_ranks=len(ranks)).shards(ranks.index(rank), zeros)

        return Shards(rank, self.num_ranks, make_wire=lambda _: self.wire(zeros), make_axis=axis)


class _SendsNothing:
    """Is done when it is issued, since it sends nothing."""

    def _issue(self) -> None:
        pass

    def _wait(self) -> None:
        pass

    def _is_done(self) -> bool:
        return True


class _Gather(_SendsNothing, Gather):
    """A gather of nothing."""


class _Reduction(_SendsNothing, Reduction):
    """It is done only when it must be, since the others may be late: it holds its memory as long as it may."""

    def __init__(self, spec: ReductionSpec, links: Links) -> None:
        super().__init__(spec)
        self._links = links
        # Parts received into a buffer. Unordered, only a result of another dtype needs one.
        widens = self._pool.dtype.itemsize != self.out.itemsize
        self._num_received = links.num_ranks - links.posts_receives if links.ordered else int(widens)
        if links.on_host and not links.ordered:  # by gloo's own, which sends each byte twice
            self.sent_nbytes *= 2

    def _prepare(self) -> None:
        if self._links.posts_receives:
            self._receive()

    def _issue(self) -> None:
        self._receive()

    def _receive(self) -> None:
        if self._num_received and self._received is None:
            self._borrow(self._num_received)

    def _is_done(self) -> bool:
        return self._links.num_ranks == 1

    def _complete(self) -> None:
        if self._links.ordered and max(self._links.num_ranks, self.num_leaves) > 1:
            pairs, numel = (self._links.num_ranks + 1) // 2, self.out.numel()
            if self._links.on_host:  # where the mean is added in chunks
                numel = min(numel, max(1, wires.CHUNK_NUMEL // pairs))
            torch.empty(4 * pairs * numel, dtype=torch.uint8, device=self.out.device)
        self._withdraw()
        super()._complete()

    def _withdraw(self) -> None:
        if self._received is not None:
            self._give_back()


class _Exchange(_SendsNothing, Exchange):
    """An exchange of nothing."""


MAX_MICRO_BATCHES = 2
"""A virtual rank rehearses no more: each further one is like the second."""
SMALL_NBYTES = 4096
"""Bytes for small numbers: left to the next step, such as sums for the norm, or exchanged by ranks. Twice as much where
another rank may be late."""
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Bytes of the rank with most of them, with all padding."""

    parameters: int
    """At rest on the device, in the compute precision."""
    gradients: int
    optimizer: int
    """State of the optimizer, and fp32 master weights if they are copies."""
    gathered: int
    """Other ranks' shards at the peak: of complete units, and of those gathered ahead."""
    scratch: int
    """Used again from step to step, at the peak: on the wire, sums, windows of offloaded state."""
    sums: int
    """The part of `scratch` for sums of micro-batches and virtual ranks."""
    activations: int | None
    """Tensors saved by the forward of a micro-batch, or alive for a moment, at the peak; None: unknown."""
    peak: int | None
    """All tensors on the device, at their most."""
    peak_phase: str | None
    """The part of a step with the peak."""
    host: int
    disk: int
    saved: int
    """The part of `host` and `disk` saved by a forward for its backward, at its most."""
    sent: int | None
    """To other ranks, in a step."""
    across: int | None = 0
    """The part of `sent` from one replica of the parameters to another."""
    fetched: int
    """From host and disk, in a step."""
    stored: int
    largest_unit: int
    unknown_because: str | None
    """The operation not to be followed without values."""
    recomputes: bool
    """Whether units are computed again in the backward."""

    @property
    def at_least(self) -> int:
        """Bytes certainly on the device."""
        return self.peak or self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Rehearsals:
    """A run without memory: its own engine is built for a stage, and makes a step. An evaluation has as many rows, and
    saves nothing."""

    config: Config
    links: Links
    row: Any
    """A batch of one; None: it is not known, and there are no steps."""
    optimizer: OptimizerFactory
    footprint: Footprint | None
    """The bytes of `optimizer`."""
    run_dir: Path | None
    """For offloaded state; nothing is written there. None: nothing is offloaded."""

    @classmethod
    def of_run(
        cls, config: Config, links: Links, row: Any, optimizer: OptimizerFactory | None, run_dir: Path | None
    ) -> "Rehearsals":
        """The rehearsals of a run, with its first look at the optimizer.

        Args:
            optimizer: None: the run's cannot be made. SGD stands in for it, without the run's groups.
        """
        if optimizer is None:
            config = replace(config, optimizer=config.optimizer | {"groups": None})
            optimizer = partial(torch.optim.SGD, lr=0.1)
        footprint = None
        with suppress(Exception):  # it may work on GPUs alone, or nowhere; the engine says so
            footprint = look_at(optimizer, on_host=links.on_host)
        return cls(config, links, row, optimizer, footprint, run_dir)

    def plan(self, stage: int) -> StagePlan:
        """The plan of a stage. Raises as `at`."""
        with self.at(stage) as rehearsal:
            return rehearsal.plan()

    @contextmanager
    def at(self, stage: int, model: torch.nn.Module | None = None) -> Iterator["Rehearsal"]:
        """In here the engine of the rank with most state can be looked at, and can make a step.

        Args:
            model: without memory, frozen in part; it becomes the engine's. None: it is built.

        Raises:
            ConfigError: the model or the optimizer cannot be trained so, or the model cannot be built without memory.
        """
        rank, on_host = 0, self.links.on_host
        while True:
            with Unreal() as mode, rehearsing(on_host=on_host), attention_of(on_host=on_host):
                engine = self._engine(mode, stage, rank, model)
                if (busiest := _busiest(engine)) == rank:
                    yield Rehearsal(mode, engine, self.config, self.row)
                    return
            rank, model = busiest, None

    def _engine(self, mode: Unreal, stage: int, rank: int, model: torch.nn.Module | None) -> ZeroEngine:
        config, links = self.config, self.links
        if model is None:
            model = build_on_meta(config)
            if model is None:
                raise ConfigError(
                    f"model._target_: got {config.model.get('_target_')}, whose constructor computes with values; a "
                    "plan builds the model without memory"
                )
            add_config_loss(config, model)
            freeze(config, model)

        def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
            memory = torch.zeros(numel, dtype=dtype, device=_META)
            mode.name(SCRATCH, memory)
            return memory

        world = World(rank, links.num_ranks, rank, _META, shards=links.shards(rank, scratch))
        config = replace(config, zero=replace(config.zero, shard_size=links.shard_size))  # "host" is known here
        factory = RehearsedFactory(self.optimizer, self.footprint)
        engine = build_engine_of(config, world, stage, self.run_dir, model=model, optimizer=factory)
        if averages_in(config):  # any settings make it as large
            engine.keep_average()
        return engine


def _busiest(engine: ZeroEngine) -> int:
    """The rank with most of the optimizer's state. Ranks differ only by tensors updated whole, each by one rank."""
    size, own_rank, trained = engine.world.size, engine.world.rank, engine.schedule.trained
    if not engine.plan.shards_optimizer or not any(bucket.update.owners for bucket in trained):
        return own_rank
    whole, by_elements = [0] * size, [0] * size
    for bucket in trained:
        slots, num_whole = bucket.layout.slots, len(bucket.update.owners)
        for slot, owner in zip(slots, bucket.update.owners, strict=False):
            whole[owner] += slot.numel
        start = slots[num_whole].offset if num_whole < len(slots) else bucket.layout.padded_numel
        for rank in range(size):
            shard = bucket.layout.shard(rank)
            by_elements[rank] += max(0, shard.stop - max(shard.start, start))
    sampled = engine.held.groups.sampled_nbytes
    nbytes = [sampled(whole[r], is_whole=True) + sampled(by_elements[r], is_whole=False) for r in range(size)]
    return own_rank if nbytes[own_rank] == max(nbytes) else nbytes.index(max(nbytes))


class Rehearsal:
    """An engine without memory, as it is at rest and in a step."""

    def __init__(self, mode: Unreal, engine: ZeroEngine, config: Config, row: Any) -> None:
        self._mode, self.engine, self._config, self._row = mode, engine, config, row
        self._homes: Homes = engine.held.homes

    def at_rest_nbytes(self) -> dict[str, int]:
        """Bytes of weights, gradients and the optimizer's state, by their place: device, cpu and disk. The engine plans
        them, since some optimizers take seconds to make their state without memory."""
        held, (placed, _) = self.engine.planned_nbytes(), self._placed_nbytes()
        return {"device": held["parameters"] + held["gradients"] + held["optimizer"], **placed}

    def plan(self) -> StagePlan:
        """Make a step, and look."""
        engine, mode = self.engine, self._mode
        leaves, accumulated = len(engine.virtual_ranks), self._config.train.gradient_accumulation_steps
        held, failed, num = engine.memory_bytes(), None, leaves * min(accumulated, MAX_MICRO_BATCHES)
        try:
            mode.unknown = 1.0  # update with no gradient: later steps than the first find state
            share = None if engine.held.average is None else 1.0
            update_all(engine.schedule.updates, engine.schedule.gathers, None, share)
            engine.schedule.end_update()
            mode.unknown = None
            held = engine.memory_bytes()
            rows = [_rows(self._row, self._config.train.micro_batch_size)] * num
            engine.train()
            if self._homes.tiers:  # their windows have their full size from the second step on
                engine.train_step(rows)
            name_state(mode, engine)
            gc.collect()  # garbage of the build in cycles would count until it is found
            mode.begin(engine)
            start_moved = self._saved_moved()
            engine.train_step(rows)
        except Exception as error:  # a user's class may ask for anything
            failed = mode.failed or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        at_peak, phase = ({}, None) if failed else (mode.at_peak, mode.peak_phase)
        moved = [moved_nbytes(engine.held, accumulated * leaves, where) for where in ("cpu", "disk")]
        sent = across = peak = None
        if not failed:
            fetched, stored = (end - start for end, start in zip(self._saved_moved(), start_moved, strict=True))
            moved.append((fetched * leaves * accumulated // num, stored * leaves * accumulated // num))
            theory = engine.theoretical_sent_nbytes
            sent = engine.ledger.last_step.sent_nbytes + theory(leaves * accumulated) - theory(num)
            theory_across = engine.theoretical_across_nbytes
            across = engine.ledger.last_step.across_nbytes + theory_across(leaves * accumulated) - theory_across(num)
            peak = mode.peak_nbytes + self._others_nbytes() + SMALL_NBYTES * min(engine.world.size, 2)
            if self._config.launch.graphs != "off" and not device_of(engine.world.device).is_host:
                # Graphs keep the memory of a step for themselves: an evaluation takes its own.
                mode.begin(engine)
                with torch.no_grad():
                    call_model(engine, rows[0])
                peak += sum(mode.at_peak.get(kind, 0) for kind in (OTHERS, "gathered"))
        placed, saved = self._placed_nbytes()
        largest_unit = 0
        for unit in engine.schedule.units:
            sizes = [bucket.layout.padded_numel * bucket.spec.dtype.itemsize for bucket in unit.buckets]
            largest_unit = max(largest_unit, sum(sizes))
        return StagePlan(
            parameters=held["parameters"],
            gradients=held["gradients"],
            optimizer=held["optimizer"],
            gathered=at_peak.get("gathered", 0),
            scratch=at_peak.get(SCRATCH, 0),
            sums=engine.sums_nbytes(accumulated),
            activations=None if failed else at_peak.get(OTHERS, 0),
            peak=peak,
            peak_phase=phase,
            host=placed["cpu"],
            disk=placed["disk"],
            saved=saved,
            sent=sent,
            across=across,
            fetched=sum(fetched for fetched, _ in moved),
            stored=sum(stored for _, stored in moved),
            largest_unit=largest_unit,
            unknown_because=failed,
            recomputes=bool(self._config.switches("model")["activation_checkpointing"]),
        )

    def _saved_moved(self) -> tuple[int, int]:
        """Bytes (fetched, stored) so far for the backwards, in each micro-batch as much."""
        saved = self._homes.saved
        return (0, 0) if saved is None else (saved.fetched_nbytes, saved.stored_nbytes)

    def _placed_nbytes(self) -> tuple[dict[str, int], int]:
        """Bytes off the device by tier, at rest and saved by forwards at their most; and the latter."""
        saved, placed = self._homes.saved, {"cpu": 0, "disk": 0}
        if saved is not None:
            saved.free_ended()
            placed[self._config.offload.activations] += saved.most_placed_nbytes
        for where, tier in self._homes.off_device:
            placed[where] += tier.placed_nbytes
        return placed, 0 if saved is None else saved.most_placed_nbytes

    def _others_nbytes(self) -> int:
        """Bytes another rank may hold at once beyond the one with most state: it owns other tensors, and its offloaded
        state begins elsewhere on a page."""
        engine = self.engine
        owns = engine.plan.shards_optimizer and any(bucket.update.owners for bucket in engine.schedule.trained)
        pages = OPTIMIZER_WINDOWS if self._config.offload.optimizer != "device" and engine.world.size > 1 else 0
        return (self._mode.peak_nbytes // 100 if owns else 0) + PAGE_NBYTES * pages


def name_state(live: LiveMemory, engine: ZeroEngine) -> None:
    """Count the state of an engine as of its kind, once the engine has made a step."""
    for bucket in engine.schedule.buckets:
        weights = bucket.weights
        live.name("gathered" if engine.plan.shards_parameters else "parameters", weights.model_weight.tensor)
        if not weights.home.moves:
            live.name("parameters", weights.held)
    for trained in engine.schedule.trained:
        live.name("gradients", trained.gradient.shard)
        if not trained.update.home.moves:
            copy = [trained.update.master_weight] if trained.update.has_copy else []
            average = [] if trained.update.average is None else [trained.update.average]
            live.name("optimizer", *copy, *average, *trained.update.state_tensors())
    live.name(SCRATCH, *engine.held.homes.windows)
    live.name(OTHERS, *engine.module.buffers())


def _rows(row: Any, num_rows: int) -> Any:
    """Repeat a batch of one to so many rows, as the model takes them. A large batch gets no values."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.ndim or tensor.shape[0] != 1:
            return tensor
        source = tensor.to(_META) if tensor.numel() * num_rows > MAX_KNOWN_NUMEL else tensor
        return source.repeat(num_rows, *[1] * (tensor.ndim - 1))

    return as_inputs(with_tensors(row, repeated))
