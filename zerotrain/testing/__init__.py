"""Run a function on N real processes with a process group, as tests of sharded code need it."""

from zerotrain.testing.ranks import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]
