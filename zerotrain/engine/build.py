"""From a model and a plan to live buckets, units and a schedule."""

import hashlib
import json
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.agreement import require_same
from zerotrain.engine.deferred_init import InitialValues
from zerotrain.engine.gradients import BucketGradient
from zerotrain.engine.kept_fp32 import assign_dtypes, cast_around_kept
from zerotrain.engine.live_unit import Bucket, LiveUnit
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.param_groups import ParamGroups
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPools
from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.sharding.bucketing import BucketSpec, ManagedParameter, cut_buckets, cut_units, managed_parameters
from zerotrain.sharding.layout import BucketLayout


def build_schedule(
    model: nn.Module,
    options: EngineOptions,
    groups: ParamGroups,
    *,
    collectives: Collectives,
    pools: ScratchPools,
    initial: InitialValues,
    fill: Callable[[BucketSpec], None] | None,
) -> Schedule:
    """Cut `model` into buckets, move its parameters into them and order them.

    Args:
        initial: of a model that `deferred_init` has built.
        fill: called with each bucket before it is made, to give its parameters values; None: they have them, in a model
            that is cut for the first time.

    Raises:
        ConfigError: ranks with different models, no trainable parameter, a pattern of units or of kept parameters that
            matches nothing, or an optimizer that cannot work so.
    """
    max_numel = max(1, int(options.bucket_mb * 2**20) // options.precision.compute.itemsize)
    units = cut_units(model, options.units, max_numel)
    groups.label(units)
    parameters = [managed for unit in units for managed in unit.parameters]
    assign_dtypes(parameters, options.precision)
    if fill is None:
        cast_around_kept(model, parameters, options.precision)
    require_trainable(model, parameters)
    specs = cut_buckets(units, max_numel)
    facts = {
        "the model (buckets and their parameters)": _described(specs),
        "the optimizer (its parameter groups)": _groups_described(groups.hyperparameters),
    }
    require_same(collectives, facts)

    buckets = []
    for tag, spec in enumerate(specs):
        if fill is not None:
            fill(spec)
        shapes = [managed.parameter.shape for managed in spec.parameters]
        layout = BucketLayout.pack(shapes, collectives.world.size, [managed.stride for managed in spec.parameters])
        weights = BucketWeights(spec, layout, tag, options=options, collectives=collectives, initial=initial)
        gradient = None
        if spec.trainable:
            pool = pools.of(spec.dtype)
            gradient = BucketGradient(spec, layout, tag, options=options, collectives=collectives, pool=pool)
        buckets.append(Bucket(weights, gradient))
    live_units = [
        LiveUnit(unit.name, unit.modules, [b for b, spec in zip(buckets, specs, strict=True) if unit in spec.units])
        for unit in units
    ]
    schedule = Schedule(live_units, buckets, options)
    for bucket in buckets:
        bucket.weights.connect(partial(_touch, weakref.ref(schedule), weakref.ref(bucket)))
    return schedule


def share_unmanaged(model: nn.Module, collectives: Collectives) -> None:
    """Bring what lies in no bucket to this rank's device with rank 0's values: buffers, and parameters that are no
    floating-point numbers.

    Raises:
        ConfigError: one of these parameters is to be trained, or the ranks have different ones.
    """
    managed = {each.parameter for each in managed_parameters(model)}
    others = {name: parameter for name, parameter in model.named_parameters() if parameter not in managed}
    for name, parameter in others.items():
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} is {parameter.dtype} and requires a gradient, which no bucket holds: make it two real "
                "parameters (torch.view_as_real), or freeze it with requires_grad_(False)"
            )
    tensors = dict(model.named_buffers()) | others
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
    fact = f"{len(tensors)} tensors, hash {_hash(shapes)}"
    require_same(collectives, {"the model (buffers, and parameters that are no floating-point numbers)": fact})
    for tensor in tensors.values():
        tensor.data = tensor.data.to(collectives.world.device).contiguous()
        if tensor.numel() > 0:
            # As bytes: backends do not send every dtype.
            collectives.broadcast(tensor.data.view(-1).view(torch.uint8), name="buffers")


def _touch(schedule: "weakref.ref[Schedule]", bucket: "weakref.ref[Bucket]") -> None:
    """Complete a bucket for a stand-in that is read. Weak: the buckets hold the stand-ins."""
    live_schedule, live_bucket = schedule(), bucket()
    if live_schedule is None or live_bucket is None:
        raise EngineStateError(
            "a parameter was read whose engine is gone: keep the engine as long as its model is used, or load what "
            "engine.full_state_dict() gives into a new model"
        )
    live_schedule.touch(live_bucket)


def require_trainable(model: nn.Module, parameters: Sequence[ManagedParameter]) -> None:
    """Make sure that there is something to train.

    Raises:
        ConfigError: every parameter is frozen.
    """
    if not any(managed.parameter.requires_grad for managed in parameters):
        raise ConfigError(f"model {type(model).__name__} has no trainable floating-point parameter; nothing to train")


def require_values(model: nn.Module) -> None:
    """Make sure that there are weights to begin with.

    Raises:
        ConfigError: a parameter or buffer is on the meta device.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ConfigError(
                f"{name} of model {type(model).__name__} is on the meta device, which holds no values; give "
                "build_engine the function that builds the model instead of the model; it holds nothing whole either"
            )


def _described(specs: Sequence[BucketSpec]) -> str:
    """Few words that differ where anything about buckets does."""
    parameters = [managed for spec in specs for managed in spec.parameters]
    details = [
        (
            spec.name,
            [(m.names, tuple(m.parameter.shape), m.stride, m.is_updated_whole, m.span) for m in spec.parameters],
        )
        for spec in specs
    ]
    numel = sum(managed.parameter.numel() for managed in parameters)
    return f"{len(specs)} buckets, {len(parameters)} parameters, {numel} elements, hash {_hash(details)}"


def _groups_described(groups: Sequence[dict[str, Any]]) -> str:
    """The same for hyperparameters; of an object, such as a function, only its class is known on every rank."""

    def shown(value: object) -> str:
        return repr(value) if isinstance(value, torch.Tensor) else type(value).__name__

    return f"{len(groups)} groups, hash {_hash(json.dumps(groups, default=shown))}"


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
