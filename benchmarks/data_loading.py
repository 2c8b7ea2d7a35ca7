"""What data costs a run beside its compute: the order's start, and steps that wait for their rows.

python -m benchmarks.data_loading start       time and memory until the first rows are known, by size of the data
python -m benchmarks.data_loading overlap     a step of 0.3 s of compute and 0.3 s of data, by who reads
"""

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue

import numpy as np
import torch

from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.loader import StepLoader

SIZES = (10**6, 10**8, 10**10)
SORTED_SIZES = (10**6, 10**7)
"""What sorting is measured at: at 1e8 it took 26 s and 2 GB (2026-11-22)."""
BATCH_SIZE = 512
MICRO_BATCH_SIZE = 4
NUM_STEPS = 8


def first_rows_computed(num_rows: int) -> None:
    """The rows of the first batch, as a run finds them."""
    sampler = GlobalBatchSampler(
        num_sequences=num_rows, micro_batch_size=BATCH_SIZE, num_micro_batches=1, rank=0, num_ranks=1, seed=0
    )
    sampler.micro_batches(0)


def first_rows_sorted(num_rows: int) -> None:
    """The rows of the first batch as runs found them before: random bits, sorted whole."""
    bits = np.random.Philox(key=np.array([0, 0], dtype=np.uint64)).random_raw(num_rows)
    np.argsort(bits, kind="stable")[:BATCH_SIZE].tolist()


def print_start(num_repeats: int) -> None:
    """Print the CPU time it takes to know the first batch, and the memory at most, each in a fresh process."""
    first_rows_computed(1)  # what it imports counts for no size
    first_rows_sorted(1)
    print(f"first batch of {BATCH_SIZE} rows, median of {num_repeats} processes")
    for name, function, sizes in (
        ("computed", first_rows_computed, SIZES),
        ("sorted (before)", first_rows_sorted, SORTED_SIZES),
    ):
        for num_rows in sizes:
            measured = [_in_a_process(function, num_rows) for _ in range(num_repeats)]
            seconds, mb = (statistics.median(each) for each in zip(*measured, strict=True))
            print(
                f"{name:16} {num_rows:.0e} rows  {1e3 * seconds:10.2f} ms of CPU  {mb:9.1f} MB more at the peak",
                flush=True,
            )


def _in_a_process(function: Callable[[int], None], num_rows: int) -> tuple[float, float]:
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[tuple[float, float]] = context.SimpleQueue()

    def measure() -> None:
        # The peak of this process begins with what it has: forked, it would be that of its parent.
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before_kib, started_s = _peak_kib(), time.process_time()
        function(num_rows)
        results.put((time.process_time() - started_s, (_peak_kib() - before_kib) * 1024 / 1e6))

    process = context.Process(target=measure)
    process.start()
    measured = results.get()
    process.join()
    return measured


def _peak_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))


class SlowItems:
    """Items of which a micro-batch takes a while to read: slept, so that what else runs on the machine matters less."""

    def __init__(self, item_s: float, draws: bool) -> None:
        self.item_s, self.draws = item_s, draws

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.item_s)
        return torch.full((8,), row), torch.full((8,), row)


def print_overlap(data_s: float, compute_s: float) -> None:
    """Print how long a step takes and how much of it is waiting."""
    print(f"steps of {compute_s} s of compute and {data_s} s of data, both slept; median of {NUM_STEPS - 2}")
    ways: dict[str, tuple[bool, int]] = {
        "between steps (before)": (True, 0),
        "a thread": (False, 0),
        "1 worker process": (True, 1),
        "2 worker processes": (True, 2),
    }
    for name, (draws, num_workers) in ways.items():
        step_s, wait_s = _steps(SlowItems(data_s / MICRO_BATCH_SIZE, draws), compute_s, num_workers)
        print(f"{name:22}  {1e3 * step_s:6.0f} ms a step, {1e3 * wait_s:6.0f} ms of it waited for data", flush=True)


def _steps(dataset: SlowItems, compute_s: float, num_workers: int) -> tuple[float, float]:
    sampler = GlobalBatchSampler(
        num_sequences=len(dataset), micro_batch_size=MICRO_BATCH_SIZE, num_micro_batches=1, rank=0, num_ranks=1, seed=0
    )
    steps_s, waits_s = [], []
    device = torch.device("cpu")
    with StepLoader(dataset, sampler, device=device, num_steps=NUM_STEPS, num_workers=num_workers) as loader:
        for _ in range(NUM_STEPS):
            started_s = time.perf_counter()
            loader.next_step()
            time.sleep(compute_s)
            steps_s.append(time.perf_counter() - started_s)
            waits_s.append(loader.wait_s)
    return statistics.median(steps_s[2:]), statistics.median(waits_s[2:])


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "overlap"))
    parser.add_argument("--repeats", type=int, default=5, help="processes for each size of `start`")
    parser.add_argument("--data-s", type=float, default=0.3, help="seconds to read what a step needs, in `overlap`")
    parser.add_argument("--compute-s", type=float, default=0.3, help="seconds of compute in a step")
    options = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, numpy {np.__version__}")
    if options.what == "start":
        print_start(options.repeats)
    else:
        print_overlap(options.data_s, options.compute_s)


if __name__ == "__main__":
    main()
