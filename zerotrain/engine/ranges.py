"""Names for what a profiler shows: the unit or bucket, and what is done with it."""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_UNNAMED: AbstractContextManager[None] = nullcontext()


def profiler_runs() -> bool:
    """Whether a torch profiler is recording in this process."""
    return profiler._is_profiler_enabled


def named_range(action: str, owner: str) -> AbstractContextManager[object]:
    """A range of the trace called "action owner", such as "gather blocks.0", while a profiler runs.

    Without a profiler it costs 0.2 microseconds. torch's `record_function` costs 6 also when nobody records, and a step
    of 100 buckets has up to 800 ranges.
    """
    return profiler.record_function(f"{action} {owner}") if profiler_runs() else _UNNAMED
