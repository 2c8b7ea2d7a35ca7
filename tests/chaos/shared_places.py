"""Where a rank can be killed that shares its memory with the others of its host, on its main thread and on its
courier's; and what is noted of the run, to look for it when all is over.

They are no places of `places.PLACES`: whether a run goes on from its checkpoints is the same wherever it is killed in a
step. Here it is what is left of the memory, and what the other ranks are told.
"""

import os
import threading
from typing import Any

from tests.chaos.places import after, before
from tests.chaos.strike import LAUNCHER, Striker

MEETING = (
    "meeting: nothing has been said",
    "meeting: listens",
    "meeting: its memory is to be sent to another",
    "meeting: its memory is sent to another",
    "meeting: all are heard, the thread is to start",
)
BUILDING = ("memory: its pages are there, not mapped", "memory: mapped")
COLLECTIVES = (
    "gather: to be sent",
    "gather: waited for",
    "reduction: to be sent",
    "reduction: waited for",
    "courier: has said that something is there",
    "courier: reads what a gather wants",
    "courier: is in the midst of a mean",
    "courier: has read, and not said so",
    "courier: has ended, and not given back",
)
STEP = ("step: forward", "step: backward", "step: update")
"""Those of `places.PLACES`."""
MOMENT = "a moment"
"""Whatever the rank does then; its passing is a number of milliseconds after it has joined the others."""
OF_THE_RUN = "of-the-run"
"""A folder of what its ranks have made: files named as the memory's inode, and as the address where one listens."""


def watch(striker: Striker) -> None:
    """Let the kills that are planned strike in this process, if it is of a run that is looked at so."""
    noted = striker.folder / OF_THE_RUN
    if striker.rank == LAUNCHER or not noted.is_dir():
        return
    _watch_moment(striker)
    _watch_meeting(striker, noted)
    _watch_memory(striker, noted)
    _watch_handles(striker)
    _watch_courier(striker)


def _watch_moment(striker: Striker) -> None:
    import torch.distributed as dist

    strike = striker.planned_here(MOMENT)
    if strike is not None:
        timer = threading.Timer(strike.passing / 1000, striker.strike)
        timer.daemon = True
        after(dist, "init_process_group", lambda *_, **__: timer.start())


def _watch_meeting(striker: Striker, noted: Any) -> None:
    from zerotrain.comm.wires.memory import local_peers, local_ranks
    from zerotrain.comm.wires.memory.courier import Courier

    listen = local_peers._listen

    def listened(*arguments: Any) -> Any:
        listener, why, address, secret = listen(*arguments)
        (noted / address.strip("\0")).touch()
        striker.passed("meeting: listens")
        return listener, why, address, secret

    def start_thread(*_: Any) -> None:
        striker.passed("meeting: all are heard, the thread is to start")

    def send(*_: Any) -> None:
        striker.passed("meeting: its memory is to be sent to another")

    before(local_ranks, "meet_locally", lambda *_: striker.passed("meeting: nothing has been said"))
    local_peers._listen = listened
    before(local_peers.socket, "send_fds", send)
    after(local_peers.socket, "send_fds", lambda *_: striker.passed("meeting: its memory is sent to another"))
    before(Courier, "__init__", start_thread)


def _watch_memory(striker: Striker, noted: Any) -> None:
    from zerotrain.comm.wires.memory import shared_memory

    def note(memory: Any) -> None:
        (noted / f"inode-{os.fstat(memory.file).st_ino}").touch()

    after(shared_memory.SharedMemory, "__init__", note)
    before(shared_memory, "_map", lambda *_: striker.passed("memory: its pages are there, not mapped"))
    after(shared_memory, "_map", lambda *_: striker.passed("memory: mapped"))


def _watch_handles(striker: Striker) -> None:
    from zerotrain.comm.wires.memory import shared_handles

    def send(handle: Any, *_: Any) -> None:
        striker.passed(f"{_kind(handle)}: to be sent")

    def wait(handle: Any) -> None:
        striker.passed(f"{_kind(handle)}: waited for")

    before(shared_handles.Shared, "_send", send)
    before(shared_handles.Shared, "_wait", wait)


def _kind(handle: Any) -> str:
    return "gather" if type(handle).__name__ == "SharedGather" else "reduction"


def _watch_courier(striker: Striker) -> None:
    from zerotrain.comm.wires.memory import shared_handles
    from zerotrain.comm.wires.memory.connections import Connections
    from zerotrain.comm.wires.memory.errand import READ, THERE

    def say(_: Any, peers: Any, message: bytes) -> None:
        if message[0] == READ and tuple(peers):
            striker.passed("courier: has read, and not said so")

    def said(_: Any, peers: Any, message: bytes) -> None:
        if message[0] == THERE:
            striker.passed("courier: has said that something is there")

    before(Connections, "send", say)
    after(Connections, "send", said)
    before(Connections, "close", lambda *_: striker.passed("courier: has ended, and not given back"))
    before(shared_handles._GatherErrand, "there", lambda *_: striker.passed("courier: reads what a gather wants"))
    before(shared_handles, "mean_by_tree", lambda *_, **__: striker.passed("courier: is in the midst of a mean"))
