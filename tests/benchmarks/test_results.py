"""What the ranks of a round measured, taken together."""

from benchmarks.rank import RankResult
from benchmarks.results import over_ranks


def result(sent_nbytes: int) -> RankResult:
    return RankResult(
        step_ms=[1.0],
        loss=2.0,
        start_nbytes=0,
        peak_nbytes=0,
        sent_nbytes=sent_nbytes,
        counted_nbytes=None,
        theory_nbytes=None,
        full_speed_ms=None,
        host_ms=None,
        device_peak_nbytes=None,
    )


def test_the_interface_of_each_host_counts_once_whatever_ranks_share_it() -> None:
    ranks = [result(sent) for sent in (600, 600, 200, 200)]  # two on each of two hosts
    whole = over_ranks("zero2", ranks, num_interfaces=2, num_steps=2, other_load=0.0)
    assert whole.sent_nbytes == (600 + 200) / 4 / 2
