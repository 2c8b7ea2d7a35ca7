"""What one rank alone fails in, and all ranks tell alike."""

from collections.abc import Callable
from typing import TypeVar

from zerotrain.comm.collectives import Collectives
from zerotrain.errors import CheckpointError, CommError, ConfigError, EngineStateError, ZeroTrainError

T = TypeVar("T")
_KINDS: dict[str, type[ZeroTrainError]] = {
    kind.__name__: kind for kind in (CheckpointError, ConfigError, EngineStateError)
}


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
    mine = None if error is None else [type(error).__name__, _said(error)]
    everyone = collectives.gather_objects(mine, name=doing)
    failed = [(rank, told) for rank, told in enumerate(everyone) if told is not None]
    if not failed:
        return
    rank, (kind, text) = failed[0]
    if kind in _KINDS and len({told[1] for _, told in failed}) == 1 and len(failed) == len(everyone):
        raise _KINDS[kind](text) from error
    where = f"rank {rank}: " if len(everyone) > 1 else ""
    raise _KINDS.get(kind, CheckpointError)(f"{doing} failed, {where}{text}; {left}") from error


def _said(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, ZeroTrainError) else f"{type(error).__name__}: {error}"
