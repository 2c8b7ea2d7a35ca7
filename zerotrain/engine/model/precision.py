"""The dtypes of a model: for compute and the wire, of parameters and arguments kept in fp32, and the loss scale.

Parameters may stay in fp32 while the rest computes in 16 bits; norms and routers are the usual ones: few bytes, and
sensitive. PyTorch's modules refuse inputs of another dtype than
their weights, so a module all of whose parameters are kept gets its floating-point inputs in fp32 and gives its
outputs in the compute dtype. If only a part of a module's parameters is kept, its own forward must cast.

Batch norms are kept without being named: their running statistics are fp32 buffers, beside which PyTorch refuses
weights of 16 bits ("expected scalar type BFloat16 but found Float").
"""

import copy
import functools
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from zerotrain.errors import ConfigError, argument, listed
from zerotrain.sharding.units import ModelParameter, WalkedModel, matching

# The tensors inside what a module takes and returns: in dicts, lists, named tuples, dataclasses, however nested.
#
# torch's pytree looks into the containers it has been told of. A dataclass or a subclass of dict that nobody has
# registered is a leaf to it; here they are looked into as well.


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor inside `value`, itself if it is one."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif parts := _parts(leaf):
            yield from tensors_in(list(parts.values()))


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor inside it in `dtype`, and every container of its own type.

    Nothing is changed in place: a dataclass or dict subclass with a changed tensor is copied, another is passed on.
    """

    def cast(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(dtype) if leaf.is_floating_point() else leaf
        parts = _parts(leaf)
        changed = {name: cast_floating(part, dtype) for name, part in parts.items()}
        if all(changed[name] is part for name, part in parts.items()):
            return leaf
        copied = copy.copy(leaf)  # not by its constructor, which may take other arguments
        for name, part in changed.items():
            if isinstance(copied, MutableMapping):
                copied[name] = part
            else:
                object.__setattr__(copied, name, part)  # also where the dataclass is frozen
        return copied

    return pytree.tree_map(cast, value)


def _parts(leaf: Any) -> dict[Any, Any]:
    """The parts of a leaf of pytree by name or key: {} if it is no container."""
    if isinstance(leaf, MutableMapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf) if hasattr(leaf, field.name)}
    return {}


# Floating-point arguments of a model in 16 bits: they keep their bits wherever PyTorch computes with both.


WIDENING = ("_loss", "cross_entropy", "cross_entropy_with_logits", "kl_div", "cdist", "grid_sample")
"""So end the names of torch's functions that compare with labels, or read places."""


