"""What lies in a run's folder already, and what becomes of it."""

import builtins
import io
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from tests.unit.checkpoint.runs import KINDS, build
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.manifest import MANIFEST
from zerotrain.checkpoint.mirror import Mirror
from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.compose import config_hash, register_schema, save_config
from zerotrain.config.schema import CheckpointConfig, Config, LaunchConfig, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.launching import resuming
from zerotrain.launching.failures import RunError
from zerotrain.launching.job import Job, write_refusal
from zerotrain.launching.resuming import (
    Attempts,
    checkpoints_to_try,
    completed_already,
    doubtful_start,
    elastic_hosts,
    folder_problems,
    go_on_if_queued_again,
    going_on,
    queue_again,
    set_code_when_stopped,
    start_problems,
    with_run_dir,
)
from zerotrain.training.result import RunResult

STEPS = 5


def config_with(resume: str | None, *, max_steps: int = STEPS, seed: int = 0, **launch: object) -> Config:
    return Config(
        checkpoint=CheckpointConfig(resume=resume),
        launch=LaunchConfig(**launch),
        train=TrainConfig(max_steps=max_steps),
        seed=seed,
    )


def checkpoint(run_dir: Path, step: int) -> Path:
    """What looks like one from outside."""
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("{}")
    return path


def run_in(run_dir: Path, status: str = "completed", **changes: object) -> Config:
    """What a run has left; its config."""
    config = config_with(None)
    save_config(config, run_dir / "config.yaml")
    facts = {"steps": STEPS, "overrides": ["seed=0"], "config_hash": config_hash(config)}
    RunResult(**{"world_size": 2, "status": status, "checkpoint": "step-00000005"} | facts | changes).write(run_dir)
    return config


def files_in(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_a_folder_with_checkpoints_is_neither_erased_nor_written_among(tmp_path: Path):
    assert folder_problems(config_with(None), tmp_path) == []
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)  # with its name alone a save would meet it
    [problem] = folder_problems(config_with(None), tmp_path)
    assert f"{tmp_path} holds checkpoints; checkpoint.resume=auto goes on" in problem
    assert folder_problems(config_with(None, overwrite=True), tmp_path) == []
    assert folder_problems(config_with("auto"), tmp_path) == []


@pytest.mark.parametrize("resume", ["auto", "checkpoints/step-00000003", "."])
def test_what_is_to_be_gone_on_from_is_not_erased(tmp_path: Path, monkeypatch, resume):
    monkeypatch.chdir(tmp_path)
    assert (
        "erase the checkpoint that checkpoint.resume="
        in folder_problems(config_with(resume, overwrite=True), tmp_path)[0]
    )
    elsewhere = config_with(str(tmp_path.parent / "another"), overwrite=True)
    assert folder_problems(elsewhere, tmp_path) == []


@pytest.mark.parametrize("with_checkpoints", [False, True])
@pytest.mark.parametrize("of_sweep", [False, True])
def test_a_completed_run_is_refused_with_ways_that_work(tmp_path: Path, with_checkpoints: bool, of_sweep: bool):
    run_in(tmp_path)
    if with_checkpoints:
        checkpoint(tmp_path, STEPS)
    [problem] = folder_problems(config_with(None), tmp_path, of_sweep=of_sweep)
    assert problem.startswith(
        f"launch.overwrite: got false, but {tmp_path} holds a completed run; launch.overwrite=true erases it"
    )
    assert folder_problems(config_with(None, overwrite=True), tmp_path, of_sweep=of_sweep) == []
    assert ("hydra.sweep.dir" in problem, "hydra.run.dir" in problem) == (of_sweep, not of_sweep)
    assert ("keeps completed jobs" in problem) == of_sweep
    assert ("train.max_steps above 5" in problem) == with_checkpoints
    longer = folder_problems(config_with("auto", max_steps=STEPS + 1), tmp_path, of_sweep=of_sweep)
    assert (longer == []) == with_checkpoints


