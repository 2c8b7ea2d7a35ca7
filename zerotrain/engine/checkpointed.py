"""A model in buckets that is saved and loaded, together with how far its training has come."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.engine.agreement import StepStamps
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.precision.loss_scale import LossScaler
from zerotrain.engine.results import LoadedWeights
from zerotrain.engine.schedule.hooks import next_node
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.engine.state.owned import Holdings
from zerotrain.engine.state.restore import added_groups, fill, places_in, verified_manifest
from zerotrain.engine.state.save import save
from zerotrain.engine.state.start import checked_weights, take
from zerotrain.engine.update.optimizer_step import OptimizerStep
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
    _half_loaded: HalfLoaded | None = None
    """Left by a load that failed when it had begun to change the engine. Until another succeeds nothing is trained or
    saved: some elements are of one training, and some of another."""

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, config: Any = None) -> Path:
        """Write a checkpoint: master weights, optimizer state, groups, what trains, counts, loss scale, buffers.

        Collective, between steps; needs some MiB beside what the run holds. The folder appears when all of it is on
        the disk. Any number of ranks at any stage can `load` it. docs/checkpoints.md has the format.

        Args:
            path: of a folder that is not there yet, which all ranks reach, such as checkpoints/step-00000100.
            extra: what else the loop needs, the same on all ranks: what JSON can hold.
            config: likewise, of which the manifest gets a hash too.

        Returns:
            The folder, absolute.

        Raises:
            ConfigError: `extra` or `config` is nothing for JSON.
            CheckpointError: it could not be written, or something has its name. Nothing is left under that, and
                training can go on.
            EngineStateError: gradients of a step are waiting, or the optimizer keeps what cannot be saved.
        """
        self._require_between_steps("a checkpoint cannot be saved")
        progress = {
            "step": self.stamps.num_steps,
            "skipped_in_a_row": self._optimizer_step.skipped_steps.num_in_a_row,
            "loss_scaler": None if self.loss_scaler is None else self.loss_scaler.state_dict(),
        }
        return save(path, self._holdings, progress, extra=extra, config=config)

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Take up a checkpoint of this model and this optimizer, saved at any stage and on any number of ranks.

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
        self._require_between_steps("a checkpoint cannot be loaded", whole=False)
        folder, manifest = verified_manifest(path, self._holdings)
        self._adopt(manifest)
        with self._replaced(HalfLoaded(folder, with_optimizer=True), mends=True):
            fill(folder, manifest, self._holdings)
        saved = manifest.content
        self.stamps.num_steps = manifest.step
        self._optimizer_step.skipped_steps.num_in_a_row = saved["skipped_in_a_row"]
        if self.loss_scaler is not None and saved["loss_scaler"] is not None:
            self.loss_scaler.load_state_dict(saved["loss_scaler"])
        return saved["extra"]

    def load_weights(self, path: str | os.PathLike[str], *, strict: bool = True) -> LoadedWeights:
        """Take weights and buffers alone from a file, as `model.load_state_dict` does; the optimizer's state, counts
        and groups stay what they are.

        Collective, between steps, before training or after. Each rank reads the elements it holds: some MiB are needed
        beside what the run holds. Master weights get the file's numbers in fp32.

        Args:
            path: a safetensors file; a folder with model.safetensors or model.safetensors.index.json, as Hugging Face
                has them; a checkpoint; a run's folder, for its newest checkpoint. All ranks must reach it.
            strict: False takes what fits by name and shape, and tells what did not.

        Raises:
            CheckpointError: on every rank; it cannot be read, or does not fit. Nothing has changed then.
            ConfigError: the ranks were given different paths.
            EngineStateError: gradients of a step are waiting.
        """
        self._require_between_steps("weights cannot be loaded", whole=False)
        with checked_weights(path, self._holdings, strict=strict) as checked:
            half, loaded = self._half_loaded, checked.loaded
            left = HalfLoaded(loaded.path, with_optimizer=half is not None and half.with_optimizer)
            with self._replaced(left, mends=half is None or (loaded.is_whole and not left.with_optimizer)):
                take(checked, self._holdings)
            return loaded

    @property
    def _holdings(self) -> Holdings:
        """Other buckets after each change of what trains."""
        return Holdings(self.module, self.schedule.buckets, self._groups, self.options, self.collectives)

    def _adopt(self, manifest: Manifest) -> None:
        """Let train what trains in a checkpoint, in the groups it has."""
        places, added = places_in(manifest), added_groups(manifest, self._groups)
        if added or places != self._groups.places:
            self._change(lambda: self._groups.adopt(places, added))

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

    def _require_whole(self) -> None:
        if self._half_loaded is not None:
            raise EngineStateError(
                f"loading {self._half_loaded.path} failed in its midst, and the engine holds a part of it: load one "
                "that can be read before anything else"
            )

    def _require_between_steps(self, what: str, *, whole: bool = True) -> None:
        if whole:
            self._require_whole()
        if self.schedule.phase is not Phase.IDLE:
            raise EngineStateError(f"{what} in the midst of a {self.schedule.phase.value}; call it between two steps")
        self._require_no_gradient(what)
