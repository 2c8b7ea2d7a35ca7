"""Callbacks on several ranks: the same moments on all, one rank's end, wishes that all follow, and no cost."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, make_model, trainer_of
from commands import TINY, result_of

import zerotrain
from tests.ranks import run_ranks
from zerotrain.data import SyntheticTokens
from zerotrain.training import Callback, Request
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

NUM_RANKS = [1, 2, 3]


class Noting(Callback):
    """Notes the moments of its rank."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def start(self, run):
        self.seen.append(("start", run.step))

    def after_step(self, run, outcome):
        self.seen.append(("after_step", run.step))
        mine = torch.tensor(float(run.world.rank + 1))
        assert run.world.sum(mine).item() == sum(range(1, run.world.size + 1))  # all ranks are here

    def after_evaluation(self, run, metrics):
        self.seen.append(("after_evaluation", run.step))
        run.world.sum(torch.zeros(()))

    def after_stage_change(self, run, change):
        self.seen.append((f"stage {change.stage}", run.step))
        assert change.stage == run.engine.options.zero.stage

    def end(self, run):
        self.seen.append(("end", run.step))


class NotingFirst(Noting):
    ranks = "first"

    def after_step(self, run, outcome):
        self.seen.append(("after_step", run.step))

    def after_evaluation(self, run, metrics):
        assert run.world.rank == 0


class Asking(Callback):
    """Asks on one rank for a stage, and on another for a stop."""

    def __init__(self, rank: int, **requests: Request) -> None:
        self.rank, self.requests = rank, requests

    def ask(self, run):
        return self.requests.get(f"after_{run.step + 1}") if run.world.rank == self.rank else None


