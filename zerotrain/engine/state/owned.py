"""The part of an engine that a rank saves: of each bucket its own range, whatever the stage; the rest of a manifest."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.checkpoint.tensor_file import Entry
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.state.named import NamedPiece, kept_states, pieces, roles
from zerotrain.errors import EngineStateError
from zerotrain.sharding.units import ManagedParameter


@dataclass(frozen=True)
class Holdings:
    """The parts of an engine that a checkpoint is made of."""

    model: nn.Module
    buckets: Sequence[Bucket]
    groups: ParamGroups
    options: EngineOptions
    collectives: Collectives

    @property
    def trained(self) -> list[TrainedBucket]:
        return [bucket for bucket in self.buckets if isinstance(bucket, TrainedBucket)]

    @property
    def parameters(self) -> dict[str, ManagedParameter]:
        """By first name."""
        return {managed.names[0]: managed for bucket in self.buckets for managed in bucket.spec.parameters}


def owned_pieces(bucket: Bucket, rank: int) -> Iterator[NamedPiece]:
    """The part of a bucket that this rank saves: the elements in its own range, which at stages that replicate is less
    than it holds, and what is kept of the whole tensors that it owns."""
    own = bucket.weights.own
    for role in roles(bucket):
        for piece in pieces(bucket, role):
            if piece.in_tensor is None or piece.in_bucket is None:
                assert isinstance(bucket, TrainedBucket)
                if bucket.update.owners[bucket.spec.parameters.index(piece.managed)] == rank:
                    yield piece
                continue
            start, stop = max(piece.in_bucket.start, own.start), min(piece.in_bucket.stop, own.stop)
            if start < stop:
                skipped, ahead = start - piece.in_bucket.start, piece.in_bucket.start - piece.in_tensor.start
                values = piece.values[skipped : skipped + stop - start]
                yield NamedPiece(piece.managed, role, values, slice(start - ahead, stop - ahead), slice(start, stop))


def entries(holdings: Holdings, rank: int) -> Iterator[tuple[Bucket, Entry]]:
    """The tensors of this rank's file, bucket by bucket in the order of updates, without buffers."""
    for bucket in holdings.buckets:
        for piece in owned_pieces(bucket, rank):
            if is_traceable_wrapper_subclass(piece.values):
                raise EngineStateError(
                    f"the optimizer keeps {piece.role} of {piece.managed.names[0]} as a "
                    f"{type(piece.values).__name__}, which is no plain tensor and cannot be saved"
                )
            start = 0 if piece.in_tensor is None else piece.in_tensor.start
            shape = list(piece.values.shape) if piece.in_tensor is None else None
            yield bucket, Entry(piece.managed.names[0], piece.role, piece.values, start, shape)


def counts(holdings: Holdings) -> dict[str, dict[str, Any]]:
    """Values that the optimizer keeps once for a parameter and not for its elements, such as the number of its steps:
    by name of the parameters of which this rank updates anything.

    Raises:
        EngineStateError: it keeps something that is no number and no text.
    """
    found: dict[str, dict[str, Any]] = {}
    for bucket in holdings.trained:
        for kept in kept_states(bucket):
            tensors = kept.tensors()
            once = {name: _count(name, value) for name, value in kept.values.items() if name not in tensors}
            found.update((managed.names[0], once) for managed in kept.members)
    return found


def _count(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    if value is None or type(value) in (bool, int, float, str):
        return value
    what = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise EngineStateError(
        f"the optimizer keeps {name!r}, {what}, which is neither a number for each element nor one for all: it cannot "
        "be saved"
    )


def buffers(model: nn.Module, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
    """Tensors in no bucket that belong to the model's state: buffers that its state dict has, and parameters that are
    no floating-point numbers."""
    in_buckets = {id(managed.parameter) for bucket in buckets for managed in bucket.spec.parameters}
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kept = {name: each for name, each in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, tensor in (*kept.items(), *module._parameters.items()):
            if tensor is not None and id(tensor) not in in_buckets and id(tensor) not in seen:
                seen.add(id(tensor))
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def saved_parameters(holdings: Holdings, kept: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters as the manifest has them, without their tensors."""
    places = holdings.groups.places
    whole = {name: managed.is_updated_whole for name, managed in holdings.parameters.items()}
    return {
        name: {
            "names": managed.names,
            "shape": list(managed.parameter.shape),
            "stride": list(managed.stride),
            "trains": places[name][0],
            "group": places[name][1],
            "generation": places[name][2],
            "is_updated_whole": whole[name],
            "counts": kept.get(name, {}),
            "tensors": {},
        }
        for name, managed in holdings.parameters.items()
    }
