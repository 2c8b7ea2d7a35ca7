"""From a model and a plan to live buckets, units and a schedule."""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
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
from zerotrain.engine.param_groups import ParamGroups
from zerotrain.engine.precision import Precision
from zerotrain.engine.schedule import Schedule
from zerotrain.engine.scratch import ScratchPools
from zerotrain.engine.weights import BucketWeights
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.sharding.bucketing import BucketSpec, ManagedParameter, cut_buckets, cut_units, managed_parameters
from zerotrain.sharding.layout import BucketLayout
from zerotrain.sharding.plan import Plan


@dataclass(frozen=True)
class EngineOptions:
    """How the engine moves what the plan shards. Meaning and units as in `zerotrain.config.schema.ZeroConfig`."""

    bucket_mb: float = 25.0
    overlap: bool = True
    prefetch: int = 1
    ordered: bool = True
    """Reduce in rank order in fp32; False: by the backend's reduce-scatter."""
    units: Sequence[str] | None = None
    """Module name patterns; None: the repeated blocks."""
    reshard_after_forward: bool = True


def build_schedule(
    model: nn.Module,
    *,
    plan: Plan,
    options: EngineOptions,
    precision: Precision,
    groups: ParamGroups,
    collectives: Collectives,
    pools: ScratchPools,
    exact_norm: bool,
    initial: InitialValues,
    fill: Callable[[BucketSpec], None] | None = None,
) -> Schedule:
    """Cut `model` into buckets, move its parameters into them and order them.

    Args:
        fill: called with each bucket before it is made, to give its parameters values; None: they have them, in a model
            that is cut for the first time.

    Raises:
        ConfigError: ranks with different models, no trainable parameter, a pattern of units or of kept parameters that
            matches nothing, or an optimizer that cannot work so.
    """
    max_numel = max(1, int(options.bucket_mb * 2**20) // precision.compute.itemsize)
    units = cut_units(model, options.units, max_numel)
    groups.label(units)
    parameters = [managed for unit in units for managed in unit.parameters]
    assign_dtypes(parameters, precision)
    if fill is None:
        cast_around_kept(model, parameters, precision)
    require_trainable(model, parameters)
    specs = cut_buckets(units, max_numel)
    require_same(collectives, {"the model (buckets and their parameters)": _described(specs)})

    buckets = []
    for tag, spec in enumerate(specs):
        if fill is not None:
            fill(spec)
        layout = _layout_of(spec, collectives.world.size)
        of_bucket = precision.of_bucket(spec.dtype)
        common: dict[str, Any] = {"plan": plan, "precision": of_bucket, "collectives": collectives, "tag": tag}
        weights = BucketWeights(spec, layout, initial=initial, **common)
        common |= {"pool": pools.of(spec.dtype), "exact_norm": exact_norm}
        buckets.append(Bucket(weights, BucketGradient(spec, layout, **common) if spec.trainable else None))
    live_units = [
        LiveUnit(unit.name, unit.modules, [b for b, spec in zip(buckets, specs, strict=True) if unit in spec.units])
        for unit in units
    ]
    schedule = Schedule(
        live_units,
        buckets,
        plan=plan,
        prefetch=options.prefetch,
        reshard_after_forward=options.reshard_after_forward,
    )
    for bucket in buckets:
        bucket.weights.connect(partial(_touch, weakref.ref(schedule), weakref.ref(bucket)))
    return schedule


def _layout_of(spec: BucketSpec, world_size: int) -> BucketLayout:
    shapes = [managed.parameter.shape for managed in spec.parameters]
    return BucketLayout.pack(shapes, world_size, [managed.stride for managed in spec.parameters])


def share_unmanaged(model: nn.Module, collectives: Collectives) -> None:
    """Bring what lies in no bucket to this rank's device with rank 0's values: buffers, and parameters that are no
    floating-point numbers.

    Raises:
        ConfigError: one of these parameters is to be trained.
    """
    managed = {each.parameter for each in managed_parameters(model)}
    others = {name: parameter for name, parameter in model.named_parameters() if parameter not in managed}
    for name, parameter in others.items():
        if parameter.requires_grad:
            raise ConfigError(
                f"{name} is {parameter.dtype} and requires a gradient, which no bucket holds: make it two real "
                "parameters (torch.view_as_real), or freeze it with requires_grad_(False)"
            )
    for tensor in (*model.buffers(), *others.values()):
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


def engine_settings(
    plan: Plan, options: EngineOptions, precision: Precision, max_grad_norm: float | None, max_skipped_steps: int
) -> dict[str, object]:
    """What must be the same on all ranks, by the names of the settings."""
    placements = [f"{each.name} {getattr(plan, each.name).value}" for each in fields(plan)]
    moves = {f"zero.{name}": value for name, value in asdict(options).items()}
    moves["zero.reduction"] = "ordered" if moves.pop("zero.ordered") else "native"
    return {
        "zero.stage": ", ".join(placements),
        **moves,
        "precision": precision.name,
        "precision.keep_fp32": list(precision.keep_fp32),
        "train.max_grad_norm": max_grad_norm,
        "train.max_skipped_steps": max_skipped_steps,
    }


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
    digest = hashlib.sha256(repr(details).encode()).hexdigest()[:8]
    numel = sum(managed.parameter.numel() for managed in parameters)
    return f"{len(specs)} buckets, {len(parameters)} parameters, {numel} elements, hash {digest}"
