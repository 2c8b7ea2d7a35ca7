"""In the metrics of evaluations."""

from tests.mutants.fault import Fault

METRIC = "training/metrics/metric.py"
STATES = "training/metrics/states.py"
STEPS = "training/metrics/steps.py"
EVALUATION = "training/callbacks/evaluation.py"
DATA = "data/reading/batches.py"
OF_SETS = ("unit/training/test_validation_sets.py",)
OF_STEPS = ("distributed/test_training_metrics.py",)
OF_METRICS = ("unit/training/test_metrics.py", "distributed/test_metrics.py")

FAULTS = {
    "metrics-ignored-labels-count": Fault(
        STATES,
        "    return outputs[places], labels[places]\n",
        "    return outputs, labels\n",
        "padding counts as wrong predictions",
        OF_METRICS,
    ),
    "metrics-of-one-rank": Fault(
        STATES,
        "iter(world.sum(torch.cat(parts))",
        "iter(torch.cat(parts)",
        "each rank has the metric of its own micro-batches, and zeros",
        OF_METRICS,
    ),
    "metrics-summed-by-torchmetrics-too": Fault(
        METRIC,
        "metric.sync_on_compute = metric._to_sync = False",
        "metric.sync_on_compute = False",
        "torchmetrics adds up over the ranks what was merged already",
        OF_METRICS,
    ),
    "metrics-not-reset": Fault(
        METRIC,
        "        self._metric.reset()\n        self._metric.update(outputs, labels)\n",
        "        self._metric.update(outputs, labels)\n",
        "a micro-batch has the numbers of those before it on its rank",
        OF_METRICS,
    ),
    "metrics-of-rows-read-for-others": Fault(
        EVALUATION,
        "if mine else (0, 0)\n            batch =",
        "if mine else (1, 1)\n            batch =",
        "a rank without a row left measures the first one again",
        OF_METRICS,
    ),
    "metrics-of-the-last-step-alone": Fault(
        STEPS,
        "        number = self._num_before + index",
        "        number = index",
        "a step writes over those before it since the last line",
        OF_STEPS,
    ),
    "metrics-not-begun-anew": Fault(
        STEPS,
        "        self._begin()\n        return found\n",
        "        return found\n",
        "a line has the micro-batches of the whole run",
        OF_STEPS,
    ),
    "metrics-of-another-micro-batch": Fault(
        STEPS,
        "number = self._num_before + index * self._num_virtual_ranks + virtual_rank",
        "number = self._num_before + index + virtual_rank * self._num_virtual_ranks",
        "two micro-batches have one number, or the digits follow the ranks",
        OF_STEPS,
    ),
    "metrics-forgotten-in-a-checkpoint": Fault(
        STEPS,
        "            if self._world.rank == 0:\n                self._states.load_state_dict",
        "            if False:\n                self._states.load_state_dict",
        "the first line of a resumed run lacks the steps before the resume",
        OF_STEPS,
    ),
    "metrics-restored-on-every-rank": Fault(
        STEPS,
        "            if self._world.rank == 0:\n                self._states.load_state_dict",
        "            if True:\n                self._states.load_state_dict",
        "what was measured before a resume counts once for each rank",
        OF_STEPS,
    ),
    "metrics-of-one-rank-in-a-checkpoint": Fault(
        STEPS,
        "        if self._metrics:\n            self._states.to_first",
        "        if False:\n            self._states.to_first",
        "a checkpoint has what rank 0 has measured alone",
        OF_STEPS,
    ),
    "sets-of-a-resumed-run-are-not-compared": Fault(
        DATA,
        "(name in theirs and name in mine)]",
        "False]",
        "a run goes on with other data under the name of a validation set",
        OF_SETS,
    ),
    "sets-are-split": Fault(
        "run/factory.py",
        "{VALIDATION_FRACTION: 0} | values",
        "values",
        "a tenth of a validation set is evaluated",
        OF_SETS,
    ),
    "sets-in-other-tokens": Fault(
        "run/preflight/data.py",
        " and size != known",
        " and size > known + 1000",
        "a set in the tokens of another tokenizer is evaluated",
        OF_SETS,
    ),
    "metrics-lower-is-better": Fault(
        "training/callback.py",
        '        return -value if metric.partition("/")[0] in self.rising else value\n',
        "        return value\n",
        "early stopping ends a run while its accuracy rises",
        ("unit/training/callbacks/test_early_stopping.py",),
    ),
}
"""By name."""
