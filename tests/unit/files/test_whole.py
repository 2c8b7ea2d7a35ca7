"""A file is replaced whole or not at all, and nothing of an attempt stays."""

import os
from pathlib import Path

import pytest

from zerotrain.files.lock import replace_link, sync_folder, whole


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


def test_a_folder_is_not_replaced(tmp_path: Path):
    (tmp_path / "it").mkdir()
    with pytest.raises(IsADirectoryError), whole(tmp_path / "it") as file:
        file.write(b"after")
    assert os.listdir(tmp_path) == ["it"]
    with pytest.raises(FileNotFoundError), whole(tmp_path / "none" / "it"):
        raise AssertionError


def test_who_may_read_it_is_what_the_user_has_set(tmp_path: Path):
    before = os.umask(0o027)
    try:
        with whole(tmp_path / "it"):
            pass
    finally:
        os.umask(before)
    assert (tmp_path / "it").stat().st_mode & 0o777 == 0o640


def test_two_who_write_one_file_at_once_do_not_take_each_others(tmp_path: Path):
    with whole(tmp_path / "it") as first:
        first.write(b"first")
        with whole(tmp_path / "it") as second:
            second.write(b"second")
        assert (tmp_path / "it").read_bytes() == b"second"
    assert (tmp_path / "it").read_bytes() == b"first"


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


def test_an_error_of_the_disk_names_the_folder(tmp_path: Path, monkeypatch):
    def refuse(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=str(tmp_path)):
        sync_folder(tmp_path)
