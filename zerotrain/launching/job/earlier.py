"""Files of an earlier run in a run's folder, and whether a run may go on or start there."""

import json
import os
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerotrain.checkpoint.folder import CHECKPOINTS, checkpoints_in, named_as_steps
from zerotrain.config.compose import config_hash
from zerotrain.config.schema import Config
from zerotrain.engine.options import dotted
from zerotrain.files.untrusted import UntrustedFileError, kind_of, read_regular, shown
from zerotrain.launching.job.job import COMPOSITION, CONFIG_NAME, RANKS
from zerotrain.preflight.choice import as_chosen
from zerotrain.preflight.plan import PLAN_NAME
from zerotrain.training.result import METRICS_NAME, RESULT_NAME, STEPS_NAME, read_result

AUTO = "auto"
_KINDS = dict.fromkeys((CHECKPOINTS, RANKS, COMPOSITION), stat.S_IFDIR)
_KINDS |= dict.fromkeys((RESULT_NAME, METRICS_NAME, STEPS_NAME, CONFIG_NAME, PLAN_NAME), stat.S_IFREG)
_KINDS |= {f"{COMPOSITION}/{name}.yaml": stat.S_IFREG for name in ("config", "hydra", "overrides")}
"""The files and folders that a run has in its folder, by kind."""
_OF_ONE_START = ("launch.", "checkpoint.", "sweep.")
"""Settings by which no run is another one."""
_MAX_CONFIG_NBYTES = 2**20
_NUM_DIFFERENCES = 3
"""That are told."""


def folder_problems(config: Config, run_dir: Path, *, of_sweep: bool = False) -> list[str]:
    """A line where the run would erase, or write among, what an earlier one or somebody else has left in its folder, or
    could not write there.

    Args:
        of_sweep: whether it is a job of a sweep, whose folder another setting names.
    """
    another = f"another hydra.{'sweep' if of_sweep else 'run'}.dir"
    if (foreign := _foreign(run_dir)) is not None:
        return [f"hydra.run.dir: got {run_dir}, where {foreign}; move that away, or give {another}"]
    if config.plan.only:
        return []
    resume, erases = config.checkpoint.resume, config.launch.overwrite
    if resume is not None and erases:
        if _is_within(resume, run_dir):
            return [
                f"launch.overwrite: got true, which would erase the checkpoint that checkpoint.resume={resume} needs; "
                "leave one of them out"
            ]
        return []
    if erases:
        return []
    try:
        result = completed_in(run_dir)
    except (OSError, UntrustedFileError) as error:
        return [
            f"hydra.run.dir: got {run_dir}, which may hold a completed run: its {RESULT_NAME} cannot be read: "
            f"{_said(error)}; move it away, or give {another}"
        ]
    if result is not None:
        return _problems_of_completed(config, run_dir, result, another, of_sweep)
    if resume is None and named_as_steps(run_dir / CHECKPOINTS):
        return [
            f"launch.overwrite: got false, but {run_dir} holds checkpoints; checkpoint.resume=auto goes on from the "
            f"newest; launch.overwrite=true erases them; or give {another}"
        ]
    return []


def completed_in(run_dir: Path) -> dict[str, Any] | None:
    """The result of a completed run in a folder; None where there is none.

    Raises:
        OSError, UntrustedFileError: there is a result.json, of which nobody can tell.
    """
    try:
        result = read_result(run_dir / RESULT_NAME)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return result if result["status"] == "completed" else None


