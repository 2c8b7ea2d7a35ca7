"""Calls of a model while it trains: its units compiled or computed again, hooks on it, and names for a profiler.

A unit's `forward` is replaced, and its hooks stay where they are, around `__call__`: they gather and free parameters
outside the compiled graph. A recomputation happens within the unit's backward: its hook has gathered them.
"""

import copy
import functools
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd import profiler
from torch.utils import checkpoint as checkpoints

from zerotrain.engine.model.precision import WideArguments, one_dtype_at_entry
from zerotrain.errors import ConfigError, argument
from zerotrain.offload.saved import SavedTensors
from zerotrain.sharding.units import WalkedModel, find_units, walk

# Keeps calls of the engine out of torch.compile's graphs and of inference mode.


P = ParamSpec("P")
T = TypeVar("T")
WHY = "an engine gathers, reduces and updates between graphs; compile units with build_engine(..., compile=True)"


def outside_graphs(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a call for compiled functions: their graph ends before, and another begins behind. (Seen: at
    stage 3 torch's compiler died of a parameter's class that had changed meanwhile.)"""
    outside: Callable[P, T] | None = None

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal outside
        if outside is None:
            # Only once something else has imported the compiler, which takes 2 s: before, nothing can be compiled.
            if "torch._dynamo" not in sys.modules:
                return method(*args, **kwargs)
            outside = torch.compiler.disable(method, reason=WHY)
        return outside(*args, **kwargs)

    called._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable marks
    called._torchdynamo_disable_msg = WHY  # type: ignore[attr-defined]
    return called


def makes_memory(method: Callable[P, T]) -> Callable[P, T]:
    """Decorates a call with lasting memory: what is made within torch.inference_mode() can be neither trained
    nor written to outside of it, and users call the engine from their evaluation too. Outside graphs as well."""
    return outside_graphs(torch.inference_mode(False)(method))


# A hook on a module of the model, left behind when the module is copied, pickled or compiled.


class ModuleHook:
    """Calls `call` with what PyTorch gives to a hook.

    A copy of the module has `no_hook` in its place: with a copy of this one it would tell the engine's schedule of
    its own forwards (seen: `deepcopy` of a model copied buckets and process groups, or failed at them). torch.compile
    of the whole model calls it between its graphs.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    @outside_graphs
    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> Any:
        return functools.partial, (no_hook,)


def no_hook(*_: Any) -> None:
    """Does nothing."""


# Names for what a profiler shows, and a clock counts: the unit or bucket, and what is done with it.


_UNNAMED = nullcontext()
clock: Callable[[str], AbstractContextManager[object]] | None = None
"""Measures ranges by action, in place of a profiler: see `benchmarks.split`."""


def named_range(action: str, owner: str) -> AbstractContextManager[object]:
    """A range of the trace called "action owner", such as "gather blocks.0", while a profiler runs.

    Without a profiler it costs 0.3 microseconds. torch's `record_function` costs 6 also when nobody records, and a step
    of 100 buckets has up to 800 ranges.
    """
    if clock is not None:
        return clock(action)
    return profiler.record_function(f"{action} {owner}") if profiler._is_profiler_enabled else _UNNAMED


Forward = Callable[..., Any]
_Buffers = dict[str, torch.Tensor | None]


def replace_forwards(
    model: torch.nn.Module,
    *,
    units: Sequence[str] | None,
    compile: bool,
    activation_checkpointing: bool,
    holds_values: bool = True,
) -> None:
    """Compile the forward of each unit of `model`, or drop its activations and compute them again in the backward.

    A loss that is a module, as those of torch.nn are, is compiled with the units: of GPT-2 on an H200 its operations
    take a fifth of a step where each is a kernel, and the most memory of all.

    Forwards without gradients stay as they are. They have nothing to drop, and come in ever new shapes (the text of a
    sample grows with each token), each of which would be compiled anew.

    Args:
        units: module name patterns; None: the repeated blocks.
        holds_values: False: of a model without memory nothing is compiled, and all is checked.

    Raises:
        ConfigError: the model has no units, or this machine lacks what torch.compile needs.
    """
    if not (compile or activation_checkpointing):
        return
    setting = "compile" if compile else "activation_checkpointing"
    modules = require_units(walk(model), units, argument(setting, True))
    if compile:
        require_compiler()
    compiles = compile and holds_values
    if compiles:
        for loss in [module for module in model.modules() if isinstance(module, torch.nn.modules.loss._Loss)]:
            compiled = one_dtype_at_entry(torch.compile(loss.forward), WideArguments.widened)
            loss.forward = _UnitForward(compiled, loss.forward)
    for name, module in modules.items():
        trained = module.forward
        if compiles:
            trained = one_dtype_at_entry(torch.compile(module.forward), WideArguments.rounded)
        if activation_checkpointing:
            trained = _checkpointed(trained, name, module)
        module.forward = _UnitForward(trained, module.forward)


def offload_saved(
    walked: WalkedModel, units: Sequence[str] | None, saved: SavedTensors, where: str
) -> Callable[[], None]:
    """Offload the saved tensors of the forward of each unit of a model.

    Args:
        units: as for `replace_forwards`, which comes before.
        where: as in the settings.

    Returns:
        A function that restores the units' forwards.

    Raises:
        ConfigError: the model has no units.
    """

    def keeping(forward: Forward) -> Forward:
        def call(*inputs: Any, **named_inputs: Any) -> Any:
            with saved.call():
                return forward(*inputs, **named_inputs)

        uncompiled: Forward = torch.compiler.disable(call, recursive=False)  # what it calls may be compiled
        return uncompiled

    modules = require_units(walked, units, f"offload.activations={where}").values()
    changed = []
    for module in modules:
        former = module.__dict__.get("forward")
        module.forward = _UnitForward(keeping(module.forward), module.forward)
        changed.append((module, former, module.forward))

    def restore() -> None:
        for module, former, ours in changed:
            if module.__dict__.get("forward") is ours:
                del module.forward
                if former is not None:
                    module.forward = former

    return restore


def round_at_entry(walked: WalkedModel, dtypes: Mapping[torch.nn.Parameter, torch.dtype]) -> None:
    """Round the floating-point inputs of modules of torch with weights of 16 bits that compare dtypes themselves, or
    that look for modes such as `WideArguments` and would compute otherwise.

    Args:
        dtypes: what each parameter is held in.
    """
    in_16_bits = {parameter for parameter, dtype in dtypes.items() if dtype.itemsize == 2}
    kinds = (
        torch.nn.RNNBase | torch.nn.MultiheadAttention | torch.nn.TransformerEncoder | torch.nn.TransformerEncoderLayer
    )
    modules: list[torch.nn.Module] = [module for module in walked.modules.values() if isinstance(module, kinds)]
    for module in modules:
        if not in_16_bits.isdisjoint(module.parameters()):
            rounding = one_dtype_at_entry(module.forward, WideArguments.rounded)
            module.forward = _UnitForward(rounding, module.forward, without_graph=rounding)


def require_units(walked: WalkedModel, units: Sequence[str] | None, setting: str) -> dict[str, torch.nn.Module]:
    """The units of a model by name.

    Args:
        setting: that works on them alone, with its value.

    Raises:
        ConfigError: it has none.
    """
    modules = find_units(walked, units)
    if not modules:
        raise ConfigError(
            f"{setting}: works unit by unit, and {type(walked.model).__name__} has no repeated blocks; name its units "
            "with zero.units, or leave it out"
        )
    return modules


_CACHES = {"past_key_values", "layer_past", "cache_params"}
"""Arguments of the layers of Hugging Face: a forward adds its keys and values, or its state. Without an error a second
one could also compute with twice the keys."""


def _checkpointed(forward: Forward, name: str, unit: torch.nn.Module) -> Forward:
    owners = list(unit.modules())

    def contexts() -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        buffers = _BuffersBefore(owners, name)
        return buffers.copied(), buffers

    # Taken now: processes of zerotrain replace it once torch is imported.
    checkpointed = functools.partial(
        checkpoints.checkpoint, forward, use_reentrant=False, preserve_rng_state=True, context_fn=contexts
    )

    def call(*inputs: Any, **named_inputs: Any) -> Any:
        for cache in _CACHES & named_inputs.keys():
            if named_inputs[cache] is not None:
                setting = argument("activation_checkpointing", True)
                raise ConfigError(
                    f"{setting}: {name} got {cache}, which its forward would fill again in the backward; build the "
                    f"model with config.use_cache=False, or leave {setting} out"
                )
        return checkpointed(*inputs, **named_inputs)

    return call


class _BuffersBefore:
    """The buffers of a unit as they were before a forward, such as the statistics of a batch norm: the context of its
    recomputations. They read and write copies. So they compute what the forward did, and each buffer is updated once.

    Args:
        owners: the modules that may have them.
        name: of the unit.
    """

    def __init__(self, owners: Sequence[torch.nn.Module], name: str) -> None:
        self._owners, self._name = owners, name
        self._entered: list[AbstractContextManager[None]] = []
        self._before: list[tuple[_Buffers, _Buffers]] = []
        """(the buffers of a module, those before), with copies in the places of those that were updated."""
        self._copies: set[torch.Tensor] = set()

    @contextmanager
    def copied(self) -> Iterator[None]:
        snapshots = [(owner._buffers, dict(owner._buffers)) for owner in self._owners]
        values = [value for _, former in snapshots for value in former.values() if value is not None]
        saved = {value: (value.detach().clone(), value._version) for value in values}
        yield
        for buffers, former in snapshots:
            for key, value in former.items():
                # Torch's batch norm, whose statistics are vectors, counts no version. A constant table needs no copy.
                if value is not None and (value.ndim < 2 or value._version != saved[value][1]):
                    former[key] = saved[value][0]
                    self._copies.add(saved[value][0])
            if former.keys() != buffers.keys() or any(former[key] is not value for key, value in buffers.items()):
                self._before.append((buffers, former))

    def __enter__(self) -> None:
        self._entered.append(self._recomputing())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        updated = [dict(buffers) for buffers, _ in self._before]
        again = {value: value.clone() for value in self._copies}  # another backward may need them too
        for buffers, former in self._before:
            buffers.clear()
            buffers.update({key: None if value is None else again.get(value, value) for key, value in former.items()})
        try:
            with named_range("recompute", self._name):
                yield
        finally:
            for (buffers, _), current in zip(self._before, updated, strict=True):
                buffers.clear()
                buffers.update(current)


class _UnitForward:
    """Replaces a unit's own `forward`. A copy of the module has its own again: with this one it
    would compute with the weights of the module it was copied from."""

    def __init__(self, trained: Forward, own: Forward, without_graph: Forward | None = None) -> None:
        functools.update_wrapper(self, own)
        self._trained, self._own, self._without_graph = trained, own, without_graph or own

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        chosen = self._trained if torch.is_grad_enabled() else self._without_graph
        return chosen(*inputs, **named_inputs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        return copy.deepcopy(self._own, memo)

    def __reduce__(self) -> Any:
        return self._own.__reduce__()


def require_compiler() -> None:
    """Refuse torch.compile on a machine without a compiler for it.

    Raises:
        ConfigError: naming what this machine lacks.
    """
    # Imported here, for those who compile: it takes a second.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    lacking = []
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        lacking.append("a C++ compiler such as g++")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacking.append("Python.h, the headers of this Python (often the package python3-dev)")
    if lacking:
        raise ConfigError(
            f"{argument('compile', True)}: torch.compile needs {' and '.join(lacking)}, which this machine does not "
            f"have; install it, or leave {argument('compile', True)} out"
        )
