"""The folder of an export: whole or not there, and in place of an earlier export alone."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypedDict

import torch

from zerotrain.checkpoint.folder import CHECKPOINTS, LOCK, PartialFolder
from zerotrain.checkpoint.mirror import local_folder, local_run, open_mirror
from zerotrain.checkpoint.others.safetensors_and_torch import write_safetensors
from zerotrain.checkpoint.tensor_file import write_file
from zerotrain.commands import export_formats as formats
from zerotrain.commands.export import DTYPES
from zerotrain.commands.frame import is_averaged
from zerotrain.errors import CheckpointError, ConfigError, ZeroTrainError
from zerotrain.files import kept_out, lock, untrusted
from zerotrain.saved.saved import ABOUT, ADAPTERS, DCP, EXPORTED_MODEL, MERGED, MODEL, SavedRun, opened_run

# Writes an export's folder: it appears when it is complete, and replaces only an earlier export.


FILES = "files"
"""The key in `ABOUT` of the names of all other files of an export: `--overwrite` removes these alone."""


class _About(TypedDict):
    files: list[untrusted.FilePath]


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
    _require_export(out, out)


def require_apart(out: Path, run: Path, sources: list[Path]) -> None:
    """Make sure that an export neither lies in the run that it is of nor replaces what it reads.

    Args:
        run: a checkpoint.
        sources: further folders that are read.

    Raises:
        ConfigError: it does.
    """
    for checkpoint in (run, Path(os.path.realpath(run))):
        is_of_run = checkpoint.parent.name == CHECKPOINTS
        for folder in (checkpoint, *(checkpoint.parents[:2] if is_of_run else ())):
            if _lies_in(out, folder):
                raise ConfigError(f"--out: got {out}, inside {folder}, the folder to export; give another folder")
    for folder in (run, *sources):
        if _lies_in(folder, out):
            raise ConfigError(
                f"--out: got {out}, and {folder}, which is read for this export, lies there; give another folder"
            )


@contextmanager
def new_folder(out: Path, about: dict[str, Any], *, overwrite: bool) -> Iterator[Path]:
    """The folder to write into, of another name; at the end of the block it is `out`. After an error nothing is left.

    With `overwrite` the old one stays until the new one is on the disk.

    Raises:
        ConfigError: something else than an export has come there.
        CheckpointError: the folder is there already, or cannot be written.
    """
    try:
        partial = PartialFolder(out, replaces=overwrite)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror}") from error
    old = out.with_name(f".{out.name}.replaced-{secrets.token_hex(8)}")
    try:
        yield partial.path
        about = about | {FILES: _sync_files(partial.path)}
        write_file(partial.path / ABOUT, [json.dumps(about, indent=2).encode(), b"\n"])
        if overwrite and os.path.lexists(out):
            out.rename(old)
            _require_export(old, out)  # once more: something may have come since
        partial.appear()
    except BaseException as error:
        disk_error = _disk_error(error, partial.path)
        if old.is_dir() and not os.path.lexists(out):
            old.rename(out)
        partial.remove()
        if disk_error is not None:
            raise CheckpointError(
                f"{disk_error.filename or out} cannot be written: {disk_error.strerror}"
            ) from disk_error
        raise
    shutil.rmtree(old, ignore_errors=True)


def _disk_error(error: BaseException, folder: Path) -> OSError | None:
    """The disk's error that caused an exception; None if none did. For a full disk torch says "unexpected pos 704 vs
    598", and tokenizers raise Exception("... (os error 28)").
    """
    if isinstance(error, ZeroTrainError | KeyboardInterrupt | SystemExit):
        return None
    if isinstance(error, OSError) and error.errno is not None:
        return error
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause
        cause = cause.__cause__ or cause.__context__
    if match := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(match[1]), os.strerror(int(match[1])))
    if _IN_TORCHS_WRITER not in str(error):
        return None
    try:
        (folder / "probe").write_bytes(bytes(4096))
    except OSError as refused:
        return OSError(refused.errno, refused.strerror)
    return OSError(errno.EIO, "torch could not write all of a file")


def _sync_files(folder: Path) -> list[str]:
    """The names of all files that were written, once they are on the disk: those that others have written too."""
    names = []
    for path in sorted(folder.rglob("*")):
        if path != folder / LOCK:
            lock.sync(path)
            if not path.is_dir():
                names.append(str(path.relative_to(folder)))
    return names


def _require_export(folder: Path, final_path: Path) -> None:
    """Make sure that a folder holds an export and nothing else.

    Args:
        final_path: the name of the folder in messages.

    Raises:
        ConfigError: it is no export, or something else lies there.
    """
    if folder.is_symlink() or not (folder / ABOUT).is_file():
        raise ConfigError(f"--overwrite: {final_path} is no folder that zerotrain.export has written; {_GO_ON}")
    try:
        about = untrusted.read_json(folder / ABOUT, _About, max_nbytes=MAX_ABOUT_NBYTES)
    except (OSError, untrusted.UntrustedFileError) as error:
        raise ConfigError(f"--overwrite: {final_path / ABOUT} does not list the files of an export: {error}") from None
    files = {folder / name for name in (*about[FILES], ABOUT)}
    folders = {parent for path in files for parent in path.parents}

    def fail(error: OSError) -> None:
        name, reason = error.filename or final_path, error.strerror
        raise ConfigError(f"--overwrite: {name} cannot be read: {reason}") from None

    for place, inner, names in os.walk(folder, onerror=fail):
        for path in sorted(Path(place, name) for name in (*inner, *names)):
            mode = path.lstat().st_mode
            if not (path in folders if stat.S_ISDIR(mode) else path in files and stat.S_ISREG(mode)):
                raise ConfigError(
                    f"--overwrite: {final_path / path.relative_to(folder)} was not written by the export in that "
                    "folder; move it away, or give a new name"
                )


def _lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is a folder or lies below it. Folders are compared by what they are: links, mounts and `..` hide
    nothing."""
    real = Path(os.path.realpath(path))
    for above in (real, *real.parents):
        with suppress(OSError):  # nothing is there yet
            if above.samefile(folder):
                return True
    return False


