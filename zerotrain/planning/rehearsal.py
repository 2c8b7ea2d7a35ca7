"""One step of a run at a stage, rehearsed: its own engine and model, without memory, without values, without ranks."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.comm.world import Shards, World
from zerotrain.config.schema import Config
from zerotrain.data.fetch import as_inputs, with_tensors
from zerotrain.device.kinds import rehearsing
from zerotrain.engine.buckets.home import OPTIMIZER_WINDOWS, Homes
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.groups.optimizers import OptimizerFactory
from zerotrain.engine.optimizer_step import update_all
from zerotrain.errors import ConfigError
from zerotrain.offload.tier import PAGE_NBYTES
from zerotrain.planning.live import OTHERS, SCRATCH, LiveMemory
from zerotrain.planning.optimizer import RehearsedFactory, Seen
from zerotrain.planning.unreal import Unreal, attention_of, nothing_known
from zerotrain.planning.wire import Links
from zerotrain.run.factory import averages_in, build_engine_of, build_on_meta

MAX_MICRO_BATCHES = 2
"""A virtual rank rehearses no more: each further one is like the second."""
SMALL_NBYTES = 4096
"""Small numbers take these: a step leaves them to the next, such as sums for the norm, or ranks tell each other. Twice
as much where another rank may be late."""
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Bytes of the rank that holds most, with all padding."""

    parameters: int
    """At rest on the device, in the compute precision."""
    gradients: int
    optimizer: int
    """State of the optimizer, and fp32 master weights that are copies."""
    gathered: int
    """Other ranks' shards at the peak: units that are complete, and those that are gathered ahead."""
    scratch: int
    """Used again from step to step, at the peak: on the wire, sums, windows of what is offloaded."""
    sums: int
    """The part of `scratch` that sums of micro-batches and virtual ranks take."""
    activations: int | None
    """Tensors that the forward of a micro-batch saves, or that live for a moment, at the peak; None: unknown."""
    peak: int | None
    """All tensors on the device, when they are most."""
    peak_phase: str | None
    """The part of a step in which that is."""
    host: int
    disk: int
    saved: int
    """The part of `host` and `disk` that a forward saves for its backward, when it is most."""
    sent: int | None
    """To other ranks, in a step."""
    fetched: int
    """From host and disk, in a step."""
    stored: int
    largest_unit: int
    unknown_because: str | None
    """The operation that cannot be followed without values."""
    recomputes: bool
    """Whether units are computed again in the backward."""

    @property
    def at_least(self) -> int:
        """Bytes on the device that are certain."""
        return self.peak or self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True)
class Rehearsals:
    """A run without memory: its own engine is built for a stage, and makes a step. An evaluation has as many rows, and
    saves nothing."""

    config: Config
    links: Links
    row: Any
    """A batch of one."""
    optimizer: OptimizerFactory
    seen: Seen | None
    """This tells what `optimizer` keeps and takes."""
    run_dir: Path
    """For what is offloaded; nothing is written there."""

    @classmethod
    def of(
        cls, config: Config, links: Links, row: Any, optimizer: OptimizerFactory, seen: Seen | None, run_dir: Path
    ) -> "Rehearsals":
        """Take a run's config, without compiled units."""
        config = replace(config, model=config.model | {"compile": False})
        return cls(config, links, row, optimizer, seen, run_dir)

    def plan(self, stage: int) -> StagePlan:
        """The plan of a stage: of the rank that holds most.

        Raises:
            ConfigError: the model or the optimizer cannot be trained so, or the model cannot be built without memory.
        """
        rank = 0
        while True:
            mode = Unreal()
            with self._without_memory(mode):
                engine = self._engine(mode, stage, rank, _model(self.config))
                if (busiest := _busiest(engine)) == rank:
                    return _Rehearsal(mode, engine, self.config, self.row).plan()
            rank = busiest

    @contextmanager
    def _without_memory(self, mode: Unreal) -> Iterator[None]:
        links = self.links
        with mode, rehearsing(on_host=links.on_host), attention_of(on_host=links.on_host):
            yield

    def _engine(self, mode: Unreal, stage: int, rank: int, model: nn.Module) -> ZeroEngine:
        links = self.links

        def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
            memory = torch.zeros(numel, dtype=dtype, device=_META)
            mode.name(SCRATCH, memory)
            return memory

        wire = links.wire(scratch)
        shards = Shards(rank, links.num_ranks, make_wire=lambda _: wire)
        world = World(rank, links.num_ranks, rank, _META, shards=shards)
        factory = RehearsedFactory(self.optimizer, self.seen)
        engine = build_engine_of(self.config, world, stage, self.run_dir, model=model, optimizer=factory)
        if averages_in(self.config):  # which is as large with any settings
            engine.keep_average()
        return engine


