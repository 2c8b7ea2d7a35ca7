"""Records a run's first steps: a chrome trace of its operations, and a snapshot of the GPU's memory."""

from contextlib import ExitStack
from pathlib import Path

import torch

from zerotrain.device.device import Device
from zerotrain.device.kinds import device_of
from zerotrain.engine.results import TrainStepResult
from zerotrain.training.callback import Closing, Run

NUM_TRACED_STEPS = 3
NUM_STEPS_BEFORE = 3
"""Steps before the traced ones, which allocate and compile."""


class Recording(Closing):
    """Records the first steps in `profile` of the run's folder: `rank<r>.json` and `memory_rank<r>.pickle`.

    Args:
        trace: record operations and named ranges, for chrome://tracing or Perfetto. A run that is too short to leave
            its first steps out is traced from the first on.
        memory: record allocations, for pytorch.org/memory_viz; there are none to record on the CPU.
    """

    def __init__(self, *, trace: bool, memory: bool) -> None:
        self._trace, self._memory = trace, memory
        self._stack, self._allocations = ExitStack(), ExitStack()
        self._profiler: torch.profiler.profile | None = None
        self._num_steps = 0

    def start(self, run: Run) -> None:
        """See `Callback.start`."""
        rank, device, folder = run.world.rank, device_of(run.world.device), run.folder / "profile"
        num_steps = run.max_steps - run.step
        history = device.memory_history() if self._memory else None
        if self._memory and history is None:
            run.console.print("warning: train.memory_snapshot=true has no effect on the CPU", highlight=False)
        if self._trace and num_steps > 0:
            folder.mkdir(exist_ok=True)
            self._profiler = self._stack.enter_context(_profiler(folder / f"rank{rank}.json", device, num_steps))
        if history is not None:  # until the end of the traced steps, or the error that ends the run before
            folder.mkdir(exist_ok=True)
            history.begin()
            self._stack.enter_context(self._allocations).callback(history.write, folder / f"memory_rank{rank}.pickle")

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        self._num_steps += 1
        if self._profiler is not None:
            self._profiler.step()
        if self._num_steps == NUM_STEPS_BEFORE + NUM_TRACED_STEPS:
            self._allocations.close()

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        self._stack.close()


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
