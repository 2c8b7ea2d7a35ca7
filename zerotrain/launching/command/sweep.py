"""A sweep: where its jobs lie, and the table of what came of them."""

import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.errors import ConfigError
from zerotrain.files.printable import printable
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching.end import exits
from zerotrain.launching.job.folder_lock import LOCK_NAME, was_kept

_RESULT_NAME = "result.json"
_SHORT_HASH = 12
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
        print_table(results, Console())
    any_failed = any(result["status"] == "failed" for result in results.values())
    return exits.FAILED if any_failed and code == exits.COMPLETED else code


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


def print_table(results: dict[str, dict[str, Any]], console: Console) -> None:
    """Print a row for each job, the errors of those that failed, and whether the weights agree."""
    shared = set.intersection(*(set(result["overrides"]) for result in results.values()))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    ranks_differ = len({result["world_size"] for result in results.values()} - {0}) > 1
    for name in ("job", "overrides", *["ranks"] * ranks_differ, "status", "val loss", "tokens/s", "ms/step", "weights"):
        is_text = name in ("overrides", "status")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name != "overrides", overflow="fold")
    for job, result in results.items():
        differing = [each for each in result["overrides"] if each not in shared and each != "checkpoint.resume=auto"]
        if ranks_differ:
            differing = [override for override in differing if not override.startswith("launch.nproc_per_node=")]
        table.add_row(
            Text(printable(job, keep="")),
            Text(printable(" ".join(differing), keep="")),
            *[str(result["world_size"] or "-")] * ranks_differ,
            result["status"],
            _number(result["final_val_loss"], ".4f"),
            _number(result["tokens_per_s"], ",.0f"),
            _number(result["step_ms_median"], ".1f"),
            Text(printable((result["weights_sha256"] or "-")[:_SHORT_HASH], keep="")),
        )
    console.print(table)
    for job, result in results.items():
        if result["error"]:
            line = printable(f"job {job} {result['status']}: {result['error']}")
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(printable(_agreement(results), keep=""), markup=False, highlight=False, soft_wrap=True)


def _agreement(results: dict[str, dict[str, Any]]) -> str:
    counts = Counter(result["weights_sha256"] for result in results.values() if result["weights_sha256"])
    if not counts:
        return "weights: no job has completed"
    if len(counts) == 1:
        [(sha256, count)] = counts.items()
        return f"weights: {count} of {len(results)} jobs have the same sha256 {sha256}"
    each = ", ".join(f"{sha256[:_SHORT_HASH]} x {count}" for sha256, count in counts.most_common())
    return f"weights: {len(counts)} different sha256 in {len(results)} jobs: {each}"


def _written(path: Path) -> tuple[Path, int]:
    try:
        return path, path.lstat().st_mtime_ns
    except OSError:  # it is gone
        return path, 0


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
