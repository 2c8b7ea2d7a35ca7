"""How fast this machine is, in a second or two, before any rank starts: what `zerotrain.planning.cost` asks for."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from zerotrain.config.schema import Config
from zerotrain.device.kinds import device_of
from zerotrain.device.processes import one_thread
from zerotrain.engine.precision.policy import precision_named
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import DiskTier
from zerotrain.offload.rates import measured
from zerotrain.planning.cost import Speeds
from zerotrain.run.preflight.room import Ranks

_MATRIX, _COPIED_NUMEL, _PATIENCE_S = 512, 2**24, 0.2
_CPU = torch.device("cpu")
OF_A_GPU = Speeds(
    flops=3e14, operations=1e5, memory=2e12, link=5e10, host=2e10, disk=1e9,
    assumed=("flops", "operations", "memory", "link", "host"),
)  # fmt: skip
"""About those of an H100. A GPU is not probed: the process that starts ranks must not take memory there."""
OF_A_NETWORK = 1.25e8
"""Bytes a second of 1 Gbit/s, for ranks on several hosts, which have not met yet."""


def probed(config: Config, ranks: Ranks, device: torch.device, num_threads: int, run_dir: Path) -> Speeds:
    """The rates of a rank, of which it says which ones are assumed.

    Args:
        device: of the first rank.
        num_threads: of a rank. One is probed: as many as there are do so many times as much.
    """
    disk, assumed = _disk_rate(Path(config.offload.path or run_dir))
    if not device_of(device).is_host:
        return Speeds(**vars(OF_A_GPU) | {"disk": disk, "assumed": (*OF_A_GPU.assumed, *assumed)})
    with one_thread():
        left = torch.ones(_MATRIX, _MATRIX, dtype=precision_named(config.precision.name).compute)
        flops = 2 * _MATRIX**3 * num_threads * _each_second(lambda: left @ left)
        source, small = torch.ones(_COPIED_NUMEL), torch.ones(8)
        target = torch.empty_like(source)
        memory = 2 * source.nbytes * _each_second(lambda: target.copy_(source))
        operations = _each_second(lambda: small + small)
    is_one_host = ranks.num_local == ranks.num_ranks
    return Speeds(
        flops=flops,
        operations=operations,
        memory=memory,
        link=memory / 2 if is_one_host else OF_A_NETWORK,
        host=memory / 2,
        disk=disk,
        assumed=assumed if is_one_host else ("link", *assumed),
    )


def _each_second(work: Callable[[], object]) -> float:
    work()
    started_s, num = time.perf_counter(), 0
    while (taken_s := time.perf_counter() - started_s) < _PATIENCE_S or not num:
        work()
        num += 1
    return num / taken_s


def _disk_rate(folder: Path) -> tuple[float, tuple[str, ...]]:
    """Bytes a second, both ways, and the name of the rate where it is assumed: nothing can be written there."""
    try:
        rates = measured(DiskTier(_CPU, folder, "the probe"))
    except OffloadError:
        return OF_A_GPU.disk, ("disk",)
    return 2 / (1 / rates.fetched + 1 / rates.stored), ()