MB = 10**6


def export(options: Namespace) -> Iterator[str]:
    """Write what was asked for; lines to show.

    Args:
        options: those of the command by their names, see `require_options`.

    Raises:
        ConfigError: an option does not fit the run.
        CheckpointError: there is no such checkpoint, it is not what was written, or the disk fails.
    """
    dtype = None if options.dtype is None else getattr(torch, DTYPES[options.dtype])
    averaged = is_averaged(options.weights)
    place = open_mirror(options.out, "--out") if "://" in options.out else None
    if place is not None and place.names():
        raise ConfigError(f"--out: got {place.url}, where something is already; give a new name")
    out = Path(options.out) if place is None else local_folder() / "export"
    out = Path(os.path.realpath(out)) if out.name in ("", "..") else out.absolute()
    require_free(out, overwrite=options.overwrite)
    path = local_run(options.path)
    with (
        kept_out.nothing_imported_from(path),
        opened_run(path, trust_code=options.trust_code, averaged=averaged) as run,
    ):
        of_model = run.require_config().model.get("name_or_path") if run.is_hugging_face else None
        sources = [name for name in (of_model, run.tokenizer_name) if name is not None and Path(name).is_dir()]
        require_apart(out, run.path, [Path(name).absolute() for name in sources])
        trains = any(parameter.trains for parameter in run.saved.manifest.parameters.values())
        if (options.optimizer or options.dcp) and not trains:
            raise ConfigError(f"--optimizer: {run.saved.path} has no parameter that trains; leave it out")
        # The model of transformers, or that of peft around it; its folder may be gone.
        model: Any = run.on_meta().model if run.is_hugging_face and not options.dcp else None
        if options.merge and (model is None or formats.lora_of(model) is None):
            raise ConfigError(f"--merge: {run.path} has no adapters to merge; leave it out")
        if options.merge and options.optimizer:
            raise ConfigError(
                "--optimizer: its state is that of the adapters, which a merged model does not have; leave it out"
            )
        with new_folder(out, _about(run, options, model), overwrite=options.overwrite) as folder:
            if options.dcp:
                from zerotrain.commands.export_dcp import write_dcp

                write_dcp(folder, run.saved)
            else:
                yield from _write_weights(folder, run, options, dtype, model)
            if options.optimizer:
                name_of = str if model is None else formats.name_of_hugging_face
                formats.write_optimizer(folder / "optimizer.pt", run.saved, name_of)
    files = sorted((file for file in out.rglob("*") if file.is_file()), key=lambda file: (file.name == ABOUT, file))
    nbytes = sum(file.stat().st_size for file in files)
    if place is not None:
        place.push_files(out, [file.relative_to(out).as_posix() for file in files])
    what = "the average of weights of " if averaged else ""
    yield f"{out if place is None else place.url}: {what}step {run.step} of {run.path}, {nbytes / MB:.1f} MB"


def _write_weights(
    folder: Path, run: SavedRun, options: Namespace, dtype: torch.dtype | None, model: Any
) -> Iterator[str]:
    tensors = formats.plain(run.saved, dtype)
    stem = "model"
    if model is not None:
        lora = formats.lora_of(model)
        if lora is None:
            tensors = formats.plain(run.saved, dtype, formats.name_of_hugging_face)
        elif options.merge:
            tensors = formats.merged(run.saved, dtype, model)
            model = model.get_base_model()
            head = model.get_output_embeddings()
            if any(f"{name}.weight" in tensors for name, module in model.named_modules() if module is head):
                model.config.tie_word_embeddings = False  # the adapters have parted them
        else:
            tensors, stem = formats.adapters(run.saved, dtype, model), "adapter_model"
            formats.write_adapter_config(folder, run, lora)
        if stem == "model":
            # transformers is to open the model in the widest dtype of its weights.
            dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
            widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
            formats.write_config(folder, model, widest)
        if (warning := formats.write_tokenizer(folder, run)) is not None:
            yield warning
    write_safetensors(folder, tensors, max_nbytes=int(options.shard_mb * MB), stem=stem)


def _about(run: SavedRun, options: Namespace, model: Any) -> dict[str, Any]:
    form = MODEL
    if options.dcp:
        form = DCP
    elif options.merge:
        form = MERGED
    elif run.is_hugging_face:
        form = EXPORTED_MODEL if formats.lora_of(model) is None else ADAPTERS
    return {
        "checkpoint": str(run.path),
        "step": run.step,
        "form": form,
        "dtype": options.dtype,
        "weights": options.weights,
        "config_sha256": run.saved.manifest.content["config_sha256"],
        "config": run.saved.manifest.content["config"],
        "data_fingerprint": run.data_fingerprint,
    }
