"""The sharded engine: buckets with a life, a schedule of what to gather and reduce next, and the facade around them.

Other rooms take the names here, and none from the folders `groups` and `model`. They are loaded when first used: who
needs the options of an engine needs no engine.
"""
# ruff: noqa: F401, I001 -- the names are for others, and a line each is too many

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from zerotrain.engine.engine import ZeroEngine, assemble_engine
    from zerotrain.engine.groups.hyperparameters import OF_THIS_MACHINE, Hyperparameters, restored, saved_group
    from zerotrain.engine.groups.optimizers import SAMPLE_SHAPE, WHOLE, MuonWithAdamW, OptimizerFactory
    from zerotrain.engine.groups.optimizers import build_optimizer, updates_whole
    from zerotrain.engine.groups.param_groups import ParamGroups

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
