"""Settings that may be `auto`."""

import pytest

from zerotrain.config.checks import value_problems, without_effect
from zerotrain.config.compose import from_values
from zerotrain.config.schema import Config, ZeroGroup
from zerotrain.preflight.choice import asked_hash, unchosen_problems, with_least_memory, with_values
from zerotrain.settings import autos_of


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


@pytest.mark.parametrize("stage", ["autos", "", 4, 1.5, True, None, [1], {"a": 1}])
def test_a_stage_that_there_is_not_is_told(stage: object):
    config = Config(zero=ZeroGroup(stage=stage))

    [problem] = value_problems(config)

    assert problem.startswith("zero.stage: got ")
    assert problem.endswith("it must be 0, 1, 2 or 3, or auto; the default is 2")
    without_effect(config, 2)  # which goes through all settings of a config that may be wrong


def test_a_stage_of_the_environment_is_a_number():
    assert from_values({"zero": {"stage": "3"}}).zero.stage == 3


def test_a_schedule_leaves_nothing_to_choose():
    config = of_auto()
    config.zero.schedule = {3: 1}

    [problem] = value_problems(config)

    assert problem.startswith("zero.stage: got auto with zero.schedule={3: 1}; it must be a value with a schedule")


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
