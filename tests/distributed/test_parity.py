"""Promise 1: every stage, bucket size and overlap setting gives bit-for-bit the same weights as plain PyTorch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from cases import (
    Case,
    StagesOf,
    hashes_over_ranks,
    post_no_receives,
    reference_weights,
    run_over,
    sha256,
    three_stages,
    train,
    train_and_hash,
    two_stages,
)

from zerotrain.settings import ZeroConfig

STAGES = (0, 1, 2, 3)
BUCKETS = (0.02, 0.25, 25)
"""Of a few parameters, of about a unit and of the whole model."""
ORDERED = ZeroConfig(reduction="ordered")


TRAININGS = {
    "fp32": Case(ORDERED),
    "fp32, no clipping": Case(ORDERED, max_grad_norm=None),
    "fp32, 3 micro-batches": Case(ORDERED, num_micro_batches=3),
    "bf16": Case(ORDERED, precision="bf16"),
    "bf16, 3 micro-batches": Case(ORDERED, precision="bf16", num_micro_batches=3),
    "SGD with momentum": Case(ORDERED, optimizer="sgd"),
}
ON_THREE = ("fp32, no clipping", "bf16, 3 micro-batches", "SGD with momentum")


def require_bits(case: Case, num_ranks: int, settings: list[Case]) -> None:
    expected = sha256(reference_weights(case, num_ranks))
    got = hashes_over_ranks(settings, num_ranks)
    wrong = [each.zero for each, value in zip(settings, got, strict=True) if value != expected]
    assert not wrong


@pytest.mark.case(
    "hosts: Ranks of one host",
    "every stage, precision and size of buckets; 2, 3, 4, 6, 9 ranks; accumulation, a late rank",
    "the bits of plain PyTorch",
)
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thinned(3, first=1)
def test_every_setting_gives_the_bits_of_plain_pytorch(name: str) -> None:
    """On two ranks. The six trainings together have each stage with each size of buckets, overlapped and not; each
    training with all of them is in tests/bits."""
    number, case = list(TRAININGS).index(name), TRAININGS[name]
    settings = [
        case.with_zero(stage=stage, bucket_mb=BUCKETS[(stage + number) % 3], overlap=(stage + number // 3) % 2 == 0)
        for stage in STAGES
    ]
    require_bits(case, 2, settings)


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.thinned(3)
def test_more_ranks_give_the_bits_of_plain_pytorch(name: str) -> None:
    """At stage 3 and another, cut fine and whole in turns; three ranks, no power of two, for half of the trainings,
    four for the others. All of it is in tests/bits."""
    number, case = list(TRAININGS).index(name), TRAININGS[name]
    settings = [case.with_zero(stage=stage, bucket_mb=(0.02, 25)[(stage + number) % 2]) for stage in two_stages(number)]
    require_bits(case, 3 if name in ON_THREE else 4, settings)


@pytest.mark.parametrize("name", TRAININGS)
def test_one_rank_alone_gives_the_bits_of_plain_pytorch(name: str) -> None:
    """Nothing is sharded: one stage is enough."""
    case = TRAININGS[name]
    assert hashes_over_ranks([case], 1) == [sha256(reference_weights(case, 1))]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_padded_head_and_a_loss_in_chunks_have_the_bits_of_plain_pytorch(precision: str) -> None:
    """The reference has the same head: chunks change the order in which gradients are added."""
    head = {"vocab_multiple": 100, "loss_chunks": 3}
    case = Case(ZeroConfig(bucket_mb=0.02), precision=precision, num_micro_batches=2, head=head)
    require_bits(case, 2, [case.with_zero(stage=stage) for stage in STAGES])


def train_without_posted_receives(case: Case) -> str:
    post_no_receives()
    return train_and_hash(case)


def test_more_ranks_than_post_receives_for_each_other_get_the_bits_of_plain_pytorch() -> None:
    case = Case(ZeroConfig(stage=2, reduction="ordered"), num_steps=2)
    assert hashes_over_ranks([case], 9) == [sha256(reference_weights(case, 9))]


NATIVE = ZeroConfig(reduction="native", bucket_mb=0.25)
FP32_AND_BF16 = [Case(ORDERED, precision=precision) for precision in ("fp32", "bf16")]


@dataclass(frozen=True)
class Way:
    """Some trainings, and how ranks come to their sums."""

    trainings: list[Case]
    num_ranks: int
    train: Callable[[Case], str] = train_and_hash


WAYS = {
    "reduced one by one": Way(
        [
            case.with_zero(accumulate="reduced", bucket_mb=0.02)
            for case in (TRAININGS["fp32, 3 micro-batches"], TRAININGS["bf16, 3 micro-batches"])
        ],
        3,
    ),
    "as many ranks do": Way(
        [case.with_zero(bucket_mb=0.25) for case in FP32_AND_BF16], 3, train_without_posted_receives
    ),
    "six ranks": Way([case.with_zero(bucket_mb=0.05) for case in FP32_AND_BF16], 6),
    "native": Way(
        [
            Case(NATIVE, num_micro_batches=2),
            Case(NATIVE, precision="bf16", num_micro_batches=2),
            Case(NATIVE, precision="bf16", max_grad_norm=None, optimizer="sgd"),
            Case(NATIVE, precision="fp16", num_micro_batches=2),
            Case(NATIVE, precision="bf16", num_micro_batches=2).with_zero(reduction="fp32"),
            Case(NATIVE, precision="bf16", num_micro_batches=3).with_zero(accumulate="reduced", reduction="fp32"),
        ],
        2,
    ),
}


def require_bits_of(way: Way, stages_of: StagesOf = three_stages) -> None:
    """Each training at some stages; tests/bits has the others."""
    cases, expected = [], []
    for number, case in enumerate(way.trainings):
        stages = stages_of(number)
        cases += [case.with_zero(stage=stage) for stage in stages]
        expected += [[sha256(reference_weights(case, way.num_ranks))] * way.num_ranks] * len(stages)
    assert run_over(cases, way.train, way.num_ranks) == expected


@pytest.mark.case("ranks", "`zero.accumulate=reduced`")
def test_micro_batches_that_are_reduced_one_by_one_give_the_bits_of_their_definition() -> None:
    require_bits_of(WAYS["reduced one by one"])


def test_the_reduction_of_many_ranks_gives_the_bits_of_plain_pytorch_on_few() -> None:
    """Where receives are not posted, the parts to add come by an all-to-all."""
    require_bits_of(WAYS["as many ranks do"])


@pytest.mark.case(
    "hosts: Ranks of one host",
    "every stage, precision and size of buckets; 2, 3, 4, 6, 9 ranks; accumulation, a late rank",
)
def test_six_ranks_get_the_bits_of_plain_pytorch() -> None:
    """The last of an odd number of sums goes up the tree as it is."""
    require_bits_of(WAYS["six ranks"], two_stages)


def test_the_native_reduction_of_two_ranks_gives_the_bits_of_plain_pytorch() -> None:
    """A sum of two has but one order."""
    require_bits_of(WAYS["native"])


@pytest.mark.parametrize(("precision", "stages"), [("fp32", three_stages(0)), ("bf16", three_stages(1))])
def test_the_native_reduction_agrees_up_to_rounding(precision: str, stages: Sequence[int]) -> None:
    """gloo sums in an order of its own, in the wire's precision: equal over stages only within rounding. Clipping would
    hide a sum that is too large or too small as a whole."""
    case = Case(NATIVE, precision=precision, optimizer="sgd", max_grad_norm=None)
    expected = reference_weights(case, 3)
    for got, *_ in run_over([case.with_zero(stage=stage) for stage in stages], full_weights, 3):
        for name, weight in expected.items():
            torch.testing.assert_close(got[name], weight, rtol=0, atol=1e-6 if precision == "fp32" else 5e-3)


def full_weights(case: Case) -> dict[str, torch.Tensor]:
    return train(case).full_state_dict()
