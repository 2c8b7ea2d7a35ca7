"""In plans of runs."""

from tests.mutants.fault import Fault

OF_VERB, OF_COMMAND = ("unit/commands/test_plan.py",), ("unit/launching/command/test_planned.py",)
OF_REHEARSAL = ("unit/planning/test_rehearsal.py",)

FAULTS = {
    "plan-without-masters": Fault(
        "planning/formulas.py",
        "STATE_PER_PARAMETER[optimizer] + master",
        "STATE_PER_PARAMETER[optimizer]",
        "the fp32 master weights of 16 bits are left out",
        OF_VERB,
    ),
    "plan-always-fits": Fault(
        "launching/command/planned.py",
        "exits.COMPLETED if plan.fits else exits.DOES_NOT_FIT",
        "exits.COMPLETED",
        "a script takes a run that does not fit for one that does",
        OF_COMMAND,
    ),
    "plan-without-average": Fault(
        "planning/rehearsal.py",
        "    if averages_in(config):  # which is as large with any settings\n        engine.keep_average()\n",
        "",
        "the average of the weights is not planned",
        OF_REHEARSAL,
    ),
    "plan-norm-of-a-gpu": Fault(
        "planning/rehearsal.py",
        "rehearsing(on_host=links.on_host)",
        "rehearsing(on_host=False)",
        "the norm of a CPU is planned as that of a GPU, which keeps less",
        OF_REHEARSAL,
    ),
    "plan-one-step-of-offload": Fault(
        "planning/rehearsal.py",
        "            if self._homes.tiers:  # whose windows are as large as they become from the second step on\n"
        "                engine.train_step(rows)\n",
        "",
        "windows of what is offloaded are planned smaller than they become",
        OF_REHEARSAL,
    ),
    "plan-forgets-freed": Fault(
        "planning/live.py",
        "            self._resized(storage)\n",
        "",
        "memory that is given back under the same tensor is planned as held",
        OF_REHEARSAL,
    ),
    "plan-experts-unknown": Fault(
        "planning/unreal.py",
        "_grouped(args, kwargs) if func is _GROUPED else func(*args, **kwargs)",
        "func(*args, **kwargs)",
        "the activations of a mixture of experts are unknown",
        OF_REHEARSAL,
    ),
}
