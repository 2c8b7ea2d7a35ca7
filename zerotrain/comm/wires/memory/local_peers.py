"""How the ranks of one host come to know each other: a connection between each two, over which each gives the other
the file of its memory."""

import errno
import io
import os
import secrets
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from zerotrain.comm.accounts.shortage import shortage

_CREDENTIALS = struct.Struct("3i")
_SECRET_NBYTES = 16
_HUNG_UP = "another rank hung up"
"""Said by who only noticed that another cannot."""


@dataclass(frozen=True)
class LocalPeer:
    """Another rank of this host."""

    connection: socket.socket
    """SOCK_SEQPACKET: what is sent at once comes at once. It ends with the process."""
    file: io.FileIO
    """The peer's memory, see `SharedMemory`."""

    def close(self) -> None:
        """Give both back. Safe to call twice."""
        self.connection.close()
        self.file.close()


class Leaving(Protocol):
    """An object made of peers."""

    def leave(self) -> None:
        """End it."""


T = TypeVar("T", bound=Leaving)


class NotLocalError(Exception):
    """The ranks cannot read each other's memory; all of them get the same reason."""


def meet_locally(
    rank: int,
    ranks: range,
    file: int,
    say: Callable[[Any], list[Any]],
    timeout_s: float,
    then: Callable[[Mapping[int, LocalPeer]], T],
) -> T:
    """Connect this rank with the others of its host. Collective, over the ranks of all hosts.

    Args:
        ranks: of this host.
        file: of this rank's memory.
        say: see `Wire.gather_objects`.
        then: makes something of the peers, by rank, before all agree that they can.

    Raises:
        NotLocalError: a rank is on another host, or cannot connect; on all ranks alike.
    """
    with ExitStack() as undone:
        listener, *facts = _listen(timeout_s, undone)
        said = require_all(say, *facts)
        assert listener is not None
        hellos = [bytes.fromhex(secret) + rank.to_bytes(8, "little") for _, _, secret in said]
        connected: dict[int, socket.socket] = {}
        why = ""
        try:
            for peer in range(ranks.start, rank):
                connected[peer] = undone.enter_context(_socket(timeout_s))
                connected[peer].connect(said[peer][1])
                socket.send_fds(connected[peer], [hellos[peer]], [file])
        except OSError as error:
            why = f"it does not reach rank {peer}, which is on another host or in another network namespace ({error})"
        require_all(say, why)
        peers: dict[int, LocalPeer] = {}
        try:
            while len(peers) < ranks.stop - 1 - rank:
                connection = undone.enter_context(listener.accept()[0])
                connection.settimeout(timeout_s)
                if (other := _heard(connection, hellos[rank], peers, undone)) is not None:
                    socket.send_fds(connection, [hellos[other]], [file])
            for connection in connected.values():
                if _heard(connection, hellos[rank], peers, undone) is None:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if len(peers) < len(ranks) - 1:
                raise RuntimeError("the process at the other end is no rank")
            made = then(peers)
            undone.callback(made.leave)
        except (OSError, RuntimeError) as error:  # such as "can't start new thread"
            why = f"it cannot connect with all others: {error}"
            if lacking := shortage(error):
                why = f"{why}; {lacking}"
            elif isinstance(error, ConnectionError):
                why = _HUNG_UP
            undone.close()  # or the others would wait for what is to come from here
        require_all(say, why)
        undone.pop_all()
        listener.close()
        return made


def require_all(say: Callable[[Any], list[Any]], why: str, *facts: str) -> list[list[str]]:
    """Gather [why, *facts] of each rank; `why` is empty if the rank can. Collective.

    Raises:
        NotLocalError: one cannot.
    """
    everyone: list[list[str]] = say([why, *facts])
    reasons = [f"rank {rank}: {said[0]}" for rank, said in enumerate(everyone) if said[0]]
    if reasons:
        raise NotLocalError(min(reasons, key=lambda reason: reason.endswith(_HUNG_UP)))
    return everyone


def _listen(timeout_s: float, undone: ExitStack) -> tuple[socket.socket | None, str, str, str]:
    """(what listens, why there is none, its address, what who connects must know)"""
    # Abstract: in no folder. Who finds it in /proc must still know the secret, and be the same user.
    address = f"\0zerotrain-{secrets.token_hex(16)}"
    try:
        listener = undone.enter_context(_socket(timeout_s))
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)  # others than ranks take up room too
    except OSError as error:
        return None, f"it cannot listen: {error}", "", ""
    return listener, "", address, secrets.token_hex(_SECRET_NBYTES)


def _socket(timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    return made


def _heard(connection: socket.socket, own_hello: bytes, peers: dict[int, LocalPeer], undone: ExitStack) -> int | None:
    """The rank at the other end, now among the peers. None: it is another user, does not know this rank's secret, or
    has hung up.

    Raises:
        OSError: nothing was heard in time, or this process may open no file for it.
    """
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():  # not waited for: it may say nothing
        connection.close()
        return None
    said, files, _, _ = socket.recv_fds(connection, _SECRET_NBYTES + 8, 1)
    for each in files:
        os.set_inheritable(each, False)  # or programs that the user's code starts hold all ranks' memory
    knows = secrets.compare_digest(said[:_SECRET_NBYTES], own_hello[:_SECRET_NBYTES])
    if knows and not files:  # the kernel drops a file that is sent to who may open no more
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not (knows and len(files) == 1):
        for each in files:
            os.close(each)
        connection.close()
        return None
    peer = int.from_bytes(said[_SECRET_NBYTES:], "little")
    peers[peer] = LocalPeer(connection, undone.enter_context(io.FileIO(files[0])))
    return peer
