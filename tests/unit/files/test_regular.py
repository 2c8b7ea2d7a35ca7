"""Only regular files are opened, and nothing else in their place stops anybody."""

import os
import stat
from pathlib import Path

import pytest

from zerotrain.files.untrusted import NotRegularError, only_new, only_regular

MODES = {
    "r": os.O_RDONLY,
    "w": os.O_WRONLY | os.O_CREAT | os.O_TRUNC,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "r+": os.O_RDWR,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}
"""As Python's `open` passes them."""


def make(kind: str, path: Path) -> None:
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    elif kind == "a socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to("/dev/null")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["a FIFO", "a folder", "a socket", "a device"])
def test_what_is_no_file_is_refused_at_once_and_stays(tmp_path: Path, kind: str, mode: str):
    make(kind, tmp_path / "it")
    before, num_open = os.lstat(tmp_path / "it"), len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotRegularError, match=f"it is {kind}, and must be a regular file") as error:
        os.close(only_regular(tmp_path / "it", MODES[mode]))
    assert error.value.filename == str(tmp_path / "it")
    assert (os.lstat(tmp_path / "it").st_ino, os.lstat(tmp_path / "it").st_mode) == (before.st_ino, before.st_mode)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_fifo_that_somebody_reads_gets_nothing(tmp_path: Path):
    os.mkfifo(tmp_path / "it")
    reader = os.open(tmp_path / "it", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(NotRegularError, match="a FIFO"):
        only_regular(tmp_path / "it", MODES["w"])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_file_is_opened_as_always(tmp_path: Path):
    path = tmp_path / "it"
    for mode, text, content in (("w", "a", "a"), ("a", "b", "ab"), ("w", "c", "c"), ("r+", "d", "d")):
        with open(path, mode, opener=only_regular) as file:
            file.write(text)
        assert path.read_text() == content
    with pytest.raises(FileNotFoundError):
        only_regular(tmp_path / "none", os.O_RDONLY)


@pytest.mark.parametrize("kind", ["nothing", "a file", "a FIFO", "a link"])
def test_a_temporary_file_is_new_whatever_lay_there(tmp_path: Path, kind: str):
    (tmp_path / "mine").write_text("kept")
    path = tmp_path / "it"
    if kind == "a file":
        path.write_text("much that was there")
    elif kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a link":
        path.symlink_to("mine")
    with open(path, "w", opener=only_new) as file:
        file.write("new")
    assert (path.read_text(), path.is_symlink()) == ("new", False)
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_temporary_file_never_replaces_a_folder(tmp_path: Path):
    (tmp_path / "it").mkdir()
    with pytest.raises(OSError, match=r"it"):
        only_new(tmp_path / "it", os.O_WRONLY)
    assert (tmp_path / "it").is_dir()
