"""Engines that are started at once and measured in turn."""

import pytest

from benchmarks.gpu import Turns
from benchmarks.time_limit import TimeLimit
from benchmarks.workload import Workload

WHOLE = Workload(size="tiny", num_ranks=1, num_steps=2, max_grad_norm=1.0)


def test_each_has_its_turns_and_one_that_fails_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Workload(size="tiny", num_ranks=1, precision="fp8")
    engines = {"whole": (["zero0", "alone"], {}), "broken": (["zero2"], {"ddp": "is not installed"})}
    turns = Turns({"whole": WHOLE, "broken": broken}, engines, TimeLimit(600))
    turns.run(num_rounds=2)
    whole, failed = (turns.comparison(part, "the command", 2) for part in engines)
    assert [each.engine for each in whole.measurements] == ["zero0", "alone", "alone", "zero0"]
    assert all(len(whole.rounds_of(name)) == 2 for name in whole.engines)
    first, second = whole.rounds_of("zero0")
    assert second.loss < first.loss  # it went on training
    assert not whole.failures
    assert not whole.left_out
    assert not failed.measurements
    assert "precision.name: got fp8" in failed.failures["zero2"]
    assert failed.left_out == {"ddp": "is not installed"}
    assert "zero2, broken: zero2: rank 0 ended with exit code 1" in capsys.readouterr().err
