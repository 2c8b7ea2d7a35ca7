"""The clock of a split."""

import time

import pytest

from benchmarks.split import timed_ranges
from zerotrain.engine.model.forward import named_range


def test_a_clock_counts_each_range_apart_from_those_within_it():
    with timed_ranges() as clock:
        started_s = time.perf_counter()
        with named_range("optimizer", "blocks.0"):
            time.sleep(0.02)
            with named_range("gather", "blocks.0"):
                time.sleep(0.03)
            with pytest.raises(ValueError, match="lost"), named_range("gather", "blocks.1"):
                raise ValueError("lost")
        passed_s = time.perf_counter() - started_s
    assert list(clock.times_s) == ["optimizer", "gather"]
    assert clock.times_s["gather"] >= 0.03
    assert clock.times_s["optimizer"] >= 0.02
    assert sum(clock.times_s.values()) <= passed_s
    assert named_range("gather", "blocks.0") is named_range("reduce", "blocks.1")  # nobody counts any more