@pytest.mark.parametrize("with_checkpoints", [False, True])
@pytest.mark.parametrize("launch", [{}, {"nproc_per_node": 4, "device": "cpu", "timeout_s": 9.0, "max_restarts": 2}])
def test_a_completed_run_is_left_as_it_is_by_one_that_would_go_on(tmp_path: Path, with_checkpoints: bool, launch):
    run_in(tmp_path)
    if with_checkpoints:
        checkpoint(tmp_path, 3)
    config = config_with("auto", **launch)
    assert folder_problems(config, tmp_path) == []
    result = completed_already(config, tmp_path)
    assert result is not None
    assert (result.status, result.steps, result.world_size) == ("completed", STEPS, 2)
    assert result.checkpoint == ("step-00000005" if with_checkpoints else None)


@pytest.mark.parametrize("with_checkpoints", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"seed": 7}, "seed: 0 there, 7 here"),
        ({"max_steps": 3}, "train.max_steps: 5 there, 3 here"),
        ({"nproc_per_node": 3, "seed": 1}, "seed: 0 there, 1 here"),
    ],
)
def test_a_completed_run_of_other_settings_is_not_taken_for_this_one(tmp_path: Path, with_checkpoints, change, told):
    run_in(tmp_path)
    if with_checkpoints:
        checkpoint(tmp_path, STEPS)
    config = config_with("auto", **change)
    assert completed_already(config, tmp_path) is None
    [problem] = folder_problems(config, tmp_path)
    assert f"checkpoint.resume: got auto, but {tmp_path} holds a completed run with other settings ({told})" in problem


def test_weights_to_begin_with_make_another_run_and_many_differences_are_not_all_told(tmp_path: Path):
    run_in(tmp_path)
    config = replace(config_with("auto"), checkpoint=CheckpointConfig(resume="auto", init_from="/other"))
    assert "checkpoint.init_from: None there, /other here" in folder_problems(config, tmp_path)[0]
    config = replace(config_with("auto"), model={f"key{number}": number for number in range(50)})
    assert folder_problems(config, tmp_path)[0].count(" there") == 3


def test_virtual_ranks_that_were_those_of_a_checkpoint_make_no_other_run(tmp_path: Path):
    was = config_with(None)
    was.train.virtual_ranks = 4
    save_config(was, tmp_path / "config.yaml")
    RunResult(world_size=2, status="completed", steps=STEPS, overrides=[], config_hash=config_hash(was)).write(tmp_path)
    assert completed_already(config_with("auto"), tmp_path) is not None
    other = config_with("auto")
    other.train.virtual_ranks = 8
    assert "train.virtual_ranks: 4 there, 8 here" in folder_problems(other, tmp_path)[0]


def test_tokens_that_were_counted_in_the_data_make_no_other_run(tmp_path: Path):
    was, now, other = (replace(config_with("auto"), model={"vocab_size": size}) for size in (800, None, 900))
    save_config(was, tmp_path / "config.yaml")
    RunResult(world_size=2, status="completed", steps=STEPS, overrides=[], config_hash=config_hash(was)).write(tmp_path)
    assert completed_already(now, tmp_path) is not None
    assert "model.vocab_size: 800 there, 900 here" in folder_problems(other, tmp_path)[0]
    left_out = replace(config_with("auto"), model={})
    assert "model.vocab_size: 800 there, None here" in folder_problems(left_out, tmp_path)[0]


@pytest.mark.parametrize("content", [None, "[", "a: &x 1", "x"])
def test_of_a_completed_run_without_its_config_nobody_says_that_it_is_this_one(tmp_path: Path, content: str | None):
    run_in(tmp_path, config_hash="0" * 16)
    (tmp_path / "config.yaml").unlink() if content is None else (tmp_path / "config.yaml").write_text(content)
    assert completed_already(config_with("auto"), tmp_path) is None
    assert "its config.yaml" in folder_problems(config_with("auto"), tmp_path)[0]


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_complete_goes_on(tmp_path: Path, status: str):
    run_in(tmp_path, status)
    for with_checkpoints in (False, True):
        if with_checkpoints:
            checkpoint(tmp_path, 3)
        assert folder_problems(config_with("auto"), tmp_path) == []
        assert completed_already(config_with("auto"), tmp_path) is None


