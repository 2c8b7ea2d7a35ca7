"""Where an export goes: a folder that appears when it is whole, and replaces nothing that is no export."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.blocks import sync_folder
from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.checkpoint.safetensors_out import write_text
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.exported import ABOUT


def require_free(out: Path, *, overwrite: bool) -> None:
    """Make sure that an export may have this name.

    Raises:
        ConfigError: something is there, and it is not to be replaced or is no export.
    """
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise ConfigError(
            f"--out: got {out}, which is there already; give a new name, or --overwrite to replace an export"
        )
    if out.is_symlink() or not (out / ABOUT).is_file():
        raise ConfigError(f"--overwrite: {out} is no folder that zerotrain.export has written; remove it by hand")


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
        write_text(partial.path / ABOUT, json.dumps(about, indent=2) + "\n")
        for folder in (path for path in partial.path.rglob("*") if path.is_dir()):
            sync_folder(folder)
        if overwrite and os.path.lexists(out):
            out.rename(old)
        partial.appear()
    except BaseException as error:
        if old.is_dir() and not os.path.lexists(out):
            old.rename(out)
        partial.remove()
        if isinstance(error, OSError):
            raise CheckpointError(f"{error.filename or out} cannot be written: {error.strerror}") from error
        raise
    shutil.rmtree(old, ignore_errors=True)
