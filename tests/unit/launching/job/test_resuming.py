import sys
from pathlib import Path

import pytest

from zerotrain.checkpoint.manifest import MANIFEST
from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.schema import Config, LaunchConfig, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.launching import resuming


def checkpoint(run_dir: Path, step: int) -> Path:
    """What looks like one from outside."""
    path = run_dir / "checkpoints" / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / MANIFEST).write_text("{}")
    return path


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


@pytest.mark.parametrize(("given", "taken"), [(None, 7), (2, 2)])
def test_a_rank_has_as_many_threads_as_before_on_the_cpu(given, taken):
    config = Config(launch=LaunchConfig(threads_per_rank=given, device="cpu"))
    said = resuming.take_from(Saved(5, 1, threads=7), config, 1, 1)
    assert config.launch.threads_per_rank == taken
    assert ["launch.threads_per_rank=7, as in the checkpoint" in line for line in said] == [True] * (given is None)


@pytest.mark.parametrize(("saved", "is_taken"), [(-1, False), (10_000, True), (10_001, False)])
def test_a_number_of_threads_that_no_run_had_is_not_taken(saved, is_taken):
    config = Config(launch=LaunchConfig(device="cpu"))
    said = resuming.take_from(Saved(5, 1, threads=saved), config, 1, 1)
    assert (config.launch.threads_per_rank, bool(said)) == (saved if is_taken else None, is_taken)


def test_a_checkpoint_beyond_the_last_step_is_refused():
    with pytest.raises(ConfigError, match=r"train.max_steps: got 4; it must be 5 or more"):
        resuming.take_from(Saved(5, 1), Config(train=TrainConfig(max_steps=4)), 1, 1)


def test_how_far_a_run_of_epochs_goes_is_told_by_the_data():
    config = Config(train=TrainConfig(max_steps=None, num_epochs=1.0))
    assert resuming.take_from(Saved(5, 1), config, 1, 1) == []


@pytest.mark.parametrize(
    ("argv", "ranks", "command"),
    [
        (["launch.py"], None, "python launch.py hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto"),
        (
            ["python -m zerotrain", "--config-dir", "my conf", "-m"],
            (2, 2),
            "torchrun --nproc-per-node 2 -m zerotrain hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto "
            "--config-dir 'my conf'",
        ),
        (
            ["launch.py"],
            (2, 4),
            "torchrun ... launch.py hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto",
        ),
        (
            ["launch.py"],
            (2, 2, "srun"),
            "srun --ntasks 2 python launch.py hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto",
        ),
        (
            ["launch.py"],
            (2, 4, "srun"),
            "srun ... python launch.py hydra.run.dir=out a=1 train.max_steps=8 checkpoint.resume=auto",
        ),
    ],
)
def test_the_command_to_go_on_is_that_of_the_run_and_says_where(monkeypatch, argv, ranks, command):
    monkeypatch.setattr(sys, "argv", argv)
    overrides = ["a=1", "train.num_epochs=4", "++train.max_tokens=4", "train.max_steps=null"]
    overrides += ["+checkpoint.resume=x", "hydra.run.dir=else", "launch.overwrite=true"]
    started = ranks and RankEnvironment(0, ranks[1], 0, ranks[0], starter=ranks[2] if ranks[2:] else "torchrun")
    assert resuming.command_to_go_on(overrides, Path("out"), started, "train.max_steps=8") == command


@pytest.mark.parametrize(
    ("environment", "more", "begins"),
    [
        ({"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}, [], "scontrol requeue 12; when "),
        (
            {"SLURM_JOB_ID": "12", "SLURM_ARRAY_JOB_ID": "11", "SLURM_ARRAY_TASK_ID": "3", "ENVIRONMENT": "BATCH"},
            [],
            "scontrol requeue 11_3; when ",
        ),
        ({"SLURM_JOB_ID": "12", "ENVIRONMENT": "BATCH"}, ["train.max_steps=8"], "srun --ntasks 2 python "),
        ({"SLURM_JOB_ID": "12"}, [], "srun --ntasks 2 python "),
        ({"ENVIRONMENT": "BATCH"}, [], "srun --ntasks 2 python "),
    ],
)
def test_a_stopped_job_of_sbatch_goes_on_by_its_own_script(monkeypatch, environment, more, begins):
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "ENVIRONMENT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = RankEnvironment(0, 2, 0, 2, starter="srun")
    command = resuming.command_to_go_on(["a=1"], Path("out"), started, *more)
    assert command.startswith(begins)
    assert "hydra.run.dir=out " in command
    assert command.endswith("checkpoint.resume=auto")
