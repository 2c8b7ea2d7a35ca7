"""What one rank alone fails in, and all ranks tell alike."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from zerotrain.comm.collectives import Collectives
from zerotrain.errors import CheckpointError, CommError, ConfigError, EngineStateError, ZeroTrainError

T = TypeVar("T")
_KINDS: dict[str, type[ZeroTrainError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, EngineStateError)
}


class Told(NamedTuple):
    """An error as ranks tell it."""

    kind: str
    text: str

    def error(self) -> ZeroTrainError:
        """To be raised."""
        return _KINDS.get(self.kind, CheckpointError)(self.text)


def told(error: BaseException) -> Told:
    """Of an error of this rank."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) if isinstance(error, ZeroTrainError) else f"{type(error).__name__}: {error}"
    return Told(type(error).__name__, text)


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a call gives, or what it raises; the loss of another rank is raised at once."""
    try:
        return call(), None
    except CommError:
        raise
    except Exception as error:
        return None, error


def raise_first(collectives: Collectives, error: Exception | None, *, doing: str, left: str) -> None:
    """Raise on all ranks what any of them failed in, the first rank's. Collective.

    Args:
        doing: such as "saving PATH".
        left: what is as it was.

    Raises:
        CheckpointError: or the error itself, if it is one of ours.
    """
    failed = torch.tensor([int(error is not None)], dtype=torch.int64, device=collectives.world.device)
    if collectives.gather_small(failed, name=doing).any():
        exchange(collectives, None, error, doing=doing, left=left)


def exchange(collectives: Collectives, said: Any, error: Exception | None, *, doing: str, left: str) -> list[Any]:
    """What each rank has to say, in rank order; otherwise as `raise_first`. Collective."""
    mine = None if error is None else list(told(error))
    everyone = collectives.gather_objects([mine, said], name=doing)
    failed = [(rank, Told(*each)) for rank, (each, _) in enumerate(everyone) if each is not None]
    if failed:
        raise joint(failed, len(everyone), doing=doing, left=left).error() from error
    return [each for _, each in everyone]


def joint(failed: Sequence[tuple[int, Told]], num_ranks: int, *, doing: str, left: str) -> Told:
    """What all ranks tell where some have failed: the first rank's error.

    Args:
        failed: (rank, its error), in rank order.
        doing, left: as for `raise_first`.
    """
    rank, first = failed[0]
    if first.kind in _KINDS and len({each.text for _, each in failed}) == 1 and len(failed) == num_ranks:
        return first
    where = f"rank {rank}: " if num_ranks > 1 else ""
    return Told(first.kind, f"{doing} failed, {where}{first.text}; {left}")
