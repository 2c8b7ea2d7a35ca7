"""The ranks of a run: this process's rank, its device and its groups."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from zerotrain.comm.environment import STORE_VARIABLE, RankEnvironment
from zerotrain.comm.ledger import Overdue, Tell, tell_log
from zerotrain.comm.meeting import keep_at_rank_0, leave, make_together, meet
from zerotrain.comm.whereabouts import Whereabouts, files_problem, num_open_files
from zerotrain.device.kinds import device_of, num_gpus
from zerotrain.errors import ConfigError, argument

if TYPE_CHECKING:
    from zerotrain.comm.handles import Wire


_SHARED_STARTS = ("TORCHELASTIC_RUN_ID", STORE_VARIABLE)
"""Variables of ranks with one process as their starter."""
_JOIN_S = {"gloo": 20.0, "nccl": 60.0}
"""How long ranks that have all come may take to make their groups: gloo a fraction of a second, NCCL, which starts the
GPUs, several; then one of them is gone."""
_JOIN_S_OF_A_RANK = 0.5
"""More for each."""


@dataclass(frozen=True)
class Shards:
    """Ranks that send to each other, and this one's place among them: all of a world, over which state is cut, or those
    along one axis of a mesh."""

    rank: int = 0
    size: int = 1
    gather_group: dist.ProcessGroup | None = None
    """Carries parameters, and small collectives. None for one rank."""
    reduce_group: dist.ProcessGroup | None = None
    """Carries gradients. A group of its own: one NCCL communicator runs its collectives one after the other."""
    tags: Iterator[int] = field(default_factory=itertools.count, compare=False)
    """Numbers to keep sends and receives apart; taken in the same order on every rank."""
    make_wire: "Callable[[bool], Wire] | None" = field(default=None, compare=False)
    """Makes the wire of an engine (with an ordered reduction or not), in place of the groups."""
    make_axis: "Callable[[Sequence[int]], Shards] | None" = field(default=None, compare=False)
    """Makes the same of some of these ranks, in place of groups."""
    _axes: "dict[int, tuple[Shards, Shards]]" = field(default_factory=dict, init=False, compare=False)
    """By `shard_size`."""

    def axes(self, shard_size: int, device: torch.device) -> "tuple[Shards, Shards]":
        """This rank's axes in a mesh of shards x replicas: inside, its `shard_size` neighbours; across, the ranks with
        its place among theirs. All ranks make the groups of all, in one order, when the mesh is first asked for."""
        if shard_size not in self._axes:
            starts = range(0, self.size, shard_size)
            inside = [range(start, start + shard_size) for start in starts]
            across = [range(place, self.size, shard_size) for place in range(shard_size)]
            self._axes[shard_size] = self._axis(inside, device), self._axis(across, device)
        return self._axes[shard_size]

    def _axis(self, lines: Sequence[range], device: torch.device) -> "Shards":
        own, timeout = next(line for line in lines if self.rank in line), timeout_of(self.gather_group, device)
        if self.make_axis is not None:
            return self.make_axis(own)
        groups = {line: [dist.new_group(list(line), timeout=timeout) for _ in range(2)] for line in lines}
        gathers, reductions = groups[own]
        return Shards(own.index(self.rank), len(own), gathers, reductions)

    def leave(self) -> None:
        """Leave the groups that are not the caller's."""
        axes = [axis for mesh in self._axes.values() for axis in mesh if axis.gather_group is not None]
        for group in (self.reduce_group, *(group for axis in axes for group in (axis.gather_group, axis.reduce_group))):
            with suppress(ValueError):  # what torch says of a group that is gone
                dist.destroy_process_group(group)


