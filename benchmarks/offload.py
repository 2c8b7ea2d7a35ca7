"""`python -m benchmarks.offload --folder FOLDER`: what a step takes, and a rank holds, with its state off the device.

Ranks on this machine train square matrices by AdamW in bf16 at stage 3. Each way runs on fresh ranks; rounds are
interleaved, in turning order. "bare disk" computes nothing: as many bytes as offloading the optimizer's state moves in
a step are read and written, in pieces of 4 MiB by four threads of each rank, past the page cache. A step with that
state on the disk can take no less than this, nor less than a step with all of it in memory.

DeepSpeed offloads as its tutorials have it: `zero.Init` (which draws other weights), `DeepSpeedCPUAdam`, `pin_memory`,
both pipelines on, the settings of its aio as its own tuning tool recommends. It builds its aio when it is first used,
which needs libaio-dev, ninja and a compiler.
Memory is the most that was resident and no file's (RssAnon, RssShmem), above that before the model was built.
"""

import argparse
import functools
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerotrain
from benchmarks.checkpoint import WIDTH, Layers
from benchmarks.report import markdown
from benchmarks.rounds import machine
from tests.ranks.processes import RankError, run_ranks
from zerotrain.device.memory import own_nbytes
from zerotrain.errors import ConfigError

PIECE_NBYTES = 4 * 2**20
NUM_THREADS = 4
BARE = "bare disk"
OURS: dict[str, dict[str, Any]] = {
    "ours, in memory": {},
    "ours, optimizer to cpu": {"optimizer": "cpu"},
    "ours, optimizer to disk": {"optimizer": "disk"},
    "ours, both to disk": {"optimizer": "disk", "parameters": "disk"},
}
DEEPSPEED = {
    "DeepSpeed, in memory": {},
    "DeepSpeed, optimizer to cpu": {"optimizer": "cpu"},
    "DeepSpeed, optimizer to nvme": {"optimizer": "nvme"},
    "DeepSpeed, both to nvme": {"optimizer": "nvme", "param": "nvme"},
}


@dataclass(frozen=True)
class Job:
    """What each rank is told."""

    num_layers: int
    num_rows: int
    num_steps: int
    folder: str

    @property
    def numel(self) -> int:
        return self.num_layers * WIDTH * WIDTH


@dataclass(frozen=True)
class Found:
    """Of one way in one round, the slowest and largest of the ranks."""

    step_s: float
    peak_nbytes: int
    loss: float


def of_way(name: str, job: Job) -> Found:
    """On one rank: train some steps one way."""
    before = own_nbytes()
    with _Peak() as peak:
        if name == BARE:
            step, loss = _bare(job), 0.0
        else:
            torch.manual_seed(0)
            step = _ours(OURS[name], job) if name in OURS else _deepspeed(DEEPSPEED[name], job)
        loss = step()
        step()
        times = []
        for _ in range(job.num_steps):
            dist.barrier()
            started_s = time.perf_counter()
            loss = step()
            dist.barrier()
            times.append(time.perf_counter() - started_s)
    return Found(statistics.median(times), peak.nbytes - before, loss)


def _inputs(job: Job) -> torch.Tensor:
    return torch.randn(job.num_rows, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()


def _ours(offload: dict[str, Any], job: Job) -> Callable[[], float]:
    engine = zerotrain.build_engine(
        lambda: Layers(job.num_layers),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
        zero=zerotrain.ZeroConfig(stage=3),
        precision="bf16",
        offload=zerotrain.OffloadConfig(path=job.folder, **offload),
    )
    inputs = _inputs(job)

    def step() -> float:
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def _deepspeed(offload: dict[str, str], job: Job) -> Callable[[], float]:
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(0)
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        model = Layers(job.num_layers)
    kind: Any = DeepSpeedCPUAdam if offload else functools.partial(torch.optim.AdamW, fused=True)
    where = {"pin_memory": True, "nvme_path": job.folder}
    zero: dict[str, Any] = {"stage": 3, "contiguous_gradients": True, "overlap_comm": True, "reduce_scatter": True}
    for state, device in offload.items():
        piped = {"pipeline_read": True, "pipeline_write": True} if state == "optimizer" and device == "nvme" else {}
        zero[f"offload_{state}"] = {"device": device, **where, **piped}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=kind(model.parameters(), lr=1e-4),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": job.num_rows,
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "gradient_clipping": 0.0,
            "aio": {"block_size": 2**20, "queue_depth": 32, "intra_op_parallelism": 4, "overlap_events": True},
            "steps_per_print": 1_000_000,
        },
    )
    inputs = _inputs(job)

    def step() -> float:
        loss = engine(inputs)
        engine.backward(loss)
        engine.step()
        return float(loss.item())

    return step


