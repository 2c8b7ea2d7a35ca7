"""Requirements on a model for an engine to train."""

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.device.kinds import device_of
from zerotrain.errors import ConfigError, EngineStateError, argument
from zerotrain.sharding.units import WalkedModel


def model_error(problem: str) -> ConfigError:
    """The error of an untrainable model."""
    error = ConfigError(problem)
    error.about = "model"
    return error


def require_plain(walked: WalkedModel) -> None:
    """Refuse a model with a part that is more than a module: wrapped by another engine, scripted, not ready, in fp64 or
    sparse, or changing its weights in the forward.

    Raises:
        ConfigError: naming the part and what to give instead.
    """
    for name, module in walked.modules.items():
        kind, where = type(module).__name__, type(module).__module__
        part = f"{name or 'the model'} is a {kind}"
        if where.startswith(("torch.nn.parallel", "torch.distributed")):
            raise model_error(f"{part}, which shares gradients over ranks itself; give build_engine the module in it")
        if isinstance(module, torch.jit.ScriptModule):
            raise model_error(f"{part}, whose code takes no hooks; give build_engine the module before torch.jit")
        if any(is_lazy(parameter) for parameter in module._parameters.values() if parameter is not None):
            raise model_error(f"{part} without shapes yet; run one forward of the model before build_engine")
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise model_error(f"{part} with sparse=True, and buckets hold dense gradients; build it with sparse=False")
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.max_norm is not None:
            raise model_error(
                f"{part} with max_norm={module.max_norm}, which changes its weight in the forward by this rank's "
                "inputs only; build it with max_norm=None, and scale its output"
            )
    tensors = [*((entry.names[0], entry.parameter) for entry in walked.parameters), *walked.buffers.items()]
    for name, tensor in tensors:
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise model_error(
                f"{name} is a tensor of layout {kind}, which ranks and checkpoints do not carry; keep it dense, "
                "or keep its indices and values as buffers and make it in the forward"
            )
    double = [entry.names[0] for entry in walked.parameters if entry.parameter.dtype == torch.float64]
    if double:
        raise model_error(
            f"{', '.join(double[:3])}{', ...' if len(double) > 3 else ''} {'is' if len(double) == 1 else 'are'} fp64, "
            "and the engine trains fp32 weights at most; call model.float() before build_engine"
        )


def require_leaves(walked: WalkedModel, leaves_per_rank: int) -> None:
    """Refuse modules with state from one forward to the next that depends on the rank.

    Raises:
        ConfigError: a batch norm, of whose running statistics each virtual rank would have its own.
    """
    for name, module in walked.modules.items():
        if leaves_per_rank > 1 and isinstance(module, _NormBase) and module.track_running_stats:
            raise ConfigError(
                f"{argument('virtual_ranks')}: {name or 'the model'} is a {type(module).__name__}, whose running "
                "statistics follow the ranks; take as many ranks as virtual ranks, another norm, or "
                "track_running_stats=False"
            )


def require_values(walked: WalkedModel, device: torch.device) -> None:
    """Refuse a model without weights to begin with, or with unwritable ones; on a `device` without memory there are
    none.

    Raises:
        ConfigError: a parameter or buffer is on the meta device, or was made within torch.inference_mode().
    """
    kind = type(walked.model).__name__
    parameters = ((entry.names[0], entry.parameter) for entry in walked.parameters)
    for name, tensor in (*parameters, *walked.buffers.items()):
        if tensor.is_inference():
            raise ConfigError(
                f"{name} of model {kind} was made within torch.inference_mode(), and can never be "
                "trained; build the model outside of it, or give build_engine the function that builds it"
            )
        if tensor.is_meta and device_of(device).holds_values:
            raise ConfigError(
                f"{name} of model {kind} is on the meta device, which holds no values; give "
                "build_engine the function that builds the model instead of the model; it never holds all of it"
            )


@dataclass(frozen=True)
class _MemoryRange:
    """The memory of a tensor, its gaps included."""

    space: int
    """0: memory has addresses. Else the storage, of a tensor without memory: on the meta device, or not filled yet."""
    start: int
    end: int
    name: str
    tensor: torch.Tensor
    is_parameter: bool


def require_own_memory(walked: WalkedModel) -> None:
    """Refuse a weight with two names for its memory: a parameter with elements of another parameter, a buffer or a
    plain tensor of a module.

    The engine moves parameters into buckets, and what was a second view of the old memory would keep the old values,
    without a word. Disjoint parts of one storage are no sharing: cuDNN's flattened weights, a flat checkpoint.

    Raises:
        ConfigError: two do; or one parameter has several elements at one place (`expand`).
    """
    ranges = sorted(_ranges(walked), key=lambda memory: (memory.space, memory.start))
    reaching: list[_MemoryRange] = []
    """Those that may reach into the next ones."""
    for memory in ranges:
        reaching = [earlier for earlier in reaching if earlier.space == memory.space and earlier.end > memory.start]
        for earlier in reaching:
            if (memory.is_parameter or earlier.is_parameter) and _share_elements(earlier, memory):
                pair = (earlier, memory) if earlier.is_parameter else (memory, earlier)
                raise model_error(_sharing_problem(*pair))
        reaching.append(memory)


def _sharing_problem(one: _MemoryRange, other: _MemoryRange) -> str:
    """The problem of two tensors in one memory, the first a parameter."""
    if other.is_parameter:
        return (
            f"{one.name} and {other.name} are two parameters that share memory, and would diverge in training; to tie "
            f"them, assign the parameter itself (model.{other.name} = model.{one.name}), not nn.Parameter(...) of it; "
            "to have two, clone() one"
        )
    return (
        f"{other.name} is a tensor that shares memory with the parameter {one.name}, and would keep its old values in "
        f"training; read the parameter where it is needed, or clone() it"
    )


