import itertools

import numpy as np
import pytest

from zerotrain.data import GlobalBatchSampler
from zerotrain.data.batches import epoch_order


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


@pytest.mark.parametrize(
    ("num_ranks", "num_micro_batches", "micro_batch_size"),
    [(1, 1, 12), (1, 3, 4), (2, 1, 6), (2, 3, 2), (4, 1, 3), (4, 3, 1)],
)
def test_ranks_and_micro_batches_share_the_same_global_batch(num_ranks, num_micro_batches, micro_batch_size):
    alone = make_sampler(micro_batch_size=12)
    ranks = [
        make_sampler(
            micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches, rank=rank, num_ranks=num_ranks
        )
        for rank in range(num_ranks)
    ]
    for step in range(20):  # over more than one epoch
        read = sorted(row for sampler in ranks for row in sampler.rank_rows(step))
        assert read == sorted(alone.rank_rows(step))


def test_micro_batch_j_of_rank_r_is_block_j_times_ranks_plus_r():
    sampler = make_sampler(num_ranks=4, num_micro_batches=3, rank=1)
    batch = sampler.global_batch(5)
    assert sampler.rank_rows(5) == batch[2:4] + batch[10:12] + batch[18:20]


def rows_cut_from_the_whole_batch(sampler: GlobalBatchSampler, step: int) -> list[int]:
    """The rows of a rank in few lines: list the global batch one by one and cut the rank's part out of it."""
    batch = []
    for position in range(step * sampler.global_batch_size, (step + 1) * sampler.global_batch_size):
        epoch, index = divmod(position, sampler.num_sequences)
        order = epoch_order(seed=sampler.seed, epoch=epoch, num_sequences=sampler.num_sequences)
        batch.append(int(order[index]))
    shape = (sampler.num_micro_batches, sampler.num_ranks, sampler.micro_batch_size)
    return np.array(batch).reshape(shape)[:, sampler.rank].flatten().tolist()


@pytest.mark.parametrize("num_sequences", [1, 5, 24, 100], ids="{} sequences".format)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8], ids="{} ranks".format)
def test_a_rank_reads_its_part_of_the_whole_batch(num_ranks: int, num_sequences: int):
    """Over several epochs, whose ends lie within a batch, on its border, or often in one that outlasts the dataset."""
    for num_micro_batches, micro_batch_size, seed in itertools.product((1, 3), (1, 2, 5), (0, 7)):
        for rank in range(num_ranks):
            sampler = make_sampler(
                num_sequences=num_sequences,
                micro_batch_size=micro_batch_size,
                num_micro_batches=num_micro_batches,
                rank=rank,
                num_ranks=num_ranks,
                seed=seed,
            )
            for step in (0, 1, 2, 9, 10, 4):
                assert sampler.rank_rows(step) == rows_cut_from_the_whole_batch(sampler, step)


def test_a_rank_lists_no_rows_but_its_own():
    """Or a batch of two billion rows would not end."""
    sampler = make_sampler(num_ranks=10**9, rank=10**9 - 1)
    assert sampler.rank_rows(0) == [
        int(epoch_order(seed=0, epoch=2 * 10**7 - 1, num_sequences=100)[index]) for index in (98, 99)
    ]


def test_a_batch_depends_on_its_number_alone():
    in_order = list(itertools.islice(make_sampler(), 120))
    sampler = make_sampler()
    assert [sampler.rank_rows(step) for step in reversed(range(120))] == in_order[::-1]


def test_every_sequence_is_read_once_in_an_epoch():
    read = [row for rows in itertools.islice(make_sampler(micro_batch_size=7), 100) for row in rows]
    for epoch in range(7):
        assert sorted(read[epoch * 100 : (epoch + 1) * 100]) == list(range(100))
    assert read[:100] != read[100:200]


def test_another_seed_is_another_order():
    assert make_sampler(seed=0).global_batch(0) != make_sampler(seed=1).global_batch(0)


def test_the_order_is_the_one_of_every_numpy_version():
    written_down = [6, 1, 8, 5, 2, 7, 9, 4, 3, 0]  # a change of it would change every run
    assert make_sampler(num_sequences=10, micro_batch_size=10, seed=3).global_batch(0) == written_down


def test_a_batch_larger_than_the_dataset_reads_sequences_again():
    assert sorted(make_sampler(num_sequences=3, micro_batch_size=6).global_batch(0)) == [0, 0, 1, 1, 2, 2]


def test_a_resumed_sampler_goes_on_where_the_saved_one_was_at_another_number_of_ranks():
    saved = make_sampler(micro_batch_size=4, seed=7)
    rows = iter(saved)
    for _ in range(30):
        next(rows)
    resumed = [make_sampler(rank=rank, num_ranks=2) for rank in range(2)]
    for sampler in resumed:
        sampler.load_state_dict(saved.state_dict())
    for _ in range(30):
        assert next(rows) == next(iter(resumed[0])) + next(iter(resumed[1]))


def test_a_sampler_that_has_read_already_goes_on_as_the_saved_one_from_its_next_batch():
    sampler, saved = make_sampler(seed=0), make_sampler(seed=7)
    rows = iter(sampler)
    for _ in range(3):
        next(rows)
    sampler.load_state_dict(saved.state_dict())
    expected = list(itertools.islice(saved, 60))  # over more than one epoch
    assert [next(rows) for _ in range(60)] == expected


def test_a_state_of_another_global_batch_size_is_refused():
    with pytest.raises(ValueError, match="had 8 sequences in a global batch, this one has 2"):
        make_sampler().load_state_dict(make_sampler(micro_batch_size=8).state_dict())


@pytest.mark.parametrize("name", ["num_sequences", "micro_batch_size", "num_micro_batches", "num_ranks"])
def test_an_empty_dimension_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        make_sampler(**{name: 0})


@pytest.mark.parametrize("wrong", [{"rank": 1}, {"rank": -1}, {"seed": -1}], ids=str)
def test_a_rank_or_seed_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="must be in"):
        make_sampler(**wrong)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_virtual_rank_reads_the_same_sequences_whichever_rank_runs_it(num_ranks):
    as_many = [make_sampler(num_ranks=4, num_micro_batches=3, rank=rank) for rank in range(4)]
    leaves = 4 // num_ranks
    for step in (0, 7):
        read = [sampler.rank_rows(step) for sampler in as_many]
        for rank in range(num_ranks):
            several = make_sampler(num_ranks=num_ranks, num_micro_batches=3, rank=rank, leaves_per_rank=leaves)
            assert several.global_batch_size == as_many[0].global_batch_size
            mine = itertools.chain(*read[rank * leaves : (rank + 1) * leaves])
            assert several.rank_rows(step) == list(mine)