@dataclass(frozen=True)
class World:
    """One process among `size`, each with a part of every batch. At size 1 there is no process group."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    shards: Shards = field(default_factory=Shards)
    """The ranks with a shard of the model's state each."""
    group: dist.ProcessGroup | None = None
    """All ranks; None for one. The caller's own group where there was one."""
    started_here: bool = False
    """Whether `close` ends torch.distributed as a whole."""
    whereabouts: Whereabouts = field(init=False, compare=False)
    """This rank's place in the training, for the error of a failed collective."""
    tell: Tell = field(default=tell_log, compare=False)
    """Is told of an endless collective, where the host does not wait for them."""
    hosts: tuple[str, ...] = ()
    """The name of each rank's host, by rank; none where all are on one, or the caller has made the group."""
    timeout_s: float = 300.0
    """Seconds that this rank waits for the others in each collective, and they for it."""
    overdue: Overdue | None = field(init=False, compare=False)
    """Watches collectives there."""
    closing: list[Callable[[], object]] = field(init=False, default_factory=list, compare=False)
    """Called by `close`, before the groups go: NCCL would wait for ever for the graphs that hold its collectives."""

    def __post_init__(self) -> None:
        group_name = "" if self.group is None else self.group.group_name
        whereabouts, overdue = Whereabouts(self.rank, self.size, group_name, hosts=self.hosts), None
        if self.group is not None and not device_of(self.device).is_host:
            timeout = timeout_of(self.group, self.device)
            overdue = None if timeout is None else Overdue(whereabouts, timeout.total_seconds(), self.tell)
        object.__setattr__(self, "whereabouts", whereabouts)
        object.__setattr__(self, "overdue", overdue)

    @classmethod
    def from_environment(
        cls,
        device: str = "auto",
        timeout_s: float = 300.0,
        *,
        start_timeout_s: float = 600.0,
        interface: str | None = "auto",
        tell: Tell = tell_log,
    ) -> "World":
        """Join the ranks of RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/PORT; without these variables, be alone.

        Args:
            device: cpu, cuda, or auto (cuda where there is one).
            timeout_s: seconds to wait for the other ranks in each collective.
            start_timeout_s: seconds to wait until all ranks have come.
            interface: the network interface, such as "eth0", by which ranks of several hosts send to each other; auto:
                that of the route to MASTER_ADDR; None: gloo's and NCCL's own choice. Your GLOO_SOCKET_IFNAME or
                NCCL_SOCKET_IFNAME comes first.
            tell: told on a thread of a collective that does not end, some seconds before NCCL ends the process.

        Raises:
            ConfigError: cuda was asked for and is not there; the variables are incomplete or contradict each other; the
                process may open too few files; a rank of several hosts would listen where no other host reaches it.
            CommError: the other ranks have not come, or are gone.
        """
        ranks = RankEnvironment.read(whole=False)
        local_rank = 0 if ranks is None else ranks.local_rank
        chosen = choose_device(device, local_rank)
        kind = device_of(chosen)
        kind.use()
        if ranks is None or ranks.world_size == 1:
            return cls(rank=0, size=1, local_rank=0, device=chosen, timeout_s=timeout_s)
        if kind.is_host:  # gloo connects each rank with each; NCCL does not
            problem = files_problem(ranks.world_size, num_open_files(), at_rank_0=ranks.store_file is None)
            if problem:
                raise ConfigError(f"rank {ranks.rank}: {problem}")
        meeting = meet(ranks, start_timeout_s, backend=kind.backend, interface=interface)
        store = keep_at_rank_0(meeting.store, ranks, timeout_s)

        def join() -> World:
            kind.use()  # of this thread
            dist.init_process_group(
                backend=kind.backend,
                store=store,
                rank=ranks.rank,
                world_size=ranks.world_size,
                timeout=timedelta(seconds=timeout_s),
                device_id=None if kind.is_host else chosen,
            )
            return cls._around(chosen, local_rank, started_here=True, tell=tell, hosts=meeting.hosts)

        limit_s = _JOIN_S[kind.backend] + ranks.world_size * _JOIN_S_OF_A_RANK
        return make_together(ranks, join, min(timeout_s, limit_s), meeting.hosts)

    @classmethod
    def current(cls, device: torch.device) -> "World":
        """The world of the process group the caller has initialised, or one process where there is none.

        Raises:
            ConfigError: the group is NCCL's and `device` the CPU, or gloo's and `device` a GPU; the GPU is not
                torch's current one.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(rank=0, size=1, local_rank=0, device=device)
        if device_of(device).is_host and "gloo" not in dist.get_backend():
            raise ConfigError(
                f"the process group is {dist.get_backend()} and the model is on the CPU; move the model to this rank's "
                "GPU before build_engine, or initialise the group with gloo"
            )
        if not device_of(device).is_host and backend_of(dist.group.WORLD, device) == "gloo":
            raise ConfigError(
                f"the process group is {dist.get_backend()} and the model is on {device}, whose memory gloo would take "
                "for the host's; initialise the group with nccl, or move the model to the CPU"
            )
        if not device_of(device).is_current:
            raise ConfigError(
                f"the model is on {device}, which is not the device of this rank's collectives; call "
                f"torch.cuda.set_device({device.index}) before init_process_group"
            )
        return cls._around(device, int(os.environ.get("LOCAL_RANK", dist.get_rank())), started_here=False)

    @classmethod
    def _around(
        cls,
        device: torch.device,
        local_rank: int,
        started_here: bool,
        tell: Tell = tell_log,
        hosts: tuple[str, ...] = (),
    ) -> "World":
        rank, size, everyone = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        # Without a timeout of its own the new group would wait by torch's default, half an hour on gloo.
        timeout = timeout_of(everyone, device)
        reductions = dist.new_group(timeout=timeout)
        shards = Shards(rank, size, everyone, reductions)
        return cls(
            rank,
            size,
            local_rank,
            device,
            shards=shards,
            group=everyone,
            started_here=started_here,
            hosts=hosts,
            tell=tell,
            timeout_s=cls.timeout_s if timeout is None else timeout.total_seconds(),
        )

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of a small tensor over all ranks, in place; CommError if they do not come. For metrics,
        not for gradients."""
        if self.size > 1:
            with self.watching("sum of metrics"):
                dist.all_reduce(values, group=self.group)
        return values

    def barrier(self) -> None:
        """Wait for all ranks; CommError if they do not come."""
        if self.size > 1:
            with self.watching("barrier"):
                dist.barrier(group=self.group)

    @contextmanager
    def watching(self, collective: str) -> Iterator[None]:
        """In here a collective is issued, and is told of if it does not end; CommError if other ranks do not come."""
        event, overdue = device_of(self.device).event, self.overdue
        watched = nullcontext() if overdue is None else overdue.watching(collective, event)
        with self.whereabouts.blame_others(collective), watched:
            yield

    def close(self) -> None:
        """Leave the groups. Safe to call twice; a group the caller made is left to the caller."""
        for call in self.closing:
            call()
        if self.size == 1 or not dist.is_initialized():
            return
        if self.started_here:
            leave(_get_default_store(), self.size)
            dist.destroy_process_group()
        else:
            self.shards.leave()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error the other ranks may be gone, and leaving a group waits for them.
        if kind is None:
            self.close()


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """How long a group waits; None where its backend does not say."""
    options = getattr(group._get_backend(device), "options", None) if group is not None else None
    return getattr(options, "_timeout", None)


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """The backend of a group for tensors of `device`: gloo, nccl, ...; for torch's fake group, in which benchmarks
    measure one rank of many alone, the device's real one."""
    assert group is not None
    name = group._get_backend(device).name().lower()
    return device_of(device).backend if name == "fake" else name


