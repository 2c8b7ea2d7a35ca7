"""The model's state by name, one bucket at a time: weights, gradients, and the optimizer's state.

Full weights, their hash, a change of what trains and the search for a bad gradient walk over it. A save and a change of
the stage speak of it in the same words: the name of a parameter, a role, and which elements.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.checkpoint.manifest import AVERAGE, DTYPES, WEIGHT, SavedBuffer
from zerotrain.checkpoint.tensor_file import Entry, Reader
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.options import EngineOptions
from zerotrain.errors import EngineStateError
from zerotrain.files.untrusted import Shape
from zerotrain.sharding.layout import slot_view
from zerotrain.sharding.units import ManagedParameter

GRADIENT = "gradient of the step"
"""A role of every bucket that trains. The others are WEIGHT, of every bucket, AVERAGE, and the names of the optimizer's
own state; none of those is called so."""


@dataclass(frozen=True, eq=False)
class NamedPiece:
    """This rank's part of one parameter in one role."""

    managed: ManagedParameter
    role: str
    values: torch.Tensor
    """The memory itself: (n,) elements; state of a parameter updated whole has its own shape."""
    in_tensor: slice | None
    """The elements of the parameter, in the order of its memory (`ManagedParameter.stride`); None for state of the
    parameter as a whole."""
    in_bucket: slice | None
    """The place of the same elements in the bucket."""


def held_values(bucket: Bucket, role: str) -> Iterator[tuple[slice | int, torch.Tensor]]:
    """This rank's values of a bucket in one role, in place, each with its elements of the bucket, or with its slot."""
    if role == WEIGHT:
        yield kept_range(bucket), current_weight(bucket)
    elif role == AVERAGE:
        if (average := current_average(bucket)) is not None:
            yield kept_range(bucket), average
    elif role == GRADIENT and isinstance(bucket, TrainedBucket):
        yield bucket.weights.own, bucket.gradient.shard
    else:
        for state in kept_states(bucket):
            if role in state.tensors():
                yield state.where, state.values[role]


def pieces(bucket: Bucket, role: str, within: slice | None = None) -> Iterator[NamedPiece]:
    """Give this rank's parts of the parameters of a bucket in one role, in place, without empty ones.

    Args:
        within: only these elements of the bucket, and state of whole parameters; None: all.
    """
    for where, values in held_values(bucket, role):
        if isinstance(where, slice):
            yield from cut_pieces(bucket, role, values, where, within)
        else:
            yield NamedPiece(bucket.spec.parameters[where], role, values, None, None)


@dataclass(frozen=True, eq=False)
class KeptState:
    """The optimizer's state on this rank of a span, or of a parameter updated whole."""

    members: list[ManagedParameter]
    """Its parameters; for a span those of its group and age, even if this rank has none of their elements."""
    where: slice | int
    """Elements of the bucket, or the slot of the tensor."""
    target: torch.Tensor
    values: dict[str, Any]
    """By name; to be read and written."""

    def tensors(self) -> list[str]:
        """The names of state with a number for each element, and not once for all."""
        tensors = {name: value for name, value in self.values.items() if isinstance(value, torch.Tensor)}
        if isinstance(self.where, slice):
            return [name for name, value in tensors.items() if value.shape == self.target.shape]
        return [name for name, value in tensors.items() if value.ndim > 0]


def kept_states(bucket: Bucket) -> Iterator[KeptState]:
    """The optimizer's state on this rank of a bucket: of spans, then of parameters updated whole."""
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
    """Yield the pieces for this rank to fill when weights are replaced, between `begin_refill` and `end_refill`. For
    frozen weights it is the rank's own range, even if all ranks hold all: the other parts come by a gather."""
    if isinstance(bucket, TrainedBucket):
        yield from pieces(bucket, WEIGHT)
    else:
        yield from cut_pieces(bucket, WEIGHT, bucket.weights.shard, bucket.weights.own)


def roles(bucket: Bucket) -> list[str]:
    """The roles of this rank's tensors of a bucket, without the gradient."""
    own = [WEIGHT] if current_average(bucket) is None else [WEIGHT, AVERAGE]
    return [*own, *sorted({name for state in kept_states(bucket) for name in state.tensors()})]


def current_average(bucket: Bucket) -> torch.Tensor | None:
    """The average of this rank's weights to update, at rest; None where none is kept."""
    if not isinstance(bucket, TrainedBucket):
        return None
    bucket.update.home.put_away()
    return bucket.update.average


def capture(bucket: Bucket, role: str, dtype: torch.dtype, collectives: Collectives) -> torch.Tensor:
    """(padded_numel,) of one role, from all ranks, 0 where there is none. Collective; one bucket is whole meanwhile.

    Not for state of parameters updated whole: their owners have that (`pieces`).
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
    """The weights of this rank, with the writes of others than the engine into the parameters."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.current_weight()
    bucket.weights.home.put_away()
    bucket.weights.take_writes()
    return bucket.weights.held


