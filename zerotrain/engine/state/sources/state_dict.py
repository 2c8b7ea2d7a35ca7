"""A dict of full weights as a source: rank 0 has it, and sends it one bucket at a time."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import require_tellable
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import NamedPiece
from zerotrain.engine.state.source import Source
from zerotrain.engine.state.together import LEFT, on_all
from zerotrain.errors import ConfigError, EngineStateError, ZeroTrainError, listed
from zerotrain.sharding.layout import slot_view


class StateDict(Source):
    """Full weights by the names of `model.state_dict()`. Only rank 0 must give them.

    Raises:
        ConfigError: on rank 0; it is no dict.
        EngineStateError: on rank 0; it holds what ranks cannot tell each other.
    """

    is_collective = True

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        collectives: Collectives,
        state: Mapping[str, Any],
        *,
        strict: bool,
    ) -> None:
        self._model, self._buckets, self._collectives = model, buckets, collectives
        self._own = model.state_dict(keep_vars=True)  # without detaching them: that would read sharded parameters
        self._state: Mapping[str, Any] = {}
        self._name_of: dict[int, str] = {}
        """By the id of each parameter that is given the name that it has in the dict; of a tied one any."""
        self._problems: list[str] = []
        self._given_others: dict[str, Any] = {}
        """By name what is in no bucket: of a tensor None, of what modules keep beside their tensors the value."""
        self._members: set[int] = set()
        self._whole: torch.Tensor | None = None
        if collectives.shards.rank != 0:
            return
        if not isinstance(state, Mapping):
            got = type(state).__name__
            raise ConfigError(f"load_state_dict: got a {got}; give what engine.full_state_dict() gives, a dict by name")
        self._state = state
        self._name_of = {id(self._own[name]): name for name in reversed(self._own) if name in state}
        names_of: dict[int, list[str]] = {}
        for name, value in self._own.items():
            names_of.setdefault(id(value), []).append(name)
        not_given = [names for key, names in names_of.items() if key not in self._name_of]
        self._problems = _problems(self._own, state, not_given, strict)
        for name, value in _others(self._own, buckets).items():
            if name in state:
                self._given_others[name] = None if isinstance(value, torch.Tensor) else state[name]
        require_tellable(self._given_others)

    def agree(self) -> None:
        """Compare names on all ranks, and load what lies in no bucket: a module may refuse it. Collective, before
        `fill`.

        Raises:
            ConfigError: on every rank, before anything has changed: names that are missing or unknown, other shapes.
            CheckpointError: likewise; a module does not take what it is to keep beside its tensors.
        """
        said = self._problems, [name for name in self._own if id(self._own[name]) in self._name_of], self._given_others
        problems, names, others = self._collectives.gather_objects(said, name="what is loaded")[0]
        if problems:
            raise ConfigError(*problems)
        self._members = {id(self._own[name]) for name in names}
        self._load_others(others)

    def begin(self, bucket: Bucket, role: str) -> None:
        self._whole = None
        if any(id(managed.parameter) in self._members for managed in bucket.spec.parameters):
            whole = torch.zeros(bucket.layout.padded_numel, dtype=torch.float32, device=self._collectives.world.device)
            for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
                if (name := self._name_of.get(id(managed.parameter))) is not None:
                    slot_view(whole, slot).copy_(self._state[name])
            self._collectives.broadcast(whole, name=bucket.spec.name)
            self._whole = whole

    def read(self, piece: NamedPiece) -> None:
        if self._whole is not None and id(piece.managed.parameter) in self._members:
            piece.values.copy_(self._whole[piece.in_bucket])

    def _load_others(self, others: Mapping[str, Any]) -> None:
        """Load buffers, and what modules keep beside their tensors, by PyTorch itself."""
        before = {
            name: value.detach().clone(memory_format=torch.contiguous_format)
            if isinstance(value, torch.Tensor)
            else value
            for name, value in _others(self._own, self._buckets).items()
        }
        taken = dict(others)
        for name, value in before.items():
            if name in taken and isinstance(value, torch.Tensor):
                tensor = taken[name] = value.clone()
                if name in self._state:
                    tensor.copy_(self._state[name])
                if tensor.numel() > 0:
                    # As bytes: backends do not send every dtype.
                    self._collectives.broadcast(tensor.view(-1).view(torch.uint8), name="buffers")
        try:
            on_all(
                self._collectives,
                lambda: self._model.load_state_dict(taken, strict=False),
                doing="engine.load_state_dict",
                left=LEFT,
            )
        except ZeroTrainError:
            with suppress(Exception):  # the first cause is what the user reads
                self._model.load_state_dict(before, strict=False)
            raise


def _others(own: Mapping[str, Any], buckets: Sequence[Bucket]) -> dict[str, Any]:
    """All that a model has that is in no bucket, by name."""
    in_buckets = {id(managed.parameter) for bucket in buckets for managed in bucket.spec.parameters}
    return {name: value for name, value in own.items() if id(value) not in in_buckets}


def _problems(
    own: Mapping[str, Any], state: Mapping[str, Any], not_given: Iterable[Sequence[str]], strict: bool
) -> list[str]:
    problems = []
    missing, unknown = [names[0] for names in not_given], [name for name in state if name not in own]
    if strict and missing:
        problems.append(f"load_state_dict: {listed(missing)} missing; give all of the model, or strict=False")
    if strict and unknown:
        problems.append(f"load_state_dict: the model has no {listed(unknown)}; leave it out, or give strict=False")
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
    """True for a tensor whose numbers can be copied one by one: not a sparse one, nor one without memory."""
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