def completed_already(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """The result of the run that `checkpoint.resume=auto` would resume, if it has completed and nothing more is asked
    for; else None. The folder must have no `folder_problems`."""
    result = completed_in(run_dir) if config.checkpoint.resume == AUTO else None
    if result is None or _differences(config, result, run_dir):
        return None
    return result if checkpoints_in(run_dir / CHECKPOINTS) else result | {"checkpoint": None}


def holds(config: Config, run_dir: Path) -> bool | None:
    """Whether the run in a folder is one of this config, however it has ended; None where there is none, or nobody can
    tell."""
    try:
        result = read_result(run_dir / RESULT_NAME)
    except (FileNotFoundError, NotADirectoryError):
        result = {"config_hash": None}
    except (OSError, UntrustedFileError):
        return None
    if not os.path.lexists(run_dir / CONFIG_NAME) and result["config_hash"] is None:  # none, or one that was refused
        return None
    return not _differences(config, result, run_dir)


def _problems_of_completed(
    config: Config, run_dir: Path, result: dict[str, Any], another: str, of_sweep: bool
) -> list[str]:
    resume, steps, max_steps = config.checkpoint.resume, result["steps"], config.train.max_steps
    has_checkpoints = bool(checkpoints_in(run_dir / CHECKPOINTS))
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
    differences = _differences(config, result, run_dir)
    if not differences or (trains_longer and has_checkpoints):
        return []
    told = ", ".join(differences[:_NUM_DIFFERENCES]) + ", ..." * (len(differences) > _NUM_DIFFERENCES)
    lacks = "" if has_checkpoints else ", and no checkpoint to resume from"
    return [f"checkpoint.resume: got auto, but {holds} with other settings ({told}){lacks}; {ways}"]


def _differences(config: Config, result: dict[str, Any], run_dir: Path) -> list[str]:
    """Settings of another value than those of the run that lies in a folder."""
    from zerotrain.files.untrusted import parse_yaml

    config = as_chosen(config, run_dir)
    if config_hash(config) == result["config_hash"]:
        return []
    try:
        said = parse_yaml(read_regular(run_dir / CONFIG_NAME, max_nbytes=_MAX_CONFIG_NBYTES))
    except (OSError, UntrustedFileError) as error:
        return [f"its {CONFIG_NAME} cannot be read: {_said(error)}"]
    if not isinstance(said, dict):
        return [f"its {CONFIG_NAME} has no settings"]
    defaults, was, now = (_flat(values) for values in (asdict(Config()), said, asdict(config)))
    if config.train.virtual_ranks is None:  # as many as the checkpoint has that it went on from
        was.pop("train.virtual_ranks", None)
    if config.train.num_epochs is not None or config.train.max_tokens is not None:  # it follows from them
        was.pop("train.max_steps", None)
        now.pop("train.max_steps")
    differing = []
    for name in sorted(was.keys() | now.keys()):
        before, after = (values.get(name, defaults.get(name)) for values in (was, now))
        if before != after and not (name.startswith(_OF_ONE_START) and name != "checkpoint.init_from"):
            differing.append(f"{shown(name)}: {shown(before)} there, {shown(after)} here")
    return differing


def _flat(values: dict[Any, Any]) -> dict[str, Any]:
    """By dotted names. As JSON has them: numbers that are keys are texts, and tuples lists."""
    return dotted(json.loads(json.dumps(values)))


def _foreign(run_dir: Path) -> str | None:
    """Something else in the place of one of the run's files, which would stop the run; None if there is nothing."""
    kinds = {run_dir / name: kind for name, kind in _KINDS.items()}
    kinds |= dict.fromkeys(run_dir.glob(f"{RANKS}/*.*"), stat.S_IFREG)
    kinds |= dict.fromkeys(named_as_steps(run_dir / CHECKPOINTS), stat.S_IFDIR)
    for path, kind in kinds.items():
        name = path.relative_to(run_dir)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if os.path.lexists(path):
                return f"{name} is a link that leads nowhere ({error.strerror})"
            continue
        if stat.S_IFMT(mode) != kind:
            return f"{name} is {kind_of(mode)}, and must be {kind_of(kind)}"
    return None


def _is_within(resume: str, run_dir: Path) -> bool:
    return resume == AUTO or Path(resume).resolve().is_relative_to(run_dir.resolve())


def _said(error: OSError | UntrustedFileError) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)
