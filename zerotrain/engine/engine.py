"""The engine: one object for a training, its steps and what comes between them."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import torch

from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine import optimizer_step, results, step, usage
from zerotrain.engine.groups.optimizers import OptimizerFactory
from zerotrain.engine.model.deferred import InitialValues, deferred_init
from zerotrain.engine.model.forward import makes_memory, outside_graphs, replace_forwards
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.sharded_model import Average, HalfLoaded, ShardedModel
from zerotrain.engine.state import from_buckets, from_checkpoint, from_weights
from zerotrain.engine.state.fill import fill
from zerotrain.engine.state.named import full_state_dict, weights_sha256
from zerotrain.engine.state.save import SaveArguments, SaveUnderWay, facts_of, prepare
from zerotrain.engine.state.together import agreed, failing_together
from zerotrain.errors import CommError, ConfigError, EngineStateError
from zerotrain.settings import EngineConfig
from zerotrain.sharding.plan import Plan


class ZeroEngine(step.Steps, usage.Usage):
    """Trains a model at a ZeRO stage.

    All ranks make the same calls in the same order. Gradients are the mean over ranks of the sum over the backwards
    since the last step; to accumulate, divide the loss, or give `backward` a weight, as with plain PyTorch.

    Args:
        held: the model, in buckets.
    """

    def __init__(self, held: ShardedModel) -> None:
        super().__init__(held, held.options.loss_scaler())
        self.module, self.world, self.precision = held.module, held.world, held.precision
        self.collectives, self.ledger = held.collectives, held.ledger

    # ---- what trains and where it lies

    @property
    def max_grad_norm(self) -> float | None:
        """The global L2 norm that gradients are clipped to, for good; None: they are not."""
        return self.held.options.config.max_grad_norm

    @makes_memory
    def freeze(self, *named: str | torch.nn.Parameter) -> None:
        """Let parameters train no more: only their weights in the compute precision are kept.

        Args:
            named: names, patterns such as "blocks.0.*", or parameters; the same on all ranks, between two steps.

        Raises:
            ConfigError: one of them is nothing the model has, or nothing would be left to train.
            EngineStateError: gradients of a step are waiting.
        """
        self.held.change("engine.freeze", lambda: self.held.groups.freeze(named))

    @makes_memory
    def unfreeze(self, *named: str | torch.nn.Parameter) -> None:
        """Let frozen parameters train, in the group they have, as new to the optimizer. Otherwise as `freeze`."""
        self.held.change("engine.unfreeze", lambda: self.held.groups.unfreeze(named))

    @makes_memory
    def add_param_group(self, group: dict[str, Any]) -> None:
        """Let the frozen parameters of `group`, as in `build_engine`, train in a group of their own. As `unfreeze`."""
        self.held.change("engine.add_param_group", lambda: self.held.groups.add(group))

    @makes_memory
    def set_stage(self, stage: int) -> results.StageSwitch:
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
        held = self.held

        def plan() -> tuple[EngineOptions, dict[str, object]]:
            held.require_whole()
            options = held.options.at_stage(stage)
            from_buckets.described_state(held.schedule.buckets)  # raises where something of it cannot be moved
            return options, {"weights written in place, as a hash": optimizer_step.written_to(held.schedule.buckets)}

        options = held.between_steps("engine.set_stage", "the stage cannot change", plan, argument=repr(stage))
        if options.plan == held.options.plan:
            return results.StageSwitch(stage, sent_nbytes=0, theory_sent_nbytes=0)
        held.wait_until_save_ended()
        theory = self._switch_nbytes(options.plan)
        former_nbytes = held.ledger.outside_steps.sent_nbytes
        held.move_to(options)
        return results.StageSwitch(stage, held.ledger.outside_steps.sent_nbytes - former_nbytes, theory)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyperparameters; a schedule sets group["lr"] from group["initial_lr"]."""
        return self.held.groups.hyperparameters

    @property
    def schedule(self) -> Schedule:
        """Units and buckets, and where the model is among them. Another one after each change of what trains."""
        return self.held.schedule

    @property
    def options(self) -> EngineOptions:
        """All settings, as the stage of now has them."""
        return self.held.options

    @property
    def plan(self) -> Plan:
        """Placement of the model states: replicated or sharded."""
        return self.held.options.plan

    # ---- the average of weights

    @makes_memory
    def keep_average(self, *, decay: float = 0.999, every: int = 1, warmup: bool = True) -> None:
        """Keep an exponential moving average of the weights from here on: `step` updates it, `averaged` uses it, `save`
        and `load` have it too, so call this before `load`.

        Collective, between steps. Each rank keeps the average of its own elements of the update, in fp32, where the
        optimizer's state lies: 4P/N bytes at stages 1 to 3 and 4P at stage 0, for P elements on N ranks. Nothing is
        sent for it in a step. The first update copies the weights; later ones are
        `average.lerp_(weights, 1 - decay)`, as those of torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`. A
        skipped step updates nothing.

        Args:
            decay: at least 0 and below 1.
            every: steps from one update to the next.
            warmup: after t updates the decay is min(decay, (1 + t) / (10 + t)).

        Raises:
            ConfigError: a value that it cannot have, other values by rank, or the engine keeps an average already.
            EngineStateError: gradients of a step are waiting.
        """
        held = self.held

        def plan() -> tuple[Average, dict[str, object]]:
            if held.average is not None:
                raise ConfigError("engine.keep_average: the engine keeps an average already, and has room for one")
            average = Average(decay=decay, every=every, warmup=warmup)
            return average, {"decay": average.decay, "every": average.every, "warmup": warmup}

        held.average = held.between_steps("engine.keep_average", "an average cannot begin", plan)
        held.forget_graphs()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the engine computes with the average in place of the weights, and `full_state_dict` and
        `weights_sha256` are those of the average; frozen parameters and buffers are what they are. Afterwards the
        weights are back, bit for bit.

        Collective, between steps. Shards change places in memory, a few MiB at a time. Afterwards, as after a step,
        stages 1 and 2 gather the weights; so do they on entry. Nothing can be trained, saved or loaded inside.

        Raises:
            EngineStateError: there is no average, it is in use already, or gradients of a step are waiting.
        """
        held = self.held

        def plan() -> tuple[Average, dict[str, object]]:
            held.require_whole()
            if held.average is None:
                raise EngineStateError("engine.averaged: there is no average of weights; call engine.keep_average()")
            return held.average, {}

        average = held.between_steps("engine.averaged", "the average cannot be used", plan)
        if average.num_updates == 0:  # it is the weights
            yield
            return
        self._swap(average)
        try:
            yield
        except CommError:  # there is nobody to train with
            with held.breaks_if_it_fails("engine.averaged"):
                raise
        except BaseException:
            with suppress(Exception):  # the first cause is what the user reads
                self._swap(average, gathers=False)  # other ranks may be elsewhere: the next forward gathers
            raise
        self._swap(average)

    @makes_memory
    def _swap(self, average: Average, *, gathers: bool = True) -> None:
        schedule = self.held.schedule
        with self.held.breaks_if_it_fails("engine.averaged"):
            if gathers:
                schedule.gathers.prepare_updated(schedule.trained)
            for bucket in schedule.trained:
                bucket.weights.finish_gather()
                bucket.update.swap_average()
                bucket.forget()
                if gathers:
                    schedule.gathers.gather_updated(bucket)
            schedule.end_update()
        self.held.weights_changed()
        average.is_in_use = not average.is_in_use

    # ---- in and out

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
            "step": self.stamps.num_steps,
            "skipped_in_a_row": self.optimizer_step.num_skipped_in_a_row,
            "average": None if self.held.average is None else {"num_updates": self.held.average.num_updates},
            "loss_scaler": None if self.loss_scaler is None else self.loss_scaler.state_dict(),
        }
        request = SaveArguments(
            path=path, extra=extra, config=config, own=own, staging_nbytes=staging_nbytes, progress=progress
        )

        def plan() -> tuple[None, dict[str, object]]:
            self.held.require_whole()
            return None, facts_of(request)

        self.held.between_steps("engine.save", "a checkpoint cannot be saved", plan)
        writing = prepare(request, self.held.holdings, self.held.settle_last_save)
        self.held.last_save = SaveUnderWay(writing)
        self.held.last_save.pause_s = time.perf_counter() - started_s
        return self.held.last_save

    def save(self, path: str | os.PathLike[str], *, extra: Any = None, config: Any = None, own: Any = None) -> Path:
        """`begin_save(...).wait()`: needs some MiB beside what the run holds.

        Returns:
            The folder, absolute.
        """
        return self.begin_save(path, extra=extra, config=config, own=own).wait()

    @outside_graphs
    def load(self, path: str | os.PathLike[str]) -> Any:
        """Take up a checkpoint of this model and this optimizer, saved at any stage and on any number of ranks. It
        waits for a save under way.

        Collective, between steps; needs some MiB beside what the run holds, but where the checkpoint trains other
        parameters than the engine. Every block is verified before anything changes, and again as it is read. With as
        many virtual ranks and the same data, training goes on to the bits of the saving run.

        Returns:
            The `extra` it was saved with.

        Raises:
            CheckpointError: on every rank; it is damaged, of an unknown format, or of another model or optimizer.
                Nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """
        extra, dropped = take_up(self, path)
        if dropped is not None and self.held.world.rank == 0:
            warnings.warn(f"engine.load: {dropped}; call engine.keep_average() before", RuntimeWarning, stacklevel=3)
        return extra

    def own_of(self, path: str | os.PathLike[str]) -> Any:
        """The `own` that this rank gave to the save of a checkpoint; None if another number of ranks saved it, or none
        was given. Not collective.

        Raises:
            CheckpointError: there is no checkpoint, or its manifest is not what was written.
        """
        manifest, shards = read_manifest(Path(os.path.abspath(path))), self.held.world.shards
        own = manifest.content.get("own", [])
        return own[shards.rank] if len(own) == shards.size else None

    @makes_memory
    def load_weights(
        self, path: str | os.PathLike[str], *, strict: bool = True, averaged: bool = False
    ) -> results.LoadedWeights:
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
        self.held.wait_until_save_ended()
        with from_weights.checked_weights(path, self.held.holdings, strict=strict, averaged=averaged) as source:
            half, loaded = self.held.half_loaded, source.loaded
            failed_load = HalfLoaded(loaded.path, with_optimizer=half is not None and half.with_optimizer)
            with self.held.replaced(
                failed_load, mends=half is None or (loaded.is_whole and not failed_load.with_optimizer)
            ):
                fill(source, self.held.schedule.buckets, self.held.collectives)
            return loaded

    # ---- without files

    @makes_memory
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replace the model's weights and buffers by rank 0's; other ranks may give {}. Optimizer state
        stays. Collective, between steps; one bucket is whole meanwhile.

        Args:
            state: full tensors of any floating dtype by the names of the model's own `state_dict()`, such as
                `full_state_dict` gives; a tied parameter by any of its names.
            strict: False leaves what is missing as it is, and what is unknown out.

        Raises:
            ConfigError: names are missing or unknown, or shapes are others; nothing has changed then.
            EngineStateError: gradients of a step are waiting.
        """
        buckets, collectives = self.held.schedule.buckets, self.held.collectives

        def plan() -> tuple[from_weights.StateDict, dict[str, object]]:
            return from_weights.StateDict(self.held.module, buckets, collectives, state, strict=strict), {}

        source = self.held.between_steps("engine.load_state_dict", "weights cannot be loaded", plan)
        source.agree()
        fill(source, buckets, collectives)
        self.held.schedule.end_update()
        self.held.weights_changed()

    @makes_memory
    def full_state_dict(self) -> dict[str, Any]:
        """The model's `state_dict()` as in plain PyTorch, hooks and extra state included: full fp32 parameters on the
        CPU, on rank 0; {} elsewhere. Collective: all ranks call it.
        """
        buckets = agreed(self.held.collectives, "engine.full_state_dict", lambda: (self.held.schedule.buckets, {}))
        return full_state_dict(self.held.module, buckets, self.held.collectives)

    @makes_memory
    def weights_sha256(self) -> str:
        """SHA-256 over the full fp32 master weights in name order, the same on every rank. Collective."""
        buckets = agreed(self.held.collectives, "engine.weights_sha256", lambda: (self.held.schedule.buckets, {}))
        return weights_sha256(buckets, self.held.collectives)

    def _agreed_path(self, call: str, what: str, path: str | os.PathLike[str], **other: object) -> Path:
        """The path of all ranks, absolute, between two steps; a half loaded model may be loaded anew."""

        def plan() -> tuple[Path, dict[str, object]]:
            absolute = Path(os.path.abspath(path))
            return absolute, {"path": absolute} | other

        return self.held.between_steps(call, what, plan)

    # ---- the model

    def train(self) -> Self:
        """Put the model into training mode."""
        self.module.train()
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        self.module.eval()
        return self

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; all ranks call it. For loops of forwards of different length by rank."""
        return self.world.sum(torch.tensor(float(flag), device=self.world.device)).item() > 0

    def __reduce_ex__(self, _: Any) -> Any:
        raise EngineStateError(
            "an engine can be neither copied nor pickled, since it is a part of its process group: copy or pickle "
            "engine.module, or take what engine.full_state_dict() gives"
        )


@makes_memory
def take_up(engine: ZeroEngine, path: str | os.PathLike[str]) -> tuple[Any, str | None]:
    """Do as `ZeroEngine.load` does. Returns the `extra`; and a sentence about what of the checkpoint is dropped, if
    anything is."""
    folder = engine._agreed_path("engine.load", "a checkpoint cannot be loaded", path)
    engine.held.wait_until_save_ended()
    folder, manifest = from_checkpoint.verified_manifest(folder, engine.held.holdings)
    added = from_checkpoint.added_groups(manifest, engine.held.groups)
    places = {name: [saved.trains, saved.group, saved.generation] for name, saved in manifest.parameters.items()}

    def adopt() -> bool:
        """Let train what trains in the checkpoint, in the groups it has."""
        return bool(added or places != engine.held.groups.places) and engine.held.groups.adopt(places, added)

    engine.held.change("engine.load", adopt)
    with engine.held.replaced(HalfLoaded(folder, with_optimizer=True), mends=True):
        from_checkpoint.restore(folder, manifest, engine.held.holdings, averages=engine.held.average is not None)
    saved = manifest.content
    if engine.held.average is not None:
        engine.held.average.num_updates = manifest.num_average_updates
    engine.stamps.num_steps = int(saved["step"])
    engine.optimizer_step.num_skipped_in_a_row = saved["skipped_in_a_row"]
    if engine.loss_scaler is not None and saved["loss_scaler"] is not None:
        engine.loss_scaler.load_state_dict(saved["loss_scaler"])
    has_unkept = engine.held.average is None and manifest.num_average_updates > 0
    return saved["extra"], f"{folder} holds an average of weights, which is dropped" if has_unkept else None


@makes_memory
def assemble_engine(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    given: EngineConfig,
    *,
    optimizer: OptimizerFactory,
    world: World,
    decay_all: bool = True,
    param_groups: Sequence[dict[str, Any]] | None = None,
    compile: bool = False,
    activation_checkpointing: bool = False,
) -> ZeroEngine:
    """`zerotrain.build_engine` of checked values.

    Raises:
        ConfigError: the model or optimizer cannot be trained so.
    """
    options = EngineOptions.resolve(given, world)
    collectives = Collectives(world, ledger=Ledger(), ordered=options.ordered, overlap=options.zero.overlap)
    with failing_together(collectives, doing="building the engine", outcome="no rank has one"):
        initial = InitialValues()
        if not isinstance(model, torch.nn.Module):
            with world.device:  # where parameters are sharded, built without their memory
                model, initial = deferred_init(model) if options.plan.shards_parameters else (model(), initial)
        if options.config.precision.matmul is not None:
            from zerotrain.engine.model.fp8 import multiply_in_fp8  # few runs need it

            multiply_in_fp8(model, options.config.precision, units=options.zero.unit_patterns, device=world.device)
        replace_forwards(
            model,
            units=options.zero.unit_patterns,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            holds_values=device_of(world.device).holds_values,
        )
        held = ShardedModel(
            model,
            optimizer=optimizer,
            collectives=collectives,
            options=options,
            decay_all=decay_all,
            param_groups=param_groups,
            initial=initial,
        )
        held.recomputes = activation_checkpointing
    return ZeroEngine(held)
