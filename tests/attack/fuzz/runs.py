"""Files that a run leaves, each made once, and read as commands read them."""

import contextlib
import io
import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from tests.attack.fuzz.common import require_printable
from zerotrain.commands import evaluate, export_folder as destination
from zerotrain.commands.ended import ended
from zerotrain.commands.replay import REPLAY
from zerotrain.config.compose import save_config
from zerotrain.config.schema import CheckpointConfig, Config, ZeroGroup
from zerotrain.data import prepare as prepare_lock
from zerotrain.engine.state.save import Writing
from zerotrain.files import kept_out as remote_code
from zerotrain.files.lock import holder
from zerotrain.files.untrusted import printable, read_json
from zerotrain.launching import job as folder_lock
from zerotrain.launching.failures import Failure, first_failure
from zerotrain.launching.job import Job, write_ending
from zerotrain.launching.presence import RankState, continue_stopped, read_states, seen_alive
from zerotrain.launching.resuming import folder_problems
from zerotrain.launching.sweep import telling as status_line
from zerotrain.preflight.choice import as_chosen, asked_hash
from zerotrain.replay.record import read_record
from zerotrain.replay.steps import _other_data, of_replay
from zerotrain.report.files import csv_of, json_of, print_table
from zerotrain.report.journal import JOURNAL_NAME, JobEvent, SweepJournal
from zerotrain.report.page import page_of
from zerotrain.report.rows import AXES, points_over, read_curves, read_report
from zerotrain.saved import text_model
from zerotrain.saved.saved import config_from, require_trusted
from zerotrain.training.callbacks import early_stopping as pruning, loggers as curves, stages as control
from zerotrain.training.callbacks.loggers import ids_in
from zerotrain.training.callbacks.record import environment
from zerotrain.training.result import RunResult, keep_lines, lines_of


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
    told = read_report(folder)
    results = told.only(folder, SweepJournal(folder).events())
    for each in (told, results):
        print_table(each, Console(file=said, width=100))
    said.write(page_of(told).decode())
    require_printable(said.getvalue().splitlines())
    job = Job(config=Config(), run_dir=folder / "0", overrides=[])
    write_ending(job, 2, status="failed", error="x")
    ended = json.loads((folder / "0" / "result.json").read_text())
    assert ended["status"] == "failed"
    return [(row.job, row.status, row.figures, row.error) for row in results.rows]


def read_journal(folder: Path) -> Any:
    """By the next job of its sweep, which adds to it."""

    journal = SweepJournal(folder)
    before = journal.events()
    journal.append(JobEvent(event="begun", job=1, folder="1", hash="b", overrides=[]))
    assert [event.job for event in SweepJournal(folder).events()] == [*(event.job for event in before), 1]
    assert (folder / JOURNAL_NAME).read_bytes().endswith(b"\n")
    said = [(each.job, each.folder, each.status, each.overrides, each.time) for each in before]
    return said, [(row.job, row.status, row.error) for row in read_report(folder).rows]


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
    return holders


def make_control(folder: Path) -> None:
    (folder / "control.yaml").write_text("stage: 3\nsave: now\n")


def read_control(folder: Path) -> Any:
    """Whatever it holds, it is answered and ends no run."""
    asked, problems = control._requests(folder / "control.yaml")
    require_printable(problems)
    return asked, bool(problems)


