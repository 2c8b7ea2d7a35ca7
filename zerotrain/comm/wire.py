"""The transport of collectives between the ranks that share shards: a table of functions, for `Collectives`."""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, GatherSpec, Reduction, ReductionSpec
from zerotrain.comm.scratch import Zeros
from zerotrain.errors import EngineStateError

_NOT_TELLABLE = "ranks can only exchange numbers, texts, tensors and collections of these"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How the ranks of one engine send to each other: what makes its handles, and small collectives that are waited for
    at once. Another way to send is another `Gather` and another `Reduction`, put in the place of these."""

    gather: Callable[[GatherSpec], Gather]
    reduction: Callable[[ReductionSpec], Reduction]
    """It sends in the dtype of `pool`, and receives into buffers of `pool`."""
    exchange: Callable[[ExchangeSpec], Exchange]
    gather_small: Callable[[torch.Tensor, str], torch.Tensor]
    """(n,) on each rank, and its name -> (ranks, n) on every rank. Raises OtherNamesError on all ranks if they have
    come with different names, where the wire can tell."""
    broadcast: Callable[[torch.Tensor, int], object]
    """Leaves the values of one rank on every rank."""
    store: Callable[[], dist.Store]
    """Keeps small texts that ranks leave each other, see `Notes`."""
    zeros: Zeros | None = None
    """Makes the buffers of a step. None: torch does; a plan of memory counts them."""


def gather_objects(
    gather_small: Callable[[torch.Tensor, str], torch.Tensor], device: torch.device, value: Any, name: str = ""
) -> list[Any]:
    """The values of all ranks, in rank order, on every rank: numbers, texts, dtypes, tensors, collections."""
    said = torch.frombuffer(bytearray(_packed(value)), dtype=torch.uint8).to(device)
    numels = gather_small(torch.tensor([said.numel()], device=device), name).flatten().tolist()
    everyone = gather_small(torch.cat([said, said.new_zeros(max(numels) - said.numel())]), "").cpu()
    try:
        # Not torch's all_gather_object, in which another process says what code is run here.
        return [_unpacked(row[:numel].numpy().tobytes()) for row, numel in zip(everyone, numels, strict=True)]
    except pickle.UnpicklingError as error:
        raise EngineStateError(f"{_NOT_TELLABLE}: {error}") from error


def require_tellable(value: Any) -> None:
    """Make sure that ranks can tell each other a value.

    Raises:
        EngineStateError: it holds more than numbers, texts, tensors and collections of these.
    """
    try:
        _unpacked(_packed(value))
    except Exception as error:
        raise EngineStateError(f"{_NOT_TELLABLE}: {str(error).splitlines()[0]}") from error


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=True)
