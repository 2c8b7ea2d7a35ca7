"""Ranks that share their memory, under attack: kills, no room, a limit, a rank that is stopped, two runs at once, and
another user."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import REPOSITORY, TINY, Command, by_hand, result_of

from tests.chaos.shared import MOMENT, STAGES, plan
from tests.chaos.shared_places import BUILDING, COLLECTIVES, MEETING, STEP
from tests.chaos.strike import Strike
from zerotrain.testing.limits import HANG_S

HERE = Path(__file__).parent
NUM_KILLS = 25
"""Each place once, and some moments; `make chaos` has 50. Every second of them without --all-rows."""
MIB = 2**20
TWO_RANKS = "launch.nproc_per_node=2"
RUN = (
    *TINY,
    "model.hidden_size=256",
    "zero.stage=2",
    "zero.bucket_mb=0.25",
    "train.max_steps=40",
    "checkpoint.save_at_end=false",
    "hydra.run.dir=run",
    TWO_RANKS,
)
"""Several buckets of more than a MB together, so that a /dev/shm of 1 MB would not do."""
ENDLESS = "train.max_steps=10000000"
NOBODY = 65534
NUM_STRANGERS = 40
"""More than ranks would connect."""


def completed(command: Command) -> str:
    """The hash of the weights of a run that has trained to its end, and left no process."""
    assert command.wait() == 0, command.stdout + command.stderr
    assert command.wait_until_gone() == []
    return str(result_of(command.folder / "run")["weights_sha256"])


def shared_memory(command: Command) -> bool:
    """Whether a run's ranks have read each other's memory, by what its start says."""
    return "\nsockets " not in command.stdout


@pytest.fixture
def wanted(launch, once: Callable[[str, Callable[[], Any]], Any], tmp_path: Path) -> str:
    """The hash of the weights of the run alone."""

    def alone() -> str:
        (tmp_path / "alone").mkdir()
        command = launch(*RUN, folder=tmp_path / "alone")
        sha256 = completed(command)
        assert shared_memory(command)
        return sha256

    return str(once("shared memory, alone", alone))


# ---- kills


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "50 kills of a rank or the launcher: while they meet, build, gather, reduce, update, on "
    "either thread, at any moment; 2 and 3 ranks, stages 0 to 3",
)
def test_kills_are_of_all_stages_and_kinds_of_places() -> None:
    every_place = {*MEETING, *BUILDING, *COLLECTIVES, *STEP, MOMENT}
    assert {strike.place for strike in plan(NUM_KILLS, seed=0)} == every_place
    strikes = plan(50, seed=0)
    assert len(strikes) == 50
    assert {strike.place for strike in strikes} == every_place
    assert {(strike.stage, strike.num_ranks) for strike in strikes} == {(s, n) for s in STAGES for n in (2, 3)}
    assert {strike.rank for strike in strikes} == {0, 1, 2}
    assert {strike.victim for strike in strikes} == {"itself", "another", "parent"}
    assert sum(strike.place == MOMENT for strike in strikes) >= 10
    assert strikes == plan(50, seed=0) != plan(50, seed=1)
    assert all(isinstance(strike, Strike) for strike in strikes)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "50 kills of a rank or the launcher: while they meet, build, gather, reduce, update, on "
    "either thread, at any moment; 2 and 3 ranks, stages 0 to 3",
    "all end in bounded time, and the cause names the dead process; no process, memory, address "
    "or file is left, except the small folder that a killed launcher could not remove",
)
@pytest.mark.timeout(6 * HANG_S)  # 25 runs
@pytest.mark.waits
def test_kills_leave_nothing_behind_and_name_who_is_gone(all_rows: bool, tmp_path: Path) -> None:
    """No process, no descriptor or mapping of the memory, no address, nothing in /dev/shm or $TMPDIR."""
    some = [str(number) for number in range(0, NUM_KILLS, 1 if all_rows else 2)]
    options = [f"--kills={NUM_KILLS}", f"--out={tmp_path / 'out'}", "--only", *some]
    command = [sys.executable, "-m", "tests.chaos.shared", *options]
    with memory_group(f"kills-{tmp_path.name}", None) as group:
        inside = command if group is None else [*entering(group), *command]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(inside, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "out/report.json").read_text())
        assert [each["problems"] for each in report] == [[]] * len(some)
        assert all(each["has_struck"] for each in report), done.stdout
        assert group is None or shared_nbytes(group) == 0


# ---- room


@pytest.mark.case("hosts: Ranks of one host, which read each other's memory", "/dev/shm is small or not there")
def test_a_dev_shm_of_one_mb_changes_nothing(wanted: str, tmp_path: Path) -> None:
    mounting = "mount --make-rprivate / && mount -t tmpfs -o size=1m tmpfs /dev/shm"
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mounting], capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        pytest.skip(f"may mount nothing of its own: {tried.stderr.strip()}")
    launch = (sys.executable, str(REPOSITORY / "launch.py"), *RUN)
    told = 'df -k --output=size,used /dev/shm; "$@"; code=$?; df -k --output=size,used /dev/shm; exit $code'
    command = Command(["unshare", "-m", "sh", "-c", f"{mounting} && {told}", "sh", *launch], tmp_path)
    assert completed(command) == wanted
    assert shared_memory(command)
    assert re.findall(r"^ *1024 +(\d+)$", command.stdout, re.MULTILINE) == ["0", "0"]


FORBIDDEN = {
    "memfd_create|ENOSYS|0,1": "rank 0: it cannot make memory that others can read: [Errno 38]",
    "fallocate|ENOSPC|1": "rank 1: it cannot make memory that others can read: cannot allocate 4096 bytes",
    "preadv|EPERM|1": "rank 1: it cannot make memory that others can read: cannot read another rank's memory",
}

UNREADY = {"PYTHONPATH": os.pathsep.join([str(HERE / "unready"), str(REPOSITORY)]), "OPENBLAS_NUM_THREADS": "2"}
"""Ranks that import unready/sitecustomize.py: a thread makes them new Pythons."""


def without(call: str, folder: Path, *settings: str, later: str = "") -> Command:
    if platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("knows the numbers of the calls on no other machine")
    return by_hand(*RUN, *settings, folder=folder, ZEROTRAIN_FORBIDDEN=f"{call}|{later}", **UNREADY)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a system that gives no such memory, no room in it, or forbids to read it",
    "as above; tried before the ranks agree on it",
)
@pytest.mark.parametrize("call", FORBIDDEN)
@pytest.mark.thinned(2)
def test_where_there_is_no_such_memory_at_all_ranks_send_by_sockets_and_say_why(
    call: str, wanted: str, tmp_path: Path
) -> None:
    """Of a system that gives none, or no room in it, or forbids to read it: the last two ended the run (2026-11-22)."""
    command = without(call, tmp_path)
    assert completed(command) == wanted
    [said] = re.findall(r"^sockets (.*?)^\w", command.stdout, re.MULTILINE | re.DOTALL)
    assert " ".join(said.split()).startswith(FORBIDDEN[call])


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "room runs out in the training",
    "one line with rank and cause; nobody waits, and no signal",
)
def test_where_room_runs_out_in_the_training_one_line_names_rank_and_cause(tmp_path: Path) -> None:
    """When the stage is to change there is no more of it; no signal, and nobody waits."""
    command = without("fallocate|ENOSPC|1", tmp_path, ENDLESS, later=str(tmp_path))
    command.wait_for_text(tmp_path / "run/ranks/0.log", "step 1/")
    assert shared_memory(command)
    (tmp_path / "forbid").touch()
    command.wait_for_text(tmp_path / "forbidden", "")
    (tmp_path / "run/control.yaml").write_text("stage: 3\n")
    assert command.wait() == 1
    cause = r"rank 1 failed: RuntimeError: cannot allocate \d+ bytes of memory for other ranks to read: \[Errno 28\]"
    assert re.match(cause, command.stderr), command.stderr
    assert command.stderr.count("\n") == 2
    assert re.match(cause, result_of(tmp_path / "run")["error"])
    assert command.wait_until_gone() == []


# ---- a limit of memory

IS_V1 = Path("/sys/fs/cgroup/memory").is_dir()
GROUPS = Path("/sys/fs/cgroup/memory" if IS_V1 else "/sys/fs/cgroup")
LIMIT = "memory.limit_in_bytes" if IS_V1 else "memory.max"
LARGE = (
    *RUN,
    "model.hidden_size=1024",
    "model.num_layers=20",
    "zero.stage=0",
    "zero.bucket_mb=4",
    "train.max_steps=2",
    "train.eval_every=0",
)
HELD_NBYTES = 2 * 2 * 4 * 24_000_000
"""At least: parameters and gradients of each of 2 ranks, which the other reads."""
TOO_LITTLE_NBYTES, ENOUGH_NBYTES = 1100 * MIB, 1800 * MIB
"""Of what all processes may have resident, Python and torch included; the first has room for weights, gradients and the
optimizer's state, which is looked at before ranks start, and not for the processes."""


