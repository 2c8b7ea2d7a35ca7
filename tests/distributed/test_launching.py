"""Four ways in, one design: whoever starts the ranks, there is one config, one folder and the same bits.

Runs by hand and under torchrun are started as a user does, once each at least. What torchrun starts are new Pythons.
"""

import functools
import json
import os
import shlex
from pathlib import Path

import pytest
from commands import SHOWN_BY_HAND, SHOWN_SWEEP, TINY, Command, by_hand, by_torchrun, free_port, is_free, result_of
from omegaconf import OmegaConf

from zerotrain.config.compose import config_hash, from_values

STAGE_3 = ("zero.stage=3", "zero.bucket_mb=0.01")
SHOWN = shlex.split(SHOWN_BY_HAND)[2:]


@pytest.fixture(scope="module")
def hand_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, Path]:
    """`python launch.py` on two ranks, and its run folder."""
    folder = tmp_path_factory.mktemp("by_hand")
    command = by_hand(*SHOWN, *TINY, "zero.bucket_mb=0.01", folder=folder)
    assert command.wait() == 0, command.stderr
    [run_dir] = (folder / "outputs").glob("*/*")
    return command, run_dir


def test_a_run_by_hand_leaves_one_folder_with_all_its_files(hand_run):
    _, run_dir = hand_run
    names = {
        str(path.relative_to(run_dir)) for path in run_dir.rglob("*") if path.is_file() and ".hydra" not in path.parts
    }
    saved = {
        f"checkpoints/step-00000003/{name}"
        for name in ("manifest.json", *map("rank-{:05d}.safetensors".format, (0, 1)))
    }
    assert names - saved == {
        ".lock",
        "alive",
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "steps.jsonl",
        "ranks/0.log",
        "ranks/1.log",
    }
    assert names >= saved
    umask = os.umask(0o022)
    os.umask(umask)
    modes = {path.stat().st_mode & 0o777 for path in run_dir.rglob("*") if path.is_file()}
    assert modes == {0o666 & ~umask}


def test_the_result_says_what_ran(hand_run):
    _, run_dir = hand_run
    result = result_of(run_dir)
    assert (result["status"], result["error"], result["steps"]) == ("completed", None, 3)
    assert (result["world_size"], result["stage"]) == (2, 3)
    assert result["overrides"] == [*SHOWN, *TINY, "zero.bucket_mb=0.01"]
    assert result["config_hash"] == config_hash(from_values(OmegaConf.load(run_dir / "config.yaml")))


def test_rank_0_speaks_on_the_terminal_and_in_its_log_and_the_others_in_theirs(hand_run):
    command, run_dir = hand_run
    assert "step 3/3" in command.stdout
    assert "step 3/3" in (run_dir / "ranks/0.log").read_text()
    assert "step" not in (run_dir / "ranks/1.log").read_text()
    assert command.stdout.count("run folder: ") == 1
    assert command.stderr == ""
    assert command.wait_until_gone() == []


def test_under_torchrun_one_rank_composes_and_all_compute_the_same_bits(hand_run, tmp_path: Path):
    command = by_torchrun(*TINY, *STAGE_3, folder=tmp_path)
    assert command.wait() == 0, command.stderr
    [run_dir] = (tmp_path / "outputs").glob("*/*")
    assert {path.name for path in (run_dir / "ranks").iterdir()} == {"0.log", "1.log"}
    assert command.stdout.count("run folder: ") == 1
    assert result_of(run_dir)["weights_sha256"] == result_of(hand_run[1])["weights_sha256"]
    assert result_of(run_dir)["config_hash"] == result_of(hand_run[1])["config_hash"]


def test_two_machines_run_one_job_at_the_stage_that_rank_0_chooses(hand_run, tmp_path: Path, torchrun):
    run_dir = tmp_path / "folder that nobody made" / "run"
    rendezvous = ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={tmp_path / 'store'}")
    options = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-id=job", *rendezvous)
    arguments = (*TINY, "zero.stage=auto", f"hydra.run.dir={run_dir}")
    commands = [torchrun(*arguments, folder=tmp_path, options=options) for _ in range(2)]
    assert [command.wait() for command in commands] == [0, 0], [command.stderr for command in commands]
    assert sorted(command.stdout.count("run folder: ") for command in commands) == [0, 1]
    assert {path.name for path in (run_dir / "ranks").iterdir()} == {"0.log", "1.log"}
    assert (result_of(run_dir)["stage"], [*json.loads((run_dir / "plan.json").read_text())["stages"]]) == (1, [*"0123"])
    assert result_of(run_dir)["weights_sha256"] == result_of(hand_run[1])["weights_sha256"]


