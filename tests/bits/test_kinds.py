"""What models and users do that might tell one number of ranks from another: the same bits on each, or a sentence."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.bits.training import (
    DTYPES,
    RANKS,
    Block,
    Net,
    Place,
    Setup,
    Training,
    assert_same,
    batch,
    build,
    in_plain_pytorch,
)
from tests.ranks.fake_wire import run_threads

CASE_ROWS = (
    "ranks",
    """
experts chosen by the rows of a batch | the same | a mixture of experts;
    test_virtual_ranks_of_the_mixture_do_use_different_experts
blocks that one virtual rank alone uses, or does not, or none; in some micro-batches or steps | the same | a block left
    out by every second virtual rank; such a block, without overlap; blocks used by one virtual rank alone; a block used
    by all virtual ranks but one; a block used by none; a block used in the second micro-batch; a block used in every
    other step
dropout inside units under activation checkpointing | the same | dropout under activation checkpointing
`engine.freeze` and `unfreeze` in mid-run | the same | frozen in mid-run, and unfrozen; frozen but for the output, and
    unfrozen
a virtual rank whose loss is nan and weighs nothing | the same | a virtual rank whose loss is nan and weighs nothing
a part kept in fp32 | the same | an output layer kept in fp32
""",
)


class Overflowing(Net):
    """With a parameter whose gradient can be anything: in step 1 inf in one micro-batch of one virtual rank. In step 3
    two micro-batches of one are finite, and their sum is not in fp16. In step 6 the sum over virtual ranks would not be
    in fp16, where nothing is rounded to it."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        return super().forward(x, place) + self.probe.float().sum() * self.gradient_at(place)

    @staticmethod
    def gradient_at(place: Place) -> float:
        step, number, _ = place
        if place == (1, 5, 0):
            return float("inf")
        if (step, number) == (3, 2):
            return 2 * 40_000 / 512  # a micro-batch weighs a half, and the loss scale is 512
        return 2 * 30_000 / 512 if step == 6 else 1.0


OVERFLOWING = Training(make=Overflowing, precision="fp16", growth_interval=2, num_steps=8, max_grad_norm=0.1)


@pytest.mark.case(
    "ranks",
    "fp16: an overflow in one virtual rank, in one micro-batch or only where it is rounded to be sent",
    "all ranks skip the step, with the same scale after it, and the same bits",
)
@pytest.mark.parametrize("stage", range(4))
def test_an_overflow_in_one_virtual_rank_skips_the_step_on_all_ranks_and_leaves_all_the_same_scale(
    stage: int, all_rows: bool
) -> None:
    expected = in_plain_pytorch(OVERFLOWING)
    assert expected.skipped == [False, True, False, True, False, False, False, False]
    assert expected.scales == [1024, 1024, 512, 512, 256, 256, 512, 512, 1024]
    for num_ranks in RANKS[8] if all_rows else RANKS[8][stage % 2 :: 2]:
        assert_same(OVERFLOWING, Setup(num_ranks, stage, is_late=True))


