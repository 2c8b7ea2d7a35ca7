"""In how calls are agreed on: what is refused must change nothing."""

from tests.mutants.fault import Fault

TOGETHER, COLLECTIVES = "engine/state/together.py", "comm/collectives.py"
OF_TOGETHER = ("unit/engine/state/test_together.py",)
OF_REFUSALS = ("unit/engine/test_refusals.py",)
OF_ALL_CALLS = (
    "distributed/test_refusals.py"
    "::test_after_each_refusal_training_goes_on_with_the_bits_of_a_run_that_was_never_refused",
)
OF_GROUPS = ("unit/comm/test_process_groups.py",)

FAULTS = {
    "agreed-whatever-was-given": Fault(
        TOGETHER,
        "_hash(repr([given, facts]))",
        "0",
        "ranks that were given other things go on with them",
        OF_TOGETHER,
    ),
    "agreed-whoever-refuses": Fault(
        TOGETHER,
        "int(error is not None), ",
        "0, ",
        "what one rank refuses the others do",
        OF_TOGETHER,
    ),
    "refusal-in-the-order": Fault(
        TOGETHER,
        "everyone = collectives.gather_small(mine, name=call, in_order=False)",
        "everyone = collectives.gather_small(mine, name=call)",
        "each step fails behind a refusal of other calls",
        OF_TOGETHER,
    ),
    "refused-groups-stay": Fault(
        "engine/groups/param_groups.py",
        "            vars(self).update(kept)\n",
        "",
        "a group that was refused has taken its parameters",
        OF_REFUSALS,
    ),
    "refused-parameters-train": Fault(
        "engine/groups/param_groups.py",
        "                parameter.requires_grad_(parameter in trained)\n            raise\n",
        "                pass\n            raise\n",
        "half of a freeze is done when it is refused",
        OF_ALL_CALLS,
    ),
    "writes-told-once": Fault(
        "engine/update/optimizer_step.py",
        "        written ^= bucket.weights.writes.digest\n",
        "        written ^= bucket.weights.writes.digest\n        bucket.weights.writes.digest = 0\n",
        "the step behind a refusal trains other weights on each rank",
        OF_REFUSALS,
    ),
    "forgotten-backwards-count": Fault(
        "engine/step.py",
        "        self.stamps.num_backwards = 0\n",
        "",
        "a rank that gave up a backward is told at each step that it made too many",
        OF_REFUSALS,
    ),
    "comparisons-without-names": Fault(
        "comm/accounts/frames.py",
        "    if (heads != heads[0]).any():\n",
        "    if False:\n",
        "ranks take what belongs to another comparison",
        OF_GROUPS,
    ),
    "met-and-noted": Fault(
        COLLECTIVES,
        "                self._journal.take_back(kind, name)\n",
        "                pass\n",
        "ranks that met in different calls never agree on the order again",
        OF_GROUPS,
    ),
    "taken-though-refused": Fault(
        "engine/state/sources/state_dict.py",
        "                self._model.load_state_dict(before, strict=False)\n",
        "                pass\n",
        "buffers are loaded where a module refused what it was to keep",
        OF_ALL_CALLS,
    ),
    "halves-of-two-checkpoints": Fault(
        "engine/state/sources/checkpoint.py",
        "        if read_manifest(folder).text() != text:\n",
        "        if False:\n",
        "a rank whose path leads to another checkpoint finds out when half of it is loaded",
        OF_ALL_CALLS,
    ),
    "weights-too-many": Fault(
        "engine/update/leaves.py",
        "len(weights) != len(micro_batches)",
        "len(weights) < len(micro_batches)",
        "weights that belong to no micro-batch are left out without a word",
        OF_ALL_CALLS,
    ),
}
