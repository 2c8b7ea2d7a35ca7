"""`python -m benchmarks.checkpoint --folder FOLDER`: what a save and a load take, beside torch's ways and bare files.

Ranks on this machine hold a model trained by AdamW at stage 2, and all write the same state: master weights and two
moments, 12 bytes a parameter over all ranks. DCP gets it as DTensors over the same shards, `torch.save` as one file a
rank, and "bare files" writes as many bytes from one buffer by os.write in pieces of 1 MiB. Everything is on the disk
when the clock stops (fsync of files and folder; DCP syncs its files). Rounds are interleaved: each way once, in turning
order. What is loaded was written just before, so it comes from the page cache.
"""

import argparse
import functools
import os
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
from zerotrain.checkpoint.blocks import BLOCK_NBYTES, sync_folder
from zerotrain.testing.ranks import run_ranks

WIDTH = 1024
OURS, DCP, TORCH, BARE = "ours", "DCP", "torch.save", "bare files"


class Layers(nn.Module):
    """As many square matrices as make up the size."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


Way = tuple[Callable[[Path], object], Callable[[Path], object]]


def ways(engine: zerotrain.ZeroEngine) -> dict[str, Way]:
    """How to save into a folder and how to load from it, by name."""
    shards = {}
    for index, bucket in enumerate(engine.schedule.trained):
        shards[f"{index}.weight"] = bucket.update.master_weight.clone()
        for tensor_index, tensor in enumerate(bucket.update.state_tensors()):
            shards[f"{index}.{tensor_index}"] = tensor.clone()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = {name: DTensor.from_local(values, mesh, [Shard(0)]) for name, values in shards.items()}
    numel = sum(values.numel() for values in shards.values())
    flat = torch.ones(numel).view(torch.uint8).numpy().data
    rank = dist.get_rank()

    def save_by_torch(folder: Path) -> None:
        with (folder / f"{rank}.pt").open("wb") as file:
            torch.save(shards, file)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(folder)

    def save_bare(folder: Path) -> None:
        descriptor = os.open(folder / f"{rank}.bin", os.O_WRONLY | os.O_CREAT)
        for start in range(0, len(flat), BLOCK_NBYTES):
            os.write(descriptor, flat[start : start + BLOCK_NBYTES])
        os.fsync(descriptor)
        os.close(descriptor)
        sync_folder(folder)

    def load_bare(folder: Path) -> None:
        with (folder / f"{rank}.bin").open("rb", buffering=0) as file:
            for start in range(0, len(flat), BLOCK_NBYTES):
                file.readinto(flat[start : start + BLOCK_NBYTES])

    return {
        OURS: (lambda folder: engine.save(folder / "step"), lambda folder: engine.load(folder / "step")),
        DCP: (
            lambda folder: dcp.save(sharded, checkpoint_id=folder / "dcp"),
            lambda folder: dcp.load(sharded, checkpoint_id=folder / "dcp"),
        ),
        TORCH: (save_by_torch, lambda folder: torch.load(folder / f"{rank}.pt", weights_only=True)),
        BARE: (save_bare, load_bare),
    }


def measured(num_layers: int, num_rounds: int, folder: str) -> tuple[int, dict[str, list[list[float]]]]:
    """On one rank: bytes of a checkpoint, and of each way and round (save s, its CPU s, load s, its CPU s)."""
    engine = zerotrain.build_engine(
        Layers(num_layers),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
        zero=zerotrain.ZeroConfig(stage=2),
    )
    engine.backward(engine(torch.randn(4, WIDTH)))
    engine.step()
    every_way = ways(engine)
    names = list(every_way)
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    nbytes = 0
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place = Path(folder) / f"{number}-{name.replace(' ', '-')}"
            place.mkdir(exist_ok=True)
            save, load = every_way[name]
            found[name].append([*_timed(functools.partial(save, place)), *_timed(functools.partial(load, place))])
            if dist.get_rank() == 0:
                nbytes = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
                shutil.rmtree(place)
            dist.barrier()
    return nbytes, found


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds until the last rank is done, and CPU seconds of this rank in them, the system's included."""
    dist.barrier()
    start_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    used_s = time.process_time() - cpu_s
    dist.barrier()
    return time.perf_counter() - start_s, used_s


def main() -> None:
    """Print a table: a row for each way."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; it is left empty")
    parser.add_argument(
        "--layers", type=int, default=96, help=f"matrices of {WIDTH} x {WIDTH}; 96 are 100.7 M parameters"
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    arguments = (options.layers, options.rounds, str(options.folder))
    nbytes, found = run_ranks(measured, options.ranks, *arguments, timeout_s=3600.0)[0]
    rows = [["", "save s", "GB/s", "CPU s a rank", "load s", "GB/s", "CPU s a rank"]]
    for name, times in found.items():
        row = [name]
        for side in (0, 2):
            taken, used = ([each[side + more] for each in times] for more in (0, 1))
            taken_s = statistics.median(taken)
            row += [f"{taken_s:.2f} ({min(taken):.2f} to {max(taken):.2f})", f"{nbytes / taken_s / 1e9:.2f}"]
            row.append(f"{statistics.median(used):.2f}")
        rows.append(row)
    print(f"{nbytes / 1e9:.2f} GB, {options.ranks} ranks, median of {options.rounds} rounds; {machine()}\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
