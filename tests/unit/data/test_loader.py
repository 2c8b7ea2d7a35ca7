"""What a rank trains on in each step is the same however it is read, and nothing is left of who reads it."""

import hashlib
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.processes import HANG_S
from tests.unit.data.test_batches import rank_rows
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.fetch import RowError
from zerotrain.data.loader import NUM_STEPS_AHEAD, StepLoader, read_in_workers

CPU = torch.device("cpu")
READERS: dict[str, dict[str, Any]] = {
    "main thread": {"num_steps_ahead": 0},
    "thread": {},
    "workers": {"num_workers": 2},
}


class Items:
    """Row i is two tensors of i, the second with labels that do not count."""

    draws = False

    def __init__(self, prepare: Callable[[int], object] = lambda row: None) -> None:
        self.prepare = prepare

    def __len__(self) -> int:
        return 50

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.prepare(row)
        return torch.full((3,), row), torch.tensor([row, -100, row % 3 * 100 - 100])


class Drawing(Items):
    """Each item is drawn."""

    draws = True

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(3), torch.randint(0, 9, (3,))


class Whole(Items):
    """Gives a whole micro-batch at once."""

    def rows(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = zip(*(self[row] for row in rows), strict=True)
        return torch.stack(ids), torch.stack(labels)


def sampler(**changes: int) -> GlobalBatchSampler:
    settings: dict[str, Any] = {"num_sequences": 50, "micro_batch_size": 3, "num_micro_batches": 2, "seed": 5}
    return GlobalBatchSampler(**settings | {"rank": 0, "num_ranks": 1} | changes)


def loader(dataset: Any, *, num_steps: int = 12, **how: Any) -> StepLoader:
    return StepLoader(dataset, how.pop("sampler", sampler()), device=CPU, num_steps=num_steps, **how)


def sha256_of_steps(dataset: Any, **how: Any) -> str:
    """Of all that 12 steps give, over two epochs."""
    digest = hashlib.sha256()
    with loader(dataset, **how) as steps:
        for _ in range(12):
            micro_batches, weights, num_labels = steps.next_step()
            assert weights == num_labels == [int((labels != -100).sum()) for _, labels in micro_batches]
            for part in itertools.chain(*micro_batches):
                digest.update(part.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.case("data: Order, position and loading", "Read by a thread, by processes or between steps")
def test_each_way_to_read_gives_the_same_bits() -> None:
    one_by_one = sha256_of_steps(Items(), num_steps_ahead=0)
    ways: list[dict[str, Any]] = [{}, {"num_steps_ahead": 1}, {"num_workers": 1}, {"num_workers": 3}]
    assert {sha256_of_steps(Items(), **way) for way in ways} == {one_by_one}
    assert sha256_of_steps(Whole()) == one_by_one
    drawn = {sha256_of_steps(Drawing(), **way) for way in ({"num_steps_ahead": 0}, {}, {"num_workers": 2})}
    assert len(drawn) == 1
    assert drawn != {one_by_one}


def test_the_rows_are_those_of_the_sampler_from_its_position_on() -> None:
    of_rank = sampler(rank=1, num_ranks=2, leaves_per_rank=2, rows_consumed=17)
    expected = list(itertools.islice(of_rank, 4))
    with loader(Items(), num_steps=4, sampler=of_rank) as steps:
        read = [[int(ids[0]) for batch, _ in steps.next_step().micro_batches for ids in batch] for _ in range(4)]
        assert read == expected
        with pytest.raises(StopIteration):
            steps.next_step()


def test_a_thread_reads_two_steps_ahead_and_no_more() -> None:
    read: list[int] = []
    with loader(Items(read.append)) as steps:
        for num_taken in (0, 1, 2):
            expected = 6 * (num_taken + NUM_STEPS_AHEAD)
            deadline_s = time.monotonic() + HANG_S
            while len(read) < expected and time.monotonic() < deadline_s:
                time.sleep(0.01)
            time.sleep(0.05)
            assert len(read) == expected
            steps.next_step()
    assert not any(thread.name == "zerotrain-data" for thread in threading.enumerate())


def test_what_draws_random_numbers_is_read_by_the_main_thread_between_two_steps() -> None:
    """A thread that seeded torch's generator would change what the model draws beside it."""
    readers: list[threading.Thread] = []
    items = Items(lambda row: readers.append(threading.current_thread()))
    items.draws = True
    with loader(items) as steps:
        steps.next_step()
        assert readers == [threading.main_thread()] * 6
        assert not steps.reads_ahead


def test_reading_in_a_thread_overlaps_with_computing_and_what_was_waited_for_is_told() -> None:
    """By events, not by the clock: the third step's rows are read while the first one is trained."""
    third_read = threading.Event()
    third = rank_rows(sampler(), 2)[-1]
    with loader(Items(lambda row: third_read.set() if row == third else None)) as steps:
        steps.next_step()
        assert third_read.wait(10)  # while the "model" of this test computes
        steps.next_step()
    slow = Items(lambda row: time.sleep(0.01))
    with loader(slow, num_steps_ahead=0) as steps:
        steps.next_step()
        assert steps.wait_s > 0.06


# ---- exceptions


def fail_at(wanted: int) -> Callable[[int], None]:
    def prepare(row: int) -> None:
        if row == wanted:
            raise FileNotFoundError(f"image_{row}.png")

    return prepare


@pytest.mark.case(
    "data: Order, position and loading",
    "An exception in a dataset, in a thread or a process",
    "comes in its step, with row, epoch, step and traceback",
)
@pytest.mark.parametrize("how", READERS.values(), ids=READERS)
def test_an_exception_comes_in_its_step_with_row_epoch_and_step_and_its_traceback(how: dict[str, Any]) -> None:
    row = rank_rows(sampler(), 4)[2]
    with loader(Items(fail_at(row)), first_step=10, **how) as steps:
        for _ in range(4):
            steps.next_step()
        for _ in range(2):  # it stays
            with pytest.raises(RowError) as failed:
                steps.next_step()
            if not steps.reads_ahead:
                break
    said = f"data.train: row {row} (epoch 0, step 15) cannot be read: FileNotFoundError: image_{row}.png"
    assert str(failed.value) == said
    assert "image" in str(failed.value.__cause__)
    assert multiprocessing.active_children() == []


@pytest.mark.case("data: Order, position and loading", "An exception in a dataset, in a thread or a process")
@pytest.mark.parametrize("how", READERS.values(), ids=READERS)
def test_an_iterator_that_ends_within_a_dataset_cuts_no_step_short(how: dict[str, Any]) -> None:
    """A step of two micro-batches was trained on the first alone, and the next was without any (2026-11-29)."""
    row = rank_rows(sampler(), 0)[-1]
    with loader(Items(lambda read: next(iter(())) if read == row else None), **how) as steps:
        said = rf"data.train: row {row} \(epoch 0, step 1\) cannot be read: StopIteration: $"
        with pytest.raises(RowError, match=said):
            steps.next_step()


def kill_own_process(row: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def exit_of_c(row: int) -> None:
    os._exit(3)


@pytest.mark.case("data: Order, position and loading", "A process that reads is killed", "the run ends and says so")
@pytest.mark.parametrize(
    ("end", "said"), [(kill_own_process, "was killed by SIGKILL"), (exit_of_c, "ended with exit code 3")]
)
def test_a_worker_that_is_gone_is_told_with_its_row(end: Callable[[int], None], said: str) -> None:
    items = Items(lambda row: end(row) if row == 7 else None)
    step = next(number for number in range(12) if 7 in rank_rows(sampler(), number)) + 1
    row = f"data.train: row 7 (epoch 0, step {step})"
    with pytest.raises(RuntimeError, match=rf"^a worker process that reads the data {said}, at {re.escape(row)}$"):
        sha256_of_steps(items, num_workers=1)
    assert multiprocessing.active_children() == []


def fail() -> None:
    raise ZeroDivisionError("while it is made again")


class Unmade:
    """Can be pickled, but not made again."""

    def __reduce__(self) -> Any:
        return fail, ()


class Unsendable(Items):
    """A row, or the batch with it, that no process can hand over."""

    def __init__(self, wrong: Any) -> None:
        super().__init__()
        self.wrong = wrong

    def __getitem__(self, row: int) -> Any:
        return {"ids": torch.tensor([row]), "wrong": self.wrong if row == 7 else None}


class NoPickle:
    def __reduce__(self) -> Any:
        raise MemoryError("no room for it")


def read_steps(dataset: Any, **how: Any) -> None:
    with loader(dataset, **how) as steps:
        for _ in range(12):
            steps.next_step()


def keep(items: list[Any]) -> Any:
    return items


@pytest.mark.case(
    "data: Order, position and loading", "Rows that a worker process cannot hand over", "the run ends and names them"
)
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: None, "sent by a worker process: (AttributeError|PicklingError): .*lambda"),
        (NoPickle(), "sent by a worker process: MemoryError: no room for it"),
        (threading.Lock(), "sent by a worker process: TypeError: cannot pickle '_thread.lock' object"),
        (Unmade(), "taken from a worker process: ZeroDivisionError: while it is made"),
    ],
    ids=["a lambda", "no pickle", "a lock", "not made again"],
)
def test_what_a_worker_cannot_hand_over_is_told_with_its_rows(wrong: Any, said: str) -> None:
    """Seen: multiprocessing's thread printed the error, and the rank waited for ever."""
    step = next(number for number in range(12) if 7 in rank_rows(sampler(), number)) + 1
    rows = rf"data.train: rows [\d, ]*\b7\b[\d, ]* \(epoch 0, step {step}\)"
    with pytest.raises(RowError, match=f"^{rows} cannot be {said}"):
        read_steps(Unsendable(wrong), num_workers=1, collate=keep)
    assert multiprocessing.active_children() == []


