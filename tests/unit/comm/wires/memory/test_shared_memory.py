"""Memory that other ranks can read: given back, without a trace in any folder, and a forked process cannot harm it."""

import gc
import os
import resource
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch

from zerotrain.comm.wires.memory.shared_memory import SharedMemory, read_into

PAGE_NBYTES = 4096


def read(memory: SharedMemory, tensor: torch.Tensor) -> torch.Tensor:
    """What another process reads of a tensor."""
    offset, copy = memory.offset_of(tensor), torch.empty_like(tensor)
    assert offset is not None
    read_into(copy.data_ptr(), tensor.nbytes, memory.file, offset)
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_others_read_what_is_in_a_tensor_or_a_part_of_it(dtype: torch.dtype) -> None:
    memory = SharedMemory()
    first, second = memory.zeros(5000, dtype), memory.zeros(70, dtype)
    assert not torch.cat([first, second]).any()
    assert first.untyped_storage().nbytes() == 5000 * dtype.itemsize
    first.copy_(torch.arange(5000) % 100)
    second.fill_(7)
    for tensor in (first, first[64:128], second):
        assert torch.equal(read(memory, tensor), tensor)


def test_other_memory_is_known_as_such() -> None:
    memory = SharedMemory()
    assert memory.offset_of(torch.zeros(100)) is None
    released = torch.zeros(100)
    released.untyped_storage().resize_(0)
    assert memory.offset_of(released) is None
    assert memory.zeros(0, torch.float32).numel() == 0


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "an engine is deleted with reductions or gathers under way; two at once",
)
def test_pages_are_given_back_with_the_last_tensor_that_lies_in_them_and_the_file_with_all() -> None:
    memory = SharedMemory()
    file = memory.file
    name = os.readlink(f"/proc/self/fd/{file}"), os.fstat(file).st_ino
    tensors = [memory.zeros(PAGE_NBYTES, torch.float32) for _ in range(3)]
    part = tensors.pop()[5:10].fill_(3)
    assert (os.fstat(file).st_blocks * 512, memory.held_nbytes) == (12 * PAGE_NBYTES, 12 * PAGE_NBYTES)
    tensors.clear()
    assert (os.fstat(file).st_blocks * 512, memory.held_nbytes) == (4 * PAGE_NBYTES, 4 * PAGE_NBYTES)
    del memory
    gc.collect()
    assert part.tolist() == [3] * 5
    del part
    with suppress(FileNotFoundError):  # or another thread has opened something under this number meanwhile
        assert (os.readlink(f"/proc/self/fd/{file}"), os.stat(f"/proc/self/fd/{file}").st_ino) != name


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "/dev/shm is small or not there",
    "does not matter: nothing lies in it",
)
def test_it_lies_in_no_folder_whatever_room_dev_shm_has() -> None:
    before = os.listdir("/dev/shm")
    memory = SharedMemory()
    kept = memory.zeros(2**20, torch.float32)
    assert os.readlink(f"/proc/self/fd/{memory.file}").startswith("/memfd:")
    assert set(os.listdir("/dev/shm")) <= set(before)
    assert kept.numel() == 2**20


def in_child(do: Callable[[], bool]) -> bool:
    """What `do` gives in a forked process."""
    child = os.fork()
    if child == 0:
        right = False
        try:
            right = do()
        finally:
            os._exit(0 if right else 1)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory", "a rank forks, and the child writes to the weights"
)
def test_what_a_forked_process_writes_or_gives_back_is_its_own() -> None:
    memory = SharedMemory()
    held = [memory.zeros(PAGE_NBYTES, torch.float32).fill_(1)]

    def write() -> bool:
        held[0].fill_(2)
        as_written = bool((held[0] == 2).all())
        held.clear()  # the pages are not the child's to give back
        other = memory.zeros(10, torch.float32)
        return as_written and memory.offset_of(other) is None

    assert in_child(write)
    assert bool((held[0] == 1).all())
    assert torch.equal(read(memory, held[0]), held[0])


def test_a_limit_of_the_size_of_files_is_met_when_the_memory_is_made_and_not_by_a_signal_later() -> None:
    def limited() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        try:
            SharedMemory()
        except OSError:
            return True
        return False

    assert in_child(limited)


def test_what_reads_beyond_a_file_or_from_none_is_told() -> None:
    target = torch.empty(10)
    with pytest.raises(RuntimeError, match="cannot read another rank's memory"):
        read_into(target.data_ptr(), target.nbytes, -1, 0)
    with (
        open("/dev/null", "rb") as empty,
        pytest.raises(RuntimeError, match="it ends before the bytes that were asked for"),
    ):
        read_into(target.data_ptr(), target.nbytes, empty.fileno(), 0)
