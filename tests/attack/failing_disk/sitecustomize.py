"""Imported by each Python that is started with this folder in its path: a disk that fails one rank, once it is told to.

`ZEROTRAIN_FAILING_DISK` is "what|rank|path": from when on the path is there, reads and writes of that rank fail so.
"""

import errno
import os
import signal
import threading

_SECTOR_NBYTES = 512


def _fail(real, what, path, is_read):
    def call(descriptor, parts, at, *rest):
        is_of_save = is_read and not threading.current_thread().name.startswith("zerotrain-offload")
        if not os.path.exists(path) or (what == "EIO for a save" and not is_of_save):
            return real(descriptor, parts, at, *rest)
        if what == "kill in a write" and not is_read:
            real(descriptor, [parts[0][: len(parts[0]) // 2 // 4096 * 4096]], at)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "short":
            nbytes = max(_SECTOR_NBYTES, len(parts[0]) // 3 // _SECTOR_NBYTES * _SECTOR_NBYTES)
            return real(descriptor, [parts[0][:nbytes]], at)
        if what == "end of file" and is_read:
            return 0
        if what in (("EIO in a read", "EIO for a save") if is_read else ("EIO in a write", "ENOSPC in a write")):
            number = errno.ENOSPC if what.startswith("ENOSPC") else errno.EIO
            raise OSError(number, os.strerror(number))
        return real(descriptor, parts, at, *rest)

    return call


if told := os.environ.get("ZEROTRAIN_FAILING_DISK"):
    _what, _rank, _path = told.split("|")
    if os.environ.get("RANK") == _rank:
        os.preadv = _fail(os.preadv, _what, _path, is_read=True)
        os.pwritev = _fail(os.pwritev, _what, _path, is_read=False)
