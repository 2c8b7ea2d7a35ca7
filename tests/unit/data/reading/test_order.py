import itertools
import math
from collections import Counter

import numpy as np
import pytest

from zerotrain.data.batches import MAX_NUM_ROWS, permuted, rows_at

SMALL = [5, 3, 9, 4, 7, 2, 0, 8, 1, 6]
LARGE = [3318324856596078911, 356875721363326969, 2509936224929994490]
SIZES = (*range(1, 40), 63, 64, 65, 100, 255, 256, 257, 4096, 4097, 65536, 1_000_003)


@pytest.mark.case(
    "data: Order, position and loading",
    "1 to 2**62 rows",
    "a permutation for each seed and epoch, unbiased, at once and without memory",
)
@pytest.mark.parametrize("num_rows", SIZES)
def test_each_row_comes_once_in_an_epoch(num_rows: int) -> None:
    rows = permuted(np.arange(num_rows), seed=3, epoch=num_rows % 5, num_rows=num_rows)
    assert (np.sort(rows) == np.arange(num_rows)).all()


def test_a_row_is_a_function_of_its_place_alone() -> None:
    whole = permuted(np.arange(1000), seed=1, epoch=2, num_rows=1000)
    places = np.array([[999, 0], [17, 17]])
    assert (permuted(places, seed=1, epoch=2, num_rows=1000) == whole[places]).all()
    assert permuted(17, seed=1, epoch=2, num_rows=1000) == whole[17]
    assert permuted([], seed=1, epoch=2, num_rows=1000).shape == (0,)


@pytest.mark.case(
    "data: Order, position and loading",
    "Another numpy, another release with the same `order_version`",
    "the same order",
)
def test_the_order_is_the_one_of_every_numpy_version_and_every_release() -> None:
    """A change of it changes every run, and must come with another ORDER_VERSION."""
    assert permuted(np.arange(10), seed=3, epoch=0, num_rows=10).tolist() == SMALL
    places = np.arange(0, MAX_NUM_ROWS, MAX_NUM_ROWS // 3)
    assert permuted(places, seed=2**63 - 1, epoch=10**6, num_rows=MAX_NUM_ROWS).tolist() == LARGE


def far_from(expected: float, counts: np.ndarray) -> float:
    """How many standard deviations the chi-squared of some counts lies from what chance gives."""
    freedom = counts.size - 1 if counts.ndim == 1 else (counts.shape[0] - 1) * (counts.shape[1] - 1)
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@pytest.mark.case("data: Order, position and loading", "1 to 2**62 rows")
@pytest.mark.parametrize("num_rows", [2, 3, 4, 5])
def test_of_few_rows_all_orders_come_equally_often(num_rows: int) -> None:
    """Seen with 8 rounds: of 5 rows 17 standard deviations too much."""
    num_draws = 10 * math.factorial(num_rows)
    drawn = Counter(
        tuple(permuted(np.arange(num_rows), seed=5, epoch=epoch, num_rows=num_rows).tolist())
        for epoch in range(num_draws)
    )
    counts = np.array([drawn[order] for order in itertools.permutations(range(num_rows))])
    assert abs(far_from(10, counts)) < 3


@pytest.mark.case("data: Order, position and loading", "1 to 2**62 rows")
@pytest.mark.parametrize("by", ["epochs", "seeds"])
def test_every_row_comes_equally_often_at_every_place_and_behind_every_other(by: str) -> None:
    num_rows, num_draws = 50, 1000
    drawn = np.array(
        [
            permuted(
                np.arange(num_rows),
                num_rows=num_rows,
                **({"seed": 7, "epoch": n} if by == "epochs" else {"seed": n, "epoch": 7}),
            )
            for n in range(num_draws)
        ]
    )
    at_place = np.zeros((num_rows, num_rows))
    np.add.at(at_place, (np.arange(num_rows), drawn), 1)
    assert abs(far_from(num_draws / num_rows, at_place)) < 3
    behind = np.zeros((num_rows, num_rows))
    np.add.at(behind, (drawn[:, :-1], drawn[:, 1:]), 1)
    # Never behind itself.
    expected = num_draws / num_rows
    others = behind[~np.eye(num_rows, dtype=bool)]
    assert abs(far_from(expected, others)) < 3


@pytest.mark.case("data: Order, position and loading", "1 to 2**62 rows")
@pytest.mark.parametrize("other", [{"seed": 8, "epoch": 3}, {"seed": 7, "epoch": 4}, {"seed": 4, "epoch": 7}], ids=str)
def test_orders_of_neighbouring_epochs_and_seeds_have_nothing_in_common(other: dict[str, int]) -> None:
    num_rows = 20_000
    places = np.arange(num_rows)
    one, another = permuted(places, seed=7, epoch=3, num_rows=num_rows), permuted(places, num_rows=num_rows, **other)
    assert abs(np.corrcoef(one, another)[0, 1]) < 3 / math.sqrt(num_rows)
    assert abs(np.corrcoef(one, places)[0, 1]) < 3 / math.sqrt(num_rows)
    assert abs(np.corrcoef(one[:-1], one[1:])[0, 1]) < 3 / math.sqrt(num_rows)
    assert (one == another).sum() < 8  # one is expected


def test_positions_go_through_one_epoch_after_another() -> None:
    whole = rows_at(np.arange(21), seed=4, num_rows=7).reshape(3, 7)
    for epoch in range(3):
        assert (whole[epoch] == permuted(np.arange(7), seed=4, epoch=epoch, num_rows=7)).all()
    positions = np.array([[20, 0], [6, 7]])
    assert (rows_at(positions, seed=4, num_rows=7) == whole.flatten()[positions]).all()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"num_rows": 0}, "num_rows=0"),
        ({"num_rows": 2**62 + 1}, "num_rows=4611686018427387905"),
        ({"indices": [0, 10]}, r"must all be in 0\.\.9"),
        ({"indices": -1}, "indices=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"epoch": 2**64}, "epoch=18446744073709551616"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused(wrong: dict, said: str) -> None:
    arguments = {"indices": [0], "seed": 0, "epoch": 0, "num_rows": 10} | wrong
    with pytest.raises(ValueError, match=said):
        permuted(arguments.pop("indices"), **arguments)


@pytest.mark.parametrize("num_rows", [4, 9, 25, 49])
def test_odd_permutations_come_as_often_as_even_ones(num_rows):
    """A network of two odd halves makes even ones alone: half of the orders would never come."""
    orders = (permuted(np.arange(num_rows), seed=seed, epoch=0, num_rows=num_rows) for seed in range(400))
    num_odd = sum(round(np.linalg.det(np.eye(num_rows)[order])) == -1 for order in orders)
    assert 140 <= num_odd <= 260  # six standard deviations
