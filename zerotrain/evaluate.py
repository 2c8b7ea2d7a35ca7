"""`python -m zerotrain.evaluate RUN [SETTING=VALUE ...]`: the validation loss of a checkpoint, as the run had it."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from zerotrain.comm.world import World, choose_device
from zerotrain.config.checks import value_problems
from zerotrain.config.compose import first_line, from_values, known_keys
from zerotrain.config.schema import Config
from zerotrain.config.suggest import did_you_mean
from zerotrain.config.words import words_of_config
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.factory import build, build_collate, build_engine_of
from zerotrain.launching import exits
from zerotrain.saved_run import opened_run
from zerotrain.training.evaluation import RunEvaluation

EXAMPLES = """\
A run, of which the newest checkpoint is taken, or a checkpoint. One process; settings are those of the run but for what
is given, each by its whole name. With none, the loss is that of the run at this step, to the bit, on a CPU: its
launch.threads_per_rank is taken too.

  python -m zerotrain.evaluate outputs/2026-11-22/10-00-00
  python -m zerotrain.evaluate outputs/2026-11-22/10-00-00 data.path=other_texts train.eval_batches=100

Exit code 0; 2: an argument, or a checkpoint that is not what was written, one line a problem.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m zerotrain.evaluate",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="or a checkpoint")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="other than the run's")
    given = parser.parse_args(arguments)
    try:
        with words_of_config():
            step, loss, by_source = evaluate(given.path, given.settings)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return exits.CONFIG_PROBLEM
    except KeyboardInterrupt:
        return exits.of_signal(2)
    print(f"step {step}: validation loss {loss!r}")
    for name, of_source in by_source.items():
        print(f"  {name}: {of_source!r}")
    return exits.COMPLETED


def evaluate(path: str | os.PathLike[str], settings: Sequence[str] = ()) -> tuple[int, float, dict[str, float]]:
    """(step, validation loss, loss of each source of a mix) of a checkpoint, in this process.

    Args:
        path: of a checkpoint, or of a run, of which the newest is taken.
        settings: such as train.eval_batches=100, in place of those of the run.

    Raises:
        ConfigError: a setting is wrong, or the checkpoint is of no run from a config.
        CheckpointError: there is none, or it is not what was written.
    """
    with opened_run(path) as run:
        folder, step, config = run.path, run.saved.manifest.step, with_settings(run.require_config(), settings)
    config.train.virtual_ranks = None  # they share out the batches of training
    if config.launch.threads_per_rank is not None:
        torch.set_num_threads(config.launch.threads_per_rank)
    world = World(rank=0, size=1, local_rank=0, device=choose_device(config.launch.device, 0))
    engine = build_engine_of(config, world)
    engine.load_weights(folder)
    dataset = build("data", config.data_target)
    evaluation = RunEvaluation(
        Console(stderr=True),
        num_batches=config.train.eval_batches,
        engine=engine,
        world=world,
        dataset=dataset.validation,
        micro_batch_size=config.train.micro_batch_size,
        seed=config.seed,
        collate=build_collate(config),
    )
    return step, *evaluation.after(step)


def with_settings(config: Config, settings: Sequence[str]) -> Config:
    """A config with some settings changed.

    Raises:
        ConfigError: a line for each that is none, or has a value that it cannot have.
    """
    values = OmegaConf.create(asdict(config))
    known = known_keys(values)
    problems = []
    for each in settings:
        name, is_setting, _ = each.partition("=")
        if not is_setting or (name not in known and name.split(".")[0] not in ("model", "data")) or "." not in name:
            problems.append(f"{each}: is no setting with a value of this run{did_you_mean(name, known)}")
            continue
        try:
            values.merge_with_dotlist([each])
            from_values(values)
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(f"{each}: {first_line(error)}")
    if problems:
        raise ConfigError(*problems)
    changed = from_values(values)
    if wrong := value_problems(changed):
        raise ConfigError(*wrong)
    return changed


if __name__ == "__main__":
    sys.exit(main())
