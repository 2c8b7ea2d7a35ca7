"""A run that goes on: files of an earlier run in its folder, its checkpoints, restarts, and a scheduler's contract."""

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zerotrain.checkpoint import folder
from zerotrain.checkpoint.manifest import Manifest, read_manifest
from zerotrain.checkpoint.mirror import CREDENTIALS, fetch_newest, open_mirror
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.comm.environment import RankEnvironment, num_restarts
from zerotrain.config.compose import config_hash, slurm_job
from zerotrain.config.schema import Config
from zerotrain.config.words import quote, word
from zerotrain.device.kinds import num_gpus
from zerotrain.engine.options import leaves_per_rank
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files import untrusted
from zerotrain.files.untrusted import UntrustedFileError, kind_of, parse_yaml, printable, read_regular, shown
from zerotrain.launching import exits
from zerotrain.launching.failures import RunError
from zerotrain.launching.job import COMPOSITION, CONFIG_NAME, RANKS, Job, num_threads_per_rank
from zerotrain.preflight.choice import as_chosen
from zerotrain.settings import problems_in
from zerotrain.training.callbacks.stages import stage_at, stages_from
from zerotrain.training.result import RESULT_NAME, RunResult

AUTO = "auto"
_OF_ONE_START = ("launch.", "checkpoint.", "sweep.")
"""Two runs may differ in these settings and still be the same."""
_MAX_CONFIG_NBYTES = 2**20
_NUM_DIFFERENCES = 3
"""Differences in a message, at most."""


def folder_problems(config: Config, run_dir: Path, *, of_sweep: bool = False) -> list[str]:
    """A line where the run would erase, or write among, what an earlier one or somebody else has left in its folder, or
    could not write there.

    Args:
        of_sweep: whether it is a job of a sweep, whose folder another setting names.
    """
    another = f"another hydra.{'sweep' if of_sweep else 'run'}.dir"
    if (foreign := _foreign_file(run_dir)) is not None:
        return [f"hydra.run.dir: got {run_dir}, where {foreign}; move that away, or give {another}"]
    if config.plan.only:
        return []
    resume, erases = config.checkpoint.resume, config.launch.overwrite
    if erases and resume is not None and _is_within(resume, run_dir):
        return [
            f"launch.overwrite: got true, which would erase the checkpoint that checkpoint.resume={resume} needs; "
            "leave one of them out"
        ]
    if erases:
        return []
    try:
        result = completed_in(run_dir)
    except (OSError, UntrustedFileError) as error:
        return [
            f"hydra.run.dir: got {run_dir}, which may hold a completed run: its {RESULT_NAME} cannot be read: "
            f"{_reason(error)}; move it away, or give {another}"
        ]
    if result is not None:
        return _problems_of_completed(config, run_dir, result, another, of_sweep)
    if resume is None and folder.entries(run_dir / folder.CHECKPOINTS, folder.STEP):
        return [
            f"launch.overwrite: got false, but {run_dir} holds checkpoints; checkpoint.resume=auto goes on from the "
            f"newest; launch.overwrite=true erases them; or give {another}"
        ]
    return []


