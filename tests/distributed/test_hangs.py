"""Ranks that do not do the same get an error that says who, where and what, instead of waiting for ever."""

import functools
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import run_over
from commands import TINY, Command, result_of
from torch import nn

import zerotrain
from tests.ranks import run_ranks
from zerotrain import ZeroEngine
from zerotrain.comm import whereabouts
from zerotrain.comm.world import Shards
from zerotrain.errors import CommError, ZeroTrainError
from zerotrain.settings import ZeroConfig

TIMEOUT_S = 5.0
Launch = Callable[..., Command]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, *, without: int | None = None) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == without else block(x)
        return x.square().mean()


def build(stage: int = 2, *, precision: Any = "fp32", **zero: Any) -> ZeroEngine:
    """An engine in groups of its own, which wait for TIMEOUT_S and can fail without harm to other cases."""
    gathers, reductions = (dist.new_group(timeout=timedelta(seconds=TIMEOUT_S)) for _ in range(2))
    rank, size = dist.get_rank(), dist.get_world_size()
    world = zerotrain.World(
        rank, size, rank, torch.device("cpu"), shards=Shards(rank, size, gathers, reductions), group=gathers
    )
    return zerotrain.build_engine(
        Net(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.5),
        zero=ZeroConfig(**{"stage": stage, "bucket_mb": 3e-4, "prefetch": 0} | zero),
        precision=precision,
        world=world,
    )


def train(
    engine: ZeroEngine, *, num_steps: int = 1, num_micro_batches: int = 1, without: int | None = None
) -> ZeroEngine:
    for _ in range(num_steps):
        for _ in range(num_micro_batches - 1):
            with engine.no_sync():
                engine.backward(engine(torch.ones(2, 8), without=without))
        engine.backward(engine(torch.ones(2, 8), without=without))
        engine.step()
    return engine


def freeze_on_rank_0(rank: int) -> None:
    engine = train(build())
    engine.freeze("blocks.0.*") if rank == 0 else train(engine)


def sleep(rank: int) -> None:
    engine = train(build())
    if rank == 1:
        time.sleep(2 * TIMEOUT_S)
    train(engine)


CASES: dict[str, tuple[Callable[[int], object], list[list[str]]]] = {
    "fewer micro-batches, sharded parameters": (
        lambda rank: train(train(build(3)), num_micro_batches=2 - rank),
        [
            ["CommError: rank 0 failed in gather of blocks.", "(step 2, ", "rank 1 failed in reduction of blocks."],
            ["CommError: rank 1 failed in reduction of blocks.", "(step 2, ", "rank 0 failed in gather of blocks."],
        ],
    ),
    "another branch": (  # equally many gathers of equal size, but of different units
        lambda rank: train(build(3), without=rank),
        [
            [f"CommError: rank 0 failed in gather of blocks.1 (step 1, forward) after {TIMEOUT_S:.0f}."],
            ["CommError: rank 1 failed in gather of blocks.0 (step 1, forward)", "rank 0 failed in gather of blocks.1"],
        ],
    ),
    "other settings": (
        lambda rank: build(
            1 + rank, prefetch=rank, precision=zerotrain.PrecisionConfig("fp16", initial_scale=2.0**rank)
        ),
        [
            [
                "ConfigError: zero.stage: differs between the ranks: ",
                "gradients replicated, optimizer sharded on rank 0",
                "zero.prefetch: differs between the ranks: 0 on rank 0, 1 on rank 1; give all ranks",
                "precision.initial_scale: differs between the ranks: 1.0 on rank 0, 2.0 on rank 1",
            ]
        ]
        * 2,
    ),
    "a step behind at the end": (
        lambda rank: train(build(), num_steps=3 - rank).weights_sha256(),
        [
            [
                "CommError: rank 0 failed in reduction of blocks",
                "(step 3, backward)",
                "rank 1 failed in comparison of engine.weights_sha256",
            ],
            ["CommError: rank 1 failed in comparison of engine.weights_sha256 (step 3, idle)"],
        ],
    ),
    "a call of one rank": (
        freeze_on_rank_0,
        [
            [
                "rank 0 failed in comparison of engine.freeze (step 2, idle)",
                "All ranks must make the same calls in the same order",
            ],
            ["rank 1 failed in reduction of"],
        ],
    ),
    "asleep": (
        sleep,
        [
            ["CommError: rank 0 failed in reduction of", "no answer from rank 1, which may compute, sleep or be"],
            ["CommError: rank 1 failed in", "rank 0 failed in reduction of"],
        ],
    ),
}


