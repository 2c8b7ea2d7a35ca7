"""Imported by each Python that is started with this folder in its path: a system that forbids a call, or a rank that is
held while it meets the others.

`ZEROTRAIN_FORBIDDEN` is "call|error|ranks|folder": this call of Linux fails so on these ranks (seccomp), from the start
on; or, with a folder, once the file "forbid" is there, which is answered by "forbidden".
`ZEROTRAIN_HELD` is "rank|folder": before it connects to another rank this one leaves the file "held" there, and waits
for the file "go-on".
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import threading
import time

NUMBERS = {
    "x86_64": {"seccomp": [317], "fallocate": [285], "memfd_create": [319], "preadv": [295, 327]},
    "aarch64": {"seccomp": [277], "fallocate": [47], "memfd_create": [279], "preadv": [69, 286]},
}
"""Of the calls, and of those that do the same."""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _OF_ALL_THREADS = 1, 1


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _forbid(call, error):
    numbers = NUMBERS[platform.machine()][call]
    lines = [(_LOAD, 0, 0, 0)]
    lines += [(_JUMP_IF_EQUAL, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _FAIL | error)]
    text = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    program, libc = _Program(len(lines), ctypes.addressof(text)), ctypes.CDLL(None, use_errno=True)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    [number] = NUMBERS[platform.machine()]["seccomp"]
    if libc.syscall(number, _SET_FILTER, _OF_ALL_THREADS, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


def _forbid_later(call, error, folder):
    while not os.path.exists(os.path.join(folder, "forbid")):
        time.sleep(0.02)
    _forbid(call, error)
    open(os.path.join(folder, "forbidden"), "w").close()


def _hold(folder):
    connect = socket.socket.connect

    def held(self, address):
        if str(address).startswith("\0zerotrain-"):
            open(os.path.join(folder, "held"), "w").close()
            while not os.path.exists(os.path.join(folder, "go-on")):
                time.sleep(0.02)
        connect(self, address)

    socket.socket.connect = held


if told := os.environ.get("ZEROTRAIN_FORBIDDEN"):
    _call, _error, _ranks, _folder = told.split("|")
    if os.environ.get("RANK") in _ranks.split(","):
        _given = (_call, getattr(errno, _error))
        if _folder:
            threading.Thread(target=_forbid_later, args=(*_given, _folder), daemon=True).start()
        else:
            _forbid(*_given)
if told := os.environ.get("ZEROTRAIN_HELD"):
    _rank, _folder = told.split("|")
    if os.environ.get("RANK") == _rank:
        _hold(_folder)
