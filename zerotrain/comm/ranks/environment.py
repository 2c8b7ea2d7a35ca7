"""The variables by which torchrun, our own launcher or Slurm tells a process which rank it is. Imports no torch."""

import functools
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from zerotrain.comm.ranks.slurm import REMEDY, STEP_VARIABLES, variables_of_step
from zerotrain.errors import ConfigError

STORE_VARIABLE = "ZEROTRAIN_STORE"
"""The file in which the ranks of one machine meet, where they were started by `launching.spawn`."""

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_REMEDY = "torchrun sets all of them for each of its ranks: start with torchrun, or unset those that another run left"


@dataclass(frozen=True)
class RankEnvironment:
    """Which rank this process is, of how many."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine."""
    address: str = "localhost"
    """Host of the store at which the ranks meet."""
    port: int = 0
    store_file: str | None = None
    """A file to meet in instead."""
    starter: str = "torchrun"
    """The program that has started the ranks: torchrun, or srun; our own launcher counts as torchrun."""

    @classmethod
    def read(cls, *, whole: bool = True) -> "RankEnvironment | None":
        """The rank this process was started as; None where it was not started as one.

        A task of a Slurm step of several tasks is one. Those of torchrun's variables that are set come first; the
        others are then set, as libraries look for them too.

        Args:
            whole: whether LOCAL_WORLD_SIZE is needed too; without it, it counts as WORLD_SIZE.

        Raises:
            ConfigError: variables are missing, no numbers, or contradict each other.
        """
        given = {name: os.environ[name] for name in {*_NUMBERS, *_NEEDED} if name in os.environ}
        of_step = {} if "RANK" in given else variables_of_step(os.environ)
        given, is_step = of_step | given, any(name in os.environ for name in STEP_VARIABLES)
        remedy = REMEDY if of_step else _REMEDY
        if not given:
            return None
        missing = [name for name in (*_NEEDED, *(["LOCAL_WORLD_SIZE"] if whole else [])) if name not in given]
        if missing:
            of = ", ".join(sorted(f"{name}={value}" for name, value in given.items()))
            raise ConfigError(f"{', '.join(missing)}: not set, though the environment has {of}; {remedy}")
        numbers = {name: _whole_number(name, given[name], remedy) for name in _NUMBERS if name in given}
        numbers.setdefault("LOCAL_WORLD_SIZE", numbers["WORLD_SIZE"])
        _require_sense(numbers, remedy)
        _require_address(given["MASTER_ADDR"], remedy)
        os.environ.update(given)
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            address=given["MASTER_ADDR"],
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
    said = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _whole_number("TORCHELASTIC_RESTART_COUNT", said)


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
    """Check that a machine has this name; a name service that cannot be asked now may answer later.

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
