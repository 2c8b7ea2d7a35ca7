"""launch.py without a clone: `zerotrain zero.stage=3`, `torchrun -m zerotrain`; `--config-dir` adds yamls."""

import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.launching.imports import importing

with importing():
    import hydra
    from omegaconf import DictConfig

    from zerotrain.commands.frame import program
    from zerotrain.config.checks import checked_config
    from zerotrain.config.compose import register_schema
    from zerotrain.config.explain import composition_problems
    from zerotrain.config.schema import Config
    from zerotrain.errors import ConfigError
    from zerotrain.launching.command import composing, dispatch

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next((folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir()), _PACKAGE / "conf")
"""Path of conf/: inside the package in a wheel, beside it in a clone."""

register_schema()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def train(composed: DictConfig) -> float | list[float] | None:
    """See launch.py."""
    with importing():  # imports torch
        from zerotrain.launching.task import run_job

    return run_job(composed)


def composed_config(settings: list[str], folders: Sequence[Path] = (CONF,)) -> Config:
    """The config of a command line; nothing is run.

    Args:
        folders: of yamls, in the order in which they are looked for.

    Raises:
        ConfigError: a line for each setting that is wrong.
    """
    with composing(folders) as compose:
        if problems := composition_problems(settings, compose, is_sweep=False, folders=folders):
            raise ConfigError(*problems)
        config, problems = checked_config(compose(settings))
    if problems:
        raise ConfigError(*problems)
    return config


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    sys.argv = [program(), *arguments]  # usage and help show the first
    dispatch(train, conf=CONF)
