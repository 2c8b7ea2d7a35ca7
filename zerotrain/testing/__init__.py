"""Run a function on N real processes that form a process group, as tests of sharded code need it."""

from zerotrain.testing.ranks import RankFailure, run_ranks

__all__ = ["RankFailure", "run_ranks"]
