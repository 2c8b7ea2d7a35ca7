"""Settings beside the stage that are `auto`: the first way that fits, in the stated order."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.preflight.rows import MODELS, Row, planned, step
from zerotrain.comm.world import World
from zerotrain.config.checks import value_problems, without_effect
from zerotrain.config.compose import from_values
from zerotrain.config.schema import Config, ZeroGroup
from zerotrain.errors import ConfigError
from zerotrain.preflight.choice import (
    Choice,
    allowed,
    as_chosen,
    asked_hash,
    choose,
    unchosen_problems,
    ways_beside_stages,
    with_least_memory,
    with_values,
)
from zerotrain.preflight.plan import PLAN_NAME, Memory, Planner, RunPlan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.preflight.room import Ranks
from zerotrain.run.factory import build_engine_of
from zerotrain.settings import autos_of

# Settings that may be `auto`.


def of_auto() -> Config:
    """A config whose stage is to be chosen."""
    return Config(zero=ZeroGroup(stage="auto"))


def test_values_are_put_in_the_place_of_auto_and_the_config_that_asked_stays_as_it_is():
    asked = of_auto()

    given, least = with_values(asked, {"zero.stage": 1}), with_least_memory(asked)

    assert (asked.zero.stage, given.zero.stage, least.zero.stage) == ("auto", 1, 3)
    assert (autos_of(asked), autos_of(given)) == (["zero.stage"], [])
    assert with_least_memory(given) == given


def test_a_choice_is_for_all_that_a_plan_depends_on_and_for_no_more():
    def hash_of(group: str, name: str, value: object) -> str:
        config = of_auto()
        setattr(getattr(config, group), name, value)
        return asked_hash(config)

    known = asked_hash(of_auto())
    more = [("zero", "bucket_mb", 1.0), ("precision", "name", "bf16"), ("offload", "optimizer", "cpu")]
    more += [("train", "micro_batch_size", 4), ("plan", "memory_gb", 1.0), ("train", "virtual_ranks", 4)]
    others = [hash_of(*each) for each in more]
    same = [hash_of("train", "max_steps", 7), hash_of("checkpoint", "resume", "auto"), hash_of("plan", "only", True)]

    assert known not in others
    assert len(set(others)) == len(others)
    assert set(same) == {known}


def test_a_stage_of_the_environment_is_a_number():
    assert from_values({"zero": {"stage": "3"}}).zero.stage == 3


def test_the_memory_of_a_rank_has_an_effect_where_a_stage_is_chosen():
    asked, given = of_auto(), Config()
    asked.plan.memory_gb = given.plan.memory_gb = 4.0

    assert not without_effect(asked, 2)
    assert [line.partition("=")[0] for line in without_effect(given, 2)] == ["plan.memory_gb"]


def test_where_no_run_starts_there_is_nothing_that_auto_could_be_chosen_for():
    assert unchosen_problems(of_auto()) == [
        "zero.stage: got auto, which is chosen as a run starts; it must be a value here"
    ]
    assert unchosen_problems(Config()) == []


# The values that a run gets for `auto`, from plans of a small model.


SYNTHETIC = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 24, "vocab_size": 64}


def asking(model: str = "gpt") -> Config:
    """A config whose stage is to be chosen."""
    config = Row(model=model, ranks=4, stage=2, precision="bf16").config
    config.zero.stage, config.data, config.launch.device = "auto", config.data | SYNTHETIC, "cpu"
    return config


def planner_of(config: Config, num_ranks: int, folder: Path) -> Planner:
    """Its plans, of ranks on this host."""
    return Planner(with_least_memory(config), Ranks(num_ranks, num_ranks), memory_of(config, num_ranks), folder)


class Remembering(Planner):
    """Plans nothing twice, nor what another worker of the tests has planned.

    Args:
        once: the fixture of that name.
    """

    def __init__(self, once: Callable[[str, Callable[[], Any]], Any], asked: Config, num_ranks: int, folder: Path):
        config = with_least_memory(asked)
        super().__init__(config, Ranks(num_ranks, num_ranks), memory_of(config, num_ranks), folder)
        self._once = once

    def stage(self, config: Config, stage: int, num_ranks: int | None = None) -> StagePlan:
        """See `Planner.stage`."""
        of_all = replace(config, zero=replace(config.zero, stage=0))
        asked = repr((of_all, stage, num_ranks or self.ranks.num_ranks, self.ranks.num_local))
        plan = functools.partial(super().stage, config, stage, num_ranks)
        return self._once(f"plan-{hashlib.sha256(asked.encode()).hexdigest()}", plan)

    def stages(self, config: Config, stages: Sequence[int]) -> dict[int, StagePlan]:
        """See `Planner.stages`."""
        return {stage: self.stage(config, stage) for stage in stages}


def memory_of(config: Config, num_ranks: int) -> Memory:
    """That of this machine."""
    return Memory.of_run(config, torch.device("cpu"), num_ranks)


@pytest.fixture(scope="module")
def four_ranks(once, tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Planner, RunPlan]:
    """What asks, and its plans of four ranks."""
    asked = asking()
    planner = Remembering(once, asked, 4, tmp_path_factory.mktemp("plans"))
    return asked, planner, planner.run(with_least_memory(asked))


def with_room_for(planner: Planner, nbytes: float) -> Planner:
    """The same with other memory."""
    planner.memory = replace(planner.memory, device=nbytes)
    return planner


def test_the_choice_sends_least_of_what_fits_and_shares_the_update(four_ranks: tuple[Config, Planner, RunPlan]):
    asked, planner, plans = four_ranks
    taken = {stage: plans.memory.nbytes_of(plan) for stage, plan in plans.stages.items()}
    sent = {stage: plan.sent or 0 for stage, plan in plans.stages.items()}
    assert sent[0] == sent[1] == sent[2] < sent[3]
    assert len(set(taken.values())) == 4
    limits = sorted(taken.values())

    chosen = {}
    for limit in limits:
        choice = choose(asked, with_least_memory(asked), with_room_for(planner, limit))
        chosen[limit] = choice.values["zero.stage"]
        assert choice.plan.stage == chosen[limit]
        others = [each for each in (1, 2, 0, 3) if each != chosen[limit]]
        assert list(choice.alternatives.items()) == [(each, taken[each]) for each in others]
        assert choice.why.startswith(f"auto: zero.stage={chosen[limit]}: ")

    order = (1, 2, 0, 3)  # as much is sent at 0, but each rank updates all; the most is sent at 3
    assert chosen == {limit: next(each for each in order if taken[each] <= limit) for limit in limits}
    assert set(chosen.values()) >= {1, 3}


def test_one_rank_has_nothing_to_share(tmp_path: Path):
    asked = asking()

    choice = choose(asked, with_least_memory(asked), with_room_for(planner_of(asked, 1, tmp_path), 1e12))

    assert choice.values == {"zero.stage": 0}


def test_where_nothing_fits_the_smallest_change_that_does_is_told(four_ranks: tuple[Config, Planner, RunPlan]):
    asked, planner, plans = four_ranks
    least = min(plans.memory.nbytes_of(plan) for plan in plans.stages.values())
    process, checked = plans.memory.process, with_least_memory(asked)

    a_bit_less = choose(asked, checked, with_room_for(planner, least - 1))
    too_little = choose(asked, checked, with_room_for(planner, process + 1))

    assert not a_bit_less.plan.fits
    assert a_bit_less.why.startswith("zero.stage: got auto, but nothing fits: with zero.stage=")
    assert a_bit_less.why.endswith("; model.activation_checkpointing=true fits")
    assert "nor 16 times the ranks fit; choose a smaller model or batch" in too_little.why


def test_a_choice_is_found_again_for_the_same_settings_and_ranks_alone(four_ranks, tmp_path):
    asked, planner, _ = four_ranks
    choice = choose(asked, with_least_memory(asked), with_room_for(planner, 1e12))
    choice.write(tmp_path, asked)
    other = replace(asked, plan=replace(asked.plan, memory_gb=3.0))

    assert as_chosen(asked, tmp_path, 4).zero.stage == choice.values["zero.stage"] == 1
    assert as_chosen(asked, tmp_path).zero.stage == 1
    assert as_chosen(asked, tmp_path, 2) == asked
    assert as_chosen(other, tmp_path, 4) == other
    assert as_chosen(asked, tmp_path / "nowhere", 4) == asked
    assert as_chosen(with_least_memory(asked), tmp_path, 4).zero.stage == 3
    choose(asked, with_least_memory(asked), with_room_for(planner, 1.0)).write(tmp_path, asked)  # nothing fits
    assert as_chosen(asked, tmp_path, 4) == asked


@pytest.mark.parametrize("said", [9, True, "1", None, [1], {"a": 1}, -1])
def test_a_choice_that_there_is_not_is_none(four_ranks: tuple[Config, Planner, RunPlan], tmp_path: Path, said: object):
    asked, planner, _ = four_ranks
    choose(asked, with_least_memory(asked), with_room_for(planner, 1e12)).write(tmp_path, asked)
    body = json.loads((tmp_path / PLAN_NAME).read_text())
    assert body["chosen"] == {"zero.stage": 1}

    broken = ({"num_ranks": "4"}, {"stages": {"1": {"fits": True}}})
    for changed in ({"chosen": {"zero.stage": said}}, {"chosen": said}, {"asked": said}, *broken):
        (tmp_path / PLAN_NAME).write_text(json.dumps(body | changed))
        assert as_chosen(asked, tmp_path, 4) == asked


def test_a_model_that_asks_for_values_leaves_nothing_to_choose_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MODELS, "chooser", {"_target_": "tests.unit.preflight.test_rehearsal.Chooser"})
    asked = asking("chooser")

    with pytest.raises(ConfigError, match=r"^zero\.stage: got auto, but aten\.index\.Tensor cannot be"):
        choose(asked, with_least_memory(asked), planner_of(asked, 2, tmp_path))


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
    least = planner.memory.nbytes_of(planner.stage(with_least_memory(asked), 3))

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
    taken = [planner.memory.nbytes_of(plan) for plan in plans]
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


@pytest.mark.slow
def test_the_choice_is_the_first_way_of_all_that_fits_at_its_best_stage(two_ranks: tuple[Config, Planner]):
    asked, planner = two_ranks
    ways = ways_beside_stages(asked, on_host=True)
    plans = [planner.run(with_values(with_least_memory(asked), way)) for way in ways]
    taken = [[planner.memory.nbytes_of(plan.stages[stage]) for stage in (1, 2, 0, 3)] for plan in plans]

    seen = set()
    limits = sorted({nbytes for of_way in taken for nbytes in of_way})
    for limit in {*limits[::3], limits[-1]}:
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
    assert choice.values == dict(zip(NAMES, (1, 4, False, "device"), strict=True))
    assert "the first of the ways that fits; stages 0, 1, 2, 3 fit" in choice.why
    choice.write(tmp_path, asked)

    again = as_chosen(asked, tmp_path, 2)

    assert again == with_values(asked, choice.values)
    assert (again.train.micro_batch_size, again.train.gradient_accumulation_steps) == (4, 1)
    other = replace(asked, train=replace(asked.train, gradient_accumulation_steps=8))
    assert as_chosen(other, tmp_path, 2) == other
    assert asked_hash(other) != asked_hash(asked)


def test_a_schedule_of_stages_leaves_nothing_to_choose():
    config = asking_for_all()
    config.zero.schedule = {3: 1}

    problems = value_problems(config)

    assert [problem.partition(":")[0] for problem in problems] == NAMES
    assert problems[0].startswith("zero.stage: got auto with zero.schedule={3: 1}; it must be a value with a schedule")
