"""Whose fault an error is that a collective raised, wherever CUDA, NCCL or gloo came out with it."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from zerotrain.comm import world as worlds
from zerotrain.comm.handles import Handle
from zerotrain.comm.ledger import Journal, Ledger
from zerotrain.comm.whereabouts import Whereabouts
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

    kind, ledger_kind, sent_nbytes = "gather", "gather", 10

    def __init__(self, where: str, error: RuntimeError) -> None:
        super().__init__("unit", Journal(Ledger(), Whereabouts(rank=0, size=1), overlap=True))
        self._where, self._error = where, error

    def _come_to(self, where: str) -> None:
        if where == self._where:
            raise self._error

    def _issue(self) -> None:
        self._come_to("issue")

    def _done(self) -> bool:
        self._come_to("done")
        return True

    def _wait(self) -> None:
        self._come_to("wait")


def use(where: str, error: RuntimeError) -> None:
    handle = Failing(where, error)
    handle._issue_noted()
    handle.done()
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
def test_an_error_is_told_as_a_loss_of_others_only_where_it_is_one(
    where: str, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def happen() -> None:
        if where in ("sum", "barrier"):
            meet(where, error, monkeypatch)
        else:
            use(where, error)

    raised = caught(happen)
    assert isinstance(raised, CommError) == (error in OTHERS)
    assert raised is error or raised.__cause__ is error
    # The launcher ranks an own error above what other ranks noticed of it.
    assert Failure.of(raised, rank=0).from_peers == (error in OTHERS)


def caught(call: Callable[[], None]) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def test_the_error_of_a_users_own_collective_is_told_apart_too() -> None:
    assert not Failure.of(OWN[4], rank=0).from_peers
    assert Failure.of(OTHERS[0], rank=0).from_peers
