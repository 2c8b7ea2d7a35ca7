"""The wire of real ranks: torch's process groups, and which way to send suits which backend.

| backend | gather | ordered reduction | native reduction |
|---|---|---|---|
| gloo, all ranks on one host | read from the others' memory | the same | the backend's own |
| gloo, hosts of 2, 4, 8, ... ranks | read inside a host, posted sends across | the same | the backend's own |
| gloo, few ranks | posted sends and receives | posted sends and receives | the backend's own |
| gloo, many ranks; NCCL | the backend's own | all-to-all, sum of rows | the backend's own |
"""

import io
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm.accounts.frames import gather_framed
from zerotrain.comm.accounts.journal import Journal
from zerotrain.comm.handles import Exchange, ExchangeSpec, Gather, Reduction, ReductionSpec
from zerotrain.comm.ranks.world import Shards, backend_of
from zerotrain.comm.wire import NOT_TELLABLE, Wire
from zerotrain.comm.wires.backend_handles import (
    AllToAll,
    NativeGather,
    NativeReduction,
    OrderedReduction,
    all_gather,
    unseen_by_profiler,
)
from zerotrain.comm.wires.memory.across_handles import AcrossGather, AcrossReduction
from zerotrain.comm.wires.memory.hosts import Hosts, host_name, meet_hosts, ranks_of_host
from zerotrain.comm.wires.memory.local_peers import NotLocalError, require_all
from zerotrain.comm.wires.memory.local_ranks import LocalRanks
from zerotrain.comm.wires.memory.shared_handles import SharedGather, SharedReduction
from zerotrain.comm.wires.posted_handles import PostedGather, PostedReduction
from zerotrain.device.kinds import device_of
from zerotrain.errors import EngineStateError

MAX_RANKS_OF_EXCHANGE = 8
"""Up to here gathers and ordered reductions on gloo are posted sends and receives. gloo's own all-gather receives into
a second buffer as large as the result and copies it over: measured 4 times the CPU time and twice the memory; and its
all-to-all posts a receive behind the send. Posted, each takes two calls a rank, though."""


DEFAULT_TIMEOUT_S = 1800.0
"""Of a group that does not say: torch's own."""


class ProcessGroups(Wire):
    """The two groups of some `Shards`: gathers and small collectives in one, reductions in the other.

    Args:
        device: where the tensors are; a group may have a backend for each kind of device.
        ordered: reduce by adding along one tree in fp32, whose bits do not depend on where a bucket's borders lie;
            otherwise by the backend's own reduce-scatter.
    """

    def __init__(self, shards: Shards, device: torch.device, *, ordered: bool) -> None:
        self._shards = shards
        self._gathers, self._reductions = _group(shards.gather_group), _group(shards.reduce_group)
        self._device = device
        self._is_gloo = backend_of(self._gathers, device) == "gloo"
        self._ordered = ordered
        self._posts = self._is_gloo and shards.size <= MAX_RANKS_OF_EXCHANGE
        self._local: LocalRanks | None = None
        """Where ranks read each other's memory: all of them, or those of this host."""
        self._hosts: Hosts | None = None
        """Where they are those of this host."""
        # Not on a GPU, where gloo may be too, nor in torch's fake group.
        self._is_gloo_on_cpu = device_of(device).is_host and self._gathers._get_backend(device).name().lower() == "gloo"
        if self._is_gloo_on_cpu:
            self._meet_locally()

    def _meet_locally(self) -> None:
        shards, say = self._shards, self.gather_objects
        try:
            # Asked of all ranks: one of them may be told otherwise.
            why = "" if shards.shared_memory else "it is told not to (shared_memory=False)"
            names = [name for _, name in require_all(say, why, host_name())]
            ranks = ranks_of_host(names, shards.rank, MAX_RANKS_OF_EXCHANGE)
            local = LocalRanks(shards.rank, ranks, say, self._timeout_s())
            if local.size < shards.size:
                self._hosts = meet_hosts(local, shards.size // local.size, say)
            self._local = local
        except NotLocalError as error:
            self.not_shared = str(error) if shards.shared_memory else ""

    def _timeout_s(self) -> float:
        options = getattr(self._gathers._get_backend(self._device), "options", None)
        timeout = getattr(options, "_timeout", None)
        return DEFAULT_TIMEOUT_S if timeout is None else float(timeout.total_seconds())

    def zeros(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if self._local is not None and device_of(device).is_host:
            return self._local.memory.zeros(numel, dtype)
        return super().zeros(numel, dtype, device)

    def gather(self, name: str, journal: Journal, full: torch.Tensor, shard: torch.Tensor) -> Gather:
        if self._hosts is not None:
            return AcrossGather(name, journal, full, shard, self._hosts, self._gathers, next(self._shards.tags))
        if self._local is not None:
            return SharedGather(name, journal, full, shard, self._local, next(self._shards.tags))
        if self._posts:
            return PostedGather(name, journal, full, shard, self._gathers, next(self._shards.tags))
        return NativeGather(name, journal, full, shard, self._gathers, self._is_gloo)

    def reduction(self, spec: ReductionSpec) -> Reduction:
        if not self._ordered:
            return NativeReduction(spec, self._reductions, self._is_gloo)
        if self._hosts is not None:
            return AcrossReduction(spec, self._hosts, self._reductions, next(self._shards.tags))
        if self._local is not None:
            return SharedReduction(spec, self._local, next(self._shards.tags))
        if self._posts:
            return PostedReduction(spec, self._reductions, next(self._shards.tags))
        return OrderedReduction(spec, self._reductions, self._is_gloo)

    def exchange(self, spec: ExchangeSpec) -> Exchange:
        # The group of the reductions: they are over when weights are updated, while gathers may be under way.
        return AllToAll(spec, self._reductions, self._is_gloo)

    def gather_small(self, values: torch.Tensor, name: str = "") -> torch.Tensor:
        if self._is_gloo_on_cpu:
            return gather_framed(self._gather_small, values, name)
        return self._gather_small(values)

    def _gather_small(self, values: torch.Tensor) -> torch.Tensor:
        everyone = values.new_empty(self._shards.size, values.numel())
        with unseen_by_profiler(self._is_gloo):
            all_gather(everyone.view(-1), values.contiguous(), group=self._gathers)
        return everyone

    def gather_objects(self, value: Any, name: str = "") -> list[Any]:
        file = io.BytesIO()
        torch.save(value, file)
        said = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8).to(self._device)
        numels = self.gather_small(torch.tensor([said.numel()], device=self._device), name).flatten().tolist()
        everyone = self.gather_small(torch.cat([said, said.new_zeros(max(numels) - said.numel())]), name).cpu()
        try:
            # Not torch's all_gather_object, in which another process says what code is run here.
            return [
                torch.load(io.BytesIO(row[:numel].numpy().tobytes()), weights_only=True)
                for row, numel in zip(everyone, numels, strict=True)
            ]
        except pickle.UnpicklingError as error:
            raise EngineStateError(f"{NOT_TELLABLE}: {error}") from error

    def broadcast(self, values: torch.Tensor, source: int) -> None:
        with unseen_by_profiler(self._is_gloo):
            dist.broadcast(values, group=self._gathers, group_src=source)

    def store(self) -> dist.Store:
        return _get_default_store()


def _group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    assert group is not None
    return group
