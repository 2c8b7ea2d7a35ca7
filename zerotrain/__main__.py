"""launch.py without a clone: `python -m zerotrain zero.stage=3`, `torchrun -m zerotrain`; `--config-dir` adds yamls."""

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from zerotrain.config.compose import register_schema
from zerotrain.launching.dispatch import dispatch
from zerotrain.launching.imports import importing

_PACKAGE = Path(__file__).resolve().parent
CONF = next((folder for folder in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if folder.is_dir()), _PACKAGE / "conf")
"""There is one: in a wheel inside the package, in a clone beside it."""

register_schema()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def main(composed: DictConfig) -> float:
    """See launch.py."""
    with importing():  # imports torch
        from zerotrain.launching.task import run_job

    return run_job(composed)


if __name__ == "__main__":
    sys.argv[0] = "python -m zerotrain"  # which is what usage and help shall show
    dispatch(main, conf=CONF)
