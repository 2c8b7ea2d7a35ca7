"""Calls that go on on all ranks, or on none."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.ranks.fake_wire import run_threads
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.engine.state.together import agreed
from zerotrain.errors import CheckpointError, ConfigError, DisagreementError, EngineStateError

LONG = "/a/long/way" * 40


def answers(
    by_rank: list[Any], *, calls: tuple[str, ...] = ("engine.save",) * 3, given: tuple[str, ...] = ("",) * 3
) -> list[Any]:
    """What three ranks are told: what they go on with, or why not. Each has facts, or raises an error."""

    def on_a_rank(world: World) -> Any:
        mine = Collectives(world, ledger=Ledger(), ordered=True, overlap=True)

        def plan() -> tuple[str, Mapping[str, object]]:
            facts = by_rank[world.rank]
            if isinstance(facts, Exception):
                raise facts
            return f"rank {world.rank}", facts

        try:
            return agreed(mine, calls[world.rank], plan, given[world.rank])
        except Exception as error:
            return type(error), str(error)
        finally:
            assert mine.journal.order == 0

    return run_threads(on_a_rank, 3, late_rank=1)[0]


def test_ranks_with_the_same_facts_go_on_with_their_own_plan():
    assert answers([{"path": 1}] * 3) == ["rank 0", "rank 1", "rank 2"]


def test_each_fact_that_differs_is_a_line_on_every_rank():
    told = (
        ConfigError,
        "engine.save: path differs between the ranks: /a on ranks 0, 2, /b on rank 1; give all ranks the same",
    )
    assert answers([{"path": f"/{each}", "extra": {}} for each in "aba"]) == [told] * 3


def test_long_texts_are_cut_around_the_place_where_they_differ():
    ((_, said), *_) = answers([{"path": f"{LONG}/{each}/{LONG}"} for each in "aba"])
    assert "/long/way/a//a/long" in said
    assert "/long/way/b//a/long" in said
    assert len(said) < 600


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineStateError("no"), EngineStateError),
        (CheckpointError("no"), CheckpointError),
        (OSError("no"), ConfigError),
    ],
)
def test_what_one_rank_refuses_all_tell_with_its_rank(error, kind):
    said = str(error) if kind is not ConfigError else f"OSError: {error}"
    told = (kind, f"engine.save failed, rank 2: {said}; nothing of the engine has changed")
    assert answers([{}, {}, error]) == [told] * 3


def test_what_all_ranks_refuse_alike_each_tells_in_its_own_words():
    assert answers([TypeError("no") for _ in range(3)]) == [(TypeError, "no")] * 3


def test_what_was_given_is_told_before_what_a_rank_refuses_of_it():
    ((kind, said), *_) = answers([{}, EngineStateError("no"), {}], given=("3", "4", "3"))
    assert (kind, said) == (
        ConfigError,
        "engine.save: differs between the ranks: 3 on ranks 0, 2, 4 on rank 1; give all ranks the same",
    )


@pytest.mark.parametrize("has_names", [True, False], ids=["with names", "as NCCL's, without"])
def test_other_calls_are_told_by_rank(has_names, monkeypatch):
    if not has_names:
        monkeypatch.setattr(Collectives, "gather_small", nameless(Collectives.gather_small))
    for kind, said in answers([{}] * 3, calls=("engine.save", "engine.freeze", "engine.save")):
        assert kind is DisagreementError
        assert "engine.save on ranks 0, 2, engine.freeze on rank 1; all ranks must make the same calls" in said


def nameless(gather: Any) -> Any:
    def gathered(self: Collectives, values: torch.Tensor, *, name: str, in_order: bool = True) -> torch.Tensor:
        assert name
        return gather(self, values, name="", in_order=in_order)

    return gathered
