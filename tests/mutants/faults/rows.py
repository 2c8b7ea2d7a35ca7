"""In the order in which rows are read, and in what reads them ahead."""

from tests.mutants.fault import Fault

ORDER, BATCHES, LOADER, INPUTS = (
    "data/reading/order.py",
    "data/reading/batches.py",
    "data/reading/loader.py",
    "data/reading/inputs.py",
)
FETCH, SAME, WORKERS = "data/reading/fetch.py", "training/sameness/same_data.py", "data/reading/workers.py"
OF_ORDER, OF_BATCHES, OF_LOADER, OF_FETCH = (
    (f"unit/data/reading/{name}.py",) for name in ("test_order", "test_batches", "test_loader", "test_fetch")
)
OF_FEED, OF_CHECKPOINTS = ("unit/training/test_feed.py",), ("unit/training/callbacks/test_checkpoints.py",)

FAULTS = {
    "order-walks-once": Fault(
        ORDER,
        "    while len(beyond := np.flatnonzero(rows >= num_rows)):\n",
        "    if len(beyond := np.flatnonzero(rows >= num_rows)):\n",
        "a row that does not exist is read",
        OF_ORDER,
    ),
    "order-of-one-epoch-for-all": Fault(
        ORDER,
        "keys[:, of_position.flatten()], num_rows)",
        "keys[:, :1], num_rows)",
        "behind the end of an epoch rows come in the order of the last one",
        OF_ORDER,
    ),
    "order-of-odd-halves": Fault(
        ORDER,
        "    num_left = 2 * math.ceil((math.isqrt(num_rows - 1) + 1) / 2)\n",
        "    num_left = math.isqrt(num_rows - 1) + 1\n",
        "half of the orders of few rows never come",
        OF_ORDER,
    ),
    "order-of-six-rounds": Fault(
        ORDER,
        "_NUM_ROUNDS = 12\n",
        "_NUM_ROUNDS = 6\n",
        "some orders of few rows come more often, and a run goes on with other rows",
        OF_ORDER,
    ),
    "order-of-half-a-seed": Fault(
        ORDER,
        "np.array([seed, epoch], dtype=np.uint64)",
        "np.array([seed % (1 << 32), epoch], dtype=np.uint64)",
        "seeds that differ in their upper half give one order",
        OF_ORDER,
    ),
    "order-hash-of-64-bits": Fault(
        ORDER,
        "    return (values ^ (values >> np.uint64(31))) >> np.uint64(1)\n",
        "    return values ^ (values >> np.uint64(31))\n",
        "a sum that runs over is another hash",
        OF_ORDER,
    ),
    "batch-of-one-epoch": Fault(
        BATCHES,
        "num_rows=self.num_sequences), positions // self.num_sequences\n",
        "num_rows=self.num_sequences), 0 * positions + positions.min() // self.num_sequences\n",
        "rows behind the end of an epoch draw what they drew in the last one",
        OF_BATCHES,
    ),
    "batch-of-ranks-without-leaves": Fault(
        BATCHES,
        "np.arange(self.num_micro_batches) * self.num_virtual_ranks + ",
        "np.arange(self.num_micro_batches) * self.num_ranks + ",
        "with virtual ranks rows are read twice in a step",
        OF_BATCHES,
    ),
    "batch-position-of-the-reader": Fault(
        BATCHES,
        "            yield [row for each in self.micro_batches(position) for row in each.rows]\n",
        "            self.rows_consumed = position\n"
        "            yield [row for each in self.micro_batches(position) for row in each.rows]\n",
        "a run that goes on leaves out what was read ahead",
        OF_BATCHES,
    ),
    "batch-order-said-by-hashes": Fault(
        BATCHES,
        "_OTHER_ORDER if name == _ORDER else ",
        "",
        "a mix with another weight is refused by two hashes",
        OF_BATCHES,
    ),
    "loader-one-step-too-far": Fault(
        LOADER,
        "self._closed or len(self._ready) < self._num_ahead)",
        "self._closed or len(self._ready) <= self._num_ahead)",
        "one step more than was asked for lies in memory",
        OF_LOADER,
    ),
    "loader-error-before-its-place": Fault(
        LOADER,
        "            if not self._ready and self._error is not None:\n",
        "            if self._error is not None:\n",
        "a run ends steps before the row that cannot be read",
        OF_LOADER,
    ),
    "loader-counts-from-the-start": Fault(
        LOADER,
        "            (rows, first_step + step + 1)\n",
        "            (rows, step + 1)\n",
        "the step of a row that cannot be read is another in a run that went on",
        (*OF_LOADER, *OF_FEED),
    ),
    "loader-begins-anew": Fault(
        LOADER,
        "            for rows in sampler.micro_batches(start + step * size)\n",
        "            for rows in sampler.micro_batches(step * size)\n",
        "a run that goes on reads the first rows again",
        (*OF_LOADER, *OF_FEED),
    ),
    "loader-thread-that-draws": Fault(
        LOADER,
        "num_steps_ahead > 0 and (num_workers > 0 or may_be_read_beside(dataset, collate))",
        "num_steps_ahead > 0",
        "a dataset that draws changes the model's dropout",
        (*OF_LOADER, *OF_FEED),
    ),
    "loader-thread-left-behind": Fault(
        LOADER,
        "            self._closed = True\n",
        "",
        "each evaluation of a run leaves a thread that holds two steps",
        OF_LOADER,
    ),
    "loader-knows-no-tokens": Fault(
        LOADER,
        "collate=collate, vocab_size=vocab_size))",
        "collate=collate))",
        "a token that the model does not know is an index out of range hours into a run",
        OF_FEED,
    ),
    "tokens-known-by-their-largest": Fault(
        INPUTS,
        "        outside = (part < 0) | (part >= vocab_size)\n",
        "        outside = part >= vocab_size\n",
        "a negative token is an index out of range hours into a run",
        OF_FETCH,
    ),
    "data-drawn-by-chance": Fault(
        "run/factory.py",
        '    with seeded("data", config.seed):\n',
        "    if True:\n",
        "a dataset that draws what it holds is another on each rank",
        ("unit/run/test_factory.py::test_a_dataset_that_draws_what_it_holds_is_the_same_in_every_process",),
    ),
    "refused-run-sets-aside": Fault(
        "training/trainer.py",
        "        self.feed.agree(self.data_state, self.data_checked)\n"
        "        if resumed is not None and self.world.rank == 0:\n"
        "            self._take_over(resumed)\n",
        "        if resumed is not None and self.world.rank == 0:\n"
        "            self._take_over(resumed)\n"
        "        self.feed.agree(self.data_state, self.data_checked)\n",
        "a run that is refused for its data has set checkpoints aside and cut metrics.jsonl",
        OF_CHECKPOINTS,
    ),
}
