"""What a run records of its first steps: a chrome trace of its operations, and a snapshot of the GPU's memory."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import torch
from rich.console import Console

from zerotrain.comm.ranks.world import World
from zerotrain.device.device import Device, MemoryHistory
from zerotrain.device.kinds import device_of

NUM_TRACED_STEPS = 3
NUM_STEPS_BEFORE = 3
"""Steps before the traced ones, which allocate and compile."""


@contextmanager
def recorded_steps(
    folder: Path, world: World, *, max_steps: int, trace: bool, memory: bool, console: Console
) -> Iterator[Callable[[], None]]:
    """Record the steps of training made within; yields what is to be called after each.

    Args:
        folder: `rank<r>.json` and `memory_rank<r>.pickle` are written there. Made where something is recorded.
        max_steps: steps of the run. One that is too short to leave its first steps out is traced from the first on.
        trace: record operations and named ranges, for chrome://tracing or Perfetto.
        memory: record allocations, for pytorch.org/memory_viz; there are none to record on the CPU.
        console: told so.
    """
    rank, device = world.rank, device_of(world.device)
    history = device.memory_history() if memory else None
    if memory and history is None:
        console.print("warning: train.memory_snapshot=true has no effect on the CPU", highlight=False)
    recorders: list[torch.profiler.profile | _Allocations] = []
    with ExitStack() as stack:
        if trace and max_steps > 0:
            folder.mkdir(exist_ok=True)
            recorders.append(stack.enter_context(_profiler(folder / f"rank{rank}.json", device, max_steps)))
        if history is not None:
            folder.mkdir(exist_ok=True)
            recorders.append(stack.enter_context(_Allocations(history, folder / f"memory_rank{rank}.pickle")))

        def step_done() -> None:
            for recorder in recorders:
                recorder.step()

        yield step_done


def _profiler(path: Path, device: Device, max_steps: int) -> torch.profiler.profile:
    num_traced = min(NUM_TRACED_STEPS, max_steps)
    num_before = min(NUM_STEPS_BEFORE, max_steps - num_traced)
    num_warmup = min(1, num_before)
    return torch.profiler.profile(
        activities=device.activities,
        schedule=torch.profiler.schedule(wait=num_before - num_warmup, warmup=num_warmup, active=num_traced, repeat=1),
        # The thread that reads data ahead, too.
        experimental_config=torch.profiler._ExperimentalConfig(profile_all_threads=True),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
    )


class _Allocations:
    """The allocations on the GPU up to the end of the traced steps, or to the error that ended the run before."""

    def __init__(self, history: MemoryHistory, path: Path) -> None:
        self._history, self._path = history, path
        self._num_steps_left = NUM_STEPS_BEFORE + NUM_TRACED_STEPS

    def __enter__(self) -> "_Allocations":
        self._history.begin()
        return self

    def step(self) -> None:
        self._num_steps_left -= 1
        if self._num_steps_left == 0:
            self._history.write(self._path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_steps_left > 0:
            self._history.write(self._path)