def task_of_slurm(rank: int, job: int) -> dict[str, str]:
    """What srun tells a task of a step of two, on two nodes."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "localhost,other"}
    own = {"SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{rank}", "SLURM_LOCALID": "0"}
    return {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_ID": "0", **step, **own}


def test_the_tasks_of_a_slurm_step_are_the_ranks_of_one_job(hand_run, tmp_path: Path, launch):
    """They trained a model each, without a word (2026-11-24)."""
    job = next(port for port in range(23_000, 30_000) if is_free(port)) - 20_000
    start = functools.partial(launch, *TINY, *STAGE_3, folder=tmp_path)
    commands = [start(**task_of_slurm(rank, job)) for rank in range(2)]
    assert [command.wait() for command in commands] == [0, 0], [command.stderr for command in commands]
    [run_dir] = (tmp_path / "outputs").iterdir()
    assert run_dir.name == f"slurm-{job}"
    assert {path.name for path in (run_dir / "ranks").iterdir()} == {"0.log", "1.log"}
    assert [command.stdout.count("run folder: ") for command in commands] == [1, 0]
    assert "to go on: srun ... python " in commands[0].stdout
    assert result_of(run_dir)["weights_sha256"] == result_of(hand_run[1])["weights_sha256"]


def test_a_sweep_goes_on_after_a_failed_job_and_compares_the_weights(hand_run, tmp_path: Path, launch):
    sweep = ("-m", "zero.stage=0,7,1", "launch.nproc_per_node=2", "hydra.sweep.dir=sweep")
    command = launch(*sweep, *TINY, folder=tmp_path)
    assert command.wait() == 1
    results = [result_of(tmp_path / "sweep" / job) for job in ("0", "1", "2")]
    assert [result["status"] for result in results] == ["completed", "failed", "completed"]
    refusal = "zero.stage: got 7; it must be 0, 1, 2 or 3, or auto; the default is 2"
    assert results[1]["error"] == refusal
    assert f"job 1: {refusal}" in command.stderr
    assert "Traceback" not in command.stderr
    sha256 = result_of(hand_run[1])["weights_sha256"]
    assert f"weights: 2 of 3 jobs have the same sha256 {sha256}" in command.stdout
    assert command.wait_until_gone() == []


@pytest.mark.slow
def test_under_torchrun_the_first_rank_drives_a_sweep_with_as_many_ranks(hand_run, tmp_path: Path, torchrun):
    _, *options, _, is_sweep, stages = shlex.split(SHOWN_SWEEP)
    arguments = (is_sweep, stages, *TINY, "hydra.sweep.dir=sweep")
    command = torchrun(*arguments, folder=tmp_path, options=tuple(options))
    assert command.wait() == 0, command.stderr
    results = [result_of(tmp_path / "sweep" / job) for job in ("0", "1")]
    assert [(result["status"], result["world_size"], result["stage"]) for result in results] == [
        ("completed", 2, 2),
        ("completed", 2, 3),
    ]
    sha256 = result_of(hand_run[1])["weights_sha256"]
    assert command.stdout.count(f"weights: 2 of 2 jobs have the same sha256 {sha256}") == 1
    assert command.stdout.endswith("/sweep/report.html\n")
    assert sha256 in (tmp_path / "sweep/report.html").read_text()
    assert not (tmp_path / "outputs").exists()


MY_MODELS = """
from zerotrain.models import MLP


class MyMLP(MLP):
    pass
"""


def test_one_rank_runs_a_class_from_the_working_folder_and_warns_of_settings_without_effect(tmp_path: Path):
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    arguments = (*TINY, "model._target_=my_models.MyMLP", "zero.stage=3", "zero.overlap=false", "hydra.run.dir=run")
    command = by_hand(*arguments, folder=tmp_path)
    assert command.wait() == 0, command.stderr
    assert result_of(tmp_path / "run")["world_size"] == 1
    assert command.stderr.splitlines() == [
        "warning: zero.stage=3 has no effect on memory with one rank; launch.nproc_per_node=2 starts two",
        "warning: zero.overlap=false has no effect with one rank; launch.nproc_per_node=2 starts two",
    ]


def test_under_torchrun_what_is_asked_for_is_printed_once(tmp_path: Path, torchrun):
    commands = [torchrun(option, folder=tmp_path) for option in ("--help", "--cfg=job")]
    assert [command.wait() for command in commands] == [0, 0], [command.stderr for command in commands]
    asked = ("docs/guides/change_stage.md", "bucket_mb: auto")
    assert [command.stdout.count(text) for command, text in zip(commands, asked, strict=True)] == [1, 1]
    assert not (tmp_path / "outputs").exists()


def test_a_sweep_over_several_machines_is_refused_by_one_rank_and_ends_on_all(tmp_path: Path, launch):
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    port = str(free_port())
    commands = [
        launch("-m", "zero.stage=0,1", folder=tmp_path, RANK=rank, MASTER_PORT=port, **ranks) for rank in ("0", "1")
    ]
    assert [command.wait() for command in commands] == [2, 2]
    assert [command.stderr.splitlines() for command in commands] == [
        ["-m: a sweep runs on one machine; with torchrun on several, start each job by itself"],
        ["rank 0 refused the settings; its terminal says why"],
    ]
