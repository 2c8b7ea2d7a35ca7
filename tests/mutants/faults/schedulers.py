"""In the contract with schedulers: exit codes, folders, starting again, and signs of life."""

from tests.mutants.fault import Fault

SCHEDULED = "launching/job/scheduled.py"
OF_SCHEDULED = ("unit/launching/job/test_scheduled.py",)
RESULT = "training/figures/result.py"
ENDED = "commands/ended.py"
OF_ENDED = ("unit/commands/test_ended.py",)

FAULTS = {
    "schedulers-kubernetes-is-none": Fault(
        SCHEDULED,
        '_JOB_VARIABLES = ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX")',
        '_JOB_VARIABLES = ("SLURM_JOB_ID",)',
        "a pod that was told to stop counts as completed, and its Job never goes on",
        OF_SCHEDULED,
    ),
    "schedulers-erase-their-own": Fault(
        SCHEDULED,
        "    config.launch.overwrite = False\n",
        "",
        "a job that is queued again with launch.overwrite=true erases what it has trained",
        OF_SCHEDULED,
    ),
    "schedulers-resume-elsewhere": Fault(
        SCHEDULED,
        "if config.checkpoint.resume is None or newest_first(run_dir / CHECKPOINTS):",
        "if config.checkpoint.resume is None:",
        "a job that went on from another run begins there again when it is queued again",
        OF_SCHEDULED,
    ),
    "schedulers-bring-back-the-cancelled": Fault(
        SCHEDULED,
        "if stopped_by == _ENDS and not _is_wanted(",
        "if stopped_by == _ENDS and _is_wanted(",
        "a job that its user has cancelled comes back, and a preempted one does not",
        OF_SCHEDULED,
    ),
    "schedulers-queue-twice": Fault(
        SCHEDULED,
        'and facts.get("JobState") == "RUNNING"',
        "",
        "a job is queued again that Slurm is about to queue again",
        OF_SCHEDULED,
    ),
    "schedulers-array-without-task": Fault(
        "config/compose.py",
        "parts = array if all(array) else",
        "parts = array[:1] if all(array) else",
        "all tasks of an array train in one folder",
        OF_SCHEDULED,
    ),
    "schedulers-path-in-a-job": Fault(
        "config/compose.py",
        'all(re.fullmatch("[0-9]{1,19}", each, re.ASCII) for each in parts)',
        "all(parts)",
        "a folder may lie anywhere that a variable names",
        OF_SCHEDULED,
    ),
    "schedulers-retry-what-was-ended-by-hand": Fault(
        RESULT,
        "    if signum is None:\n        return 0\n",
        "",
        "a run that a callback or control.yaml has ended is tried again",
        OF_SCHEDULED,
    ),
    "schedulers-failed-save-is-a-stop": Fault(
        RESULT,
        'self.status, self.exit_code = "failed", 1',
        'self.status = "failed"',
        "a run that could not save when it was stopped is told as saved",
        OF_ENDED,
    ),
    "schedulers-refusal-for-ever": Fault(
        ENDED,
        "if not completed and (refusal := refusal_in(run)) is not None:",
        "if (refusal := refusal_in(run)) is not None:",
        "a completed run counts as refused since somebody gave it a wrong setting",
        OF_ENDED,
    ),
    "schedulers-dead-all-the-same": Fault(
        "launching/end/presence.py",
        "if self._state.rank or now_s - self._touched_s < _TOUCHED_EVERY_S:",
        "if self._state.rank or now_s - self._touched_s > _TOUCHED_EVERY_S:",
        "a run gives no sign of life, and a probe ends it",
        ("unit/launching/end/test_presence.py",),
    ),
}
