"""The variables by which torchrun, or the agent of `spawn`, tells a process which rank it is. Imports no torch."""

import os
from dataclasses import dataclass

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class RankEnvironment:
    """Which rank this process is, of how many."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    """Ranks on this machine."""

    @classmethod
    def read(cls) -> "RankEnvironment | None":
        """The rank this process was started as; None where it was not started as one."""
        if not all(name in os.environ for name in _VARIABLES):
            return None
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        )

    @staticmethod
    def leave() -> None:
        """Forget it, to start ranks of one's own."""
        for name in list(os.environ):
            if name in _VARIABLES or name.startswith(_PREFIXES):
                del os.environ[name]
