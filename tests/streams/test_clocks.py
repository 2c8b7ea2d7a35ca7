"""The clocks themselves, on a few kernels: what waits and events order, what they do not, and what is counted."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests.streams.stand_in import SimulatedGpu, clocks, run_on_streams
from zerotrain.comm.world import World

GPU = SimulatedGpu(torch.device("cpu"))
NBYTES = 4096


def faults(work: Callable[[], object]) -> list[str]:
    return run_on_streams(lambda _world: work(), 1).faults


def copy_to_host(*, after: bool = True, settles: bool = True) -> None:
    stream, on_host, memory = GPU.stream(), GPU.host_bytes(NBYTES), torch.empty(NBYTES, dtype=torch.uint8)
    memory.fill_(1)
    copied = stream.copy(on_host, memory, events=[GPU.event()] if after else [])
    if settles:
        copied.settle()
    on_host.numpy()
    copied.wait()


def test_a_copy_is_ordered_by_events_from_its_source_to_who_reads_it():
    assert faults(copy_to_host) == []
    assert "what compute does in fill_ is read by stream" in faults(lambda: copy_to_host(after=False))[-1]
    (early,) = faults(lambda: copy_to_host(settles=False))
    assert early.endswith("in copy_ is read by host (trains) in numpy, in no order")


@pytest.mark.parametrize(("start", "is_fault"), [(0, True), (64, False)])
def test_other_bytes_of_the_same_memory_are_not_the_same(start, is_fault):
    def work() -> None:
        stream, memory = GPU.stream(), torch.zeros(128)
        stream.wait(GPU.event())
        with stream.current():
            memory[:64].add_(1)
            done = GPU.event()
        memory[start:].add_(1)
        done.wait()  # or it would be freed too early

    assert bool(faults(work)) == is_fault


@pytest.mark.parametrize("recorded", [True, False])
def test_memory_that_is_let_go_of_while_another_stream_reads_it_is_told_unless_it_was_recorded(recorded):
    def work() -> None:
        stream, target = GPU.stream(), GPU.host_bytes(NBYTES)
        memory = GPU.bytes_for(NBYTES, stream) if recorded else torch.ones(NBYTES, dtype=torch.uint8)
        copied = stream.copy(target, memory, events=[GPU.event()])
        del memory
        copied.wait()

    expected = [] if recorded else ["memory of compute is freed while stream"]
    assert [fault[: len(expected[0])] for fault in faults(work)] == expected


def test_a_thread_knows_what_it_was_started_with_and_who_joins_it_what_it_has_seen():
    def work(*, joins: bool = True) -> None:
        stream, on_host, memory = GPU.stream(), GPU.host_bytes(NBYTES), torch.ones(NBYTES, dtype=torch.uint8)
        done = GPU.event()
        thread = threading.Thread(target=lambda: stream.copy(on_host, memory, events=[done]).settle(), name="writes")
        thread.start()
        while thread.is_alive() and not joins:
            pass
        if joins:
            thread.join()
        memory.zero_()

    assert faults(work) == []
    assert "in copy_ is written by compute in zero_, in no order" in faults(lambda: work(joins=False))[0]


def test_kernels_and_waits_of_the_host_are_counted_and_views_and_empty_memory_are_none():
    def work(world: World) -> None:
        values = torch.ones(8).view(2, 4)
        torch.empty(3)
        torch._foreach_add_([values[0], values[1]], 1.0)
        assert values.sum().item() == 16
        values.tolist()
        bool(values[0, 0] > 1)
        GPU.event().settle()

    known = run_on_streams(work, 1).clocks[0]
    assert dict(known.kernels) == {"ones": 1, "_foreach_add_": 1, "sum": 1, "gt": 1, "_local_scalar_dense": 2}
    assert dict(known.syncs) == {"_local_scalar_dense": 2, "tolist": 1, "event": 1}
    assert known.faults == []


def test_outside_of_a_run_torch_is_as_it_was():
    run_on_streams(lambda _world: clocks(), 1)
    assert torch.cuda.Stream.__module__ == "torch.cuda.streams"
    assert type(threading.Condition()) is threading.Condition
