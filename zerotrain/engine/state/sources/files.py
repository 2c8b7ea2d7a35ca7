"""Files of others as a source, with weights to start from: all is checked first, then each rank reads what it holds."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from zerotrain.checkpoint.others.stored_weights import StoredTensor, Weights
from zerotrain.checkpoint.others.weights import find_weights, resolved
from zerotrain.comm.collectives import Collectives
from zerotrain.engine.results import LoadedWeights
from zerotrain.engine.state.named import NamedPiece
from zerotrain.engine.state.owned import Holdings, buffers
from zerotrain.engine.state.source import Source
from zerotrain.engine.state.sources.fit import memory_order
from zerotrain.engine.state.sources.match import Wanted, fitting_parts, match, misfits
from zerotrain.engine.state.together import LEFT, attempt, from_rank_0, on_all, raise_first
from zerotrain.errors import CheckpointError
from zerotrain.sharding.units import ModelParameter, model_parameters

CHUNK_NUMEL = 2**17
"""Held at a time, a few times over, where the elements of a tensor lie in another order in the file."""


class Files(Source):
    """Weights that can be read and fit the engine, open. Parameters that they lack stay as they are.

    Args:
        wanted: the model's tensors, and the part of `weights` that each gets.
        loaded: the report about it.
    """

    def __init__(self, weights: Weights, wanted: Sequence[Wanted], loaded: LoadedWeights, holdings: Holdings) -> None:
        self.doing, self.loaded = f"loading weights from {weights.path}", loaded
        self._weights, self._holdings = weights, holdings
        self._given = {id(each.tensor): each.given[-1][1] for each in wanted if each.given}

    def read(self, piece: NamedPiece) -> None:
        source = self._given.get(id(piece.managed.parameter))
        if source is not None and piece.in_tensor is not None:
            _read(self._weights, source, piece.managed.stride, piece.in_tensor.start, piece.values)

    def fill_rest(self) -> None:
        for tensor in buffers(self._holdings.model, self._holdings.buckets).values():
            if (source := self._given.get(id(tensor))) is not None and tensor.numel() > 0:
                values = torch.empty(tensor.numel(), dtype=source.dtype)
                self._weights.read(source, 0, values)
                tensor.data.copy_(values.view(tensor.shape))


@contextmanager
def checked_weights(
    path: str | os.PathLike[str], holdings: Holdings, *, strict: bool, averaged: bool = False
) -> Iterator[Files]:
    """Find weights and look at all that can be known of them without reading them. Collective.

    Raises:
        CheckpointError: on every rank, before anything has changed.
    """
    collectives = holdings.collectives
    named = Path(os.path.abspath(path))
    doing = f"loading weights from {named}"
    # Rank 0's newest: the run it is of may save another meanwhile.
    source = from_rank_0(collectives, lambda: str(resolved(named)), doing=doing)
    weights, error = attempt(lambda: find_weights(Path(source), averaged=averaged))
    try:
        raise_first(collectives, error, doing=doing, left=LEFT)
        assert weights is not None
        yield _checked(weights, holdings, doing, strict)
    finally:
        if weights is not None:
            weights.close()


def _checked(weights: Weights, holdings: Holdings, doing: str, strict: bool) -> Files:
    collectives = holdings.collectives
    fingerprints = collectives.gather_objects(weights.fingerprint, name=doing)

    def check() -> Files:
        rest = buffers(holdings.model, holdings.buckets)
        wanted = list(_wanted(holdings.model, holdings.parameters.values(), rest))
        part, *others = fitting_parts(weights.tensors, wanted)
        loaded = match(weights.path, weights.tensors, wanted, part)
        if different := [rank for rank, each in enumerate(fingerprints) if each != fingerprints[0]]:
            raise CheckpointError(f"{weights.path} is another on rank {different[0]} than on rank 0")
        if others:
            raise CheckpointError(_several(weights, part, others))
        if strict and (problems := misfits(loaded)):
            raise CheckpointError("\n".join(problems))
        rank, size = collectives.shards.rank, collectives.shards.size
        taken = [given for each in wanted for _, given in each.given]
        if problems := [*weights.problems(taken, rank, size), *_two_in_one(weights, wanted, collectives)]:
            raise CheckpointError("\n".join(problems))
        return Files(weights, wanted, loaded, holdings)

    return on_all(collectives, check, doing=doing, left=LEFT)


def weight_misfits(path: str | os.PathLike[str], model: nn.Module, *, averaged: bool = False) -> list[str]:
    """Tell what of weights does not fit a model, a line for each kind of it, as far as headers tell: before there is an
    engine, and of a model without memory too. Nothing of weights that cannot be read."""
    with suppress(CheckpointError), closing(find_weights(path, averaged=averaged)) as weights:
        parameters = model_parameters(model)
        ours = {id(each.parameter) for each in parameters}
        rest = {name: tensor for name, tensor in buffers(model, []).items() if id(tensor) not in ours}
        wanted = list(_wanted(model, parameters, rest))
        part, *others = fitting_parts(weights.tensors, wanted)
        return (
            [_several(weights, part, others)] if others else misfits(match(weights.path, weights.tensors, wanted, part))
        )
    return []


def _several(weights: Weights, part: str, others: list[str]) -> str:
    named = ", ".join([part, *others])
    return f"{weights.path} has the names of the model several times, in {named}: give a file that has one of them"


def _wanted(
    model: nn.Module, parameters: Iterable[ModelParameter], rest: Mapping[str, torch.Tensor]
) -> Iterator[Wanted]:
    """Parameters and buffers by all names that they have: those of their modules, and those in `state_dict()`, which
    hooks may have changed."""
    also: dict[int, list[str]] = {}
    # Without detaching them: that would read sharded parameters.
    for name, value in model.state_dict(keep_vars=True).items():
        also.setdefault(id(value), []).append(name)
    by_names = [(each.names, each.parameter) for each in parameters]
    for names, tensor in (*by_names, *(([name], tensor) for name, tensor in rest.items())):
        yield Wanted(list(dict.fromkeys([*names, *also.get(id(tensor), ())])), tensor)


def _two_in_one(weights: Weights, wanted: list[Wanted], collectives: Collectives) -> Iterator[str]:
    """Tensors that are one in the model and several in the file, with other values; each rank looks at a share."""
    rank, size = collectives.shards.rank, collectives.shards.size
    for each in wanted:
        for (name, given), (other_name, other) in zip(each.given, each.given[1:], strict=False):
            numel = each.tensor.numel()
            if not _same(weights, given, other, numel * rank // size, numel * (rank + 1) // size):
                yield (
                    f"{weights.path} does not fit the engine: {name} and {other_name} are one tensor in the model, and "
                    "two with other values in it"
                )


def _same(weights: Weights, left: StoredTensor, right: StoredTensor, start: int, stop: int) -> bool:
    if (left.dtype, memory_order(left.shape, left.stride)) != (right.dtype, memory_order(right.shape, right.stride)):
        return False
    for first in range(start, stop, CHUNK_NUMEL):
        pair = [torch.empty(min(CHUNK_NUMEL, stop - first), dtype=left.dtype) for _ in range(2)]
        for values, tensor in zip(pair, (left, right), strict=True):
            weights.read(tensor, first, values)
        if not torch.equal(*(values.view(torch.uint8) for values in pair)):
            return False
    return True


def _read(weights: Weights, source: StoredTensor, stride: tuple[int, ...], start: int, target: torch.Tensor) -> None:
    """Elements of a tensor from `start` on, in the order of `stride`, into all of `target`.

    If the file has another order, the whole tensor is read, some elements at a time.
    """
    order = memory_order(source.shape, source.stride)
    if order == memory_order(source.shape, stride):
        weights.read(source, start, target)
        return
    numel = torch.Size(source.shape).numel()
    for first in range(0, numel, CHUNK_NUMEL):
        values = torch.empty(min(CHUNK_NUMEL, numel - first), dtype=source.dtype)
        weights.read(source, first, values)
        index = torch.arange(first, first + values.numel())
        place = torch.full_like(index, -start)
        for dim in reversed(order):
            place += index % source.shape[dim] * stride[dim]
            index //= source.shape[dim]
        here = (place >= 0) & (place < target.numel())
        target[place[here].to(target.device)] = values[here].to(target)