def message_of(name: str) -> str:
    whereabouts.GRACE_S = 0.5
    try:
        CASES[name][0](dist.get_rank())
    except ZeroTrainError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


@pytest.mark.case(
    "hosts: Ranks that do not do the same",
    "other settings, hyperparameters, buffers, micro-batches, branches, or a step behind",
    "all ranks end, and say where each was",
)
@pytest.mark.case(
    "parameters", "a call between two steps that one rank makes alone", "`CommError` on all within the timeout"
)
@pytest.mark.waits
def test_ranks_that_do_not_do_the_same_all_end_and_say_where_each_was() -> None:
    wrong = [
        (name, part, message)
        for name, by_rank in zip(CASES, run_over(list(CASES), message_of, 2), strict=True)
        for message, expected in zip(by_rank, CASES[name][1], strict=True)
        for part in expected
        if part not in message
    ]
    assert not wrong


def told_where_rank_1_stops() -> str:
    """In the midst of its second backward."""
    whereabouts.GRACE_S = 0.5
    engine = build()
    try:
        for number in range(3):
            if number == 1 and dist.get_rank() == 1:
                engine.module.blocks[1].register_full_backward_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
            engine.backward(engine(torch.ones(2, 8, requires_grad=True)))
            engine.step()
    except CommError as error:
        return str(error)
    return "nothing was raised"