def completed_in(run_dir: Path) -> RunResult | None:
    """The result of a completed run in a folder; None where there is none.

    Raises:
        OSError, UntrustedFileError: there is a result.json, and it cannot be read.
    """
    try:
        result = RunResult.read(run_dir / RESULT_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return result if result.status == "completed" else None


def completed_already(config: Config, run_dir: Path) -> RunResult | None:
    """The result of the run for `checkpoint.resume=auto` to resume, if it has completed and the config asks for no
    more; else None. The folder must have no `folder_problems`."""
    result = completed_in(run_dir) if config.checkpoint.resume == AUTO else None
    if result is None or _differences(config, result.config_hash, run_dir):
        return None
    if not folder.checkpoints_in(run_dir / folder.CHECKPOINTS):
        result.checkpoint = None
    return result


def holds(config: Config, run_dir: Path) -> bool | None:
    """Whether the run in a folder is one of this config, however it has ended; None where there is none, or nobody can
    tell."""
    try:
        run_hash = RunResult.read(run_dir / RESULT_NAME).config_hash
    except (FileNotFoundError, NotADirectoryError):
        run_hash = None
    except (OSError, UntrustedFileError):
        return None
    if not os.path.lexists(run_dir / CONFIG_NAME) and run_hash is None:  # none, or one that was refused
        return None
    return not _differences(config, run_hash, run_dir)


def _problems_of_completed(config: Config, run_dir: Path, result: RunResult, another: str, of_sweep: bool) -> list[str]:
    resume, steps, max_steps = config.checkpoint.resume, result.steps, config.train.max_steps
    has_checkpoints = bool(folder.checkpoints_in(run_dir / folder.CHECKPOINTS))
    trains_longer = max_steps is None or max_steps > steps  # None: the data is yet to tell
    holds = f"{run_dir} holds a completed run"
    ways = f"or give {another}"
    if has_checkpoints:
        ways += f", or checkpoint.resume=auto with train.max_steps above {steps} to train that run longer"
    if resume is None:
        if of_sweep:
            ways += ", or checkpoint.resume=auto, which keeps completed jobs and continues the others"
        return [f"launch.overwrite: got false, but {holds}; launch.overwrite=true erases it; {ways}"]
    ways = f"give launch.overwrite=true instead to erase it; {ways}"
    if resume != AUTO:
        if trains_longer and _is_within(resume, run_dir):
            return []
        return [f"checkpoint.resume: got {resume}, but {holds}; {ways}"]
    differences = _differences(config, result.config_hash, run_dir)
    if not differences or (trains_longer and has_checkpoints):
        return []
    settings = ", ".join(differences[:_NUM_DIFFERENCES])
    if len(differences) > _NUM_DIFFERENCES:
        settings += ", ..."
    lacks = "" if has_checkpoints else ", and no checkpoint to resume from"
    return [f"checkpoint.resume: got auto, but {holds} with other settings ({settings}){lacks}; {ways}"]


def _differences(config: Config, run_hash: str | None, run_dir: Path) -> list[str]:
    """Settings of another value than those of the run in a folder.

    Args:
        run_hash: the `config_hash` of that run.
    """
    config = as_chosen(config, run_dir)
    if config_hash(config) == run_hash:
        return []
    try:
        content = parse_yaml(read_regular(run_dir / CONFIG_NAME, max_nbytes=_MAX_CONFIG_NBYTES))
    except (OSError, UntrustedFileError) as error:
        return [f"its {CONFIG_NAME} cannot be read: {_reason(error)}"]
    if not isinstance(content, dict):
        return [f"its {CONFIG_NAME} has no settings"]
    # As JSON has them: numbers as keys become texts, and tuples lists.
    defaults, saved, current = (
        untrusted.dotted(json.loads(json.dumps(values))) for values in (asdict(Config()), content, asdict(config))
    )
    for name in ("train.virtual_ranks", "model.vocab_size"):
        if current.get(name, 0) is None:  # the run took it from the checkpoint that it went on from, or from its data
            saved.pop(name, None)
            current.pop(name)
    if config.train.num_epochs is not None or config.train.max_tokens is not None:  # it follows from them
        saved.pop("train.max_steps", None)
        current.pop("train.max_steps")
    differing = []
    for name in sorted(saved.keys() | current.keys()):
        saved_value, own_value = (values.get(name, defaults.get(name)) for values in (saved, current))
        if saved_value != own_value and not (name.startswith(_OF_ONE_START) and name != "checkpoint.init_from"):
            differing.append(f"{shown(name)}: {shown(saved_value)} there, {shown(own_value)} here")
    return differing


def _foreign_file(run_dir: Path) -> str | None:
    """Something else in the place of one of the run's folders; it would stop the run, after hours as `checkpoints`.
    None if there is nothing."""
    for name in (folder.CHECKPOINTS, RANKS, COMPOSITION):
        try:
            mode = (run_dir / name).stat().st_mode
        except OSError as error:
            if os.path.lexists(run_dir / name):
                return f"{name} is a link that leads nowhere ({error.strerror})"
            continue
        if not stat.S_ISDIR(mode):
            return f"{name} is {kind_of(mode)}, and must be a folder"
    return None


def _is_within(resume: str, run_dir: Path) -> bool:
    return resume == AUTO or Path(resume).resolve().is_relative_to(run_dir.resolve())


def _reason(error: OSError | UntrustedFileError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


# Torchrun on hosts that come and go.


OPENS_A_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""Set to 1, each attempt of torchrun has a store of its own to meet in."""
_MAX_NBYTES = 2**16
_ELASTIC = re.compile(r"\0--nnodes[=\0](([0-9]+):([0-9]+))\0")


def elastic_hosts(ranks: RankEnvironment | None) -> str | None:
    """The range of hosts that torchrun was given, such as 1:4; None if their number is fixed, or cannot be seen. Ranks
    are children of torchrun, and read its command line."""
    if ranks is None or ranks.starter != "torchrun" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
            hosts = _ELASTIC.search(file.read(_MAX_NBYTES).decode(errors="replace"))
    except OSError:
        return None
    return hosts[1] if hosts and hosts[2] != hosts[3] else None


def start_problems(config: Config, run_dir: Path, ranks: RankEnvironment | None) -> list[str]:
    """A line where torchrun may start the ranks again on other hosts, and each start would begin the run anew; where
    there is no other host to go on with; and where torchrun has started ranks again that compute wrongly."""
    hosts, resume, drops = elastic_hosts(ranks), config.checkpoint.resume, config.train.on_corruption == "drop"
    starts_again = ranks is not None and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if drops and not starts_again:
        needed = "torchrun --nnodes=MIN:MAX --max-restarts=NUMBER, which goes on without a host"
        return [f"train.on_corruption: got drop; it must be stop without {needed}"]
    if not drops and num_restarts() and (corruption := corruption_in(run_dir)) is not None:
        return [f"train.on_corruption: got stop; {corruption['error']}; start the run without that device"]
    if hosts is None or resume == AUTO:
        return []
    return [
        f"checkpoint.resume: got {word(resume)}; under torchrun --nnodes={hosts} it must be auto, with a hydra.run.dir "
        "of your own: when hosts come or go the ranks are started again"
    ]


def doubtful_start(max_restarts: int, ranks: RankEnvironment | None) -> list[str]:
    """A line for each thing that torchrun does otherwise than a user may think.

    Args:
        max_restarts: `launch.max_restarts`.
    """
    lines = []
    hosts = elastic_hosts(ranks)
    if hosts is not None and os.environ.get(OPENS_A_STORE) != "1":
        lines.append(
            f"--nnodes={hosts} without {OPENS_A_STORE}=1: by torch's default a host that joins later finds no rank 0, "
            "and all end; set it for torchrun on every host"
        )
    if ranks is not None and max_restarts:
        lines.append("launch.max_restarts has no effect under torchrun; give it --max-restarts")
    return lines


# The checkpoints for a run to resume from, and the settings decided by them.


def corruption_in(run_dir: Path) -> dict[str, Any] | None:
    """{last_step: the last verified one, error} if a run has ended because a rank computed wrongly; else None."""
    try:
        result = RunResult.read(run_dir / RESULT_NAME)
    except (OSError, UntrustedFileError):
        return None
    facts = result.verification or {}
    last_step = facts.get("last_step")
    if facts.get("corruption") is None or type(last_step) is not int:
        return None
    return {"last_step": last_step, "error": (result.error or "").splitlines()[0]}


def newest_trusted(run_dir: Path) -> list[Path]:
    """The checkpoints in a run's folder, the newest first. If a rank has computed wrongly, those alone that were made
    before: at the last verified step, or earlier."""
    paths, corruption = folder.newest_first(run_dir / folder.CHECKPOINTS), corruption_in(run_dir)
    return paths if corruption is None else [path for path in paths if folder.step_of(path) <= corruption["last_step"]]


MAX_THREADS = 10_000
_CONFIG_OPTIONS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
_OF_RESUMING = ("hydra.run.dir=", "checkpoint.resume=", "launch.overwrite=")


def require_weights(config: Config) -> None:
    """Look whether there are weights where the run is to take its first ones from.

    Raises:
        ConfigError: there are none, or none can be read.
    """
    path = config.checkpoint.init_from
    try:
        if path is not None:
            find_weights(path).close()
    except CheckpointError as error:
        raise ConfigError(*(f"checkpoint.init_from: got {path}; {line}" for line in str(error).splitlines())) from error


def checkpoints_to_try(config: Config, run_dir: Path) -> list[Path]:
    """The checkpoints to go on from, the best first; none to begin anew.

    Raises:
        ConfigError: the checkpoint of the setting is not there.
    """
    resume = config.checkpoint.resume
    if resume is None:
        to_try = []
    elif resume == AUTO:
        to_try = newest_trusted(run_dir)
        if not to_try and folder.newest_first(run_dir / folder.CHECKPOINTS):
            raise ConfigError(
                "checkpoint.resume: got auto; a rank has computed wrongly, and each checkpoint is later than the last "
                "verified step; name the checkpoint to go on from, or give another hydra.run.dir"
            )
    elif "://" in resume:
        raise ConfigError(
            "checkpoint.resume: got a URL; it must be a folder; checkpoint.mirror=URL checkpoint.resume=auto goes on "
            "from a mirror"
        )
    else:
        try:
            to_try = folder.candidates(Path(resume).absolute())
        except CheckpointError as error:
            raise ConfigError(f"checkpoint.resume: got {resume}; {error}") from error
    if config.checkpoint.mirror is None or config.plan.only or num_restarts() or problems_in(config.checkpoint):
        return to_try
    newest = folder.step_of(to_try[0]) if to_try and folder.STEP.fullmatch(to_try[0].name) else None
    return [*_fetched(config, run_dir, newest), *to_try]


def _fetched(config: Config, run_dir: Path, newest: int | None) -> list[Path]:
    """The newest checkpoint of the mirror, fetched, if the run goes on from it; none otherwise.

    Args:
        newest: the step of the newest checkpoint to go on from here; None: there is none.

    Raises:
        ConfigError: there is no such mirror; it has checkpoints that are not this run's; or it alone may have
            checkpoints to go on from, and cannot give them.
    """
    url, resume = config.checkpoint.mirror or "", config.checkpoint.resume
    if CREDENTIALS.search(url):
        raise ConfigError(
            "checkpoint.mirror: got a URL with a password, which would stand in files of the run; leave it out, and "
            "set it where fsspec finds it, such as in the environment"
        )
    mirror = open_mirror(url, "checkpoint.mirror")
    try:
        steps = mirror.steps()
        if resume == AUTO:
            latest = (corruption_in(run_dir) or {}).get("last_step")
            path, problems = fetch_newest(mirror, run_dir / folder.CHECKPOINTS, newest, latest=latest)
            if path is None and newest is None and problems:
                raise ConfigError(*(f"checkpoint.mirror: {problem}" for problem in problems))
            for problem in problems:
                print(f"warning: skipped a checkpoint: {problem}", flush=True)
            return [] if path is None else [path]
    except CheckpointError as error:
        if resume == AUTO and newest is None:
            raise ConfigError(
                f"checkpoint.mirror: {error}; it alone may have checkpoints to go on from; mend that, or give "
                "checkpoint.resume=null to begin anew"
            ) from error
        print(f"warning: {error}; the run goes on without it, and tries again", flush=True)
        return []
    if later := [step for step in steps if newest is None or step > newest]:
        raise ConfigError(
            f"checkpoint.mirror: got {url}, which has checkpoints of another run, up to {folder.step_name(later[0])}; "
            "checkpoint.resume=auto goes on from the newest; or give a URL of its own"
        )
    return []


def first_readable(paths: Sequence[Path]) -> Manifest | None:
    """The manifest of the first checkpoint with a whole one. The ranks verify the rest.

    Raises:
        ConfigError: there are some, and none is.
    """
    best, problems = folder.first_whole(paths, read_manifest)
    if best is None and problems:
        raise ConfigError(*(f"checkpoint.resume: {problem}" for problem in problems))
    return None if best is None else best[1]


def stages_to_come(config: Config, paths: Sequence[Path]) -> tuple[dict[int, int], int]:
    """The stages of a run, each by the steps done before it, and the step at which the run goes on from the first of
    these checkpoints that can be read. The ranks may find it damaged, and take an older one."""
    best, _ = folder.first_whole(paths, read_manifest)
    return stages_from(None if best is None else best[1], config.zero.stages)


def take_from(manifest: Manifest, config: Config, num_ranks: int, num_local_ranks: int) -> list[str]:
    """Let `train.virtual_ranks=null` and, for training on the CPU, `launch.threads_per_rank=null` be what the
    checkpoint was trained with: so it is the same run on any number of ranks. Returns lines about this, or about the
    reason against it.

    Args:
        num_local_ranks: of this machine.

    Raises:
        ConfigError: the checkpoint is further than the run is to go.
    """
    if config.train.max_steps is not None and manifest.step > config.train.max_steps:
        raise ConfigError(
            f"train.max_steps: got {config.train.max_steps}; it must be {manifest.step} or more, the step of the "
            "checkpoint that the run resumes from"
        )
    lines = []
    num_virtual = int(manifest.content["virtual_ranks"])
    if config.train.virtual_ranks is None and num_virtual != num_ranks:
        try:
            leaves_per_rank(num_virtual, num_ranks, config.zero.accumulate)
            config.train.virtual_ranks = num_virtual
            lines.append(f"train.virtual_ranks={num_virtual}, as in the checkpoint")
        except ConfigError:
            lines.append(
                f"warning: the checkpoint was trained with {num_virtual} virtual ranks, which {num_ranks} ranks cannot "
                "share evenly: the batch size changes from here on"
            )
    saved = untrusted.value_at(manifest.content["config"], "launch", "threads_per_rank")
    is_on_cpu = config.launch.device == "cpu" or not num_gpus()
    if is_on_cpu and config.launch.threads_per_rank is None and type(saved) is int and 0 < saved <= MAX_THREADS:
        own = num_threads_per_rank(config, num_local_ranks)
        if saved != own:
            config.launch.threads_per_rank = saved
            lines.append(f"launch.threads_per_rank={saved}, as in the checkpoint; {own} may be faster, with other bits")
    return lines


def command_to_go_on(overrides: list[str], run_dir: Path, ranks: RankEnvironment | None, *changes: str) -> str:
    """The command to go on with a run, for a shell. In a stopped job of sbatch it is one for Slurm: only Slurm knows
    the job's script.

    Args:
        overrides: the run's own.
        run_dir: as it is to be written.
        ranks: of torchrun or srun, where that has started them; None: they were started by us.
        changes: settings that replace the run's own.
    """
    job = slurm_job(os.environ) if os.environ.get("ENVIRONMENT") == "BATCH" else None  # as sbatch sets it
    if job is not None and not changes:
        settings = with_run_dir([f"checkpoint.resume={AUTO}"], run_dir)
        return f"scontrol requeue {job}; when Slurm has forgotten the job, its script with {shlex.join(settings)}"
    program = sys.argv[0]
    is_module = program in ("zerotrain", "python -m zerotrain")
    if ranks is None:
        starter = program if is_module else f"python {shlex.quote(program)}"
    else:
        is_one_machine = ranks.local_world_size == ranks.world_size and not elastic_hosts(ranks)
        number = {"torchrun": "--nproc-per-node", "srun": "--ntasks"}[ranks.starter]
        starter = f"{ranks.starter} {f'{number} {ranks.world_size}' if is_one_machine else '...'}"
        starter += " python" if ranks.starter == "srun" else ""
        starter += " -m zerotrain" if is_module else f" {shlex.quote(program)}"
    replaced = (*_OF_RESUMING, *(f"{change.partition('=')[0]}=" for change in changes))
    unchanged = [override for override in overrides if not override.lstrip("+").startswith(replaced)]
    settings = with_run_dir([*unchanged, *changes, f"checkpoint.resume={AUTO}"], run_dir)
    return f"{starter} {shlex.join([*settings, *_config_options(sys.argv[1:])])}"


def with_run_dir(arguments: list[str], run_dir: Path) -> list[str]:
    """The same command line for a job in this folder, whatever its name."""
    text = str(run_dir)
    if not re.fullmatch(r"[\w./-]+", text, re.ASCII):
        text = quote(text)
    return [f"hydra.run.dir={text}", *(other for other in arguments if not other.startswith("hydra.run.dir="))]


def _config_options(arguments: list[str]) -> list[str]:
    """The options of a command line for folders or files of configs."""
    options = []
    for place, argument in enumerate(arguments):
        name, has_value, _ = argument.partition("=")
        if name in _CONFIG_OPTIONS:
            options += [argument] if has_value else arguments[place : place + 2]
    return options


# Starting the ranks of a run again after a failure, from its newest checkpoint.


MAX_IN_VAIN = 2
"""Restarts in a row without a newer checkpoint. There is no other after them: it would fail at the same place."""


class Attempts:
    """The attempts at a job, one after the other."""

    def __init__(self, job: Job) -> None:
        self.job = job
        """As the ranks of the present attempt are told it."""
        self._in_vain = 0
        self._newest = newest_step(job.run_dir)

    def begin_next(self, error: RunError) -> str:
        """Make the folder ready for another attempt, after the failure of the present one; return a line about it.

        Raises:
            RunError: there is no other; the same failure, and why.
        """
        allowed, newest = self.job.config.launch.max_restarts, newest_step(self.job.run_dir)
        if self.job.restarts:
            self._in_vain = self._in_vain + 1 if newest == self._newest else 0
        self._newest = newest
        if not allowed or not self.job.ranks_dir.is_dir():
            raise error
        if corruption_in(self.job.run_dir) is not None:
            raise RunError(f"{error}\n  not started again: the same device would compute wrongly again")
        if self._in_vain >= MAX_IN_VAIN:
            raise RunError(f"{error}\n  gave up: the last {MAX_IN_VAIN} restarts wrote no newer checkpoint")
        if self.job.restarts >= allowed:
            raise RunError(f"{error}\n  given up: launch.max_restarts={allowed}")
        self.job = going_on(replace(self.job, restarts=self.job.restarts + 1))
        self.job.open_folder()
        cause, *details = str(error).splitlines()
        place = place_of_restart(self.job.run_dir)
        return "\n".join([f"{cause}; restart {self.job.restarts} of {allowed} from {place}", *details])


def newest_step(run_dir: Path) -> int | None:
    """The step of the newest checkpoint in a run's folder to go on from; None if there is none."""
    checkpoints = newest_trusted(run_dir)
    return folder.step_of(checkpoints[0]) if checkpoints else None


def place_of_restart(run_dir: Path) -> str:
    """The place where a run resumes after a restart, for people."""
    newest = newest_step(run_dir)
    return "the start" if newest is None else f"step {newest}"


def going_on(job: Job) -> Job:
    """The job as it goes on after a restart: from the newest checkpoint of its own folder, where there is one; if not,
    as it began the first time."""
    checkpoints = newest_trusted(job.run_dir)
    if not checkpoints:
        return job
    stage = stage_at(*stages_to_come(job.config, checkpoints))
    return replace(job, resume_from=[str(path) for path in checkpoints], stage=stage)


# The contract with a scheduler: the name of this job, whether it was started again, and how it is queued again.


_JOB_VARIABLES = ("SLURM_JOB_ID", "JOB_COMPLETION_INDEX")
"""Slurm sets the first in each job, Kubernetes the second in each pod of an indexed Job."""
_ASKS_TO_REQUEUE = ("SIGUSR1", "SIGUSR2")
"""Signals of a scheduler ahead of a job's end, by the wish of a user, as in `sbatch --signal=USR1@120`."""
_ENDS = "SIGTERM"
"""The signal of a job when it is cancelled, preempted, or out of time: see `_runs_again`."""
_SCONTROL_LIMIT_S = 60.0
_HEAD_START_S = 1.0
"""The other ranks end by themselves in this time: they have saved too."""


def set_code_when_stopped(config: Config, environment: Mapping[str, str] = os.environ) -> None:
    """Set `launch.exit_code_when_stopped=null` to what it stands for in a job of a scheduler."""
    if config.launch.exit_code_when_stopped is None and any(environment.get(name) for name in _JOB_VARIABLES):
        config.launch.exit_code_when_stopped = exits.STOPPED


def go_on_if_queued_again(config: Config, run_dir: Path, environment: Mapping[str, str] = os.environ) -> str | None:
    """If Slurm has queued the job again, let its run go on from the newest checkpoint of its own folder, and erase
    nothing there: as with `checkpoint.resume=auto`. Without a checkpoint it begins as it began the first time.

    Returns:
        A line about it; None if Slurm has started the job for the first time.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    if not restarts.isdecimal() or int(restarts[:9]) == 0:
        return None
    config.launch.overwrite = False
    if config.checkpoint.resume is None or folder.newest_first(run_dir / folder.CHECKPOINTS):
        config.checkpoint.resume = AUTO
    return f"SLURM_RESTART_COUNT={restarts}: checkpoint.resume={config.checkpoint.resume}"


def queue_again(config: Config, stopped_by: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Queue this process's job again, if `launch.requeue` and the signal to stop ask for it: Slurm then ends the rest
    of the job. To be called once, by rank 0 or the launcher, when all else is done.

    Returns:
        A line about the obstacle; None if it was queued again, or nobody has asked for it.
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
        if stopped_by == _ENDS and not _runs_again(_output_of([scontrol, "show", "job", job])):
            return None
        # Slurm ends what is left of the job before it queues it again: this process too, and that is about to end in
        # order.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(_HEAD_START_S)
        _output_of([scontrol, "requeue", job])
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        return f"launch.requeue: scontrol requeue {job}: {printable(reason.strip(), 500, keep='')}; {code}"
    return None


def _output_of(command: list[str]) -> str:
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


def _runs_again(text: str) -> bool:
    """Whether a job is to run again after SIGTERM, by the output of `scontrol show job`: its time is up, or it is
    preempted and has a time of grace. If it ends within this time, Slurm (22.05) does not queue it again; without such
    a time it does. A cancelled job is to stay cancelled."""
    facts = dict(entry.partition("=")[::2] for entry in text.split())
    preempted = facts.get("PreemptTime", "None") != "None" and facts.get("JobState") == "RUNNING"
    return preempted or facts.get("Reason") == "TimeLimit"
