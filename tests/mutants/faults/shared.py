"""In how ranks of one host read each other's memory."""

from tests.mutants.fault import Fault

MEMORY, PEERS, COURIER, HANDLES = (
    f"comm/wires/memory/{name}.py" for name in ("shared_memory", "local_peers", "courier", "shared_handles")
)
REAL = ("unit/comm/test_process_groups.py",)
ACROSS = "comm/wires/memory/across_handles.py"
WHOLE = ("distributed/test_shared_memory.py",)
OF_MEMORY = ("unit/comm/wires/memory/test_shared_memory.py",)

FAULTS = {
    "part-of-another-read": Fault(
        HANDLES,
        "place + (first + start) * itemsize",
        "place + start * itemsize",
        "every rank reads the part of rank 0",
        REAL,
    ),
    "pieces-told-as-the-first": Fault(
        HANDLES,
        "self.watch(start, mean)",
        "self.watch(0, mean)",
        "the norm is that of the last piece of each bucket",
        REAL,
    ),
    "own-part-last-of-those-read": Fault(
        HANDLES,
        "parts.insert(self._place, own)",
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
        "comm/wires/memory/local_ranks.py",
        "        weakref.finalize(self, self.courier.leave)\n",
        "",
        "each engine leaves a thread and its connections behind",
        (*WHOLE, "unit/comm/wires/memory/test_local_peers.py"),
    ),
    "strangers-taken-in": Fault(
        PEERS,
        "if not (knows and len(files) == 1):",
        "if not len(files) == 1:",
        "any process of the user that finds the address is taken for a rank",
        ("unit/comm/wires/memory/test_local_peers.py",),
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
    "root-divided-twice": Fault(
        ACROSS,
        "super().__init__(number, code, hosts.local, full, outs, 1)",
        "super().__init__(number, code, hosts.local, full, outs, hosts.local.size)",
        "a host's sum is divided, and the sum of all hosts' once more",
        REAL,
    ),
    "roots-out-of-order": Fault(
        ACROSS,
        "self._roots[self._hosts.host] = sent[self._hosts.host]",
        "self._roots = [*(r for h, r in enumerate(self._roots) if h != self._hosts.host), sent[self._hosts.host]]",
        "the sums of three hosts are not added in their order",
        ("distributed/test_hosts.py::test_on_three_hosts_the_bits_are_those_of_plain_pytorch_too",),
    ),
    "told-before-it-has-come": Fault(
        "comm/wires/memory/arrivals.py",
        "                wait_for(passages)\n",
        "",
        "ranks of a host read what has not come from another host yet",
        REAL,
    ),
    "column-not-copied": Fault(
        "comm/wires/memory/arrivals.py",
        "                    copied[0].copy_(copied[1])\n",
        "                    pass\n",
        "what is received beside a bucket that others cannot read stays there",
        REAL,
    ),
    "roots-in-16-bits": Fault(
        ACROSS,
        "if sent.dtype != torch.float32:",
        "if False:",
        "a host's sum is rounded before it travels",
        ("distributed/test_hosts.py::test_on_two_hosts_every_stage_has_the_bits_of_plain_pytorch",),
    ),
    "host-keeps-a-loss-to-itself": Fault(
        "comm/wires/memory/arrivals.py",
        '                fail(str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}")\n',
        "",
        "where what another host sends does not come, nobody is told before the timeout",
        ("distributed/test_hosts.py::test_a_rank_that_is_killed_is_told_of_on_every_host",),
    ),
}
