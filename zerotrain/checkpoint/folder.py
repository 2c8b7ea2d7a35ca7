"""A checkpoint's folder comes into being at once: made under another name, renamed when all of it is on the disk.

    checkpoints/step-00000100/                            a checkpoint, whole
    checkpoints/.step-00000200.partial-9f3c0e5d21b7a864/  a save under way, or one that died

Who saves holds a lock in the partial folder, which the kernel drops with the process. So the next save beside it knows
a dead one, and removes it.
"""

import os
import re
import secrets
import shutil
from contextlib import closing, suppress
from pathlib import Path

from zerotrain.checkpoint.blocks import BlockWriter
from zerotrain.checkpoint.manifest import MANIFEST, Manifest
from zerotrain.errors import CheckpointError
from zerotrain.files.lock import can_lock, lock, sync_folder

PARTIAL = re.compile(r"\..+\.partial-[0-9a-f]{16}")
LOCK = "lock"


def file_name(rank: int) -> str:
    """Name of the file with the tensors that a rank saves."""
    return f"rank-{rank:05d}.safetensors"


def require_new(path: Path) -> None:
    """Make sure that a checkpoint would replace nothing.

    Raises:
        CheckpointError: there is something of this name.
    """
    if os.path.lexists(path):
        raise CheckpointError(f"{path} exists already, and a checkpoint never replaces anything; give a new name")


class PartialFolder:
    """The folder of a save under way. One process makes it; `publish`, `appear` or `remove` ends it.

    Args:
        replaces: whether there may be something of the name, which whoever calls moves away before `appear`.

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
            path = self.path / file["name"]
            if not path.is_file() or path.stat().st_size != file["nbytes"]:
                raise CheckpointError(
                    f"{path} is missing or incomplete on the machine of rank 0: all machines of a run must reach one "
                    "folder under this name"
                )
        with closing(BlockWriter(self.path / MANIFEST)) as writer:
            writer.write(memoryview(manifest.text().encode()))
            writer.sync()
        self.appear()

    def appear(self) -> None:
        """Wait until all names are on the disk, and give the folder its own.

        Raises:
            CheckpointError: something took the name meanwhile.
            OSError: it cannot be renamed.
        """
        sync_folder(self.path)
        require_new(self.target)
        self.path.rename(self.target)
        # From here on it is a checkpoint. The lock goes last: without it nobody would know whose the folder is.
        sync_folder(self.target.parent)
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
    """Remove the partial folders of saves whose process is gone; what cannot be removed stays."""
    for path in sorted(parent.iterdir()):
        if PARTIAL.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
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
    """The lock goes last: a folder without it, of a removal that was killed, was nobody's and stayed (2026-11-22)."""
    for name in os.listdir(path):
        if name != LOCK:
            with suppress(OSError):
                os.unlink(path / name)
    shutil.rmtree(path, ignore_errors=True)


def _make_folders(path: Path) -> None:
    """Make a folder and those above it, so that they are there after a power cut too."""
    if not path.is_dir():
        _make_folders(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)