def test_a_completed_run_is_not_gone_back_in_nor_written_over_from_elsewhere(tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_in(run_dir)
    older, other = checkpoint(run_dir, 3), checkpoint(tmp_path / "other", 3)
    for resume, max_steps, is_allowed in ((older, 5, False), (older, 6, True), (other, 5, False), (other, 6, False)):
        problems = folder_problems(config_with(str(resume), max_steps=max_steps), run_dir)
        assert (problems == []) == is_allowed
        assert all(f"checkpoint.resume: got {resume}, but {run_dir} holds a completed run" in each for each in problems)
    assert folder_problems(config_with(str(other), overwrite=True), run_dir) == []


DAMAGED = {
    "empty": "",
    "cut": '{"status": "compl',
    "another's": '{"answer": 42}',
    "another status": '{"status": "done", "world_size": 1, "steps": 3, "overrides": []}',
    "a text of steps": '{"status": "completed", "world_size": 1, "steps": "3", "overrides": []}',
    "deep": "[" * 5000,
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("resume", [None, "auto", "elsewhere"])
@pytest.mark.parametrize("case", DAMAGED)
def test_a_result_of_which_nobody_can_tell_is_not_replaced(tmp_path: Path, case: str, resume: str | None):
    content = DAMAGED[case]
    (tmp_path / "result.json").write_bytes(content.encode() if isinstance(content, str) else content)
    before = files_in(tmp_path)
    [problem] = folder_problems(config_with(resume), tmp_path)
    assert problem.startswith(
        f"hydra.run.dir: got {tmp_path}, which may hold a completed run: its result.json cannot be read: "
    )
    assert problem.isprintable()
    assert "move it away" in problem
    write_refusal(tmp_path, [], problem)
    assert files_in(tmp_path) == before
    assert folder_problems(config_with(None, overwrite=True), tmp_path) == []


def test_a_result_of_a_later_version_counts_by_what_is_known_of_it(tmp_path: Path):
    text = '{"status": "completed", "world_size": 1, "steps": 5, "overrides": null, "of_tomorrow": {"a": [1]}}'
    (tmp_path / "result.json").write_text(text)
    assert "holds a completed run" in folder_problems(config_with(None), tmp_path)[0]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(os.path.relpath(path))


MADE: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
    "a link that leads nowhere": lambda path: path.symlink_to("gone"),
    "a file": Path.touch,
}
FOREIGN = [("checkpoints", kind) for kind in MADE] + [("ranks", "a link that leads nowhere"), (".hydra", "a file")]


@pytest.mark.parametrize(("name", "kind"), FOREIGN)
def test_what_lies_in_the_place_of_a_folder_of_the_run_is_found_before_any_rank_starts(
    tmp_path: Path, monkeypatch, name: str, kind: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    MADE[kind](tmp_path / name)
    before = os.lstat(tmp_path / name)[:3]
    for config in (config_with(None), config_with("auto"), config_with(None, overwrite=True)):
        [problem] = folder_problems(config, tmp_path)
        assert problem.startswith(f"hydra.run.dir: got {tmp_path}, where {name} is {kind}")
        assert "\n" not in problem
        assert "move that away" in problem
        write_refusal(tmp_path, [], problem)
        assert os.lstat(tmp_path / name)[:3] == before


def test_what_is_no_runs_stays_whatever_a_run_is_told(tmp_path: Path):
    mine = [tmp_path / name for name in ("checkpoints/best.pt", "ranks/notes.txt", "ranks/0.log.old", "data.json")]
    mine += [tmp_path / "checkpoints/mine/a", tmp_path / "outside/a"]
    for path in mine:
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("mine")
    for overwrite in (False, True):
        Job(config_with(None, overwrite=overwrite), tmp_path, []).open_folder()
        assert all(path.read_text() == "mine" for path in mine)
    checkpoint(tmp_path, 3)
    (tmp_path / "checkpoints/step-00000004").symlink_to(tmp_path / "outside")
    aside = tmp_path / "checkpoints/step-00000009.aside-0123456789abcdef"
    aside.mkdir()
    Job(config_with(None), tmp_path, []).open_folder()
    assert aside.is_dir()
    Job(config_with(None, overwrite=True), tmp_path, []).open_folder()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"best.pt", "mine"}
    assert all(path.read_text() == "mine" for path in mine)


# When ranks are started again after a failure, from where, and what is said.


CAUSE, LOG = "rank 1 was killed by SIGKILL", "  its log: run/ranks/1.log"
FAILED = RunError(f"{CAUSE}\n{LOG}")
AWKWARD = "a b%s\\u00e9 é;\n$x'y\\"


@pytest.fixture
def attempts(tmp_path: Path):
    """(max_restarts) -> the attempts at a job in `tmp_path`, the first of them begun."""

    def begin(max_restarts: int) -> Attempts:
        job = Job(config=Config(launch=LaunchConfig(max_restarts=max_restarts)), run_dir=tmp_path, overrides=[])
        job.open_folder()
        return Attempts(job)

    return begin


def test_each_restart_is_told_with_the_first_cause_and_where_it_goes_on(attempts, tmp_path: Path):
    tried = attempts(3)
    assert tried.begin_next(FAILED) == f"{CAUSE}; restart 1 of 3 from the start\n{LOG}"
    checkpoint(tmp_path, 200)
    assert tried.begin_next(FAILED) == f"{CAUSE}; restart 2 of 3 from step 200\n{LOG}"
    assert tried.job.restarts == 2


IN_VAIN = "  gave up: the last 2 restarts wrote no newer checkpoint"


@pytest.mark.case("stopping", "ranks fail again and again")
@pytest.mark.parametrize(
    ("allowed", "saved_before", "saved", "says"),
    [
        (0, None, [], LOG),
        (9, None, [None, None], IN_VAIN),
        (9, 100, [None, None], IN_VAIN),  # of an earlier run: no progress of this one
        (9, None, [100, None, None], IN_VAIN),
        (4, None, [None, 10, None, 30], "  given up: launch.max_restarts=4"),
    ],
)
def test_restarts_end_at_their_number_and_without_progress(attempts, tmp_path, allowed, saved_before, saved, says):
    """The steps saved are those of each restart."""
    if saved_before is not None:
        checkpoint(tmp_path, saved_before)
    tried = attempts(allowed)
    for step in saved:
        tried.begin_next(FAILED)
        if step is not None:
            checkpoint(tmp_path, step)
    with pytest.raises(RunError) as raised:
        tried.begin_next(FAILED)
    lines = str(raised.value).splitlines()
    assert (lines[:2], lines[-1], tried.job.restarts) == ([CAUSE, LOG], says, len(saved))


def test_a_restart_resumes_from_its_own_folder_once_something_is_saved_there(tmp_path: Path):
    job = Job(config=Config(), run_dir=tmp_path, overrides=[], resume_from=["elsewhere"])
    assert going_on(job) is job
    checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 20)
    assert going_on(job).resume_from == [str(tmp_path / f"checkpoints/step-000000{step}") for step in (20, 10)]
    assert job.resume_from == ["elsewhere"]


