"""launch.py without a clone: `python -m zerotrain zero.stage=3`, `torchrun -m zerotrain`; `--config-dir` adds yamls."""

import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.launching.imports import importing

with importing():
    import hydra
    from omegaconf import DictConfig

    from zerotrain.config.compose import register_schema
    from zerotrain.launching.command import dispatch

_PACKAGE = Path(__file__).resolve().parents[1]
CONF = next((folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir()), _PACKAGE / "conf")
"""There is one: in a wheel inside the package, in a clone beside it."""

register_schema()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def train(composed: DictConfig) -> float | list[float] | None:
    """See launch.py."""
    with importing():  # imports torch
        from zerotrain.launching.task import run_job

    return run_job(composed)


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    sys.argv = ["python -m zerotrain", *arguments]  # usage and help show the first
    dispatch(train, conf=CONF)