@contextmanager
def memory_group(name: str, limit_nbytes: int | None) -> Iterator[Path | None]:
    """A memory cgroup; None where this process may make none."""
    group = GROUPS / f"zerotrain-{os.getpid()}-{name}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        is_of_memory = (group / LIMIT).exists()
        if is_of_memory and limit_nbytes is not None:
            (group / LIMIT).write_text(str(limit_nbytes))
        yield group if is_of_memory else None
    finally:
        group.rmdir()


def entering(group: Path) -> list[str]:
    """What to put before a command that is to run there."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]


def shared_nbytes(group: Path) -> int:
    """Of memory files, as its pages were charged: once each, whoever maps them."""
    [nbytes] = re.findall(r"^shmem (\d+)$", (group / "memory.stat").read_text(), re.MULTILINE)
    return int(nbytes)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a limit of memory (cgroup)",
    "too little: the killed rank is named; each page counts once, and all are given back",
)
@pytest.mark.parametrize("limit_nbytes", [TOO_LITTLE_NBYTES, ENOUGH_NBYTES], ids=["too little", "enough"])
def test_a_limit_of_memory_is_told_or_enough_and_each_page_counts_once(limit_nbytes: int, tmp_path: Path) -> None:
    with memory_group(tmp_path.name, limit_nbytes) as group:
        if group is None:
            pytest.skip("needs a memory cgroup of its own")
        launch = (sys.executable, str(REPOSITORY / "launch.py"), *LARGE)
        command, most = Command([*entering(group), *launch], tmp_path), 0
        while command.process.poll() is None:
            most = max(most, shared_nbytes(group))
            time.sleep(0.02)
        code = command.wait()
        assert command.wait_until_gone() == []
        assert shared_nbytes(group) == 0  # given back, also where ranks were killed
        if limit_nbytes == TOO_LITTLE_NBYTES:
            assert code == 1, command.stdout
            killed = r"rank \d was killed by SIGKILL \(kill -9, or the machine ran out of memory\)"
            assert re.match(killed, command.stderr), command.stderr
            return
        assert code == 0, command.stderr
        assert shared_memory(command)
        assert HELD_NBYTES < most < 1.3 * HELD_NBYTES


# ---- ranks that are stopped


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "under the launcher; or again and again for a moment",
    "reported by name within `launch.timeout_s`; the same bits",
    under="a rank is stopped",
)
def test_a_rank_that_is_stopped_is_told_of_within_the_timeout_by_name(launch, tmp_path: Path) -> None:
    commands = {}
    for stage in (1, 3):
        (tmp_path / str(stage)).mkdir()
        settings = (ENDLESS, "launch.timeout_s=6", f"zero.stage={stage}")
        commands[stage] = launch(*RUN, *settings, folder=tmp_path / str(stage))
    for stage, command in commands.items():
        run = tmp_path / str(stage) / "run"
        command.wait_for_text(run / "ranks/0.log", "step 1/")
        os.kill(command.pid_of_rank(run, 1), signal.SIGSTOP)
    for stage, command in commands.items():
        assert command.wait() == 1
        cause = "rank 1 did not answer for 6 s, last seen in training"
        assert command.stderr.startswith(cause), command.stderr
        assert str(result_of(tmp_path / str(stage) / "run")["error"]).startswith(cause)
        assert command.wait_until_gone() == []


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "under the launcher; or again and again for a moment",
    under="a rank is stopped",
)
def test_a_rank_that_is_stopped_again_and_again_for_a_moment_costs_no_bit(wanted: str, tmp_path: Path) -> None:
    command = by_hand(*RUN, folder=tmp_path)
    deadline, num_stops = time.monotonic() + HANG_S, 0
    try:
        victim = command.pid_of_rank(tmp_path / "run", 1)
        while command.process.poll() is None and time.monotonic() < deadline:
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(victim, signum)
                time.sleep(0.03)
            num_stops += 1
    except ProcessLookupError:  # it has ended
        pass
    assert completed(command) == wanted
    assert shared_memory(command)
    assert num_stops > 3


# ---- others


@pytest.mark.case("hosts: Ranks of one host, which read each other's memory", "two runs at once", "do not mix")
def test_two_runs_at_once_do_not_mix(launch, wanted: str, tmp_path: Path) -> None:
    commands = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        commands.append(launch(*RUN, folder=tmp_path / name))
    assert [completed(command) for command in commands] == [wanted] * 2
    assert all(map(shared_memory, commands))


@contextmanager
def held_run(folder: Path) -> Iterator[tuple[Command, int, int, int, str]]:
    """(a run whose rank 1 is held before it connects to rank 0; of rank 0 the process, the descriptor of its memory,
    where something is mapped, and where it listens)"""
    command = by_hand(*RUN, folder=folder, ZEROTRAIN_HELD=f"1|{folder}", **UNREADY)
    try:
        deadline = time.monotonic() + HANG_S
        while not (folder / "held").exists():
            assert command.process.poll() is None, command.stderr
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process = command.pid_of_rank(folder / "run", 0)
        files = Path(f"/proc/{process}/fd")
        opened = {each.name: os.readlink(each) for each in files.iterdir()}
        [descriptor] = [name for name, target in opened.items() if target.startswith("/memfd:zerotrain")]
        place = Path(f"/proc/{process}/maps").read_text().partition("-")[0]
        listening = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if "@zerotrain-" in line]
        [listener] = [line[-1] for line in listening if f"socket:[{line[-2]}]" in opened.values()]
        yield command, process, int(descriptor), int(place, 16), listener.removeprefix("@")
    finally:
        (folder / "go-on").touch()


@contextmanager
def intruder(user: int, *given: int | str) -> Iterator[tuple[dict[str, Any], Callable[[], list[int]]]]:
    """(what `intruder.py` could do as this user, what tells what it got over its connections until now)"""
    command = [sys.executable, str(HERE / "intruder.py"), str(user), *map(str, given)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        told, asked = process.stdout, process.stdin

        def got() -> list[int]:
            asked.write("\n")
            asked.flush()
            descriptors: list[int] = json.loads(told.readline())
            return descriptors

        yield json.loads(told.readline()), got
        process.kill()


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "another user reads it, or connects while ranks meet, many times, and says nothing",
    "can do neither; the ranks do not wait for it",
)
def test_another_user_cannot_read_it_nor_hinder_ranks_that_meet(wanted: str, tmp_path: Path) -> None:
    """One who connected and said nothing had all ranks wait for the timeout, and then send by sockets; as many as there
    were ranks kept them from connecting at all (2026-11-22)."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with held_run(tmp_path) as (command, *given):
        with intruder(os.getuid(), *given, 0) as (found, _):
            assert found.pop("connections") == 0
            may_all = {each for each, may in found.items() if may}
        assert may_all >= {"the memory's file", "all its memory", "process_vm_readv", "pidfd_getfd"}  # for who may
        with intruder(NOBODY, *given, NUM_STRANGERS) as (found, got):
            assert found.pop("connections") == NUM_STRANGERS
            assert set(found.values()) == {False}, found
            (tmp_path / "go-on").touch()
            assert completed(command) == wanted
            assert got() == []
    assert shared_memory(command), command.stdout
