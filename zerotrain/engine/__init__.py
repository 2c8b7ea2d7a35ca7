"""The sharded engine: buckets with a life, a schedule of what to gather and reduce next, and the facade around them.

Other rooms take the names here, and none from the folders `groups` and `model`. They are loaded when first used: who
needs the options of an engine needs no engine.
"""

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerotrain.engine.engine import ZeroEngine as ZeroEngine
    from zerotrain.engine.engine import assemble_engine as assemble_engine
    from zerotrain.engine.groups.hyperparameters import OF_THIS_MACHINE as OF_THIS_MACHINE
    from zerotrain.engine.groups.hyperparameters import Hyperparameters as Hyperparameters
    from zerotrain.engine.groups.hyperparameters import restored as restored
    from zerotrain.engine.groups.hyperparameters import saved_group as saved_group
    from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE as SAMPLE_SHAPE
    from zerotrain.engine.groups.optimizers import WHOLE as WHOLE
    from zerotrain.engine.groups.optimizers import MuonWithAdamW as MuonWithAdamW
    from zerotrain.engine.groups.optimizers import OptimizerFactory as OptimizerFactory
    from zerotrain.engine.groups.optimizers import build_optimizer as build_optimizer
    from zerotrain.engine.groups.optimizers import updates_whole as updates_whole
    from zerotrain.engine.groups.param_groups import ParamGroups as ParamGroups

_HOMES = {
    "engine": ["ZeroEngine", "assemble_engine"],
    "groups.hyperparameters": ["OF_THIS_MACHINE", "Hyperparameters", "restored", "saved_group"],
    "groups.optimizers": [
        *("SAMPLE_SHAPE", "WHOLE", "MuonWithAdamW", "OptimizerFactory", "build_optimizer", "updates_whole"),
    ],
    "groups.param_groups": ["ParamGroups"],
}


def __getattr__(name: str) -> object:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'zerotrain.engine' has no attribute {name!r}")
    return getattr(import_module(f"zerotrain.engine.{home}"), name)
