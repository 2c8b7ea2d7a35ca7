"""Run a function on N real processes with a process group, as tests of sharded code need it."""

from tests.ranks.processes import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
