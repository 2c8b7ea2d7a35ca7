"""Files that a run leaves, each made once, and read as commands read them."""

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.attack.fuzz.common import require_printable
from zerotrain.config.schema import Config
from zerotrain.data.files import sources
from zerotrain.data.preparing import lock as prepare_lock
from zerotrain.files.lock import holder
from zerotrain.launching.end.failures import Failure, first_failure
from zerotrain.launching.end.presence import RankState, continue_stopped, read_states, seen_alive
from zerotrain.launching.job import folder_lock
from zerotrain.launching.job.job import Job, write_ending
from zerotrain.launching.sweep.journal import JOURNAL_NAME, JobEvent, SweepJournal
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.table import print_table, read_results
from zerotrain.report.curves import read_curves
from zerotrain.report.page.page import page_of
from zerotrain.report.rows import read_report
from zerotrain.report.table import print_table as print_report
from zerotrain.training.callbacks import control
from zerotrain.training.figures.result import RunResult
from zerotrain.training.figures.sinks import keep_lines


def make_result(folder: Path) -> None:

    (folder / "0").mkdir()
    result = RunResult(world_size=2, overrides=["zero.stage=1"], status="completed", final_val_loss=2.5, steps=9)
    result.weights_sha256, result.tokens_per_s, result.step_ms_median = "a" * 64, 120.5, 3.2
    result.write(folder / "0")
    for event, status in (("begun", None), ("ended", "completed")):
        said = JobEvent(event=event, job=0, folder="0", hash="a", overrides=["zero.stage=1"], status=status)
        SweepJournal(folder).append(said)


def read_result(folder: Path) -> Any:
    """By the table and the page of a sweep, by what goes on with the folder, and by the end of a job."""

    said = io.StringIO()
    results = read_results(Sweep(folder=folder, start=0))
    print_table(results, Console(file=said, width=100)) if results else None
    told = read_report(folder, [folder / "0"])
    print_report(told, Console(file=said, width=100))
    said.write(page_of(told).decode())
    require_printable(said.getvalue().splitlines())
    job = Job(config=Config(), run_dir=folder / "0", overrides=[])
    write_ending(job, 2, status="failed", error="x")
    ended = json.loads((folder / "0" / "result.json").read_text())
    assert ended["status"] == "failed"
    return results


def read_journal(folder: Path) -> Any:
    """By the next job of its sweep, which adds to it."""

    journal = SweepJournal(folder)
    before = journal.events()
    journal.append(JobEvent(event="begun", job=1, folder="1", hash="b", overrides=[]))
    assert [event.job for event in SweepJournal(folder).events()] == [*(event.job for event in before), 1]
    assert (folder / JOURNAL_NAME).read_bytes().endswith(b"\n")
    return read_results(Sweep(folder=folder, start=0))


def make_job(folder: Path) -> None:

    job = Job(config=Config(model={"a": 1}), run_dir=folder / "run", overrides=["a=1"], evaluates={"step": 1})
    (folder / "job.json").write_text(job.to_json())


def read_job(folder: Path) -> Any:

    return Job.from_json((folder / "job.json").read_bytes())


def make_ranks(folder: Path) -> None:

    failure = Failure(rank=1, cause="failed: x", time_s=3.0, saw_alive={0: "step 3"}, unheard=(0,), where="gather")
    failure.write(folder)
    state = json.dumps(asdict(RankState(0, "training", step=3, pid=0, host="h"))).ljust(1024)
    (folder / "0.state").write_text(f"{3:<16d}{state}")


def read_ranks(folder: Path) -> Any:

    found = first_failure(folder), read_states(folder), seen_alive(folder, 1)
    if found[0] is not None:
        require_printable([str(found[0].as_error(folder)).replace("\n", " ")])
    continue_stopped(folder)
    return found


def make_lock(folder: Path) -> None:
    said = {"pid": 17, "host": "there", "started": "2026-11-23 10:00:00"}
    (folder / ".lock").write_text(json.dumps(said))
    (folder / "lock").write_text(json.dumps(said))


def read_lock(folder: Path) -> Any:

    holders = holder(folder / folder_lock.LOCK_NAME), holder(folder / prepare_lock.LOCK_NAME)
    require_printable(holders)
    return *holders, sources._holds_run(folder)


def make_control(folder: Path) -> None:
    (folder / "control.yaml").write_text("stage: 3\nsave: now\n")


def read_control(folder: Path) -> Any:
    """Whatever it holds, it is answered and ends no run."""
    asked, problems = control._requests(folder / "control.yaml")
    require_printable(problems)
    return asked, bool(problems)


def make_metrics(folder: Path) -> None:
    lines = [{"step": step, "train_loss": 1 / (step + 1)} for step in range(30)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def read_metrics(folder: Path) -> Any:

    read_curves(folder / "metrics.jsonl")
    keep_lines(folder / "metrics.jsonl", folder / "kept.jsonl", until=20)
    return (folder / "kept.jsonl").read_bytes()
