"""What the micro-batches of a step are added up in, what gradients travel in, and a leaf computed alone."""

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zerotrain
from tests.bits.training import DTYPES
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Linears, engine_on, on_ranks, seeded, sum_by_tree
from tests.unit.engine.test_virtual_ranks import ADAMW, PartlyUnused, batch, train
from zerotrain.comm.world import World

NUM_STEPS, NUM_MICRO_BATCHES, MAX_NORM, SCALE = 3, 3, 0.1, 1024.0


@functools.cache
def weights_of_plain_pytorch(num_ranks: int, precision: str, accumulate: str, reduction: str) -> dict[str, Any]:
    """From the definition. reduced: of each micro-batch the mean over ranks, rounded; their sum in fp32, rounded."""
    dtype, model = DTYPES[precision], seeded(PartlyUnused)
    wire = torch.float32 if reduction == "fp32" else dtype
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = ADAMW(list(weights.values()))
    scale = SCALE if precision == "fp16" else 1.0
    model.to(dtype)
    for step in range(NUM_STEPS):
        of_each: list[list[dict[str, torch.Tensor]]] = []  # micro-batch, rank
        for index in range(NUM_MICRO_BATCHES):
            of_each.append([])
            for number in range(num_ranks):
                model.zero_grad()
                loss = model(batch(step, number, index).to(dtype), number=number)
                (loss * (scale / NUM_MICRO_BATCHES)).backward()
                grads = {
                    name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()
                }
                of_each[-1].append({name: grad.float().clone() for name, grad in grads.items()})
        for name, weight in weights.items():
            by_micro_batch = [[grads[name] for grads in ranks] for ranks in of_each]
            if accumulate == "reduced":
                means = [(sum_by_tree(ranks) / num_ranks).to(dtype).float() for ranks in by_micro_batch]
                weight.grad = sum(means[1:], means[0]).to(dtype).float()
            else:
                sums = [sum(grads[1:], grads[0]).to(wire).float() for grads in zip(*by_micro_batch, strict=True)]
                weight.grad = (sum_by_tree(sums) / num_ranks).to(dtype).float()
        norm = torch.cat([weight.grad.double().flatten() for weight in weights.values()]).norm() / scale
        for weight in weights.values():
            weight.grad *= (torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0) / scale).float()
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return weights


def engine_of(world: World, precision: str, **zero: Any) -> zerotrain.ZeroEngine:
    numbers = zerotrain.PrecisionConfig(precision, initial_scale=SCALE)
    return engine_on(world, PartlyUnused, optimizer=ADAMW, zero=zero, precision=numbers, max_grad_norm=MAX_NORM)


WAYS = [("reduced", "ordered"), ("local", "fp32"), ("reduced", "fp32")]
IN_EVERY_PAIR = [
    (*WAYS[(number + stage) % 3], precision, stage) for number, precision in enumerate(DTYPES) for stage in range(4)
]


@pytest.mark.case(
    "ranks",
    "`zero.accumulate=reduced`",
    "of each micro-batch the mean over ranks, rounded; their sum in an fp32 shard, rounded: the "
    "same weights at every stage, others than `local`'s. Refused with V > N",
)
@pytest.mark.parametrize(("accumulate", "reduction", "precision", "stage"), IN_EVERY_PAIR)
def test_the_weights_are_those_of_the_definition(accumulate, reduction, precision, stage):
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_of(world, precision, stage=stage, accumulate=accumulate, reduction=reduction)
        train(engine, NUM_MICRO_BATCHES)
        assert engine.held.pools.lent_nbytes == 0
        return engine.full_state_dict()

    for num_ranks in (2, 3):
        expected = weights_of_plain_pytorch(num_ranks, precision, accumulate, reduction)
        got = run_threads(on_a_rank, num_ranks, late_rank=num_ranks - 1)[0][0]
        for name, weight in expected.items():
            assert torch.equal(got[name], weight), (num_ranks, name)


def test_reduced_comes_to_other_bits_than_local():
    for precision in ("fp32", "bf16"):
        local, reduced = (weights_of_plain_pytorch(3, precision, way, "ordered") for way in ("local", "reduced"))
        assert not all(torch.equal(local[name], weight) for name, weight in reduced.items())


@pytest.mark.parametrize("stage", range(4))
def test_reduced_sends_gradients_once_for_each_micro_batch_and_holds_no_sum_of_the_whole_model(stage):
    def on_a_rank(world: World, accumulate: str) -> tuple[int, int, dict[str, int], int, int]:
        engine = engine_of(world, "bf16", stage=stage, accumulate=accumulate, reduction="ordered")
        train(engine, NUM_MICRO_BATCHES)
        step, theory = engine.ledger.last_step, engine.theoretical_sent_nbytes(NUM_MICRO_BATCHES)
        held = sum(bucket.gradient.accumulator_nbytes for bucket in engine.schedule.trained)
        padded = sum(bucket.layout.padded_numel for bucket in engine.schedule.trained)
        return step.nbytes["reduce"], theory, dict(step.calls), held, padded

    once, theory, calls, held, padded = run_threads(lambda world: on_a_rank(world, "local"), 2)[0][0]
    each, theory_each, calls_each, held_each, _ = run_threads(lambda world: on_a_rank(world, "reduced"), 2)[0][0]
    assert (each, calls_each["reduce"]) == (NUM_MICRO_BATCHES * once, NUM_MICRO_BATCHES * calls["reduce"])
    numel = sum(parameter.numel() for parameter in seeded(PartlyUnused).parameters())
    assert theory_each - theory == (NUM_MICRO_BATCHES - 1) * 2 * numel // 2
    assert (held, held_each) == (4 * padded, 0)
    if stage < 3:
        assert calls_each["gather"] == calls["gather"]


