"""What a model must be to be trained by an engine."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from zerotrain.errors import ConfigError
from zerotrain.sharding.units import ModelParameter, WalkedModel


def require_trainable(model: nn.Module, parameters: Sequence[ModelParameter]) -> None:
    """Make sure that there is something to train.

    Raises:
        ConfigError: every parameter is frozen.
    """
    if not any(each.parameter.requires_grad for each in parameters):
        raise ConfigError(f"model {type(model).__name__} has no trainable floating-point parameter; nothing to train")


def require_plain(walked: WalkedModel) -> None:
    """Make sure that no part of the model is more than a module: wrapped by another engine, scripted, not ready, in
    fp64, or one that changes its weights in the forward.

    Raises:
        ConfigError: naming the part and what to give instead.
    """
    for name, module in walked.modules.items():
        kind, where = type(module).__name__, type(module).__module__
        part = f"{name or 'the model'} is a {kind}"
        if where.startswith(("torch.nn.parallel", "torch.distributed")):
            raise ConfigError(f"{part}, which shares gradients over ranks itself; give build_engine the module in it")
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(f"{part}, whose code takes no hooks; give build_engine the module before torch.jit")
        if any(is_lazy(each) for each in module._parameters.values() if each is not None):
            raise ConfigError(f"{part} without shapes yet; run one forward of the model before build_engine")
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ConfigError(f"{part} with sparse=True, and buckets hold dense gradients; build it with sparse=False")
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ConfigError(
                f"{part} with max_norm={module.max_norm}, which changes its weight in the forward by this rank's "
                "inputs alone; build it with max_norm=None, and scale the vectors that it gives"
            )
    double = [each.names[0] for each in walked.parameters if each.parameter.dtype == torch.float64]
    if double:
        raise ConfigError(
            f"{', '.join(double[:3])}{', ...' * (len(double) > 3)} {'is' if len(double) == 1 else 'are'} fp64, and the "
            "engine trains fp32 weights at most; call model.float() before build_engine"
        )


def require_leaves(walked: WalkedModel, leaves_per_rank: int) -> None:
    """Make sure that what a module keeps from one forward to the next does not depend on which rank runs it.

    Raises:
        ConfigError: a batch norm, of whose running statistics each virtual rank would have its own.
    """
    for name, module in walked.modules.items():
        if leaves_per_rank > 1 and isinstance(module, _NormBase) and module.track_running_stats:
            raise ConfigError(
                f"virtual_ranks: {name or 'the model'} is a {type(module).__name__}, whose running statistics follow "
                "the ranks; take as many ranks as virtual ranks, another norm, or track_running_stats=False"
            )


def require_values(walked: WalkedModel) -> None:
    """Make sure that there are weights to begin with, which can be written to.

    Raises:
        ConfigError: a parameter or buffer is on the meta device, or was made within torch.inference_mode().
    """
    kind = type(walked.model).__name__
    parameters = ((each.names[0], each.parameter) for each in walked.parameters)
    for name, tensor in (*parameters, *walked.buffers.items()):
        with torch._C.DisableTorchFunctionSubclass():  # which would complete what another engine has sharded
            is_inference = tensor.is_inference()
        if is_inference:
            raise ConfigError(
                f"{name} of model {kind} was made within torch.inference_mode(), and can never be "
                "trained; build the model outside of it, or give build_engine the function that builds it"
            )
        if tensor.is_meta:
            raise ConfigError(
                f"{name} of model {kind} is on the meta device, which holds no values; give "
                "build_engine the function that builds the model instead of the model; it holds nothing whole either"
            )
