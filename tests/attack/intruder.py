"""A process that tries to get at the memory of another, and at the addresses where ranks of zerotrain meet.

    python intruder.py USER PROCESS DESCRIPTOR PLACE LISTENER CONNECTIONS

It becomes that user first, once all is imported, since others may not read this Python. The descriptor is one of the
process's memory, and something is mapped at the place. Prints a line of JSON as soon as it has
tried all, and another once a line comes on stdin: what it got over its connections until then.
"""

import ctypes
import json
import os
import socket
import sys

from zerotrain.testing.limits import HANG_S

_PIDFD_OPEN, _PIDFD_GETFD, _PTRACE_SEIZE, _PTRACE_DETACH = 434, 438, 0x4206, 17
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _Piece(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def opened(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags))
    except OSError:
        return False
    return True


def listed(path: str) -> bool:
    try:
        return len(os.listdir(path)) > 0
    except OSError:
        return False


def read_by_call(process: int, place: int) -> bool:
    text = ctypes.create_string_buffer(8)
    to, of = _Piece(ctypes.addressof(text), 8), _Piece(place, 8)
    return LIBC.process_vm_readv(process, ctypes.byref(to), 1, ctypes.byref(of), 1, 0) == 8


def taken_descriptor(process: int, descriptor: int) -> bool:
    handle = LIBC.syscall(_PIDFD_OPEN, process, 0)
    return handle >= 0 and LIBC.syscall(_PIDFD_GETFD, handle, descriptor, 0) >= 0


def traced(process: int) -> bool:
    if LIBC.ptrace(_PTRACE_SEIZE, process, None, None) != 0:
        return False
    LIBC.ptrace(_PTRACE_DETACH, process, None, None)
    return True


def connected(listener: str, number: int) -> list[socket.socket]:
    """So many connections, or as many as there is room for."""
    made = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(number)]
    for index, connection in enumerate(made):
        connection.settimeout(HANG_S)
        try:
            connection.connect("\0" + listener)
        except OSError:
            return made[:index]
    return made


def got(connection: socket.socket) -> list[int]:
    """Descriptors that came, until the other side has ended the connection; [-1] where something else came."""
    try:
        said, descriptors, _, _ = socket.recv_fds(connection, 100, 4)
    except OSError:  # nothing, or the end
        return []
    return descriptors or ([-1] if said else [])


def main() -> None:
    user, process, descriptor, place = map(int, sys.argv[1:5])
    listener, num_connections = sys.argv[5], int(sys.argv[6])
    if user != os.getuid():
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    found = {
        "its files": listed(f"/proc/{process}/fd"),
        "the memory's file": opened(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY),
        "the memory's file, to write": opened(f"/proc/{process}/fd/{descriptor}", os.O_RDWR),
        "its mappings": listed(f"/proc/{process}/map_files"),
        "all its memory": opened(f"/proc/{process}/mem", os.O_RDONLY),
        "process_vm_readv": read_by_call(process, place),
        "pidfd_getfd": taken_descriptor(process, descriptor),
        "ptrace": traced(process),
    }
    made = connected(listener, num_connections)
    for index, connection in enumerate(made):  # some say something that is no secret, the others nothing
        if index % 4 == 3:
            socket.send_fds(connection, [b"x" * 24], [0])
    print(json.dumps({**found, "connections": len(made)}), flush=True)
    sys.stdin.readline()
    print(json.dumps([each for connection in made for each in got(connection)]), flush=True)


if __name__ == "__main__":
    main()
