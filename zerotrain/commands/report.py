"""`zerotrain report FOLDER...`: one page, a csv and a json of any runs, and their table.

FOLDER is a run, a sweep, or any folder in which runs lie. A sweep writes these files itself; this command makes them
anew, or of runs that belong to no sweep.

  zerotrain report multirun/2026-11-24/10-00-00
  zerotrain report outputs/first outputs/second --out compared
  zerotrain report outputs/first --out s3://bucket/first

Exit code 0: they are written; 2: there is no run in a FOLDER, or they cannot be written, one line; 130: Ctrl-C.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from zerotrain.checkpoint.mirror import local_folder, open_mirror
from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.errors import ConfigError
from zerotrain.report.files import CSV_NAME, HEADS, JSON_NAME, PAGE_NAME, print_table, require_ours, write_files
from zerotrain.report.rows import FILES_OF_RUNS, read_jobs, report_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("report", __doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="the folder of a run or of a sweep")
    parser.add_argument(
        "--out", metavar="DIR", help="the folder of the files, or its URL; the folder of one FOLDER by default"
    )
    options = parser.parse_args(arguments)
    return exit_code(lambda: report(options.folders, options.out))


def report(folders: Sequence[Path], out: str | None = None) -> None:
    """Write the report of the runs in some folders, and print their table.

    Raises:
        ConfigError: there is none in one of them, or the files cannot be written.
        CheckpointError: the URL cannot be reached, or does not take them.
    """
    if out is None and len(folders) > 1:
        raise ConfigError(f"--out: is not given, and there are {len(folders)} folders; say where the report is to lie")
    place = open_mirror(out, "--out") if out is not None and "://" in out else None
    if place is not None:
        for name in sorted(HEADS.keys() & place.names()):
            require_ours(f"{place.url}/{name}", place.head(name, len(HEADS[name])), HEADS[name])
    jobs = []
    for folder in folders:
        own_jobs = read_jobs(folder)
        if not own_jobs:
            problem = "which has no run" if folder.is_dir() else "which is no folder"
            raise ConfigError(f"FOLDER: got {folder}, {problem}; give one in which {' or '.join(FILES_OF_RUNS)} lies")
        jobs += own_jobs
    if len(folders) > 1:  # the jobs of each folder have the same names
        root = os.path.commonpath([path.absolute() for path in folders])
        jobs = [replace(job, name=os.path.relpath(job.folder.absolute(), root)) for job in jobs]
    folder = local_folder() if place is not None else folders[0] if out is None else Path(out)
    where = folder if place is None else place.url
    title = folders[0].absolute() if len(folders) == 1 else Path(where).absolute()
    summary = report_of(jobs, title="/".join(title.parts[-2:]), place=folder if place is None else None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_files(summary, folder)
    except OSError as error:
        raise ConfigError(
            f"--out: got {folder}, which cannot be written: {error.strerror}; give another folder"
        ) from error
    if place is not None:
        place.push_files(folder, list(HEADS))
    print_table(summary, Console())
    print(f"in {where}: {PAGE_NAME}, {CSV_NAME}, {JSON_NAME}")
