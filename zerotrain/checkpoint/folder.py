"""A checkpoint's folder comes into being at once: made under another name, renamed when all of it is on the disk.

    checkpoints/step-00000100/                            a checkpoint, whole
    checkpoints/.step-00000200.partial-9f3c0e5d21b7a864/  a save under way, or one that died

A save holds a lock in its partial folder until its process ends. So the next save beside it knows a dead one, and
removes it.
"""

import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from zerotrain.checkpoint.manifest import MANIFEST, Manifest
from zerotrain.checkpoint.tensor_file import write_file
from zerotrain.errors import CheckpointError
from zerotrain.files.lock import can_lock, lock, replace_link, sync

PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]{16}")
"""Names of folders of saves under way, and of interrupted ones."""
LOCK = "lock"


def require_new(path: Path) -> None:
    """Check for a checkpoint's name: it must be new.

    Raises:
        CheckpointError: there is something of this name.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already, and a checkpoint never replaces anything; give a new name")


class PartialFolder:
    """The folder of a save under way. One process makes it; `publish`, `appear` or `remove` ends it.

    Args:
        replaces: whether there may be something of the name. The caller moves it away before `appear`.

    Raises:
        CheckpointError: there is something of the checkpoint's name already.
        OSError: the folder cannot be made.
    """

    def __init__(self, target: Path, *, replaces: bool = False) -> None:
        if not replaces:
            require_new(target)
        self.target = target
        self.token = secrets.token_hex(8)
        """Identifies this save: it is in the manifest and in the header of each file."""
        _make_folders(target.parent)
        remove_dead(target.parent)
        self.path = target.parent / f".{target.name}.partial-{self.token}"
        self.path.mkdir()
        self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            lock(self._lock)  # where there are no locks, what a dead save leaves stays
        except OSError:
            self.remove()
            raise

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, wait until all names are on the disk, and give the folder its own.

        Raises:
            CheckpointError: a file of a rank is not there, or something took the name meanwhile.
            OSError: it cannot be written.
        """
        for file in manifest.files:
            path = self.path / file.name
            if not path.is_file() or path.stat().st_size != file.nbytes:
                raise CheckpointError(
                    f"{path} is missing or incomplete on the machine of rank 0: all machines of a run must reach one "
                    "folder under this name"
                )
        write_file(self.path / MANIFEST, [manifest.text().encode()])
        self.appear()

    def appear(self) -> None:
        """Wait until all names are on the disk, and give the folder its own.

        Raises:
            CheckpointError: something took the name meanwhile.
            OSError: it cannot be renamed.
        """
        sync(self.path)
        require_new(self.target)
        self.path.rename(self.target)
        # From here on it is a checkpoint. The lock goes last: without it the folder would have no owner.
        sync(self.target.parent)
        (self.target / LOCK).unlink(missing_ok=True)
        self._unlock()

    def remove(self) -> None:
        """Remove all files of a failed save. Calling it twice is safe."""
        with suppress(OSError):
            _remove_all(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_dead(parent: Path) -> None:
    """Remove the partial folders of saves without a living process, as far as they can be removed."""
    for path in entries(parent, PARTIAL):
        if path.is_dir() and not path.is_symlink():
            _remove_if_dead(path)


def _remove_if_dead(path: Path) -> None:
    try:
        descriptor = os.open(path / LOCK, os.O_WRONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        with suppress(OSError):
            path.rmdir()  # one that was made and never locked is empty; any other is none of ours
        return
    except OSError:
        return
    try:
        if can_lock(descriptor):  # otherwise it is alive, or nobody can tell
            _remove_all(path)
    finally:
        os.close(descriptor)


def _remove_all(path: Path) -> None:
    """The lock goes last: after a killed removal, a folder without it was nobody's and stayed (2026-11-22)."""
    for name in os.listdir(path):
        if name != LOCK:
            with suppress(OSError):
                os.unlink(path / name)
    shutil.rmtree(path, ignore_errors=True)


def _make_folders(path: Path) -> None:
    """Make a folder and its parents. They are there after a power cut too."""
    if not path.is_dir():
        _make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


# The checkpoints of a run: their list, the choice of one, the newest whole one, and the removal of old ones.
#
#     RUN/checkpoints/step-00000100/                            a checkpoint
#     RUN/checkpoints/best                                      a link to the one of the best evaluation
#     RUN/checkpoints/.step-00000050.removed-9f3c0e5d21b7a864/  a removal under way, or one that died
#
# A removal renames a folder to its hidden name first: this name is on the disk before the first file goes. So nothing
# half removed has a checkpoint's name, and the next removal there finishes it.


CHECKPOINTS = "checkpoints"
"""The folder of them in a run's folder."""

BEST = "best"
"""The link in it to the checkpoint of the best evaluation."""
JUST_MADE_S = 10.0
"""So long a save may need from its folder's name to its lock. It is not disturbed meanwhile."""

_NUM_LOOKS = 100
"""Looks for a checkpoint, if others are removed meanwhile."""
_NUM_LOOKS_AT_NONE = 5
STEP = re.compile(r"step-([0-9]{8,})")
"""Names of checkpoints, and of what stands in their place."""
REMOVED = re.compile(r"\.step-[0-9]{8,}\.removed-[0-9a-f]{16}")
"""Names of folders of removals under way, and of interrupted ones."""
ASIDE = re.compile(r"step-[0-9]{8,}\.aside-[0-9a-f]{16}")
"""Names of checkpoints that `set_aside` has renamed."""
_HALF_LINK = re.compile(rf"{BEST}\.[0-9a-f]{{16}}\.tmp")

Taken = TypeVar("Taken")


def step_name(step: int) -> str:
    """Name of a checkpoint's folder, such as step-00000100."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step in the name of a folder of `checkpoints_in`."""
    return int(path.name.removeprefix("step-"))


def entries(folder: Path, names: re.Pattern[str] | None = None) -> list[Path]:
    """The entries of a folder, sorted by name; none if there is no such folder.

    Args:
        names: such as `STEP`, which all of an entry's name must match; None: any.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {os.strerror(error.errno or 0)}") from error
    return [path for path in paths if names is None or names.fullmatch(path.name)]


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder with a step's name, by step, ascending. None if the folder is not there.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    step_paths = [path for path in entries(Path(folder), STEP) if step_name(step_of(path)) == path.name]
    return sorted((path for path in step_paths if os.path.isfile(path / MANIFEST)), key=step_of)


def is_under_way(partial: Path) -> bool:
    """Whether the save of a partial folder is alive: its process holds a lock in it. True where nobody can tell."""
    try:
        if time.time() - partial.stat().st_mtime < JUST_MADE_S:
            return True
        descriptor = os.open(partial / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        return not can_lock(descriptor, shared=True)
    finally:
        os.close(descriptor)


ALLOWED = (
    f"give the folder of a checkpoint (it has {MANIFEST}), a folder of checkpoints (such as {CHECKPOINTS}/"
    f"{step_name(100)}), or a run's folder (it has {CHECKPOINTS}/)"
)


def candidates(path: Path, *, allowed: str = ALLOWED) -> list[Path]:
    """The checkpoints that a path given by the user names, the newest first: at least one.

    Args:
        path: of a checkpoint, of a folder of checkpoints with a step's name, or of a run, which has such a folder.
        allowed: what an error tells the user to give.

    Raises:
        CheckpointError: there is none.
    """
    if PARTIAL.fullmatch(path.name) or REMOVED.fullmatch(path.name):
        of_what = "save" if PARTIAL.fullmatch(path.name) else "removal"
        raise CheckpointError(f"{path} is of a {of_what} that was cut off or is still under way: {allowed}")
    if path.name == BEST:
        path = best_in(path.parent) or path  # a run that goes on may change the link while it is read
    if os.path.isfile(path / MANIFEST):
        return [path]
    if checkpoints := newest_first(path) or newest_first(path / CHECKPOINTS):
        return checkpoints
    if not os.path.exists(path):
        raise CheckpointError(f"{path} is not there: {allowed}")
    if not os.path.isdir(path):
        raise CheckpointError(f"{path} is a file: {allowed}")
    if partial := [*entries(path, PARTIAL), *entries(path / CHECKPOINTS, PARTIAL)]:
        raise CheckpointError(f"{path} has no checkpoint: only a save that was cut off is there ({partial[-1].name})")
    raise CheckpointError(f"{path} has no checkpoint in it: {allowed}")


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder of them, in the order of the trials.

    Raises:
        CheckpointError: the folder cannot be read.
    """
    return checkpoints_in(folder)[::-1]


def first_whole(paths: Sequence[Path], take: Callable[[Path], Taken]) -> tuple[tuple[Path, Taken] | None, list[str]]:
    """The first checkpoint without a problem, with the result of `take`, or None; and the problems of earlier ones.

    Args:
        take: raises a CheckpointError where a checkpoint is not what was written.
    """
    problems: list[str] = []
    for path in paths:
        try:
            return (path, take(path)), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


@contextmanager
def hold_newest(path: Path) -> Iterator[Path]:
    """The newest checkpoint of a user's path, see `candidates`. A run that goes on does not remove it within.

    Raises:
        CheckpointError: there is none.
    """
    for number in range(_NUM_LOOKS):
        try:
            folder = candidates(path)[0]
        except CheckpointError:
            if number > _NUM_LOOKS_AT_NONE:
                raise
            time.sleep(0.01)
            continue  # the one that was listed has been removed, and the newer one came behind the listing
        with _raising(folder / MANIFEST, "it cannot be opened"):
            descriptor = _lock_manifest(folder / MANIFEST, shared=True)
        if descriptor is None:
            time.sleep(0.01)  # it has just been removed: there is a newer one
            continue
        try:
            yield folder
        finally:
            os.close(descriptor)
        return
    yield candidates(path)[0]


def _lock_manifest(manifest: Path, *, shared: bool) -> int | None:
    """A descriptor with a lock of a manifest, where locks work; None where another lock excludes it, or where the
    manifest is not there any more.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    try:
        lock(descriptor, shared=shared)
        is_held = True
    except OSError as error:
        is_held = not isinstance(error, BlockingIOError)
    if is_held and os.path.exists(manifest):
        return descriptor
    os.close(descriptor)
    return None


def remove_old(folder: Path, *, keep: int | None, keep_every: int | None) -> list[Path]:
    """Remove the older checkpoints of a folder, and the rest of removals that died there. One process.

    Call it when the newest is saved. The newest stays in any case, and so do the best, links and checkpoints under
    `hold_newest`.

    Args:
        keep: how many of the newest stay; None: all.
        keep_every: each whose step is a multiple of it stays too; None: no other.

    Returns:
        Those that are gone, by the names they had.

    Raises:
        CheckpointError: some could not be removed, in one sentence; what could be is gone. No other checkpoint has
            changed, so training can go on.
    """
    problems: list[str] = []
    for path in entries(folder, REMOVED):
        _remove(path, problems)
    best = best_in(folder)
    old = [] if keep is None else checkpoints_in(folder)[: -max(keep, 1)]
    if keep_every is not None:
        old = [path for path in old if step_of(path) % keep_every != 0]
    old = [path for path in old if not path.is_symlink() and path != best]
    hidden = _hide(folder, old, problems) if old else {}
    for name in hidden.values():
        _remove(name, problems)
    if problems:
        suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise CheckpointError(f"an old checkpoint could not be removed: {problems[0]}{suffix}; training can go on")
    return list(hidden)


def remove_all(folder: Path) -> None:
    """Remove the checkpoints and traces of saves in a folder, of links the links; other entries stay."""
    for names in (STEP, PARTIAL, REMOVED, ASIDE):
        for path in entries(folder, names):
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path, ignore_errors=True)
    remove_half_links(folder)
    if best_in(folder) is not None:
        (folder / BEST).unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint: it no longer counts as a step. A run does so when it resumes from an older one: otherwise it
    could not save this step again, and would keep this one as its newest.

    Returns:
        Its new path: step-00000100.aside-9f3c0e5d21b7a864 beside it.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    target = path.with_name(f"{path.name}.aside-{secrets.token_hex(8)}")
    with _raising(path, "it cannot be renamed; do it by hand"):
        path.rename(target)
        sync(path.parent)
    return target


def best_in(folder: Path) -> Path | None:
    """The target of the link `best` in a folder of checkpoints; None where there is no such link."""
    try:
        name = os.readlink(folder / BEST)
    except OSError:
        return None
    return Path(folder) / name if STEP.fullmatch(name) else None


def set_best(path: Path | None, folder: Path) -> None:
    """Let the link `best` in a folder of checkpoints name this one of them; None: none. A killed process leaves the old
    link or the new one.

    Raises:
        CheckpointError: it cannot be written.
    """
    if (current := best_in(folder)) == path:
        return
    if current is None and os.path.lexists(folder / BEST):
        raise CheckpointError(f"{folder / BEST} is there, and is no link to a checkpoint beside it; move it away")
    with _raising(folder / BEST, "it cannot name the best checkpoint"):
        if path is None:
            (folder / BEST).unlink()
        else:
            replace_link(folder / BEST, path.name)
        sync(folder)


def remove_half_links(folder: Path) -> None:
    """Remove the half-made link of a killed `set_best` from a folder of checkpoints.

    Raises:
        CheckpointError: it cannot be removed.
    """
    for path in entries(folder, _HALF_LINK):
        if path.is_symlink():
            with _raising(path, "it cannot be removed; do it by hand"):
                path.unlink(missing_ok=True)


def _hide(folder: Path, old: Sequence[Path], problems: list[str]) -> dict[Path, Path]:
    """{old path: hidden path} of those renamed; none if a power cut might bring the old names back."""
    hidden: dict[Path, Path] = {}
    try:
        # The name of the newest may be in memory only: its save may have died after the rename.
        sync(folder)
        for path in old:
            name = path.with_name(f".{path.name}.removed-{secrets.token_hex(8)}")
            try:
                if (descriptor := _lock_manifest(path / MANIFEST, shared=False)) is None:
                    continue  # it is being read: the next removal finds it again
                try:
                    path.rename(name)
                    hidden[path] = name
                finally:
                    os.close(descriptor)
            except OSError as error:
                problems.append(_sentence(error, path))
        sync(folder)
    except OSError as error:
        problems.append(_sentence(error, folder))
        return {}
    return hidden


def _remove(path: Path, problems: list[str]) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass  # another process was faster
    except OSError as error:
        problems.append(_sentence(error, path))


@contextmanager
def _raising(path: Path, outcome: str) -> Iterator[None]:
    """Raise what the disk answers in here as a CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{_sentence(error, path)}: {outcome}") from error


def _sentence(error: OSError, path: Path) -> str:
    # A removal names an entry of its folder without the folder.
    error_path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else path
    return f"{error_path if error_path.is_absolute() else path / error_path.name}: {os.strerror(error.errno or 0)}"
