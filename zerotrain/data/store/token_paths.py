"""Which files of tokens a path names, and which of them are for validation."""

import glob
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from zerotrain.data.store.formats import is_megatron_index
from zerotrain.data.store.store import INDEX_NAME

SUFFIXES = (".bin", ".npy")
"""Suffixes of the files that are read from a folder."""
_VALIDATION_WORDS = {"val", "valid", "validation"}
_TRAIN_WORDS = {"train", "training"}


@dataclass(frozen=True)
class TokenPaths:
    """The paths that a path names: files of tokens, or a store's folder alone."""

    train: tuple[Path, ...]
    """Sorted; all that are not said to be for validation."""
    validation: tuple[Path, ...] = ()
    """Those that say so by their names; usually none."""


def find_token_paths(path: str, source: str) -> TokenPaths:
    """The files of tokens that `path` names, each once whatever links lead to it.

    Args:
        path: a file; a folder of a store, or with train.bin and, if it likes, val.bin, or with other .bin and .npy
            files; a glob pattern, where `**` matches any depth; or what Megatron calls a prefix: the path of a .bin and
            .idx without suffix. Files called `val` go to validation if the others are called `train`:
            fineweb_train_000001.bin, fineweb_val_000000.bin.
        source: what the user wrote ("data.path=corpus").

    Raises:
        FileNotFoundError: nothing is there, or no file matches.
        ValueError: nobody can say which of the files are for training.
    """
    expanded = os.path.expanduser(path)
    # First what exists under exactly this name: "a[1].bin" is a legal file name and a pattern too.
    if os.path.isfile(expanded):
        return TokenPaths((_data_of(Path(expanded)),))
    if os.path.isdir(expanded):
        return _of_folder(Path(expanded), source)
    if is_megatron_index(Path(f"{expanded}.idx")) and os.path.isfile(f"{expanded}.bin"):
        return TokenPaths((Path(f"{expanded}.bin"),))
    if not glob.has_magic(expanded):
        is_other = os.path.exists(expanded)
        raise FileNotFoundError(
            f"{source} {'is neither a file nor a folder' if is_other else 'does not exist'}; give a file of tokens, a "
            "folder of such files or of a store, or a glob pattern"
        )
    files = _each_once(Path(match) for match in glob.glob(expanded, recursive=True) if os.path.isfile(match))
    if not files:
        raise FileNotFoundError(f"{source} matches no file; give a pattern that does, or a file or a folder")
    return _by_name(files, source)


def _data_of(path: Path) -> Path:
    """The .bin where its .idx is named."""
    beside = path.with_suffix(".bin")
    return beside if path.suffix == ".idx" and beside.is_file() and is_megatron_index(path) else path


def _of_folder(folder: Path, source: str) -> TokenPaths:
    if (folder / INDEX_NAME).is_file():
        return TokenPaths((folder,))
    if (train := folder / "train.bin").is_file():
        return TokenPaths((train,), tuple(file for file in (folder / "val.bin",) if file.is_file()))
    found = (file for file in folder.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    files = _each_once(file for file in found if file.is_file())
    if not files:
        raise FileNotFoundError(
            f"{source} is a folder without .bin or .npy files and without {INDEX_NAME}; give a file of tokens, a "
            "folder of such files or of a store, or a glob pattern"
        )
    return _by_name(files, source)


def _each_once(files: Iterable[Path]) -> list[Path]:
    """Sorted by name; a file that links lead to under its first name."""
    by_place: dict[tuple[int, int], Path] = {}
    for file in sorted(_data_of(file) for file in files):
        status = file.stat()
        by_place.setdefault((status.st_dev, status.st_ino), file)
    return list(by_place.values())


def _by_name(files: list[Path], source: str) -> TokenPaths:
    validation = tuple(file for file in files if _words(file) & _VALIDATION_WORDS)
    train = tuple(file for file in files if _words(file) & _TRAIN_WORDS and file not in validation)
    if not validation or len(validation) == len(files):  # all of one kind: the user has named what is to be read
        return TokenPaths(tuple(files))
    others = [file.name for file in files if file not in validation and file not in train]
    if others:
        raise ValueError(
            f"{source} has {validation[0].name}, which is for validation by its name, and {others[0]}, which has "
            "neither train nor val in its name; give a glob pattern that leaves one out, and data.validation_path"
        )
    return TokenPaths(train, validation)


def _words(file: Path) -> set[str]:
    return set(re.findall(r"[a-z]+", file.stem.lower()))
