"""What carries collectives between the ranks that share shards. Engine and `Collectives` know this interface alone."""

import io
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist

from zerotrain.comm.accounts.journal import Journal
from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, Reduction, ReductionSpec
from zerotrain.comm.means import mean_by_tree
from zerotrain.errors import EngineStateError

NOT_TELLABLE = "ranks tell each other numbers, texts, tensors and collections of these alone"


def require_tellable(value: Any) -> None:
    """Make sure that ranks can tell each other a value.

    Raises:
        EngineStateError: it holds more than numbers, texts, tensors and collections of these.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise EngineStateError(f"{NOT_TELLABLE}: {str(error).splitlines()[0]}") from error


class Wire(ABC):
    """Makes the handles of one engine, and a few small collectives that are waited for at once."""

    not_shared: str = ""
    """Why ranks do not read each other's memory, though they may; nothing where they do, or never could."""

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """(numel,) zeros from which handles send as fast as they can; from all other memory they send too."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @abstractmethod
    def gather(self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        """See `Gather`."""

    @abstractmethod
    def reduction(self, spec: ReductionSpec) -> Reduction:
        """See `Reduction`. What is sent is of the dtype of `pool`, and what is received lies in its buffers."""

    @abstractmethod
    def exchange(self, spec: ExchangeSpec) -> Exchange:
        """See `Exchange`."""

    @abstractmethod
    def gather_small(self, values: torch.Tensor, name: str = "") -> torch.Tensor:
        """(n,) on each rank -> (ranks, n) on every rank. Raises OtherNamesError on all ranks if they have come with
        different names, where the wire can tell."""

    @abstractmethod
    def gather_objects(self, value: Any, name: str = "") -> list[Any]:
        """What each rank has to say, in rank order, on every rank: numbers, texts, dtypes, tensors, collections.
        Otherwise as `gather_small`."""

    @abstractmethod
    def broadcast(self, values: torch.Tensor, source: int) -> None:
        """One rank's values on every rank."""

    @abstractmethod
    def store(self) -> dist.Store:
        """In which ranks leave each other small texts, see `Notes`."""


class Alone(Wire):
    """One rank: what is gathered or reduced is a copy, or there already."""

    def gather(self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        return _CopiedGather(name, journal, full, shard)

    def reduction(self, spec: ReductionSpec) -> Reduction:
        return _CopiedReduction(spec)

    def exchange(self, spec: ExchangeSpec) -> Exchange:
        raise ValueError(f"an exchange of {spec.name} between one rank; this is a fault of zerotrain itself")

    def gather_small(self, values: torch.Tensor, name: str = "") -> torch.Tensor:
        return values.view(1, -1)

    def gather_objects(self, value: Any, name: str = "") -> list[Any]:
        return [value]

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        pass

    def store(self) -> dist.Store:
        return dist.HashStore()


class _Copied:
    is_local = True
    sent_nbytes = 0

    def _done(self) -> bool:
        return True

    def _wait(self) -> None:
        pass


class _CopiedGather(_Copied, Gather):
    def _issue(self) -> None:
        if self.full.data_ptr() != self.shard.data_ptr():
            self.full.copy_(self.shard)


class _CopiedReduction(_Copied, Reduction):
    def _issue(self) -> None:
        assert self._full is not None
        if self.num_leaves > 1:
            mean_by_tree([self._full], self.out, self.num_leaves)
        elif self.out.data_ptr() != self._full.data_ptr():
            self.out.copy_(self._full)