@pytest.mark.parametrize("name", ["outputs/2026-11-22/10-00-00", AWKWARD])
def test_a_command_line_is_given_a_folder_of_whatever_name(name: str):
    given = ["zero.stage=3", "hydra.run.dir=${now:%H}", "-m"]
    setting, *others = with_run_dir(given, Path(name))
    assert others == ["zero.stage=3", "-m"]
    [parsed] = OverridesParser.create().parse_overrides([setting])
    assert parsed.key_or_group == "hydra.run.dir"
    assert parsed.value() == name


def test_the_newest_is_tried_first(tmp_path: Path):
    first, second = checkpoint(tmp_path, 3), checkpoint(tmp_path, 12)
    for asked in ("auto", str(tmp_path), str(tmp_path / "checkpoints")):
        assert resuming.checkpoints_to_try(config_with(asked), tmp_path) == [second, first]
    assert resuming.checkpoints_to_try(config_with(str(first)), tmp_path) == [first]
    assert resuming.checkpoints_to_try(config_with(None), tmp_path) == []
    assert resuming.checkpoints_to_try(config_with("auto"), tmp_path / "new") == []


def test_one_that_was_named_must_be_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"checkpoint.resume: got .*/gone; .*is not there"):
        resuming.checkpoints_to_try(config_with(str(tmp_path / "gone")), tmp_path)
    with pytest.raises(ConfigError, match=r"got a URL; .* checkpoint.mirror=URL checkpoint.resume=auto goes on from a"):
        resuming.checkpoints_to_try(config_with("s3://name:secret@bucket/run"), tmp_path)


