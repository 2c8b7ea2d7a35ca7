"""In the study of a sweep, and in what a job tells it."""

from tests.mutants.fault import Fault

_STUDY, _PRUNING = ("unit/launching/sweep/test_study.py",), ("unit/training/test_pruning.py",)

FAULTS = {
    "study-asks-again-for-all": Fault(
        "launching/sweep/study.py",
        "total - len(states) + states.count",
        "total - states.count",
        "a study that goes on has as many trials again",
        _STUDY,
    ),
    "study-takes-from-the-living": Fault(
        "launching/sweep/study.py",
        "path.parent.is_dir() and not path.exists()",
        "path.parent.is_dir()",
        "a trial that another driver runs is run twice",
        _STUDY,
    ),
    "study-forgets-what-was-cut-off": Fault(
        "launching/sweep/study.py",
        '_set_state(storage, trial, "WAITING")',
        '_set_state(storage, trial, "FAIL")',
        "a trial that was cut off counts as failed, and its job never goes on",
        _STUDY,
    ),
    "study-overflows": Fault(
        "launching/sweep/study.py",
        "if len(_counted(self._storage, study_id)) >= self._study.num_trials:",
        "if False:",
        "two drivers of a study run more trials than wanted",
        _STUDY,
    ),
    "study-keeps-half-a-batch": Fault(
        "launching/sweep/study.py",
        "                self._give_back(study_id)\n",
        "",
        "a trial that was asked for in vain runs nowhere",
        _STUDY,
    ),
    "study-repeats-its-values": Fault(
        "launching/sweep/study.py",
        "sweeper.sampler.seed += starts",
        "sweeper.sampler.seed += 0",
        "a study that goes on with a fixed seed chooses the same values again",
        _STUDY,
    ),
    "study-calls-pruned-complete": Fault(
        "launching/sweep/study.py",
        "events[-1].status == PRUNED",
        'events[-1].status == "stopped"',
        "a pruned trial counts as a complete one, and may be the best",
        ("unit/launching/sweep/test_study.py",),
    ),
    "grid-loses-a-point": Fault(
        "launching/sweep/study.py",
        "if key not in _GRID_PLACE or",
        "if True or",
        "a trial that has waited gets the place of another point, which never runs",
        _STUDY,
    ),
    "pruning-before-the-first-step": Fault(
        "training/pruning.py",
        "run.step == 0 or ",
        "",
        "jobs are pruned by the loss of weights that nobody has trained",
        _PRUNING,
    ),
    "pruning-ends-a-run-that-it-cannot-judge": Fault(
        "training/pruning.py",
        "            self._has_failed = True\n",
        "            raise\n",
        "a study that cannot be reached ends the training",
        _PRUNING,
    ),
    "pruning-tells-twice": Fault(
        "training/pruning.py",
        "        if step not in storage.get_trial(trial_id).intermediate_values:\n    ",
        "        if True:\n    ",
        "a job that goes on tells its study other values of steps that it has told",
        _PRUNING,
    ),
    "report-ranks-upside-down": Fault(
        "report/rows.py",
        "reverse=self.rises and self.loss == self.objective",
        "reverse=False",
        "the best job of the report is the worst one where higher is better",
        ("unit/report/test_rows.py",),
    ),
}
