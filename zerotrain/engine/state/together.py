"""Errors of one rank as errors of all; and calls that begin on all ranks, or on none."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar, cast

import torch

from zerotrain import errors
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.whereabouts import by_rank
from zerotrain.device.kinds import device_of

T = TypeVar("T")
LEFT = "nothing of the engine has changed"
SAME_CALLS = "all ranks must make the same calls in the same order"
_FAILURE = "a failure"
"""The name of the comparison of a rank after its failure."""
MAX_NUM_SHOWN = 160
"""Characters of a rank's argument in an error."""
_KINDS: dict[str, type[errors.ZeroTrainError]] = {
    kind.__name__: kind for kind in (errors.CheckpointError, errors.ConfigError, errors.EngineStateError)
}


class SharedError(NamedTuple):
    """An error of one rank, in the form for the others."""

    kind: str
    text: str

    def error(self) -> errors.ZeroTrainError:
        """To be raised."""
        return _KINDS.get(self.kind, errors.CheckpointError)(self.text)


def shared_error(error: BaseException) -> SharedError:
    """An error of this rank, for the others."""
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        text = str(error) if isinstance(error, errors.ZeroTrainError) else f"{type(error).__name__}: {error}"
    return SharedError(type(error).__name__, text)


def attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Make a call; return its result, or its error. The loss of another rank is raised at once."""
    try:
        return call(), None
    except errors.CommError:
        raise
    except Exception as error:
        return None, error


def agreed(
    collectives: Collectives, call: str, plan: Callable[[], tuple[T, Mapping[str, object]]], arguments: str = ""
) -> T:
    """Let a call go on on all ranks, or on none: nothing has changed when this raises, the order of collectives
    neither. Collective: one small exchange, and one more where the call is refused.

    Args:
        call: such as "engine.freeze".
        plan: checks the arguments and the state of this rank, and changes nothing, or undoes it where this raises.
            Returns the value to go on with, and facts by name: they must be the same on all ranks.
        arguments: a text, compared before the facts: `plan` may refuse the arguments of another rank.

    Raises:
        ConfigError: on every rank; their arguments or facts differ. Or the error of `plan`, if it is one of ours.
        DisagreementError: on every rank; they have made different calls.
    """
    if collectives.shards.size == 1:
        return plan()[0]
    planned, error = attempt(plan)
    facts = {} if planned is None else {name: str(value) for name, value in planned[1].items()}
    numbers = [_hash(call), int(error is not None), _hash(repr([arguments, facts]))]
    own = torch.tensor(numbers, dtype=torch.int64, device=collectives.world.device)
    everyone = collectives.gather_small(own, name=call, in_order=False)
    if planned is not None and bool((everyone == everyone[0]).all()):
        return planned[0]
    messages, refused = _gather(collectives, [call, arguments, facts], error, name="refused calls", in_order=False)
    calls, all_arguments, all_facts = zip(*messages, strict=True)
    if len(set(calls)) > 1:
        raise errors.DisagreementError(f"the ranks have come to different calls: {by_rank(calls)}; {SAME_CALLS}")
    if len(set(all_arguments)) > 1:
        raise errors.ConfigError(_difference(call, all_arguments))
    if error is not None and len({failure for _, failure in refused}) == 1 and len(refused) == len(messages):
        raise error
    if refused:
        raise joint(refused, len(messages), doing=call, outcome=LEFT, otherwise=errors.ConfigError).error() from error
    by_name = {name: [rank_facts[name] for rank_facts in all_facts] for name in facts}
    raise errors.ConfigError(
        *(_difference(f"{call}: {name}", values) for name, values in by_name.items() if len(set(values)) > 1)
    )


def _difference(subject: str, values: Sequence[str]) -> str:
    """The sentence on values that differ. Long ones lose their beginning and end; the place of the first difference
    stays."""
    colon = "" if ":" in subject else ":"
    shortest, longest = min(map(len, values)), max(map(len, values))
    differ = (place for place, characters in enumerate(zip(*values, strict=False)) if len(set(characters)) > 1)
    start = 0 if longest <= MAX_NUM_SHOWN else max(0, next(differ, shortest) - MAX_NUM_SHOWN // 2)
    stop = start + MAX_NUM_SHOWN
    lead = "..." if start > 0 else ""
    shown = [f"{lead}{value[start:stop]}{'...' if stop < len(value) else ''}" for value in values]
    return f"{subject}{colon} differs between the ranks: {by_rank(shown)}; give all ranks the same"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:7])


def raise_first(collectives: Collectives, error: Exception | None, *, doing: str, outcome: str) -> None:
    """Raise the first error of any rank on all ranks. Collective.

    Args:
        doing: such as "saving PATH".
        outcome: the state after the failure, such as `LEFT`.

    Raises:
        CheckpointError: or the error itself, if it is one of ours.
    """
    failed = torch.tensor([int(error is not None)], dtype=torch.int64, device=collectives.world.device)
    if collectives.gather_small(failed, name=doing).any():
        exchange(collectives, None, error, doing=doing, outcome=outcome)


def on_all(collectives: Collectives, call: Callable[[], T], *, doing: str, outcome: str) -> T:
    """Make a call on each rank; if it fails on any, raise as `raise_first`. Collective."""
    result, error = attempt(call)
    raise_first(collectives, error, doing=doing, outcome=outcome)
    return cast(T, result)


@contextmanager
def failing_together(collectives: Collectives, *, doing: str, outcome: str) -> Iterator[None]:
    """If one rank fails in here, at whatever place, all ranks fail, with the first rank's cause: a comparison at
    the end, and one before each collective that is none itself, tells the others.

    Args:
        doing, outcome: as for `raise_first`.

    Raises:
        ZeroTrainError: on the other ranks. A failed rank raises its own error.
    """
    try:
        yield
        wait_for_others(collectives, "an end")
    except Exception as error:
        of_others = isinstance(error, errors.DisagreementError) and _FAILURE in str(error)
        is_plan = not device_of(collectives.world.device).holds_values  # whose other ranks are not there
        if collectives.shards.size == 1 or is_plan or (isinstance(error, errors.CommError) and not of_others):
            raise
        if not of_others:
            with suppress(errors.DisagreementError):  # the others are at a comparison of the call, and learn it there
                wait_for_others(collectives, _FAILURE)
        own_error = None if of_others else error
        ranks, failed = _gather(collectives, None, own_error, name="causes", in_order=False)
        if own_error is not None and failed[0][1] == shared_error(own_error):
            raise
        shared = joint(failed, len(ranks), doing=doing, outcome=outcome, otherwise=errors.EngineStateError)
        raise shared.error() from error


def wait_for_others(collectives: Collectives, name: str) -> None:
    """Wait for all ranks; raises DisagreementError if one has come to another place."""
    collectives.gather_small(torch.zeros(1, device=collectives.world.device), name=name, in_order=False)


def from_rank_0(collectives: Collectives, call: Callable[[], T], *, doing: str) -> T:
    """Make a call on rank 0; its result or error is that of all ranks. It changes nothing. Collective."""
    result, error = attempt(lambda: call() if collectives.shards.rank == 0 else None)
    return cast(T, exchange(collectives, result, error, doing=doing, outcome=LEFT)[0])


def exchange(collectives: Collectives, message: Any, error: Exception | None, *, doing: str, outcome: str) -> list[Any]:
    """The messages of all ranks, in rank order; raises as `raise_first`. Collective."""
    messages, failed = _gather(collectives, message, error, name=doing)
    if failed:
        raise joint(failed, len(messages), doing=doing, outcome=outcome).error() from error
    return messages


def _gather(
    collectives: Collectives, message: Any, error: Exception | None, *, name: str, in_order: bool = True
) -> tuple[list[Any], list[tuple[int, SharedError]]]:
    """The messages of all ranks, in rank order, and the failed ones with their errors. Collective."""
    own_failure = None if error is None else list(shared_error(error))
    everyone = collectives.gather_objects([own_failure, message], name=name, in_order=in_order)
    failed = [(rank, SharedError(*failure)) for rank, (failure, _) in enumerate(everyone) if failure is not None]
    return [message for _, message in everyone], failed


def joint(
    failed: Sequence[tuple[int, SharedError]],
    num_ranks: int,
    *,
    doing: str,
    outcome: str,
    otherwise: type[errors.ZeroTrainError] = errors.CheckpointError,
) -> SharedError:
    """The one error of all ranks after some have failed: the first rank's.

    Args:
        failed: (rank, its error), in rank order.
        doing, outcome: as for `raise_first`.
        otherwise: the class for errors of other classes than ours.
    """
    rank, failure = failed[0]
    if failure.kind in _KINDS and len({other.text for _, other in failed}) == 1 and len(failed) == num_ranks:
        return failure
    where = f"rank {rank}: " if num_ranks > 1 else ""
    kind = failure.kind if failure.kind in _KINDS else otherwise.__name__
    return SharedError(kind, f"{doing} failed, {where}{failure.text}; {outcome}")