def end_python(row: int) -> None:
    if row == 7:
        sys.exit(3)


@pytest.mark.parametrize("how", READERS.values(), ids=READERS)
def test_a_dataset_that_ends_python_is_told_with_its_row(how: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"^data.train: row 7 \(epoch 0, step \d+\) cannot be read: SystemExit: 3$"):
        sha256_of_steps(Items(end_python), **how)


# ---- waits


@pytest.mark.case(
    "data: Order, position and loading",
    "A row whose reading does not end, in the rank, a thread or a process",
    "the run ends within `launch.timeout_s` and names it",
)
@pytest.mark.parametrize("how", READERS.values(), ids=READERS)
def test_a_row_that_does_not_end_is_given_up_and_told(how: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"^data.train: row 7 \(epoch 0, step \d+\) cannot be read.* did not end within"):
        read_steps(Items(lambda row: time.sleep(20 * (row == 7))), timeout_s=2.0, **how)
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("how", READERS.values(), ids=READERS)
def test_slow_rows_are_waited_for_as_long_as_they_come(how: dict[str, Any]) -> None:
    """Six rows take longer than the limit, and none of them does."""
    with loader(Items(lambda row: time.sleep(0.5)), num_steps=2, timeout_s=2.0, **how) as steps:
        for _ in range(2):
            assert len(steps.next_step().micro_batches) == 2


