"""Checkpoints and state dicts: a sharded model saved and loaded, together with how far its training has come."""

import os
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import Manifest, read_manifest
from zerotrain.engine.model.forward import makes_memory, outside_graphs
from zerotrain.engine.results import LoadedWeights
from zerotrain.engine.sharded_model import HalfLoaded, ShardedModel
from zerotrain.engine.state.fill import fill
from zerotrain.engine.state.from_checkpoint import added_groups, places_in, require_alike, restore, verified_manifest
from zerotrain.engine.state.from_weights import StateDict, checked_weights
from zerotrain.engine.state.named import full_state_dict, weights_sha256
from zerotrain.engine.state.save import Given, SaveUnderWay, facts_of, prepare
from zerotrain.engine.state.together import agreed
from zerotrain.engine.step import Steps


class Checkpoints:
    """Brings out what an engine holds, and in.

    Args:
        steps: how far the training has come.
    """

    def __init__(self, held: ShardedModel, steps: Steps) -> None:
        self._held, self._steps = held, steps

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
        can `load` it. docs/reference/checkpoint_format.md has the format. A thread reads what forward and backward
        leave as it is; an update first copies what is not written yet of its bucket. One save is under way at a time: a
        second call waits for the first.

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
            "step": self._steps.stamps.num_steps,
            "skipped_in_a_row": self._steps.optimizer_step.skipped_steps.num_in_a_row,
            "average": None if self._held.average is None else {"num_updates": self._held.average.num_updates},
            "loss_scaler": None if self._steps.loss_scaler is None else self._steps.loss_scaler.state_dict(),
        }
        given = Given(path=path, extra=extra, config=config, own=own, staging_nbytes=staging_nbytes, progress=progress)

        def plan() -> tuple[None, dict[str, object]]:
            self._held.require_whole()
            return None, facts_of(given)

        self._held.between_steps("engine.save", "a checkpoint cannot be saved", plan)
        writing = prepare(given, self._held.holdings, self._settle_last_save)
        self._held.last_save = SaveUnderWay(writing)
        self._held.last_save.pause_s = time.perf_counter() - started_s
        return self._held.last_save

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, config: Any = None, own: Any = None) -> Path:
        """`begin_save(...).wait()`: needs some MiB beside what the run holds.

        Returns:
            The folder, absolute.
        """
        return self.begin_save(path, extra=extra, config=config, own=own).wait()

    @outside_graphs
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
        extra, dropped = self.take_up(path)
        if dropped is not None and self._held.world.rank == 0:
            warnings.warn(f"engine.load: {dropped}; call engine.keep_average() before", RuntimeWarning, stacklevel=4)
        return extra

    @makes_memory
    def take_up(self, path: str | os.PathLike[str]) -> tuple[Any, str | None]:
        """Do as `load` does. Returns the `extra`; and a sentence about what of the checkpoint is dropped, if anything
        is."""
        folder = self._agreed_path("engine.load", "a checkpoint cannot be loaded", path)
        self._held.wait_until_save_ended()
        folder, manifest = verified_manifest(folder, self._held.holdings)
        self._adopt(manifest)
        require_alike(folder, manifest, self._held.holdings)
        with self._held.replaced(HalfLoaded(folder, with_optimizer=True), mends=True):
            restore(folder, manifest, self._held.holdings, averages=self._held.average is not None)
        saved = manifest.content
        if self._held.average is not None:
            self._held.average.num_updates = manifest.num_average_updates
        self._steps.stamps.num_steps = manifest.step
        self._steps.optimizer_step.skipped_steps.num_in_a_row = saved["skipped_in_a_row"]
        if self._steps.loss_scaler is not None and saved["loss_scaler"] is not None:
            self._steps.loss_scaler.load_state_dict(saved["loss_scaler"])
        has_unkept = self._held.average is None and manifest.num_average_updates > 0
        return saved["extra"], f"{folder} holds an average of weights, which is dropped" if has_unkept else None

    def own_of(self, path: str | os.PathLike[str]) -> Any:
        """The `own` that this rank gave to the save of a checkpoint; None if another number of ranks saved it, or none
        was given. Not collective.

        Raises:
            CheckpointError: there is no checkpoint, or its manifest is not what was written.
        """
        manifest, shards = read_manifest(Path(os.path.abspath(path))), self._held.world.shards
        own = manifest.content.get("own", [])
        return own[shards.rank] if len(own) == shards.size else None

    @makes_memory
    def load_weights(
        self, path: str | os.PathLike[str], *, strict: bool = True, averaged: bool = False
    ) -> LoadedWeights:
        """Take weights and buffers alone from a file, as `model.load_state_dict` does; the optimizer's state, counts
        and groups stay what they are.

        Collective, between steps, before training or after. Each rank reads the elements it holds: some MiB are needed
        beside what the run holds. Master weights get the file's numbers in fp32.

        Args:
            path: a file of safetensors or torch.save; a folder of Hugging Face or of torch.distributed.checkpoint; a
                checkpoint; a run's folder, for its newest checkpoint. All ranks must reach it. No code of it runs.
            strict: False takes what fits by name and shape, and tells what did not.
            averaged: take the average of weights that a checkpoint holds, see `keep_average`.

        Raises:
            CheckpointError: on every rank; it cannot be read, or does not fit. Nothing has changed then.
            ConfigError: the ranks were given different paths.
            EngineStateError: gradients of a step are waiting.
        """
        path = self._agreed_path(
            "engine.load_weights", "weights cannot be loaded", path, strict=strict, averaged=averaged
        )
        self._held.wait_until_save_ended()
        with checked_weights(path, self._held.holdings, strict=strict, averaged=averaged) as source:
            half, loaded = self._held.half_loaded, source.loaded
            left = HalfLoaded(loaded.path, with_optimizer=half is not None and half.with_optimizer)
            with self._held.replaced(left, mends=half is None or (loaded.is_whole and not left.with_optimizer)):
                fill(source, self._held.schedule.buckets, self._held.collectives)
            return loaded

    # ---- without files

    @makes_memory
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replace the model's weights and buffers by those that rank 0 gives; other ranks may give {}. Optimizer state
        stays. Collective, between steps; one bucket is whole meanwhile.

        Args:
            state: full tensors of any floating dtype by the names of the model's own `state_dict()`, such as
                `full_state_dict` gives; a tied parameter by any of its names.
            strict: False leaves what is missing as it is, and what is unknown out.

        Raises:
            ConfigError: names are missing or unknown, or shapes are others; nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """
        buckets, collectives = self._held.schedule.buckets, self._held.collectives

        def plan() -> tuple[StateDict, dict[str, object]]:
            return StateDict(self._held.module, buckets, collectives, state, strict=strict), {}

        source = self._held.between_steps("engine.load_state_dict", "weights cannot be loaded", plan)
        source.agree()
        fill(source, buckets, collectives)
        self._held.schedule.end_update()
        self._held.weights_changed()

    @makes_memory
    def full_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict()` as in plain PyTorch, hooks and extra state included: full fp32 parameters on the
        CPU, on rank 0; {} elsewhere. Collective: all ranks call it.
        """
        buckets = agreed(self._held.collectives, "engine.full_state_dict", lambda: (self._held.schedule.buckets, {}))
        return full_state_dict(self._held.module, buckets, self._held.collectives)

    @makes_memory
    def weights_sha256(self) -> str:
        """SHA-256 over the full fp32 master weights in name order, the same on every rank. Collective."""
        buckets = agreed(self._held.collectives, "engine.weights_sha256", lambda: (self._held.schedule.buckets, {}))
        return weights_sha256(buckets, self._held.collectives)

    def _adopt(self, manifest: Manifest) -> None:
        """Let train what trains in a checkpoint, in the groups it has."""
        places, added = places_in(manifest), added_groups(manifest, self._held.groups)

        def adopt() -> bool:
            return bool(added or places != self._held.groups.places) and self._held.groups.adopt(places, added)

        self._held.change("engine.load", adopt)

    def _agreed_path(self, call: str, what: str, path: str | os.PathLike[str], **other: object) -> Path:
        """A path that all ranks were given, absolute, between two steps; what is half loaded may be loaded anew."""
        return self._held.between_steps(
            call, what, lambda: ((named := Path(os.path.abspath(path))), {"path": named} | other)
        )

    def _settle_last_save(self) -> None:
        if (last := self._held.last_save) is not None:
            self._held.last_save = None
            last.settle()
