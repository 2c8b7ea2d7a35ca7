"""`python -m benchmarks.checkpoint --folder FOLDER`: what a save and a load take, and a save of the training beside it.

Ranks on this machine hold a model trained by AdamW at stage 2, and all write the same state: master weights and two
moments, 12 bytes a parameter over all ranks. DCP gets copies as DTensors over the same shards (of what is a view it
would stage all of the memory behind), `torch.save` writes them as one file a rank, and "bare files" writes as many
bytes from one buffer by os.pwrite in pieces of 1 MiB. Everything is on the disk when the clock stops (fsync of files
and folder; DCP syncs its files). What is loaded was written just before, so it comes from the page cache, if that has
room.

Beside training: the pause is what the call takes; lost time is what some steps take from the call on, less what as many
took just before without a save. A save that goes on behind those steps is waited for, which does not count as lost. DCP
saves beside training as its recipe has it, by `async_save` with a gloo group. Peaks are those of the process (VmHWM,
set back before), above what was resident before a save or a load, or above the peak of the steps without a save.

Rounds are interleaved: each way once, in turning order.
"""

import argparse
import functools
import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zerotrain
from benchmarks.report import markdown
from benchmarks.rounds import machine
from tests.ranks.processes import run_ranks
from zerotrain.checkpoint.manifest import BLOCK_NBYTES
from zerotrain.device.memory import most_nbytes
from zerotrain.files.lock import sync

WIDTH = 1024
OURS, OURS_BESIDE, DCP, DCP_BESIDE = "ours", "ours, beside training", "DCP", "DCP, async_save"
TORCH, BARE = "torch.save", "bare files"
Measured = dict[str, dict[str, list[float]]]
"""Of each way and each thing measured, the rounds."""


class Layers(nn.Module):
    """As many square matrices as make up the size."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Way:
    """How to save and to load.

    Args:
        begin: begins to save into a folder; returns what waits for its end.
    """

    def __init__(
        self, begin: Callable[[Path], Callable[[], object]], load: Callable[[Path], object] | None = None
    ) -> None:
        self.begin, self.load = begin, load

    def save(self, folder: Path) -> None:
        self.begin(folder)()


def at_once(save: Callable[[Path], object]) -> Callable[[Path], Callable[[], object]]:
    """A save that is over when it returns."""

    def begin(folder: Path) -> Callable[[], object]:
        save(folder)
        return lambda: None

    return begin


def ways(engine: zerotrain.ZeroEngine) -> dict[str, Way]:
    """By name."""
    shards = {}
    for index, bucket in enumerate(engine.schedule.trained):
        shards[f"{index}.weight"] = bucket.update.master_weight.clone()
        for tensor_index, tensor in enumerate(bucket.update.state_tensors()):
            shards[f"{index}.{tensor_index}"] = tensor.clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: DTensor.from_local(values, mesh, [Shard(0)]) for name, values in shards.items()}
    gloo = dist.new_group(backend="gloo")
    numel = sum(values.numel() for values in shards.values())
    flat = torch.ones(numel).view(torch.uint8).numpy().data
    rank = dist.get_rank()

    def save_by_torch(folder: Path) -> None:
        with (folder / f"{rank}.pt").open("wb") as file:
            torch.save(shards, file)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)

    def save_bare(folder: Path) -> None:
        descriptor = os.open(folder / f"{rank}.bin", os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(flat), BLOCK_NBYTES):
            os.pwrite(descriptor, flat[start : start + BLOCK_NBYTES], start)
        os.fsync(descriptor)
        os.close(descriptor)
        sync(folder)

    def load_bare(folder: Path) -> None:
        with (folder / f"{rank}.bin").open("rb", buffering=0) as file:
            for start in range(0, len(flat), BLOCK_NBYTES):
                file.readinto(flat[start : start + BLOCK_NBYTES])

    def begin_dcp(folder: Path) -> Callable[[], object]:
        future: Any = dcp.async_save(sharded, checkpoint_id=folder / "dcp", process_group=gloo)
        return future.result

    return {
        OURS: Way(at_once(lambda folder: engine.save(folder / "step")), lambda folder: engine.load(folder / "step")),
        OURS_BESIDE: Way(lambda folder: engine.begin_save(folder / "step").wait),
        DCP: Way(
            at_once(lambda folder: dcp.save(sharded, checkpoint_id=folder / "dcp")),
            lambda folder: dcp.load(sharded, checkpoint_id=folder / "dcp"),
        ),
        DCP_BESIDE: Way(begin_dcp),
        TORCH: Way(at_once(save_by_torch), lambda folder: torch.load(folder / f"{rank}.pt", weights_only=True)),
        BARE: Way(at_once(save_bare), load_bare),
    }


def measured(num_layers: int, num_rows: int, num_steps: int, num_rounds: int, folder: str) -> tuple[int, Measured]:
    """On one rank: bytes of a checkpoint, and the figures."""
    engine = zerotrain.build_engine(
        Layers(num_layers),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-6, fused=True),
        zero=zerotrain.ZeroConfig(stage=2),
    )
    inputs = torch.randn(num_rows, WIDTH)

    def train() -> None:
        for _ in range(num_steps):
            engine.backward(engine(inputs))
            engine.step()

    train()
    every_way = ways(engine)
    names = list(every_way)
    found: Measured = {name: {} for name in names}
    nbytes = 0
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place = Path(folder) / f"{number}-{re.sub('[^a-z]+', '-', name.lower())}"
            place.mkdir(exist_ok=True)
            figures = _alone(every_way[name], place) if every_way[name].load else {}
            if dist.get_rank() == 0:
                nbytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file()) or nbytes
                shutil.rmtree(place)
            dist.barrier()
            place.mkdir(exist_ok=True)
            if name != BARE:
                figures |= _beside(every_way[name], train, place)
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(place)
            dist.barrier()
            for what, figure in figures.items():
                found[name].setdefault(what, []).append(figure)
    return nbytes, found


def _alone(way: Way, folder: Path) -> dict[str, float]:
    """A save and a load with nothing beside them."""
    assert way.load is not None
    figures = {}
    for what, call in (("save", way.save), ("load", way.load)):
        resident, cpu_s = _reset_peak(), time.process_time()
        figures[f"{what} s"] = _timed(functools.partial(call, folder))
        figures |= {f"{what} CPU s": time.process_time() - cpu_s, f"{what} peak": most_nbytes() - resident}
    return figures


def _beside(way: Way, train: Callable[[], None], folder: Path) -> dict[str, float]:
    """Steps without a save, and then as many with one."""
    _reset_peak()
    without_s, peak = _timed(train), most_nbytes()
    _reset_peak()
    waits: list[Callable[[], object]] = []
    pauses = []

    def begin_and_train() -> None:
        started_s = time.perf_counter()
        waits.append(way.begin(folder))
        pauses.append(time.perf_counter() - started_s)
        train()

    with_s = _timed(begin_and_train)
    behind_s = _timed(waits[0])
    peak = most_nbytes() - peak
    return {
        "pause s": pauses[0],
        "steps s": without_s,
        "lost s": with_s - without_s,
        "behind s": behind_s,
        "peak": peak,
    }


def _reset_peak() -> int:
    """Bytes resident now, from which the peak begins to count anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return most_nbytes()


