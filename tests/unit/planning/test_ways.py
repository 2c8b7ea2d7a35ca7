"""Settings beside the stage that are `auto`: the first way that fits, in the stated order."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.planning.rows import Row, planned, step
from tests.unit.planning.test_choice import Remembering, asking, with_room_for
from zerotrain.comm.world import World
from zerotrain.config.checks import value_problems
from zerotrain.config.schema import Config
from zerotrain.preflight.choice import (
    Choice,
    allowed,
    as_chosen,
    asked_hash,
    choose,
    ways_beside_stages,
    with_least_memory,
    with_values,
)
from zerotrain.preflight.plan import Planner
from zerotrain.run.factory import build_engine_of

NAMES = ["zero.stage", "train.micro_batch_size", "model.activation_checkpointing", "offload.optimizer"]


def asking_for_all() -> Config:
    """A config of 4 rows a rank and step, of which all is to be chosen that can be."""
    config = asking()
    config.train.micro_batch_size, config.train.gradient_accumulation_steps = "auto", 4
    config.model["activation_checkpointing"] = config.offload.optimizer = "auto"
    return config


@pytest.fixture(scope="module")
def two_ranks(once, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Planner]:
    """What asks for all, and plans of two ranks."""
    asked = asking_for_all()
    return asked, Remembering(once, asked, 2, tmp_path_factory.mktemp("plans"))


def chosen_of(asked: Config, planner: Planner, nbytes: float) -> Choice:
    """The choice with so much memory."""
    return choose(asked, with_least_memory(asked), with_room_for(planner, nbytes))


def test_a_micro_batch_divides_the_rows_of_a_step_and_the_global_batch_stays():
    asked = asking_for_all()
    asked.train.gradient_accumulation_steps = 12

    assert allowed(asked, "train.micro_batch_size") == (12, 6, 4, 3, 2, 1)
    for size in (12, 4, 1):
        given = with_values(asked, {"train.micro_batch_size": size})
        assert (given.train.micro_batch_size, given.train.gradient_accumulation_steps) == (size, 12 // size)
        assert with_values(given, {"train.micro_batch_size": 6}).train.gradient_accumulation_steps == 2
    assert asked.train.gradient_accumulation_steps == 12
    asked.train.gradient_accumulation_steps = 0  # which is refused elsewhere
    assert allowed(asked, "train.micro_batch_size") == (1,)


def test_a_smaller_micro_batch_gives_way_first_then_recomputation_and_a_disk_comes_last():
    ways = [tuple(way.values()) for way in ways_beside_stages(asking_for_all(), on_host=True)]
    on_gpu = [way["offload.optimizer"] for way in ways_beside_stages(asking_for_all(), on_host=False)]

    of_tier = [(again, size) for again in (False, True) for size in (4, 2, 1)]
    assert ways == [(tier, *way) for tier in ("device", "disk") for way in of_tier]
    assert on_gpu == ["device"] * 6 + ["cpu"] * 6 + ["disk"] * 6


def test_the_optimizer_leaves_the_device_before_weights_and_activations_and_no_tier_is_passed_over():
    config = asking_for_all()
    config.train.micro_batch_size, config.model["activation_checkpointing"] = 1, False
    config.offload.parameters = config.offload.activations = "auto"

    ways = ways_beside_stages(config, on_host=False)

    places = [(way["offload.optimizer"], way["offload.parameters"], way["offload.activations"]) for way in ways]
    assert len(places) == 27
    assert places[:3] == [("device",) * 3, ("cpu", "device", "device"), ("device", "cpu", "device")]
    assert all("disk" not in way for way in places[:8])
    assert all("disk" in way for way in places[8:])


def test_weights_go_to_a_disk_where_nothing_else_fits(once, tmp_path: Path):
    asked = asking()
    asked.model |= {"num_layers": 12, "hidden_size": 64}
    asked.offload.parameters = "auto"
    assert value_problems(asked) == []
    planner = Remembering(once, asked, 1, tmp_path)
    least = planner.memory.taken(planner.stage(with_least_memory(asked), 3))

    roomy, narrow = (chosen_of(asked, planner, nbytes) for nbytes in (1e12, least))
    too_narrow = chosen_of(asked, planner, least - 1)

    assert roomy.values == {"zero.stage": 0, "offload.parameters": "device"}
    assert narrow.values == {"zero.stage": 3, "offload.parameters": "disk"}
    assert not too_narrow.plan.fits
    narrow.write(tmp_path, asked)
    found = as_chosen(asked, tmp_path, 1)
    assert (found.zero.stage, found.offload.parameters, found.offload.uses_disk) == (3, "disk", True)


def test_units_are_computed_again_before_what_a_forward_saves_goes_to_a_disk(once, tmp_path: Path):
    asked = asking()
    asked.zero.stage, asked.train.micro_batch_size = 1, 16
    asked.offload.activations = asked.model["activation_checkpointing"] = "auto"
    assert value_problems(asked) == []
    planner = Remembering(once, asked, 1, tmp_path)
    ways = ways_beside_stages(asked, on_host=True)
    plans = [planner.stage(with_values(with_least_memory(asked), way), 1) for way in ways]
    assert [tuple(way.values()) for way in ways] == [
        ("device", False), ("device", True), ("disk", False), ("disk", True)
    ]  # fmt: skip
    taken = [planner.memory.taken(plan) for plan in plans]
    assert taken[0] > max(taken[1:])
    assert plans[2].disk == plans[2].saved > 0
    assert plans[0].saved == plans[0].fetched == 0

    for limit in taken:
        first = next(way for way, nbytes in zip(ways, taken, strict=True) if nbytes <= limit)
        assert chosen_of(asked, planner, limit).values == first


@pytest.mark.parametrize("settings", [(), ("train.gradient_accumulation_steps=3",), ("train.virtual_ranks=4",)])
@pytest.mark.parametrize("again", [False, True])
def test_what_a_forward_saves_elsewhere_is_planned_to_the_byte(settings: tuple[str, ...], again: bool, tmp_path: Path):
    more = ("train.micro_batch_size=32", "offload.activations=disk", f"model.activation_checkpointing={again}".lower())
    row = Row(model="gpt", ranks=1, stage=2, precision="fp32", settings=(*more, *settings))
    engine = build_engine_of(row.config, World(0, 1, 0, torch.device("cpu")), row.stage, tmp_path)
    saved = engine.held.homes.saved
    assert saved is not None
    step(engine, row)
    fetched, stored = saved.fetched_nbytes, saved.stored_nbytes

    step(engine, row)
    told = planned(row, tmp_path)

    assert (told.fetched, told.stored) == (saved.fetched_nbytes - fetched, saved.stored_nbytes - stored)
    assert told.stored >= told.saved == told.disk == saved.most_placed_nbytes > 0
    saved.free_ended()
    assert saved.placed_nbytes == 0


def test_with_memory_enough_the_first_way_is_taken_and_no_other_is_planned(two_ranks: tuple[Config, Planner]):
    choice = chosen_of(*two_ranks, 1e12)

    assert choice.values == dict(zip(NAMES, (1, 4, False, "device"), strict=True))
    assert len(choice.tried) == 1
    assert sorted(choice.plan.stages) == [0, 1, 2, 3]
    assert "the first of the ways that fits; stages 0, 1, 2, 3 fit" in choice.why


def test_the_choice_is_the_first_way_of_all_that_fits_at_its_best_stage(two_ranks: tuple[Config, Planner]):
    asked, planner = two_ranks
    ways = ways_beside_stages(asked, on_host=True)
    plans = [planner.run(with_values(with_least_memory(asked), way)) for way in ways]
    taken = [[planner.memory.taken(plan.stages[stage]) for stage in (1, 2, 0, 3)] for plan in plans]

    seen = set()
    for limit in sorted({nbytes for of_way in taken for nbytes in of_way}):
        first, stage = next(
            (way, stage)
            for way, of_way in zip(ways, taken, strict=True)
            for stage, nbytes in zip((1, 2, 0, 3), of_way, strict=True)
            if nbytes <= limit
        )
        choice = chosen_of(asked, planner, limit)
        assert choice.plan.fits
        assert choice.values == {"zero.stage": stage, **first}
        seen.add(tuple(choice.values.values()))
    assert len(seen) > 3
    assert {of_choice[3] for of_choice in seen} == {"device", "disk"}


def test_where_nothing_fits_all_ways_are_planned_and_what_would_fit_is_told(two_ranks: tuple[Config, Planner]):
    asked, planner = two_ranks

    choice = chosen_of(asked, planner, planner.memory.process + 1)

    assert (choice.plan.fits, len(choice.tried)) == (False, 12)
    assert choice.why.startswith(f"{', '.join(NAMES)}: got auto, but nothing fits: with zero.stage=")
    assert "model.activation_checkpointing=true, offload.optimizer=disk a rank would hold" in choice.why
    assert "nor 16 times the ranks fit" in choice.why


def test_all_that_was_chosen_is_found_again(two_ranks: tuple[Config, Planner], tmp_path: Path):
    asked, planner = two_ranks
    choice = chosen_of(asked, planner, 1e12)
    choice.write(tmp_path, asked)

    again = as_chosen(asked, tmp_path, 2)

    assert again == with_values(asked, choice.values)
    assert (again.train.micro_batch_size, again.train.gradient_accumulation_steps) == (4, 1)
    other = replace(asked, train=replace(asked.train, gradient_accumulation_steps=8))
    assert as_chosen(other, tmp_path, 2) == other
    assert asked_hash(other) != asked_hash(asked)


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [("train", "micro_batch_size", 0), ("train", "micro_batch_size", 1.5), ("train", "micro_batch_size", True),
     ("train", "micro_batch_size", "automatic"), ("offload", "optimizer", "nvme"), ("offload", "update", "auto")],
)  # fmt: skip
def test_a_value_that_there_is_not_is_told(group: str, name: str, value: object):
    config = Config()
    setattr(getattr(config, group), name, value)

    [problem] = value_problems(config)

    assert problem.startswith(f"{group}.{name}: got ")


def test_a_schedule_of_stages_leaves_nothing_to_choose():
    config = asking_for_all()
    config.zero.schedule = {3: 1}

    assert [problem.partition(":")[0] for problem in value_problems(config)] == NAMES
