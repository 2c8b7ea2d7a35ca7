"""The end of a sweep: its table, its report and its exit code."""

import sys
from collections import Counter
from pathlib import Path

from rich.console import Console

from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.launching import exits
from zerotrain.launching.sweep.driver import driven
from zerotrain.report.journal import COMPLETED, DIVERGED, FAILED, PRUNED, RUNNING, STOPPED


def report(code: int) -> int:
    """Write the report of the sweep that this process has driven, and print the table of its jobs; nothing where it
    drove none.

    Returns:
        The exit code: `code`, or that of a failure where a job has failed.
    """
    found = driven()
    if found is None:
        return code
    sweep, teller = found
    teller.close()
    events = sweep.events_to_count()
    if not events:
        if code == exits.COMPLETED:
            print("-m: there is no job to run; a range(...) or glob(...) among the settings is empty", file=sys.stderr)
        return code or exits.CONFIG_PROBLEM
    from zerotrain.report.files import PAGE_NAME, write_files  # imports torch, as the jobs have by now
    from zerotrain.report.rows import read_report
    from zerotrain.report.table import print_table

    all_in_folder = read_report(sweep.folder)
    told = all_in_folder.only(sweep.folder, events)
    print_table(told, Console())
    try:
        write_files(all_in_folder, sweep.folder)
        print(f"report: {sweep.folder / PAGE_NAME}")
    except (ConfigError, OSError) as error:
        print(f"warning: the report of the sweep cannot be written: {printable(str(error))}", file=sys.stderr)
    counts = Counter(told.counts)
    num_done = counts[COMPLETED] + counts[PRUNED]
    if sweep.study is not None:  # which runs no failed trial again
        num_done = len(told.rows) - counts[STOPPED] - counts[RUNNING]
    if num_done < max(len(told.rows), sweep.total or 0):
        shown = sweep.folder.relative_to(Path.cwd()) if sweep.folder.is_relative_to(Path.cwd()) else sweep.folder
        print(f"to go on: the same command with hydra.sweep.dir={shown}, which takes completed jobs as they are")
    has_failed = counts[FAILED] or (counts[DIVERGED] and sweep.diverged == "fail")
    return exits.FAILED if has_failed and code == exits.COMPLETED else code
