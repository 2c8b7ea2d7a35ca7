"""In the gradient of a bucket, and in the norm over all of them."""

from tests.mutants.fault import Fault

FILE, NORM = "engine/buckets/gradient.py", "engine/buckets/parts/norm.py"
REDUCTION = "engine/buckets/reduction.py"
OF_LEAVES = ("unit/engine/test_virtual_ranks.py",)
SUBTREES = "engine/buckets/parts/subtrees.py"
UNIT = ("unit/engine/buckets/test_gradient.py",)
OF_SUMS = ("unit/engine/test_accumulate.py",)
OF_NORM = ("unit/engine/buckets/parts/test_norm.py",)

FAULTS = {
    "large-gradient-not-copied": Fault(
        FILE,
        "        targets[-1].copy_(sources[-1])\n",
        "",
        "a large parameter trains with what the buffer held before",
        UNIT,
    ),
    "drop-keeps-the-earlier-sum": Fault(
        REDUCTION,
        "self._sum = self._squares = None\n\n    def give_back",
        "pass\n\n    def give_back",
        "a gradient that was given up is added to the next step",
        UNIT,
    ),
    "drop-does-not-wait": Fault(
        REDUCTION,
        "            self._finish_gather(self._gather)\n        self.handle.withdraw()",
        "            pass\n        self.handle.withdraw()",
        "the next gradient is filled into what a gather still writes",
        UNIT,
    ),
    "drop-keeps-the-loan": Fault(
        FILE,
        "            self._pool.give_back(self._unreduced)\n",
        "            pass\n",
        "every backward that breaks off keeps a buffer",
        UNIT,
    ),
    "what-weighs-nothing-is-kept": Fault(
        FILE,
        "        if not counts:\n",
        "        if False:\n",
        "the nan of a micro-batch without labels reaches the gradient",
        ("unit/engine/test_losses.py",),
    ),
    "zeros-not-filled": Fault(
        FILE,
        "            if not self.holds_values:\n",
        "            if False:\n",
        "an unused parameter gets what the buffer held before",
        UNIT,
    ),
    "padding-not-zero": Fault(
        FILE,
        "(flat[self.layout.slots[-1].end :] if self.layout.is_dense else flat).zero_()",
        "flat[self.layout.slots[-1].end :].zero_()",
        "garbage between parameters is summed, squared and updated",
        UNIT,
    ),
    "end-not-zero": Fault(
        FILE,
        "(flat[self.layout.slots[-1].end :] if self.layout.is_dense else flat).zero_()",
        "(flat[:0] if self.layout.is_dense else flat).zero_()",
        "garbage behind the last parameter is summed, squared and updated",
        UNIT,
    ),
    "values-held-for-ever": Fault(
        FILE,
        "            segment.holds_values = False",
        "            pass",
        "the next step's gradient is added to what a buffer holds",
        UNIT,
    ),
    "accumulated-in-16-bits": Fault(
        FILE,
        "not backward.reduces and self.precision.separate_master",
        "False",
        "micro-batches are added with eight bits",
        UNIT,
    ),
    "earlier-sum-lost": Fault(
        REDUCTION,
        "            self.shard.copy_(self._sum.add_(self.shard))\n",
        "",
        "the first of two reduced backwards is forgotten",
        UNIT,
    ),
    "earlier-sum-not-copied": Fault(
        REDUCTION,
        "self.shard.to(self._master, copy=True)",
        "self.shard.to(self._master)",
        "the first of two reduced backwards is overwritten by the second",
        UNIT,
    ),
    "sum-of-micro-batches-rounded": Fault(
        REDUCTION,
        "            if self._sum.dtype == self.shard.dtype:\n",
        "            if True:\n",
        "in 16 bits micro-batches that are reduced one by one are added with eight bits",
        OF_SUMS,
    ),
    "gathered-for-each-micro-batch": Fault(
        REDUCTION,
        "        if self._gather is not None and self.completes:\n",
        "        if self._gather is not None:\n",
        "stage 0 gathers the gradient of every micro-batch",
        OF_SUMS,
    ),
    "complete-without-the-last": Fault(
        FILE,
        "        return self.reduction.completes and self.life.state in",
        "        return self.life.state in",
        "a step is made of a gradient to which nobody added the last micro-batch",
        OF_SUMS,
    ),
    "leaf-rounded-though-it-travels-wide": Fault(
        FILE,
        "        if self._accumulates and not self._widens:\n",
        "        if self._accumulates:\n",
        "a sum of micro-batches is rounded before it is widened",
        OF_SUMS,
    ),
    "gradient-stays-with-its-parameter": Fault(
        FILE,
        "        gradients.clear()\n        self.forget()\n",
        "        gradients.clear()\n",
        "the next backward adds to a gradient that was moved already",
        UNIT,
    ),
    "loan-given-back-when-sent": Fault(
        FILE,
        "completes=completes)\n",
        "completes=completes)\n        self._pool._free += [self._unreduced] if self._unreduced else []\n",
        "the next bucket is filled into what is on the wire",
        ("unit/engine/test_engine.py",),
    ),
    "leaf-not-rounded": Fault(
        FILE,
        "            leaf.storage.copy_(leaf.storage.to(self.precision.compute))\n",
        "            pass\n",
        "in 16 bits a leaf has other bits where its rank runs another",
        OF_LEAVES,
    ),
    "leaf-with-garbage": Fault(
        FILE,
        "[each for each in self.segments if not each.holds_values]",
        "[]",
        "what a leaf did not use counts with what the buffer held before",
        OF_LEAVES,
    ),
    "leaves-in-a-row": Fault(
        SUBTREES,
        "            leaf, level = neighbour, level + 1\n",
        "            leaf = neighbour\n",
        "leaves of a rank are not added by the tree",
        OF_LEAVES,
    ),
    "leaves-kept": Fault(
        SUBTREES,
        "        self._waiting.clear()\n",
        "        pass\n",
        "leaves of a step that was given up are added to the next",
        OF_LEAVES,
    ),
    "loan-not-given-back": Fault(
        FILE,
        "        self._give_back()\n        self._end_filling()\n        self.life.become(GradientState.REDUCED)",
        "        self._end_filling()\n        self.life.become(GradientState.REDUCED)",
        "every step holds more memory",
        ("unit/engine/test_engine.py", "unit/engine/buckets/test_gradient.py"),
    ),
    "loss-scale-in-the-norm": Fault(
        REDUCTION,
        "squares.div_(loss_scale**2)",
        "squares.div_(loss_scale)",
        "the norm, and what is clipped by it, grows with the root of the loss scale",
        UNIT,
    ),
    "gathered-gradient-not-waited-for": Fault(
        REDUCTION,
        "            self._finish_gather(self._gather)\n        return self._updated",
        "            pass\n        return self._updated",
        "stage 0 updates with what has not arrived",
        UNIT,
    ),
    "infinity-of-no-row": Fault(
        NORM,
        "torch.where(largest.isfinite(), highest, math.inf)",
        "highest",
        "what is not finite skips no step",
        OF_NORM,
    ),
    "digit-of-the-first-row": Fault(
        NORM, "top = rows[:, 0].max()", "top = rows[0, 0]", "a larger gradient of another rank leaves the norm", OF_NORM
    ),
    "zeros-claim-a-digit": Fault(
        NORM,
        "torch.where(largest > 0, top, _NO_DIGIT)",
        "torch.where(largest >= 0, top, _NO_DIGIT)",
        "beside a bucket of zeros small gradients lose their low digits",
        OF_NORM,
    ),
    "two-digits": Fault(NORM, "NUM_DIGITS = 3\n", "NUM_DIGITS = 2\n", "the norm has half the bits it says", OF_NORM),
}
