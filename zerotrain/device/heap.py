"""The memory of this process, and what glibc's allocator does with what was freed."""

import ctypes
import math
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_FREE_AT_TOP_NBYTES = 2**27
_USUAL_NBYTES, _RETURNED_NBYTES, _LARGE_NBYTES = 2**17, 2**22, 2**25
"""Blocks above the threshold get pages of their own, given back when they are freed."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
_MALLOPT = getattr(ctypes.CDLL(None), "mallopt", None)  # not everywhere is glibc
_GIVEN = next((name for name in _OF_THE_USER if name in os.environ), None)
if _GIVEN is not None:
    _MALLOPT = None
_NUM_SHOWING = 2
"""Steps that show what a process needs: the first makes the optimizer's state, the second has it from its begin on."""
_LEAST_HOLES_NBYTES = 2**23
"""Freed places between blocks in use that `Freed` leaves a process in any case."""
_MOST_HOLES_NBYTES, _MOST_HOLES_RETURNING_NBYTES = 11 * 2**23, 3 * 2**23
"""The same of one that may have much more memory."""


class _Malloc(ctypes.Structure):
    """mallinfo2(3) returns this struct."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_MALLINFO = None if _MALLOPT is None or sys.platform != "linux" else getattr(ctypes.CDLL(None), "mallinfo2", None)
if _MALLINFO is not None:  # of glibc 2.33
    _MALLINFO.restype = _Malloc
_GROWTH_NBYTES = 6 * 2**23  # 20 to 40 MB, and what the looks do not see
KEPT_NBYTES = _GROWTH_NBYTES + (
    0 if _MALLOPT is None else _MOST_HOLES_NBYTES if _MALLINFO is None else _LEAST_HOLES_NBYTES
)
"""Bytes that a process must be allowed beside its tensors: what it takes in its first steps, what comes and goes within
an operation, and freed places: 5 to 49 MiB in 64 trainings (2026-11-27)."""


class Freed:
    """Keeps this process from holding freed memory beside all that it uses when it uses most.

    glibc before 2.38 begins a tensor at a multiple of 64 bytes, and gives the few bytes before it to small blocks. Once
    freed, its place is too narrow for the next tensor of its size, which gets a new one at the end of the heap: up to
    140 MB stayed between blocks in use (2 ranks, 27.4 M parameters, stage 3, 2026-11-27). Pages of such places go back
    to the system, once there are too many of them while the most is used.

    To get pages again takes time. So a process keeps more places, and those of larger tensors, if it may have more
    memory: two steps show what it needs. With just `KEPT_NBYTES` beside its tensors a step takes up to 1.1 of the time
    (2026-11-27).
    """

    def __init__(self) -> None:
        self._allowed = math.inf
        self.most_before = 0
        """Most bytes that the process had in memory before `begin`."""
        self.begin()

    def allow(self, nbytes: float) -> None:
        """Let this process have so many bytes of memory, without files; all that there is if nobody says so."""
        self._allowed = math.inf if _MALLINFO is None else nbytes
        self.begin()

    def begin(self) -> None:
        """Forget what was used: from now on it may be less."""
        self._heap = self._most = self._others = 0
        self._num_steps = 0
        self._use(math.inf if self._allowed == math.inf else 0)
        if self._allowed < math.inf:
            self.most_before = most_nbytes()
            with suppress(OSError):  # some kernels have no such file
                Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM begins anew

    def end_step(self) -> None:
        """A step of the optimizer is over: look how much memory it has taken at most."""
        if self._allowed == math.inf:
            return
        self._num_steps += 1
        most, of_files = _of_status("VmHWM", "RssFile")
        room = self._allowed - (most - of_files)
        if self._num_steps == _NUM_SHOWING:
            self._use(room)
        elif room < _LEAST_HOLES_NBYTES:  # longer rows, an evaluation
            self._use(0)

    def _use(self, room: float) -> None:
        """Let this process keep so many bytes of what it frees. Half of them are for places between others. The largest
        tensor whose place stays has a sixth: a few of such tensors come and go between two looks."""
        self._kept = min(max(room / 2, _LEAST_HOLES_NBYTES), _MOST_HOLES_NBYTES)
        self.largest_nbytes = int(min(max(room / 6, _RETURNED_NBYTES), _LARGE_NBYTES))

    def look(self, *, returns: bool) -> None:
        """Give back what is too much. It takes 12 microseconds if nothing is.

        Args:
            returns: whether the process is to keep hardly anything, whatever it may have.
        """
        if _MALLINFO is None:
            return
        told = _MALLINFO()
        used = told.uordblks + told.hblkhd
        # Where the heap has grown since the last look, what is free at its end was used in between.
        self._most = max(self._most, used + (told.keepcost if told.arena > self._heap else 0))
        self._heap = max(self._heap, told.arena)
        kept = min(self._kept, _MOST_HOLES_RETURNING_NBYTES) if returns else self._kept
        if _anonymous_nbytes() > self._others + self._most + kept:
            give_back_freed()
            self._others = _anonymous_nbytes() - used  # stacks, Python's memory


FREED = Freed()
"""This process has one heap, whatever number of engines."""


def no_choice_because() -> str:
    """Why nothing here changes the heap, such as "without glibc"; empty where it can be changed."""
    return f"while {_GIVEN} is set" if _GIVEN else "without glibc" if _MALLOPT is None else ""


def reuse_what_is_freed(reuses: bool = True, largest_nbytes: int = _LARGE_NBYTES) -> None:
    """Let this process use again what it frees, and 128 MiB at the end of its heap, unless the user has set what glibc
    does.

    By itself glibc does so once a block of 32 MiB was freed, with 64 MiB. Before that it gives logits and large
    gradients back to the system in each step and gets zeroed pages for them in the next: at stage 2 7,700 page faults
    and 40 ms of system time in a step of 350 ms, with it 470 and 20 (GPT of 13.9 M parameters, 2026-11-22).

    Args:
        largest_nbytes: larger tensors are given back when they are freed.
        reuses: False: tensors of more than 128 KiB that come from now on are given back when they are freed. Tensors
            that live longer than a step should be made so: freed within the heap they would stay resident.
    """
    if _MALLOPT is not None:
        _MALLOPT(_TRIM_THRESHOLD, _FREE_AT_TOP_NBYTES)
        _MALLOPT(_MMAP_THRESHOLD, largest_nbytes if reuses else _USUAL_NBYTES)


def return_what_is_freed() -> None:
    """Let the system have what this process frees, at once, but for blocks of less than 4 MiB between others. With 128
    KiB as the border a step of 1.0 s took 1.4, with this one 1.1 (GPT of 27.4 M parameters, stage 1, 2026-11-26)."""
    if _MALLOPT is not None:
        _MALLOPT(_TRIM_THRESHOLD, _USUAL_NBYTES)
        _MALLOPT(_MMAP_THRESHOLD, _RETURNED_NBYTES)


def give_back_freed() -> None:
    """Let malloc give the system all that it keeps of freed memory. Otherwise freed large blocks stay between small
    ones, and later ones do not fit in their place: measured, without this a process grew by what the whole model takes,
    though no more than a bucket of it was ever held, and by all that had gone to a disk."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc alone has it
        libc.malloc_trim(0)


def own_nbytes() -> int:
    """Bytes of memory that this process takes, without files, such as torch's libraries: the processes of a machine
    share them, and the system may drop them and read them again. Elsewhere than on Linux with them."""
    if sys.platform != "linux":
        return most_nbytes()
    return sum(_of_status("RssAnon", "RssShmem"))


def _anonymous_nbytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        _, resident, of_files, *_ = file.read().split()
    return (int(resident) - int(of_files)) * resource.getpagesize()


def most_nbytes() -> int:
    """Bytes that this process has had in memory at most, with files. Not ru_maxrss on Linux: a program begins with that
    of the process which has started it."""
    if sys.platform == "linux":
        return max(FREED.most_before, _of_status("VmHWM")[0])
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most  # macOS counts bytes


def files_nbytes() -> int:
    """Bytes of files that this process has in memory; 0 elsewhere than on Linux."""
    return 0 if sys.platform != "linux" else _of_status("RssFile")[0]


def _of_status(*names: str) -> list[int]:
    with open("/proc/self/status", encoding="ascii") as file:
        values = dict(line.split(":", 1) for line in file)
    return [1024 * int(values[name].split()[0]) for name in names]
