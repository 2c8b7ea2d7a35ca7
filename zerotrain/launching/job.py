"""One job: the description for its ranks, and the result.json of its end."""

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, remove_all
from zerotrain.config.compose import save_config
from zerotrain.config.schema import Config
from zerotrain.device.processes import num_cores
from zerotrain.errors import ConfigError
from zerotrain.files.lock import LOCK_NAME, holder, lock, note_holder, open_lock, whole
from zerotrain.files.untrusted import UntrustedFileError, parse_json, read_json
from zerotrain.launching import exits
from zerotrain.run.factory import RunSpec
from zerotrain.training.result import METRICS_NAME, RESULT_NAME, STEPS_NAME, RunResult

# One run at a time in a run folder.


_OF_THE_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP,
    errno.EINVAL, errno.EISDIR,
)  # fmt: skip
"""Errors of a folder as such: a setting can mend them, unlike a full disk."""


_INSTANT_S = 0.02
"""A report locks the folder to see whether a run is under way, for far less than this."""


class FolderInUseError(ConfigError):
    """Another run is under way in the folder."""


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other runs out of a folder; two at once trained one's config and reported the other's success (2026-11-21).
    The file stays: nobody is to lock a file about to be removed.

    Raises:
        FolderInUseError: another run is under way there.
        ConfigError: it is no folder that can be written.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open_lock(run_dir / LOCK_NAME)
    except OSError as error:
        if error.errno not in _OF_THE_FOLDER:
            raise
        raise ConfigError(
            f"hydra.run.dir: got {run_dir}, which cannot be written: {error.strerror}; give a folder that can"
        ) from error
    with file:
        try:
            try:
                problem = lock(file)
            except BlockingIOError:
                time.sleep(_INSTANT_S)
                problem = lock(file)
        except BlockingIOError:
            raise FolderInUseError(
                f"hydra.run.dir: got {run_dir}, where a run is under way ({holder(run_dir / LOCK_NAME)}); wait for "
                "that run to end, or give another folder"
            ) from None
        if problem is not None:
            print(f"warning: {run_dir} cannot be locked ({problem}); start no other run there", file=sys.stderr)
        note_holder(file)
        yield


def await_free(run_dir: Path) -> None:
    """Wait for the end of the run in a folder."""
    with suppress(OSError), open_lock(run_dir / LOCK_NAME, make=False) as file:
        lock(file, wait=True)


CONFIG_NAME = "config.yaml"
RANKS = "ranks"
"""The folder of the ranks' logs and states."""
COMPOSITION = ".hydra"
"""The folder of Hydra's composition."""
_OF_A_RANK = re.compile(
    r"[0-9]+\.(log|state|error\.json(\.[0-9a-f]+\.tmp)?)|ending\.(lock|([0-9]+\.)?txt)|refused\.json"
)
"""Files in `RANKS`; nobody else's go."""
_REFUSED = "refused.json"


@dataclass(frozen=True)
class Job(RunSpec):
    """The job, as every rank of a run receives it."""

    evaluates: dict[str, Any] | None = None
    """The evaluation, as arguments of `zerotrain.saved.evaluating.run`; None: the job trains."""

    @property
    def ranks_dir(self) -> Path:
        """Folder of the ranks' logs."""
        return self.run_dir / RANKS

    @property
    def config_path(self) -> Path:
        """The resolved config, for people: the ranks get theirs from the process that starts them."""
        return self.run_dir / CONFIG_NAME

    def open_folder(self) -> None:
        """Make the run folder, without what an earlier run has left there, and write config.yaml. A resumed run keeps
        its checkpoints and its metrics, and after a restart the logs of its ranks."""
        self.ranks_dir.mkdir(parents=True, exist_ok=True)
        # Left by a killed rank 0 before it put them in place: nobody else would ever remove them.
        names = (RESULT_NAME, METRICS_NAME, STEPS_NAME, CONFIG_NAME)
        temporary = [path for name in names for path in self.run_dir.glob(f"{name}.*.tmp")]
        of_ranks = [path for path in self.ranks_dir.iterdir() if _OF_A_RANK.fullmatch(path.name)]
        for path in (*of_ranks, self.run_dir / RESULT_NAME, *temporary):
            if not self.restarts or path.suffix != ".log":
                path.unlink(missing_ok=True)
        if self.config.checkpoint.resume is None and not self.restarts:
            for name in (METRICS_NAME, STEPS_NAME):
                (self.run_dir / name).unlink(missing_ok=True)
            if self.config.launch.overwrite:
                remove_all(self.run_dir / CHECKPOINTS)
        if not self.restarts:
            save_config(self.config, self.config_path)

    def complete_folder(self) -> None:
        """Make what is missing of the run folder: on the other machines of a run nobody has opened it."""
        self.ranks_dir.mkdir(parents=True, exist_ok=True)
        if not self.config_path.exists():
            save_config(self.config, self.config_path)

    def to_json(self) -> str:
        """For ranks in other processes."""
        return json.dumps(asdict(self) | {"run_dir": str(self.run_dir)})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Job":
        """Read what `to_json` wrote.

        Raises:
            ConfigError: it is something else.
        """
        try:
            job: Job = parse_json(text, cls)
        except UntrustedFileError as error:
            raise ConfigError(f"the description of the job, as this rank received it, is damaged: {error}") from None
        return job


def write_refusal(
    run_dir: Path, overrides: list[str], error: str, code: int = exits.CONFIG_PROBLEM, *, is_hidden: bool = False
) -> None:
    """Say in result.json why a job never started; nothing where the folder holds what an earlier run, or somebody else,
    has left.

    Args:
        code: the exit code.
        is_hidden: whether torchrun will end with another code: then `refusal_in` finds this one beside an earlier run.
    """
    if os.path.lexists(run_dir / CONFIG_NAME):
        if is_hidden and code == exits.CONFIG_PROBLEM and (run_dir / RANKS).is_dir():
            with whole(run_dir / RANKS / _REFUSED) as file:
                file.write(json.dumps({"error": error}).encode())
        return
    try:
        if RunResult.read(run_dir / RESULT_NAME).status == "completed":
            return
    except FileNotFoundError:
        pass
    except (OSError, UntrustedFileError):  # nobody knows whose it is
        return
    RunResult(world_size=0, overrides=overrides, error=error, exit_code=code).write(run_dir)


def refusal_in(run_dir: Path) -> str | None:
    """The refusal of a job in the folder of an earlier one; None if there is none."""
    try:
        return str(read_json(run_dir / RANKS / _REFUSED, dict[str, str], max_nbytes=2**20)["error"])
    except (OSError, UntrustedFileError, KeyError):
        return None


def num_threads_per_rank(config: Config, num_local_ranks: int) -> int:
    """CPU threads of each rank: as set, or this machine's cores shared out."""
    return config.launch.threads_per_rank or max(1, num_cores() // num_local_ranks)


def write_ending(job: Job, world_size: int, *, status: str, error: str, code: int = exits.FAILED) -> None:
    """Say in result.json how a job ended without completing; keep the entries of rank 0 there.

    Args:
        status: stopped or failed.
        error: the first cause.
        code: the exit code.
    """
    try:
        result = RunResult.read(job.run_dir / RESULT_NAME)
    except (OSError, UntrustedFileError):  # none, or cut off where the disk was full
        result = RunResult(world_size, **job.facts())
    result.status, result.error, result.stopped_by, result.exit_code = status, error, None, code
    result.write(job.run_dir)
