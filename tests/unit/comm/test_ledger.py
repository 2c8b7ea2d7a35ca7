"""A collective that does not end is told of by name once, before the backend ends the process; one that ends, never."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zerotrain.comm import ledger as overdues
from zerotrain.comm.handles import Gather, GatherSpec
from zerotrain.comm.ledger import ORDER_BITS, Journal, Ledger, Notes, Overdue
from zerotrain.comm.whereabouts import Whereabouts
from zerotrain.comm.wires import Works
from zerotrain.comm.world import World
from zerotrain.device.device import DONE, Event
from zerotrain.errors import CommError
from zerotrain.launching.failures import first_failure
from zerotrain.launching.worker import ALLOCATOR_VARIABLES, leave_overdue, tell_torch_of_gpus

# What is counted of collectives, and their order as one number that ranks compare.


def order_of(*noted: str) -> int:
    journal = Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=True)
    for each in noted:
        journal.note(*each.split())
    return journal.order


def test_within_a_kind_names_order_and_number_tell_apart():
    orders = [(), ("g a",), ("g b",), ("g a", "g a"), ("g a", "g b"), ("g b", "g a"), ("r a",), ("r a", "r b", "r a")]
    assert len({order_of(*each) for each in orders if each != ("r a",)}) == len(orders) - 1
    assert order_of("g a", "g b") == order_of("g a", "g b")


def test_between_kinds_the_order_does_not_tell_apart():
    assert order_of("g a", "r x", "g b", "r y") == order_of("r x", "r y", "g a", "g b")
    assert order_of("g a", "r x", "g b", "r y") != order_of("g a", "r y", "g b", "r x")


def test_after_any_number_of_collectives_the_order_is_a_number_that_fp64_holds():
    for kinds in ("g", "gr", "grec"):
        order = order_of(*(f"{kind} {kind}{index}" for index in range(1000) for kind in kinds))
        assert 0 < order < 2**ORDER_BITS
        assert int(float(order)) == order
    order = order_of(*(f"g unit{index}" for index in range(1000)))
    assert order != order_of(*(f"g unit{index}" for index in (1, 0, *range(2, 1000))))


def test_a_step_that_was_given_up_counts_as_outside_and_leaves_nothing_to_the_next():
    ledger = Ledger()
    for given_up in (True, False):
        ledger.in_step = True
        ledger.record("reduce", 5)
        (ledger.drop_step if given_up else ledger.close_step)()
        assert not ledger.in_step
    assert (ledger.last_step.calls, ledger.last_step.nbytes) == ({"reduce": 1}, {"reduce": 5})
    assert (ledger.outside_steps.calls, ledger.outside_steps.nbytes) == ({"reduce": 1}, {"reduce": 5})


# Notes that ranks leave each other in a real store.


def test_notes_are_read_by_all_and_kept_apart_by_subject_and_a_store_that_is_gone_is_told():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", kept.port, is_master=False)
    mine, other, apart = Notes(kept, "save/1"), Notes(store, "save/1"), Notes(store, "save/2")
    assert other.read("end") is None
    mine.leave("end", ["a", None, 1.5])
    # torch's store does not answer who leaves something. Who then asks it is answered when it is there, and so is any
    # other from then on (asked at once, another found nothing, twice in a busy run of the suite, 2026-11-22).
    assert mine.read("end") == other.read("end") == ["a", None, 1.5]
    mine.leave("end", [])
    assert mine.read("end") == other.read("end") == []
    assert apart.read("end") is None
    assert (mine.count("done", 1), other.count("done", 1), mine.count("done"), apart.count("done")) == (1, 2, 2, 0)
    assert mine.timeout_s == 300.0
    del kept, mine
    for call in (lambda: other.read("end"), lambda: other.leave("end", 1), lambda: other.count("done", 1)):
        with pytest.raises(CommError, match="the store in which the ranks met is gone, with the rank that kept it: "):
            call()


TIMEOUT_S = 40.0


class Work:
    """NCCL's: to wait for it is no wait of the host."""

    has_ended = False

    def is_completed(self) -> bool:
        return self.has_ended

    def wait(self) -> None:
        pass


class OnDevice(Works, Gather):
    def _issue(self) -> None:
        self.work = Work()
        self._works = [self.work]  # type: ignore[list-item]


