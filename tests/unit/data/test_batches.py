import itertools
import math
from collections import Counter

import numpy as np
import pytest
from numpy.typing import ArrayLike

from zerotrain.data import GlobalBatchSampler
from zerotrain.data.batches import _keys, _permute, rows_at

MAX_NUM_ROWS = 1 << 62


def permuted(indices: ArrayLike, *, seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """The rows at some places of one epoch, of any number."""
    places = np.asarray(indices, dtype=np.int64)
    return _permute(places.flatten(), _keys(seed, epoch)[:, None], num_rows).reshape(places.shape)


def make_sampler(**changes: int) -> GlobalBatchSampler:
    settings = {
        "num_sequences": 100,
        "micro_batch_size": 2,
        "num_micro_batches": 1,
        "rank": 0,
        "num_ranks": 1,
        "seed": 0,
    }
    return GlobalBatchSampler(**settings | changes)


def rank_rows(sampler: GlobalBatchSampler, step: int) -> list[int]:
    """A rank's rows of one step, in the order in which it runs them."""
    micro_batches = sampler.micro_batches(step * sampler.global_batch_size)
    return [row for micro_batch in micro_batches for row in micro_batch.rows]


def test_micro_batch_j_of_rank_r_is_block_j_times_ranks_plus_r():
    sampler = make_sampler(num_ranks=4, num_micro_batches=3, rank=1)
    [batch] = make_sampler(micro_batch_size=24).micro_batches(5 * 24)
    assert rank_rows(sampler, 5) == batch.rows[2:4] + batch.rows[10:12] + batch.rows[18:20]


def test_a_rank_lists_no_rows_but_its_own():
    """Or a batch of two billion rows would not end."""
    sampler = make_sampler(num_ranks=10**9, rank=10**9 - 1)
    assert rank_rows(sampler, 0) == [
        int(permuted(place, seed=0, epoch=2 * 10**7 - 1, num_rows=100)) for place in (98, 99)
    ]


PROMISED = [
    {"num_ranks": num_ranks, "leaves_per_rank": leaves, "num_micro_batches": num_micro, "micro_batch_size": size}
    for num_ranks, leaves, num_micro, size in itertools.product((1, 2, 3, 5), (1, 2), (1, 3), (1, 4))
]


def read_by_all(num_steps: int, position: int, **shape: int) -> list[int]:
    """What all ranks read together in some steps from a position on, in the order of the positions."""
    ranks = [make_sampler(rank=rank, **shape) for rank in range(shape["num_ranks"])]
    rows = []
    for step in range(num_steps):
        batch = np.empty(
            (shape["num_micro_batches"], len(ranks), shape["leaves_per_rank"], shape["micro_batch_size"]), int
        )
        for sampler in ranks:
            mine = [each.rows for each in sampler.micro_batches(position + step * sampler.global_batch_size)]
            by_leaf = np.array(mine).reshape(shape["leaves_per_rank"], shape["num_micro_batches"], -1)
            batch[:, sampler.rank] = by_leaf.transpose(1, 0, 2)
        rows += batch.flatten().tolist()
    return rows


@pytest.mark.case(
    "data: Order, position and loading",
    "1, 2, 3 or 5 ranks, virtual ranks, accumulation, batches larger than the data, several epochs",
    "each row once in an epoch; the same rows in each global batch",
)
@pytest.mark.parametrize("num_sequences", [1, 2, 7, 24, 100], ids="{} sequences".format)
@pytest.mark.parametrize("shape", PROMISED, ids=lambda shape: "-".join(map(str, shape.values())))
def test_every_row_is_read_as_often_as_promised_at_any_number_of_ranks_and_batch_size(shape, num_sequences):
    """Of two epochs and a part of a third, in whatever steps: each row twice, and the first rows of the third again."""
    num_wanted = 2 * num_sequences + num_sequences // 2
    size = shape["num_ranks"] * shape["leaves_per_rank"] * shape["num_micro_batches"] * shape["micro_batch_size"]
    read = read_by_all(-(-num_wanted // size), 0, num_sequences=num_sequences, **shape)
    for epoch in range(2):
        assert sorted(read[epoch * num_sequences : (epoch + 1) * num_sequences]) == list(range(num_sequences))
    [alone] = make_sampler(num_sequences=num_sequences, micro_batch_size=len(read)).micro_batches(0)
    assert read == alone.rows


def test_epochs_are_counted_by_row_also_within_a_batch():
    [first, second] = make_sampler(num_sequences=5, micro_batch_size=4, num_micro_batches=2).micro_batches(3)
    assert (first.epochs, second.epochs) == ([0, 0, 1, 1], [1, 1, 1, 2])


# ---- the position


@pytest.mark.case(
    "data: Order, position and loading",
    "A run goes on with other ranks, batch size or accumulation",
    "the same rows follow",
)
def test_a_run_goes_on_at_the_same_row_whatever_ranks_and_batch_size_it_has_then():
    saved = make_sampler(micro_batch_size=4, seed=7)
    saved.rows_consumed = 30 * saved.global_batch_size
    in_one_go = rank_rows(make_sampler(micro_batch_size=720, seed=7), 0)
    assert in_one_go[:120] == [row for step in range(30) for row in rank_rows(saved, step)]
    for num_ranks, num_micro_batches, micro_batch_size in ((1, 1, 4), (2, 3, 1), (3, 1, 5), (5, 2, 4)):
        shape = {"num_ranks": num_ranks, "num_micro_batches": num_micro_batches, "micro_batch_size": micro_batch_size}
        resumed = [make_sampler(rank=rank, seed=7, **shape) for rank in range(num_ranks)]
        for sampler in resumed:
            sampler.load_state_dict(saved.state_dict())
        read = sorted(row for sampler in resumed for rows in itertools.islice(sampler, 5) for row in rows)
        assert read == sorted(in_one_go[120 : 120 + len(read)])


def test_reading_ahead_is_no_training():
    sampler = make_sampler(micro_batch_size=3, rows_consumed=7)
    assert len(list(itertools.islice(sampler, 10))) == 10
    assert sampler.state_dict()["rows_consumed"] == 7
    assert next(iter(sampler)) == sampler.micro_batches(7)[0].rows


@pytest.mark.case(
    "data: Order, position and loading",
    "with another seed, order or data",
    "refused, with what differs and both values",
    under="A run goes on with other ranks, batch size or accumulation",
)
@pytest.mark.parametrize(
    ("here", "said"),
    [
        ({"seed": 8}, "seed: 7 there, 8 here"),
        ({"num_sequences": 120}, "rows of the data: 100 there, 120 here"),
        ({"fingerprint": {"tokens": 5, "split": "b"}}, "split of the data: a there, b here;"),
        ({"fingerprint": {}}, "tokens of the data: 5 there, None here; split of the data: a there, None here"),
        ({"fingerprint": {"tokens": 5, "split": "a", "more": 1}}, "more of the data: None there, 1 here"),
    ],
    ids=str,
)
def test_the_state_of_a_run_that_read_other_rows_is_refused(here, said):
    """Seen: a state of 1,000 rows went on in 1,200, and read other rows without a word."""
    settings = {"seed": 7, "fingerprint": {"tokens": 5, "split": "a"}}
    state = make_sampler(rows_consumed=12, **settings).state_dict()
    sampler = make_sampler(**settings | here)
    with pytest.raises(ValueError, match="read other rows, so this one cannot go on at its row 12: ") as refused:
        sampler.load_state_dict(state)
    assert said in str(refused.value)
    assert sampler.rows_consumed == 0


def test_the_state_of_another_order_and_what_is_no_state_are_refused():
    sampler = make_sampler()
    with pytest.raises(ValueError, match="version of the order: 1 there, 2 here"):
        sampler.load_state_dict(sampler.state_dict() | {"order_version": 1})
    with pytest.raises(ValueError, match="lacks 'rows_consumed'"):
        sampler.load_state_dict({"next_step": 3, "seed": 0, "global_batch_size": 2})
    with pytest.raises(ValueError, match="rows_consumed=-1"):
        sampler.load_state_dict(sampler.state_dict() | {"rows_consumed": -1})


EMPTY = ("num_sequences", "micro_batch_size", "num_micro_batches", "num_ranks")


@pytest.mark.parametrize("wrong", [*({name: 0} for name in EMPTY), {"rank": 1}, {"rank": -1}, {"seed": -1}], ids=str)
def test_an_empty_dimension_and_a_rank_or_seed_out_of_range_are_refused(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        make_sampler(**wrong)


def test_another_order_of_the_data_is_refused_in_words():
    """Of a mix with another weight two hashes were said."""
    state = make_sampler(seed=7, fingerprint={"order": "0123456789abcdef", "code.rows": 5}).state_dict()
    with pytest.raises(
        ValueError,
        match=r"as that of a mix with other weights \(data.sources.\*.weight\) does, or .*; keep",
    ) as told:
        make_sampler(seed=7, fingerprint={"order": "fedcba9876543210", "code.rows": 5}).load_state_dict(state)
    assert "0123" not in str(told.value)


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


def test_positions_go_through_one_epoch_after_another() -> None:
    whole = rows_at(np.arange(21), seed=4, num_rows=7).reshape(3, 7)
    for epoch in range(3):
        assert (whole[epoch] == permuted(np.arange(7), seed=4, epoch=epoch, num_rows=7)).all()
    positions = np.array([[20, 0], [6, 7]])
    assert (rows_at(positions, seed=4, num_rows=7) == whole.flatten()[positions]).all()
