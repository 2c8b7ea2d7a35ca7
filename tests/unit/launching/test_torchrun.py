"""What ranks that torchrun has started tell each other, and how one ends if its job does not complete."""

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from zerotrain.comm import meeting as stores
from zerotrain.comm.environment import RankEnvironment
from zerotrain.config.schema import Config
from zerotrain.errors import CommError, ConfigError
from zerotrain.launching import exits, torchrun
from zerotrain.launching.failures import Failure
from zerotrain.launching.job import Job
from zerotrain.launching.resuming import with_run_dir
from zerotrain.launching.torchrun import JobExchange, prepare_everywhere
from zerotrain.training.result import RunResult

# Machines without a common folder: each prepares its data before the ranks meet, and all wait for it.


NUM_RANKS, RANKS_OF_A_MACHINE = 4, 2


def everywhere(folder: Path, prepare: Callable[[int], object], timeout_s: float = 30.0) -> list[BaseException | None]:
    """What came of it on each of four ranks of two machines."""
    came: list[BaseException | None] = [None] * NUM_RANKS

    def run(rank: int) -> None:
        store = dist.FileStore(str(folder / "store"), NUM_RANKS)
        ranks = RankEnvironment(rank, NUM_RANKS, rank % RANKS_OF_A_MACHINE, RANKS_OF_A_MACHINE)
        try:
            prepare_everywhere(store, ranks, lambda: prepare(rank), timeout_s)
        except BaseException as error:
            came[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return came


@pytest.mark.case(
    "data: Text",
    "machines without a common folder",
    "each prepares before the ranks meet, as long as it takes; a machine that cannot is named on all ranks",
)
def test_one_rank_of_each_other_machine_prepares_and_all_wait_for_longer_than_a_collective_may(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(torchrun, "REMINDER_S", 0.3)
    monkeypatch.setattr(torchrun, "_BEAT_S", 0.05)
    prepared = []

    def prepare(rank: int) -> None:
        time.sleep(1.5)
        prepared.append(rank)

    assert everywhere(tmp_path, prepare, timeout_s=0.5) == [None] * NUM_RANKS
    assert prepared == [2]
    lines = capfd.readouterr().err.splitlines()
    assert lines
    assert all(line.startswith("rank 0 waits for the machine of rank 2 to prepare its data (") for line in lines)


@pytest.mark.case("data: Text", "machines without a common folder")
def test_a_machine_that_cannot_is_told_on_all_ranks(tmp_path):
    def prepare(rank: int) -> None:
        raise ConfigError("data.cache_dir=x has no room", "and more")

    came = everywhere(tmp_path, prepare)
    assert [str(error) for error in came if error is not came[2]] == [
        "rank 2: data.cache_dir=x has no room\nrank 2: and more"
    ] * 3
    assert all(isinstance(error, ConfigError) for error in came)


@pytest.mark.case("data: Text", "machines without a common folder")
def test_a_machine_of_which_nothing_is_heard_any_more_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(torchrun, "_BEAT_S", 60.0)  # nothing after the first

    came = everywhere(tmp_path, lambda rank: time.sleep(2.0), timeout_s=0.5)
    for rank in (0, 1, 3):
        error = came[rank]
        assert isinstance(error, CommError)
        assert error.unheard == (2,)
        assert str(error).startswith("rank 2 prepares the data of its machine, and did not answer for ")


@pytest.fixture
def exchange(tmp_path: Path, monkeypatch):
    """(rank, arguments of its command line) -> a rank that has come; there are two."""

    def come(rank: int, *arguments: str) -> JobExchange:
        monkeypatch.setattr("sys.argv", ["launch.py", *arguments])
        return JobExchange(RankEnvironment(rank, 2, 0, 1, store_file=str(tmp_path / "store")))

    return come


def test_a_job_passes_to_a_rank_of_the_same_command_line_in_whatever_order(exchange, tmp_path: Path):
    second = exchange(1, "seed=1", "zero.stage=3")
    first = exchange(0, "zero.stage=3", "seed=1")
    first.require_same_commands(10.0)
    first.publish(Job(config=Config(seed=1), run_dir=tmp_path, overrides=["seed=1"]))
    first.withdraw(exits.COMPLETED)
    job = second.receive()
    assert job is not None
    assert (job.config, job.run_dir, job.overrides) == (Config(seed=1), tmp_path, ["seed=1"])


def test_a_rank_of_another_command_line_refuses_the_job_on_all(exchange):
    second = exchange(1, "seed=1", "zero.stge=3", "data.path=a b")
    first = exchange(0, "seed=1", "zero.stage=3", "train.max_steps=2")
    said = []
    for call in (lambda: first.require_same_commands(10.0), second.receive):
        with pytest.raises(ConfigError) as refused:
            call()
        said.append(str(refused.value))
    told = (
        "rank 1: its command line differs from that of rank 0: it has zero.stge=3 'data.path=a b' "
        "and lacks zero.stage=3 train.max_steps=2; start every machine with the same command line"
    )
    assert said == [told, told]


@pytest.mark.case("stopping", "`torchrun --max-restarts`")
def test_ranks_that_torchrun_starts_again_go_on_in_the_folder_of_the_first_and_see_nothing_else_of_them(
    exchange, tmp_path: Path, monkeypatch
):
    """The default folder has the time in its name."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first = exchange(0)
    assert first.run_dir_before() is None
    first.publish(Job(config=Config(seed=1), run_dir=tmp_path / "first", overrides=[]))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(stores, "_opened", {})  # as in new processes
    second = exchange(1, "launch.start_timeout_s=0.2")
    with pytest.raises(CommError, match="rank 0 did not come"):
        second.receive()
    again = exchange(0, "launch.start_timeout_s=0.2")
    assert again.run_dir_before() == tmp_path / "first"
    sys.argv[1:] = with_run_dir(sys.argv[1:], tmp_path / "first")
    again.require_same_commands(10.0)  # what each was started with, not what it makes of it
    again.publish(Job(config=Config(seed=2), run_dir=tmp_path / "first", overrides=[]))
    assert second.receive().config.seed == 2


def test_without_a_job_there_is_none_and_without_rank_0_the_wait_ends(exchange, tmp_path: Path):
    second = exchange(1, "launch.start_timeout_s=0.2")
    with pytest.raises(CommError, match=r"rank 0 did not come within 0\.2 s \(launch\.start_timeout_s\); start all "):
        second.receive()
    threading.Timer(0.3, exchange(0, "--help").withdraw, (exits.COMPLETED,)).start()
    assert second.receive() is None


@pytest.mark.parametrize(
    ("code", "kind", "told"),
    [
        (exits.CONFIG_PROBLEM, ConfigError, "rank 0 refused the settings; its terminal says why"),
        (exits.FAILED, CommError, "rank 0 ended before it sent the other ranks a job; its terminal says why"),
        (exits.of_signal(2), CommError, "rank 0 ended before it sent the other ranks a job; its terminal says why"),
    ],
)
def test_what_rank_0_has_refused_or_failed_at_is_no_success_of_the_others_and_it_waits_until_they_have_heard(
    exchange, monkeypatch, code: int, kind: type[Exception], told: str
):
    """They ended with exit code 0, and torchrun's agent of their machine waited for rank 0's (2026-11-23)."""
    monkeypatch.setattr(torchrun, "_HEARING_S", 1e6)
    second, first = exchange(1), exchange(0, "zero.stage=9")
    withdrawing = threading.Thread(target=first.withdraw, args=(code,), daemon=True)
    withdrawing.start()
    withdrawing.join(0.5)
    assert withdrawing.is_alive() == (code != exits.of_signal(2))
    monkeypatch.setattr(torchrun, "_HEARING_S", 0.2)
    with pytest.raises(kind) as ended:
        second.receive()
    assert str(ended.value) == told
    withdrawing.join(30.0)
    assert not withdrawing.is_alive()


def test_rank_0_does_not_wait_for_ever_for_ranks_that_never_come(exchange, monkeypatch):
    monkeypatch.setattr(torchrun, "_HEARING_S", 0.2)
    exchange(0).withdraw(exits.CONFIG_PROBLEM)


# The end of a rank, and of its job.


@pytest.mark.parametrize(("error", "code"), [(ConfigError("seed: 0 there, 7 here"), 2), (OSError("lost"), 1)])
def test_the_result_of_a_job_has_the_exit_code_of_the_first_failure(tmp_path: Path, error, code):
    """It had 1 where a rank had refused a setting, and torchrun's own code tells no more (2026-11-29)."""
    job, terminal = Job(config=Config(), run_dir=tmp_path, overrides=[]), io.StringIO()
    job.ranks_dir.mkdir()
    Failure.from_error(error, rank=1).write(job.ranks_dir)
    torchrun._settle(job, RankEnvironment(0, 2, 0, 2), terminal)
    result = RunResult.read(tmp_path / "result.json")
    assert (result.status, result.exit_code) == ("failed", code)
    assert result.error is not None
    assert str(error) in result.error == terminal.getvalue().removesuffix("\n")
