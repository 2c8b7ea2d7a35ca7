"""Of several failures the first cause is told."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist

from zerotrain.errors import CommError, ConfigError, DisagreementError
from zerotrain.launching.failures import Failure, RunError, first_failure
from zerotrain.launching.presence import Presence, RankState, read_states, seen_alive

LOST_PEER = RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9614")


def test_a_cause_fits_on_a_terminal_and_in_a_file(tmp_path: Path):
    Failure.from_error(ValueError("\x1b[2Jhalf \ud800 " + "x" * 5_000_000), 0).write(tmp_path)
    cause = first_failure(tmp_path).cause
    assert cause.startswith(r"failed: ValueError: \x1b[2Jhalf \ud800 xxx")
    assert len(cause) < 2200


KILLED, TERMINATED = -signal.SIGKILL, -signal.SIGTERM
MINE = ValueError("mine")


@pytest.mark.parametrize(
    ("errors", "ended", "rank", "says"),
    [
        ({2: ValueError("two"), 0: ValueError("zero")}, None, 2, "failed: ValueError: two"),  # the earliest
        ({0: LOST_PEER, 1: MINE}, None, 1, "failed: ValueError: mine"),
        ({0: CommError("timed out"), 1: MINE}, None, 1, "failed: ValueError: mine"),
        ({0: dist.DistBackendError("NCCL error"), 1: MINE}, None, 1, "failed: ValueError: mine"),
        (
            {0: CommError("timed out"), 1: DisagreementError("2 on rank 0, 1 on rank 1")},
            None,
            1,
            "failed: DisagreementError: 2 on rank 0, 1 on rank 1",
        ),
        ({1: ValueError("no path /gloo/ here")}, None, 1, "failed: ValueError: no path /gloo/ here"),
        ({0: LOST_PEER}, {0: 1, 1: KILLED, 2: TERMINATED}, 1, "was killed by SIGKILL (kill -9, or "),
        ({1: MINE}, {0: KILLED, 1: 1}, 1, "failed: ValueError: mine"),  # the other was ended because of it
        ({1: LOST_PEER}, {0: TERMINATED, 1: 1}, 1, "lost another rank: RuntimeError: "),
        ({1: LOST_PEER}, {0: 130, 1: 1}, 1, "lost another rank: RuntimeError: "),
        ({}, {3: 7}, 3, "ended with exit code 7"),
    ],
)
def test_the_first_cause_is_named(tmp_path, errors, ended, rank, says):
    for failing, error in errors.items():
        Failure.from_error(error, failing).write(tmp_path)
    failure = first_failure(tmp_path, ended)
    assert (failure.rank, failure.cause[: len(says)]) == (rank, says)


@pytest.mark.case("hosts: Ranks of one host", "a rank gets no more files, threads or memory")
@pytest.mark.parametrize(
    ("own", "says"),
    [
        (RuntimeError("[enforce fail at .../gloo/transport/tcp/loop.cc:48] pipe: Too many open files"), "ulimit -n"),
        (RuntimeError("[.../gloo/transport/tcp/device.cc] Resource temporarily unavailable"), "ulimit -u"),
        (CommError("rank 1 failed in the meeting: can't start new thread; ulimit -u", is_own=True), "ulimit -u"),
    ],
)
def test_a_rank_that_gets_no_more_files_or_threads_is_the_cause_and_has_not_lost_another(tmp_path, own, says):
    """Where gloo says so it counted as the loss of a peer (2026-11-23)."""
    Failure.from_error(LOST_PEER, 0).write(tmp_path)
    Failure.from_error(own, 1).write(tmp_path)
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.from_peers) == (1, False)
    assert failure.cause.startswith("failed: ")
    assert says in failure.cause


def test_the_user_reads_the_cause_and_the_path_of_the_log_and_of_a_config_problem_its_lines_alone(tmp_path: Path):
    error = Failure.from_error(ValueError("mine"), 1).as_error(tmp_path)
    assert isinstance(error, RunError)
    assert str(error).splitlines() == ["rank 1 failed: ValueError: mine", f"  its log: {tmp_path / '1.log'}"]
    Failure.from_error(ConfigError("a: wrong", "b: wrong"), 1).write(tmp_path)
    error = first_failure(tmp_path).as_error(tmp_path)
    assert isinstance(error, ConfigError)
    assert error.problems == ("a: wrong", "b: wrong")


def leave_state(ranks_dir: Path, rank: int, /, **said: object) -> None:
    """What a rank that is gone has left."""
    said = asdict(RankState(rank, "training")) | said
    (ranks_dir / f"{rank}.state").write_text(f"{0:<16}" + json.dumps(said))


def test_a_rank_that_is_gone_without_a_word_comes_before_the_stop_of_the_others(tmp_path: Path):
    leave_state(tmp_path, 0, stopped_by="SIGTERM", stopped_s=2.0, gone=[1])
    leave_state(tmp_path, 1)
    assert first_failure(tmp_path).rank == 1


def test_a_stop_that_all_ranks_have_heard_of_is_no_failure_though_one_missed_the_other(tmp_path: Path):
    leave_state(tmp_path, 0, stopped_by="SIGINT", stopped_s=2.0)
    leave_state(tmp_path, 1, stopped_by="SIGINT", stopped_s=2.1)
    Failure.from_error(LOST_PEER, 0).write(tmp_path)
    assert first_failure(tmp_path) is None


@pytest.mark.parametrize("told_in_time", [True, False])
def test_a_signal_to_one_rank_is_the_cause_of_what_the_others_noticed(tmp_path: Path, told_in_time: bool):
    leave_state(tmp_path, 1, stopped_by="SIGINT", stopped_s=2.0)
    if told_in_time:
        leave_state(tmp_path, 0, stopped_by="SIGTERM", stopped_s=2.5, gone=[1])
    else:
        Failure.from_error(LOST_PEER, 0).write(tmp_path)
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.cause) == (1, "was stopped by SIGINT, which only it received, in training")


@pytest.mark.parametrize("ends", [None, {1: -signal.SIGKILL}], ids=["torchrun", "by hand"])
def test_a_rank_that_dies_while_all_stop_in_order_is_the_cause(tmp_path: Path, ends):
    leave_state(tmp_path, 1, stopped_by="SIGTERM", stopped_s=2.0, in_order=True)
    Failure.from_error(LOST_PEER, 0).write(tmp_path)
    leave_state(tmp_path, 0, stopped_by="SIGTERM", stopped_s=2.0, in_order=True)
    failure = first_failure(tmp_path, ends, by_user=True)
    assert failure.rank == 1
    assert "was killed" in failure.cause


def test_a_rank_that_waits_in_vain_while_all_stop_in_order_is_told_of(tmp_path: Path):
    leave_state(tmp_path, 0, stopped_by="SIGTERM", stopped_s=2.0, in_order=True)
    Failure.from_error(CommError("rank 1 did not answer"), 0).write(tmp_path)
    assert first_failure(tmp_path, {0: 1}, by_user=True).cause.endswith("rank 1 did not answer")


@pytest.mark.parametrize("exitcode", [143, 130, 138, -signal.SIGUSR1, 140])
def test_ranks_that_the_user_has_stopped_before_their_training_have_not_failed(tmp_path: Path, exitcode: int):
    for rank in (0, 1):
        leave_state(tmp_path, rank, stopped_by="SIGTERM", stopped_s=2.0)
    assert first_failure(tmp_path, {0: exitcode, 1: exitcode}, by_user=True) is None
    assert first_failure(tmp_path, {0: exitcode, 1: exitcode}) is not None


def test_a_rank_that_is_there_and_does_not_answer_is_named_however_it_was_ended(tmp_path: Path):
    asleep = {1: "training, step 3", 3: "training, step 2"}
    waits = {0: (1, 3), 2: (0, 1)}  # rank 3 spoke late
    for rank, unheard in waits.items():
        error = CommError("timed out", unheard=unheard, where="gather of blocks.0 (step 3, forward)", waited_s=12.04)
        Failure.from_error(error, rank, asleep).write(tmp_path)
    Failure.from_error(LOST_PEER, 1).write(tmp_path)
    leave_state(tmp_path, 1)
    cause = (
        "did not answer for 12 s, last seen in training, step 3; rank 0 waited in gather of blocks.0 (step 3, forward)"
    )
    for end in (None, {0: 1, 1: -signal.SIGKILL}):
        failure = first_failure(tmp_path, end)
        assert (failure.rank, failure.cause) == (1, cause)
    Failure.from_error(ValueError("mine"), 2).write(tmp_path)
    assert first_failure(tmp_path).rank == 2


def test_a_rank_that_one_has_heard_and_another_missed_is_not_named(tmp_path: Path):
    asleep = {1: "training, step 3", 3: "training, step 2"}
    for rank, unheard in {0: (1, 3), 2: (3, 0)}.items():
        Failure.from_error(CommError("timed out", unheard=unheard, where="gather", waited_s=12.0), rank, asleep).write(
            tmp_path
        )
    failure = first_failure(tmp_path)
    assert (failure.rank, failure.cause.partition(";")[0]) == (
        3,
        "did not answer for 12 s, last seen in training, step 2",
    )


def test_the_clock_of_a_machine_does_not_decide_what_came_first(tmp_path: Path, monkeypatch):
    Failure.from_error(ValueError("first"), 1).write(tmp_path)
    time.sleep(0.05)  # the kernel dates files by ticks of up to 10 ms, before time.time()
    late = time.time() - 3600.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: late)
        Failure.from_error(ValueError("second"), 0).write(tmp_path)
        stopped = Presence(tmp_path, 2)
        stopped.note_stop(signal.SIGTERM)
    assert first_failure(tmp_path).cause == "failed: ValueError: first"
    [state] = [state for state, _ in read_states(tmp_path)]
    assert abs(state.stopped_s - time.time()) < 600.0


def test_a_rank_that_another_saw_alive_when_it_failed_was_ended_because_of_that(tmp_path: Path):
    Failure.from_error(CommError("timed out"), 0, saw_alive={1: "training"}).write(tmp_path)
    leave_state(tmp_path, 1)
    assert first_failure(tmp_path, {1: -signal.SIGKILL}).rank == 0
    leave_state(tmp_path, 1, stopped_by="SIGTERM", stopped_s=time.time() + 1.0, gone=[0])
    for ends in (None, {0: 1, 1: 130}):  # by torchrun, and by hand
        assert first_failure(tmp_path, ends).rank == 0


def foreign(ranks_dir: Path, *names: str) -> None:
    """What nobody may wait for, or believe."""
    for name in names:
        os.mkfifo(ranks_dir / f"7.{name}")
        (ranks_dir / f"8.{name}").symlink_to("/dev/zero")
        (ranks_dir / f"9.{name}").mkdir()
        (ranks_dir / f"10.{name}").write_text("[" * 5000)
        (ranks_dir / f"11.{name}").write_text(f"{'3':<16}[1]")
        (ranks_dir / f"x.{name}").write_bytes(b"\xff\xfe")


def test_what_is_none_of_the_ranks_is_neither_waited_for_nor_believed(tmp_path: Path, monkeypatch):
    foreign(tmp_path, "error.json", "state")
    assert read_states(tmp_path) == []
    assert first_failure(tmp_path) is None
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")
    os.mkfifo(tmp_path / "1.error.json.0.tmp")
    (tmp_path / "mine").write_text("kept")
    (tmp_path / "2.error.json.0.tmp").symlink_to("mine")
    for rank in (1, 2):
        Failure.from_error(ValueError(f"rank {rank}"), rank).write(tmp_path)
    assert first_failure(tmp_path).rank == 1
    assert (tmp_path / "mine").read_text() == "kept"
    presence = Presence(tmp_path, 7)
    assert [state.rank for state, alive in read_states(tmp_path) if alive] == [7]
    presence.leave()


@pytest.mark.parametrize("field", ["rank", "pid", "gone", "in_order"])
def test_a_state_of_another_kind_is_none(tmp_path: Path, field: str):
    for wrong in (None, -1, 10**30, "\x1b[2J", [[]], {"a": 1}, 0.5):
        leave_state(tmp_path, 0, **{field: wrong})
        assert read_states(tmp_path) == []
        assert seen_alive(tmp_path, 1) == {}
        assert first_failure(tmp_path) is None


@pytest.mark.parametrize("field", ["rank", "cause", "problems", "time_s", "saw_alive", "unheard", "waited_s"])
def test_a_failure_of_another_kind_is_none(tmp_path: Path, field: str):
    Failure(rank=1, cause="failed: x").write(tmp_path)
    path = tmp_path / "1.error.json"
    said = json.loads(path.read_text())
    found = first_failure(tmp_path)
    assert found.cause == "failed: x"
    path.write_text(json.dumps(said | {field: [{"a": []}]}))
    assert first_failure(tmp_path) is None


def test_a_cause_out_of_a_file_is_told_without_what_a_terminal_obeys(tmp_path: Path):
    Failure(rank=1, cause="x").write(tmp_path)
    path = tmp_path / "1.error.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"cause": "\x1b[2J\u202egnp"}))
    found = first_failure(tmp_path)
    assert all(line.isprintable() for line in str(found.as_error(tmp_path)).splitlines())


# ---- several hosts


@pytest.mark.parametrize(
    ("asleep", "expected"),
    [
        ([0, 1], "the whole run was suspended for 321 s, which counts as waiting for other ranks: launch.timeout_s"),
        ([0], "rank 0 was suspended for 321 s, which counts"),
        ([1], "rank 1 did not answer for 330 s, last seen in training, step 18; rank 0 waited in gather of a (step 18"),
    ],
)
def test_a_suspension_is_the_cause_where_the_rank_that_missed_others_first_was_suspended_itself(
    tmp_path: Path, asleep: list[int], expected: str
):
    ranks = [Presence(tmp_path, rank) for rank in range(2)]
    for rank in ranks:
        rank.enter("training")
        rank.begin(18)
    for rank in asleep:
        ranks[rank].note_suspension(321.4)
    for rank, unheard in ((0, (1,)), (1, ())):  # rank 1 has read what rank 0 left
        error = CommError("timed out", unheard=unheard, where="gather of a (step 18, forward)", waited_s=330.0)
        Failure.from_error(error, rank, seen_alive(tmp_path, rank)).write(tmp_path)
    assert first_failure(tmp_path).describe(tmp_path).startswith(expected)
    for rank in ranks:
        rank.leave()


def test_a_short_suspension_is_not_the_cause(tmp_path: Path):
    presence = Presence(tmp_path, 0)
    presence.note_suspension(7.0)
    Failure.from_error(CommError("timed out", where="gather", waited_s=300.0), 0).write(tmp_path)
    assert "timed out" in first_failure(tmp_path).cause
    presence.leave()


@pytest.fixture
def on_hosts(tmp_path: Path, monkeypatch) -> Iterator[list[Presence]]:
    """Ranks 0 and 1 on n0, 2 and 3 on n1, 4 and 5 on n2, all of them at work."""
    ranks = []
    for rank in range(6):
        monkeypatch.setattr(socket, "gethostname", lambda rank=rank: f"n{rank // 2}")
        ranks.append(Presence(tmp_path, rank))
        ranks[-1].enter("training")
        ranks[-1].begin(18)
    yield ranks
    for each in ranks:
        end(each)


def end(rank: Presence) -> None:
    """Release its lock, as the death of its process does. The number stays in use: a forked child closes it."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), rank._descriptor)


