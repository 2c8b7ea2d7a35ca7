"""What lies on a disk is not in memory: while a rank trains, saves and loads, and under a limit that is in earnest."""

import ctypes
import functools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from commands import REPOSITORY, TINY, Command, result_of
from torch import nn

import zerotrain
from tests.ranks import run_ranks
from zerotrain.device import memory as heap

WIDTH = 512
UNIT_NBYTES = 4 * WIDTH * WIDTH
SIZES = (24, 96)
"""Units: 1x and 4x; the smaller has as many buckets as windows eight times over."""


class Layers(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


@dataclass(frozen=True)
class Way:
    stage: int
    offload: zerotrain.OffloadConfig
    num_layers: int


@dataclass(frozen=True)
class Seen:
    peak_nbytes: int
    """The most that was resident, mapped files included, above that before the engine was built."""
    on_device_nbytes: int
    """Weights and gradients that the stage has every rank hold."""
    offloaded_nbytes: int


def resident(name: str) -> int:
    """VmRSS: now; VmHWM: the most since the process began."""
    [kib] = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def seen_on_a_rank(way: Way, folder: Path) -> Seen:
    """Of a training with a save and a load in its midst."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: freed memory goes back, and its gaps are not counted
    heap._RETURNED_NBYTES = 2**16  # also within a step
    before = resident("VmRSS")
    torch.manual_seed(0)
    engine = zerotrain.build_engine(
        functools.partial(Layers, way.num_layers),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-4, fused=True),
        zero=zerotrain.ZeroConfig(stage=way.stage, bucket_mb=UNIT_NBYTES / 2**20),
        offload=way.offload,
    )
    inputs = torch.randn(4, WIDTH)
    for step in range(4):
        engine.backward(engine(inputs))
        engine.step()
        if step == 2:
            engine.save(folder / "saved")
            engine.load(folder / "saved")
            engine.weights_sha256()
    held = engine.memory_bytes()
    return Seen(resident("VmHWM") - before, held["parameters"] + held["gradients"], held["offloaded"])


@pytest.mark.case(
    "offload: Offload",
    "the model grows, and its state is on a disk",
    "beside weights and gradients memory stays what it is, in training, saves and loads",
)
@pytest.mark.parametrize(("stage", "parameters"), [(2, "device"), (3, "disk")])
def test_beside_weights_and_gradients_memory_is_flat_while_the_model_grows(
    stage: int, parameters: str, tmp_path: Path
) -> None:
    offload = zerotrain.OffloadConfig(optimizer="disk", parameters=parameters, path=str(tmp_path))
    found = []
    for num_layers in SIZES:
        seen = run_ranks(seen_on_a_rank, 2, Way(stage, offload, num_layers), tmp_path / str(num_layers))
        found.append(max(seen, key=lambda each: each.peak_nbytes))
    beside = [each.peak_nbytes - each.on_device_nbytes for each in found]
    grown = found[-1].offloaded_nbytes - found[0].offloaded_nbytes
    assert grown >= (SIZES[-1] - SIZES[0]) * UNIT_NBYTES
    # Malloc leaves gaps between buffers on loan: measured, 0 to 33 MB.
    assert max(beside) - min(beside) < grown / 2, beside


# ---- a limit of the system's

LARGE = (
    *TINY,
    "model.hidden_size=1024",
    "model.num_layers=64",
    "precision=bf16",
    "zero.stage=3",
    "zero.bucket_mb=4",
    "train.max_steps=2",
    "train.micro_batch_size=1",
    "data.seq_len=4",
    "hydra.run.dir=run",
)
"""1.02 GB of weights, master weights and the optimizer's state, and 0.15 GB of gradients."""
LIMIT_NBYTES = 1000 * 2**20
"""Of what all processes of a run may have resident."""
GROUPS = Path("/sys/fs/cgroup/memory")


def run_within_limit(folder: Path, *settings: str) -> Command:
    folder.mkdir()
    group = GROUPS / f"zerotrain-{os.getpid()}-{folder.name}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_NBYTES))
    except OSError as error:
        pytest.skip(f"needs a memory cgroup of its own: {error}")
    try:
        launch = (sys.executable, str(REPOSITORY / "launch.py"), *LARGE, *settings)
        inside = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command = Command(["sh", "-c", inside, "sh", *launch], folder)
        command.wait()
        assert command.wait_until_gone() == []
    finally:
        group.rmdir()
    return command


@pytest.mark.case("offload: Offload", "more state than the process may allocate", "trains")
def test_a_model_whose_state_is_more_than_the_process_may_have_trains(tmp_path: Path) -> None:
    on_device = run_within_limit(tmp_path / "device")
    assert on_device.process.returncode == 2, on_device.stderr
    assert on_device.stderr.count("\n") == 1
    assert "GB" in on_device.stderr
    assert "memory" in on_device.stderr
    on_disk = run_within_limit(tmp_path / "disk", "offload.optimizer=disk", "offload.parameters=disk")
    assert on_disk.process.returncode == 0, on_disk.stderr
    result = result_of(tmp_path / "disk/run")
    assert (result["status"], result["steps"]) == ("completed", 2)
