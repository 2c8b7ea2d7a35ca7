"""All that can be offloaded on a disk, in real processes: the same bits, and memory that does not follow the depth."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import place
from torch import nn

import zerotrain
from tests.ranks import run_ranks
from zerotrain.device import memory as heap

WIDTH, ROWS = 128, 1024
SAVED_NBYTES = 2 * ROWS * WIDTH * 4
"""Of a block: its input, and that of the GELU."""
FLAT, DEEP = 4, 28


class Blocks(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def peak_nbytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def hash_and_peak(depth: int, folder: str | None) -> tuple[str, int]:
    """After three steps; and the most memory that the process had in the last."""
    torch.manual_seed(0)
    where: Any = {} if folder is None else dict.fromkeys(("optimizer", "parameters", "activations"), "disk")
    engine = zerotrain.build_engine(
        Blocks(depth),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        zero=zerotrain.ZeroConfig(stage=3, bucket_mb=0.3),
        offload=zerotrain.OffloadConfig(path=folder, **where),
    )
    for step in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        engine.backward(
            engine(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * step + place()[0])))
        )
        engine.step()
    return engine.weights_sha256(), peak_nbytes()


def flat_deep_and_on_the_device(folder: str) -> list[tuple[str, int]]:
    # Otherwise up to 24 MiB of small tensors stay once freed: glibc's memalign cannot use a gap of the size that is
    # asked for.
    heap._RETURNED_NBYTES = 64 * 1024
    return [hash_and_peak(depth, where) for depth, where in ((FLAT, folder), (DEEP, folder), (DEEP, None))]


@pytest.mark.case("offload: Activations off the device", "Depth")
def test_all_of_it_on_a_disk_has_the_same_bits_and_memory_does_not_grow_with_the_depth(tmp_path: Path) -> None:
    more = (DEEP - FLAT) * SAVED_NBYTES
    for flat, deep, on_the_device in run_ranks(flat_deep_and_on_the_device, 2, str(tmp_path)):
        assert deep[0] == on_the_device[0]
        assert deep[1] - flat[1] < 0.4 * more
        assert on_the_device[1] - deep[1] > 0.6 * more
    assert list(tmp_path.iterdir()) == []