def test_where_no_manifest_can_be_read_there_is_nothing_to_go_on_from(tmp_path: Path):
    assert resuming.first_readable([]) is None
    with pytest.raises(ConfigError) as error:
        resuming.first_readable([checkpoint(tmp_path, 3), checkpoint(tmp_path, 4)])
    assert len(error.value.problems) == 2
    assert all("checkpoint.resume: " in each for each in error.value.problems)


class Saved:
    """What of a manifest is asked for."""

    def __init__(self, step: int, virtual_ranks: int, threads: int | None = None) -> None:
        self.step = step
        self.content = {"virtual_ranks": virtual_ranks, "config": threads and {"launch": {"threads_per_rank": threads}}}


@pytest.mark.parametrize(
    ("given", "saved", "num_ranks", "taken"),
    [(None, 4, 2, 4), (None, 2, 2, None), (None, 4, 3, None), (None, 2, 4, None), (8, 4, 2, 8)],
)
def test_a_run_has_as_many_virtual_ranks_as_before(given, saved, num_ranks, taken):
    config = Config(train=TrainConfig(virtual_ranks=given, max_steps=5))
    said = resuming.take_from(Saved(5, saved), config, num_ranks, num_ranks)
    assert config.train.virtual_ranks == taken
    if given is None and saved != num_ranks:
        assert ("as in the checkpoint" if taken else "the batch size changes from here on") in said[0]
    else:
        assert said == []


@pytest.mark.parametrize(
    ("given", "saved", "taken"),
    [(None, 7, 7), (2, 7, 2), (None, 10_000, 10_000), (None, -1, None), (None, 10_001, None)],
)
def test_a_rank_has_as_many_threads_as_before_on_the_cpu(given: int | None, saved: int, taken: int | None):
    config = Config(launch=LaunchConfig(threads_per_rank=given, device="cpu"))
    said = resuming.take_from(Saved(5, 1, threads=saved), config, 1, 1)
    assert config.launch.threads_per_rank == taken
    told = f"launch.threads_per_rank={saved}, as in the checkpoint"
    assert [line.startswith(told) for line in said] == [True] * (given is None and taken is not None)


def test_a_checkpoint_beyond_the_last_step_is_refused_where_that_is_known():
    with pytest.raises(ConfigError, match=r"train.max_steps: got 4; it must be 5 or more"):
        resuming.take_from(Saved(5, 1), Config(train=TrainConfig(max_steps=4)), 1, 1)
    config = Config(train=TrainConfig(max_steps=None, num_epochs=1.0))
    assert resuming.take_from(Saved(5, 1), config, 1, 1) == []


