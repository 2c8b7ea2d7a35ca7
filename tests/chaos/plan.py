"""Which kills a seed stands for, and how they are shared out over runs."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos.places import BY_NAME, LAUNCHERS, OTHER_RANKS, PLACES, RANK_0, Place
from tests.chaos.strike import LAUNCHER, Strike

STAGES = (0, 1, 2, 3)
VICTIMS = ("itself", "another", "parent", "all")
MAX_STEPS = 6
LATE_STEP = 4
"""When it has begun there are two checkpoints, and from the one before on each save removes one."""
MAX_STRIKES = 3
"""Of one run."""
OF_RANKS = ("itself", "another")
"""Victims whose ranks the launcher can start again."""
BY_RESTART = 0.4
"""Share of the runs of several kills in which it does; and of those kills that another follows."""
FOLLOWS = ("load", "clear", "aside", "restart")
"""Kinds of places that a run passes only after another kill: something is there to load, to clear away, ..."""


CHANGE = "switch"
"""Kind of the places that only a run whose stage changes passes."""
AROUND_A_CHANGE = (CHANGE, "save", "load")
ROUND = (0, 1, 2, 3, 1)
"""The stages of such a run, again and again; it begins with any of them."""


@dataclass(frozen=True)
class Case:
    """One run: it is killed, started again, killed, ..., until it completes."""

    number: int
    virtual_ranks: int
    strikes: tuple[Strike, ...]
    last_stage: int
    last_num_ranks: int
    """Of the start that no kill is planned for."""
    by_restart: bool
    """Let the launcher start the ranks again itself."""
    changes_stage: bool = False
    """After each step; the stage of a start is then the one that its schedule begins with."""


def plan(num_kills: int, seed: int, *, changing: bool = False) -> list[Case]:
    """As many kills as were asked for, or a few more: each place at each stage first, by each victim in turn.

    Args:
        changing: in runs whose stage changes after each step, all of them, and first of all in the midst of a change.
    """
    drawn = random.Random(seed)
    places = [place for place in PLACES if not changing or place.kind in AROUND_A_CHANGE]
    wanted = [(place, stage) for place in places for stage in STAGES]
    drawn.shuffle(wanted)
    if changing:
        wanted.sort(key=lambda each: each[0].kind != CHANGE)
    while len(wanted) < num_kills:
        wanted.append((drawn.choice(places), drawn.choice(STAGES)))
    return _cases(wanted[:num_kills], drawn, changing)


def quick() -> list[Case]:
    """Eleven kills of all kinds in as few starts as can be."""
    restarted = [
        Strike("save: half of a block written", "itself", rank=1, step=LATE_STEP, passing=1, stage=2, num_ranks=2),
        Strike("load: a tensor is filled", "another", rank=0, step=0, passing=3, stage=2, num_ranks=2),
        Strike("removal: before a file goes", "itself", rank=0, step=0, passing=2, stage=2, num_ranks=2),
        Strike("step: backward", "another", rank=0, step=0, passing=1, stage=2, num_ranks=2),
    ]
    moved = [
        Strike("save: before the rename", "all", rank=0, step=LATE_STEP, passing=1, stage=3, num_ranks=2),
        Strike("clear: before a file of a dead save goes", "parent", rank=0, step=0, passing=1, stage=1, num_ranks=2),
        Strike("aside: before the rename", "itself", rank=0, step=0, passing=1, stage=0, num_ranks=2),
        Strike("end: before result.json", "all", rank=0, step=0, passing=1, stage=3, num_ranks=2),
    ]
    ended = [
        Strike("save: renamed, before the fsync of the parent", "itself", 0, step=2, passing=1, stage=1, num_ranks=2),
        Strike("restart: before the ranks are started again", "itself", LAUNCHER, 0, passing=1, stage=1, num_ranks=2),
    ]
    changing = [
        Strike("switch: between two buckets", "itself", 1, step=2, passing=2, stage=1, num_ranks=2),
    ]
    return [
        Case(0, 2, tuple(restarted), last_stage=2, last_num_ranks=2, by_restart=True),
        Case(1, 2, tuple(moved), last_stage=2, last_num_ranks=1, by_restart=False),
        Case(2, 2, tuple(ended), last_stage=0, last_num_ranks=1, by_restart=True),
        Case(3, 2, tuple(changing), last_stage=2, last_num_ranks=2, by_restart=False, changes_stage=True),
    ]


def schedule_from(stage: int) -> dict[int, int]:
    """The stage after each number of steps, in a run whose stage changes after each."""
    first = ROUND.index(stage)
    return {step: ROUND[(first + step) % len(ROUND)] for step in range(MAX_STEPS)}


def _cases(wanted: list[tuple[Place, int]], drawn: random.Random, changing: bool) -> list[Case]:
    turns = {place.name: _victims_in_turn(place, drawn) for place in PLACES}
    leads = [each for each in wanted if each[0].kind not in FOLLOWS]
    chains: list[tuple[list[tuple[Place, int]], bool]] = []
    for follow in (each for each in wanted if each[0].kind in FOLLOWS):
        by_restart = follow[0].kind == "restart" or (follow[0].kind == "load" and drawn.random() < BY_RESTART)
        chains.append(([_lead_for(follow, leads, by_restart), follow], by_restart))
    while leads:
        chain = [leads.pop()]
        by_restart = chain[0][0].of != LAUNCHERS and drawn.random() < BY_RESTART
        # A place at the end of the run comes last.
        while len(chain) < MAX_STRIKES and chain[-1][0].kind != "end" and (by_restart or drawn.random() < BY_RESTART):
            fits = (
                each
                for each in leads[::-1]
                if (not by_restart or _may_be_restarted(each, chain[0][1]))
                and (changing or (each[0].kind == CHANGE) == (chain[0][0].kind == CHANGE))
            )
            if (found := next(fits, None)) is None:
                break
            leads.remove(found)
            chain.append(found)
        chains.append((chain, by_restart and len(chain) > 1))
    drawn.shuffle(chains)
    return [_case(number, *chain, turns, drawn, changing) for number, chain in enumerate(chains)]


def _may_be_restarted(planned: tuple[Place, int], stage: int) -> bool:
    return planned[1] == stage and planned[0].of != LAUNCHERS


def _victims_in_turn(place: Place, drawn: random.Random) -> deque[str]:
    if place.of == LAUNCHERS:
        return deque(["itself"])  # there is no rank yet, or none any more
    turn = deque(["itself", "parent"] if place.name == "start: a rank begins" else VICTIMS)  # others may not be there
    turn.rotate(drawn.randrange(len(turn)))
    return turn


def _next_in_turn(turn: deque[str], allowed: Sequence[str]) -> str:
    """The first that is allowed; it comes last from now on."""
    victim = next(each for each in turn if each in allowed)
    turn.remove(victim)
    turn.append(victim)
    return victim


def _lead_for(follow: tuple[Place, int], leads: list[tuple[Place, int]], same_stage: bool) -> tuple[Place, int]:
    """A kill that leaves what the place needs, preferably one of those that are wanted anyway."""
    is_clear = follow[0].kind == "clear"
    for index, (place, stage) in enumerate(leads):
        fits = _leaves_partial(place) if is_clear else place.kind in ("step", "save", "removal")
        if fits and (stage == follow[1] or not same_stage):
            return leads.pop(index)
    return BY_NAME["save: before the rename" if is_clear else "step: forward"], follow[1]


def _leaves_partial(place: Place) -> bool:
    names = [each.name for each in PLACES]
    first, last = names.index("save: its folder is made, not locked"), names.index("save: before the rename")
    return place.of == RANK_0 and first <= names.index(place.name) <= last


def _case(
    number: int,
    chain: list[tuple[Place, int]],
    by_restart: bool,
    turns: dict[str, deque[str]],
    drawn: random.Random,
    changing: bool,
) -> Case:
    virtual_ranks = drawn.choice([2, 2, 3])
    follow = next((place.kind for place, _ in chain if place.kind in FOLLOWS), None)
    strikes = []
    for index, (place, stage) in enumerate(chain):
        allowed: Sequence[str] = VICTIMS
        if follow == "clear" and index == 0:
            allowed = ("itself", "all")  # rank 0 lives on for a moment otherwise, and might end its save
        elif by_restart and place.of != LAUNCHERS:
            allowed = OF_RANKS
        strikes.append(
            Strike(
                place=place.name,
                victim=_next_in_turn(turns[place.name], allowed),
                rank=_rank_of(place, virtual_ranks, drawn),
                step=_step_for(place, index, len(chain), follow is not None, drawn),
                passing=_passing_of(place, drawn),
                stage=stage,
                num_ranks=virtual_ranks,
            )
        )
    return Case(
        number=number,
        virtual_ranks=virtual_ranks,
        strikes=tuple(strikes),
        last_stage=drawn.choice(STAGES),
        last_num_ranks=drawn.choice([1, 2]) if virtual_ranks == 2 else 3,
        by_restart=by_restart,
        changes_stage=changing or chain[0][0].kind == CHANGE,
    )


def _rank_of(place: Place, num_ranks: int, drawn: random.Random) -> int:
    if place.of == LAUNCHERS:
        return LAUNCHER
    if place.of == RANK_0:
        return 0
    return drawn.randrange(1 if place.of == OTHER_RANKS else 0, num_ranks)


def _step_for(place: Place, index: int, num_strikes: int, is_followed: bool, drawn: random.Random) -> int:
    """From which step on passings count."""
    if index > 0 or place.kind not in ("step", "save", CHANGE):
        return 0
    if place.kind == CHANGE:  # more changes must come, for the kills behind it and for one that sends nothing
        return drawn.randint(1, MAX_STEPS - 1 - num_strikes)
    if is_followed:
        return LATE_STEP
    return drawn.randint(1, MAX_STEPS - 1 if num_strikes == 1 else MAX_STEPS - num_strikes)


def _passing_of(place: Place, drawn: random.Random) -> int:
    if place.kind == "step" and place.name != "step: evaluation":
        return drawn.randint(1, 4)
    several = {
        "switch: between two buckets": 3,
        "switch: a bucket on its way between the ranks": 4,
        "load: a tensor is filled": 6,
        "removal: before a file goes": 3,
        "save: half of a block written": 2,
    }
    return drawn.randint(1, several.get(place.name, 1))
