import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import hydra
import pytest
from omegaconf import DictConfig

from zerotrain.config.compose import register_schema

CONFIG_DIR = Path(__file__).resolve().parents[3] / "conf"
register_schema()


@pytest.fixture
def compose() -> Iterator[Callable[[list[str]], DictConfig]]:
    """Composes the main config with overrides, as launch.py does."""
    with hydra.initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        yield lambda overrides: copy.deepcopy(composed(*overrides))


@functools.cache
def composed(*overrides: str) -> DictConfig:
    """What several tests compose, once."""
    return hydra.compose("train", list(overrides))