def stopped(_: None) -> list[str]:
    """Rank 1 is stopped until rank 0 has given up on it."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    told = told_where_rank_1_stops()
    if dist.get_rank() == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    return [told]


@pytest.mark.case(
    "hosts: Ranks of one host", "a rank is stopped", "reported after the timeout; it fails when it goes on"
)
@pytest.mark.waits
def test_a_rank_that_is_stopped_is_told_of_after_the_timeout_and_fails_when_it_goes_on() -> None:
    [[waiting], [continued]] = run_ranks(stopped, 2, None)
    assert re.search(r"Timed out waiting \d+ms .*; no answer from rank 1", waiting, re.DOTALL), waiting
    assert "rank 0 failed in " in continued


def engines_that_go(_: None) -> str:
    """Of two engines, one is deleted with reductions under way and one with gathers; another trains on."""
    first, second = build(2), build(1)
    train(second)
    first.backward(first(torch.ones(2, 8)))
    weights = first.module
    first = second = None
    assert all(torch.isfinite(parameter).all() for parameter in weights.parameters())
    third = build(3)
    train(third)
    return third.weights_sha256()


@pytest.mark.case(
    "hosts: Ranks of one host",
    "an engine is deleted with reductions or gathers under way; two at once",
    "its parameters stay, and another engine trains on",
)
def test_an_engine_that_is_deleted_in_the_midst_of_collectives_harms_no_other() -> None:
    assert len(set(run_ranks(engines_that_go, 2, None))) == 1


@pytest.mark.case(
    "hosts: Ranks that do not do the same",
    "a rank that sleeps for ever",
    "reported within `launch.timeout_s`, and ended",
)
@pytest.mark.waits
def test_a_rank_that_sleeps_for_ever_is_told_of_within_the_timeout_and_ended(tmp_path: Path, launch: Launch) -> None:
    sleeping = (*TINY, "model._target_=misbehaving.MisbehavingMLP", "+model.action=sleep", "hydra.run.dir=run")
    command = launch(*sleeping, "launch.timeout_s=5", "launch.nproc_per_node=2", folder=tmp_path)
    assert command.wait() == 1
    cause, log = command.stderr.splitlines()
    assert re.fullmatch(
        r"rank 1 did not answer for (?:[5-9]|\d\d+) s, last seen in training misbehaving\.MisbehavingMLP, step 2; "
        r"rank 0 waited in reduction of blocks\.0\.\.blocks\.1 \(step 2, (backward|update)\)",
        cause,
    )
    assert log == f"  its log: {tmp_path / 'run/ranks/1.log'}"
    assert result_of(tmp_path / "run")["status"] == "failed"
    assert command.wait_until_gone() == []


@pytest.mark.case(
    "hosts: Ranks of one host",
    "the whole run is suspended for longer than `launch.timeout_s`, as by Slurm",
    "it ends with the time that it was suspended, and with what to do",
)
@pytest.mark.waits
def test_a_run_that_was_suspended_for_longer_than_the_timeout_says_so(tmp_path: Path, launch: Launch) -> None:
    """Seen: a rank was told as one that did not answer, or the place where one had waited."""
    asleep = ("model._target_=misbehaving.MisbehavingMLP", "+model.action=sleep", "launch.nproc_per_node=2")
    command = launch(*TINY, *asleep, "launch.timeout_s=4", "hydra.run.dir=run", folder=tmp_path)
    command.wait_for_text(tmp_path / "run/ranks/1.log", "asleep")
    time.sleep(0.5)  # until rank 0 waits for it
    suspended = command.processes()
    assert len(suspended) > 2
    for signum in (signal.SIGSTOP, signal.SIGCONT):
        for process in suspended:
            process.send_signal(signum)
        time.sleep(7.0 if signum == signal.SIGSTOP else 0.0)
    assert command.wait() == 1
    cause, _ = command.stderr.splitlines()
    assert re.fullmatch(
        r"the whole run was suspended for ([6-9]|1\d) s, which counts as waiting for other ranks: launch\.timeout_s "
        r"was over; give it more than a suspension takes, and go on with checkpoint\.resume=auto",
        cause,
    )
    assert command.wait_until_gone() == []


OF_ROWS = (
    *(each for each in TINY if not each.startswith("data")),
    "data=own",
    "data._target_=misbehaving.MisbehavingRows",
    "model.vocab_size=null",
    "train.max_steps=20",
    "hydra.run.dir=run",
    "launch.nproc_per_node=2",
)


SLEEPING = ("+data.after=200", "train.max_steps=1000", "train.eval_every=1000")


@pytest.mark.case(
    "data: Order, position and loading",
    "A row whose reading does not end, in the rank, a thread or a process",
)
@pytest.mark.waits
@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_ranks_that_all_read_rows_which_do_not_end_are_given_up(
    tmp_path: Path, launch: Launch, num_workers: int
) -> None:
    """Seen: no rank waits for another one, so that nothing was overdue."""
    command = launch(*OF_ROWS, *SLEEPING, "launch.timeout_s=12", f"data.num_workers={num_workers}", folder=tmp_path)
    assert command.wait(60) == 1
    assert re.match(
        r"rank [01] failed: RowError: data\.train: row \d+ \(epoch \d+, step \d+\) cannot be read.* did not end within "
        r"\d+ s, where ranks wait 12 s for each other; give launch\.timeout_s=",
        command.stderr.splitlines()[-2],
    )
    assert command.wait_until_gone() == []


@pytest.mark.case(
    "stopping",
    "all ranks read rows that do not end",
    "they are given up 10 s later; the last step is saved, and the run ends as stopped",
)
@pytest.mark.waits
@pytest.mark.parametrize(
    "how",
    [
        *(pytest.param([f"data.num_workers={number}"], marks=pytest.mark.slow) for number in (0, 1)),
        ["+data.draws=false"],
    ],
    ids=str,
)
def test_one_stop_ends_a_run_whose_rows_do_not_end_after_its_last_step(
    tmp_path: Path, launch: Launch, how: list[str]
) -> None:
    """Seen: SIGTERM waited for the end of a step, which `launch.timeout_s` ended as a failure, without a save. The rows
    are read by the main thread, a process, or a thread."""
    command = launch(*OF_ROWS, *SLEEPING, *how, folder=tmp_path)
    for rank in range(2):
        command.wait_for_text(tmp_path / f"run/ranks/{rank}.log", "asleep")
    time.sleep(1.0)  # until both have trained what was read ahead
    command.process.send_signal(signal.SIGTERM)
    assert command.wait(60) == 0
    result = result_of(tmp_path / "run")
    assert (result["status"], result["stopped_by"]) == ("stopped", "SIGTERM")
    assert result["steps"] > 5
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == [f"step-{result['steps']:08d}"]
    assert re.search(
        rf"the run ends before step {result['steps'] + 1}: data\.train: row \d+ \(epoch \d+, step \d+\) cannot be read"
        r".*did not end within 1\d s, and the run was told to stop",
        " ".join((tmp_path / "run/ranks/0.log").read_text().split()),
    )
    assert command.wait_until_gone() == []
