"""Parameters that stay in fp32 while the rest computes in 16 bits, and the casts around their modules.

Norms and routers are the usual ones: few bytes, and sensitive. PyTorch's modules refuse inputs of another dtype than
their weights, so a module all of whose parameters are kept gets its floating-point inputs in fp32 and gives its
outputs in the compute dtype. If only a part of a module's parameters is kept, its own forward must cast.

Batch norms are kept without being named: their running statistics are fp32 buffers, beside which PyTorch refuses
weights of 16 bits ("expected scalar type BFloat16 but found Float").
"""

import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zerotrain.engine.model.arguments import refuses_dtypes
from zerotrain.engine.model.structures import cast_floating
from zerotrain.engine.precision.policy import Precision
from zerotrain.errors import ConfigError, listed
from zerotrain.sharding.units import ModelParameter, WalkedModel


def dtypes_of(parameters: Sequence[ModelParameter], precision: Precision) -> dict[nn.Parameter, torch.dtype]:
    """The dtype that each parameter is held in: the compute dtype, or the master's for those kept and batch norms.

    A pattern names a parameter, or a module with all the parameters in it. A tied parameter has several names.

    Raises:
        ConfigError: a pattern that matches nothing, or patterns that keep everything.
    """
    dtypes = {
        each.parameter: precision.master if _is_of_batch_norms(each) else precision.compute for each in parameters
    }
    for pattern in precision.keep_fp32:
        kept = [each.parameter for each in parameters if any(_matches(name, pattern) for name in each.names)]
        dtypes |= dict.fromkeys(kept, precision.master)
        if not kept:
            names = (name for each in parameters for name in each.names)
            known = dict.fromkeys(re.sub(r"\b\d+\b", "*", name.rpartition(".")[0] or name) for name in names)
            raise ConfigError(
                f"precision.keep_fp32: no module or parameter matches {pattern!r}; there are {', '.join(known)}"
            )
    keeps_all = all(dtype == precision.master for dtype in dtypes.values())
    if precision.keep_fp32 and precision.separate_master and keeps_all:
        raise ConfigError("precision.keep_fp32: keeps every parameter; use precision='fp32', or name fewer")
    return dtypes


def _is_of_batch_norms(each: ModelParameter) -> bool:
    return all(isinstance(owner, _NormBase) for owner, _ in each.owners)


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names the parameter `name` or a module that holds it."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:length]), pattern) for length in range(1, len(parts) + 1))


def cast_around_kept(walked: WalkedModel, dtypes: Mapping[nn.Parameter, torch.dtype], precision: Precision) -> None:
    """Hook the modules whose parameters are all kept, and batch norms: inputs in the master dtype, outputs in the
    compute dtype.

    Args:
        dtypes: from `dtypes_of`.
    """
    if not precision.separate_master:
        return
    kept = {parameter for parameter, dtype in dtypes.items() if dtype != precision.compute}
    norms = [name for name, module in walked.places if isinstance(module, _NormBase)]
    of_norms = {name for norm in norms for name, _ in walked.inside.get(norm, ())}
    modules = [walked.model] if "" in norms else dict.fromkeys(_outermost_within(walked, "", kept, of_norms))

    for module in modules:
        module.register_forward_pre_hook(partial(_widen, precision.master), with_kwargs=True)
        module.register_forward_hook(partial(_narrow, precision.compute))


# Not functions within a function, which a model that is pickled could not take along.
def _widen(
    dtype: torch.dtype, _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return cast_floating(inputs, dtype), cast_floating(named, dtype)


def _narrow(dtype: torch.dtype, _module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> Any:
    return cast_floating(output, dtype)


def require_one_dtype(model: nn.Module, precision: Precision, refusal: RuntimeError) -> None:
    """A forward has raised: say so by name if PyTorch refuses a buffer in fp32 beside 16 bits.

    Raises:
        ConfigError: naming the module and what to do.
    """
    if not (precision.separate_master and refuses_dtypes(refusal)):
        return
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(refusal.__traceback__))):
        module = frame.f_locals.get("self")
        buffers = module._buffers.items() if isinstance(module, nn.Module) and id(module) in names else ()
        if wide := [key for key, value in buffers if value is not None and value.dtype == precision.master]:
            name, _, _ = names[id(module)].partition(".parametrizations.")
            can_keep = name != "" and any(True for _ in model.get_submodule(name).parameters())
            keeps = f"keep it in fp32 with precision.keep_fp32=[{name}], or " if can_keep else ""
            raise ConfigError(
                f"{name or type(model).__name__} has buffers in fp32 ({listed(wide)}), which PyTorch refuses beside "
                f"{precision.name} ({str(refusal).splitlines()[0]}); {keeps}cast them where they are read"
            ) from refusal


def _outermost_within(
    walked: WalkedModel, within: str, kept: set[nn.Parameter], of_norms: set[str]
) -> Iterator[nn.Module]:
    """The largest modules that can be called, a ModuleList cannot, and have parameters in `kept` alone; of batch norms,
    which nobody has named, none but themselves.

    Args:
        within: the name of a module.
        of_norms: the names of the parameters in batch norms.
    """
    module = walked.model.get_submodule(within)
    for key, child in module.named_children():
        name = f"{within}.{key}" if within else key
        inside = [(each, of) for each, of in walked.inside.get(name, ()) if of.parameter.is_floating_point()]
        held = {of.parameter for _, of in inside}
        is_named = not held <= {of.parameter for each, of in inside if each in of_norms}
        is_kept = is_named and held <= kept and type(child).forward is not nn.Module.forward
        if is_kept or isinstance(child, _NormBase):
            yield child
        else:
            yield from _outermost_within(walked, name, kept, of_norms)