def kept_range(bucket: Bucket) -> slice:
    """This rank's elements of a bucket: their weights it keeps up to date."""
    if isinstance(bucket, TrainedBucket):
        return bucket.update.where
    return bucket.weights.own if bucket.weights.plan.shards_parameters else slice(0, bucket.layout.padded_numel)


def cut_pieces(
    bucket: Bucket, role: str, values: torch.Tensor, where: slice, within: slice | None = None
) -> Iterator[NamedPiece]:
    """The pieces of `values`, at `where` in the bucket, parameter by parameter; see `pieces`."""
    within = within or where
    first, last = max(where.start, within.start), min(where.stop, within.stop)
    for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
        start, end = max(slot.offset, first), min(slot.end, last)
        if start < end:
            part = values[start - where.start : end - where.start]
            in_tensor = slice(start - slot.offset, end - slot.offset)
            yield NamedPiece(managed, role, part, in_tensor, slice(start, end))


# State of modules beside their tensors, by PyTorch's `get_extra_state` and `set_extra_state`: rank 0's is saved.


def modules_with_extra_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """(name in the model's state dict, module)."""
    for prefix, module in model.named_modules():
        if type(module).get_extra_state is not torch.nn.Module.get_extra_state:
            yield f"{prefix}._extra_state" if prefix else "_extra_state", module


def described(states: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Buffers or extra states for the manifest: {"value": ...}, or a tensor without its pieces."""
    entries: dict[str, dict[str, Any]] = {}
    for name, state in states.items():
        entries[name] = {"value": state}
        if isinstance(state, torch.Tensor):
            dtype = str(state.dtype).removeprefix("torch.")
            entries[name] = {"shape": list(state.shape), "dtype": dtype, "pieces": []}
    return entries


def restore_extra_states(
    model: torch.nn.Module, saved: Mapping[str, dict[str, Any] | SavedBuffer], reader: Reader
) -> None:
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


def full_state_dict(model: torch.nn.Module, buckets: Iterable[Bucket], collectives: Collectives) -> dict[str, Any]:
    """The model's `state_dict()` with full parameters in fp32, on the CPU. Collective. Hooks on the state dict, and
    modules with extra state, see a whole model.
    """
    whole: dict[ManagedParameter, torch.nn.Parameter] = {}
    is_asked = collectives.world.rank == 0
    for bucket in buckets:
        for managed, value in full_weights(bucket, collectives):
            if is_asked:
                copy = value.to(device="cpu", dtype=torch.float32, copy=True)
                whole[managed] = torch.nn.Parameter(copy, requires_grad=managed.parameter.requires_grad)
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
def _in_place(whole: Mapping[ManagedParameter, torch.nn.Parameter]) -> Iterator[None]:
    """In here modules hold these in place of their parameters, where they still have those."""
    places = []
    for managed, parameter in whole.items():
        for owner, name in managed.owners:
            if owner._parameters.get(name) is managed.parameter:
                places.append((owner._parameters, name, managed.parameter, parameter))
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


# A rank's part of a save: of each bucket its own range, whatever the stage; and the rest of a manifest.


@dataclass(frozen=True)
class Holdings:
    """The parts of an engine for a checkpoint."""

    model: torch.nn.Module
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
    """This rank's part of a bucket in a save: the elements in its own range, of more that it may hold, and the state of
    the whole parameters that it owns."""
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
            shape = Shape(piece.values.shape) if piece.in_tensor is None else None
            yield bucket, Entry(piece.managed.names[0], piece.role, piece.values, start, shape)


def counts(holdings: Holdings) -> dict[str, dict[str, Any]]:
    """Values of the optimizer for a parameter and not for its elements, such as the number of its steps: by name of
    the parameters of which this rank updates anything.

    Raises:
        EngineStateError: it keeps something else than numbers and texts.
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


def buffers(model: torch.nn.Module, buckets: Sequence[Bucket]) -> dict[str, torch.Tensor]:
    """The model's tensors in no bucket: the buffers of its state dict, and parameters of other than floating-point
    numbers."""
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


def require_known(holdings: Holdings, values: Mapping[str, Any]) -> None:
    """Make sure that these names and dtypes can be read again out of a checkpoint.

    Raises:
        EngineStateError: one of them cannot.
    """
    groups = [str(group["name"]) for group in holdings.groups.hyperparameters]
    for name in (*values, *groups, *(name for managed in holdings.parameters.values() for name in managed.names)):
        if not name.isprintable():
            raise EngineStateError(f"{name!r} is the name of a tensor or group, and must be printable to be saved")
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.dtype not in DTYPES.values():
            raise EngineStateError(f"{name} is of {value.dtype}, and what is saved may be of {', '.join(DTYPES)}")


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
