"""A model in buckets that is saved and loaded, together with how far its training has come."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import Manifest, read_manifest
from zerotrain.engine.agreement import StepStamps
from zerotrain.engine.model.engine_call import makes_memory
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.precision.loss_scale import LossScaler
from zerotrain.engine.results import LoadedWeights, StageSwitch
from zerotrain.engine.schedule.hooks import next_node
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.engine.state.fill import fill
from zerotrain.engine.state.owned import Holdings
from zerotrain.engine.state.saving.save import Given, facts_of, prepare
from zerotrain.engine.state.saving.under_way import SaveUnderWay
from zerotrain.engine.state.source import Source
from zerotrain.engine.state.sources.checkpoint import added_groups, places_in, require_alike, restore, verified_manifest
from zerotrain.engine.state.sources.files import checked_weights
from zerotrain.engine.state.sources.other_buckets import described_state
from zerotrain.engine.update.optimizer_step import OptimizerStep, written_to
from zerotrain.errors import EngineStateError


@dataclass(frozen=True)
class HalfLoaded:
    """Of what an engine holds a part."""

    path: Path
    with_optimizer: bool
    """Whether of the optimizer's state too, which no weights alone make whole."""


class CheckpointedModel(ShardedModel):
    """Adds `save`, `load` and `load_weights`. Whose steps are counted, `ZeroEngine` says."""

    loss_scaler: LossScaler | None
    stamps: StepStamps
    _optimizer_step: OptimizerStep
    _broken_off_by = ""
    """What has ended a backward or a step in its midst, and left a part of the gradient: Ctrl-C, mostly."""
    _half_loaded: HalfLoaded | None = None
    """Left by a load that failed when it had begun to change the engine. Until another succeeds nothing is trained or
    saved: some elements are of one training, and some of another."""

    _last_save: SaveUnderWay | None = None

    @makes_memory
    def begin_save(
        self,
        path: str | os.PathLike[str],
        *,
        extra: Any = None,
        config: Any = None,
        own: Any = None,
        staging_nbytes: int | None = None,
    ) -> SaveUnderWay:
        """Begin to write a checkpoint: master weights, optimizer state, groups, what trains, counts, loss scale,
        buffers, all as they are now. Training goes on beside it.

        Collective, between steps. The folder appears when all of it is on the disk. Any number of ranks at any stage
        can `load` it. docs/checkpoints.md has the format. A thread reads what forward and backward leave as it is; an
        update first copies what is not written yet of its bucket. One save is under way at a time: a second call waits
        for the first.

        Args:
            path: of a folder that is not there yet, which all ranks reach, such as checkpoints/step-00000100.
            extra: what else the loop needs, the same on all ranks: what JSON can hold.
            config: likewise, of which the manifest gets a hash too.
            own: what this rank alone needs, such as the states of its generators: what JSON can hold. See `own_of`.
            staging_nbytes: what copies may take at a time; where more is needed an update waits for the disk. Default:
                what this rank saves of its largest bucket.

        Returns:
            To be waited for: `wait()` gives the folder, or raises on all ranks what any of them has met.

        Raises:
            ConfigError: `extra`, `config` or `own` is nothing for JSON, or nested too deeply.
            CheckpointError: it cannot be written, or something has its name, or the save before has failed and nobody
                has asked. Nothing is left under that name, and training can go on.
            EngineStateError: gradients of a step are waiting, or the optimizer keeps what cannot be saved.
        """
        started_s = time.perf_counter()
        progress = {
            "step": self.stamps.num_steps,
            "skipped_in_a_row": self._optimizer_step.skipped_steps.num_in_a_row,
            "loss_scaler": None if self.loss_scaler is None else self.loss_scaler.state_dict(),
        }
        given = Given(path=path, extra=extra, config=config, own=own, staging_nbytes=staging_nbytes, progress=progress)

        def plan() -> tuple[None, dict[str, object]]:
            self._require_whole()
            return None, facts_of(given)

        self._between_steps("engine.save", "a checkpoint cannot be saved", plan)
        writing = prepare(given, self._holdings, self._settle_last_save)
        self._last_save = SaveUnderWay(writing)
        self._last_save.pause_s = time.perf_counter() - started_s
        return self._last_save

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, config: Any = None, own: Any = None) -> Path:
        """`begin_save(...).wait()`: needs some MiB beside what the run holds.

        Returns:
            The folder, absolute.
        """
        return self.begin_save(path, extra=extra, config=config, own=own).wait()

    @makes_memory
    def load(self, path: str | os.PathLike[str]) -> Any:
        """Take up a checkpoint of this model and this optimizer, saved at any stage and on any number of ranks. A save
        that is under way is waited for.

        Collective, between steps; needs some MiB beside what the run holds, but where the checkpoint trains other
        parameters than the engine. Every block is verified before anything changes, and again as it is read. With as
        many virtual ranks and the same data, training goes on to the bits of the run that saved.

        Returns:
            The `extra` it was saved with.

        Raises:
            CheckpointError: on every rank; it is damaged, of an unknown format, or of another model or optimizer.
                Nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """
        folder = self._agreed_path("engine.load", "a checkpoint cannot be loaded", path)
        self._wait_until_save_ended()
        folder, manifest = verified_manifest(folder, self._holdings)
        self._adopt(manifest)
        require_alike(folder, manifest, self._holdings)
        with self._replaced(HalfLoaded(folder, with_optimizer=True), mends=True):
            restore(folder, manifest, self._holdings)
        saved = manifest.content
        self.stamps.num_steps = manifest.step
        self._optimizer_step.skipped_steps.num_in_a_row = saved["skipped_in_a_row"]
        if self.loss_scaler is not None and saved["loss_scaler"] is not None:
            self.loss_scaler.load_state_dict(saved["loss_scaler"])
        return saved["extra"]

    def own_of(self, path: str | os.PathLike[str]) -> Any:
        """What this rank has given as `own` to the save of a checkpoint; None where another number of ranks saved it,
        or nothing was given. Not collective.

        Raises:
            CheckpointError: there is no checkpoint, or its manifest is not what was written.
        """
        manifest, shards = read_manifest(Path(os.path.abspath(path))), self.world.shards
        own = manifest.content.get("own", [])
        return own[shards.rank] if len(own) == shards.size else None

    @makes_memory
    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedWeights:
        """Take weights and buffers alone from a file, as `model.load_state_dict` does; the optimizer's state, counts
        and groups stay what they are.

        Collective, between steps, before training or after. Each rank reads the elements it holds: some MiB are needed
        beside what the run holds. Master weights get the file's numbers in fp32.

        Args:
            path: a file of safetensors or torch.save; a folder of Hugging Face or of torch.distributed.checkpoint; a
                checkpoint; a run's folder, for its newest checkpoint. All ranks must reach it. No code of it runs.
            strict: False takes what fits by name and shape, and tells what did not.

        Raises:
            CheckpointError: on every rank; it cannot be read, or does not fit. Nothing has changed then.
            ConfigError: the ranks were given different paths.
            EngineStateError: gradients of a step are waiting.
        """
        path = self._agreed_path("engine.load_weights", "weights cannot be loaded", path, strict=strict)
        self._wait_until_save_ended()
        with checked_weights(path, self._holdings, strict=strict) as source:
            half, loaded = self._half_loaded, source.loaded
            left = HalfLoaded(loaded.path, with_optimizer=half is not None and half.with_optimizer)
            with self._replaced(left, mends=half is None or (loaded.is_whole and not left.with_optimizer)):
                fill(source, self.schedule.buckets, self.collectives)
            return loaded

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
            self._require_whole()
            options = self.options.at_stage(stage)
            described_state(self.schedule.buckets)  # raises where something of it cannot be moved
            return options, {"weights written in place, as a hash": written_to(self.schedule.buckets)}

        options = self._between_steps("engine.set_stage", "the stage cannot change", plan, given=repr(stage))
        if options.plan == self.plan:
            return StageSwitch(stage, sent_nbytes=0, theory_sent_nbytes=0)
        self._wait_until_save_ended()
        return self._move_to(options)

    @property
    def _holdings(self) -> Holdings:
        """Other buckets after each change of what trains."""
        return Holdings(self.module, self.schedule.buckets, self._groups, self.options, self.collectives)

    def _adopt(self, manifest: Manifest) -> None:
        """Let train what trains in a checkpoint, in the groups it has."""
        places, added = places_in(manifest), added_groups(manifest, self._groups)

        def adopt() -> bool:
            return bool(added or places != self._groups.places) and self._groups.adopt(places, added)

        self._change("engine.load", adopt)

    def _cut_anew(self, source: Source) -> None:
        self._wait_until_saved()
        super()._cut_anew(source)

    def _agreed_path(self, call: str, what: str, path: str | os.PathLike[str], **other: object) -> Path:
        """A path that all ranks were given, absolute, between two steps; what is half loaded may be loaded anew."""
        return self._between_steps(
            call, what, lambda: ((named := Path(os.path.abspath(path))), {"path": named} | other)
        )

    def _wait_until_saved(self) -> None:
        """Wait until a save that is under way, if any, has read all there is."""
        if self._last_save is not None:
            self._last_save.wait_until_read()

    def _wait_until_save_ended(self) -> None:
        """Wait until its folder is there, or will never be: it may be what is to be loaded."""
        if self._last_save is not None:
            self._last_save.wait_until_ended()

    def _settle_last_save(self) -> None:
        if (last := self._last_save) is not None:
            self._last_save = None
            last.settle()

    @contextmanager
    def _replaced(self, left: HalfLoaded, *, mends: bool) -> Iterator[None]:
        """In here weights are replaced.

        Args:
            left: what the engine has a part of if that fails.
            mends: whether it is whole if that succeeds.
        """
        before, self._half_loaded = self._half_loaded, left
        self._first_node_after_update = next_node()
        yield
        self.schedule.end_update()
        self._first_node_after_update = next_node()
        self._half_loaded = None if mends else before

    def _require_usable(self) -> None:
        """Before a forward: nothing is there that a forward cannot use."""
        self._newcomers.require_none()
        self._require_whole()
        self._require_unbroken()

    def _require_unbroken(self) -> None:
        if self._broken_off_by:
            raise EngineStateError(
                f"{self._broken_off_by} ended a backward or a step in its midst, and a part of its gradient is left: "
                "call engine.zero_grad() on all ranks before anything else"
            )

    def _require_whole(self) -> None:
        if self._half_loaded is not None:
            raise EngineStateError(
                f"loading {self._half_loaded.path} failed in its midst, and the engine holds a part of it: load one "
                "that can be read before anything else"
            )
