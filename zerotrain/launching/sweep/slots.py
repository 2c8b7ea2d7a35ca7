"""Devices for jobs that run side by side on one machine: each has its own, and gives them back when it ends or is
killed."""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from zerotrain.config.schema import Config
from zerotrain.device.kinds import only_gpus, visible_gpus
from zerotrain.files.lock import lock, open_lock
from zerotrain.launching.sweep.sweep import Sweep

SLOTS = ".slots"
"""Folder of the locks, below that of the sweep."""
_LOOK_EVERY_S = 0.2


@contextmanager
def devices_of_own(sweep: Sweep, config: Config) -> Iterator[None]:
    """Inside, this process and the ranks that it starts see devices that no other job of the sweep on this machine has:
    GPUs where they train on these, else an equal share of the CPU's cores. Waits until there are enough.

    A job that is alone on its machine has all of them, and none is locked.
    """
    if sweep.num_at_once == 1:
        yield
        return
    gpus = [] if config.launch.device == "cpu" else visible_gpus()
    wanted = config.launch.nproc_per_node or max(1, len(gpus) // sweep.num_at_once)
    with ExitStack() as stack:
        folder = sweep.folder / SLOTS / socket.gethostname()
        folder.mkdir(parents=True, exist_ok=True)
        if wanted <= len(gpus):
            stack.enter_context(only_gpus(_taken(folder, gpus, wanted, stack)))
        else:
            slots = [str(number) for number in range(sweep.num_at_once)]
            [slot] = _taken(folder, [f"cores_{each}" for each in slots], 1, stack)
            stack.enter_context(_only_cores(int(slot.removeprefix("cores_")), sweep.num_at_once))
        yield


def _taken(folder: Path, names: Sequence[str], num: int, stack: ExitStack) -> list[str]:
    """So many of the names, locked; all at once, so that no two jobs wait for each other."""
    while True:
        with ExitStack() as held, open_lock(folder / "all") as all_of_them:
            lock(all_of_them, wait=True)
            got: list[str] = []
            for name in names:
                file = held.enter_context(open_lock(folder / name.replace("/", "_")))
                try:
                    lock(file)
                except BlockingIOError:
                    continue
                got.append(name)
                if len(got) == num:
                    stack.push(held.pop_all())
                    return got
        time.sleep(_LOOK_EVERY_S)


@contextmanager
def _only_cores(number: int, num: int) -> Iterator[None]:
    """Inside, this process has one of `num` equal shares of its cores, the same where it has fewer cores than that."""
    if not hasattr(os, "sched_setaffinity"):  # macOS
        yield
        return
    before = os.sched_getaffinity(0)
    cores = sorted(before)
    share = max(1, len(cores) // num)
    os.sched_setaffinity(0, {cores[(number * share + each) % len(cores)] for each in range(share)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
