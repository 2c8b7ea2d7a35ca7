"""A loop of one's own ends in bounded time, and says why, where a rank is killed early or may open too few files."""

import functools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from own_loops import KILLED, Disturbance, nothing, run_loop

from zerotrain.comm import world

JOIN_S = 15.0
"""In place of 20 s: what is waited for in vain here."""
LOOP = "a loop of your own whose rank is killed, at any moment after all have come"
KILLED_EARLY = ("hosts: Ranks of one host", LOOP)
FEW_FILES = ("hosts: Ranks of one host", "and whose ranks may open too few files")


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_join(rank: int) -> None:
    dist.init_process_group = die


def die_in_second_group(rank: int) -> None:
    dist.new_group = die


def prepare(place: Callable[[int], None], dies: int, rank: int) -> None:
    world._JOIN_S["gloo"] = JOIN_S
    if rank == dies:
        place(rank)


@pytest.mark.case(*KILLED_EARLY, "the others end within 30 s; a rank killed while they joined is named")
@pytest.mark.parametrize(
    ("place", "size", "dies", "says"),
    [
        (die_in_join, 2, 1, "CommError: rank 1 came to the meeting of the ranks, and did not join the others"),
        (die_in_join, 3, 2, "CommError: rank 2 came to the meeting of the ranks, and did not join the others"),
        (die_in_join, 3, 0, "CommError: rank 0 at 127.0.0.1:"),
        (die_in_second_group, 3, 1, "CommError: rank 1 came to the meeting of the ranks, and did not join the others"),
    ],
)
@pytest.mark.thinned(2)
@pytest.mark.waits
def test_a_rank_that_is_killed_when_it_has_come_is_named_and_not_waited_for_as_a_late_one(
    place: Callable[[int], None], size: int, dies: int, says: str
) -> None:
    """They waited for 300 s (2026-11-23)."""
    ends = run_loop(size, Disturbance(functools.partial(prepare, place, dies)))
    assert ends.pop(dies) == KILLED
    assert all(end.startswith(says) for end in ends), ends


@pytest.mark.case(*KILLED_EARLY)
@pytest.mark.case(
    "hosts: Ranks of one host", "a rank is killed in a backward or a forward", "the others end at once, and say so"
)
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_is_killed_at_any_moment_is_told_of_by_all_others(seed: int) -> None:
    drawn = random.Random(seed)
    size = 2 + seed % 2
    dies, after_s = drawn.randrange(size), drawn.uniform(0.0, 0.6)
    ends = run_loop(size, Disturbance(functools.partial(prepare, nothing, dies)), (dies, after_s))
    killed = ends.pop(dies)
    assert killed == KILLED or killed.startswith("completed")
    assert all(end.startswith("CommError: ") or killed != KILLED for end in ends), ends


REFUSED = "ConfigError: rank {}: a process may open "


@pytest.mark.case(*FEW_FILES, "refused before they meet, with the limit; with just enough files they train", under=LOOP)
@pytest.mark.parametrize(("size", "spare"), [(2, 4), (2, 12), (2, 21), (3, 12), (3, 24)])
def test_ranks_that_may_open_too_few_files_are_refused_before_they_meet(size: int, spare: int) -> None:
    ends = run_loop(size, Disturbance(spare_files=spare))
    assert all(end.startswith(REFUSED.format(rank)) for rank, end in enumerate(ends)), ends
    assert all("raise it: ulimit -n 1024" in end for end in ends)


@pytest.mark.case(*FEW_FILES, under=LOOP)
@pytest.mark.parametrize(("size", "spare"), [(2, 23), (2, 24), (3, 26), (3, 27)])
def test_ranks_that_may_open_just_enough_train(size: int, spare: int) -> None:
    assert run_loop(size, Disturbance(spare_files=spare)) == ["completed (exit code 0)"] * size
