"""One lock for the whole house: who holds it, what lies in its place, and file systems that have none."""

import errno
import fcntl
import json
import os
import signal
import socket
from pathlib import Path
from typing import TypedDict

import pytest

from zerotrain.files.lock import (
    Holder,
    can_lock,
    holder,
    lock,
    note_holder,
    open_lock,
    read_note,
    replace_link,
    whole,
)
from zerotrain.files.untrusted import NotRegularError


def test_a_lock_excludes_others_until_it_is_closed(tmp_path: Path):
    with open_lock(tmp_path / "it") as mine, open_lock(tmp_path / "it") as other:
        assert lock(mine) is None
        for shared in (False, True):
            assert not can_lock(other, shared=shared)
            with pytest.raises(BlockingIOError):
                lock(other.fileno(), shared=shared)
        mine.close()
        assert can_lock(other, shared=True)
        with open_lock(tmp_path / "it") as third:
            assert can_lock(third, shared=True)
            assert not can_lock(third)


def test_who_waits_has_the_lock_once_its_holder_is_killed(tmp_path: Path):
    to_parent, from_child = os.pipe()
    child = os.fork()
    if not child:
        with open_lock(tmp_path / "it") as file:
            lock(file)
            note_holder(file)
            os.write(from_child, b"1")
            signal.pause()
    os.read(to_parent, 1)
    with open_lock(tmp_path / "it") as file:
        assert not can_lock(file)
        assert holder(tmp_path / "it").startswith(f"pid {child} on {socket.gethostname()}, started 20")
        os.kill(child, signal.SIGKILL)
        assert lock(file, wait=True) is None
    os.waitpid(child, 0)
    os.close(to_parent)
    os.close(from_child)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_locks_is_told_and_what_else_goes_wrong_raised(tmp_path, monkeypatch, number: int):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with open_lock(tmp_path / "it") as file:
        assert not can_lock(file)
        if number == errno.EIO:
            with pytest.raises(OSError, match=os.strerror(number)):
                lock(file)
        else:
            assert lock(file) == os.strerror(number)


class Kept(TypedDict):
    kept: bool
    pid: int


class Why(TypedDict):
    why: str


def test_a_note_replaces_the_last_and_is_read_by_its_kind(tmp_path: Path):
    with open_lock(tmp_path / "it") as file:
        os.pwrite(file.fileno(), json.dumps({"why": "x" * 200}).encode(), 0)
        note_holder(file)
    assert read_note(tmp_path / "it", Holder)["pid"] == os.getpid()
    assert read_note(tmp_path / "it", Why) is None
    (tmp_path / "it").write_text('{"kept": true, "pid": 1}')
    assert read_note(tmp_path / "it", Kept)["kept"] is True
    for content in ("", "x", "[" * 5000, '{"pid": "1", "host": "h", "started": "s"}', " " * 20_000):
        (tmp_path / "it").write_text(content)
        assert holder(tmp_path / "it") == "another process"
    (tmp_path / "it").write_text('{"pid": 1, "host": "\\u001b[2J", "started": "s"}')
    assert holder(tmp_path / "it").isprintable()


@pytest.mark.parametrize("make", [True, False])
def test_what_is_no_file_is_neither_locked_nor_waited_for(tmp_path: Path, make: bool):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("fifo", "folder"):
        with pytest.raises(NotRegularError):
            open_lock(tmp_path / name, make=make)
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "link").symlink_to("mine")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_lock(tmp_path / "link", make=make)
    assert (tmp_path / "mine").read_text() == "kept"


# A file is replaced whole or not at all, and nothing of an attempt stays.


@pytest.mark.parametrize("lasting", [False, True])
def test_a_file_is_there_once_all_is_written(tmp_path: Path, lasting: bool):
    path = tmp_path / "it"
    path.write_text("before")
    with whole(path, lasting=lasting) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
        assert Path(file.name).parent == tmp_path
    assert path.read_text() == "after"
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_of_what_could_not_be_written(tmp_path: Path, error: type[BaseException]):
    (tmp_path / "it").write_text("before")

    def write() -> None:
        with whole(tmp_path / "it") as file:
            file.write(b"after")
            raise error

    with pytest.raises(error):
        write()
    assert (tmp_path / "it").read_text() == "before"
    assert os.listdir(tmp_path) == ["it"]


def test_a_link_takes_the_place_of_what_has_its_name_but_not_of_a_folder(tmp_path: Path):
    for target in ("first", "second"):
        replace_link(tmp_path / "it", target)
        assert os.readlink(tmp_path / "it") == target
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_link(tmp_path / "folder", "third")
    assert sorted(os.listdir(tmp_path)) == ["folder", "it"]


def test_who_may_read_it_is_what_the_user_has_set(tmp_path: Path):
    before = os.umask(0o027)
    try:
        with whole(tmp_path / "it"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o640


def test_the_disk_has_what_is_to_last_before_it_has_its_name(tmp_path: Path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: [calls.append(name), real(*given)][1])
    with whole(tmp_path / "it", lasting=True) as file:
        file.write(b"x")
    assert calls == ["fsync", "replace", "fsync"]
    with whole(tmp_path / "it") as file:
        file.write(b"x")
    assert calls[3:] == ["replace"]