class WideArguments(TorchFunctionMode):
    """While it is entered, values in the compute dtype and those in other floating-point dtypes go together.

    In sums and the like PyTorch computes with both and gives the wider dtype. It refuses them in other operations, such
    as a product with a weight: such an operation is called again, with the others rounded to the compute dtype. A loss
    gets all of them in the wider dtype. Most would promote them, some refuse them, and one does so in its backward.
    """

    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self._compute = compute
        self._seen = False
        self._overflow: torch.Tensor | None = None
        """0-dim bool, on the device."""

    def around_forward(self, inputs: Any) -> AbstractContextManager[object]:
        """The context to call a model in: this one if it computes in 16 bits and `inputs` have other floats."""
        if self._compute == torch.float32 or not _floats(inputs) - {self._compute}:
            return nullcontext()
        self._seen = True
        return self

    def around_backward(self) -> AbstractContextManager[object]:
        """The context for a backward, which may compute a part of a forward again."""
        return self if self._seen else nullcontext()

    def rounded(self, value: Any) -> Any:
        """`value` with every floating-point tensor inside it in the compute dtype."""
        # Tensors that torch.func transforms cannot be looked at outside of it.
        for tensor in tensors_in(value) if torch._C._functorch.peek_interpreter_stack() is None else ():
            # bf16 reaches as far as fp32.
            if tensor.is_floating_point() and torch.finfo(tensor.dtype).max > 2 * torch.finfo(self._compute).max:
                overflow = (tensor.isfinite() & (tensor.abs() > torch.finfo(self._compute).max)).any()
                self._overflow = overflow if self._overflow is None else overflow | self._overflow
        return cast_floating(value, self._compute)

    def widened(self, value: Any) -> Any:
        """`value` with every floating-point tensor inside it in the dtype that PyTorch promotes them all to."""
        floats = _floats(value)
        return cast_floating(value, functools.reduce(torch.promote_types, floats)) if len(floats) > 1 else value

    def take_overflow(self) -> bool:
        """Whether a finite value was rounded to inf since the last call. Waits for the device if one could be."""
        overflow, self._overflow = self._overflow, None
        return overflow is not None and bool(overflow)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if name.endswith(WIDENING):
            args, kwargs = self.widened((args, kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError as refusal:
            outputs = kwargs.get("out", args[:1] if name.endswith("_") and not name.endswith("__") else ())
            is_mixed = len(floats := _floats((args, kwargs))) > 1 and self._compute in floats
            if not is_mixed or not refuses_dtypes(refusal) or _floats(outputs) - {self._compute}:
                raise
            args, kwargs = self.rounded((args, kwargs))
            try:
                return func(*args, **kwargs)
            except RuntimeError:
                raise refusal from None


def refuses_dtypes(error: BaseException) -> bool:
    """Whether `error` is PyTorch's about dtypes that it does not compute with together."""
    return isinstance(error, RuntimeError) and "type" in str(error).lower()


def one_dtype_at_entry(forward: Callable[..., Any], change: Callable[[WideArguments, Any], Any]) -> Callable[..., Any]:
    """A forward with its arguments in one dtype, without the mode: for compiled forwards, or ones with checks of dtypes
    or modes of their own.

    Args:
        change: `WideArguments.rounded` or `WideArguments.widened`.
    """

    def run(*inputs: Any, **named_inputs: Any) -> Any:
        mode = _get_current_function_mode()
        if not isinstance(mode, WideArguments):
            return forward(*inputs, **named_inputs)
        inputs, named_inputs = change(mode, (inputs, named_inputs))
        with _pop_mode_temporarily():
            return forward(*inputs, **named_inputs)

    return run


def _floats(value: Any) -> set[torch.dtype]:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}


# The dtypes of compute, of the wire and of masters.


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run, or of one bucket where parameters are kept in fp32."""

    name: str
    compute: torch.dtype
    """Weights the model sees, activations, gradients and everything on the wire."""
    master: torch.dtype = torch.float32
    """Master weights, updates of the optimizer's state, and sums of gradients over micro-batches and ranks."""
    state: torch.dtype = torch.float32
    """The optimizer's state between updates."""
    keep_fp32: tuple[str, ...] = ()
    """Name patterns of parameters held, computed with and sent in the master dtype; see `kept_fp32`."""

    @property
    def separate_master(self) -> bool:
        """Whether the master weight is a copy; in fp32 it shares the model weight's storage."""
        return self.compute != self.master

    def of_bucket(self, dtype: torch.dtype) -> "Precision":
        """The precision of a bucket with parameters in `dtype`."""
        return replace(self, compute=dtype)


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
}


def dtypes_of(parameters: Sequence[ModelParameter], precision: Precision) -> dict[torch.nn.Parameter, torch.dtype]:
    """The dtype that each parameter is held in: the compute dtype, or the master's for those kept and batch norms.

    A pattern names a parameter, or a module with all the parameters in it. A tied parameter has several names.

    Raises:
        ConfigError: a pattern that matches nothing, or patterns that keep everything.
    """
    dtypes = {}
    for entry in parameters:
        is_of_batch_norms = all(isinstance(owner, _NormBase) for owner, _ in entry.owners)
        dtypes[entry.parameter] = precision.master if is_of_batch_norms else precision.compute
    for pattern in precision.keep_fp32:
        kept = [*matching(parameters, pattern), *matching(parameters, f"{pattern}.*")]
        dtypes |= {entry.parameter: precision.master for entry in kept}
        if not kept:
            names = (name for entry in parameters for name in entry.names)
            patterns = dict.fromkeys(re.sub(r"\b\d+\b", "*", name.rpartition(".")[0] or name) for name in names)
            raise ConfigError(
                f"precision.keep_fp32: no module or parameter matches {pattern!r}; there are {', '.join(patterns)}"
            )
    keeps_all = all(dtype == precision.master for dtype in dtypes.values())
    if precision.keep_fp32 and precision.separate_master and keeps_all:
        raise ConfigError(
            f"precision.keep_fp32: keeps every parameter; use {argument('precision', 'fp32')}, or name fewer"
        )
    return dtypes