class Mixture(nn.Module):
    """Each row of a batch goes to the expert that a router prefers: other experts in other virtual ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        weights, chosen = self.router(x - x.mean(0)).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = chosen == number
            out[rows] = self.experts[number](x[rows])
        return x + out * weights[:, None]


def skips(*blocks: int, where: Any) -> Any:
    """A model that leaves out these blocks where `where(step, virtual rank, micro-batch)` says so."""
    return functools.partial(Net, skips=lambda block, place: block in blocks and where(*place))


DROPOUT = functools.partial(Net, functools.partial(Block, dropout=0.3))


class LossOfNan(Net):
    """Whose loss, and gradients, are nan where it weighs nothing."""

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        return super().forward(x, place) * (1.0 if weight_of(place) else float("nan"))


def weight_of(place: Place) -> float:
    """Nothing of the third virtual rank and of the last counts, and of the sixth its second micro-batch alone."""
    return {2: 0.0, 7: 0.0, 5: 2.0 * place[2]}.get(place[1], 1.0)


KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a mixture of experts": ({"make": functools.partial(Net, Mixture)}, {}),
    "a block left out by every second virtual rank": ({"make": skips(2, where=lambda _, number, __: number % 2)}, {}),
    "such a block, without overlap": ({"make": skips(2, where=lambda _, number, __: number % 2)}, {"overlap": False}),
    "blocks used by one virtual rank alone": ({"make": skips(0, 3, where=lambda _, number, __: number != 5)}, {}),
    "a block used by all virtual ranks but one": ({"make": skips(1, where=lambda _, number, __: number == 3)}, {}),
    "a block used by none": ({"make": skips(2, where=lambda *_: True)}, {}),
    "a block used in the second micro-batch": ({"make": skips(1, where=lambda _, __, index: index == 0)}, {}),
    "a block used in every other step": ({"make": skips(1, 2, where=lambda step, *_: step % 2 == 1)}, {}),
    "dropout under activation checkpointing": ({"make": DROPOUT}, {"activation_checkpointing": True}),
    "frozen in mid-run, and unfrozen": ({"frozen": {1: "blocks.1.", 2: "blocks.1."}, "num_steps": 5}, {}),
    "frozen but for the output, and unfrozen": ({"frozen": {2: "blocks."}, "num_steps": 4, "make": DROPOUT}, {}),
    "a virtual rank whose loss is nan and weighs nothing": ({"make": LossOfNan, "weight": weight_of}, {}),
    "an output layer kept in fp32": ({"keeps_output": True}, {}),
}
"""Name -> what differs in the training; what in the setup."""


@functools.cache
def training_of(kind: str, precision: str) -> Training:
    return Training(**{"precision": precision, "max_grad_norm": 0.1} | KINDS[kind][0])


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    ("kind", "precision"), [each for each in product(KINDS, DTYPES) if each != ("an output layer kept in fp32", "fp32")]
)
@pytest.mark.thinned(4)
def test_a_model_of_any_kind_comes_to_the_bits_of_plain_pytorch(
    kind: str, precision: str, stage: int, all_rows: bool
) -> None:
    training = training_of(kind, precision)
    assert not any(in_plain_pytorch(training).skipped)
    for num_ranks in RANKS[8] if all_rows else [RANKS[8][([*KINDS].index(kind) + stage) % 4]]:
        assert_same(training, Setup(num_ranks, stage, is_late=stage % 2 == 0, **KINDS[kind][1]))


def test_virtual_ranks_of_the_mixture_do_use_different_experts() -> None:
    torch.manual_seed(0)
    model, used = Net(Mixture), []
    model.blocks[0].router.register_forward_hook(
        lambda module, inputs, out: used.append(frozenset(out.argmax(-1).tolist()))
    )
    for number in range(8):
        model(batch((0, number, 0)), (0, number, 0))
    assert len(set(used)) > 4


SETTINGS: dict[str, dict[str, Any]] = {
    "prefetch 0": {"prefetch": 0},
    "prefetch 9": {"prefetch": 9},
    "not resharded": {"reshard_after_forward": False},
    "other units": {"units": ["blocks.*.linear"]},
    "prefetch 9, not overlapped": {"prefetch": 9, "overlap": False},
}


@pytest.mark.parametrize("num_ranks", RANKS[8])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.thinned(2)
def test_how_stage_3_gathers_changes_no_bit(name: str, num_ranks: int) -> None:
    more = dict(SETTINGS[name])
    overlap = more.pop("overlap", True)
    assert_same(training_of("dropout under activation checkpointing", "bf16"), Setup(num_ranks, 3, overlap, more=more))


@pytest.mark.case(
    "ranks",
    "between two virtual ranks of a step",
    "refused",
    under="`engine.freeze` and `unfreeze` in mid-run",
)
@pytest.mark.parametrize("stage", range(4))
def test_what_trains_cannot_change_between_two_virtual_ranks(stage: int) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(Training(), Setup(2, stage), world)
        for number in engine.each_virtual_rank():
            if number % 4 == 2:
                with pytest.raises(zerotrain.EngineStateError, match="gradient"):
                    engine.freeze("blocks.1.*")
            engine.backward(engine(batch((0, number, 0)), (0, number, 0)))
        engine.step()

    run_threads(on_a_rank, 2)
