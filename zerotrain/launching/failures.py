"""What went wrong on which rank, and which of several failures was the first cause."""

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from zerotrain.errors import CommError, ConfigError, DisagreementError, ZeroTrainError
from zerotrain.launching import exits

_SIGNS_OF_LOST_PEERS = ("/gloo/", "Connection closed by peer", "Connection reset by peer")
"""In the messages of the collectives that a user's own code calls; ours raise CommError."""
_TOLD_TO_STOP = (-signal.SIGTERM, exits.of_signal(signal.SIGINT))
"""Exit codes of ranks that torch's agent has ended because another rank had failed."""


_HINTS: dict[int, str] = {
    signal.SIGKILL: "kill -9, or the machine ran out of memory",
    signal.SIGABRT: "by itself: on GPUs NCCL does so when ranks wait for each other longer than launch.timeout_s",
}


class RunError(ZeroTrainError):
    """The ranks of a job ended without completing it."""


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    rank: int
    cause: str
    """Completes the sentence "rank 1 ..."."""
    from_peers: bool = False
    """Whether the rank only noticed that others were gone."""
    problems: tuple[str, ...] | None = None
    """The lines of a ConfigError, which are all that a user needs of it."""
    time_s: float = 0.0
    """Since the epoch."""

    @classmethod
    def of(cls, error: Exception, rank: int) -> "Failure":
        """What an exception says, on the rank that caught it."""
        from_peers = _comes_from_peers(error)
        said = str(error) if isinstance(error, CommError) and from_peers else f"{type(error).__name__}: {error}"
        return cls(
            rank=rank,
            cause=f"{'lost another rank' if from_peers else 'failed'}: {said}",
            from_peers=from_peers,
            problems=error.problems if isinstance(error, ConfigError) else None,
            time_s=time.time(),
        )

    def write(self, ranks_dir: Path) -> None:
        """Leave it in the folder of the ranks' logs, for `first_failure`, which another rank may call meanwhile."""
        path = ranks_dir / f"{self.rank}.error.json"
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self)))
        os.replace(temporary, path)

    def describe(self, ranks_dir: Path) -> str:
        """Two lines for the user: the cause and the rank's log."""
        return f"rank {self.rank} {self.cause}\n  its log: {ranks_dir / f'{self.rank}.log'}"

    def as_error(self, ranks_dir: Path) -> ZeroTrainError:
        """The exception to raise where the ranks were started."""
        return ConfigError(*self.problems) if self.problems else RunError(self.describe(ranks_dir))


def first_failure(ranks_dir: Path, ended: dict[int, ProcessFailure] | None = None) -> Failure | None:
    """The first cause of a run's end; None where no rank has failed.

    A rank's own error comes before the death of a process, and that before what the other ranks noticed of it. Within
    these the earliest.

    Args:
        ended: how the processes ended, by rank. One that was killed could not write what happened to it.
    """
    written = [Failure(**json.loads(path.read_text())) for path in ranks_dir.glob("*.error.json")]
    ended = {rank: end for rank, end in (ended or {}).items() if rank not in {failure.rank for failure in written}}
    ranked = (
        [failure for failure in written if not failure.from_peers],
        [_of_process(rank, end) for rank, end in ended.items() if end.exitcode not in _TOLD_TO_STOP],
        [failure for failure in written if failure.from_peers],
        [_of_process(rank, end) for rank, end in ended.items()],
    )
    return next((min(failures, key=lambda failure: failure.time_s) for failures in ranked if failures), None)


def _of_process(rank: int, end: ProcessFailure) -> Failure:
    if end.exitcode >= 0:
        return Failure(rank=rank, cause=f"ended with exit code {end.exitcode}")
    name = signal.Signals(-end.exitcode).name
    hint = _HINTS.get(-end.exitcode)
    return Failure(rank=rank, cause=f"was killed by {name}" + (f" ({hint})" if hint else ""))


def _comes_from_peers(error: Exception) -> bool:
    if isinstance(error, DisagreementError):
        return False
    if isinstance(error, CommError | dist.DistError):
        return True
    # Gloo has no class of its own for what it raises.
    return type(error) is RuntimeError and any(sign in str(error) for sign in _SIGNS_OF_LOST_PEERS)