def cast_around_kept(
    walked: WalkedModel, dtypes: Mapping[torch.nn.Parameter, torch.dtype], precision: Precision
) -> None:
    """Hook the modules whose parameters are all kept, and batch norms: inputs in the master dtype, outputs in the
    compute dtype.

    Args:
        dtypes: from `dtypes_of`.
    """
    if not precision.separate_master:
        return
    in_master = {parameter for parameter, dtype in dtypes.items() if dtype != precision.compute}
    norms = [name for name, module in walked.places if isinstance(module, _NormBase)]
    of_norms = {name for norm in norms for name, _ in walked.inside.get(norm, ())}
    modules = [walked.model] if "" in norms else dict.fromkeys(_outermost_within(walked, "", in_master, of_norms))

    for module in modules:
        module.register_forward_pre_hook(functools.partial(_widen, precision.master), with_kwargs=True)
        module.register_forward_hook(functools.partial(_narrow, precision.compute))


# Not functions within a function, which a model that is pickled could not take along.
def _widen(
    dtype: torch.dtype, _module: torch.nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return cast_floating(inputs, dtype), cast_floating(named_inputs, dtype)


def _narrow(dtype: torch.dtype, _module: torch.nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    return cast_floating(output, dtype)


def require_one_dtype(model: torch.nn.Module, precision: Precision, refusal: RuntimeError) -> None:
    """A forward has raised: say so by name if PyTorch refuses a buffer in fp32 beside 16 bits.

    Raises:
        ConfigError: naming the module and what to do.
    """
    if not (precision.separate_master and refuses_dtypes(refusal)):
        return
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(refusal.__traceback__))):
        module = frame.f_locals.get("self")
        buffers = module._buffers.items() if isinstance(module, torch.nn.Module) and id(module) in names else ()
        if wide := [key for key, value in buffers if value is not None and value.dtype == precision.master]:
            name, _, _ = names[id(module)].partition(".parametrizations.")
            can_keep = name != "" and any(True for _ in model.get_submodule(name).parameters())
            keeps = f"keep it in fp32 with precision.keep_fp32=[{name}], or " if can_keep else ""
            raise ConfigError(
                f"{name or type(model).__name__} has buffers in fp32 ({listed(wide)}), which PyTorch refuses beside "
                f"{precision.name} ({str(refusal).splitlines()[0]}); {keeps}cast them where they are read"
            ) from refusal


def _outermost_within(
    walked: WalkedModel, within: str, in_master: set[torch.nn.Parameter], of_norms: set[str]
) -> Iterator[torch.nn.Module]:
    """The largest modules that can be called, a ModuleList cannot, and have parameters in `kept` alone; of batch norms,
    which nobody has named, none but themselves.

    Args:
        within: the name of a module.
        of_norms: the names of the parameters in batch norms.
    """
    module = walked.model.get_submodule(within)
    for key, child in module.named_children():
        name = f"{within}.{key}" if within else key
        inside = [(path, entry) for path, entry in walked.inside.get(name, ()) if entry.parameter.is_floating_point()]
        held = {entry.parameter for _, entry in inside}
        is_named = not held <= {entry.parameter for path, entry in inside if path in of_norms}
        is_kept = is_named and held <= in_master and type(child).forward is not torch.nn.Module.forward
        if is_kept or isinstance(child, _NormBase):
            yield child
        else:
            yield from _outermost_within(walked, name, in_master, of_norms)


# Dynamic loss scaling: keeps the gradients of fp16 between its underflow and its overflow.
#
# fp16 has no numbers between 0 and 6e-8. The loss is multiplied by a scale before the backward, and the gradient
# divided by it in fp32 before the update (Micikevicius et al. 2018, "Mixed precision training", arXiv 1710.03740,
# section 3.2). Every scale is a power of two, which moves exponents and no other bits.


MAX_SCALE = 2.0**32
"""Reached only where gradients vanish: then no scale is too large, and the scale must not leave fp32 itself."""


@dataclass(kw_only=True)
class LossScaler:
    """The scale of one run: halved by each overflow, doubled after `growth_interval` steps in a row without one.

    All ranks call `update` with the same values, so all have the same scale.
    """

    scale: float
    """Factor of the loss in the next backward: a power of two, from 1 to `MAX_SCALE`."""
    growth_interval: int
    num_clean_steps: int = 0

    def update(self, *, overflowed: bool) -> None:
        """One step is over; `overflowed` says whether its gradient was not finite."""
        if overflowed:
            self.scale = max(self.scale / 2, 1.0)
            self.num_clean_steps = 0
            return
        self.num_clean_steps += 1
        if self.num_clean_steps == self.growth_interval:
            self.scale = min(self.scale * 2, MAX_SCALE)
            self.num_clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run goes on with the same scales."""
        return {"scale": self.scale, "num_clean_steps": self.num_clean_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the run that gave `state` was."""
        self.scale = state["scale"]
        self.num_clean_steps = state["num_clean_steps"]
