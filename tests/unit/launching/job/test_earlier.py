"""What lies in a run's folder already, and what becomes of it."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from zerotrain.checkpoint.manifest import MANIFEST
from zerotrain.config.compose import config_hash, save_config
from zerotrain.config.schema import CheckpointConfig, Config, LaunchConfig, TrainConfig
from zerotrain.launching.job import Job, write_refusal
from zerotrain.launching.resuming import completed_already, folder_problems
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
    checkpoint(tmp_path, 3)
    [problem] = folder_problems(config_with(None), tmp_path)
    assert "checkpoint.resume=auto goes on" in problem
    assert str(tmp_path) in problem
    assert folder_problems(config_with(None, overwrite=True), tmp_path) == []
    assert folder_problems(config_with("auto"), tmp_path) == []


def test_a_folder_with_the_name_of_a_checkpoint_is_found_before_a_save_meets_it(tmp_path: Path):
    (tmp_path / "checkpoints/step-00000003").mkdir(parents=True)
    assert "holds checkpoints" in folder_problems(config_with(None), tmp_path)[0]


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
    assert (result["status"], result["steps"], result["world_size"]) == ("completed", STEPS, 2)
    assert result["checkpoint"] == ("step-00000005" if with_checkpoints else None)


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
    "a list": "[]",
    "another status": '{"status": "done", "world_size": 1, "steps": 3, "overrides": []}',
    "a text of steps": '{"status": "completed", "world_size": 1, "steps": "3", "overrides": []}',
    "overrides of numbers": '{"status": "completed", "world_size": 1, "steps": 3, "overrides": [3]}',
    "a list as loss": '{"status": "completed", "world_size": 1, "steps": 3, "overrides": [], "final_val_loss": [1]}',
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
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
    "a link that leads nowhere": lambda path: path.symlink_to("gone"),
    "a file": Path.touch,
}
FILES = (
    "result.json",
    "metrics.jsonl",
    "config.yaml",
    "plan.json",
    ".hydra/config.yaml",
    ".hydra/overrides.yaml",
    "ranks/0.log",
)
FOLDERS = ("checkpoints", "checkpoints/step-00000003", "ranks", ".hydra")
FOREIGN = [(name, kind) for name in FILES for kind in MADE if kind != "a file"]
FOREIGN += [(name, kind) for name in FOLDERS for kind in MADE if kind != "a folder"]


@pytest.mark.parametrize(("name", "kind"), FOREIGN)
def test_what_lies_in_the_place_of_something_of_the_run_is_found_before_any_rank_starts(
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
