"""The front door in Python: `zerotrain.build_engine`. Needs neither hydra nor a config."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine import OptimizerFactory, ZeroEngine, assemble_engine
from zerotrain.errors import ConfigError
from zerotrain.settings import EngineConfig, OffloadConfig, PrecisionConfig, ZeroConfig, problems_in


def build_engine(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    *,
    optimizer: OptimizerFactory,
    zero: ZeroConfig | None = None,
    precision: str | PrecisionConfig = "fp32",
    offload: OffloadConfig | None = None,
    max_grad_norm: float | None = None,
    max_skipped_steps: int = 20,
    virtual_ranks: int | None = None,
    graphs: str = "off",
    decay_all: bool = True,
    param_groups: Sequence[dict[str, Any]] | None = None,
    compile: bool = False,
    activation_checkpointing: bool = False,
    world: World | None = None,
) -> ZeroEngine:
    """Wrap a model in the sharded engine.

    Args:
        model: any `nn.Module`, built alike on every rank; changed in place (see `ZeroEngine`). Or a function that
            builds it: at stage 3 no rank ever holds such a model whole (see `zerotrain.engine.model.deferred`).
        optimizer: makes an element-wise optimizer of groups, such as `functools.partial(torch.optim.AdamW, lr=3e-4)`,
            or one declared to update whole tensors, such as `zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=3e-4)`.
        zero: how state is sharded and moved; default `ZeroConfig()`, stage 2.
        precision: fp32, bf16 or fp16; `PrecisionConfig` has more to set.
        offload: what lies off the device while nothing is computed with it; default: nothing.
        max_grad_norm: clip the global L2 norm of the gradient to this; None for no clipping.
        max_skipped_steps: so many in a row, skipped since their gradient is not finite, raise `TrainingError`.
        virtual_ranks: a power of two times the number of ranks, by default that number: any number of ranks that runs
            as many (`ZeroEngine.each_virtual_rank`) comes to the same bits.
        graphs: auto: on a GPU `ZeroEngine.train_step` records steps as CUDA graphs and replays them, where it can: see
            docs/guides/graphs.md. Not measured on a GPU yet.
        decay_all: weight decay is for every parameter; False: for matrices alone, as the launcher has it.
        param_groups: dicts of "params" (names, patterns such as "*.bias", parameters) and settings; see
            docs/reference/cases/parameters.md.
        compile: torch.compile each unit's forward, and losses that are modules, such as `nn.CrossEntropyLoss`.
        activation_checkpointing: keep a unit's inputs alone, and compute the rest again in its backward.
        world: default: the caller's process group, or one process, on the device of the model's first parameter.

    Raises:
        ConfigError: a setting is out of range, or the model or optimizer cannot be trained so.
        OffloadError: there is no room for what is offloaded.
    """
    config = EngineConfig(
        zero=ZeroConfig() if zero is None else zero,
        precision=PrecisionConfig(precision) if isinstance(precision, str) else precision,
        offload=OffloadConfig() if offload is None else offload,
        max_grad_norm=max_grad_norm,
        max_skipped_steps=max_skipped_steps,
        virtual_ranks=virtual_ranks,
        graphs=graphs,
    )
    _require_allowed(model, optimizer, config)
    return assemble_engine(
        model,
        config,
        optimizer=optimizer,
        decay_all=decay_all,
        param_groups=param_groups,
        compile=compile,
        activation_checkpointing=activation_checkpointing,
        world=world or World.current(_device_of(model)),
    )


def _require_allowed(model: Any, optimizer: Any, config: EngineConfig) -> None:
    """Check the kinds and the values of arguments.

    Raises:
        ConfigError: a line for each wrong one.
    """
    is_model = callable(model) and not isinstance(model, ZeroEngine)
    zero, precision, offload = config.zero, config.precision, config.offload
    kinds = (
        ("model", model, is_model, "an nn.Module, or a function that makes one"),
        ("optimizer", optimizer, callable(optimizer), "functools.partial(torch.optim.AdamW, lr=3e-4) or the like"),
        ("zero", zero, isinstance(zero, ZeroConfig), "a zerotrain.ZeroConfig, such as ZeroConfig(stage=3)"),
        ("precision", precision, isinstance(precision, PrecisionConfig), "a name such as bf16, or a PrecisionConfig"),
        ("offload", offload, isinstance(offload, OffloadConfig), "a zerotrain.OffloadConfig"),
    )
    wrong = []
    for name, value, is_right, allowed in kinds:
        if not is_right:
            wrong.append(f"{name}: got an object of type {type(value).__name__}; it must be {allowed}")
    if problems := wrong or problems_in(config):
        raise ConfigError(*problems)


def _device_of(model: torch.nn.Module | Callable[[], torch.nn.Module]) -> torch.device:
    """The device of a model's first parameter; of a model still to be built, torch's default device. The meta device,
    a plan's, counts as the CPU."""
    if isinstance(model, torch.nn.Module):
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
    else:
        device = torch.get_default_device()
    return device if device_of(device).holds_values else torch.device("cpu")