OF_MODULE = ["python -m zerotrain", "--config-dir", "my conf", "-m"]
GOES_ON = "hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto"


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        (["launch.py"], None, f"python launch.py {GOES_ON}"),
        (OF_MODULE, None, f"python -m zerotrain {GOES_ON} --config-dir 'my conf'"),
        (["zerotrain"], None, f"zerotrain {GOES_ON}"),
        (["zerotrain"], (2, 2, "srun"), f"srun --ntasks 2 python -m zerotrain {GOES_ON}"),
        (OF_MODULE, (2, 2), f"torchrun --nproc-per-node 2 -m zerotrain {GOES_ON} --config-dir 'my conf'"),
        (["launch.py"], (2, 4), f"torchrun ... launch.py {GOES_ON}"),
        (["launch.py"], (2, 2, "srun"), f"srun --ntasks 2 python launch.py {GOES_ON}"),
        (["launch.py"], (2, 4, "srun"), f"srun ... python launch.py {GOES_ON}"),
    ],
)
def test_the_command_to_go_on_is_that_of_the_run_and_says_where(monkeypatch, argv, ranks, command):
    monkeypatch.setattr(sys, "argv", argv)
    overrides = ["a=1", "++train.max_steps=null"]
    overrides += ["+checkpoint.resume=x", "hydra.run.dir=else", "launch.overwrite=true"]
    started = ranks and RankEnvironment(0, ranks[1], 0, ranks[0], starter=ranks[2] if ranks[2:] else "torchrun")
    assert resuming.command_to_go_on(overrides, Path("out"), started, "train.max_steps=8") == command


JOB, BATCH = {"SLURM_JOB_ID": "12"}, {"ENVIRONMENT": "BATCH"}
ARRAY = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("environment", "more", "begins"),
    [
        (JOB | BATCH, [], "scontrol requeue 12; when "),
        (ARRAY | BATCH, [], "scontrol requeue 12_3; when "),
        (JOB | BATCH, ["train.max_steps=8"], "srun --ntasks 2 python "),
        (JOB, [], "srun --ntasks 2 python "),
        (BATCH, [], "srun --ntasks 2 python "),
    ],
)
def test_a_stopped_job_of_sbatch_goes_on_by_its_own_script(monkeypatch, environment, more, begins):
    for name in ARRAY | BATCH:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = RankEnvironment(0, 2, 0, 2, starter="srun")
    command = resuming.command_to_go_on(["a=1"], Path("out"), started, *more)
    assert command.startswith(begins)
    assert "hydra.run.dir=out " in command
    assert command.endswith("checkpoint.resume=auto")


# What a run does in a job of a scheduler: its exit code, where it goes on, and how it is queued again.


@pytest.mark.parametrize(
    ("environment", "given", "code"),
    [
        ({}, None, None),
        (JOB, None, 85),
        ({"JOB_COMPLETION_INDEX": "0"}, None, 85),
        ({"SLURM_JOB_ID": ""}, None, None),
        (JOB, 0, 0),
        ({}, 99, 99),
    ],
)
def test_the_code_of_a_stop_is_85_in_a_job_of_a_scheduler_unless_another_is_given(environment, given, code):
    config = Config()
    config.launch.exit_code_when_stopped = given
    set_code_when_stopped(config, environment)
    assert config.launch.exit_code_when_stopped == code


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "10-00/x"),
        (JOB, "slurm-12"),
        (ARRAY, "slurm-12_3"),
        ({"SLURM_JOB_ID": "../../etc"}, "10-00/x"),
        ({"SLURM_JOB_ID": "١٢"}, "10-00/x"),
        ({**ARRAY, "SLURM_ARRAY_TASK_ID": "3/.."}, "10-00/x"),
    ],
)
def test_a_folder_is_named_by_the_job_as_scontrol_knows_it_and_else_by_the_time(monkeypatch, environment, folder: str):
    register_schema()
    for each in ARRAY:
        monkeypatch.delenv(each, raising=False)
    for each, value in environment.items():
        monkeypatch.setenv(each, value)
    assert OmegaConf.create({"dir": "outputs/${slurm_job:${time}/x}", "time": "10-00"}).dir == f"outputs/{folder}"