def missed(tmp_path: Path, rank: int, unheard: tuple[int, ...]) -> None:
    error = CommError("timed out", unheard=unheard, where="gather of a (step 18, forward)", waited_s=40.0)
    Failure.from_error(error, rank, seen_alive(tmp_path, rank)).write(tmp_path)


def test_on_several_hosts_a_rank_is_told_with_its_host(on_hosts: list[Presence], tmp_path: Path):
    Failure.from_error(ValueError("mine"), 2).write(tmp_path)
    assert first_failure(tmp_path).describe(tmp_path).startswith("rank 2 on n1 failed: ValueError: mine\n")


def test_a_host_that_is_gone_with_all_its_ranks_is_told_as_one(on_hosts: list[Presence], tmp_path: Path):
    end(on_hosts[3])
    assert first_failure(tmp_path).describe(tmp_path).startswith("rank 3 on n1 was killed or exited without")
    end(on_hosts[2])
    assert first_failure(tmp_path).describe(tmp_path).startswith("n1 (ranks 2, 3) is gone: killed or ended without")


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (
            [(0, (2, 3))],
            "n1 (ranks 2, 3) is gone: did not answer for 40 s, last seen in training, step 18; rank 0 on n0",
        ),
        ([(0, (2, 3)), (3, (0, 1, 4, 5))], "n1 (ranks 2, 3) is gone"),
        ([(3, (0, 1, 4, 5)), (0, (2, 3))], "n1 (ranks 2, 3) reached no other host for 40 s; rank 3 waited in gather"),
        ([(0, (3,))], "rank 3 on n1 did not answer for 40 s"),
        ([(0, (2, 3)), (4, (3,))], "rank 3 on n1 did not answer for 40 s"),
    ],
    ids=["gone", "who is cut off comes later", "who is cut off comes first", "one of its ranks", "one of them spoke"],
)
def test_a_host_that_does_not_answer_is_named_and_the_first_ending_stays(on_hosts, tmp_path, told, says):
    """The host that was cut off wrote over the ending of the others, and blamed its own neighbour (2026-11-24)."""
    for rank, unheard in told:
        missed(tmp_path, rank, unheard)
    assert first_failure(tmp_path).describe(tmp_path).startswith(says)
