"""Which files a text dataset reads."""

import glob
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

SNIFFED_NBYTES = 8192
STDLIB_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
"""Other people's packages, and tests, which only some distributions of Python install."""


def find_sources(path: str | None) -> list[Path]:
    """The files named by `path`, sorted, each with at least one byte.

    Args:
        path: a file; a folder, read with all its subfolders but without hidden or binary files; a glob pattern, where
            `**` matches any depth; or None for the standard library of the running Python.

    Raises:
        FileNotFoundError: nothing is there, or no file matches.
        ValueError: what is there holds no text, or a file cannot be read.
    """
    if path is None:
        folder = sysconfig.get_path("stdlib")
        return _usable(_source_files(folder), f"data.path=null (the standard library in {folder})")
    expanded = os.path.expanduser(path)
    # First what exists under exactly this name: "a[1].txt" is a legal file name and a pattern too.
    if os.path.isfile(expanded):
        return _usable([Path(expanded)], f"data.path={path}")
    if os.path.isdir(expanded):
        return _usable(_text_files(expanded), f"data.path={path}")
    if not glob.has_magic(expanded):
        raise FileNotFoundError(
            f"data.path={path} does not exist; give a file, a folder or a glob pattern, "
            "or null for the standard library of the running Python"
        )
    matches = [Path(match) for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
    if not matches:
        raise FileNotFoundError(f"data.path={path} matches no file; give a pattern that does, or a file or a folder")
    return _usable(matches, f"data.path={path}")


def _source_files(folder: str) -> Iterator[Path]:
    return (path for path in _walk(folder, skip=STDLIB_SKIPPED_FOLDERS.__contains__) if path.suffix == ".py")


def _text_files(folder: str) -> Iterator[Path]:
    return (path for path in _walk(folder, skip=_is_hidden) if not _is_hidden(path.name) and _is_text(path))


def _walk(folder: str, *, skip: Callable[[str], bool]) -> Iterator[Path]:
    """All files below a folder but for those below folders whose name is to be skipped."""
    for parent, folders, names in os.walk(folder):
        # In place: os.walk reads this very list to know where to go next.
        folders[:] = [name for name in folders if not skip(name)]
        yield from (Path(parent, name) for name in names)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_text(path: Path) -> bool:
    """As git decides it: no zero byte near the beginning. What cannot be read passes, to be reported by name."""
    if not path.is_file():
        return False
    if not os.access(path, os.R_OK):
        return True
    with open(path, "rb") as file:
        return b"\0" not in file.read(SNIFFED_NBYTES)


def _usable(files: Iterable[Path], source: str) -> list[Path]:
    found = sorted(file for file in files if file.stat().st_size > 0)
    if not found:
        raise ValueError(f"{source} holds no text; give a file, folder or pattern with at least one non-empty file")
    for file in found:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{source}: {file} cannot be read; give it read permission or choose other files")
    return found
