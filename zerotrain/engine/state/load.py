"""Full weights into the shards: one bucket at a time, from rank 0."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import capture
from zerotrain.errors import ConfigError
from zerotrain.sharding.flat_buffer import slot_view

MAX_NAMES_SHOWN = 3


def load_state_dict(
    model: nn.Module, buckets: Sequence[Bucket], state: Mapping[str, Any], collectives: Collectives, *, strict: bool
) -> None:
    """Give all ranks what rank 0 has in `state`, by the names of `model.state_dict()`. Collective.

    Raises:
        ConfigError: on every rank, before anything has changed: names that are missing or unknown, other shapes.
    """
    is_source = collectives.shards.rank == 0
    own = model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
    in_buckets = {managed.parameter for bucket in buckets for managed in bucket.spec.parameters}
    names_of: dict[int, list[str]] = {}
    for name, value in own.items():
        names_of.setdefault(id(value), []).append(name)
    report: Any = None
    given: dict[int, str] = {}
    if is_source:
        # A tied parameter may be given by any of its names.
        given = {id(own[name]): name for name in reversed(own) if name in state}
        problems = _problems(own, state, [names for each, names in names_of.items() if each not in given], strict)
        report = problems, [names_of[each][0] for each in given]
    problems, names_given = collectives.gather_objects(report, name="what is loaded")[0]
    if problems:
        raise ConfigError(*problems)
    members = {id(own[name]) for name in names_given}
    for bucket in buckets:
        # The elements that are not given stay what they are.
        whole = torch.zeros(bucket.layout.padded_numel, dtype=torch.float32, device=collectives.world.device)
        if not all(id(managed.parameter) in members for managed in bucket.spec.parameters):
            whole.copy_(capture(bucket, WEIGHT, torch.float32, collectives))
        for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
            if is_source and id(managed.parameter) in members:
                slot_view(whole, slot).copy_(state[given[id(managed.parameter)]])
        collectives.broadcast(whole, name=bucket.spec.name)
        bucket.load(whole)
    rest = {name: value for name, value in own.items() if value not in in_buckets}
    # By PyTorch itself: buffers, and what modules keep beside their tensors.
    model.load_state_dict(_from_rank_0(rest, state if is_source else {}, collectives), strict=False)


def _from_rank_0(own: Mapping[str, Any], state: Mapping[str, Any], collectives: Collectives) -> dict[str, Any]:
    """What rank 0 has in `state` of what a model has itself."""
    said = {name: None if isinstance(own[name], torch.Tensor) else state[name] for name in own if name in state}
    received: dict[str, Any] = {}
    for name, value in collectives.gather_objects(said, name="buffers")[0].items():
        received[name] = value
        if isinstance(own[name], torch.Tensor):
            tensor = received[name] = own[name].detach().clone()
            if name in state:
                tensor.copy_(state[name])
            if tensor.numel() > 0:
                # As bytes: backends do not send every dtype.
                collectives.broadcast(tensor.view(-1).view(torch.uint8), name="buffers")
    return received


def _problems(
    own: Mapping[str, Any], state: Mapping[str, Any], not_given: Iterable[Sequence[str]], strict: bool
) -> list[str]:
    problems = []
    missing, unknown = [names[0] for names in not_given], [name for name in state if name not in own]
    if strict and missing:
        problems.append(f"load_state_dict: {_listed(missing)} missing; give all of the model, or say strict=False")
    if strict and unknown:
        problems.append(f"load_state_dict: the model has no {_listed(unknown)}; leave it out, or say strict=False")
    for name, value in own.items():
        if isinstance(value, torch.Tensor) and name in state and state[name].shape != value.shape:
            shapes = tuple(state[name].shape), tuple(value.shape)
            problems.append(f"load_state_dict: {name} is of shape {shapes[0]}, and the model's of shape {shapes[1]}")
    return problems


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
