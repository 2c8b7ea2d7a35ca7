"""The fork server of `tests.ranks.processes`, forked from the process of the tests: its ranks have imported what the
tests have."""

import os
import socket
from multiprocessing import connection, forkserver

from tests.ranks.processes import PRELOADED


def fork_rank_server() -> None:
    """Start it, before this process has run anything of torch that makes threads."""
    server = forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        read, written = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.close(written)
                forkserver.main(listener.detach(), read, [*PRELOADED])
            finally:
                os._exit(0)
        os.close(read)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, written, pid