@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_step_of_micro_batches_that_are_all_in_no_sync_is_refused_though_each_was_reduced(world, stage):
    engine = engine_of(world, "fp32", stage=stage, accumulate="reduced")
    with engine.no_sync():
        engine.backward(engine(batch(0, world.rank, 0)))
    with pytest.raises(zerotrain.EngineStateError, match="the last micro-batch of a step outside"):
        engine.step()
    engine.zero_grad()
    engine.backward(engine(batch(0, world.rank, 0)))
    engine.step()


@on_ranks(2)
def test_reduced_is_refused_where_a_rank_runs_several_virtual_ranks(world):
    with pytest.raises(zerotrain.ConfigError, match=r"zero\.accumulate='reduced' adds micro-batches up over ranks"):
        engine_on(world, zero={"accumulate": "reduced"}, virtual_ranks=4)


@pytest.mark.case(
    "ranks",
    "`engine.leaf(number, micro_batches)`",
    "the virtual rank's part of a step, bit for bit, whichever rank computes it; trains nothing",
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", DTYPES)
def test_a_leaf_alone_is_what_its_rank_would_add_and_trains_nothing(precision, stage):
    """Of plain PyTorch; from whichever rank computes it; and a step after it has the bits of one without it."""
    dtype = DTYPES[precision]
    scale = SCALE if precision == "fp16" else 1.0
    model, sums = seeded(PartlyUnused).to(dtype), {}
    for index in range(NUM_MICRO_BATCHES):
        model.zero_grad()
        (model(batch(0, 5, index).to(dtype), number=5) * (scale / NUM_MICRO_BATCHES)).backward()
        for name, p in model.named_parameters():
            sums[name] = sums.get(name, 0.0) + (torch.zeros_like(p) if p.grad is None else p.grad).float()

    def on_a_rank(world: World, asks: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        engine, leaf = engine_of(world, precision, stage=stage), {}
        if asks:
            micro_batches = [{"x": batch(0, 5, index), "number": 5} for index in range(NUM_MICRO_BATCHES)]
            leaf = engine.leaf(5, micro_batches)
            assert all(torch.equal(gradient, leaf[name]) for name, gradient in engine.leaf(5, micro_batches).items())
        train(engine, NUM_MICRO_BATCHES)
        return leaf, engine.full_state_dict()

    asked = run_threads(lambda world: on_a_rank(world, True), 2)[0]
    for leaf, _ in asked:
        assert leaf.keys() == sums.keys()
        for name, gradient in leaf.items():
            assert torch.equal(gradient, sums[name].to(dtype).float())
    weights = run_threads(lambda world: on_a_rank(world, False), 2)[0][0][1]
    for name, weight in weights.items():
        assert torch.equal(asked[0][1][name], weight)


@pytest.mark.case("ranks", "sums of micro-batches and virtual ranks", "as many bytes as the start of a run says")
@pytest.mark.parametrize(
    ("accumulate", "precision", "stage"),
    [(way, ("fp32", "bf16")[(stage + len(way)) % 2], stage) for way in ("local", "reduced") for stage in range(4)],
)
def test_the_sums_of_a_step_hold_what_the_formula_says(accumulate, precision, stage):
    def on_a_rank(world: World, virtual_ranks: int) -> tuple[int, int]:
        zero = {"stage": stage, "accumulate": accumulate if virtual_ranks == 2 else "local"}
        engine = engine_on(world, Linears, optimizer=ADAMW, zero=zero, precision=precision, virtual_ranks=virtual_ranks)
        buckets = [bucket.gradient for bucket in engine.schedule.trained]
        held = 0
        for number in engine.each_virtual_rank():
            for index in range(NUM_MICRO_BATCHES):
                with nullcontext() if index == NUM_MICRO_BATCHES - 1 else engine.no_sync():
                    engine.backward(engine(batch(0, number, index)))
                engine.schedule.reductions.finish()
                sums = sum(each.nbytes for each in (of.reduction._sum for of in buckets) if each is not None)
                if index < NUM_MICRO_BATCHES - 1:
                    sums += engine.held.pools.lent_nbytes
                held = max(held, sums + sum(each.accumulator_nbytes for each in buckets))
        engine.step()
        return held, engine.sums_nbytes(NUM_MICRO_BATCHES)

    for virtual_ranks in (2, 4, 8) if accumulate == "local" else (2,):
        held, formula = run_threads(lambda world, number=virtual_ranks: on_a_rank(world, number), 2)[0][0]
        assert held == formula, virtual_ranks
