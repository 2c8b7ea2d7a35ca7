"""A disk's places and windows: which bytes of the file are whose, and what of them is in memory."""

import errno
import os
from pathlib import Path

import pytest
import torch

from tests.unit.offload.test_scratch_file import random_bytes
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import PIECE_NBYTES, DiskTier, Gaps
from zerotrain.offload.tier import PAGE_NBYTES, measured

CPU = torch.device("cpu")


@pytest.fixture
def tier(tmp_path: Path) -> DiskTier:
    return DiskTier(CPU, tmp_path, "rank 0")


def test_gaps_that_touch_are_one() -> None:
    gaps = Gaps()
    for start, nbytes in ((0, 10), (20, 10), (10, 10)):
        gaps.add(start, nbytes)
    assert gaps.take(30) == 0
    assert gaps.take(1) is None


def test_the_smallest_gap_that_fits_is_used_and_its_rest_stays() -> None:
    gaps = Gaps()
    gaps.add(0, 100)
    gaps.add(200, 30)
    assert [gaps.take(20), gaps.take(20), gaps.take(80), gaps.take(11), gaps.take(10)] == [200, 0, 20, None, 220]


def test_a_place_of_several_pieces_comes_back_and_its_neighbours_stay(tier: DiskTier) -> None:
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


def test_what_is_looked_at_is_any_part_of_what_was_stored(tier: DiskTier) -> None:
    place, window = tier.place(PIECE_NBYTES + PAGE_NBYTES), tier.window(PIECE_NBYTES + PAGE_NBYTES)
    window.memory.copy_(random_bytes(place.nbytes))
    tier.store(window, place).settle()
    for start, nbytes in ((0, place.nbytes), (1, 1), (4095, 2), (PIECE_NBYTES - 3, 100), (64, PIECE_NBYTES)):
        assert torch.equal(tier.look(place, start, nbytes), window.memory[start : start + nbytes])


def test_what_the_host_wrote_at_rest_is_what_is_fetched_and_looked_at(tier: DiskTier) -> None:
    place, window = tier.place(PAGE_NBYTES), tier.window(PAGE_NBYTES)
    place.memory.copy_(written := random_bytes(PAGE_NBYTES))
    tier.forget(place)
    assert torch.equal(tier.look(place, 0, PAGE_NBYTES), written)
    tier.fetch(place, window).wait()
    assert torch.equal(window.memory, written)


def test_a_look_at_a_disk_that_fails_is_an_error_and_no_signal(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tier.place(PAGE_NBYTES)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OffloadError, match=r"cannot be read at bytes 0 to 4096 \(Input/output error\)"):
        tier.look(place, 0, 1)


def test_the_room_of_a_place_that_was_freed_is_used_again(tier: DiskTier) -> None:
    first, _ = tier.place(2 * PAGE_NBYTES), tier.place(PAGE_NBYTES)
    tier.free(first)
    assert [tier.place(PAGE_NBYTES).offset for _ in range(3)] == [0, PAGE_NBYTES, 3 * PAGE_NBYTES]
    assert tier.placed_nbytes == 4 * PAGE_NBYTES


def test_what_is_measured_takes_no_more_room_than_what_is_offloaded(tier: DiskTier) -> None:
    tier.place(3 * PAGE_NBYTES)
    rates = measured(tier)
    assert rates.fetched > 0
    assert rates.stored > 0
    assert tier.place(3 * PAGE_NBYTES).offset == 3 * PAGE_NBYTES  # the sample's, given back
    assert tier.file.extend(PAGE_NBYTES) == 6 * PAGE_NBYTES


def test_a_disk_in_memory_is_said_to_be_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotrain.offload.disk.file_system_of", lambda folder: "tmpfs")
    assert DiskTier(CPU, tmp_path, "rank 0").where == f"{tmp_path}, which lies in memory"
    monkeypatch.setattr("zerotrain.offload.disk.file_system_of", lambda folder: "ext4")
    assert DiskTier(CPU, tmp_path, "rank 0").where.startswith(f"the disk of {tmp_path} (")
