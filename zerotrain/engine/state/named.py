"""The model's state by name, one bucket at a time: weights, gradients, and what the optimizer keeps.

Full weights, their hash, a change of what trains and the search for a bad gradient walk over it; what is saved and what
moves to another stage can be told in the same words: the name of a parameter, a role, and which elements.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.checkpoint.manifest import AVERAGE, EXTRA_STATE, WEIGHT, SavedBuffer
from zerotrain.checkpoint.tensor_file import Entry, Reader
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.options import EngineOptions
from zerotrain.errors import EngineStateError
from zerotrain.sharding.layout import slot_view
from zerotrain.sharding.units import ManagedParameter

GRADIENT = "gradient of the step"
"""The role that every bucket has that trains, beside WEIGHT, which every one has, AVERAGE and those that the optimizer
names, none of which is called so."""


@dataclass(frozen=True, eq=False)
class NamedPiece:
    """The part that this rank holds of one parameter in one role."""

    managed: ManagedParameter
    role: str
    values: torch.Tensor
    """The memory itself: (n,) elements; what is kept of a tensor that is updated whole, in the shape it is kept in."""
    in_tensor: slice | None
    """The elements of the parameter, in the order of its memory (`ManagedParameter.stride`); None for what
    is kept of the tensor as a whole."""
    in_bucket: slice | None
    """The place of the same elements in the bucket."""


def pieces(bucket: Bucket, role: str, within: slice | None = None) -> Iterator[NamedPiece]:
    """Give what this rank holds of the parameters of a bucket in one role, in place, without what is empty.

    Args:
        within: only these elements of the bucket, and what is kept of whole tensors; None: all.
    """
    if role == WEIGHT:
        yield from cut_pieces(bucket, role, current_weight(bucket), kept_range(bucket), within)
    elif not isinstance(bucket, TrainedBucket):
        return
    elif role == GRADIENT:
        yield from cut_pieces(bucket, role, bucket.gradient.shard, bucket.weights.own, within)
    elif role == AVERAGE:
        if (average := current_average(bucket)) is not None:
            yield from cut_pieces(bucket, role, average, bucket.update.where, within)
    else:
        for state in kept_states(bucket):
            if role in state.tensors():
                values = state.values[role]
                if isinstance(state.where, slice):
                    yield from cut_pieces(bucket, role, values, state.where, within)
                else:
                    yield NamedPiece(state.members[0], role, values, None, None)


@dataclass(frozen=True, eq=False)
class KeptState:
    """State that the optimizer keeps on this rank of a span, or of a tensor that is updated whole."""

    members: list[ManagedParameter]
    """Its parameters; for a span those of its group and age, even if this rank has none of their elements."""
    where: slice | int
    """Elements of the bucket, or the slot of the tensor."""
    target: torch.Tensor
    values: dict[str, Any]
    """By name; to be read and written."""

    def tensors(self) -> list[str]:
        """The names of what is kept for each element, and not once for all."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        if isinstance(self.where, slice):
            return [name for name, value in tensors.items() if value.shape == self.target.shape]
        return [name for name, value in tensors.items() if value.ndim > 0]


def kept_states(bucket: Bucket) -> Iterator[KeptState]:
    """All that the optimizer keeps on this rank of a bucket: of spans, then of tensors that are updated whole."""
    if not isinstance(bucket, TrainedBucket):
        return
    update, members = bucket.update, bucket.spec.parameters
    for span in update.spans:
        alike = [managed for managed in members if managed.span == span.key and not managed.is_updated_whole]
        where = slice(update.where.start + span.where.start, update.where.start + span.where.stop)
        yield KeptState(alike, where, span.target, update.span_state(span))
    for slot, target in update.whole.targets.items() if update.whole is not None else ():
        yield KeptState([members[slot]], slot, target, update.whole_state(slot))


def replaced_weights(bucket: Bucket) -> Iterator[NamedPiece]:
    """Yield the pieces that this rank fills when weights are replaced, between `begin_refill` and `end_refill`. For
    frozen weights it is the rank's own range, even if all ranks hold all: the other parts come by a gather."""
    if isinstance(bucket, TrainedBucket):
        yield from pieces(bucket, WEIGHT)
    else:
        yield from cut_pieces(bucket, WEIGHT, bucket.weights.shard, bucket.weights.own)


def roles(bucket: Bucket) -> list[str]:
    """The roles in which this rank holds tensors of a bucket, the gradient left out."""
    own = [WEIGHT] if current_average(bucket) is None else [WEIGHT, AVERAGE]
    return [*own, *sorted({name for state in kept_states(bucket) for name in state.tensors()})]


