"""In the moving average of weights."""

from tests.mutants.fault import Fault

OF_AVERAGE = ("unit/engine/test_average.py",)
UPDATE, FILL = "engine/buckets/update.py", "engine/state/fill.py"
OTHERS, AVERAGE = "engine/state/sources/other_buckets.py", "engine/update/average.py"

FAULTS = {
    "average-of-skipped-steps": Fault(
        "engine/step.py",
        "            if average is not None and share is not None:\n                average.num_updates += 1",
        "        if average is not None and share is not None:\n            average.num_updates += 1",
        "a skipped step counts as an update of the average",
        OF_AVERAGE,
    ),
    "average-swapped-beside-a-save": Fault(
        UPDATE,
        "  # it has been updated\n        self._weights.about_to_change()\n",
        "  # it has been updated\n",
        "a checkpoint saved beside an evaluation holds the average as its weights",
        OF_AVERAGE,
    ),
    "average-not-from-the-weight": Fault(
        OTHERS,
        "named = WEIGHT if role == AVERAGE and current_average(old) is None else role",
        "named = role",
        "what begins to train in mid-run is averaged from 0",
        OF_AVERAGE,
    ),
    "average-stays-from-before-a-load": Fault(
        FILL,
        "_average(source, bucket) if source.has_average else None",
        "_average(source, bucket) if source.has_average else bucket.update.kept.average",
        "a checkpoint without an average leaves that of another training",
        OF_AVERAGE,
    ),
    "average-decays-at-once": Fault(
        AVERAGE,
        "return 1 - min(self.decay, grown)",
        "return 1 - self.decay",
        "the first weights stay in the average of a short run",
        OF_AVERAGE,
    ),
    "average-not-planned": Fault(
        "engine/usage.py",
        "4 * sum(bucket.layout.numel for bucket in trained) if self.averages else 0",
        "0",
        "the start of a run promises less memory than it takes",
        OF_AVERAGE,
    ),
    "average-not-offloaded": Fault(
        "engine/buckets/parts/kept.py",
        '        if self.average is not None:\n            yield "average", self.average\n',
        "",
        "the average of an offloaded state stays in the device's memory",
        OF_AVERAGE,
    ),
    "average-trained": Fault(
        AVERAGE,
        "        if self.is_in_use:\n",
        "        if False:\n",
        "a backward or a save inside engine.averaged() mixes average and weights",
        OF_AVERAGE,
    ),
}
