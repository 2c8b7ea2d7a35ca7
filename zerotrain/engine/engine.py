"""The facade: one object for a training, whose parts do the work."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

from zerotrain.engine.averaging import Averaging
from zerotrain.engine.checkpoints import Checkpoints
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.engine.step import Steps
from zerotrain.engine.update.torch_optimizer import EngineOptimizer
from zerotrain.engine.usage import Usage
from zerotrain.errors import EngineStateError
from zerotrain.sharding.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")


def _of(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate["ZeroEngine", P], T]:
    """A method of the engine that is one of its parts', with that one's signature and documentation."""
    part_of = attrgetter(part)

    @wraps(method)
    def called(engine: "ZeroEngine", *given: P.args, **named: P.kwargs) -> T:
        return method(part_of(engine), *given, **named)

    return called


class ZeroEngine:
    """Trains a model at a ZeRO stage.

    All ranks make the same calls in the same order. Gradients are the mean over ranks of the sum over the backwards
    since the last step; a caller who accumulates divides the loss, or gives `backward` a weight, as with plain PyTorch.

    Args:
        held: the model, in buckets.
    """

    def __init__(self, held: ShardedModel) -> None:
        self.held = held
        self.steps = steps = Steps(held, held.options.loss_scaler())
        self.checkpoints = Checkpoints(held, steps)
        self.averaging = Averaging(held)
        self.module, self.world, self.precision = held.module, held.world, held.precision
        self.collectives, self.ledger, self.max_grad_norm = (
            held.collectives,
            held.ledger,
            held.options.given.max_grad_norm,
        )
        self.stamps, self.virtual_ranks, self.loss_scaler = steps.stamps, steps.virtual_ranks, steps.loss_scaler

    # ---- a step, see `Steps`

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the model; in 16 bits wider floating-point inputs are rounded where PyTorch wants one dtype beside
        weights, and nowhere else. Returns what the model returns."""
        return self.steps.call(*inputs, **named_inputs)

    forward_scope = _of("steps", Steps.forward_scope)
    backward = _of("steps", Steps.backward)
    no_sync = _of("steps", Steps.no_sync)
    each_virtual_rank = _of("steps", Steps.each_virtual_rank)
    zero_grad = _of("steps", Steps.zero_grad)
    step = _of("steps", Steps.step)
    train_step = _of("steps", Steps.train_step)
    leaf = _of("steps", Steps.leaf)

    @property
    def signal(self) -> int:
        """A whole number from 0 to 2**31 for all ranks, which rides on the exchange of the norm: see
        `StepResult.signals`."""
        return self.steps.signal

    @signal.setter
    def signal(self, signal: int) -> None:
        self.steps.signal = signal

    @property
    def loss_scale(self) -> float:
        """The factor on the loss of the next backward; 1.0 but in fp16."""
        return self.steps.loss_scale

    @property
    def optimizer(self) -> EngineOptimizer:
        """For torch's learning rate schedulers, such as `CosineAnnealingLR(engine.optimizer, 10)`: a
        `torch.optim.Optimizer` with the groups of `param_groups`. Its `step` is `engine.step`, its `zero_grad` is
        `engine.zero_grad`; it has no state dict."""
        return self.steps.optimizer

    # ---- what trains and where it lies, see `ShardedModel`

    freeze = _of("held", ShardedModel.freeze)
    unfreeze = _of("held", ShardedModel.unfreeze)
    add_param_group = _of("held", ShardedModel.add_param_group)
    set_stage = _of("held", ShardedModel.set_stage)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyperparameters; a schedule sets group["lr"] from group["initial_lr"]."""
        return self.held.groups.hyperparameters

    @property
    def schedule(self) -> Schedule:
        """Units and buckets, and where the model is among them. Another one after each change of what trains."""
        return self.held.schedule

    @property
    def options(self) -> EngineOptions:
        """All settings, as the stage of now has them."""
        return self.held.options

    @property
    def plan(self) -> Plan:
        """Placement of the model states: replicated or sharded."""
        return self.held.plan

    # ---- the average of weights, see `Averaging`

    keep_average = _of("averaging", Averaging.keep_average)
    averaged = _of("averaging", Averaging.averaged)

    # ---- in and out, see `Checkpoints`

    save = _of("checkpoints", Checkpoints.save)
    begin_save = _of("checkpoints", Checkpoints.begin_save)
    load = _of("checkpoints", Checkpoints.load)
    own_of = _of("checkpoints", Checkpoints.own_of)
    load_weights = _of("checkpoints", Checkpoints.load_weights)
    load_state_dict = _of("checkpoints", Checkpoints.load_state_dict)
    full_state_dict = _of("checkpoints", Checkpoints.full_state_dict)
    weights_sha256 = _of("checkpoints", Checkpoints.weights_sha256)

    # ---- bytes, see `Usage`

    planned_nbytes = _of("held.usage", Usage.planned_nbytes)
    sums_nbytes = _of("held.usage", Usage.sums_nbytes)
    memory_bytes = _of("held.usage", Usage.memory_bytes)
    offloaded = _of("held.usage", Usage.offloaded)
    theoretical_sent_nbytes = _of("held.usage", Usage.theoretical_sent_nbytes)

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return self.held.usage.num_parameters

    def group_sizes(self) -> list[tuple[int, int]]:
        """(parameters, their elements) that train in each of the `param_groups`."""
        return self.held.usage.group_sizes(len(self.param_groups))

    # ---- the model

    def train(self) -> Self:
        """Put the model into training mode."""
        self.module.train()
        return self

    def eval(self) -> Self:
        """Put the model into evaluation mode."""
        self.module.eval()
        return self

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; all ranks call it. For loops of forwards whose length differs by rank."""
        return self.world.sum(torch.tensor(float(flag), device=self.world.device)).item() > 0

    def __reduce_ex__(self, _: Any) -> Any:
        raise EngineStateError(
            "an engine can be neither copied nor pickled, since it is a part of its process group: copy or pickle "
            "engine.module, or take what engine.full_state_dict() gives"
        )
