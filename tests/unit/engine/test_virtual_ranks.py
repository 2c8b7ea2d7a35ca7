"""The same bits on any number of ranks: each runs its share of the virtual ranks, one after the other."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zerotrain
from tests.bits.training import ADAMW, RANKS, Block, Net, Setup, Training, assert_same
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Linears, engine_on, inputs, on_ranks, seeded
from zerotrain.comm.world import World

NUM_STEPS, NUM_MICRO_BATCHES = 3, 2


class PartlyUnused(Linears):
    """Of which a leaf with an odd number does not use the third block."""

    def forward(self, x: torch.Tensor, number: int = 0) -> torch.Tensor:
        x = self.input(x)
        for index, block in enumerate(self.blocks):
            x = x if index == 2 and number % 2 else block(x).tanh()
        return self.output(x).float().square().mean()


def batch(step: int, number: int, micro_batch: int) -> torch.Tensor:
    return inputs(100 * step + micro_batch, number)


def train(engine: zerotrain.ZeroEngine, num_micro_batches: int = NUM_MICRO_BATCHES) -> None:
    for step in range(NUM_STEPS):
        for number in engine.each_virtual_rank():
            for index in range(num_micro_batches):
                with nullcontext() if index == num_micro_batches - 1 else engine.no_sync():
                    loss = engine(batch(step, number, index), number=number)
                    engine.backward(loss, weight=1 / num_micro_batches)
        engine.step()


@pytest.mark.case(
    "ranks",
    "N of 1, 2, 4, 8 with V = 8; 3, 6 with V = 6; every stage, fp32, bf16, fp16; dropout, "
    "accumulation, clipping, Muon, overlap on and off, a late rank",
)
@pytest.mark.parametrize(
    ("virtual_ranks", "precision", "stage", "muon"),
    [
        (8, "fp32", 0, True),
        (8, "fp16", 1, False),
        (8, "bf16", 3, False),
        (6, "bf16", 1, False),
        (6, "fp16", 2, False),
        (6, "fp32", 3, True),
    ],
)
@pytest.mark.thinned(2)
def test_any_number_of_ranks_comes_to_the_bits_of_plain_pytorch(virtual_ranks, precision, stage, muon):
    """A diagonal of `make bits`, with dropout, accumulation and clipping."""
    training = Training(
        make=functools.partial(Net, functools.partial(Block, dropout=0.3)),
        virtual_ranks=virtual_ranks,
        precision=precision,
        max_grad_norm=0.1,
        muon=muon,
    )
    for num_ranks in RANKS[virtual_ranks]:
        assert_same(training, Setup(num_ranks, stage, is_late=True))


@pytest.mark.case("ranks", "a step dropped between two virtual ranks", "same bits as without it")
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_given_up_between_two_leaves_leaves_nothing_behind(precision, stage):
    def on_a_rank(world: World, gives_up: bool) -> dict[str, torch.Tensor]:
        zero = {"stage": stage}
        engine = engine_on(world, PartlyUnused, optimizer=ADAMW, zero=zero, precision=precision, virtual_ranks=8)
        if gives_up:
            for number in engine.each_virtual_rank():
                engine.backward(engine(batch(7, number, 0), number=number))
                if number % 4 == 2:
                    break
            with pytest.raises(zerotrain.EngineStateError, match=r"4 virtual ranks in engine\.each_virtual_rank"):
                engine.step()
            engine.zero_grad()
        train(engine)
        return engine.full_state_dict()

    given_up = run_threads(lambda world: on_a_rank(world, True), 2)[0][0]
    for name, weight in run_threads(lambda world: on_a_rank(world, False), 2)[0][0].items():
        assert torch.equal(given_up[name], weight)


@pytest.mark.case(
    "ranks", "V = N", "no buffer, byte or collective more than without; fewer ranks: 1 + log2(V/N) buffers of fp32"
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_virtual_rank_for_each_rank_takes_no_buffer_and_sends_no_byte_more(precision):
    def on_a_rank(world: World, virtual_ranks: int | None) -> tuple[Any, ...]:
        zero = {"stage": 2, "reduction": "ordered"}
        engine = engine_on(world, zero=zero, precision=precision, virtual_ranks=virtual_ranks)
        for step in range(2):
            engine.train_step([(inputs(step, number),) for number in engine.virtual_ranks])
        held = sum(bucket.gradient.accumulator_nbytes for bucket in engine.schedule.trained)
        numel = sum(bucket.layout.padded_numel for bucket in engine.schedule.trained)
        return engine.ledger.last_step, engine.memory_bytes()["scratch"], held, numel

    (plain, *_), orders = run_threads(lambda world: on_a_rank(world, None), 2)
    (same, *_), same_orders = run_threads(lambda world: on_a_rank(world, 2), 2)
    assert (plain, orders.orders) == (same, same_orders.orders)
    assert plain[2] == 0
    for leaves in (2, 4, 8):
        many = run_threads(lambda world, leaves=leaves: on_a_rank(world, 2 * leaves), 2)[0][0]
        buffers = 1 + leaves.bit_length() - 1  # 1 + log2(leaves)
        assert many[2] <= 4 * many[3] * buffers


@pytest.mark.case(
    "ranks",
    "V that the ranks cannot share; a batch norm with running statistics; micro-batches that they cannot share",
    "refused",
)
@on_ranks(2)
def test_what_ranks_cannot_share_is_refused_where_each_runs_several_virtual_ranks(world):
    for virtual_ranks in (3, 6, 1, 10):
        with pytest.raises(zerotrain.ConfigError, match=rf"virtual_ranks={virtual_ranks}: 2 ranks cannot share them"):
            engine_on(world, virtual_ranks=virtual_ranks)
    engine = engine_on(world, virtual_ranks=4)
    with pytest.raises(zerotrain.EngineStateError, match="train_step got 3 micro-batches"):
        engine.train_step([(inputs(0, index),) for index in range(3)])

    def make() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    engine_on(world, make, virtual_ranks=2)
    with pytest.raises(zerotrain.ConfigError, match="1 is a BatchNorm1d, whose running statistics follow the ranks"):
        engine_on(world, make, virtual_ranks=4)


@pytest.mark.case("ranks", "16 bits, fewer ranks than V", "gradients are sent in fp32, which the start of a run says")
@pytest.mark.parametrize("stage", range(4))
def test_in_16_bits_a_rank_with_several_leaves_sends_their_sum_in_fp32(stage):
    def on_a_rank(world: World, virtual_ranks: int) -> tuple[int, int, int]:
        zero = {"stage": stage, "reduction": "ordered", "bucket_mb": 25}
        engine = engine_on(world, zero=zero, precision="bf16", virtual_ranks=virtual_ranks)
        engine.train_step([(inputs(0, number),) for number in engine.virtual_ranks])
        padded = sum(bucket.layout.padded_numel for bucket in engine.schedule.trained)
        theory = engine.theoretical_sent_nbytes(len(engine.virtual_ranks))
        return engine.ledger.last_step.sent_nbytes, theory, padded

    numel = sum(parameter.numel() for parameter in seeded(Linears).parameters())
    (sent, theory, padded), *_ = run_threads(lambda world: on_a_rank(world, 2), 2)[0]
    (wide, wide_theory, _), *_ = run_threads(lambda world: on_a_rank(world, 4), 2)[0]
    gathers = 2 * numel // 2 * (2 if stage == 3 else 0)  # of the second micro-batch
    assert wide_theory - theory == 2 * numel // 2 + gathers
    if stage < 3:
        assert wide - sent == 2 * padded // 2
