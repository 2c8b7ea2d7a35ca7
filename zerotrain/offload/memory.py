"""Host memory: its pages, and how much of it there is."""

import math
import os
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAGE_NBYTES = 4096
"""Borders that direct reads and writes of any disk keep to."""


def whole_pages(nbytes: int) -> int:
    """The bytes of the pages that hold so many."""
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


def most_of_process() -> float:
    """Bytes that a process may have, as `ulimit -v` says."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return math.inf if soft == resource.RLIM_INFINITY else soft


def available_nbytes(root: Path = Path("/")) -> float:
    """Bytes that processes started now can have together, swap and files cached in memory included: the machine's, or
    what is left to this process's control groups. As much as there is at all, where no more is known.

    Args:
        root: of the file system that the kernel describes itself in.
    """
    known = list(_left_to_groups(root))
    with suppress(OSError, ValueError, KeyError):
        told = _numbers(root / "proc/meminfo")
        known.append(1024 * (told["MemAvailable"] + told.get("SwapFree", 0)))
    return min(known, default=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


_OF_GROUPS = {
    "": ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
}
"""By the controller that /proc/self/cgroup names, none in version 2: folder, limit, what is used, and of it what the
kernel gives back when it is needed."""


def _left_to_groups(root: Path) -> Iterator[int]:
    """Bytes left to each control group with a limit that this process is in."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    for _, controllers, inside in (line.split(":", 2) for line in lines):
        for controller in {"", "memory"} & set(controllers.split(",")):
            folder, limit, used, given_back = _OF_GROUPS[controller]
            top = root / "sys/fs/cgroup" / folder
            group = top / inside.strip("/")
            # In a container the name may be that outside it, and the folder that of the container.
            for each in (group, *group.parents)[: len(group.relative_to(top).parts) + 1]:
                with suppress(OSError, ValueError, KeyError):
                    freed = sum(_numbers(each / "memory.stat")[name] for name in given_back)
                    yield int((each / limit).read_text()) - int((each / used).read_text()) + freed


def _numbers(path: Path) -> dict[str, int]:
    """The numbers in lines such as "MemFree: 1024 kB"."""
    parts = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in parts}
