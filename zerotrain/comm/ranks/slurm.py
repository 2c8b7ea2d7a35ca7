"""Which rank a task of a Slurm step is, in the variables that torchrun would have set. Imports no torch."""

import re
from collections.abc import Mapping
from itertools import chain, repeat

from zerotrain.errors import ConfigError

_NUM_TASKS, _TASKS_PER_NODE, _NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", _TASKS_PER_NODE)
"""Any of them tells a process that srun has started it. A batch script has none."""
_RESTARTS, _NODE = "SLURM_RESTART_COUNT", "SLURM_NODEID"
_FIRST_PORT, _NUM_PORTS = 20_000, 20_000
_MAX_TASKS = 1 << 20
REMEDY = (
    "in a Slurm step srun tells each task which rank it is; set MASTER_ADDR or MASTER_PORT for another place to meet, "
    "or unset what another step has left"
)
_REPEATED = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_FIRST_NODE = re.compile(r"([\w.-]*)(?:\[([0-9]+)[0-9,-]*\]([\w.-]*))?(?:,.*)?", re.DOTALL)


def variables_of_step(environment: Mapping[str, str]) -> dict[str, str]:
    """RANK, WORLD_SIZE and the like of a task of a step of several tasks; nothing for any other process.

    The first node of the step keeps the store at which the ranks meet. Its port follows from the job's number, so that
    all tasks know it, and another one is tried after a requeue.

    Raises:
        ConfigError: a variable is missing, no number, or contradicts another.
    """
    num_tasks = _NUM_TASKS if _NUM_TASKS in environment else "SLURM_NTASKS"  # which may be those of the whole job
    if not any(name in environment for name in STEP_VARIABLES) or environment.get(num_tasks, "1") == "1":
        return {}
    size = _number(environment, num_tasks, 1, _MAX_TASKS)
    rank = _number(environment, "SLURM_PROCID", 0, size - 1)
    tasks = _tasks_per_node(environment, size)
    all_alike = "0" if len(set(tasks)) == 1 else None
    node = _number(environment, _NODE, 0, len(tasks) - 1, default=all_alike)
    local_rank = _number(environment, "SLURM_LOCALID", 0, tasks[node] - 1)
    job, restarts = (
        _number(environment, name, 0, 1 << 62, default) for name, default in (("SLURM_JOB_ID", None), (_RESTARTS, "0"))
    )
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "MASTER_ADDR": _first_node(environment),
        "MASTER_PORT": str(_FIRST_PORT + (job + restarts) % _NUM_PORTS),
    }


def _number(environment: Mapping[str, str], name: str, least: int, most: int, default: str | None = None) -> int:
    value = _given(environment, name, default)
    if value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most:
        return int(value)
    raise ConfigError(f"{name}: got {value!r}; it must be a whole number from {least} to {most}; {REMEDY}")


def _given(environment: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = environment.get(name, default)
    if value is None:
        raise ConfigError(f"{name}: not set, though this is a task of a Slurm step of several; {REMEDY}")
    return value


def _tasks_per_node(environment: Mapping[str, str], size: int) -> list[int]:
    """The tasks of each node of the step, of which Slurm writes such as 4(x2),3."""
    given = _given(environment, _TASKS_PER_NODE)
    parts = [_REPEATED.fullmatch(part) for part in given.split(",")]
    pairs = [(int(part[1]), int(part[2] or 1)) for part in parts if part is not None]
    if len(pairs) == len(parts) and sum(tasks * nodes for tasks, nodes in pairs) == size and all(map(all, pairs)):
        return list(chain.from_iterable(repeat(tasks, nodes) for tasks, nodes in pairs))
    raise ConfigError(
        f"{_TASKS_PER_NODE}: got {given!r}; it must be counts of tasks such as 4(x2),3, of {size} in all; {REMEDY}"
    )


def _first_node(environment: Mapping[str, str]) -> str:
    """The name of the step's first node: of n[01-03,7],m it is n01."""
    given = _given(environment, _NODES)
    found = _FIRST_NODE.fullmatch(given)
    name = "" if found is None else "".join(part or "" for part in found.groups())
    if not name:
        raise ConfigError(f"{_NODES}: got {given!r}; it must be names of nodes such as n[01-03]; {REMEDY}")
    return name