def make_metrics(folder: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": step, "train_loss": 1 / (step + 1)} for step in range(30)]
    lines += [{"step": 30, "val_loss": 0.5}, {"step": 30, "train_loss": 0.25, "tokens": 4096, "train_s": 1.5}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def read_metrics(folder: Path) -> Any:
    """By a report, by a resume, by the line of a sweep, and by a tracker."""
    for curve in read_curves(folder / "metrics.jsonl").values():
        for axis in AXES:
            points_over(curve, axis, 100)
    status_line._last_measured(folder / "metrics.jsonl")
    for _, metrics in lines_of(folder / "metrics.jsonl"):
        assert type(metrics["step"]) is int
        curves.numbers_of(metrics)
    keep_lines(folder / "metrics.jsonl", folder / "kept.jsonl", until=20)
    return (folder / "kept.jsonl").read_bytes()


def make_settings(folder: Path) -> None:
    settings = Config(model={"_target_": "zerotrain.models.MLP", "hidden_size": 8}, data={"length": 7})
    save_config(settings, folder / "config.yaml")
    for number in (0, 1):
        (folder / str(number)).mkdir()
        RunResult(world_size=2, status="completed", final_val_loss=2.5, steps=9).write(folder / str(number))
    save_config(Config(model={"_target_": "zerotrain.models.GPT", "hidden_size": 4}), folder / "1/config.yaml")


def read_settings(folder: Path) -> Any:
    """By a report, by the line of a sweep, and by a run that is to go on there."""
    (folder / "config.yaml").rename(folder / "0/config.yaml")
    report = read_report(folder)
    said = csv_of(report) + json_of(report)
    require_printable(said.decode().splitlines())
    require_printable(page_of(report).decode().splitlines())
    status_line._max_steps(folder / "0/config.yaml")
    config = Config(checkpoint=CheckpointConfig(resume="auto"))
    problems = folder_problems(config, folder / "0")
    require_printable(problems)
    return report.rows[0].settings, report.rows[0].status, len(problems)


def make_steps(folder: Path) -> None:
    settings = asdict(
        Config(model={"_target_": "zerotrain.models.MLP"}, scheduler={"_target_": "zerotrain.training.constant"})
    )
    start = environment(torch.device("cpu")) | {"ranks": 2, "data": {"rows": 9}, "settings": settings}
    lines: list[dict[str, Any]] = [{"step": 0, "start": json.loads(json.dumps(start, default=str))}]
    for step in range(1, 30):
        lines.append({"step": step, "loss": 1 / step, "grad_norm": 1.0, "update": "a" * 16, "skipped": False})
    (folder / "steps.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))


def read_steps(folder: Path) -> Any:
    """By a replay, until it builds what the settings name."""
    record = read_record(folder)
    if not record.steps:
        return None
    step = record.worst
    start = record.start_of(step)
    config = config_from(start.get("settings"), folder)
    outcome = SimpleNamespace(mean_loss=0.5, grad_norm=1.0, update_hash="b", skipped=False)
    lines = [
        record.difference(step, outcome) or "",
        *record.causes(step, environment(torch.device("cpu")), start.get("settings")),
    ]
    lines.append(_other_data(start.get("data") or {}, {"rows": 3}) or "")
    require_printable(printable(each, keep="") for each in lines)
    if config is not None:
        require_trusted(config, REPLAY.built, folder)
        of_replay(config)
    return record.last_step, lines, config


def make_plan(folder: Path) -> None:
    said = {"stage": 1, "num_ranks": 2, "memory": 10**9, "process": 0, "kept": 0, "stages": {}}
    said |= {"asked": asked_hash(AUTO), "chosen": {"zero.stage": 1}}
    (folder / "plan.json").write_text(json.dumps(said))


AUTO = Config(zero=ZeroGroup(stage="auto"))


def read_plan(folder: Path) -> Any:
    """By a run that goes on."""
    return as_chosen(AUTO, folder, 2).zero.stage


def make_ended(folder: Path) -> None:
    (folder / "ranks").mkdir()
    (folder / "ranks/refused.json").write_text(json.dumps({"error": "seed: got -1"}))
    RunResult(world_size=2, status="failed", error="lost", exit_code=1, steps=9).write(folder)


def read_ended(folder: Path) -> Any:
    """By the command, and by a run in the folder."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = ended(folder)
    require_printable(said.getvalue().splitlines())
    assert 0 <= code < 256
    require_printable(folder_problems(Config(), folder))
    return code, said.getvalue()


def make_note(folder: Path) -> None:
    (folder / "wandb.json").write_text(json.dumps({"id": "abc12345", "config_hash": "a"}))


def read_note(folder: Path) -> Any:
    return ids_in(folder)


def make_study(folder: Path) -> None:
    sqlite3.connect(folder / "study.db").execute("create table studies (study_id integer)").connection.close()


def read_study(folder: Path) -> Any:
    pruning._require_sqlite(folder / "study.db")
    return "it is one of SQLite"


def make_auto_map(folder: Path) -> None:
    said = {"model_type": "llama", "auto_map": {"AutoModel": "theirs--modeling.Model", "AutoConfig": ["a.B", None]}}
    (folder / "config.json").write_text(json.dumps(said))


def read_auto_map(folder: Path) -> Any:
    code = list(remote_code._code_of(str(folder)))
    return code, remote_code.refusal(str(folder), ValueError("trust_remote_code"))


def make_adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "gpt2", "r": 8}))


def read_adapters(folder: Path) -> Any:
    return text_model._base_of(folder)


def make_loss(folder: Path) -> None:
    (folder / "loss.json").write_text(json.dumps({"metrics": {"val_loss": 1.5, "val_accuracy": 0.5}}))


def read_loss(folder: Path) -> Any:
    return read_json(folder / "loss.json", evaluate._Loss, max_nbytes=evaluate.MAX_LOSS_NBYTES)["metrics"]


def make_exported(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a/model.safetensors").write_bytes(b"x")
    said = {"step": 3, "files": ["a/model.safetensors"], "config": {}}
    (folder / "zerotrain_export.json").write_text(json.dumps(said))


def read_exported(folder: Path) -> Any:
    destination.require_free(folder, overwrite=True)
    return "it may be replaced"


def make_described(folder: Path) -> None:
    place = {"file": 1, "byte": 64, "start": 0, "stop": 3}
    pieces = [("a.weight", "weight", {"dtype": "float32", "pieces": [place]})]
    said = {"name": "rank-00001.safetensors", "nbytes": 99, "hashes": ["a"], "pieces": pieces}
    (folder / "described-00001.json").write_text(json.dumps(said))


def read_described(folder: Path) -> Any:
    """By rank 0, which writes the manifest of it."""
    return Writing._described_by(SimpleNamespace(folder=folder), 1)  # type: ignore[arg-type]