def _bare(job: Job) -> Callable[[], float]:
    """12 bytes for each parameter of this rank, read and written."""
    nbytes = 12 * job.numel // dist.get_world_size() // PIECE_NBYTES * PIECE_NBYTES
    path = Path(job.folder) / f"bare-{dist.get_rank()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(descriptor, 0, nbytes)
    os.close(descriptor)
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    path.unlink()
    buffers = [_aligned(PIECE_NBYTES) for _ in range(NUM_THREADS)]
    own = threading.local()
    left = buffers.copy()

    def move(start: int) -> None:
        if not hasattr(own, "buffer"):
            own.buffer = left.pop()
        os.preadv(descriptor, [own.buffer], start)
        os.pwritev(descriptor, [own.buffer], start)

    threads = ThreadPoolExecutor(NUM_THREADS)

    def step() -> float:
        list(threads.map(move, range(0, nbytes, PIECE_NBYTES)))
        return 0.0

    return step


def _aligned(nbytes: int) -> Any:
    import mmap

    return mmap.mmap(-1, nbytes)


class _Peak:
    """The most that is resident and no file's while it is open, looked at every 5 ms."""

    nbytes = 0

    def __enter__(self) -> "_Peak":
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            self.nbytes = max(self.nbytes, own_nbytes())


def one_round(
    names: list[str], job: Job, num_ranks: int, found: dict[str, list[Found]], failed: dict[str, str]
) -> None:
    """Each way once, on fresh ranks."""
    for name in (each for each in names if each not in failed):
        try:
            of_ranks = run_ranks(of_way, num_ranks, name, job, timeout_s=900.0)
        except RankError as error:
            failed[name] = str(error).strip().splitlines()[-1]
            print(f"{name} failed:\n{error}", flush=True)
            continue
        finally:
            for left in Path(job.folder).iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        slowest, largest = max(each.step_s for each in of_ranks), max(each.peak_nbytes for each in of_ranks)
        found[name].append(Found(slowest, largest, of_ranks[0].loss))
        print(f"{name}: {slowest:.2f} s a step, {largest / 1e6:.0f} MB, loss {of_ranks[0].loss:.6f}", flush=True)


def table(found: dict[str, list[Found]]) -> list[list[str]]:
    """A row for each way."""
    median = {name: statistics.median(each.step_s for each in rounds) for name, rounds in found.items() if rounds}
    rows = [["", "s a step", "of the slower of compute and disk", "peak MB above the interpreter", "loss"]]
    for name, rounds in found.items():
        if not rounds:
            continue
        bound = max(median.get(BARE, 0.0), median.get(f"{name.split(',')[0]}, in memory", 0.0))
        to_disk = "disk" in name or "nvme" in name
        times = [each.step_s for each in rounds]
        rows.append(
            [
                name,
                f"{median[name]:.2f} ({min(times):.2f} to {max(times):.2f})",
                f"{median[name] / bound:.2f}" if to_disk and name != BARE and bound else "",
                f"{statistics.median(each.peak_nbytes for each in rounds) / 1e6:.0f}",
                "" if name == BARE else f"{rounds[-1].loss:.6f}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; it is left empty")
    parser.add_argument(
        "--layers", type=int, default=96, help=f"matrices of {WIDTH} x {WIDTH}; 96 are 100.7 M parameters"
    )
    parser.add_argument("--rows", type=int, default=256, help="of the inputs: how long a step computes")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-deepspeed", action="store_true")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        raise ConfigError(f"--folder: {options.folder} is not empty, and what is in it would be removed")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    names = [BARE, *OURS, *({} if options.without_deepspeed else DEEPSPEED)]
    job = Job(options.layers, options.rows, options.steps, str(options.folder.absolute()))
    found: dict[str, list[Found]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    for number in range(options.rounds):
        turn = number % len(names)
        one_round(names[turn:] + names[:turn], job, options.ranks, found, failed)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(
        f"\n{job.numel / 1e6:.1f} M parameters, {options.ranks} ranks, median of {options.rounds} rounds of "
        f"{options.steps} steps; {machine()}; load {load}\n"
    )
    print(markdown(table(found)))
    for name, why in failed.items():
        print(f"\n{name} failed: {why}")


if __name__ == "__main__":
    main()
