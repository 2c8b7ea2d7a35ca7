"""Which files a text dataset reads."""

import functools
import glob
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerotrain.data.files.text_kinds import BINARY, require_no_dataset, require_text, why_left
from zerotrain.files.lock import Holder, read_note

STDLIB_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test")
"""Other people's packages, and tests, which only some distributions of Python install."""
_OWN_FILES = (("multirun.yaml",), ("ranks", "config.yaml"), ("lock", "seal.json"), ("lock", "preparing.json"))
_OF_RUNS = "of runs and caches"


@dataclass
class Sources:
    """The files that a text is read from."""

    path: str
    """Names them in messages, as the user wrote it: "data.path=docs"."""
    files: list[Path] = field(default_factory=list)
    """Sorted, each with at least one byte, and each once whatever links lead to it."""
    left: Counter[str] = field(default_factory=Counter)
    """How many were left out, by the reason."""
    is_default: bool = False
    """They are what is read where nothing is given."""

    @property
    def leaves_data(self) -> bool:
        """Whether one of those may hold what was meant."""
        return any(reason.startswith(BINARY) for reason in self.left)

    @property
    def nbytes(self) -> int:
        """Size of all files on the disk."""
        return sum(file.stat().st_size for file in self.files)

    def __str__(self) -> str:
        """One line: what was taken and what was left."""
        kinds = Counter("".join(file.suffixes[-2:]) or file.name for file in self.files).most_common()
        shown = ", ".join(f"{count} {kind}" for kind, count in kinds[:4]) + (", ..." if len(kinds) > 4 else "")
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(self.left.items()) if count)
        return f"{self.path}: reads {len(self.files)} files ({shown})" + (f"; leaves out {left}" if left else "")


def find_sources(path: str | None, without: Sequence[Path] = (), *, text_field: str = "text") -> Sources:
    """The files named by `path`.

    A folder gives all its text files and those of its folders: plain text, .jsonl and .parquet, also compressed
    (see `zerotrain.data.files.text_files`). It
    leaves hidden and binary files, and the folders of runs: a run writes to its own
    between the moment it is checked and the moment its ranks read. A glob skips the files that a folder would
    skip. A file that is named itself is refused if it is known not to be text.

    Args:
        path: a file; a folder; a glob pattern, where `**` matches any depth; or None for the standard library of the
            running Python.
        without: folders that are left out, such as the one that is written to.
        text_field: where the text is in an object of .jsonl.

    Raises:
        FileNotFoundError: nothing is there, or no file matches.
        ValueError: what is there holds no text, a file cannot be read, or it is a dataset that would be learnt as it is
            written: rows of JSON, or what Hugging Face's `save_to_disk` writes.
    """
    if path is None:
        folder = sysconfig.get_path("stdlib")
        sources = Sources(f"data.path=null (the standard library in {folder})", is_default=True)
        return _usable(_source_files(folder), sources)
    sources, expanded = Sources(f"data.path={path}"), os.path.expanduser(path)
    # First what exists under exactly this name: "a[1].txt" is a legal file name and a pattern too.
    if os.path.isfile(expanded):
        require_text(file := Path(expanded), sources.path)
        require_no_dataset(file, text_field, sources.path, is_named=True)
        return _usable([file], sources)
    own = {folder.resolve() for folder in without}
    is_own = functools.cache(lambda folder: folder.resolve() in own or _holds_run(folder))
    if os.path.isdir(expanded):
        return _usable(_text_files(_walk(expanded, is_own, sources), sources, text_field), sources)
    if not glob.has_magic(expanded):
        what = "is neither a file nor a folder" if os.path.exists(expanded) else "does not exist"
        raise FileNotFoundError(
            f"data.path={path} {what}; give a file, a folder or a glob pattern, or null for the standard library of "
            "the running Python"
        )
    # What stands before the first wildcard was named; what is found below it is looked at.
    parts = Path(expanded).parts
    named = Path(*parts[: next(number for number, part in enumerate(parts) if glob.has_magic(part))])
    matches = [Path(match) for match in glob.glob(expanded, recursive=True) if os.path.isfile(match)]
    if not matches:
        raise FileNotFoundError(f"data.path={path} matches no file; give a pattern that does, or a file or a folder")
    return _usable(_text_files(_outside(matches, named, is_own, sources), sources, text_field), sources)


def _holds_run(folder: Path) -> bool:
    """Whether a folder is that of a run, on this machine or another, of a sweep, or of prepared tokens."""
    if any(all((folder / name).exists() for name in names) for names in _OWN_FILES):
        return True
    # A run's lock is there before anything else of it; other programs' locks say something else.
    return read_note(folder / ".lock", Holder) is not None


def _source_files(folder: str) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in STDLIB_SKIPPED_FOLDERS]
        yield from (Path(parent, name) for name in names if name.endswith(".py"))


def _walk(folder: str, is_own: Callable[[Path], bool], sources: Sources) -> Iterator[Path]:
    """All files below a folder but hidden ones and those of runs."""
    for parent, folders, names in os.walk(folder):
        # In place: os.walk reads this very list to know where to go next.
        shown = [name for name in folders if not name.startswith(".")]
        folders[:] = [name for name in shown if not is_own(Path(parent, name))]
        sources.left["folders " + _OF_RUNS] += len(shown) - len(folders)
        sources.left["hidden"] += sum(name.startswith(".") for name in names)
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _outside(matches: list[Path], named: Path, is_own: Callable[[Path], bool], sources: Sources) -> Iterator[Path]:
    """The matches that lie in no folder of a run below the one that was named."""
    for match in matches:
        if any(is_own(folder) for folder in match.parents if folder != named and folder.is_relative_to(named)):
            sources.left[_OF_RUNS] += 1
        else:
            yield match


def _text_files(files: Iterable[Path], sources: Sources, text_field: str) -> Iterator[Path]:
    for file in files:
        if not file.is_file():
            sources.left["links to nothing and other files that hold no text"] += 1
        elif (reason := why_left(file)) is None:
            require_no_dataset(file, text_field, sources.path)
            yield file
        else:
            sources.left[reason] += 1


def _usable(files: Iterable[Path], sources: Sources) -> Sources:
    known: set[tuple[int, int]] = set()
    for file in sorted(files):
        status = file.stat()
        if status.st_size == 0:
            sources.left["empty"] += 1
        elif (status.st_dev, status.st_ino) in known:
            sources.left["links to files that are read"] += 1
        else:
            known.add((status.st_dev, status.st_ino))
            sources.files.append(file)
    if not sources.files:
        left = ", ".join(f"{count} {reason}" for reason, count in sorted(sources.left.items()) if count)
        raise ValueError(
            f"{sources.path} holds no text; give a file, folder or pattern with at least one non-empty file"
            + (f" (left out: {left})" if left else "")
        )
    for file in sources.files:
        if not os.access(file, os.R_OK):
            raise ValueError(f"{sources.path}: {file} cannot be read; give it read permission or choose other files")
    return sources
