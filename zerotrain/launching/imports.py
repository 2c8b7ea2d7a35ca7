"""How a process of ours imports torch."""

import atexit
import functools
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from zerotrain.device.processes import no_threads_of_openblas

_NEEDED = ("torch", "hydra", "omegaconf", "numpy", "rich", "msgspec", "xxhash")
"""Nothing runs without these packages."""
_COMPILER = "torch._dynamo"
_NO_COMPILER = SimpleNamespace(
    config=SimpleNamespace(error_on_nested_fx_trace=True, patch=lambda **_: nullcontext()), disable=lambda hook: hook
)
"""A checkpoint asks the compiler for no more than this."""


@contextmanager
def importing() -> Iterator[None]:
    """Switches off the garbage collector, which scans all imports again and again and finds nothing: 0.7 of the 3.4 s
    that torch and its compiler take. It never scans objects that exist at the end. Ctrl-C ends the process with a line;
    so does the lack of a package that zerotrain needs, or of a part of torch. No library leaves threads: a process with
    threads cannot be forked.
    """
    gc.disable()
    num_modules = len(sys.modules)
    previous = signal.getsignal(signal.SIGINT)
    # A traceback of the imports says nothing, and C++ may make another error of it while it is loaded.
    heeds = previous is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if heeds:
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        with no_threads_of_openblas():
            yield
    except (ImportError, AttributeError) as error:
        module = error.name if isinstance(error, ImportError) else getattr(error.obj, "__name__", "")
        if isinstance(error, ModuleNotFoundError) and module in _NEEDED:
            print(
                f"{sys.executable} has no package {module}; in a clone, `make install` makes one that has it: "
                "`. .venv/bin/activate`; elsewhere, pip install zerotrain's wheel",
                file=sys.stderr,
            )
        elif (torch := sys.modules.get("torch")) and f"{module}.".startswith("torch."):
            print(
                f"torch {torch.__version__} of {sys.executable} is not one of 2.11 to 2.15, or is damaged: {error}; in "
                "a clone, `make install` makes a Python that has one: `. .venv/bin/activate`",
                file=sys.stderr,
            )
        else:
            raise
        sys.exit(2)
    finally:
        if heeds:
            signal.signal(signal.SIGINT, previous)
        if len(sys.modules) > num_modules:  # else garbage would stay: 0.8 MB of each job of a sweep
            gc.freeze()
            atexit.register(release_triton, os.getpid())
        gc.enable()
    if "torch" in sys.modules:
        leave_compiler_out_of_optimizers()
        leave_compiler_out_of_checkpoints()


def release_triton(owner: int) -> None:
    """Collect what was frozen, if triton is in it: triton prints 27 lines about leaks at the end of the process
    otherwise (that of torch 2.15, 2026-11-29). Takes 0.3 s of CPU. A fork ends without triton's clean-up."""
    if "triton" in sys.modules and gc.get_freeze_count() and os.getpid() == owner:
        gc.unfreeze()
        gc.collect()


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    os.write(2, b"stopped by Ctrl-C\n")
    os._exit(128 + signum)


def leave_compiler_out_of_optimizers() -> None:
    """Torch's optimizers import its compiler (torch._dynamo) when they are made and in each step, only to tell it what
    not to compile: of a run of two ranks and ten steps 3 of 18.7 s of CPU, of the peak of a rank 45 of 424 MB (torch
    2.13, 2026-11-22).

    Processes of zerotrain compile models, never an optimizer. A compilation itself imports the compiler.
    """
    import torch

    for owner in vars(torch.optim).values():
        if isinstance(owner, type):
            for name, method in _hidden_from_compiler(owner):
                plain: Callable[..., Any] = method.__wrapped__
                setattr(owner, name, _with_gradients_as_asked(plain) if name == "step" else plain)


def _hidden_from_compiler(owner: object) -> list[tuple[str, Any]]:
    """(name, function) of each function of a class or module with an import of the compiler in each call."""
    return [
        (name, method)
        for name, method in vars(owner).items()
        if isinstance(method, FunctionType) and _COMPILER in method.__code__.co_names
    ]


def _with_gradients_as_asked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's wrapper of a step, without the compiler's part."""
    import torch

    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **options: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **options)

    return wrapped


def leave_compiler_out_of_checkpoints() -> None:
    """So does torch's checkpoint of activations: 1 to 2 s of CPU and 71 MB of each rank, if units are computed again
    (torch 2.13, 2026-11-26). Once something else has imported the compiler, all is as it was."""
    import torch.utils.checkpoint as module

    for name, method in _hidden_from_compiler(module):
        setattr(module, name, _uncompiled(method))
    module.torch = _Torch("torch")


def _uncompiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The function without torch's wrapper, as long as there is no compiler."""
    plain: Callable[..., Any] = method.__wrapped__  # type: ignore[attr-defined]

    @functools.wraps(plain)
    def called(*args: Any, **options: Any) -> Any:
        return (method if _COMPILER in sys.modules else plain)(*args, **options)

    return called


class _Torch(ModuleType):
    """Torch, without a compiler as long as nothing has imported it."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return _NO_COMPILER if name == "_dynamo" and _COMPILER not in sys.modules else getattr(torch, name)
