"""Windows in turn: as many as were said, each waited for before it is used again; and what is waited for."""

import resource
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from zerotrain.device.device import Event
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import DiskTier
from zerotrain.offload.tier import PAGE_NBYTES, OnThreads, Tier, Windows, available_nbytes, most_of_process

# How much memory new processes can have, as the kernel tells of the machine and of control groups.


KB = 1024
VERSION_2 = ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file 30\nactive_file 20\nanon 1")
VERSION_1 = (
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
    "total_inactive_file 30\ntotal_active_file 20",
)  # fmt: skip


def tell(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    tell(tmp_path, "proc/meminfo", "MemTotal: 99 kB\nMemAvailable:  7 kB\nSwapTotal: 9 kB\nSwapFree: 2 kB\nHuge: 0")
    return tmp_path


def test_without_limits_it_is_what_is_available_with_swap(machine):
    assert available_nbytes(machine) == 9 * KB


@pytest.mark.parametrize(("line", "files"), [("0::/a/b", VERSION_2), ("8:cpu,memory:/a/b", VERSION_1)])
@pytest.mark.parametrize("group", ["a/b", "a", "."])
def test_a_limit_of_the_group_or_of_one_around_it_counts(machine, line, files, group):
    """At "." a container sees its own limit, whatever its name outside is."""
    top, limit, used, stat = files
    tell(machine, "proc/self/cgroup", line)
    for name, text in ((limit, "1000"), (used, "400"), ("memory.stat", stat)):
        tell(machine, f"{top}/{group}/{name}", text)
    assert available_nbytes(machine) == 650
    tell(machine, f"{top}/{group}/{limit}", "max" if limit == "memory.max" else str(2**63 - 4096))
    assert available_nbytes(machine) == 9 * KB


def test_where_nothing_is_known_it_is_what_the_machine_has(tmp_path):
    assert available_nbytes(tmp_path) > 2**20
    tell(tmp_path, "proc/self/cgroup", "8:memory:/")
    tell(tmp_path, "proc/meminfo", "nothing")
    assert available_nbytes(tmp_path) > 2**20


def test_the_limit_of_a_process_is_that_of_its_addresses():
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert most_of_process() == (float("inf") if soft == resource.RLIM_INFINITY else soft)
    program = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (2**36, 2**36)); "
    program += "from zerotrain.offload.tier import most_of_process; print(most_of_process())"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == f"{2**36}\n"


class Noted(Event):
    """Notes that it was settled."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def settle(self, timeout_s: float | None = None) -> bool:
        self._notes.append(self._name)
        return True


@pytest.mark.parametrize("is_disk", [False, True], ids=["host", "disk"])
def test_the_oldest_is_used_again_once_there_are_enough_and_its_last_copy_is_waited_for(is_disk, tmp_path):
    """By whoever uses it; a disk's threads write to it at once, so it is waited for first."""
    notes: list[str] = []
    device = torch.device("cpu")
    lent = Windows(DiskTier(device, tmp_path, "rank 0") if is_disk else Tier(device))
    first, second, third = (lent.take(PAGE_NBYTES) for _ in range(3))
    for name, window in (("second", second), ("first", first), ("third", third)):
        lent.give_back(window, Noted(notes, name))
    assert lent.take(PAGE_NBYTES) is second
    assert notes == (["second"] if is_disk else [])
    second.unused.settle()
    assert notes == ["second"]


def test_all_that_threads_do_is_waited_for_and_the_first_error_raised():
    """Or a window would be used again that a thread still writes into."""
    parts: list[Future[None]] = [Future() for _ in range(3)]
    parts[0].set_exception(OffloadError("first"))
    waited: list[int] = []

    class Slow(Future[None]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            waited.append(1)
            return super().exception(timeout)

    slow = Slow()
    slow.set_exception(OffloadError("second"))
    transfer = OnThreads([parts[0], slow])
    with pytest.raises(OffloadError, match="first"):
        transfer.wait()
    assert waited == [1]
    transfer.wait()  # told once
