"""Keeps calls of the engine out of torch.compile's graphs and of inference mode."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
WHY = "an engine gathers, reduces and updates between graphs; compile units with build_engine(..., compile=True)"


def outside_graphs(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a call that a compiled function may make: its graph ends before, and another begins behind. (Seen: at
    stage 3 torch's compiler died of a parameter's class that had changed meanwhile.)"""
    outside: Callable[P, T] | None = None

    @wraps(method)
    def called(*given: P.args, **named: P.kwargs) -> T:
        nonlocal outside
        if outside is None:
            # Only once something else has imported the compiler, which takes 2 s: before, nothing can be compiled.
            if "torch._dynamo" not in sys.modules:
                return method(*given, **named)
            outside = torch.compiler.disable(method, reason=WHY)
        return outside(*given, **named)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable marks
    called._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return called


def makes_memory(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a call that makes memory that lasts: what is made within torch.inference_mode() can be neither trained
    nor written to outside of it, and users call the engine from their evaluation too. Outside graphs as well."""
    return outside_graphs(torch.inference_mode(False)(method))
