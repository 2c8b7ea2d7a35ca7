"""The steps of a run again: an engine of one rank goes from a checkpoint to any step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.config.schema import Config
from zerotrain.engine.results import TrainStepResult
from zerotrain.errors import ConfigError
from zerotrain.run.factory import RunSpec, build_trainer
from zerotrain.training.callbacks.stages import RunFreezing
from zerotrain.training.sameness import seed_leaf
from zerotrain.training.schedule import set_rates
from zerotrain.training.trainer import Trainer


@dataclass(kw_only=True)
class ReplayedSteps:
    """A run at one of its steps, on one rank. It writes nothing, logs nothing and evaluates nothing."""

    trainer: Trainer
    """It is never run: its parts are those of the run."""
    freezing: RunFreezing
    num_done: int
    """Steps done."""
    skipped: int
    """The skipped ones of them."""
    began_at: int
    """Steps done in its checkpoint; 0: the run's own beginning."""

    def train(self, until: int) -> Iterator[tuple[int, TrainStepResult]]:
        """Go on to a step; yield the number of each and what it came to."""
        trainer = self.trainer
        engine, feed = trainer.engine, trainer.feed
        feed.first_step = self.num_done
        with feed.loader(max(0, until - self.num_done)) as loader:
            while self.num_done < until:
                set_rates(engine.param_groups, trainer.schedule(self.num_done - self.skipped, trainer.max_steps))
                micro_batches, weights, _ = feed.next_step(loader)
                seed_each = partial(seed_leaf, trainer.seed, self.num_done)
                outcome = engine.train_step(micro_batches, weights=weights, before_each=seed_each)
                feed.step_done()
                self.skipped += outcome.skipped
                self.num_done += 1
                if self.num_done < trainer.max_steps:
                    self.freezing.be_at(self.num_done)
                yield self.num_done, outcome


def opened_steps(
    config: Config,
    world: World,
    checkpoints: Sequence[Path],
    folder: Path,
    console: Console,
    data: Mapping[str, Any] | None = None,
) -> ReplayedSteps:
    """A run of this config at the first whole one of some checkpoints; without any, at its first step.

    Args:
        folder: for what is offloaded to a disk.
        console: is told the checkpoint taken, and damaged ones.
        data: fingerprint of the run's data; None: not known.

    Raises:
        CheckpointError: there are checkpoints, and none can be taken.
        ConfigError: the config does not make a run, or the data is another.
    """
    if config.train.max_steps is None:
        raise ConfigError(
            "train.max_steps: is not noted by the run, and its schedule depends on it; give the checkpoint"
        )
    spec = RunSpec(config, folder, [], resume_from=list(map(str, checkpoints)), stage=0)
    trainer = build_trainer(spec, world, run_facts={}, console=console)
    # None: there is no checkpoint, and the run's first weights were taken up.
    resumed = trainer.checkpoints.resume()
    num_done, state = (0, {}) if resumed is None else (resumed.step, resumed.state)
    trainer.feed.first_step = num_done
    trainer.feed.agree(state.get("data"), None, like=data)
    if data is not None and (line := _other_data(data, trainer.feed.sampler.fingerprint or {})):
        raise ConfigError(line)
    freezing = RunFreezing(trainer.engine, console, trainer.frozen)
    freezing.load_state_dict(state)
    freezing.be_at(num_done)
    trainer.engine.train()
    skipped = state.get("skipped_steps", 0)
    return ReplayedSteps(trainer=trainer, freezing=freezing, num_done=num_done, skipped=skipped, began_at=num_done)


def of_replay(config: Config) -> Config:
    """A run's config on one rank at stage 0, without what saves, evaluates or watches. No gradient ends a replay."""
    config.zero.stage, config.zero.schedule = 0, None
    config.train = replace(config.train, on_nonfinite="skip", max_skipped_steps=2**31, verify_every=0)
    config.checkpoint = replace(
        type(config.checkpoint)(), init_from=config.checkpoint.init_from, strict=config.checkpoint.strict
    )
    config.offload, config.callbacks = type(config.offload)(), {}
    config.launch = replace(config.launch, nproc_per_node=1, max_restarts=0, overwrite=False)
    return config


def _other_data(run_data: Mapping[str, Any], own_data: Mapping[str, Any]) -> str | None:
    different = [
        f"{name.replace('_', ' ')}: {run_data.get(name)} in the run, {own_data.get(name)} here"
        for name in {**run_data, **own_data}
        if run_data.get(name) != own_data.get(name)
    ]
    advice = "give the run's data, with data.path=... where it has moved"
    return f"data: {'; '.join(different)}; {advice}" if different else None
