"""A sweep: where its jobs lie, and the table of what came of them."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching.end import exits
from zerotrain.launching.job.folder_lock import LOCK_NAME, was_kept

_RESULT_NAME = "result.json"
_folders: list[Path] = []
"""The folder of the sweep that this process drives, if it drives one."""
_jobs: dict[Path, int] = {}
"""The folders of the jobs of this process, with the numbers of the jobs."""
_earlier: set[tuple[Path, int]] = set()
"""The results and the locks that lay in the folder of the sweep before it, with the times they were written."""


class SweepFolder(Callback):
    """Notes where the jobs of a sweep lie. Hydra's hook for the end of a sweep is not called when a job has failed."""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The first job is about to start."""
        with suppress(OmegaConfBaseException):  # a ${...} that leads nowhere, which Hydra is about to say
            self._note(Path(config.hydra.sweep.dir).absolute())

    def _note(self, folder: Path) -> None:
        _folders.append(folder)
        _earlier.update(_written(path) for name in (_RESULT_NAME, LOCK_NAME) for path in folder.rglob(name))


def claim(run_dir: Path, job: int) -> None:
    """Take the folder of a job; with hydra.sweep.subdir=same the second job erased the first (2026-11-21).

    Raises:
        ConfigError: an earlier job of this sweep has it.
    """
    earlier = _jobs.setdefault(run_dir, job)
    if earlier != job:
        raise ConfigError(
            f"hydra.sweep.subdir: got {run_dir.name}, which job {earlier} uses too; each job needs a folder of its "
            "own; the default is ${hydra:job.num}"
        )


def report(code: int) -> int:
    """Print the table of the sweep this process has driven; nothing where it drove none.

    Returns:
        The exit code: `code`, or that of a failure where a job has failed that nobody raised.
    """
    if not _folders:
        return code
    results = read_results(_folders[-1])
    if not results and not _jobs and code == exits.COMPLETED:
        print("-m: there is no job to run; a range(...) or glob(...) among the settings is empty", file=sys.stderr)
        return exits.CONFIG_PROBLEM
    if results:
        _show(_folders[-1], [_folders[-1] / job for job in results])
    any_failed = any(result["status"] == "failed" for result in results.values())
    return exits.FAILED if any_failed and code == exits.COMPLETED else code


def _show(folder: Path, run_dirs: list[Path]) -> None:
    """Write the report of the sweep beside its jobs, and print its table."""
    from zerotrain.report.files import write_files  # imports torch, as the jobs have by now
    from zerotrain.report.rows import read_report
    from zerotrain.report.table import print_table

    told = read_report(folder, run_dirs)
    print_table(told, Console())
    try:
        write_files(told, folder)
        print(f"report: {folder}/report.html")
    except (ConfigError, OSError) as error:
        print(f"warning: the report of the sweep cannot be written: {error}", file=sys.stderr)


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The result.json of each job of a sweep by the job's folder, by job number; of an earlier sweep those alone that
    this one has left as they are."""
    ours = [path for path in folder.rglob(_RESULT_NAME) if _written(path) not in _earlier or _is_kept(path.parent)]
    results = {str(path.parent.relative_to(folder)): _read(path) for path in ours}
    return dict(sorted(results.items(), key=lambda item: (len(item[0]), item[0])))


def _is_kept(run_dir: Path) -> bool:
    return _written(run_dir / LOCK_NAME) not in _earlier and was_kept(run_dir)


def _read(path: Path) -> dict[str, Any]:
    from zerotrain.training.figures.result import RunResult, read_result  # imports torch, as the jobs have by now

    try:
        result = read_result(path)
    except (OSError, UntrustedFileError) as error:
        result = RunResult(world_size=0, error=f"its {path.name} cannot be read: {error}").body()
    return result | {"overrides": result["overrides"] or []}


def _written(path: Path) -> tuple[Path, int]:
    try:
        return path, path.lstat().st_mtime_ns
    except OSError:  # it is gone
        return path, 0