def current_average(bucket: Bucket) -> torch.Tensor | None:
    """The average of the weights that this rank updates, at rest; None where none is kept."""
    if not isinstance(bucket, TrainedBucket):
        return None
    bucket.update.home.put_away()
    return bucket.update.state.average


def capture(bucket: Bucket, role: str, dtype: torch.dtype, collectives: Collectives) -> torch.Tensor:
    """(padded_numel,) of one role, from all ranks, 0 where there is none. Collective; one bucket is whole meanwhile.

    Not for what is kept of tensors that are updated whole: their owners have that (`pieces`).
    """
    if role == WEIGHT:
        part = current_weight(bucket).to(collectives.world.device)
    else:
        where = kept_range(bucket)
        part = torch.zeros(where.stop - where.start, dtype=dtype, device=collectives.world.device)
        for piece in pieces(bucket, role):
            if piece.in_bucket is not None:
                part[piece.in_bucket.start - where.start : piece.in_bucket.stop - where.start] = piece.values
    if part.numel() == bucket.layout.padded_numel:
        return part
    full = part.new_empty(bucket.layout.padded_numel)
    what = "master weights" if role == WEIGHT else role
    collectives.gather_now(f"{what} of {bucket.spec.name}", full, part)
    return full


def full_weights(bucket: Bucket, collectives: Collectives) -> Iterator[tuple[ManagedParameter, torch.Tensor]]:
    """Each parameter of a bucket and its full master weight, a view. Collective, once, when the first is asked for."""
    flat = capture(bucket, WEIGHT, torch.float32, collectives)
    for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
        yield managed, slot_view(flat, slot)


def current_weight(bucket: Bucket) -> torch.Tensor:
    """The weights that this rank keeps, with what others than the engine have written into the parameters."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.current_weight()
    bucket.weights.home.put_away()
    bucket.weights.take_writes()
    return bucket.weights.held


def kept_range(bucket: Bucket) -> slice:
    """The elements of a bucket whose weights this rank keeps up to date."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.where
    return bucket.weights.own if bucket.weights.plan.shards_parameters else slice(0, bucket.layout.padded_numel)


def cut_pieces(
    bucket: Bucket, role: str, values: torch.Tensor, where: slice, within: slice | None = None
) -> Iterator[NamedPiece]:
    """The pieces of `values`, which lie at `where` in the bucket, parameter by parameter; see `pieces`."""
    within = within or where
    first, last = max(where.start, within.start), min(where.stop, within.stop)
    for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
        start, end = max(slot.offset, first), min(slot.end, last)
        if start < end:
            part, in_tensor = (
                values[start - where.start : end - where.start],
                slice(start - slot.offset, end - slot.offset),
            )
            yield NamedPiece(managed, role, part, in_tensor, slice(start, end))


# State of modules beside their tensors, by PyTorch's `get_extra_state` and `set_extra_state`: rank 0's is saved.


def modules_with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name in the model's state dict, module)."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def extra_states(model: nn.Module) -> dict[str, Any]:
    """By name, as the modules give it now."""
    return {name: module.get_extra_state() for name, module in modules_with_extra_state(model)}


def entries_of(states: Mapping[str, Any]) -> list[Entry]:
    """Those that are tensors, as they are now."""
    tensors = {name: state for name, state in states.items() if isinstance(state, torch.Tensor)}
    return [Entry(name, EXTRA_STATE, values.detach().reshape(-1).clone(), 0) for name, values in tensors.items()]


