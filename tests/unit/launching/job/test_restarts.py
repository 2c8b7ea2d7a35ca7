"""When ranks are started again after a failure, from where, and what is said."""

from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from zerotrain.config.schema import Config, LaunchConfig
from zerotrain.launching.failures import RunError
from zerotrain.launching.job import Job
from zerotrain.launching.resuming import Attempts, going_on, newest_step, with_run_dir

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


def save(run_dir: Path, step: int) -> None:
    folder = run_dir / f"checkpoints/step-{step:08}"
    folder.mkdir(parents=True)
    (folder / "manifest.json").touch()


def test_without_restarts_the_failure_is_the_end(attempts):
    with pytest.raises(RunError) as raised:
        attempts(0).begin_next(FAILED)
    assert raised.value is FAILED


def test_each_restart_is_told_with_the_first_cause_and_where_it_goes_on(attempts, tmp_path: Path):
    tried = attempts(3)
    assert tried.begin_next(FAILED) == f"{CAUSE}; restart 1 of 3 from the start\n{LOG}"
    save(tmp_path, 200)
    assert tried.begin_next(FAILED) == f"{CAUSE}; restart 2 of 3 from step 200\n{LOG}"
    assert tried.job.restarts == 2


@pytest.mark.case("stopping", "ranks fail again and again")
@pytest.mark.parametrize("saved", [False, True])
def test_two_restarts_in_a_row_without_a_newer_checkpoint_are_the_last(attempts, tmp_path: Path, saved: bool):
    if saved:
        save(tmp_path, 100)  # of an earlier run: no progress of this one
    tried = attempts(9)
    tried.begin_next(FAILED)
    tried.begin_next(FAILED)
    with pytest.raises(RunError) as raised:
        tried.begin_next(FAILED)
    assert str(raised.value).splitlines() == [
        CAUSE,
        LOG,
        "  gave up: the last 2 restarts wrote no newer checkpoint",
    ]


def test_progress_between_them_allows_more_up_to_the_number_that_was_set(attempts, tmp_path: Path):
    tried = attempts(4)
    for number in range(4):
        tried.begin_next(FAILED)
        if number % 2:
            save(tmp_path, 10 * number)
    with pytest.raises(RunError, match=r"given up: launch\.max_restarts=4"):
        tried.begin_next(FAILED)


def test_progress_once_is_none_of_the_restarts_behind_it(attempts, tmp_path: Path):
    tried = attempts(9)
    tried.begin_next(FAILED)
    save(tmp_path, 100)
    for _ in range(2):
        tried.begin_next(FAILED)
    with pytest.raises(RunError, match="gave up: the last 2 restarts wrote no newer checkpoint"):
        tried.begin_next(FAILED)
    assert tried.job.restarts == 3


def test_a_run_without_its_folder_is_not_started_again(attempts, tmp_path: Path):
    tried = attempts(3)
    tried.job.ranks_dir.rmdir()
    with pytest.raises(RunError) as raised:
        tried.begin_next(FAILED)
    assert raised.value is FAILED


def test_what_is_whole_counts_by_the_number_of_its_step(tmp_path: Path):
    assert newest_step(tmp_path) is None
    for step in (900, 100000000, 1000):
        save(tmp_path, step)
    (tmp_path / "checkpoints/step-200000000").mkdir()  # without a manifest: it was being written
    (tmp_path / "checkpoints/mine").mkdir()
    (tmp_path / "checkpoints/mine/manifest.json").touch()
    assert newest_step(tmp_path) == 100000000


def test_a_restart_resumes_from_its_own_folder_once_something_is_saved_there(tmp_path: Path):
    job = Job(config=Config(), run_dir=tmp_path, overrides=[], resume_from=["elsewhere"])
    assert going_on(job) is job
    save(tmp_path, 10)
    save(tmp_path, 20)
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
