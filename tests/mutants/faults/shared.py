"""In how ranks of one host read each other's memory."""

from tests.mutants.fault import Fault

MEMORY, PEERS, COURIER, HANDLES = (
    f"comm/{name}.py" for name in ("shared_memory", "local_peers", "courier", "shared_handles")
)
REAL = ("unit/comm/test_process_groups.py",)
WHOLE = ("distributed/test_shared_memory.py",)
OF_MEMORY = ("unit/comm/test_shared_memory.py",)

FAULTS = {
    "part-of-another-read": Fault(
        HANDLES,
        "(file, offset + self._rank * self._own.nbytes)",
        "(file, offset)",
        "every rank reads the part of rank 0",
        REAL,
    ),
    "own-part-last-of-those-read": Fault(
        HANDLES,
        "parts.insert(self._rank, own)",
        "parts.append(own)",
        "parts are not added in rank order",
        REAL,
    ),
    "own-part-not-copied-beside-those-read": Fault(
        HANDLES,
        "            own.copy_(self.shard)\n",
        "            pass\n",
        "a gather leaves out this rank's own part",
        REAL,
    ),
    "done-before-it-is-read": Fault(
        COURIER,
        "if not (self._errands[number].not_there or self._errands[number].not_read):",
        "if not self._errands[number].not_there:",
        "what is sent may change while others read it",
        REAL,
    ),
    "something-else-taken": Fault(
        COURIER,
        "if (code, nbytes) != (errand.code, errand.nbytes):",
        "if False:",
        "what another collective sends is taken for this one's",
        WHOLE,
    ),
    "thread-stays": Fault(
        "comm/local_ranks.py",
        "        weakref.finalize(self, self.courier.leave)\n",
        "",
        "each engine leaves a thread and its connections behind",
        (*WHOLE, "unit/comm/test_local_peers.py"),
    ),
    "strangers-taken-in": Fault(
        PEERS,
        "if not (knows and len(files) == 1):",
        "if not len(files) == 1:",
        "any process of the user that finds the address is taken for a rank",
        ("unit/comm/test_local_peers.py",),
    ),
    "child-writes-to-the-rank": Fault(
        MEMORY,
        "mmap.MAP_PRIVATE | _MAP_FIXED",
        "mmap.MAP_SHARED | _MAP_FIXED",
        "what a forked process writes into weights is written into the rank's",
        OF_MEMORY,
    ),
    "pages-stay": Fault(
        MEMORY,
        "            self._give_pages_back(offset, nbytes)\n        _LIBC.munmap",
        "            pass\n        _LIBC.munmap",
        "memory that was given back is held until the engine goes",
        OF_MEMORY,
    ),
    "second-wait-blocks": Fault(
        COURIER,
        "            errand.ended.release()  # who waits again",
        "            pass  # who waits again",
        "what cleans up after a rank was lost waits for it once more, until the timeout",
        WHOLE,
    ),
}
