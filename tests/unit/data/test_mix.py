"""Several datasets mixed by weights: each row as often as promised, and found again from any position."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from zerotrain.data import GlobalBatchSampler, SyntheticTokens
from zerotrain.data.mix import MAX_PERIOD, Mix, MixedRows, parts_of, pattern

SIZES = {"books": 7, "code": 30, "web": 101}


def rows_of(sizes: dict[str, int], weights: dict[str, float]) -> MixedRows:
    return MixedRows({name: [(name, row) for row in range(size)] for name, size in sizes.items()}, weights)


@pytest.mark.case(
    "losses",
    "`data=mix`",
    "each source as often as its weight says, each of its rows once an epoch of its own; any "
    "position found without those before, on any ranks",
)
@pytest.mark.parametrize(
    "weights", [(1, 1, 1), (7, 2, 1), (0.5, 0.25, 0.25), (0.7, 0.2, 0.1), (1, 100, 3), (0.333, 0.333, 0.334)]
)
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_each_source_is_read_as_often_as_its_weight_says_and_each_of_its_rows_once_an_epoch(
    weights: tuple[float, ...], seed: int
) -> None:
    mix = rows_of(SIZES, dict(zip(SIZES, weights, strict=True)))
    rows, epochs = mix.order(np.arange(5000), seed=seed)
    items = [mix[row] for row in rows.tolist()]
    for name, weight in mix.weights.items():
        share = weight / sum(weights)
        read = np.array([source == name for source, _ in items])
        off = np.abs(np.cumsum(read) - share * np.arange(1, 5001)).max()
        assert off <= (1 + len(SIZES) * share) / 2 + 1e-9
        own = [row for source, row in items if source == name]
        for epoch in range(len(own) // SIZES[name]):
            whole = own[epoch * SIZES[name] : (epoch + 1) * SIZES[name]]
            assert sorted(whole) == list(range(SIZES[name]))
        assert epochs[read].tolist() == [number // SIZES[name] for number in range(len(own))]
        assert len(own) < 2 * SIZES[name] or own[: SIZES[name]] != own[SIZES[name] : 2 * SIZES[name]]


def test_any_position_is_found_without_those_before_and_however_far() -> None:
    mix = rows_of(SIZES, {"books": 0.7, "code": 0.2, "web": 0.1})
    rows, epochs = mix.order(np.arange(3000), seed=5)
    picked = np.random.default_rng(0).permutation(3000).reshape(30, 100)
    again, epochs_again = mix.order(picked, seed=5)
    assert np.array_equal(again, rows[picked])
    assert np.array_equal(epochs_again, epochs[picked])
    assert mix.order([10**17], seed=5)[1].item() == 10**17 * 7 // 10 // 7
    assert not np.array_equal(mix.order(np.arange(3000), seed=6)[0], rows)


def test_the_order_of_a_source_does_not_depend_on_those_beside_it() -> None:
    def own(mix: MixedRows) -> list[Any]:
        items = [mix[row] for row in mix.order(np.arange(400), seed=1)[0].tolist()]
        return [row for name, row in items if name == "code"][:60]

    alone = own(rows_of({"code": 30}, {"code": 1}))
    assert own(rows_of(SIZES, {"books": 5, "code": 2, "web": 1})) == alone


def test_weights_are_kept_exactly_where_a_pattern_can_hold_them() -> None:
    assert parts_of([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert parts_of([1 / 3, 1 / 3, 1 / 3]) == [1, 1, 1]
    assert parts_of([300, 100]) == [3, 1]
    parts = parts_of([math.pi, math.e, 1e-3])
    assert sum(parts) == MAX_PERIOD
    assert parts[2] == round(1e-3 / (math.pi + math.e + 1e-3) * MAX_PERIOD)
    assert pattern([3, 1])[0].tolist() == [0, 0, 1, 0]


def synthetic(**changes: Any) -> SyntheticTokens:
    return SyntheticTokens(**{"seq_len": 8, "vocab_size": 32, "num_sequences": 10} | changes)


class Known(SyntheticTokens):
    """Says how long its sequences are."""

    def __init__(self) -> None:
        super().__init__(seq_len=8, vocab_size=32, num_sequences=10)
        self.train.seq_len = 8  # type: ignore[attr-defined]


@pytest.mark.case(
    "losses",
    "Weights that are negative, no numbers, all 0; sources without data, of other tokens or lengths",
    "refused in one line",
)
@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({}, "data.sources={} names no source; give {name: {data: {_target_: ...}, weight: 1}, ...}"),
        ({"a": {"data": synthetic(), "weight": -1}}, "data.sources.a.weight: got -1; it must be a number that is at"),
        ({"a": {"data": synthetic(), "weight": "x"}}, "data.sources.a.weight: got x; "),
        ({"a": {"data": synthetic(), "weight": math.nan}}, "data.sources.a.weight: got nan; "),
        ({"a": {"data": synthetic(), "weight": 0}}, "data.sources: all weights are 0; at least one must be above 0"),
        (
            {"a": {"data": synthetic(), "weight": 1}, "b": {"data": synthetic(), "weight": 1e-9}},
            "data.sources: the weight 1e-09 is too small beside the others, less than one row in 100000",
        ),
        (
            {"a": {"data": synthetic(), "weight": 1}, "typo": {"weight": 3}},
            "data.sources.typo has no data; a source is {data: {_target_: ...}, weight: 1}, and the other sources are:",
        ),
        ({"a": {"data": synthetic(), "weight": 1, "seed": 3}}, "data.sources.a.seed: a source has no such setting"),
        ({"a": {"data": SimpleNamespace(train=[1]), "weight": 1}}, "data.sources.a.data: SimpleNamespace has no"),
        (
            {"a": {"data": SimpleNamespace(train=[], validation=[1]), "weight": 1}},
            "data.sources.a.data.train is empty or has no length",
        ),
        (
            {"a": {"data": synthetic(), "weight": 1}, "b": {"data": synthetic(vocab_size=64), "weight": 1}},
            "data.vocab_size=32, data.sources.a.data.vocab_size=32, data.sources.b.data.vocab_size=64 differ; all",
        ),
        ({"a": {"data": Known(), "weight": 1}}, "data.sources.a.data.seq_len=8, but data.seq_len=16; all sources need"),
    ],
)  # fmt: skip
def test_sources_that_cannot_be_mixed_are_refused_in_one_line(sources: Any, problem: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is looked at
        Mix(sources, seq_len=16, vocab_size=32)
    assert str(refused.value).startswith(problem)


def test_a_source_of_weight_0_is_evaluated_alone() -> None:
    mix = Mix({"a": {"data": synthetic(), "weight": 2}, "b": {"data": synthetic(num_sequences=40), "weight": 0}})
    assert list(mix.train.sources) == ["a"]
    assert list(mix.validation.sources) == ["a", "b"]
    assert (len(mix.train), len(mix.validation)) == (10, 1 + 4)
    assert mix.train.tokens_per_sequence == 8
    assert mix.train.draws is False
    assert torch.equal(mix.train[3][0], synthetic().train[3][0])
    with pytest.raises(IndexError):
        mix.train[10]


def test_what_is_told_of_a_mix_names_its_sources() -> None:
    mix = Mix({"a": {"data": synthetic(), "weight": 3}, "b": {"data": synthetic(num_sequences=40), "weight": 1}})
    assert mix.summary() == "0.75 a (10 rows), 0.25 b (40 rows); 5 rows to validate"
    assert mix.train.times_read(80) == {"a": 6.0, "b": 0.5}
    assert (mix.fingerprint()["a.rows"], mix.fingerprint()["b.rows"]) == (10, 40)


@pytest.mark.case("losses", "`data=mix`")
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_and_batches_share_the_same_rows_of_a_mix_also_when_it_is_resumed(num_ranks: int) -> None:
    mix = rows_of(SIZES, {"books": 5, "code": 2, "web": 1})
    shape = {"num_sequences": len(mix), "micro_batch_size": 3, "num_micro_batches": 2, "num_ranks": num_ranks}
    samplers = [GlobalBatchSampler(**shape, rank=rank, seed=3, order=mix.order) for rank in range(num_ranks)]
    size = samplers[0].global_batch_size
    for start in (0, 17, 10**12 + 1):
        rows = []
        for position in range(start, start + 5 * size, size):
            read = [sampler.micro_batches(position) for sampler in samplers]
            rows += [row for number in range(2) for each in read for row in each[number].rows]
        assert rows == mix.order(start + np.arange(5 * size), seed=3)[0].tolist()