class Counting(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def after_step(self, run, outcome):
        self.steps.append(run.step + 100 * run.world.rank)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = list(state["steps"])


class Idle(Callback):
    def before_step(self, run):
        pass

    def ask(self, run):
        return None

    def after_step(self, run, outcome):
        pass


class Ledgers(Callback):
    """Keeps the bytes and collectives of each step, and the collectives outside of steps so far."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []

    def after_step(self, run, outcome):
        step, outside = run.engine.ledger.last_step, run.engine.ledger.outside_steps
        counts = sum(step.nbytes.values()), sum(step.calls.values()), sum(outside.calls.values())
        self.sent.append(counts)


def trained(folder: Path, name: str, callbacks: dict[str, Callback], **changes: Any) -> dict[str, Any]:
    """On each rank: the body of the result, and what the callbacks have noted."""
    world = zerotrain.World.current(torch.device("cpu"))
    run_dir = folder / f"{name}-{world.size}"
    run_dir.mkdir(exist_ok=True)
    engine = zerotrain.build_engine(
        make_model(),
        optimizer=OPTIMIZERS["adamw"],
        zero=zerotrain.ZeroConfig(stage=2, bucket_mb=0.2, reduction="ordered"),
        max_grad_norm=1.0,
        world=world,
    )
    dataset = SyntheticTokens(seq_len=32, vocab_size=256, num_sequences=64)
    usual: dict[str, Any] = {"max_steps": 4, "eval_every": 2, "log_every": 2}
    body = trainer_of(engine, dataset, run_dir, callbacks=callbacks, **usual | changes).run()
    return {"body": body, "noted": {name: vars(each) for name, each in callbacks.items()}}


def on_ranks(
    num_ranks: int, folder: Path, name: str, callbacks: dict[str, Callback], **changes: Any
) -> list[dict[str, Any]]:
    return run_ranks(functools.partial(trained, **changes), num_ranks, folder, name, callbacks)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.thinned(3, first=2)
def test_the_moments_of_all_ranks_are_the_same_and_those_of_the_first_are_its_own(tmp_path, num_ranks):
    callbacks = {"all": Noting(), "first": NotingFirst()}
    ranks = on_ranks(num_ranks, tmp_path, "moments", callbacks, stages={2: 3})
    wanted = [
        ("start", 0), ("after_evaluation", 0), ("after_step", 1), ("stage 3", 2), ("after_step", 2),
        ("after_evaluation", 2), ("after_step", 3), ("after_step", 4), ("after_evaluation", 4), ("end", 4),
    ]  # fmt: skip
    assert [rank["noted"]["all"]["seen"] for rank in ranks] == [wanted] * num_ranks
    first, *others = [rank["noted"]["first"]["seen"] for rank in ranks]
    assert first == [each for each in wanted if each[0] != "after_evaluation"]
    assert others == [[]] * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.thinned(3, first=2)
def test_what_any_rank_asks_for_is_done_by_all_and_the_bits_stay(tmp_path, num_ranks):
    asking = Asking(num_ranks - 1, after_1=Request(stage=3), after_3=Request(stage=0))
    changed = on_ranks(num_ranks, tmp_path, "changed", {"a": asking})
    plain = on_ranks(num_ranks, tmp_path, "plain", {})
    for mine, other in zip(changed, plain, strict=True):
        assert mine["body"]["weights_sha256"] == other["body"]["weights_sha256"]
        assert [(each["stage"], each["from_step"]) for each in mine["body"]["stages"]] == [(2, 0), (3, 1), (0, 3)]
    for rank in on_ranks(num_ranks, tmp_path, "stop", {"enough": Asking(num_ranks - 1, after_2=Request(stop=True))}):
        assert (rank["body"]["stopped_by"], rank["body"]["steps"]) == ("callbacks.enough", 2)
    assert (tmp_path / f"stop-{num_ranks}" / "checkpoints" / "step-00000002" / "manifest.json").exists()


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> Path:
    """The checkpoint after two steps of two ranks that count them."""
    folder = tmp_path_factory.mktemp("counted")
    policy = CheckpointPolicy(every_steps=2, at_end=False)
    on_ranks(2, folder, "first", {"counting": Counting()}, checkpoint=policy)
    return folder / "first-2" / "checkpoints" / "step-00000002"


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_run_goes_on_with_the_state_of_the_first_rank(tmp_path, num_ranks, counted):
    policy = CheckpointPolicy(resume=[counted], at_end=False)
    new = {"new": Counting(), "counting": Counting()}
    ranks = on_ranks(num_ranks, tmp_path, "again", new, checkpoint=policy)
    for number, rank in enumerate(ranks):
        later = [3 + 100 * number, 4 + 100 * number]
        assert rank["noted"]["counting"]["steps"] == [1, 2, *later]
        assert rank["noted"]["new"]["steps"] == later


def test_callbacks_cost_no_collective_and_no_byte_in_a_step(tmp_path):
    """Neither the user's nor the house's, in steps where nothing is due."""
    rare: dict[str, Any] = {"log_every": 100, "eval_every": 0, "max_steps": 5}
    rare["checkpoint"] = CheckpointPolicy(every_s=3600, at_end=False)
    idle = {f"idle{number}": Idle() for number in range(20)}
    many = on_ranks(2, tmp_path, "many", {**idle, "ledgers": Ledgers()}, **rare)
    none = on_ranks(2, tmp_path, "none", {"ledgers": Ledgers()}, **rare)
    for with_them, without in zip(many, none, strict=True):
        assert with_them["noted"]["ledgers"] == without["noted"]["ledgers"]
        # Those of a step by theory, and nothing between two steps but where the first and the last are logged.
        assert len(set(with_them["noted"]["ledgers"]["sent"][1:-1])) == 1


MODULE = """
from zerotrain.training import Callback


class Bad(Callback):
    def __init__(self, moment, rank=0):
        self.moment, self.rank = moment, rank

    def after_step(self, run, outcome):
        if self.moment == "after_step" and run.step == 2 and run.world.rank == self.rank:
            raise ValueError("no luck")

    def start(self, run):
        print(f"callback starts on rank {run.world.rank}", flush=True)


class First(Callback):
    ranks, may_fail = "first", True

    def log(self, run, metrics):
        raise ConnectionError("nobody listens")


class Refusing(Callback):
    def __init__(self, number):
        if number < 3:
            raise ValueError(f"number={number}; it must be at least 3")


class NoCallback:
    pass
"""


def test_a_users_callback_is_named_on_the_command_line(tmp_path, launch):
    (tmp_path / "mine.py").write_text(MODULE)
    arguments = (*TINY, "launch.nproc_per_node=2", "hydra.run.dir=run")
    given = ("+callbacks.bad={_target_: mine.Bad, rank: 1}", "+callbacks.first._target_=mine.First")
    command = launch(*arguments, *given, "+callbacks.bad.moment=never", folder=tmp_path)
    assert command.wait() == 0, command.stderr
    assert command.stdout.count("warning: callbacks.first: log after step") == 1
    for rank in range(2):
        assert f"callback starts on rank {rank}" in (tmp_path / f"run/ranks/{rank}.log").read_text()
    arguments = (*arguments, "launch.overwrite=true")
    command = launch(*arguments, *given, "+callbacks.bad.moment=after_step", folder=tmp_path)
    assert command.wait() == 1
    said = "CallbackError: callbacks.bad: after_step after step 2: ValueError: no luck"
    assert f"rank 1 failed: {said}" in command.stderr
    assert said in result_of(tmp_path / "run")["error"]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ("+callbacks.x._target_=mine.Nope", "callbacks.x._target_: got mine.Nope; mine has no Nope"),
        ("+callbacks.x={_target_: mine.Bad}", "callbacks.x: mine.Bad: missing a required argument: 'moment'"),
        ("+callbacks.x={_target_: mine.Refusing, number: 1}", "callbacks.x: number=1; it must be at least 3"),
        ("+callbacks.x._target_=mine.NoCallback", "callbacks.x: is a NoCallback, and no zerotrain.training.Callback"),
        ("+callbacks.x=3", "callbacks.x: got 3; it must be a class with its arguments, or null"),
        (
            "callbacks.x._target_=mine.Bad",
            "callbacks.x._target_: there is no such setting; +callbacks.x._target_=... adds it",
        ),
    ],
    ids=str,
)
def test_a_callback_that_cannot_be_is_one_line_before_any_rank_starts(tmp_path, given, line, launch):
    (tmp_path / "mine.py").write_text(MODULE)
    command = launch(*TINY, given, "hydra.run.dir=run", folder=tmp_path)
    assert command.wait() == 2
    [said] = command.stderr.splitlines()
    assert said.startswith(line)
    assert not (tmp_path / "run" / "ranks").exists()
