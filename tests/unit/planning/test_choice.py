"""The values that a run gets for `auto`, from plans of a small model."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.planning.rows import MODELS, Row
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError
from zerotrain.preflight.choice import as_chosen, choose, with_least_memory
from zerotrain.preflight.plan import PLAN_NAME, Memory, Planner, RunPlan
from zerotrain.preflight.rehearsal import StagePlan
from zerotrain.preflight.room import Ranks

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
    return Memory.of(config, torch.device("cpu"), num_ranks)


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
    taken = {stage: plans.memory.taken(plan) for stage, plan in plans.stages.items()}
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
    least = min(plans.memory.taken(plan) for plan in plans.stages.values())
    process, checked = plans.memory.process, with_least_memory(asked)

    a_bit_less = choose(asked, checked, with_room_for(planner, least - 1))
    too_little = choose(asked, checked, with_room_for(planner, process + 1))

    assert not a_bit_less.plan.fits
    assert a_bit_less.why.startswith("zero.stage: got auto, but nothing fits: with zero.stage=")
    assert a_bit_less.why.endswith("; model.activation_checkpointing=true fits")
    assert "nor 16 times the ranks fit; choose a smaller model or batch" in too_little.why


def test_a_choice_is_found_again_for_the_same_settings_and_ranks_alone(
    four_ranks: tuple[Config, Planner, RunPlan], tmp_path: Path
):
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


def test_what_does_not_fit_is_chosen_for_no_run(four_ranks: tuple[Config, Planner, RunPlan], tmp_path: Path):
    asked, planner, _ = four_ranks

    choose(asked, with_least_memory(asked), with_room_for(planner, 1.0)).write(tmp_path, asked)

    assert as_chosen(asked, tmp_path, 4) == asked


@pytest.mark.parametrize("said", [9, True, "1", None, [1], {"a": 1}, -1])
def test_a_choice_that_there_is_not_is_none(four_ranks: tuple[Config, Planner, RunPlan], tmp_path: Path, said: object):
    asked, planner, _ = four_ranks
    choose(asked, with_least_memory(asked), with_room_for(planner, 1e12)).write(tmp_path, asked)
    body = json.loads((tmp_path / PLAN_NAME).read_text())
    assert body["chosen"] == {"zero.stage": 1}

    for changed in ({"chosen": {"zero.stage": said}}, {"chosen": said}, {"asked": said}, {"num_ranks": "4"}):
        (tmp_path / PLAN_NAME).write_text(json.dumps(body | changed))
        assert as_chosen(asked, tmp_path, 4) == asked


def test_a_model_that_asks_for_values_leaves_nothing_to_choose_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(
        MODELS,
        "chooser",
        {"_target_": "tests.unit.planning.test_rehearsal.Chooser"},
    )
    asked = asking("chooser")

    with pytest.raises(ConfigError, match=r"^zero\.stage: got auto, but aten\.index\.Tensor cannot be"):
        choose(asked, with_least_memory(asked), planner_of(asked, 2, tmp_path))


def test_plans_that_a_child_makes_are_those_that_are_made_here(tmp_path: Path):
    """In a process of its own: one with pytest's threads forks no child."""
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.planning.test_choice import asking, memory_of\n"
        "from zerotrain.device import processes\n"
        "from zerotrain.preflight.choice import with_least_memory\n"
        "from zerotrain.preflight.plan import Planner\n"
        "from zerotrain.preflight.room import Ranks\n"
        "config = with_least_memory(asking())\n"
        "planner = Planner(config, Ranks(2, 2), memory_of(config, 2), Path(sys.argv[1]))\n"
        "assert processes.may_fork()\n"
        "here = {stage: planner.stage(config, stage) for stage in range(4)}\n"
        "os.sched_getaffinity = lambda _: {0, 1}\n"
        "planned, begun = [], os.fork\n"
        "def fork():\n"
        "    planned.append(1)\n"
        "    return begun()\n"
        "os.fork = fork\n"
        "assert planner.stages(config, range(4)) == here\n"
        "assert list(planner.stages(config, [3, 1])) == [3, 1] and len(planned) == 2\n"
        "os.sched_getaffinity = lambda _: {0}\n"
        "assert planner.stages(config, range(4)) == here and len(planned) == 2\n"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