class Late:
    """A watch without a thread, and with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tell: Callable[[CommError | None], None] | None = None) -> None:
        monkeypatch.setattr(overdues.threading.Thread, "start", lambda _: None)
        self.now_s, self.told = 0.0, list[CommError | None]()
        self.place = "step 3, forward"
        whereabouts = Whereabouts(rank=0, size=3, describe=lambda: self.place)
        self.overdue = Overdue(whereabouts, TIMEOUT_S, tell or self.told.append, lambda: self.now_s)
        self.journal = Journal(Ledger(), whereabouts, overlap=True, overdue=self.overdue)

    def gather(self, name: str = "blocks.2") -> OnDevice:
        handle = OnDevice(GatherSpec(name, self.journal, torch.zeros(2), torch.zeros(1)), None)  # type: ignore[arg-type]
        handle.issue()
        return handle

    def at(self, now_s: float) -> list[CommError | None]:
        self.now_s = now_s
        self.overdue.look()
        return self.told


def test_the_oldest_that_has_not_ended_is_told_of_with_its_place_some_seconds_before_the_limit(monkeypatch):
    late = Late(monkeypatch)
    late.gather("blocks.1").work.has_ended = True
    stuck = late.gather()
    late.place = "step 3, backward"  # the host runs ahead
    stuck.finish()  # which waits for nothing
    late.gather("blocks.3")
    assert late.at(29.9) == []
    (error,) = late.at(30.1)
    assert "rank 0 has waited 30.1 s in gather of blocks.2 (step 3, forward); no answer from ranks 1, 2" in str(error)
    assert isinstance(error, CommError)
    assert (error.where, error.unheard) == ("gather of blocks.2 (step 3, forward)", (1, 2))
    assert len(late.at(35.0)) == 1  # once


def test_what_ends_after_it_was_told_of_is_taken_back(monkeypatch):
    late = Late(monkeypatch)
    stuck, behind = late.gather(), late.gather("blocks.3")
    late.at(31.0)
    stuck.work.has_ended = True
    assert len(late.at(32.0)) == 3  # None, and the next, issued at the same time
    behind.work.has_ended = True
    assert late.at(33.0)[-1] is None
    assert len(late.at(1e6)) == 4


def test_a_collective_that_the_host_issues_and_waits_for_is_watched_until_the_device_has_ended_it(monkeypatch):
    class Recorded(Event):
        has_ended = False

        def is_done(self) -> bool:
            return self.has_ended

    late, event = Late(monkeypatch), Recorded()
    world = World(0, 3, 0, torch.device("cpu"))
    object.__setattr__(world, "overdue", late.overdue)
    with world.watching("barrier"):
        assert "in barrier" in str(late.at(31.0)[0])  # while the host is in the call
    assert late.at(32.0)[-1] is None  # a CPU has done it
    with late.overdue.watching("sum of metrics", lambda: event):
        pass
    assert "in sum of metrics" in str(late.at(70.0)[-1])
    event.has_ended = True
    assert late.at(71.0)[-1] is None
    assert DONE.is_done()


def test_an_error_of_the_device_is_left_to_the_thread_that_trains(monkeypatch):
    late = Late(monkeypatch)

    def fails() -> bool:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    late.gather().work.is_completed = fails  # type: ignore[method-assign]
    assert late.at(31.0) == []


def test_the_thread_looks_by_itself_and_ends_with_what_it_watches(monkeypatch):
    monkeypatch.setattr(overdues, "POLL_S", 0.01)
    told: list[CommError | None] = []
    watch = Overdue(Whereabouts(rank=0, size=2), 0.04, told.append)
    watch.watch("gather of unit", lambda: False)
    thread = watch._thread
    assert thread is not None
    assert thread.daemon
    while not told:
        thread.join(0.01)
    del watch
    thread.join(5.0)
    assert not thread.is_alive()


def test_the_run_folder_says_who_did_not_come_until_it_has(tmp_path, monkeypatch):
    late = Late(monkeypatch, lambda error: leave_overdue(tmp_path, 0, error))
    stuck = late.gather()
    late.at(31.0)
    failure = first_failure(tmp_path, {0: -6})
    assert failure is not None
    assert "rank 0 has waited 31.0 s in gather of blocks.2 (step 3, forward)" in failure.cause
    assert (failure.unheard, failure.from_peers) == ((1, 2), True)
    stuck.work.has_ended = True
    late.at(32.0)
    assert list(tmp_path.iterdir()) == []


def unset(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Until the test ends, whoever sets them."""
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_nccl_is_told_to_come_first_and_to_leave_its_record_beside_the_logs(tmp_path, monkeypatch):
    """Under the names that this torch reads."""
    told = {
        "TORCH_NCCL_HIGH_PRIORITY": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "NCCL_GRAPH_REGISTER": "0",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/collectives_of_rank_",
    }
    unset(monkeypatch, *told, *ALLOCATOR_VARIABLES)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    tell_torch_of_gpus(tmp_path)
    assert {name: os.environ[name] for name in told} == told
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    known = (Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp").read_text()
    for name in ("TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
        assert f'"{name}"' in known


@pytest.mark.parametrize("given", [None, *ALLOCATOR_VARIABLES])
def test_torch_lets_the_memory_that_it_reserves_grow_unless_the_user_has_said_how(given, tmp_path, monkeypatch):
    unset(monkeypatch, *ALLOCATOR_VARIABLES)
    if given is not None:
        monkeypatch.setenv(given, "max_split_size_mb:64")
    tell_torch_of_gpus(tmp_path)
    found = {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}
    assert found == (
        {ALLOCATOR_VARIABLES[0]: "expandable_segments:True"} if given is None else {given: "max_split_size_mb:64"}
    )
    library = (Path(torch.__file__).parent / "lib/libc10.so").read_bytes()
    assert all(name.encode() in library for name in ALLOCATOR_VARIABLES)
