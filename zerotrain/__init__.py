"""Train any nn.Module with ZeRO stages 0 to 3, one config value apart.

Names are loaded when first used, so that `import zerotrain` costs no import of torch.
"""
# ruff: noqa: F401, I001 -- the names are for others, and a line for each of `errors` is too many

import sys
from importlib import import_module

from zerotrain.version import __version__ as __version__

if sys.version_info < (3, 11):  # noqa: UP036 -- a clone has no pip that would refuse
    print(f"zerotrain needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}", file=sys.stderr)
    sys.exit(2)

TYPE_CHECKING = False  # typing's own would be imported from wherever the user is: see `zerotrain.files.here_last`
if TYPE_CHECKING:
    from zerotrain import checkpoint as checkpoint
    from zerotrain.api import build_engine
    from zerotrain.comm.world import World
    from zerotrain.engine import MuonWithAdamW
    from zerotrain.engine.engine import ZeroEngine
    from zerotrain.engine.results import LoadedWeights, StageSwitch, StepResult, TrainStepResult
    from zerotrain.errors import CheckpointError, CommError, ConfigError, DisagreementError
    from zerotrain.errors import EngineStateError, OffloadError, TrainingError, ZeroTrainError
    from zerotrain.settings import OffloadConfig, PrecisionConfig, ZeroConfig

_HOMES = {
    "zerotrain.api": ["build_engine"],
    "zerotrain.comm.world": ["World"],
    "zerotrain.engine.engine": ["ZeroEngine"],
    "zerotrain.engine": ["MuonWithAdamW"],
    "zerotrain.engine.results": ["LoadedWeights", "StageSwitch", "StepResult", "TrainStepResult"],
    "zerotrain.settings": ["OffloadConfig", "PrecisionConfig", "ZeroConfig"],
    "zerotrain.errors": [
        *("CheckpointError", "CommError", "ConfigError", "DisagreementError", "EngineStateError", "OffloadError"),
        *("TrainingError", "ZeroTrainError"),
    ],
}
"""The modules that define the names."""

__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> object:
    if name == "checkpoint":
        return import_module("zerotrain.checkpoint")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'zerotrain' has no attribute {name!r}")
    return getattr(import_module(home), name)
