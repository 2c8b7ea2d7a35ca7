"""Windows in turn: as many as were said, each waited for before it is used again; and what is waited for."""

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from zerotrain.device.device import DONE, Event
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import DiskTier
from zerotrain.offload.tier import PAGE_NBYTES, HostTier, OnThreads, Windows


class Noted(Event):
    """Notes that it was settled."""

    def __init__(self, notes: list[str], name: str) -> None:
        self._notes, self._name = notes, name

    def settle(self) -> None:
        self._notes.append(self._name)


def windows(num_windows: int = 3) -> Windows:
    return Windows(HostTier(torch.device("cpu")), num_windows)


@pytest.mark.parametrize("is_disk", [False, True], ids=["host", "disk"])
def test_the_oldest_is_used_again_once_there_are_enough_and_its_last_copy_is_waited_for(
    is_disk: bool, tmp_path: Path
) -> None:
    """By whoever uses it; a disk's threads write to it at once, so it is waited for first."""
    notes: list[str] = []
    device = torch.device("cpu")
    lent = Windows(DiskTier(device, tmp_path, "rank 0") if is_disk else HostTier(device))
    first, second, third = (lent.take(PAGE_NBYTES) for _ in range(3))
    for name, window in (("second", second), ("first", first), ("third", third)):
        lent.give_back(window, Noted(notes, name))
    assert lent.take(PAGE_NBYTES) is second
    assert notes == (["second"] if is_disk else [])
    second.unused.settle()
    assert notes == ["second"]
    lent.settle()
    assert notes == ["second", "first", "third"]


def test_another_is_made_where_all_are_lent_and_it_stays() -> None:
    lent = windows(2)
    taken = [lent.take(PAGE_NBYTES) for _ in range(4)]
    assert len({id(window) for window in taken}) == 4
    for window in taken:
        lent.give_back(window, DONE)
    assert [memory.nbytes for memory in lent.memories] == [PAGE_NBYTES] * 4


def test_one_that_is_too_small_makes_room_for_a_larger_one() -> None:
    lent = windows(1)
    lent.give_back(lent.take(PAGE_NBYTES), DONE)
    larger = lent.take(2 * PAGE_NBYTES)
    lent.give_back(larger, DONE)
    assert [memory.nbytes for memory in lent.memories] == [2 * PAGE_NBYTES]
    assert lent.take(PAGE_NBYTES) is larger


def test_all_that_threads_do_is_waited_for_and_the_first_error_raised() -> None:
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