def _ranges(walked: WalkedModel) -> Iterator[_MemoryRange]:
    """The ranges of all tensors that have memory of the usual kind, and elements."""
    tensors: dict[str, torch.Tensor] = {entry.names[0]: entry.parameter for entry in walked.parameters}
    rows = [(name, tensor, True) for name, tensor in tensors.items()]
    own = set(map(id, tensors.values()))
    for name, tensor in (*walked.buffers.items(), *_plain_tensors(walked)):
        if id(tensor) not in own:
            rows.append((name, tensor, False))
    for name, tensor, is_parameter in rows:
        if tensor.layout != torch.strided:
            continue
        dims = list(zip(tensor.shape, tensor.stride(), strict=True))
        if is_parameter and any(size > 1 and stride == 0 for size, stride in dims):
            raise model_error(f"{name} has several elements at one place, as expand() gives them; clone() it")
        if tensor.numel() == 0 or is_traceable_wrapper_subclass(tensor):
            continue
        storage = tensor.untyped_storage()
        address = storage.data_ptr() if storage.nbytes() > 0 else 0
        start = address + int(tensor.storage_offset()) * tensor.itemsize
        end = start + (1 + sum((size - 1) * stride for size, stride in dims)) * tensor.itemsize
        yield _MemoryRange(0 if address else storage._cdata, start, end, name, tensor, is_parameter)


def _plain_tensors(walked: WalkedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that modules hold as attributes, alone or in a list, tuple or dict."""
    for prefix, module in walked.modules.items():
        for attribute, value in vars(module).items():
            # torch.nn.utils.spectral_norm and prune make `weight` anew from `weight_orig` before each forward.
            if attribute in ("_parameters", "_buffers", "_modules") or f"{attribute}_orig" in module._parameters:
                continue
            if isinstance(value, dict):
                value = list(value.values())
            for part in value if isinstance(value, list | tuple) else [value]:
                if isinstance(part, torch.Tensor):
                    yield f"{prefix}.{attribute}" if prefix else attribute, part


def _share_elements(one: _MemoryRange, other: _MemoryRange) -> bool:
    """Whether two tensors whose ranges overlap have an element in common: columns of a matrix have none."""
    if one.tensor.itemsize != other.tensor.itemsize:
        return True
    itemsize, start = one.tensor.itemsize, min(one.start, other.start)
    marks = torch.zeros((max(one.end, other.end) - start) // itemsize, dtype=torch.bool)

    def elements(memory: _MemoryRange) -> torch.Tensor:
        return marks.as_strided(memory.tensor.shape, memory.tensor.stride(), (memory.start - start) // itemsize)

    elements(one).fill_(True)
    return bool(elements(other).any())


# Parameters that come into a model after its engine was built. No bucket holds them, so nothing would train them.


Placed = torch.nn.Module | torch.nn.Parameter


class Newcomers:
    """Parameters and modules added to a model: noted when they are (PyTorch tells), and checked by the next forward.

    [Note: one hook for all engines]
    PyTorch calls hooks on all modules of the process from a dict, and one that is taken out meanwhile ends the making
    of some module with "OrderedDict mutated during iteration": seen where an engine was collected in one thread while
    another built a model, and the same may happen in one thread, since the collector runs at any place. So there is one
    hook, for good, and the engines' newcomers stand in a tuple, which is replaced and never changed. Those of an engine
    that is gone are left out when the next is built.

    Args:
        walked: as it is now.
        parameters: the engine's.
    """

    _all: "tuple[weakref.ref[Newcomers], ...]" = ()
    _changing = threading.RLock()

    def __init__(self, walked: WalkedModel, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = set(map(id, parameters))
        self._names = weakref.WeakKeyDictionary({module: name for name, module in walked.modules.items()})
        self._placed: list[tuple[weakref.ref[torch.nn.Module], str, weakref.ref[Placed]]] = []
        with Newcomers._changing:
            others = (reference for reference in Newcomers._all if reference() is not None)
            Newcomers._all = (*others, weakref.ref(self))

    @staticmethod
    def note(module: torch.nn.Module, name: str, placed: Placed | None) -> None:
        """Something was put into a module, of whichever model."""
        for reference in Newcomers._all:
            newcomers = reference()
            if placed is not None and newcomers is not None and module in newcomers._names:
                newcomers._placed.append((weakref.ref(module), name, weakref.ref(placed)))

    def require_none(self) -> None:
        """Refuse a model with a parameter to train that is not the engine's.

        Raises:
            EngineStateError: it has.
        """
        for to_module, name, to_placed in self._placed:
            module, placed = to_module(), to_placed()
            if module is None or placed is None:
                continue
            if placed is not module._parameters.get(name) and placed is not module._modules.get(name):
                continue
            parameters = [placed] if isinstance(placed, torch.nn.Parameter) else placed.parameters()
            if any(parameter.requires_grad and id(parameter) not in self._parameters for parameter in parameters):
                full_name = f"{self._names[module]}.{name}".lstrip(".")
                raise EngineStateError(
                    f"{full_name}, a {type(placed).__name__}, came into the model after build_engine, and nothing "
                    "would train it: change a model before build_engine, and its weights with "
                    "engine.load_state_dict(...)"
                )
        self._placed.clear()


torch_module.register_module_parameter_registration_hook(Newcomers.note)
torch_module.register_module_module_registration_hook(Newcomers.note)
