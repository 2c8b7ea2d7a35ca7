"""In what is sent, waited for and counted."""

from tests.mutants.fault import Fault

GROUPS, HANDLES, JOURNAL = "comm/process_groups.py", "comm/handles.py", "comm/accounts/ledger.py"
MEANS = "comm/means.py"
REAL = ("unit/comm/test_process_groups.py",)
ANY = ("unit/comm/test_handles.py",)
ORDER = ("unit/comm/accounts/test_ledger.py", "unit/engine/test_agreement.py")

POSTED, BACKEND = "comm/wires/posted_handles.py", "comm/wires/backend_handles.py"

FAULTS = {
    "mean-over-ranks-and-not-leaves": Fault(
        "comm/means.py",
        "        _divide(total, num_leaves)\n",
        "        _divide(total, len(parts))\n",
        "with several virtual ranks on each rank gradients are too large",
        ("unit/comm/test_means.py",),
    ),
    "own-part-last": Fault(
        POSTED,
        "parts.insert(self._rank, own)",
        "parts.append(own)",
        "parts are not added in rank order",
        REAL,
    ),
    "rows-backwards": Fault(
        MEANS,
        "        into = into[::2]\n",
        "        into = into[::2].flip(0)\n",
        "of many ranks the parts are not added by the tree",
        ("unit/comm/test_means.py",),
    ),
    "middle-part-left-out": Fault(
        MEANS,
        "parts = [*paired, parts[-1]] if len(parts) % 2 else paired",
        "parts = paired",
        "of three ranks one is left out of the sum",
        ("unit/comm/test_means.py",),
    ),
    "mean-is-a-sum": Fault(
        MEANS,
        "total.mul_(1 / by)",
        "total.mul_(1)",
        "gradients are added over ranks, not averaged",
        ("unit/comm/test_means.py",),
    ),
    "mean-of-three-is-a-sum": Fault(
        MEANS,
        "total.div_(by)",
        "total.div_(1)",
        "gradients of three ranks are added, not averaged",
        ("unit/comm/test_means.py",),
    ),
    "16-bits-added-in-16-bits": Fault(
        MEANS,
        "        return total.copy_(a).add_(b)\n",
        "        return torch.add(a, b, out=total)\n",
        "parts of 16 bits are rounded at each level of the tree",
        ("unit/comm/test_means.py",),
    ),
    "receives-not-waited-for": Fault(
        POSTED,
        "                *self._works,\n",
        "",
        "a posted collective waits for its sends alone",
        REAL,
    ),
    "own-part-not-copied": Fault(
        POSTED,
        "            own.copy_(self.shard)\n",
        "            pass\n",
        "a posted gather leaves out this rank's own part",
        REAL,
    ),
    "withdraw-sends-nothing": Fault(
        POSTED,
        "        self._send([values] * self._size)\n        self._wait()\n",
        "        self._works = ()\n",
        "a receive that was posted stays open, and takes what the next collective sends",
        REAL,
    ),
    "withdraw-not-counted": Fault(
        POSTED,
        "        self._journal.ledger.record(self.ledger_kind, self.sent_nbytes)\n",
        "",
        "what is sent to end a receive is not counted",
        REAL,
    ),
    "withdraw-keeps-loan": Fault(
        POSTED,
        "dtype=self._pool.dtype))\n        self._give_back()\n",
        "dtype=self._pool.dtype))\n",
        "every step that is given up keeps a buffer",
        REAL,
    ),
    "prepared-twice": Fault(
        HANDLES,
        "        if self.is_prepared:\n            return\n        started_s",
        "        started_s",
        "receives are posted a second time",
        ANY,
    ),
    "issue-prepares-again": Fault(
        POSTED,
        "        if not self.is_prepared:\n            self._prepare()\n        assert self._full is not None",
        "        self._prepare()\n        assert self._full is not None",
        "a reduction that was prepared posts its receives again",
        REAL,
    ),
    "one-tag-for-all": Fault(
        GROUPS,
        "partial(PostedReduction, group=reductions, tags=tags)",
        "partial(PostedReduction, group=reductions, tags=iter([0] * 99))",
        "parts of two buckets meet",
        REAL,
    ),
    "exchange-sizes-swapped": Fault(
        BACKEND,
        "spec.received_numels, spec.sent_numels, group",
        "spec.sent_numels, spec.received_numels, group",
        "what is sent is cut as what is received",
        REAL,
    ),
    "broadcast-from-another": Fault(
        GROUPS, "group_src=source", "group_src=1 - source", "another rank's initial weights are used", REAL
    ),
    "native-counted-once": Fault(
        BACKEND,
        "            self.sent_nbytes *= 2\n",
        "            pass\n",
        "half of what gloo's own reduce-scatter sends is not counted",
        REAL,
    ),
    "withdraws-what-is-under-way": Fault(
        HANDLES,
        "        if self.is_prepared:\n            self._withdraw()",
        "        if self.is_prepared or self.is_under_way:\n            self._withdraw()",
        "a collective under way is ended as if it had not been issued",
        ANY,
    ),
    "always-done": Fault(
        HANDLES,
        "return self._waited or self._done()",
        "return True",
        "a reduction is finished, and waited for, as soon as it is asked for",
        ANY,
    ),
    "finished-without-wait": Fault(
        HANDLES,
        "        if not self._waited:\n            self.wait()\n        self._complete()",
        "        self._complete()",
        "the result is used before it is there",
        (*ANY, "unit/testing/test_fake_wire.py"),
    ),
    "no-wait-without-overlap": Fault(
        HANDLES, "if not self._journal.overlap:", "if False:", "overlap=False waits for nothing", ANY
    ),
    "not-noted": Fault(
        HANDLES,
        "        self._journal.note(self.kind, self.name)\n",
        "",
        "gathers and reductions have no place in the order that ranks compare",
        ANY,
    ),
    "copies-counted": Fault(
        HANDLES,
        "        if not self.is_local:\n            self._journal",
        "        if True:\n            self._journal",
        "one rank counts collectives that it has with nobody",
        (*ANY, "unit/comm/test_wire.py"),
    ),
    "order-as-a-sum": Fault(
        JOURNAL,
        "(self._orders[kind] * 1_000_003 + ",
        "(self._orders[kind] + ",
        "another order is not told apart",
        ORDER,
    ),
    "order-across-kinds": Fault(
        JOURNAL,
        "self._orders[kind] = (self._orders[kind] * 1_000_003",
        'self._orders[""] = (self._orders[""] * 1_000_003',
        "ranks that skip a unit are refused though nothing is wrong",
        ORDER,
    ),
    "order-too-long": Fault(
        JOURNAL,
        "ORDER_BITS = 52\n",
        "ORDER_BITS = 60\n",
        "fp64 rounds the order, and the ranks' last names with it",
        ORDER,
    ),
    "given-up-step-counts-in-the-next": Fault(
        "comm/accounts/ledger.py",
        "        self.outside_steps.nbytes += self._this_step.nbytes\n        self._this_step = Traffic()",
        "        self.outside_steps.nbytes += self._this_step.nbytes",
        "the next step shows the traffic of two",
        ("unit/comm/accounts/test_ledger.py",),
    ),
    "step-does-not-end": Fault(
        "comm/accounts/ledger.py",
        "self._this_step, Traffic()\n        self.in_step = False",
        "self._this_step, Traffic()",
        "what comes between two steps counts in the next",
        ("unit/comm/accounts/test_ledger.py",),
    ),
    "small-ones-counted-once": Fault(
        "comm/collectives.py",
        "values.nbytes * (self.shards.size - 1)",
        "values.nbytes",
        "the bytes of the norm are those to one other rank",
        ("unit/comm/test_collectives.py",),
    ),
    "buffer-too-small": Fault(
        "comm/scratch.py",
        "if scratch.storage.numel() >= numel]",
        "if scratch.storage.numel() > 0]",
        "a buffer on loan is smaller than asked for",
        ("unit/comm/test_scratch.py",),
    ),
}