def choose_device(device: str, local_rank: int) -> torch.device:
    """The device of a rank: its own GPU, or the CPU.

    Args:
        device: cpu, cuda, or auto (cuda where there is one).

    Raises:
        ConfigError: there is no GPU, or none left for this local rank.
    """
    if device == "auto":
        device = "cuda" if num_gpus() else "cpu"
    if device == "cpu":
        return torch.device("cpu")
    if not num_gpus():
        raise ConfigError(
            f"{argument('World.from_environment(device)', 'cuda')}, but torch sees no GPU here; use "
            f"{argument('World.from_environment(device)', 'cpu')} or auto"
        )
    if local_rank >= num_gpus_for(local_rank + 1):
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this machine has {num_gpus()}; use "
            f"{argument('torchrun --nproc-per-node', num_gpus())} or less, or "
            f"{argument('World.from_environment(device)', 'cpu')}"
        )
    return torch.device("cuda", local_rank if local_rank < num_gpus() else 0)


def num_gpus_for(num_local_ranks: int) -> int:
    """GPUs for the ranks of this machine. A task of its own (`srun --gpus-per-task=1`) sees one of its own; torchrun's
    ranks and the launcher's, all of one process, see the same."""
    is_own_task = "LOCAL_RANK" in os.environ and not set(_SHARED_STARTS).intersection(os.environ)
    return num_local_ranks if num_gpus() == 1 and is_own_task else num_gpus()
