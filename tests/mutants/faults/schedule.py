"""In what is gathered, freed, closed and reduced, and where."""

from tests.mutants.fault import Fault

SCHEDULE, REDUCTIONS, GATHERS = (f"engine/schedule/{name}.py" for name in ("schedule", "reductions", "gathers"))
LIVE, HOOKS = "engine/schedule/live_unit.py", "engine/schedule/hooks.py"
DIFFER = ("unit/engine/test_ranks_that_differ.py",)
OF_GATHERS = ("unit/engine/schedule/test_gathers.py",)
OF_HOOKS = ("unit/engine/schedule/test_hooks.py",)
ENGINE = ("unit/engine/test_engine.py", "unit/engine/test_engine_between_steps.py")

SKIPPING = ("unit/engine/schedule/test_schedule.py",)

FAULTS = {
    "gradients-aside-end-a-unit": Fault(
        "engine/schedule/schedule.py",
        "self.phase is not Phase.BACKWARD or self._is_aside(position)",
        "self.phase is not Phase.BACKWARD",
        "a forward that is computed again and takes the gradient by its input closes its unit too early",
        ("unit/engine/model/test_unit_forward.py",),
    ),
    "shards-not-fetched-ahead": Fault(
        "engine/schedule/gathers.py",
        "            bucket.weights.fetch_shard()\n",
        "            pass\n",
        "each gather of shards off the device waits for them",
        ("unit/engine/schedule/test_gathers.py",),
    ),
    "skipped-unit-gathers-nothing": Fault(
        SCHEDULE,
        "            self.gathers.gather_ahead(skipped)\n",
        "",
        "a rank that skips a block reduces it before it gathers the next, the others after",
        SKIPPING,
    ),
    "skipped-unit-closes-all": Fault(
        REDUCTIONS,
        "if within is not None and not within.issuperset(self._units_of[self._waiting[0]]):",
        "if False:",
        "a rank that skips a block reduces it before the others do",
        SKIPPING,
    ),
    "closed-behind-the-gathers": Fault(
        SCHEDULE,
        "        self.reductions.close_passed(position)\n        self.gathers.before_backward(unit)\n",
        "        self.gathers.before_backward(unit)\n        self.reductions.close_passed(position)\n",
        "a rank with an unused parameter gathers before it reduces, the others after",
        DIFFER,
    ),
    "not-closed-where-a-unit-is-reached": Fault(
        SCHEDULE,
        "        self.reductions.close_passed(position)\n",
        "",
        "buckets with unused parameters hold up all reductions before them to the end",
        DIFFER,
    ),
    "not-closed-before-a-recomputation": Fault(
        SCHEDULE,
        "            self.reductions.close_passed(_node_under_way())\n",
        "            pass\n",
        "a recomputation gathers ahead before what is passed is reduced",
        DIFFER,
    ),
    "passed-too-early": Fault(
        LIVE,
        "if position >= call.first_node and (",
        "if position > call.first_node and (",
        "a unit counts as passed while its first node is still to run",
        DIFFER,
    ),
    "second-call-ignored": Fault(
        LIVE,
        "return len(entered) == 1 and entered[0].reached_in == backward",
        "return len(entered) >= 1 and any(call.reached_in == backward for call in entered)",
        "a unit called twice is taken for passed behind its last call",
        DIFFER,
    ),
    "inner-units-ignored": Fault(
        LIVE,
        " and not self.calls_units",
        "",
        "a unit that calls another is taken for passed where the other is reached",
        DIFFER,
    ),
    "used-up-calls-stay-open": Fault(
        LIVE,
        "(not call.is_used_up or call.reached_in == backward)",
        "True",
        "behind a backward whose graph is kept alive nothing is ever passed",
        ENGINE,
    ),
    "root-closed-early": Fault(
        SCHEDULE,
        "bucket in unit.buckets] or blocks",
        "bucket in unit.buckets]",
        "what belongs to no block is reduced as soon as it is complete, on one rank earlier than on others",
        DIFFER,
    ),
    "unannounced-read-not-kept-open": Fault(
        SCHEDULE,
        "bucket.stays_full = bucket.is_read_unannounced = True",
        "bucket.stays_full = True",
        "a bucket read by a parent module is closed before that gradient comes",
        ("unit/engine/test_build.py",),
    ),
    "late-gradient-not-told": Fault(
        REDUCTIONS,
        "        self._closed_short.append(bucket)\n",
        "",
        "a gradient that comes when its bucket was closed is lost without a word",
        ENGINE,
    ),
    "freed-on-one-rank-alone": Fault(
        SCHEDULE,
        "            if going is not None:\n",
        "            if True:\n",
        "the rank whose gradient came frees a weight that another keeps, and gathers it again alone",
        DIFFER,
    ),
    "reduced-in-list-order": Fault(
        REDUCTIONS,
        "deque(reversed(self.trained))",
        "deque(self.trained)",
        "every reduction waits for the first unit, which a backward reaches last",
        ("unit/engine/test_engine.py",),
    ),
    "finished-between-the-models-collectives": Fault(
        REDUCTIONS,
        "if not (self._gathers and any(bucket.gradient.reduction.ends_with_gather for bucket in self._in_flight)):",
        "if True:",
        "a gather is issued where this rank happens to see its reduction done",
        ENGINE,
    ),
    "earlier-reductions-not-finished": Fault(
        REDUCTIONS,
        "        self.finish()  # what an earlier backward of the same step has issued\n",
        "",
        "a second backward fills what the first one's reduction still reads",
        ENGINE,
    ),
    "room-on-the-wire-ignored": Fault(
        REDUCTIONS,
        "self._in_flight_numel + bucket.layout.padded_numel > self._max_numel_in_flight",
        "False",
        "a backward holds the gradients of all buckets at once",
        ENGINE,
    ),
    "all-prepared-at-once": Fault(
        REDUCTIONS,
        "            if self._num_prepared and ahead_numel > self._max_numel_in_flight:\n                return\n",
        "",
        "buffers to receive into are held for all buckets at once",
        ENGINE,
    ),
    "prepared-not-withdrawn": Fault(
        "engine/buckets/reduction.py",
        "        self.handle.withdraw()\n",
        "",
        "a backward that breaks off keeps buffers, and receives that nobody ends",
        ENGINE,
    ),
    "micro-batches-reduced": Fault(
        REDUCTIONS,
        "        if backward.reduces:\n            self._waiting",
        "        if True:\n            self._waiting",
        "the backwards within no_sync get ready to reduce",
        ENGINE,
    ),
    "prefetch-off-by-one": Fault(
        LIVE, "if new and prefetch > 0:", "if new and prefetch > 1:", "one unit less is gathered ahead", OF_GATHERS
    ),
    "empty-units-count-as-ahead": Fault(
        LIVE,
        "        if new and prefetch > 0:\n            ahead += new\n            prefetch -= 1",
        "        if prefetch > 0:\n            ahead += new\n            prefetch -= 1",
        "units that share a bucket use up what is gathered ahead",
        OF_GATHERS,
    ),
    "freed-behind-the-first-unit": Fault(
        GATHERS,
        "_needed_by(self._units[index + 1 :])",
        "set()",
        "a bucket of several units is gathered once for each",
        OF_GATHERS,
    ),
    "freed-within-the-outer-unit": Fault(
        GATHERS,
        " or any(bucket in outer.buckets for outer in self._running)",
        "",
        "a unit that calls another of its bucket finds it freed",
        OF_GATHERS,
    ),
    "outer-unit-freed-in-the-backward": Fault(
        GATHERS,
        " or behind.calls_units",
        "",
        "a unit that calls another is freed where the backward reaches that one",
        OF_GATHERS,
    ),
    "shared-bucket-freed-in-the-backward": Fault(
        GATHERS,
        "(bucket.stays_full or bucket in unit.buckets)",
        "(bucket.stays_full)",
        "a bucket of two units is gathered twice in a backward",
        OF_GATHERS,
    ),
    "freed-behind-a-later-unit-in-the-backward": Fault(
        GATHERS,
        "for bucket in behind.first_of:",
        "for bucket in behind.buckets:",
        "a bucket of two blocks is gathered again by ranks that do not skip the later one",
        OF_GATHERS,
    ),
    "evaluation-leaves-all-full": Fault(
        GATHERS,
        "if not (backward_follows and bucket.stays_full):",
        "if not bucket.stays_full:",
        "what is kept for a backward is kept behind an evaluation too",
        OF_GATHERS,
    ),
    "backward-does-not-look-what-is-there": Fault(
        GATHERS,
        "                bucket.awaits_backward = True\n",
        "                pass\n",
        "what an evaluation freed is missing in the backward",
        OF_GATHERS,
    ),
    "awaits-for-ever": Fault(
        GATHERS,
        "                bucket.awaits_backward = False\n",
        "                pass\n",
        "a backward gathers what a forward of an earlier step had kept",
        OF_GATHERS,
    ),
    "gathered-ahead-and-never-freed": Fault(
        GATHERS,
        "is not WeightState.SHARD:\n            bucket.weights.finish_gather()\n",
        "is not WeightState.SHARD:\n",
        "what was gathered ahead and not used stays under way",
        OF_GATHERS,
    ),
    "stage-3-gathers-behind-the-update": Fault(
        GATHERS,
        "self.plan.shards_optimizer and not self.plan.shards_parameters",
        "self.plan.shards_optimizer",
        "stage 3 is whole between steps",
        OF_GATHERS,
    ),
    "hooks-left": Fault(
        HOOKS, "        hook.remove()\n", "        pass\n", "a deleted engine is called by its model", OF_HOOKS
    ),
    "not-drained": Fault(
        HOOKS, "        schedule.drain()\n", "        pass\n", "a deleted engine leaves ranks waiting", OF_HOOKS
    ),
    "engine-for-ever": Fault(
        HOOKS,
        "    _HOOKED.difference_update(modules)\n",
        "",
        "a model whose engine was deleted is refused",
        OF_HOOKS,
    ),
    "two-hooks": Fault(
        HOOKS,
        "        self.remove()\n        self._handle = register_last_hook",
        "        self._handle = register_last_hook",
        "the hook on the last gradient is left behind wherever it was",
        OF_HOOKS,
    ),
    "aside-not-announced": Fault(
        HOOKS,
        "    if last_node + 1 < next_node():\n        schedule.keep(unit)\n",
        "",
        "a backward that enters a unit by another way than its output reads freed memory",
        OF_HOOKS,
    ),
    "input-announces": Fault(
        HOOKS,
        "(node := tensor.grad_fn._sequence_nr()) >= first_node:",
        "(node := tensor.grad_fn._sequence_nr()) >= 0:",
        "a unit that hands on its input is reached where the input is",
        OF_HOOKS,
    ),
    "experts-as-units": Fault(
        "sharding/units.py",
        '    if name.rpartition(".")[2] in CHOSEN_CHILDREN:\n        return {}\n',
        "",
        "ranks that choose different experts wait for each other",
        ("unit/engine/test_build.py",),
    ),
    "heap-kept-at-all-times": Fault(
        SCHEDULE,
        "reuse_what_is_freed(reuses=False)",
        "reuse_what_is_freed()",
        "what lives longer than a step stays resident when it is freed",
        ("unit/device/test_heap.py",),
    ),
    "freed-buckets-stay-resident": Fault(
        "engine/build.py",
        "                give_back_freed()\n",
        "",
        "a change of the stage needs much more than a bucket beside the larger of the two",
        ("distributed/test_checkpoints.py",),
    ),
}
