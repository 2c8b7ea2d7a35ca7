"""The variables for a process's rank, from torchrun, our own launcher or Slurm. Imports no torch."""

import functools
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zerotrain.errors import ConfigError

# The rank of a task of a Slurm step, in torchrun's variables.


_NUM_TASKS, _TASKS_PER_NODE, _NODES = "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID", _TASKS_PER_NODE)
"""Any of them is a sign of a process started by srun. A batch script has none."""
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

    The first node of the step keeps the store of the ranks. Its port follows from the job's number: all tasks know it,
    and another one is tried after a requeue.

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
    value = _require_set(environment, name, default)
    if value.isascii() and value.isdigit() and len(value) < 20 and least <= int(value) <= most:
        return int(value)
    raise ConfigError(f"{name}: got {value!r}; it must be a whole number from {least} to {most}; {REMEDY}")


def _require_set(environment: Mapping[str, str], name: str, default: str | None = None) -> str:
    value = environment.get(name, default)
    if value is None:
        raise ConfigError(f"{name}: not set, though this is a task of a Slurm step of several; {REMEDY}")
    return value


def _tasks_per_node(environment: Mapping[str, str], size: int) -> list[int]:
    """The tasks of each node of the step. Slurm writes them as 4(x2),3."""
    text = _require_set(environment, _TASKS_PER_NODE)
    parts = [_REPEATED.fullmatch(part) for part in text.split(",")]
    pairs = [(int(part[1]), int(part[2] or 1)) for part in parts if part is not None]
    if len(pairs) == len(parts) and sum(tasks * nodes for tasks, nodes in pairs) == size and all(map(all, pairs)):
        return [tasks for tasks, nodes in pairs for _ in range(nodes)]
    raise ConfigError(
        f"{_TASKS_PER_NODE}: got {text!r}; it must be counts of tasks such as 4(x2),3, of {size} in all; {REMEDY}"
    )


def _first_node(environment: Mapping[str, str]) -> str:
    """The name of the step's first node: of n[01-03,7],m it is n01."""
    nodes = _require_set(environment, _NODES)
    match = _FIRST_NODE.fullmatch(nodes)
    name = "" if match is None else "".join(part or "" for part in match.groups())
    if not name:
        raise ConfigError(f"{_NODES}: got {nodes!r}; it must be names of nodes such as n[01-03]; {REMEDY}")
    return name


STORE_VARIABLE = "ZEROTRAIN_STORE"
"""The meeting file of one machine's ranks, if `launching.spawn` has started them."""

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_REMEDY = "torchrun sets all of them for each of its ranks: start with torchrun, or unset those that another run left"


@dataclass(frozen=True)
class RankEnvironment:
    """The rank of this process, and the number of ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine."""
    address: str = "localhost"
    """Host of the ranks' store."""
    port: int = 0
    store_file: str | None = None
    """A file to meet in instead."""
    starter: str = "torchrun"
    """The starter of the ranks: torchrun, or srun; our own launcher counts as torchrun."""

    @classmethod
    def read(cls, *, whole: bool = True) -> "RankEnvironment | None":
        """The rank this process was started as; None where it was not started as one.

        A task of a Slurm step of several tasks is one. Torchrun's variables come first, as far as they
        are set; the others are then set, as libraries look for them too.

        Args:
            whole: whether LOCAL_WORLD_SIZE is needed too; without it, it counts as WORLD_SIZE.

        Raises:
            ConfigError: variables are missing, no numbers, or contradict each other.
        """
        variables = {name: os.environ[name] for name in {*_NUMBERS, *_NEEDED} if name in os.environ}
        of_step = {} if "RANK" in variables else variables_of_step(os.environ)
        variables, is_step = of_step | variables, any(name in os.environ for name in STEP_VARIABLES)
        remedy = REMEDY if of_step else _REMEDY
        if not variables:
            return None
        missing = [name for name in (*_NEEDED, *(["LOCAL_WORLD_SIZE"] if whole else [])) if name not in variables]
        if missing:
            settings = ", ".join(sorted(f"{name}={value}" for name, value in variables.items()))
            raise ConfigError(f"{', '.join(missing)}: not set, though the environment has {settings}; {remedy}")
        numbers = {name: _whole_number(name, variables[name], remedy) for name in _NUMBERS if name in variables}
        numbers.setdefault("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"])
        _require_sense(numbers, remedy)
        _require_address(variables["MASTER_ADDR"], remedy)
        os.environ.update(variables)
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            address=variables["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            store_file=os.environ.get(STORE_VARIABLE),
            starter="srun" if is_step and not {_OF_TORCHRUN, STORE_VARIABLE} & os.environ.keys() else "torchrun",
        )

    @staticmethod
    def leave() -> None:
        """Forget it, to start ranks of one's own."""
        for name in list(os.environ):
            if name in {*_NUMBERS, *_NEEDED, *STEP_VARIABLES, STORE_VARIABLE} or name.startswith(_PREFIXES):
                del os.environ[name]


def num_restarts() -> int:
    """How often torchrun has started all ranks again; they meet in the same store."""
    name = "TORCHELASTIC_RESTART_COUNT"
    return _whole_number(name, os.environ.get(name, "0"))


def _whole_number(name: str, value: str, remedy: str = _REMEDY) -> int:
    if value.isascii() and value.isdigit() and len(value) < 10:
        return int(value)
    raise ConfigError(f"{name}: got {value!r}; it must be a whole number of at least 0; {remedy}")


def _require_sense(numbers: Mapping[str, int], remedy: str) -> None:
    """Check what the numbers say together.

    Raises:
        ConfigError: the first contradiction.
    """
    rank, size, port = numbers["RANK"], numbers["WORLD_SIZE"], numbers["MASTER_PORT"]
    local_rank, local_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    for name, holds, allowed in (
        ("WORLD_SIZE", size >= 1, "at least 1"),
        ("RANK", rank < size, f"below WORLD_SIZE={size}"),
        ("LOCAL_WORLD_SIZE", 1 <= local_size <= size, f"between 1 and WORLD_SIZE={size}"),
        ("LOCAL_RANK", local_rank < local_size, f"below LOCAL_WORLD_SIZE={local_size}"),
        ("LOCAL_RANK", local_rank <= rank, f"RANK={rank} or less"),
        ("MASTER_PORT", 1 <= port < 1 << 16, f"between 1 and {(1 << 16) - 1}"),
    ):
        if not holds:
            raise ConfigError(f"{name}: got {numbers[name]}; it must be {allowed}; {remedy}")


@functools.cache  # a name service may take seconds
def _require_address(address: str, remedy: str) -> None:
    """Refuse a name of no machine; a name service may be out of reach now and answer later.

    Raises:
        ConfigError: none has.
    """
    try:
        socket.getaddrinfo(address or "\0", None)
    except (socket.gaierror, ValueError) as error:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
            return
        reason = getattr(error, "strerror", None) or "no name of a machine"
        raise ConfigError(
            f"MASTER_ADDR: got {address!r}: {reason}; it must be a name or the address of rank 0's machine; {remedy}"
        ) from None
