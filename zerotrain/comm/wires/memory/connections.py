"""The connections of a rank with the other ranks of its host: any thread sends, one listens."""

import os
import select
import selectors
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from socket import MSG_DONTWAIT, MSG_NOSIGNAL

from zerotrain.comm.wires.memory.errand import MESSAGE
from zerotrain.comm.wires.memory.local_peers import LocalPeer

_CLOSE_S = 1.0
"""Until what it still has to say is given up."""
_AT_ONCE = int(MSG_DONTWAIT | MSG_NOSIGNAL)
"""Flags of a send. Put together in each, they are three calls of Python."""


class Connections:
    """Messages to and from peers, in the order of each peer.

    Args:
        peers: by rank; closed with the connections.
    """

    def __init__(self, peers: Mapping[int, LocalPeer]) -> None:
        self.peers = peers
        self.gone: set[int] = set()
        """The peers that have ended their connection, and whose last message was heard."""
        self._unsent: dict[int, deque[bytes]] = {peer: deque() for peer in peers}
        self._descriptors = threading.RLock()
        """Held while they are used or closed: a number that was closed may soon be another file's. The thread takes it
        again where Python collects this very engine in its send (3.12 collects behind calls)."""
        self._selector = selectors.DefaultSelector()
        self._ends: dict[int, select.poll] = {}
        """Which tell whether a peer has ended its connection, though messages of it wait."""
        for peer, each in peers.items():
            each.connection.setblocking(False)
            self._selector.register(each.connection, selectors.EVENT_READ, peer)
            self._ends[peer] = select.poll()
            self._ends[peer].register(each.connection, select.POLLRDHUP)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)

    # ---- any thread

    def send(self, peers: Iterable[int], message: bytes) -> None:
        """Send some peers a message, which the thread does where one is not ready to receive it."""
        for peer in peers:
            try:
                with self._descriptors:
                    self.peers[peer].connection.send(message, _AT_ONCE)
            except OSError:  # full, or gone, which the thread reads
                # Order does not matter: a number is used again when it was read by all.
                self._unsent[peer].append(message)
                self.wake_up()

    def wake_up(self) -> None:
        """Let the thread return from `messages`."""
        with self._descriptors:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # ---- the thread that listens

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Wait for messages, or to be woken up; give each with the peer that sent it. An empty one: that peer is
        gone."""
        for peer, unsent in self._unsent.items():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if unsent else 0)
            if peer not in self.gone and self._selector.get_key(self.peers[peer].connection).events != events:
                self._selector.modify(self.peers[peer].connection, events, peer)
        for key, events in self._selector.select():
            peer = key.data
            if peer is None:
                os.eventfd_read(self._wake)
                continue
            if events & selectors.EVENT_WRITE:
                self._send_unsent(peer)
            while events & selectors.EVENT_READ and peer not in self.gone:
                try:
                    message = self.peers[peer].connection.recv(MESSAGE.size)
                except BlockingIOError:
                    break
                except ConnectionResetError:  # it left without reading all; what it had to say comes before its end
                    continue
                if not message:
                    self.gone.add(peer)
                    self._selector.unregister(self.peers[peer].connection)
                yield peer, message

    def _send_unsent(self, peer: int) -> None:
        unsent = self._unsent[peer]
        with suppress(OSError):
            while unsent:
                self.peers[peer].connection.send(unsent[0], MSG_NOSIGNAL)
                unsent.popleft()

    def require_here(self, peers: Iterable[int]) -> None:
        """Check that peers are still connected. A rank closes its connections before it frees shared memory, so an
        open connection proves that the bytes read from it are those that it sent; and who is done has been told that
        all was read.

        Raises:
            ConnectionError: a peer has given up.
        """
        for peer in peers:
            if self._ends[peer].poll(0):
                raise ConnectionError(closed_by({peer}))

    # ---- the end

    def finish_sending(self) -> None:
        """Send what is still unsent to peers that are here, each within a moment."""
        for peer, unsent in self._unsent.items():
            if unsent and peer not in self.gone:
                self.peers[peer].connection.settimeout(_CLOSE_S)
                self._send_unsent(peer)

    def close(self) -> None:
        """End the connections, which the peers see."""
        with self._descriptors:
            self._selector.close()
            for peer in self.peers.values():
                peer.close()
            wake, self._wake = self._wake, -1
            os.close(wake)

    def close_in_child(self) -> None:
        """Close what a forked process has of them. Held there, a connection would not end when the rank does."""
        self._descriptors = threading.RLock()  # another thread may have held it
        self.close()


def closed_by(peers: Iterable[int]) -> str:
    """The reason to give up where these peers have ended their connection."""
    return f"Connection closed by peer: rank {', '.join(map(str, sorted(peers)))} is gone"
