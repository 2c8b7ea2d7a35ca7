"""Memory of a rank that the other ranks of its host can read: the pages of a file that has no name.

The file (memfd) is in no folder, so the size of /dev/shm does not matter, other users cannot open it, and nothing is
left of it when the last process that holds it ends, however it does. The others read it by its descriptor and never map
it: what a rank has resident is its own.
"""

import ctypes
import mmap
import os
import weakref

import torch

FILE_NBYTES = 2**46
"""Size of the file, nearly all of it a hole: each allocation gets its own range, and none is given out twice."""
_MAP_FIXED = 0x10
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_PART_NBYTES = 2**24
_FAILED = ctypes.c_void_p(-1).value
_LIBC = ctypes.CDLL(None, use_errno=True)
# Not Python's mmap, which keeps a descriptor open for each mapping: a model has hundreds of buckets.
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class SharedMemory:
    """Tensors in memory that others can read. It lives as long as any of them.

    Raises:
        OSError: the system gives no such file.
    """

    def __init__(self) -> None:
        self.file = os.memfd_create("zerotrain", os.MFD_CLOEXEC)
        self._owner = os.getpid()
        self._next = 0
        self._mapped: dict[int, tuple[int, int]] = {}
        """(offset in the file, bytes) by address."""
        weakref.finalize(self, os.close, self.file).atexit = False
        os.ftruncate(self.file, FILE_NBYTES)
        _OF_THIS_PROCESS.add(self)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all tensors that are alive, in whole pages."""
        return sum(nbytes for _, nbytes in list(self._mapped.values()))

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) zeros, in pages of its own.

        Raises:
            RuntimeError: there is no memory.
        """
        if numel == 0 or os.getpid() != self._owner:  # a forked process has nobody to read it
            return torch.zeros(numel, dtype=dtype)
        nbytes = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        offset, self._next = self._next, self._next + nbytes
        try:
            # Now: where there is no room, the first write to a page would end the process by SIGBUS.
            # In parts: begun anew at each signal, a large one might never end under a profiler's timer.
            for start in range(0, nbytes, _PART_NBYTES):
                os.posix_fallocate(self.file, offset + start, min(_PART_NBYTES, nbytes - start))
            address = _map(None, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, self.file, offset)
        except OSError as error:
            self._give_pages_back(offset, nbytes)
            raise RuntimeError(f"cannot allocate {nbytes} bytes of memory for other ranks to read: {error}") from error
        self._mapped[address] = (offset, nbytes)
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        # The tensor keeps `memory` alive. Not at the interpreter's end, when tensors may still be read.
        weakref.finalize(memory, self._free, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def _free(self, address: int) -> None:
        offset, nbytes = self._mapped.pop(address)
        if os.getpid() == self._owner:
            self._give_pages_back(offset, nbytes)
        _LIBC.munmap(address, nbytes)

    def _give_pages_back(self, offset: int, nbytes: int) -> None:
        _LIBC.fallocate(self.file, _PUNCH_HOLE | _KEEP_SIZE, offset, nbytes)  # the file lives on

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Offset of a contiguous tensor in the file; None if it lies elsewhere."""
        address = tensor.untyped_storage().data_ptr()
        mapped = self._mapped.get(address)
        return None if mapped is None else mapped[0] + tensor.data_ptr() - address

    def part_in_child(self) -> None:
        """In a forked process: what it writes from now on is its own, as it is of all other memory."""
        for address, (offset, nbytes) in self._mapped.items():
            _map(address, nbytes, mmap.MAP_PRIVATE | _MAP_FIXED, self.file, offset)


def _map(address: int | None, nbytes: int, flags: int, file: int, offset: int) -> int:
    mapped = _LIBC.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, file, offset)
    if mapped == _FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(mapped)


def read_into(address: int, nbytes: int, file: int, offset: int) -> None:
    """Copy bytes of another rank's file to an address of this one.

    Raises:
        RuntimeError: they cannot be read.
    """
    while nbytes > 0:
        try:
            read = os.preadv(file, [(ctypes.c_ubyte * nbytes).from_address(address)], offset)
        except OSError as error:
            raise RuntimeError(f"cannot read another rank's memory: {error}") from error
        if read == 0:
            raise RuntimeError("cannot read another rank's memory: it ends before the bytes that were asked for")
        address, nbytes, offset = address + read, nbytes - read, offset + read


_OF_THIS_PROCESS: "weakref.WeakSet[SharedMemory]" = weakref.WeakSet()


def _part_in_child() -> None:
    for memory in list(_OF_THIS_PROCESS):
        memory.part_in_child()


os.register_at_fork(after_in_child=_part_in_child)
