"""In how far a run goes, at which learning rates, and which of its checkpoints is the best."""

from tests.mutants.fault import Fault

SCHEDULE = "training/schedule.py"
OF_SCHEDULE = ("unit/training/test_schedule.py",)
LENGTH = "run/preflight/length.py"
OF_LENGTH = ("unit/run/preflight/test_length.py",)
BEST = "training/best.py"
OF_BEST = ("unit/training/test_best.py",)

FAULTS = {
    "lengths-schedule-ends-late": Fault(
        SCHEDULE,
        "/ max(1, max_steps - 1 - begin))",
        "/ max(1, max_steps - begin))",
        "the last step of a run is above the final learning rate",
        OF_SCHEDULE,
    ),
    "lengths-first-step-lost": Fault(
        SCHEDULE,
        "        return (step + 1) / rise\n",
        "        return step / rise\n",
        "the first step of the warm-up changes nothing",
        OF_SCHEDULE,
    ),
    "lengths-by-floats": Fault(
        LENGTH,
        "Fraction(str(config.train.num_epochs)) * len(train)",
        "Fraction(config.train.num_epochs) * len(train)",
        "1.1 epochs of 1000 sequences are a step more than 1100 sequences",
        OF_LENGTH,
    ),
    "lengths-read-twice": Fault(
        LENGTH,
        "(num_sequences - num_read) / batch_size",
        "num_sequences / batch_size",
        "a run that goes on trains on all its epochs again",
        OF_LENGTH,
    ),
    "lengths-nan-is-best": Fault(
        BEST,
        "if math.isfinite(value) and is_better:",
        "if is_better or not math.isfinite(value):",
        "the best checkpoint of a run is one whose loss is nan",
        OF_BEST,
    ),
    "lengths-best-forgotten": Fault(
        BEST,
        '        return {} if self._best is None else {"best": asdict(self._best)}\n',
        "        return {}\n",
        "a run that goes on takes its next evaluation for the best",
        OF_BEST,
    ),
    "lengths-best-of-a-failed-save": Fault(
        BEST,
        "        self._unsaved = [each for each in self._unsaved if step_name(each.step) != path.name]\n",
        "        pass\n",
        "no checkpoint is saved that is better than all that are there, but not than one that could not be saved",
        OF_BEST,
    ),
    "lengths-best-removed": Fault(
        "checkpoint/kept.py",
        "    best = best_in(folder)\n    old",
        "    best = None\n    old",
        "the best checkpoint goes when newer ones are saved",
        OF_BEST,
    ),
}
