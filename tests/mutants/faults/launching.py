"""In what the launcher looks at before the ranks, and in what it leaves."""

from tests.mutants.fault import Fault

FAULTS = {
    "lock-kept-by-workers": Fault(
        "launching/end/presence.py",
        "        os.register_at_fork(after_in_child=lambda: os.close(self._descriptor))\n",
        "",
        "a rank that is gone counts as alive for a worker it has forked",
        ("unit/launching/end/test_presence.py",),
    ),
    "room-for-one-rank": Fault(
        "run/preflight/memory_room.py",
        "available_nbytes() / num_local",
        "available_nbytes()",
        "each rank of a machine is given all of its memory",
        ("unit/run/preflight/test_memory_room.py",),
    ),
    "room-without-gradients": Fault(
        "run/preflight/memory_room.py",
        "volume.memory_nbytes(plan, optimizer_nbytes)}",
        'volume.memory_nbytes(plan, optimizer_nbytes), "gradients": 0.0}',
        "gradients take no memory",
        ("unit/run/preflight/test_memory_room.py",),
    ),
}
