"""Whose fault an error is that a collective raised, wherever CUDA, NCCL or gloo came out with it."""

import errno
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from zerotrain.comm import whereabouts, world as worlds
from zerotrain.comm.handles import GatherSpec, Handle
from zerotrain.comm.ledger import Journal, Ledger
from zerotrain.comm.whereabouts import Whereabouts, files_problem, name_ranks, shortage, within
from zerotrain.comm.world import World
from zerotrain.errors import CommError
from zerotrain.launching.failures import Failure

OWN = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
    RuntimeError("CUDA error: peer access is not supported between these two devices"),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.27.5\nncclUnhandledCudaError: Call to "
        "CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError("shape '[3]' is invalid for input of size 4"),
]
OTHERS = [
    dist.DistBackendError("NCCL error: ncclRemoteError: a remote process exited prematurely; Connection reset by peer"),
    dist.DistNetworkError("The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500)"),
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]"),
    RuntimeError("Timed out waiting 1000ms for recv operation to complete"),
]


class Failing(Handle):
    """A collective that raises an error where it is told to."""

    kind, ledger_kind, sent_nbytes = "gather", "gather", 0

    def __init__(self, where: str, error: RuntimeError) -> None:
        journal = Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=True)
        super().__init__(GatherSpec("unit", journal, torch.zeros(2), torch.zeros(1)))
        self._where, self._error = where, error

    def _come_to(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def _issue(self) -> None:
        self._come_to("issue")

    def _is_done(self) -> bool:
        self._come_to("done")
        return True

    def _wait(self) -> None:
        self._come_to("wait")


def use(where: str, error: RuntimeError) -> None:
    handle = Failing(where, error)
    handle._issue_noted()
    handle.is_done()
    handle.finish()


def meet(where: str, error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(worlds.dist, "all_reduce", fails)
    monkeypatch.setattr(worlds.dist, "barrier", fails)
    monkeypatch.setattr("zerotrain.comm.whereabouts.GRACE_S", 0.0)
    world = World(0, 2, 0, torch.device("cpu"))
    if where == "sum":
        world.sum(torch.zeros(1))
    world.barrier()


@pytest.mark.parametrize("where", ["issue", "done", "wait", "sum", "barrier"])
@pytest.mark.parametrize("error", [*OWN, *OTHERS], ids=lambda error: str(error)[:30])
def test_an_error_is_told_as_a_loss_of_others_only_where_it_is_one(where, error, monkeypatch):
    def happen() -> None:
        if where in ("sum", "barrier"):
            meet(where, error, monkeypatch)
        else:
            use(where, error)

    raised = caught(happen)
    assert isinstance(raised, CommError) == (error in OTHERS)
    assert raised is error or raised.__cause__ is error
    # The launcher ranks an own error above what other ranks noticed of it.
    assert Failure.from_error(raised, rank=0).from_peers == (error in OTHERS)


def caught(call: Callable[[], None]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


# A process that gets no more files, threads or memory is told apart from one that has lost others, with what to do.


@contextmanager
def files_allowed(number: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_files_that_a_rank_needs_are_those_it_has_open_and_some_for_each_rank():
    with files_allowed(30):
        assert files_problem(2, 10) == ""
        assert files_problem(2, 14) == (
            "a process may open 30 files here, and each rank needs 31; raise it: ulimit -n 1024"
        )
        assert "each rank needs 32" in files_problem(2, 10, at_rank_0=True)
        assert "each rank needs 35" in files_problem(3, 10, at_rank_0=True)


@pytest.mark.case(
    "hosts: Ranks of one host",
    "a rank gets no more files, threads or memory",
    "that is the cause, with the limit to raise, and no loss of another",
)
@pytest.mark.parametrize(
    ("error", "says"),
    [
        (RuntimeError("[enforce fail at /gloo/transport/tcp/loop.cc:48] pipe: Too many open files"), "ulimit -n"),
        (OSError(errno.EMFILE, "Too many open files"), "files; raise it: ulimit -n 1024"),
        (RuntimeError("can't start new thread"), "ulimit -u"),
        (RuntimeError("Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("errno == 0. Cannot allocate memory"), "ulimit -v"),
        (OSError(12, "Cannot allocate memory"), "ulimit -v"),
    ],
)  # fmt: skip
def test_threads_and_memory_are_told_likewise(error, says):
    assert says in shortage(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"),
        BlockingIOError(11, "Resource temporarily unavailable"),
        TimeoutError("no answer within 20 s"),
        ValueError("Too many open files"),
    ],
)
def test_what_is_no_shortage_says_nothing(error):
    assert shortage(error) == ""


# A rank that has waited in vain says who is silent, and never waits long for the store that the ranks have met in.


HOSTS = ("n0", "n0", "n1", "n1")
TIMED_OUT = RuntimeError("Timed out waiting 40000ms for recv operation to complete")


@pytest.mark.parametrize(
    ("ranks", "hosts", "said"),
    [
        ([], (), ""),
        ([1], (), "rank 1"),
        ([0, 2], (), "ranks 0, 2"),
        ([2, 3], HOSTS, "n1 (ranks 2, 3)"),
        ([1, 2, 3], HOSTS, "rank 1 on n0, n1 (ranks 2, 3)"),
    ],
)
def test_ranks_are_named_with_their_hosts(ranks, hosts, said):
    assert name_ranks(ranks, hosts) == said


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch):
    """Its host was cut off: the others waited for it until TCP gave up, a quarter of an hour (2026-11-24)."""
    monkeypatch.setattr(whereabouts, "GRACE_S", 0.1)
    monkeypatch.setattr(whereabouts, "_STORE_S", 0.1)
    over = threading.Event()
    late = threading.Timer(5.0, over.set)  # who waits longer than it may takes it for one that answers
    late.start()

    class Silent(dist.HashStore):
        def set(self, *_: object) -> None:
            over.wait()

    monkeypatch.setattr(whereabouts, "_get_default_store", Silent)
    monkeypatch.setattr(whereabouts.dist, "PrefixStore", lambda _, store: store)
    error = Whereabouts(2, 4, hosts=HOSTS).lost_others(TIMED_OUT, "gather of a", 40.0)
    late.cancel()
    over.set()
    assert (
        "no answer from n0 (ranks 0, 1), rank 3 on n1, which may compute, sleep or be gone; no answer from the"
        in str(error)
    )
    assert error.unheard == (0, 1)  # rank 3 may have spoken, to nobody


def test_ranks_that_have_left_their_words_are_not_silent(monkeypatch):
    monkeypatch.setattr(whereabouts, "GRACE_S", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    dist.PrefixStore("zerotrain/failed/", store).set("3", "gather of b")
    monkeypatch.setattr(whereabouts, "_get_default_store", lambda: store)
    error = Whereabouts(2, 4, hosts=HOSTS).lost_others(TIMED_OUT, "gather of a", 40.0)
    assert "rank 3 failed in gather of b; no answer from n0 (ranks 0, 1), which may" in str(error)
    assert "the store" not in str(error)
    assert error.unheard == (0, 1)


# A call has an end, though it has none of its own.


def test_a_call_that_does_not_return_is_given_up_after_the_limit():
    over = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        within(0.1, over.wait)
    over.set()
