"""A file without a name: what it says when a disk refuses, and that it goes on where it can."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotrain.device.kinds import mapped_bytes
from zerotrain.errors import OffloadError
from zerotrain.offload.disk import ScratchFile, file_system_of, lies_in_memory
from zerotrain.offload.tier import PAGE_NBYTES

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


def test_a_folder_is_made_and_nothing_is_seen_in_it(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path / "a/b", "rank 0")
    assert gone_through(file)
    assert list((tmp_path / "a/b").iterdir()) == []


@pytest.mark.case("offload: Offload", "two runs, or ranks, with one folder", "do not meet: files have no names")
def test_two_with_one_folder_do_not_meet(tmp_path: Path) -> None:
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
def test_where_direct_access_is_refused_when_opened_it_goes_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", refusing(errno.EINVAL, os.open, lambda _, flags, *__: bool(flags & os.O_DIRECT)))
    file = ScratchFile(tmp_path, "rank 0")
    assert file.buffered_because == "the file system refuses direct access (Invalid argument)"
    assert gone_through(file)


@pytest.mark.case("offload: Offload", "the file system refuses direct access, at once or when it is used")
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_where_it_is_refused_when_used_too(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a file system that wants larger blocks."""
    file = ScratchFile(tmp_path, "rank 0")
    if file.buffered_because is not None:
        pytest.skip("no direct access here")
    direct = file._direct
    monkeypatch.setattr(os, call, refusing(errno.EINVAL, getattr(os, call), lambda used, *_: used == direct))
    assert gone_through(file)
    assert file.buffered_because == "the file system refuses direct access (Invalid argument)"


def test_an_invalid_argument_is_an_error_where_there_is_no_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ScratchFile(tmp_path, "rank 3")
    monkeypatch.setattr(os, "pwritev", refusing(errno.EINVAL, os.pwritev, lambda *_: True))
    with pytest.raises(OffloadError, match=r"the file of rank 3 in .* cannot be written .* \(Invalid argument\)"):
        gone_through(file)


def test_a_read_behind_the_end_is_named(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, "rank 0")
    file.extend(PAGE_NBYTES)
    with pytest.raises(OffloadError, match=r"cannot be read at bytes 4096 to 8192 \(the file ends there\)"):
        file.read(0, mapped_bytes(2 * PAGE_NBYTES).numpy().data)


def test_a_disk_without_room_is_named_with_what_is_there_and_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_path_that_is_a_file_is_said_to_be_one(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"^offload\.path: no file can be made in .* \(it is no folder\)$"):
        ScratchFile(tmp_path / path, "rank 0")


def test_descriptors_are_closed_with_the_file(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = ScratchFile(tmp_path, "rank 0")
    assert len(os.listdir("/proc/self/fd")) > before
    del file
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_file_system_of_a_folder_is_that_of_the_mount_it_lies_in() -> None:
    assert file_system_of(Path("/proc/self")) == "proc"
    assert not lies_in_memory(Path("/proc"))


@pytest.mark.skipif(not Path("/dev/shm").is_dir() or file_system_of(Path("/dev/shm")) != "tmpfs", reason="no tmpfs")
def test_a_tmpfs_is_memory() -> None:
    assert lies_in_memory(Path("/dev/shm"))
