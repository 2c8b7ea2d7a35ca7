"""In a parameter's way: from the model into units and buckets, and its gradient into its bucket."""

from tests.mutants.fault import Fault

GRADIENT, WEIGHTS, SPANS = (
    "engine/buckets/gradient.py",
    "engine/buckets/weights.py",
    "engine/buckets/parts/spans.py",
)
BUCKETING, GROUPS, UNITS = "sharding/bucketing.py", "engine/groups/param_groups.py", "sharding/units.py"
OF_GRADIENT = ("unit/engine/buckets/test_gradient.py",)
OF_BUCKETING = ("unit/sharding/test_bucketing.py",)

FAULTS = {
    "moved-gradients-kept": Fault(
        GRADIENT,
        "        gradients.clear()\n",
        "",
        "a large gradient stays in memory while its bucket is reduced",
        OF_GRADIENT,
    ),
    "sum-stays-behind": Fault(
        GRADIENT,
        "            self._filled[0].copy_(summed)\n",
        "",
        "in 16 bits a sum of micro-batches is not what is sent",
        OF_GRADIENT,
    ),
    "segments-overlap": Fault(
        GRADIENT,
        "            start, nbytes = end, 0\n",
        "            nbytes = 0\n",
        "gradients are moved a second time, as zeros",
        OF_GRADIENT,
    ),
    "segments-counted-in-elements": Fault(
        GRADIENT,
        "slot.numel * spec.dtype.itemsize",
        "slot.numel",
        "gradients wait for others until they have left the cache",
        OF_GRADIENT,
    ),
    "replaced-weights-differ-for-ever": Fault(
        WEIGHTS,
        "        self.may_be_uncounted = self.are_new = False\n        self.digest = 0\n",
        "        self.may_be_uncounted = self.are_new = False\n",
        "ranks that wrote other weights before a load are refused after it",
        ("unit/engine/buckets/test_weights.py",),
    ),
    "compared-writes-told-again": Fault(
        "engine/update/optimizer_step.py",
        "            each.weights.writes.digest = 0\n",
        "            pass\n",
        "weights that all ranks wrote alike are told with every later step",
        ("unit/engine/test_weight_habits.py::test_what_all_ranks_have_written_is_compared_in_one_step",),
    ),
    "whole-tensors-by-elements-too": Fault(
        SPANS,
        "place.stop > place.start and key is not None",
        "place.stop > place.start",
        "what is updated whole is updated a second time by its elements",
        ("unit/engine/buckets/test_update.py",),
    ),
    "last-unit-as-the-others": Fault(
        BUCKETING,
        "last_numel if unit is last else shared_numel",
        "shared_numel",
        "a link idles from the last gather of a forward to the first full bucket of its backward",
        OF_BUCKETING,
    ),
    "buckets-of-one-name": Fault(
        BUCKETING,
        "            if len(set().union(*(dtypes[unit] for unit in run))) > 1:\n",
        "            if False:\n",
        "buckets of two dtypes have one name, by which their collectives and files are told apart",
        OF_BUCKETING,
    ),
    "parts-of-one-name": Fault(
        BUCKETING,
        "if is_split else",
        "if False else",
        "the parts of a large unit have one name",
        OF_BUCKETING,
    ),
    "began-with-the-others": Fault(
        GROUPS,
        "generation=self._generation.get(each.parameter, 0)",
        "generation=0",
        "what began to train late is updated with the count of steps of the others",
        ("unit/engine/groups/test_param_groups.py",),
    ),
    "integers-of-this-rank": Fault(
        UNITS,
        "{**named_buffers, **others}",
        "named_buffers",
        "parameters that are no floating-point numbers keep what each rank began with",
        ("unit/engine/test_build.py",),
    ),
    "bucket-in-elements": Fault(
        "engine/options.py",
        "int(mb * 2**20) // self.precision.compute.itemsize",
        "int(mb * 2**20)",
        "buckets are four times as large as asked",
        ("unit/engine/test_build.py",),
    ),
    "buckets-of-a-cpu-hold-units": Fault(
        "engine/options.py",
        "zero.bucket_mb == AUTO and not device_of(world.device).is_host",
        "zero.bucket_mb == AUTO",
        "auto makes buckets of a CPU as large as those of a GPU",
        ("unit/engine/test_options.py",),
    ),
    "rests-are-buckets": Fault(
        "sharding/bucketing.py",
        "if parts and min(numel, numels[-1]) < rest_numel:",
        "if False:",
        "two norms are a bucket of their own, and a collective",
        ("unit/sharding/test_bucketing.py",),
    ),
    "any-newcomer-is-refused": Fault(
        "engine/model/newcomers.py",
        "self._known = set(map(id, known))",
        "self._known: set[int] = set()",
        "a parameter of the engine that is tied to a second place is refused",
        ("unit/engine/test_module_habits.py::test_parts_without_parameters_frozen_ones_and_ties_may_come",),
    ),
}