def _timed(call: Callable[[], Any]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    started_s = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - started_s


def _alone_table(found: Measured, nbytes: int) -> list[list[str]]:
    rows = [
        ["", *(f"{w}{more}" for w in ("save", "load") for more in (" s", " GB/s", ", of bare", " CPU s", " peak MB"))]
    ]
    for name, figures in found.items():
        if "save s" not in figures:
            continue
        row = [name]
        for what in ("save", "load"):
            times = figures[f"{what} s"]
            taken_s, bare_s = statistics.median(times), statistics.median(found[BARE][f"{what} s"])
            row += [f"{taken_s:.2f} ({min(times):.2f} to {max(times):.2f})", f"{nbytes / taken_s / 1e9:.2f}"]
            row += [f"{bare_s / taken_s:.0%}", f"{statistics.median(figures[f'{what} CPU s']):.2f}"]
            row.append(f"{statistics.median(figures[f'{what} peak']) / 1e6:.0f}")
        rows.append(row)
    return rows


def _beside_table(found: Measured) -> list[list[str]]:
    rows = [["", "pause ms", "lost ms", "of the steps", "waited for behind them ms", "peak MB"]]
    for name, figures in found.items():
        if "lost s" not in figures:
            continue
        lost = [1e3 * each for each in figures["lost s"]]
        median = {what: statistics.median(rounds) for what, rounds in figures.items()}
        spread = f"{1e3 * median['lost s']:.0f} ({min(lost):.0f} to {max(lost):.0f})"
        of_steps = f"{median['lost s'] / median['steps s']:.1%} of {median['steps s']:.1f} s"
        rest = [f"{1e3 * median['behind s']:.0f}", f"{median['peak'] / 1e6:.0f}"]
        rows.append([name, f"{1e3 * median['pause s']:.1f}", spread, of_steps, *rest])
    return rows


def main() -> None:
    """Print two tables: a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; it is left empty")
    parser.add_argument(
        "--layers", type=int, default=96, help=f"matrices of {WIDTH} x {WIDTH}; 96 are 100.7 M parameters"
    )
    parser.add_argument("--rows", type=int, default=64, help="of the inputs: how long a step computes")
    parser.add_argument("--steps", type=int, default=4, help="beside a save")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    arguments = (options.layers, options.rows, options.steps, options.rounds, str(options.folder))
    nbytes, found = run_ranks(measured, options.ranks, *arguments, timeout_s=3600.0)[0]
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(
        f"{nbytes / 1e9:.2f} GB, {options.ranks} ranks, median of {options.rounds} rounds; {machine()}; load {load}\n"
    )
    print(markdown(_alone_table(found, nbytes)))
    print(f"\nBeside {options.steps} steps:\n")
    print(markdown(_beside_table(found)))


if __name__ == "__main__":
    main()
