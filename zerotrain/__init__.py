"""Train any nn.Module with ZeRO stages 0 to 3, one config value apart.

Names are loaded when first used, so that `import zerotrain` costs no import of torch.
"""

from importlib import import_module

TYPE_CHECKING = False  # typing's own would be imported from wherever the user is: see `zerotrain.files.kept_out`
if TYPE_CHECKING:
    from zerotrain import checkpoint as checkpoint
    from zerotrain.api import build_engine
    from zerotrain.comm.world import World
    from zerotrain.engine.engine import ZeroEngine
    from zerotrain.engine.groups.optimizers import MuonWithAdamW
    from zerotrain.engine.results import LoadedWeights, StepResult, TrainStepResult
    from zerotrain.errors import (
        CheckpointError,
        CommError,
        ConfigError,
        DisagreementError,
        EngineStateError,
        OffloadError,
        TrainingError,
        ZeroTrainError,
    )
    from zerotrain.settings import OffloadConfig, PrecisionConfig, ZeroConfig

_HOMES = {
    "CheckpointError": "zerotrain.errors",
    "CommError": "zerotrain.errors",
    "ConfigError": "zerotrain.errors",
    "DisagreementError": "zerotrain.errors",
    "EngineStateError": "zerotrain.errors",
    "LoadedWeights": "zerotrain.engine.results",
    "MuonWithAdamW": "zerotrain.engine.groups.optimizers",
    "OffloadConfig": "zerotrain.settings",
    "OffloadError": "zerotrain.errors",
    "PrecisionConfig": "zerotrain.settings",
    "StageSwitch": "zerotrain.engine.results",
    "StepResult": "zerotrain.engine.results",
    "TrainStepResult": "zerotrain.engine.results",
    "TrainingError": "zerotrain.errors",
    "World": "zerotrain.comm.world",
    "ZeroConfig": "zerotrain.settings",
    "ZeroEngine": "zerotrain.engine.engine",
    "ZeroTrainError": "zerotrain.errors",
    "build_engine": "zerotrain.api",
}

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "DisagreementError",
    "EngineStateError",
    "LoadedWeights",
    "MuonWithAdamW",
    "OffloadConfig",
    "OffloadError",
    "PrecisionConfig",
    "StageSwitch",
    "StepResult",
    "TrainStepResult",
    "TrainingError",
    "World",
    "ZeroConfig",
    "ZeroEngine",
    "ZeroTrainError",
    "build_engine",
]


def __getattr__(name: str) -> object:
    if name == "checkpoint":
        return import_module("zerotrain.checkpoint")
    if name not in _HOMES:
        raise AttributeError(f"module 'zerotrain' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
