"""In the metrics of evaluations."""

from tests.mutants.fault import Fault

METRICS = "training/metrics.py"
EVALUATION = "training/callbacks/evaluation.py"
OF_METRICS = ("unit/training/test_metrics.py", "distributed/test_metrics.py")

FAULTS = {
    "metrics-ignored-labels-count": Fault(
        METRICS,
        "        return outputs[counts], labels[counts]\n",
        "        return outputs.flatten(0, -2), labels.flatten()\n",
        "padding counts as wrong predictions",
        OF_METRICS,
    ),
    "metrics-of-one-rank": Fault(
        METRICS,
        "iter(world.sum(torch.cat(parts))",
        "iter(torch.cat(parts)",
        "each rank has the metric of its own micro-batches, and zeros",
        OF_METRICS,
    ),
    "metrics-summed-by-torchmetrics-too": Fault(
        METRICS,
        "metric.sync_on_compute = metric._to_sync = False",
        "metric.sync_on_compute = False",
        "torchmetrics adds up over the ranks what was merged already",
        OF_METRICS,
    ),
    "metrics-not-reset": Fault(
        METRICS,
        "        self._metric.reset()\n        self._metric.update(outputs, labels)\n",
        "        self._metric.update(outputs, labels)\n",
        "a micro-batch has the numbers of those before it on its rank",
        OF_METRICS,
    ),
    "metrics-of-rows-read-for-others": Fault(
        EVALUATION,
        "            if num_counted:\n                measured.add",
        "            if True:\n                measured.add",
        "a rank without a row left measures the first one again",
        OF_METRICS,
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