def described(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """For the manifest: {"value": ...}, or a tensor without its pieces."""
    return {
        name: {"shape": list(state.shape), "dtype": str(state.dtype).removeprefix("torch."), "pieces": []}
        if isinstance(state, torch.Tensor)
        else {"value": state}
        for name, state in states.items()
    }


def restore_extra_states(model: nn.Module, saved: Mapping[str, dict[str, Any] | SavedBuffer], reader: Reader) -> None:
    """Give the modules theirs: tensors on the CPU."""
    for name, module in modules_with_extra_state(model):
        if (state := saved.get(name)) is None:
            continue  # a checkpoint from before they were saved
        if not isinstance(state, SavedBuffer):
            module.set_extra_state(state["value"])
            continue
        values = torch.empty(state.shape, dtype=state.torch_dtype)
        if values.numel() > 0:
            reader.read(state, 0, values)
        module.set_extra_state(values)


# Full weights out of the shards: one bucket at a time, on rank 0.


def full_state_dict(model: nn.Module, buckets: Iterable[Bucket], collectives: Collectives) -> dict[str, Any]:
    """The model's `state_dict()` with full parameters in fp32, on the CPU. Collective. Hooks that rename, add or drop
    keys, and modules that add extra state, see a whole model.
    """
    whole: dict[ManagedParameter, nn.Parameter] = {}
    is_asked = collectives.world.rank == 0
    for bucket in buckets:
        for managed, value in full_weights(bucket, collectives):
            if is_asked:
                copy = value.to(device="cpu", dtype=torch.float32, copy=True)
                whole[managed] = nn.Parameter(copy, requires_grad=managed.parameter.requires_grad)
        bucket.forget()
    if not is_asked:
        return {}
    with _in_place(whole):
        state: dict[str, Any] = model.state_dict()
    copied = {parameter.untyped_storage()._cdata for parameter in whole.values()}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in copied:
            state[name] = value.detach().to("cpu", copy=True)
    return state


@contextmanager
def _in_place(whole: Mapping[ManagedParameter, nn.Parameter]) -> Iterator[None]:
    """In here modules hold these in place of their parameters, where they still have those."""
    places = [
        (owner._parameters, name, managed.parameter, parameter)
        for managed, parameter in whole.items()
        for owner, name in managed.owners
        if owner._parameters.get(name) is managed.parameter
    ]
    try:
        for held, name, _, parameter in places:
            held[name] = parameter
        yield
    finally:
        for held, name, parameter, _ in places:
            held[name] = parameter


def weights_sha256(buckets: Iterable[Bucket], collectives: Collectives) -> str:
    """SHA-256 of the bytes of the full fp32 weights in the order of their (first) names. One bucket is held whole."""
    homes = {managed.names[0]: bucket for bucket in buckets for managed in bucket.spec.parameters}
    digest = hashlib.sha256()
    held: Bucket | None = None
    by_name: dict[str, torch.Tensor] = {}
    for name in sorted(homes):
        if homes[name] is not held:
            by_name.clear()  # before the next is gathered, not after
            if held is not None:
                held.forget()
            held = homes[name]
            by_name = {managed.names[0]: value for managed, value in full_weights(held, collectives)}
        if collectives.world.rank == 0:
            # A dense tensor's elements as they lie in memory: no copy where they are fp32 on the CPU.
            value = by_name[name].as_strided((by_name[name].numel(),), (1,))
            digest.update(value.to(device="cpu", dtype=torch.float32).numpy().data)
    by_name.clear()
    if held is not None:
        held.forget()
    agreed = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=collectives.world.device)
    collectives.broadcast(agreed, name="the hash of the weights")
    return bytes(agreed.tolist()).hex()


# The part of an engine that a rank saves: of each bucket its own range, whatever the stage; the rest of a manifest.


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
    for role in roles(bucket):
        for piece in pieces(bucket, role, bucket.weights.own):
            if piece.in_tensor is None:
                assert isinstance(bucket, TrainedBucket)
                if bucket.update.owners[bucket.spec.parameters.index(piece.managed)] != rank:
                    continue
            yield piece


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
    counts_by_name: dict[str, dict[str, Any]] = {}
    for bucket in holdings.trained:
        for state in kept_states(bucket):
            tensors = state.tensors()
            once = {name: _count(name, value) for name, value in state.values.items() if name not in tensors}
            counts_by_name.update((managed.names[0], once) for managed in state.members)
    return counts_by_name


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
    tensors: dict[str, torch.Tensor] = {}
    seen_ids: set[int] = set()
    for prefix, module in model.named_modules():
        unsaved = module._non_persistent_buffers_set
        persistent = {name: tensor for name, tensor in module._buffers.items() if name not in unsaved}
        for name, tensor in (*persistent.items(), *module._parameters.items()):
            if tensor is not None and id(tensor) not in in_buckets and id(tensor) not in seen_ids:
                seen_ids.add(id(tensor))
                tensors[f"{prefix}.{name}" if prefix else name] = tensor
    return tensors


def saved_parameters(holdings: Holdings, counts_of: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The parameters as the manifest has them, without their tensors."""
    places = holdings.groups.places
    return {
        name: {
            "names": managed.names,
            "shape": list(managed.parameter.shape),
            "stride": list(managed.stride),
            "trains": places[name][0],
            "group": places[name][1],
            "generation": places[name][2],
            "is_updated_whole": managed.is_updated_whole,
            "counts": counts_of.get(name, {}),
            "tensors": {},
        }
        for name, managed in holdings.parameters.items()
    }
