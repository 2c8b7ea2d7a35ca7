"""One sha256 for every number of ranks, at every stage, in every precision, and that of plain PyTorch.

All numbers of ranks x stages x precisions, each with eight ways to train and to run that hold every pair of: dropout,
accumulation, clipping, Muon, overlap, a late rank, small buckets; on and off. One of the eight has all of them.
"""

import functools
from dataclasses import dataclass
from itertools import product

import pytest

from tests.bits.training import DTYPES, FINE_MB, RANKS, WHOLE_MB, Block, Net, Setup, Training, assert_same


@dataclass(frozen=True)
class Way:
    """How to train and to run."""

    dropout: bool
    accumulation: bool
    clipping: bool
    muon: bool
    overlap: bool
    is_late: bool
    fine: bool
    """Whether buckets are small."""

    def __str__(self) -> str:
        return "+".join(name for name, is_on in vars(self).items() if is_on) or "plain"


WAYS = [Way(a, b, c, a == b, a == c, b == c, a ^ b ^ c) for a, b, c in product((False, True), repeat=3)]
"""An orthogonal array: any two of the seven take each of their four values twice."""


def test_every_two_settings_meet_on_and_off_and_all_are_on_once() -> None:
    rows = [tuple(vars(way).values()) for way in WAYS]
    for one in range(7):
        for other in range(one):
            assert len({(row[one], row[other]) for row in rows}) == 4
    assert (True,) * 7 in rows


@functools.cache
def training_of(way: Way, virtual_ranks: int, precision: str) -> Training:
    return Training(
        make=functools.partial(Net, functools.partial(Block, dropout=0.3 * way.dropout)),
        virtual_ranks=virtual_ranks,
        precision=precision,
        num_micro_batches=1 + way.accumulation,
        max_grad_norm=0.1 if way.clipping else None,
        muon=way.muon,
    )


@pytest.mark.case(
    "ranks",
    "N of 1, 2, 4, 8 with V = 8; 3, 6 with V = 6; every stage, fp32, bf16, fp16; dropout, "
    "accumulation, clipping, Muon, overlap on and off, a late rank",
    "the bits of plain PyTorch: each leaf apart, added by one tree, the mean",
)
@pytest.mark.parametrize(
    ("virtual_ranks", "num_ranks"), [(virtual, num) for virtual, numbers in RANKS.items() for num in numbers]
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.thinned(8)
def test_it_ends_with_the_weights_of_plain_pytorch(
    way: Way, precision: str, stage: int, virtual_ranks: int, num_ranks: int
) -> None:
    assert_same(
        training_of(way, virtual_ranks, precision),
        Setup(num_ranks, stage, way.overlap, FINE_MB if way.fine else WHOLE_MB, way.is_late),
    )
