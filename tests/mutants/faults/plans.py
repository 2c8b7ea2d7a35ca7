"""In plans of runs."""

from tests.mutants.fault import Fault

OF_VERB, OF_COMMAND = ("unit/commands/test_plan.py",), ("unit/launching/command/test_planned.py",)
OF_REHEARSAL = ("unit/planning/test_rehearsal.py::test_the_average_of_the_weights_is_planned",)

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
}