def _model(config: Config) -> nn.Module:
    model = build_on_meta(config)
    if model is None:
        raise ConfigError(
            f"model._target_: got {config.model.get('_target_')}, whose constructor computes with values; a plan "
            "builds the model without memory"
        )
    return model


def _busiest(engine: ZeroEngine) -> int:
    """The rank that keeps most of the optimizer's state. Only tensors that are updated whole, each by one rank, make
    ranks differ."""
    size, here, trained = engine.world.size, engine.world.rank, engine.schedule.trained
    if not engine.plan.shards_optimizer or not any(bucket.update.owners for bucket in trained):
        return here
    whole, by_elements = [0] * size, [0] * size
    for bucket in trained:
        slots, num_whole = bucket.layout.slots, len(bucket.update.owners)
        for slot, owner in zip(slots, bucket.update.owners, strict=False):
            whole[owner] += slot.numel
        first = slots[num_whole].offset if num_whole < len(slots) else bucket.layout.padded_numel
        for rank in range(size):
            shard = bucket.layout.shard(rank)
            by_elements[rank] += max(0, shard.stop - max(shard.start, first))
    state = engine.held.groups.state_nbytes
    kept = [state([whole[r]], is_whole=True) + state([by_elements[r]], is_whole=False) for r in range(size)]
    return here if kept[here] == max(kept) else kept.index(max(kept))