def stop_at_two(wanted: int) -> int:
    if wanted == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    return wanted


def test_a_worker_that_is_stopped_is_given_up_and_ended() -> None:
    with read_in_workers(stop_at_two, iter(range(9)), num_workers=1, num_ahead=1, timeout_s=1.0) as values:
        assert [next(values), next(values)] == [0, 1]
        with pytest.raises(RowError, match="cannot be read by a worker process: it did not end within"):
            next(values)
    assert multiprocessing.active_children() == []


class OfWorker(Items):
    def __getitem__(self, row: int) -> Any:
        known = torch.utils.data.get_worker_info()
        return torch.tensor([known.id, known.num_workers, torch.get_num_threads()]), torch.tensor([row])


def test_a_dataset_may_ask_which_worker_it_is_in() -> None:
    with loader(OfWorker(), num_workers=2) as steps:
        told = [ids[0].tolist() for ids, _ in steps.next_step().micro_batches]
    assert told == [[0, 2, 1], [1, 2, 1]]


def large(wanted: list[int]) -> bytes:
    return bytes(10**6 * wanted[0])


def test_large_values_and_long_lists_of_rows_do_not_wait_for_each_other() -> None:
    """What is asked for, and what has been read, both fill a pipe."""
    wanted = [[1] * 100_000 for _ in range(8)]
    with read_in_workers(large, iter(wanted), num_workers=1, num_ahead=6) as values:
        assert [len(value) for value in values] == [10**6] * 8


