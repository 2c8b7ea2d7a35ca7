"""Writes an export's folder: it appears when it is complete, and replaces only an earlier export."""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from zerotrain.checkpoint.folder import CHECKPOINTS, LOCK, PartialFolder
from zerotrain.checkpoint.others.safetensors_and_torch import write_text
from zerotrain.errors import CheckpointError, ConfigError, ZeroTrainError
from zerotrain.files.lock import sync_file, sync_folder
from zerotrain.files.untrusted import FilePath, UntrustedFileError, read_json
from zerotrain.saved.saved import ABOUT

FILES = "files"
"""The key in `ABOUT` of the names of all other files of an export: `--overwrite` removes these alone."""


class _About(TypedDict):
    files: NotRequired[list[FilePath]]


MAX_ABOUT_NBYTES = 64 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_IN_TORCHS_WRITER = "inline_container"
_GO_ON = "give a new name, or remove it by hand"


def require_free(out: Path, *, overwrite: bool) -> None:
    """Make sure that an export may have this name.

    Raises:
        ConfigError: something is there, and it is not to be replaced, or it is not an export alone.
    """
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConfigError(
            f"--out: got {out}, which is there already; give a new name, or --overwrite to replace an export"
        )
    _files_of_export(out)


def require_apart(out: Path, run: Path, others: list[Path]) -> None:
    """Make sure that an export neither lies in the run that it is of nor replaces what it reads.

    Folders are compared by what they are, so that links, mounts and `..` hide nothing.

    Args:
        run: a checkpoint.
        others: further folders that are read.

    Raises:
        ConfigError: it does.
    """
    above_out = _identities(out)
    for checkpoint in (run, Path(os.path.realpath(run))):
        is_of_run = checkpoint.parent.name == CHECKPOINTS
        for folder in (checkpoint, *(checkpoint.parents[:2] if is_of_run else ())):
            if _identity(folder) in above_out:
                raise ConfigError(f"--out: got {out}, inside {folder}, the folder to export; give another folder")
    for folder in (run, *others):
        if _identity(out) in _identities(folder):
            raise ConfigError(
                f"--out: got {out}, and {folder}, which is read for this export, lies there; give another folder"
            )


@contextmanager
def made(out: Path, about: dict[str, Any], *, overwrite: bool) -> Iterator[Path]:
    """The folder to write into, of another name; at the end of the block it is `out`. After an error nothing is left.

    With `overwrite` the old one stays until the new one is on the disk.

    Raises:
        ConfigError: see `require_free`.
        CheckpointError: the folder cannot be written.
    """
    require_free(out, overwrite=overwrite)
    try:
        partial = PartialFolder(out, replaces=overwrite)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}") from error
    old = out.with_name(f".{out.name}.replaced-{secrets.token_hex(8)}")
    try:
        yield partial.path
        about = about | {FILES: _synced(partial.path)}
        write_text(partial.path / ABOUT, json.dumps(about, indent=2) + "\n")
        replaced = []
        if overwrite and os.path.lexists(out):
            out.rename(old)
            replaced = _files_of_export(old, shown=out)  # once more: something may have come since
        partial.appear()
    except BaseException as error:
        of_disk = _of_disk(error, partial.path)
        if old.is_dir() and not os.path.lexists(out):
            old.rename(out)
        partial.remove()
        if of_disk is not None:
            raise CheckpointError(f"{of_disk.filename or out} cannot be written: {of_disk.strerror}") from of_disk
        raise
    _remove(replaced, old)


def _of_disk(error: BaseException, folder: Path) -> OSError | None:
    """The disk's error that caused an exception; None if none did. For a full disk torch says "unexpected pos 704 vs
    598", and tokenizers raise Exception("... (os error 28)").
    """
    if isinstance(error, ZeroTrainError | KeyboardInterrupt | SystemExit):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error
    before = error.__cause__ or error.__context__
    while before is not None:
        if isinstance(before, OSError) and before.errno in _FULL:
            return before
        before = before.__cause__ or before.__context__
    if told := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(told[1]), os.strerror(int(told[1])))
    if _IN_TORCHS_WRITER not in str(error):
        return None
    try:
        (folder / "probe").write_bytes(bytes(4096))
    except OSError as refused:
        return OSError(refused.errno, refused.strerror)
    return OSError(errno.EIO, "torch could not write all of a file")


def _synced(folder: Path) -> list[str]:
    """The names of all files that were written, once they are on the disk: those that others have written too."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            sync_folder(path)
        elif path != folder / LOCK:
            sync_file(path)
            names.append(str(path.relative_to(folder)))
    return names


def _files_of_export(folder: Path, shown: Path | None = None) -> list[Path]:
    """The files of an export that has nothing else in its folder; `ABOUT` is the last.

    Args:
        shown: the name of the folder in messages.

    Raises:
        ConfigError: it is no export, or something else lies there.
    """
    shown = shown or folder
    if folder.is_symlink() or not (folder / ABOUT).is_file():
        raise ConfigError(f"--overwrite: {shown} is no folder that zerotrain.export has written; {_GO_ON}")
    try:
        said = read_json(folder / ABOUT, _About, max_nbytes=MAX_ABOUT_NBYTES)
    except (OSError, UntrustedFileError) as error:
        raise ConfigError(f"--overwrite: {shown / ABOUT} does not list the files of an export: {error}") from None
    if FILES not in said:
        raise ConfigError(
            f"--overwrite: {shown} was exported by an older zerotrain, which did not note its files; {_GO_ON}"
        )
    own = [folder / name for name in (*said[FILES], ABOUT)]
    try:
        foreign = _foreign(folder, own)
    except OSError as error:
        raise ConfigError(f"--overwrite: {error.filename or shown} cannot be read: {error.strerror}") from None
    if foreign is not None:
        raise ConfigError(
            f"--overwrite: {shown / foreign} was not written by the export in that folder; move it away, or give a "
            "new name"
        )
    return own


def _foreign(folder: Path, own: list[Path]) -> Path | None:
    """The first thing in a folder that is neither one of these files nor a folder of theirs."""
    files, folders = set(own), {above for path in own for above in path.parents}

    def fail(error: OSError) -> None:
        raise error

    for place, inner, names in os.walk(folder, onerror=fail):
        for path in sorted(Path(place, name) for name in (*inner, *names)):
            mode = path.lstat().st_mode
            if not (path in folders if stat.S_ISDIR(mode) else path in files and stat.S_ISREG(mode)):
                return path.relative_to(folder)
    return None


def _remove(files: list[Path], folder: Path) -> None:
    """Remove files within a folder, and each folder that is empty then. Whatever else has come there stays."""
    for path in files:
        with suppress(OSError):
            path.unlink()
    above = {each for path in files for each in path.parents if each.is_relative_to(folder)}
    for each in sorted(above, key=lambda each: -len(each.parts)):
        with suppress(OSError):
            each.rmdir()


def _identity(path: Path) -> tuple[int, int] | None:
    """Equal for two names of one folder; None where there is nothing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _identities(path: Path) -> set[tuple[int, int]]:
    """Identities of a folder and of all those above it."""
    real = Path(os.path.realpath(path))
    found = map(_identity, (real, *real.parents))
    return {each for each in found if each is not None}