@pytest.mark.parametrize(
    ("restarts", "resume", "saved", "after"),
    [
        ("0", None, True, (None, True)),
        (None, None, True, (None, True)),
        ("-1", None, True, (None, True)),
        ("1", None, False, ("auto", False)),
        ("2", None, True, ("auto", False)),
        ("1", "elsewhere", True, ("auto", False)),
        ("1", "elsewhere", False, ("elsewhere", False)),
        ("1", "auto", True, ("auto", False)),
    ],
)
def test_a_job_that_is_queued_again_goes_on_in_its_folder_and_erases_nothing(tmp_path, restarts, resume, saved, after):
    config = Config()
    config.checkpoint.resume, config.launch.overwrite = resume, True
    if saved:
        checkpoint(tmp_path, 3)
    line = go_on_if_queued_again(config, tmp_path, {} if restarts is None else {"SLURM_RESTART_COUNT": restarts})
    assert (config.checkpoint.resume, config.launch.overwrite) == after
    assert (line is None) == after[1]


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A scontrol that notes what it is asked for, shows the file `shown`, and fails where `refuses` lies there."""
    program = tmp_path / "bin/scontrol"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\ncd {tmp_path}\n[ "$1" = show ] && exec cat shown\n'
        'echo "$@" >> asked\n[ ! -e refuses ] || { echo no >&2; exit 1; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr(resuming, "_HEAD_START_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def asking() -> Config:
    config = Config()
    config.launch.requeue, config.launch.exit_code_when_stopped = True, 85
    return config


@pytest.mark.parametrize(("environment", "job"), [(JOB, "12"), (ARRAY, "12_3")])
@pytest.mark.parametrize("by", ["SIGUSR1", "SIGUSR2"])
def test_a_job_that_a_signal_ahead_of_its_end_has_stopped_is_queued_again(scontrol, environment, job: str, by: str):
    assert queue_again(asking(), by, environment) is None
    assert (scontrol / "asked").read_text() == f"requeue {job}\n"


@pytest.mark.parametrize(
    ("shown", "again"),
    [
        ("JobId=12 JobState=RUNNING Reason=None\n PreemptEligibleTime=2026 PreemptTime=2026-11-24", True),
        ("JobId=12 JobState=RUNNING Reason=None PreemptEligibleTime=2026 PreemptTime=None", False),
        ("JobId=12 JobState=COMPLETING Reason=None PreemptTime=2026-11-24", False),
        ("JobId=12 JobState=COMPLETING Reason=TimeLimit PreemptTime=None", True),
        ("JobId=12 JobState=CANCELLED Reason=None", False),
    ],
)
def test_a_job_that_sigterm_has_come_to_is_where_slurm_has_a_reason_and_will_not_itself(scontrol, shown, again: bool):
    (scontrol / "shown").write_text(shown)
    assert queue_again(asking(), "SIGTERM", JOB) is None
    assert (scontrol / "asked").exists() == again


def test_a_job_that_was_stopped_by_hand_is_not(scontrol):
    for by in ("SIGINT", "control.yaml"):
        assert queue_again(asking(), by, JOB) is None
    assert queue_again(Config(), "SIGUSR1", JOB) is None
    assert not (scontrol / "asked").exists()


def test_why_a_job_is_not_queued_again_is_a_sentence(scontrol, monkeypatch: pytest.MonkeyPatch):
    others = "exit code 85 leaves it to others to start the run again"
    (scontrol / "refuses").touch()
    assert queue_again(asking(), "SIGUSR1", JOB) == f"launch.requeue: scontrol requeue 12: no; {others}"
    line = queue_again(asking(), "SIGUSR1", {})
    assert line == f"launch.requeue: this is no job of Slurm (SLURM_JOB_ID is not set); {others}"
    monkeypatch.setenv("PATH", str(scontrol))
    line = queue_again(asking(), "SIGUSR1", JOB)
    assert line == f"launch.requeue: job 12 is not queued again, since there is no scontrol here; {others}"


# Hosts that come and go, by the command line of torchrun.


RANKS = RankEnvironment(0, 2, 0, 1)


@pytest.fixture
def torchrun_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """(options) -> the parent of this process is a torchrun that was given them."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    read = builtins.open

    def start(*options: str) -> None:
        command = "\0".join(["python", "torchrun", *options, "launch.py", ""]).encode()
        monkeypatch.setattr(
            "builtins.open", lambda path, *args: io.BytesIO(command) if "cmdline" in str(path) else read(path, *args)
        )

    return start


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        (["--nproc-per-node=2", "--nnodes=1:4"], "1:4"),
        (["--nnodes", "1:4", "--max-restarts=5"], "1:4"),
        (["--nnodes=2"], None),
        (["--nnodes=2:2"], None),
        (["--nproc-per-node=2"], None),
    ],
)
def test_a_range_of_hosts_is_elastic(torchrun_with, options: list[str], hosts: str | None) -> None:
    torchrun_with(*options)
    assert elastic_hosts(RANKS) == hosts


