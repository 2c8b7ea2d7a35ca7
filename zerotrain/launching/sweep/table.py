"""The table of what came of the jobs of a sweep."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerotrain.errors import ConfigError
from zerotrain.files.printable import printable
from zerotrain.files.untrusted import UntrustedFileError
from zerotrain.launching.end import exits
from zerotrain.launching.job.folder_lock import is_in_use
from zerotrain.launching.sweep.driver import driven
from zerotrain.launching.sweep.journal import COMPLETED, DIVERGED, FAILED, PRUNED, REFUSED, RUNNING, STOPPED, JobEvent
from zerotrain.launching.sweep.sweep import Sweep

_SHORT_HASH = 12


def report(code: int) -> int:
    """Print the table of the sweep that this process has driven; nothing where it drove none.

    Returns:
        The exit code: `code`, or that of a failure where a job has failed.
    """
    found = driven()
    if found is None:
        return code
    sweep, teller = found
    teller.look()
    results = read_results(sweep)
    if not results and code == exits.COMPLETED:
        print("-m: there is no job to run; a range(...) or glob(...) among the settings is empty", file=sys.stderr)
        return exits.CONFIG_PROBLEM
    if results:
        print_table(results, Console())
        write_report(sweep.folder)
    counts = Counter(result["status"] for result in results.values())
    num_done = counts[COMPLETED] + counts[PRUNED]
    if sweep.study is not None:  # which runs no failed trial again
        num_done = len(results) - counts[STOPPED] - counts[RUNNING]
    if counts and num_done < max(len(results), sweep.total or 0):
        shown = sweep.folder.relative_to(Path.cwd()) if sweep.folder.is_relative_to(Path.cwd()) else sweep.folder
        print(f"to go on: the same command with hydra.sweep.dir={shown}, which takes completed jobs as they are")
    has_failed = counts[FAILED] or (counts[DIVERGED] and sweep.diverged == "fail")
    return exits.FAILED if has_failed and code == exits.COMPLETED else code


def write_report(folder: Path) -> None:
    """Write the page and the files of a sweep into its folder, and say where. They are no reason to fail."""
    from zerotrain.report.files import PAGE_NAME, write_reports  # imports torch, as the jobs have by now

    try:
        write_reports(folder)
        print(f"report: {folder / PAGE_NAME}")
    except (ConfigError, OSError) as error:
        print(f"warning: the report of the sweep cannot be written: {printable(str(error))}", file=sys.stderr)


def read_results(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """The body of the result.json of each job that was begun, taken or refused since the sweep was begun, in the order
    of their numbers: by number, and folder where that has another name. `status` is the job's, as of now."""
    last = {(event.job, event.folder): event for event in sweep.events_to_count()}
    labels = {key: str(key[0]) if str(key[0]) == key[1] else f"{key[0]} in {key[1]}" for key in sorted(last)}
    return {label: _result_of(sweep, last[key]) for key, label in labels.items()}


def _result_of(sweep: Sweep, event: JobEvent) -> dict[str, Any]:
    from zerotrain.launching.sweep.places import outcome  # imports torch, as the jobs have by now
    from zerotrain.training.figures.result import RESULT_NAME, RunResult, read_result

    path = sweep.folder / event.folder / RESULT_NAME
    said = RunResult(world_size=0, overrides=event.overrides, error=event.error).body()
    if event.event == REFUSED or not event.is_within:
        return said | {"status": FAILED if event.status is None else event.status}
    try:
        result = read_result(path)
        return result | {"status": outcome(result, event.status), "overrides": result["overrides"] or []}
    except FileNotFoundError:
        if is_in_use(path.parent):
            return said | {"status": RUNNING, "error": None}
        return said | {"error": event.error or "its process is gone; the same command again goes on with it"}
    except (OSError, UntrustedFileError) as error:
        return said | {"error": f"its {path.name} cannot be read: {error}"}


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


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
