"""Imported by each Python that is started with this folder in its path: arms launch.py and the ranks it starts."""

import os
import sys
from importlib.machinery import PathFinder

_LAST_IMPORTED = "zerotrain.launching.worker" if "RANK" in os.environ else "zerotrain.launching.task"
"""When that is there, so is all that is watched."""


class _Arming:
    """Finds that one module, and arms the process once it is executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != _LAST_IMPORTED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            from tests.chaos import places

            execute(module)
            places.arm()

        spec.loader.exec_module = exec_module
        return spec


if "ZEROTRAIN_CHAOS" in os.environ:
    sys.meta_path.insert(0, _Arming)
