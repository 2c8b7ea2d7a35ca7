"""Settings beside the stage that are `auto`: the fastest way that fits by the cost model, and the rates it needs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.unit.planning.rows import Row, batch_of_one, planned, step
from tests.unit.planning.test_choice import Remembering, asking, with_room_for
from zerotrain.comm.ranks.world import World
from zerotrain.config.checks import value_problems
from zerotrain.config.schema import Config
from zerotrain.planning.auto import (
    allowed,
    asked_hash,
    ways_beside_stages,
    with_least_memory,
    with_values,
)
from zerotrain.planning.choice import Choice, as_chosen, choose
from zerotrain.planning.cost import Speeds, step_s
from zerotrain.planning.plan import Planner
from zerotrain.run.factory import build, build_engine_of
from zerotrain.run.preflight.room import Ranks
from zerotrain.run.probe import OF_A_NETWORK, probed

NAMES = ["zero.stage", "train.micro_batch_size", "model.activation_checkpointing", "offload.optimizer"]
SPEEDS = Speeds(flops=1e9, operations=1e5, memory=1e9, link=1e8, host=1e9, disk=1e8)


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


def chosen_of(asked: Config, planner: Planner, nbytes: float, rates: Speeds = SPEEDS) -> Choice:
    """The choice with so much memory."""
    return choose(asked, with_least_memory(asked), with_room_for(planner, nbytes), lambda: rates)


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


def test_ways_go_from_the_fastest_on_and_a_cpu_offloads_to_disk_alone():
    ways = [dict(way.values) for way in ways_beside_stages(asking_for_all(), on_host=True)]
    on_gpu = [dict(way.values) for way in ways_beside_stages(asking_for_all(), on_host=False)]

    assert (len(ways), len(on_gpu)) == (12, 18)
    assert [*ways[0].values()] == [4, False, "device"]
    assert [*ways[-1].values()] == [*on_gpu[-1].values()] == [1, True, "disk"]


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


def test_what_a_forward_saves_goes_to_a_disk_where_that_takes_less_time_than_to_compute_it_again(once, tmp_path: Path):
    asked = asking()
    asked.train.micro_batch_size = 16
    asked.offload.activations = asked.model["activation_checkpointing"] = "auto"
    assert value_problems(asked) == []
    planner = Remembering(once, asked, 1, tmp_path)
    ways = [*ways_beside_stages(asked, on_host=True)]
    plans = [planner.stage(with_values(with_least_memory(asked), way.values), 1) for way in ways]
    assert [tuple(way.values.values()) for way in ways] == [
        (False, "device"), (False, "disk"), (True, "device"), (True, "disk")
    ]  # fmt: skip
    taken = [planner.memory.taken(plan) for plan in plans]
    assert taken[0] > max(taken[1:])
    assert plans[1].disk == plans[1].saved > 0
    assert plans[0].saved == plans[0].fetched == 0
    asked.zero.stage = 1
    fast_disk, slow_disk = replace(SPEEDS, disk=1e12), replace(SPEEDS, disk=1e3)

    chosen = [chosen_of(asked, planner, taken[0] - 1, rates).values for rates in (fast_disk, slow_disk)]

    assert [each["offload.activations"] for each in chosen] == ["disk", "device"]
    assert [each["model.activation_checkpointing"] for each in chosen] == [False, True]


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


def test_the_seconds_of_a_step_are_those_of_the_formula(tmp_path: Path):
    plan = planned(Row(model="mlp", ranks=2, stage=1, precision="fp32"), tmp_path)
    by_hand = replace(plan, flops=10**9, operations=1000, optimizer=10**8, sent=10**7, fetched=10**6, stored=10**6)

    assert step_s(by_hand, SPEEDS) == pytest.approx(1 + 0.01 + 0.2 + 0.1 + 0.002)
    on_disk = replace(by_hand, disk=10**8)
    assert step_s(on_disk, SPEEDS) == pytest.approx(1.1 * (1 + 0.01) + 0.4 + 0.1 + 0.02)
    of_forwards = replace(on_disk, saved=10**8)
    assert step_s(of_forwards, SPEEDS) == pytest.approx(1.1 * (1 + 0.01) + 0.2 + 0.1 + 0.02)


def test_the_flops_of_a_plan_are_those_that_torch_counts(tmp_path: Path):
    row = Row(model="mlp", ranks=1, stage=1, precision="fp32", settings=("train.gradient_accumulation_steps=3",))
    model = build("model", row.config.model_target)
    rows = tuple(each.repeat(4, 1) for each in batch_of_one("mlp"))
    with FlopCounterMode(display=False) as counter:
        model(*rows).backward()

    told = planned(row, tmp_path)

    assert told.flops == 3 * counter.get_total_flops()
    assert told.operations > 300


def test_what_is_computed_again_counts_with_the_rest(tmp_path: Path):
    once = planned(Row(model="gpt", ranks=1, stage=1, precision="fp32"), tmp_path)
    again = Row(model="gpt", ranks=1, stage=1, precision="fp32", settings=("model.activation_checkpointing=true",))

    told = planned(again, tmp_path)

    # A forward takes at most as much as its backward, and the last product of a block is not computed again.
    assert 1.05 * once.flops < told.flops < 1.5 * once.flops
    assert told.operations > once.operations


def test_with_memory_enough_the_fastest_is_chosen_and_one_way_is_planned(two_ranks: tuple[Config, Planner]):
    choice = chosen_of(*two_ranks, 1e12)

    assert choice.values == dict(zip(NAMES, (1, 4, False, "device"), strict=True))
    assert len(choice.tried) == 1
    assert sorted(choice.plan.stages) == [0, 1, 2, 3]
    assert "the one of least time by the cost model; stages 0, 1, 2, 3 fit" in choice.why


def test_the_choice_is_that_of_all_ways_and_stages_planned_and_follows_the_rates(two_ranks: tuple[Config, Planner]):
    asked, planner = two_ranks
    ways = [*ways_beside_stages(asked, on_host=True)]
    plans = [planner.run(with_values(with_least_memory(asked), way.values)) for way in ways]
    taken = [[planner.memory.taken(plan.stages[stage]) for stage in (1, 2, 0, 3)] for plan in plans]
    ends = sorted({nbytes for each in taken for nbytes in each})
    slow_disk, slow_compute = replace(SPEEDS, disk=1e3), replace(SPEEDS, flops=1e6, operations=1e2, disk=1e12)

    seen = set()
    for rates in (slow_disk, slow_compute, replace(SPEEDS, link=1e3)):
        for limit in ends:
            best = None
            for way, plan, nbytes in zip(ways, plans, taken, strict=True):
                stage = next((stage for stage, one in zip((1, 2, 0, 3), nbytes, strict=True) if one <= limit), None)
                if stage is not None and (best is None or step_s(plan.stages[stage], rates) < best[0]):
                    best = step_s(plan.stages[stage], rates), {"zero.stage": stage, **way.values}
            choice = chosen_of(asked, planner, limit, rates)
            assert best is not None
            assert choice.plan.fits
            assert choice.values == best[1]
            seen.add(tuple(choice.values.values()))
    assert len(seen) > 3
    assert {each[3] for each in seen} == {"device", "disk"}


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


def test_a_probe_measures_what_it_can_and_names_what_it_assumes(tmp_path: Path):
    config, cpu = with_least_memory(asking_for_all()), torch.device("cpu")

    no_folder = tmp_path / "file"
    no_folder.touch()

    alone = probed(config, Ranks(2, 2), cpu, 1, tmp_path)
    of_hosts = probed(config, Ranks(4, 2), cpu, 1, no_folder)

    assert alone.assumed == ()
    assert min(alone.flops, alone.operations, alone.memory, alone.link, alone.host, alone.disk) > 0
    assert of_hosts.assumed == ("link", "disk")
    assert of_hosts.link == OF_A_NETWORK
    assert "link (assumed)" in str(of_hosts)
    assert "assumed" not in str(alone)
    assert [*tmp_path.iterdir()] == [no_folder]
