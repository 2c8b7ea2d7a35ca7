"""fp16 with its loss scale, parameters kept in fp32, and steps that are skipped."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import (
    OPTIMIZERS,
    Answers,
    Case,
    StagesOf,
    answers_of,
    batch,
    build,
    micro_batches,
    place,
    reference_run,
    run_over,
    sha256,
    two_stages,
)
from torch import nn

import zerotrain
from zerotrain.errors import TrainingError
from zerotrain.settings import ZeroConfig
from zerotrain.sharding.plan import STAGES, Placement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES_AND_PRECISIONS = list(product(range(4), DTYPES))
FP16 = Case(ZeroConfig(bucket_mb=0.1), precision="fp16", num_steps=2)
NORMS = "*ln_*"
NORM_NBYTES = (5 + 5 + 1) * 8
"""What one rank tells the other for the gradient norm, and to compare what they have done."""


@pytest.fixture(scope="module")
def answers(once: Any) -> Answers:
    return answers_of(
        {
            stop: range(4),
            exhaust: [2],
            usage: range(4),
            held_dtypes: STAGES_AND_PRECISIONS,
            train: [OVERFLOWING.with_zero(stage=stage) for stage in range(4)],
        },
        once,
    )


def train_by_hand(engine: zerotrain.ZeroEngine, case: Case, steps: range) -> list[zerotrain.StepResult]:
    """As `engine.train_step`, but with the losses that the case makes infinite."""
    rank, size = place()
    results = []
    for step in steps:
        for index, inputs in enumerate(micro_batches(batch(step, size, case.num_micro_batches), rank)):
            is_last = index == case.num_micro_batches - 1
            with nullcontext() if is_last else engine.no_sync():
                loss = engine(*inputs) * case.factor(step, rank)
                engine.backward(loss, weight=1 / case.num_micro_batches)
        results.append(engine.step())
    return results


def train(case: Case) -> dict[str, Any]:
    engine = build(case)
    results = train_by_hand(engine, case, range(case.num_steps))
    return {"sha256": engine.weights_sha256(), "scales": [each.loss_scale for each in results]}


HALF_PRECISIONS = {
    "fp16": FP16,
    "fp16, no clipping": replace(FP16, max_grad_norm=None, optimizer="sgd"),
    "fp16, norms in fp32": replace(FP16, keep_fp32=NORMS),
    "bf16, norms in fp32": replace(FP16, precision="bf16", keep_fp32=NORMS),
    "bf16, one block in fp32": replace(FP16, precision="bf16", keep_fp32="blocks.1"),
}


@pytest.mark.case(
    "precision", "fp16 and bf16; names kept in fp32", "same bits, the reference following the same dtypes"
)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 1), (3, 2)])
@pytest.mark.thinned(2, first=1)
def test_half_precisions_give_the_bits_of_plain_pytorch(num_ranks: int, num_micro_batches: int) -> None:
    """At stage 3 and another; tests/bits has the others."""
    require_bits(num_ranks, num_micro_batches, two_stages)


def require_bits(num_ranks: int, num_micro_batches: int, stages_of: StagesOf) -> None:
    cases = [replace(case, num_micro_batches=num_micro_batches) for case in HALF_PRECISIONS.values()]
    if num_ranks > 2:  # two cores: half of them with more ranks
        cases = cases[::2]
    expected = [sha256(reference_run(case, num_ranks)[0]) for case in cases]
    assert len(set(expected)) == len(expected)
    stages = [stages_of(number) for number in range(len(cases))]
    settings = [case.with_zero(stage=stage) for case, own in zip(cases, stages, strict=True) for stage in own]
    got = [{each["sha256"] for each in by_rank} for by_rank in run_over(settings, train, num_ranks)]
    assert got == [{value} for value, own in zip(expected, stages, strict=True) for _ in own]


# ---- the loss scale


OVERFLOWING = replace(FP16, initial_scale=2.0**10, growth_interval=2, num_steps=9, overflows=((1, 1), (2, 1), (6, 0)))
"""Steps 1 and 2 overflow on rank 1 alone, step 6 on rank 0 alone."""
SCALES = [2.0**power for power in (10, 10, 9, 8, 8, 9, 9, 8, 8)]


@pytest.mark.case("precision", "fp16: an overflow on one rank", "skips the step on all; the exact sequence of scales")
def test_an_overflow_on_one_rank_halves_the_scale_on_all_and_clean_steps_double_it(answers: Answers) -> None:
    weights, scales = reference_run(OVERFLOWING, 2)
    assert scales == SCALES
    for by_rank in answers(train):
        assert by_rank == [{"sha256": sha256(weights), "scales": SCALES}] * 2


# ---- when steps are skipped


def stop(stage: int) -> dict[str, Any]:
    """Three steps with an infinite loss on rank 1 after a good one; then a good one again."""
    case = replace(FP16, precision="bf16", overflows=((1, 1), (2, 1), (3, 1)), max_skipped_steps=3)
    engine = build(case.with_zero(stage=stage))
    train_by_hand(engine, case, range(1))
    before = engine.weights_sha256()
    skipped = [result.skipped for result in train_by_hand(engine, case, range(1, 3))]
    try:
        train_by_hand(engine, case, range(3, 4))
        message = "nothing was raised"
    except TrainingError as error:
        message = str(error)
    unchanged = engine.weights_sha256() == before
    [after] = train_by_hand(engine, case, range(4, 5))
    held = engine.memory_bytes()
    return {
        "skipped": skipped,
        "message": message,
        "unchanged": unchanged,
        "done_after": not after.skipped,
        "weights_at_rest": held["parameters"] < 1.1 * held["theory"]["parameters"],
    }


@pytest.mark.case("precision", "gradients that stay inf or nan", "all ranks stop, with the name of the parameter")
def test_too_many_skipped_steps_in_a_row_stop_all_ranks_with_the_first_bad_parameter(
    answers: Answers,
) -> None:
    for first, second in answers(stop):
        assert first == second
        assert first["message"] == (
            "the gradient was not finite in 3 steps in a row; lower the optimizer's lr, look at the data, or let more "
            "steps be skipped (max_skipped_steps). In the backward it was first nan in "
            "ln_f.bias; the loss was inf on rank 1"
        )
        assert first["skipped"] == [True, True]
        assert first["unchanged"]
        assert first["done_after"]
        assert first["weights_at_rest"]


def exhaust(stage: int) -> tuple[list[float], str]:
    case = replace(FP16, initial_scale=4.0, overflows=tuple((step, 0) for step in range(9))).with_zero(stage=stage)
    engine = build(case)
    scales = []
    for step in range(9):
        scales.append(engine.loss_scale)
        try:
            train_by_hand(engine, case, range(step, step + 1))
        except TrainingError as error:
            return scales, str(error)
    return scales, "nothing was raised"


@pytest.mark.case("precision", "fp16: no smaller scale is left", "all ranks stop")
def test_a_scale_that_cannot_be_halved_any_more_stops_the_training(answers: Answers) -> None:
    [by_rank] = answers(exhaust)
    for scales, message in by_rank:
        assert scales == [4.0, 2.0, 1.0]
        assert message.startswith("the gradient overflows fp16 even at a loss scale of 1; use precision='bf16'")


# ---- bytes


def usage(stage: int) -> dict[str, Any]:
    case = replace(FP16, keep_fp32=NORMS)
    engine = build(case.with_zero(stage=stage))
    train_by_hand(engine, case, range(case.num_steps))
    kept = sum(b.layout.numel for b in engine.schedule.buckets if b.spec.dtype == torch.float32)
    padding = sum((b.layout.padded_numel - b.layout.numel) * b.spec.dtype.itemsize for b in engine.schedule.buckets)
    return engine.memory_bytes() | {
        "numel": engine.num_parameters,
        "kept": kept,
        "padding": padding,
        "sent": engine.ledger.last_step.sent_nbytes,
        "theory_sent": engine.theoretical_sent_nbytes(case.num_micro_batches),
    }


@pytest.mark.case("precision", "`precision.keep_fp32`", "four bytes held and sent, no second master")
def test_kept_parameters_take_four_bytes_held_and_sent_and_have_no_second_master(answers: Answers) -> None:
    for plan, by_rank in zip(STAGES, answers(usage), strict=True):
        for held in by_rank:
            nbytes = 2 * held["numel"] + 2 * held["kept"]
            assert held["kept"] == 7 * 2 * 64

            def share(placement: Placement) -> int:
                return 2 if placement is Placement.SHARDED else 1

            assert held["theory"] == {
                "parameters": nbytes // share(plan.parameters),
                "gradients": nbytes // share(plan.gradients),
                "optimizer": (12 * held["numel"] - 4 * held["kept"]) // share(plan.optimizer),
                "offloaded": 0,
            }
            assert held["parameters"] == (nbytes + held["padding"]) // share(plan.parameters)
            assert held["gradients"] == (nbytes + held["padding"]) // share(plan.gradients)
            assert held["padding"] < 0.03 * nbytes
            if plan.shards_parameters:
                assert nbytes < held["sent"] <= held["theory_sent"] == 3 * nbytes // 2
            else:
                assert held["theory_sent"] == nbytes
                assert held["sent"] == held["theory_sent"] + held["padding"] + NORM_NBYTES


# ---- dtypes


class MixedDtypes(nn.Module):
    """One unit in three dtypes: bf16, fp16 and fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList(torch.ones(3, 5, dtype=d) / 3 for d in self.DTYPES) for _ in "ab")

    DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def held_dtypes(setting: tuple[int, str]) -> tuple[set[torch.dtype], bool]:
    """The dtypes of all parameters, and whether rank 0's values survived."""
    stage, precision = setting
    engine = zerotrain.build_engine(
        MixedDtypes(), optimizer=OPTIMIZERS["sgd"], zero=ZeroConfig(stage=stage), precision=precision
    )
    expected = {name: value.detach().float() for name, value in MixedDtypes().named_parameters()}
    got = engine.full_state_dict()
    same = all(torch.equal(value, expected[name]) for name, value in got.items())
    return {parameter.dtype for parameter in engine.module.parameters()}, same


@pytest.mark.case("precision", "parameters of several dtypes in a unit", "held in the compute dtype over fp32 masters")
def test_parameters_of_fp32_bf16_and_fp16_are_held_in_the_compute_dtype_over_fp32_masters(answers: Answers) -> None:
    for (_, precision), by_rank in zip(STAGES_AND_PRECISIONS, answers(held_dtypes), strict=True):
        assert by_rank == [({DTYPES[precision]}, True)] * 2