class _Rehearsal:
    """A step of an engine without memory."""

    def __init__(self, mode: Unreal, engine: ZeroEngine, config: Config, row: Any) -> None:
        self._mode, self._engine, self._config, self._row = mode, engine, config, row
        self._homes: Homes = engine.held.homes

    def plan(self) -> StagePlan:
        """Make it, and look."""
        engine, mode = self._engine, self._mode
        leaves, accumulated = len(engine.virtual_ranks), self._config.train.gradient_accumulation_steps
        with nothing_known(mode, 1.0):
            _make_state(engine)
        held = engine.memory_bytes()
        failed, num = None, leaves * min(accumulated, MAX_MICRO_BATCHES)
        rows = [_rows(self._row, self._config.train.micro_batch_size)] * num
        engine.train()
        try:
            if self._homes.tiers:  # whose windows are as large as they become from the second step on
                engine.train_step(rows)
            name_state(mode, engine)
            gc.collect()  # what the build has left in cycles would count until it is found
            mode.begin(engine)
            before = self._saved_moved()
            engine.train_step(rows)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            failed = mode.failed or f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        at_peak = {} if failed else mode.at_peak
        moved = [engine.held.usage.moved_nbytes(accumulated * leaves, where) for where in ("cpu", "disk")]
        if not failed:
            more = [now - then for now, then in zip(self._saved_moved(), before, strict=True)]
            moved.append((more[0] * leaves * accumulated // num, more[1] * leaves * accumulated // num))
        placed, saved = self._placed_nbytes()
        return StagePlan(
            parameters=held["parameters"],
            gradients=held["gradients"],
            optimizer=held["optimizer"],
            gathered=at_peak.get("gathered", 0),
            scratch=at_peak.get(SCRATCH, 0),
            sums=engine.sums_nbytes(accumulated),
            activations=None if failed else at_peak.get(OTHERS, 0),
            peak=None
            if failed
            else mode.peak_nbytes + self._others_nbytes() + SMALL_NBYTES * min(engine.world.size, 2),
            peak_phase=None if failed else mode.peak_phase,
            host=placed["cpu"],
            disk=placed["disk"],
            saved=saved,
            sent=None if failed else self._sent(num),
            fetched=sum(fetched for fetched, _ in moved),
            stored=sum(stored for _, stored in moved),
            largest_unit=max(_unit_nbytes(unit.buckets) for unit in engine.schedule.units),
            unknown_because=failed,
            recomputes=bool(self._config.model_switches["activation_checkpointing"]),
        )

    def _saved_moved(self) -> tuple[int, int]:
        """Bytes (fetched, stored) so far of what forwards save, in each micro-batch as much."""
        saved = self._homes.saved
        return (0, 0) if saved is None else (saved.fetched_nbytes, saved.stored_nbytes)

    def _placed_nbytes(self) -> tuple[dict[str, int], int]:
        """Bytes off the device by tier, at rest and of what forwards save when it was most; and the latter."""
        saved, placed = self._homes.saved, {"cpu": 0, "disk": 0}
        if saved is not None:
            saved.free_ended()
            placed[self._config.offload.activations] += saved.most_placed_nbytes
        for where, each in self._homes.off_device:
            placed[where] += each.placed_nbytes
        return placed, 0 if saved is None else saved.most_placed_nbytes

    def _others_nbytes(self) -> int:
        """So much more another rank may hold at once than the one that keeps most: it owns other tensors, and what it
        has offloaded begins elsewhere on a page."""
        owns = self._engine.plan.shards_optimizer and any(each.update.owners for each in self._engine.schedule.trained)
        pages = OPTIMIZER_WINDOWS if self._config.offload.optimizer != "device" and self._engine.world.size > 1 else 0
        return self._mode.peak_nbytes // 100 * owns + PAGE_NBYTES * pages

    def _sent(self, num_rehearsed: int) -> int:
        """Bytes sent in a step of all its micro-batches."""
        leaves, accumulated = len(self._engine.virtual_ranks), self._config.train.gradient_accumulation_steps
        theory = self._engine.theoretical_sent_nbytes
        more = theory(leaves * accumulated) - theory(num_rehearsed)
        return self._engine.ledger.last_step.sent_nbytes + more


def _make_state(engine: ZeroEngine) -> None:
    """Update with no gradient, so that all is there that a step finds which is not the first."""
    share = None if engine.held.average is None else 1.0
    update_all(engine.schedule.trained, engine.schedule.gathers, None, share)
    engine.schedule.end_update()


def name_state(live: LiveMemory, engine: ZeroEngine) -> None:
    """Let memory be counted as of the kind of state that it is, of an engine that has made a step."""
    for bucket in engine.schedule.buckets:
        weights = bucket.weights
        live.name("gathered" if engine.plan.shards_parameters else "parameters", weights.model_weight.tensor)
        if not weights.home.moves:
            live.name("parameters", weights.held)
    for trained in engine.schedule.trained:
        live.name("gradients", trained.gradient.shard)
        if not trained.update.home.moves:
            copy = [trained.update.master_weight] if trained.update.has_copy else []
            average = [] if trained.update.kept.average is None else [trained.update.kept.average]
            live.name("optimizer", *copy, *average, *trained.update.kept.state_tensors())
    live.name(SCRATCH, *engine.held.homes.windows)
    live.name(OTHERS, *engine.module.buffers())


def _rows(first: Any, num_rows: int) -> Any:
    """A batch of so many rows, as the model takes it, of a batch of one."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(num_rows, *[1] * (tensor.ndim - 1)) if tensor.ndim and tensor.shape[0] == 1 else tensor

    return as_inputs(with_tensors(first, repeated))


def _unit_nbytes(buckets: Sequence[Any]) -> int:
    return sum(bucket.layout.padded_numel * bucket.spec.dtype.itemsize for bucket in buckets)