# ---- ends


def sleep_for_ever(wanted: int) -> int:
    time.sleep(1000 if wanted else 0)
    return wanted


@pytest.mark.case(
    "data: Order, position and loading",
    "a signal to stop to all processes, once or twice, `kill -9` of a rank or of the launcher, an "
    "item that takes for ever",
)
def test_workers_in_the_middle_of_an_item_are_gone_in_bounded_time() -> None:
    started_s = time.monotonic()
    with read_in_workers(sleep_for_ever, iter(range(20)), num_workers=3, num_ahead=6) as values:
        assert next(values) == 0
        assert len(multiprocessing.active_children()) == 3
    assert multiprocessing.active_children() == []
    assert time.monotonic() - started_s < HANG_S


PROGRAM = """
import os, time, torch
from zerotrain.data.loader import read_in_workers

def read(wanted):
    os.write(1, b"worker %d\\n" % os.getpid())  # at once: two workers share the pipe
    time.sleep(1000)

if __name__ == "__main__":
    with read_in_workers(read, iter(range(9)), num_workers=2, num_ahead=2) as values:
        next(values)
"""


@pytest.mark.case(
    "data: Order, position and loading",
    "a signal to stop to all processes, once or twice, `kill -9` of a rank or of the launcher, an "
    "item that takes for ever",
)
def test_workers_ignore_the_signals_that_stop_a_group_and_none_outlives_a_rank_killed_by_minus_9(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    rank = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with rank, ExitStack() as at_end:
        at_end.callback(rank.kill)
        assert rank.stdout is not None
        workers = [int(rank.stdout.readline().split()[1]) for _ in range(2)]
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            for pid in workers:
                os.kill(pid, signum)
        time.sleep(0.2)
        assert all(Path(f"/proc/{pid}").exists() for pid in workers)
        rank.kill()
        deadline_s = time.monotonic() + HANG_S
        while any(_is_running(pid) for pid in workers) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not any(_is_running(pid) for pid in workers)


def _is_running(pid: int) -> bool:
    """Zombies, whose parent has not asked yet, are not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("reader", READERS)
def test_rows_of_another_rank_come_behind_those_of_this_one_where_they_are_due(reader: str) -> None:
    samplers = [sampler(rank=rank, num_ranks=3) for rank in range(3)]

    def further(step: int) -> list[int]:
        return [2] if step % 2 == 0 else []

    with loader(Items(), num_steps=4, sampler=samplers[0], further=further, **READERS[reader]) as steps:
        read = [[batch[0][:, 0].tolist() for batch in steps.next_step().micro_batches] for _ in range(4)]
    for step, batches in enumerate(read, 1):
        position = (step - 1) * samplers[0].global_batch_size
        ranks = [0, *further(step)]
        rows = [micro_batch.rows for rank in ranks for micro_batch in samplers[rank].micro_batches(position)]
        assert batches == rows