def test_on_hosts_that_come_and_go_a_run_goes_on_by_itself_and_hosts_can_join(
    torchrun_with, monkeypatch, tmp_path
) -> None:
    torchrun_with("--nnodes=1:2")
    assert start_problems(config_with("auto"), tmp_path, RANKS) == []
    [problem] = start_problems(config_with(None), tmp_path, RANKS)
    assert problem.startswith(
        "checkpoint.resume: got null; under torchrun --nnodes=1:2 it must be auto, with a hydra.run"
    )
    [warning] = doubtful_start(0, RANKS)
    assert warning.startswith("--nnodes=1:2 without TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: by torch's default a host")
    monkeypatch.setenv(resuming.OPENS_A_STORE, "1")
    assert doubtful_start(0, RANKS) == []
    assert doubtful_start(2, RANKS) == ["launch.max_restarts has no effect under torchrun; give it --max-restarts"]


def test_a_start_by_hand_or_by_srun_is_neither_refused_nor_doubted(tmp_path: Path) -> None:
    for ranks in (None, RankEnvironment(0, 2, 0, 1, starter="srun")):
        assert (start_problems(config_with(None), tmp_path, ranks), doubtful_start(0, ranks)) == ([], [])


# A run that has ended because a rank computed wrongly.


def corrupted(tmp_path: Path, last_step: int) -> None:
    verification = {"every": 10, "steps": 2, "last_step": last_step, "corruption": {"ranks": [1]}}
    RunResult(4, status="failed", error="rank 1 on n1 computes wrongly\n  its log", verification=verification).write(
        tmp_path
    )


def test_after_a_wrong_rank_a_run_goes_on_from_what_was_verified(tmp_path: Path) -> None:
    for step in (10, 20, 25, 30):
        checkpoint(tmp_path, step)
    config = config_with("auto")
    assert checkpoints_to_try(config, tmp_path)[0].name == "step-00000030"
    corrupted(tmp_path, 20)
    names = [path.name for path in checkpoints_to_try(config, tmp_path)]
    assert names == ["step-00000020", "step-00000010"]
    corrupted(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"each checkpoint is later than the last verified step; name the checkpoint"):
        checkpoints_to_try(config, tmp_path)


def test_after_a_wrong_rank_the_mirror_gives_no_later_checkpoint(tmp_path: Path) -> None:
    own = build(alone(), KINDS["Muon and AdamW"], 0, seed=0).save(tmp_path / "own")
    url = f"file://{tmp_path}/there"
    for step in (10, 20):
        Mirror(url).push(Path(shutil.copytree(own, tmp_path / "copies" / f"step-{step:08}")))
    config = config_with("auto")
    config.checkpoint.mirror = url
    corrupted(tmp_path, 10)
    assert [path.name for path in checkpoints_to_try(config, tmp_path)] == ["step-00000010"]


def test_a_wrong_rank_is_not_started_again_unless_its_host_is_dropped(attempts, tmp_path: Path, monkeypatch) -> None:
    tried = attempts(3)
    corrupted(tmp_path, 20)
    with pytest.raises(RunError, match="not started again: the same device would compute wrongly again"):
        tried.begin_next(FAILED)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    config = config_with("auto")
    [problem] = start_problems(config, tmp_path, RANKS)
    assert problem.startswith("train.on_corruption: got stop; rank 1 on n1 computes wrongly; start the run without")
    config.train.on_corruption = "drop"
    assert start_problems(config, tmp_path, RANKS) == []
    [problem] = start_problems(config, tmp_path, None)
    assert problem.startswith("train.on_corruption: got drop; it must be stop without torchrun --nnodes=MIN:MAX")
