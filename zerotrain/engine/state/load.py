"""Full weights into the shards: one bucket at a time, from rank 0."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.wire import require_tellable
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import capture
from zerotrain.engine.state.together import LEFT, attempt, raise_first
from zerotrain.errors import ConfigError, EngineStateError, ZeroTrainError
from zerotrain.sharding.flat_buffer import slot_view

MAX_NAMES_SHOWN = 3


@dataclass(frozen=True)
class GivenState:
    """What rank 0 has been given; of other ranks nothing is asked."""

    own: dict[str, Any]
    """What the model has, by name."""
    state: Mapping[str, Any]
    names: dict[int, str]
    """By the id of each parameter in `state` the name it has there; of a tied one any."""
    problems: list[str]
    others: dict[str, Any]
    """What is in no bucket, by name: of a tensor None, of what modules keep beside their tensors the value."""


class Target:
    """What full weights are loaded into: the parameters in buckets, and what the model has beside them."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket], collectives: Collectives) -> None:
        self._model, self._buckets, self._collectives = model, buckets, collectives
        self._is_source = collectives.shards.rank == 0

    def look_at(self, state: Mapping[str, Any], *, strict: bool) -> GivenState:
        """What of `state`, by the names of `model.state_dict()`, this rank gives to all."""
        own = self._model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
        if not self._is_source:
            return GivenState(own, {}, {}, [], {})
        if not isinstance(state, Mapping):
            got = type(state).__name__
            raise ConfigError(f"load_state_dict: got a {got}; give what engine.full_state_dict() gives, a dict by name")
        # A tied parameter may be given by any of its names.
        names = {id(own[name]): name for name in reversed(own) if name in state}
        names_of: dict[int, list[str]] = {}
        for name, value in own.items():
            names_of.setdefault(id(value), []).append(name)
        problems = _problems(own, state, [each for key, each in names_of.items() if key not in names], strict)
        rest = _others(own, self._buckets)
        others = {name: None if isinstance(rest[name], torch.Tensor) else state[name] for name in rest if name in state}
        require_tellable(others)
        return GivenState(own, state, names, problems, others)

    def take(self, given: GivenState) -> None:
        """Give all ranks what rank 0 was given. Collective.

        Raises:
            ConfigError: on every rank, before anything has changed: names that are missing or unknown, other shapes.
            CheckpointError: likewise; a module does not take what it is to keep beside its tensors.
        """
        own = given.own
        said = given.problems, [name for name in own if id(own[name]) in given.names], given.others
        problems, names, others = self._collectives.gather_objects(said, name="what is loaded")[0]
        if problems:
            raise ConfigError(*problems)
        self._take_others(given, others)
        self._take_weights({id(own[name]) for name in names}, given)

    def _take_weights(self, members: set[int], given: GivenState) -> None:
        for bucket in self._buckets:
            # The elements that are not given stay what they are.
            whole = torch.zeros(bucket.layout.padded_numel, dtype=torch.float32, device=self._collectives.world.device)
            if not all(id(managed.parameter) in members for managed in bucket.spec.parameters):
                whole.copy_(capture(bucket, WEIGHT, torch.float32, self._collectives))
            for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
                if self._is_source and id(managed.parameter) in members:
                    slot_view(whole, slot).copy_(given.state[given.names[id(managed.parameter)]])
            self._collectives.broadcast(whole, name=bucket.spec.name)
            bucket.load(whole)

    def _take_others(self, given: GivenState, others: Mapping[str, Any]) -> None:
        """By PyTorch itself: buffers, and what modules keep beside their tensors. Before the weights, since a module
        may refuse."""
        before = {
            name: value.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in _others(given.own, self._buckets).items()
        }
        taken = dict(others)
        for name, value in before.items():
            if name in taken and isinstance(value, torch.Tensor):
                tensor = taken[name] = value.clone()
                if name in given.state:
                    tensor.copy_(given.state[name])
                if tensor.numel() > 0:
                    # As bytes: backends do not send every dtype.
                    self._collectives.broadcast(tensor.view(-1).view(torch.uint8), name="buffers")
        _, error = attempt(lambda: self._model.load_state_dict(taken, strict=False))
        try:
            raise_first(self._collectives, error, doing="engine.load_state_dict", left=LEFT)
        except ZeroTrainError:
            with suppress(Exception):  # the first cause is what the user reads
                self._model.load_state_dict(before, strict=False)
            raise


def _others(own: Mapping[str, Any], buckets: Sequence[Bucket]) -> dict[str, Any]:
    """What a model has that is in no bucket, by name."""
    in_buckets = {id(managed.parameter) for bucket in buckets for managed in bucket.spec.parameters}
    return {name: value for name, value in own.items() if id(value) not in in_buckets}


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
        if not isinstance(value, torch.Tensor) or name not in state:
            continue
        if not _is_readable(state[name]):
            problems.append(f"load_state_dict: {name} is {_kind(state[name])}; give a tensor that holds its numbers")
        elif state[name].shape != value.shape:
            shapes = tuple(state[name].shape), tuple(value.shape)
            problems.append(f"load_state_dict: {name} is of shape {shapes[0]}, and the model's of shape {shapes[1]}")
    return problems


def _is_readable(value: Any) -> bool:
    """Whether it is a tensor whose numbers can be copied one by one: not a sparse one, nor one without memory."""
    try:
        torch.zeros(()).copy_(value[(0,) * value.ndim] if value.numel() else value.sum())
    except EngineStateError:
        raise  # a parameter that is sharded says what to do
    except Exception:
        return False
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _kind(value: Any) -> str:
    return (
        f"a {value.layout} tensor on {value.device}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
