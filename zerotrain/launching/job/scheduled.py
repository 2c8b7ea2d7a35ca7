"""The contract with a scheduler: which job this is, whether it was started again, and how it is queued again."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from zerotrain.checkpoint.folder import CHECKPOINTS, newest_first
from zerotrain.config.compose import slurm_job
from zerotrain.config.schema import Config
from zerotrain.files.untrusted import printable
from zerotrain.launching.end import exits
from zerotrain.launching.job.earlier import AUTO

_JOB_VARIABLES = ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX")
"""Slurm sets the first in each job, Kubernetes the second in each pod of an indexed Job."""
_ASKS_TO_REQUEUE = ("SIGUSR1", "SIGUSR2")
"""Signals that a user has a scheduler send ahead of a job's end, as by `sbatch --signal=USR1@120`."""
_ENDS = "SIGTERM"
"""The signal of a job that is cancelled, preempted, or out of time: see `_is_wanted`."""
_SCONTROL_LIMIT_S = 60.0
_HEAD_START_S = 1.0
"""In which the other ranks, which have saved too, end by themselves."""


def set_code_when_stopped(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Set `launch.exit_code_when_stopped=null` to what it stands for in a job of a scheduler."""
    if config.launch.exit_code_when_stopped is None and any(environment.get(name) for name in _JOB_VARIABLES):
        config.launch.exit_code_when_stopped = exits.STOPPED


def go_on_if_queued_again(config: Config, run_dir: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """Let a run of a job that Slurm has queued again go on from the newest checkpoint of its own folder, and erase
    nothing there: as with `checkpoint.resume=auto`. Without a checkpoint it begins as it began the first time.

    Returns:
        A line that says so; None where Slurm has started the job for the first time.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if not restarts.isdecimal() or int(restarts[:9]) == 0:
        return None
    config.launch.overwrite = False
    if config.checkpoint.resume is None or newest_first(run_dir / CHECKPOINTS):
        config.checkpoint.resume = AUTO
    return f"SLURM_RESTART_COUNT={restarts}: checkpoint.resume={config.checkpoint.resume}"


def queue_again(config: Config, stopped_by: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Queue this process's job again, where `launch.requeue` and the signal that has stopped it ask for that: Slurm
    then ends what is left of it. To be called once, by rank 0 or the launcher, when all else is done.

    Returns:
        A line that says why that could not be; None where it was queued again, or nobody has asked for it.
    """
    if not config.launch.requeue or stopped_by not in (*_ASKS_TO_REQUEUE, _ENDS):
        return None
    code = f"exit code {config.launch.exit_code_when_stopped or 0} leaves it to others to start the run again"
    job, scontrol = slurm_job(environment), shutil.which("scontrol")
    if job is None:
        return f"launch.requeue: this is no job of Slurm (SLURM_JOB_ID is not set); {code}"
    if scontrol is None:
        return f"launch.requeue: job {job} is not queued again, since there is no scontrol here; {code}"
    try:
        if stopped_by == _ENDS and not _is_wanted(_told_by([scontrol, "show", "job", job])):
            return None
        # Slurm ends what is left of the job before it queues it again: this process, which is about to end in order.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(_HEAD_START_S)
        _told_by([scontrol, "requeue", job])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"launch.requeue: scontrol requeue {job}: {printable(said.strip(), 500, keep='')}; {code}"
    return None


def _told_by(command: list[str]) -> str:
    """Standard output of a command; raises where it fails."""
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        text=True,
        errors="replace",
        timeout=_SCONTROL_LIMIT_S,
    ).stdout


def _is_wanted(shown: str) -> bool:
    """Whether a job that SIGTERM has come to is to run again, by what `scontrol show job` says of it: its time is up,
    or it is preempted and has a time of grace. If it uses that to end, Slurm (22.05) does not queue it again; it does
    without such a time. A job that was cancelled is to stay so."""
    facts = dict(each.partition("=")[::2] for each in shown.split())
    preempted = facts.get("PreemptTime", "None") != "None" and facts.get("JobState") == "RUNNING"
    return preempted or facts.get("Reason") == "TimeLimit"
