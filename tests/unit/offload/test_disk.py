"""A disk's places and windows: which bytes of the file are whose, and what of them is in memory."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotrain.device.device import mapped_bytes
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import PIECE_NBYTES, DiskTier, Gaps, ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import PAGE_NBYTES, measured

# A file without a name: what it says when a disk refuses, and that it goes on where it can.


NBYTES = 8 * PAGE_NBYTES


def random_bytes(nbytes: int = NBYTES) -> torch.Tensor:
    """On pages, as direct access wants it."""
    values = mapped_bytes(nbytes)
    return values.copy_(torch.randint(256, (nbytes,), dtype=torch.uint8))


def gone_through(file: ScratchFile) -> bool:
    """Whether what is written comes back."""
    start, written, found = file.extend(NBYTES), random_bytes(), mapped_bytes(NBYTES)
    file.write(start, written.numpy().data)
    file.read(start, found.numpy().data)
    return torch.equal(written, found)


def refusing(number: int, real: Callable[..., Any], is_refused: Callable[..., bool]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        if is_refused(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    return call


def test_a_folder_is_made_and_nothing_is_seen_in_it(tmp_path):
    file = ScratchFile(tmp_path / "a/b", "rank 0")
    assert gone_through(file)
    assert list((tmp_path / "a/b").iterdir()) == []


@pytest.mark.case("offload: Offload", "two runs, or ranks, with one folder", "do not meet: files have no names")
def test_two_with_one_folder_do_not_meet(tmp_path):
    files = [ScratchFile(tmp_path, f"rank {rank}") for rank in range(2)]
    written, found = [random_bytes() for _ in files], mapped_bytes(NBYTES)
    for file, values in zip(files, written, strict=True):
        file.write(file.extend(NBYTES), values.numpy().data)
    for file, values in zip(files, written, strict=True):
        file.read(0, found.numpy().data)
        assert torch.equal(found, values)


@pytest.mark.case(
    "offload: Offload",
    "the file system refuses direct access, at once or when it is used",
    "through the page cache; the start says so and why",
)
def test_where_direct_access_is_refused_when_opened_it_goes_through_the_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "open", refusing(errno.EINVAL, os.open, lambda _, flags, *__: bool(flags & os.O_DIRECT)))
    file = ScratchFile(tmp_path, "rank 0")
    assert file.buffered_because == "the file system refuses direct access (Invalid argument)"
    assert gone_through(file)


@pytest.mark.case("offload: Offload", "the file system refuses direct access, at once or when it is used")
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_where_it_is_refused_when_used_too(call, tmp_path, monkeypatch):
    """As by a file system that wants larger blocks."""
    file = ScratchFile(tmp_path, "rank 0")
    if file.buffered_because is not None:
        pytest.skip("no direct access here")
    direct = file._direct
    monkeypatch.setattr(os, call, refusing(errno.EINVAL, getattr(os, call), lambda used, *_: used == direct))
    assert gone_through(file)
    assert file.buffered_because == "the file system refuses direct access (Invalid argument)"


def test_a_disk_without_room_is_named_with_what_is_there_and_what_is_free(tmp_path, monkeypatch):
    file = ScratchFile(tmp_path, "rank 0")
    file.extend(10**6)
    monkeypatch.setattr(os, "posix_fallocate", refusing(errno.ENOSPC, os.posix_fallocate, lambda *_: True))
    said = (
        f"offload.path: {tmp_path} has no room for what rank 0 offloads (No space left on device): 0.001 GB of it are "
        "there, and 0.002 GB more are needed, with "
    )
    with pytest.raises(OffloadError, match=re.escape(said)):
        file.extend(2 * 10**6)


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_path_that_is_a_file_is_said_to_be_one(path, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"^offload\.path: no file can be made in .* \(it is no folder\)$"):
        ScratchFile(tmp_path / path, "rank 0")


def test_descriptors_are_closed_with_the_file(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    file = ScratchFile(tmp_path, "rank 0")
    assert len(os.listdir("/proc/self/fd")) > before
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_system_of_a_folder_is_that_of_the_mount_it_lies_in():
    assert file_system_of(Path("/proc/self")) == "proc"
    assert not lies_in_memory(Path("/proc"))


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or file_system_of(Path("/dev/shm")) != "tmpfs", reason="no tmpfs")
def test_a_tmpfs_is_memory():
    assert lies_in_memory(Path("/dev/shm"))


CPU = torch.device("cpu")


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(CPU, tmp_path, "rank 0")


def test_gaps_that_touch_are_one():
    gaps = Gaps()
    for start, nbytes in ((0, 10), (20, 10), (10, 10)):
        gaps.add(start, nbytes)
    assert gaps.take(30) == 0
    assert gaps.take(1) is None


def test_the_smallest_gap_that_fits_is_used_and_its_rest_stays():
    gaps = Gaps()
    gaps.add(0, 100)
    gaps.add(200, 30)
    assert [gaps.take(20), gaps.take(20), gaps.take(80), gaps.take(11), gaps.take(10)] == [200, 0, 20, None, 220]


def test_a_place_of_several_pieces_comes_back_and_its_neighbours_stay(tier):
    sizes = (PAGE_NBYTES, 2 * PIECE_NBYTES + PAGE_NBYTES, 1, PIECE_NBYTES)
    places = [tier.place(nbytes) for nbytes in sizes]
    assert [place.nbytes for place in places] == [PAGE_NBYTES, sizes[1], PAGE_NBYTES, PIECE_NBYTES]
    windows = [tier.window(place.nbytes) for place in places]
    for window in windows:
        window.memory.copy_(random_bytes(window.memory.nbytes))
    for transfer in [tier.store(window, place) for window, place in zip(windows, places, strict=True)]:
        transfer.settle()
    for place, window in zip(places, windows, strict=True):
        other = tier.window(sizes[1])
        tier.fetch(place, other).wait()
        assert torch.equal(other.memory[: place.nbytes], window.memory)
        assert torch.equal(place.memory, window.memory)
    assert tier.fetched_nbytes == tier.stored_nbytes == tier.placed_nbytes == sum(place.nbytes for place in places)


def test_what_is_looked_at_is_any_part_of_what_was_stored(tier):
    place, window = tier.place(PIECE_NBYTES + PAGE_NBYTES), tier.window(PIECE_NBYTES + PAGE_NBYTES)
    window.memory.copy_(random_bytes(place.nbytes))
    tier.store(window, place).settle()
    for start, nbytes in ((0, place.nbytes), (1, 1), (4095, 2), (PIECE_NBYTES - 3, 100), (64, PIECE_NBYTES)):
        assert torch.equal(tier.look(place, start, nbytes), window.memory[start : start + nbytes])


def test_what_the_host_wrote_at_rest_is_what_is_fetched_and_looked_at(tier):
    place, window = tier.place(PAGE_NBYTES), tier.window(PAGE_NBYTES)
    place.memory.copy_(written := random_bytes(PAGE_NBYTES))
    tier.forget(place)
    assert torch.equal(tier.look(place, 0, PAGE_NBYTES), written)
    tier.fetch(place, window).wait()
    assert torch.equal(window.memory, written)


def test_a_look_at_a_disk_that_fails_is_an_error_and_no_signal(tier, monkeypatch):
    place = tier.place(PAGE_NBYTES)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OffloadError, match=r"cannot be read at bytes 0 to 4096 \(Input/output error\)"):
        tier.look(place, 0, 1)


def test_what_is_measured_takes_no_more_room_than_what_is_offloaded(tier):
    tier.place(3 * PAGE_NBYTES)
    rates = measured(tier)
    assert rates.fetched > 0
    assert rates.stored > 0
    assert tier.place(3 * PAGE_NBYTES).offset == 3 * PAGE_NBYTES  # the sample's, given back
    assert tier.file.extend(PAGE_NBYTES) == 6 * PAGE_NBYTES


def test_a_disk_in_memory_is_said_to_be_that(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotrain.offload.disk.file_system_of", lambda folder: "tmpfs")
    assert DiskTier(CPU, tmp_path, "rank 0").where == f"{tmp_path}, which lies in memory"
    monkeypatch.setattr("zerotrain.offload.disk.file_system_of", lambda folder: "ext4")
    assert DiskTier(CPU, tmp_path, "rank 0").where.startswith(f"the disk of {tmp_path} (")
