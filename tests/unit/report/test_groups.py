"""What jobs have in common: weights, all settings but the seed, and what a setting explains of the loss."""

import statistics
from pathlib import Path

import pytest

from tests.unit.report.folders import job
from zerotrain.report.rows import equal_weights, explained, read_report, spreads


def test_jobs_that_differ_in_the_seed_alone_have_a_mean_and_a_spread(tmp_path: Path):
    losses = {("0.1", 0): 3.0, ("0.1", 1): 3.5, ("0.1", 2): 4.0, ("0.2", 0): 2.0, ("0.2", 1): 2.2, ("0.3", 0): 9.0}
    for place, ((lr, seed), loss) in enumerate(losses.items()):
        job(tmp_path / str(place), [f"optimizer.lr={lr}", f"seed={seed}"], final_val_loss=loss)
    job(tmp_path / "6", ["optimizer.lr=0.1", "seed=3"], status="failed", error="x")
    best, other = spreads(read_report(tmp_path))
    assert [[row.job for row in each.rows] for each in (best, other)] == [["3", "4"], ["0", "1", "2"]]
    assert (other.mean, other.least, other.most) == (3.5, 3.0, 4.0)
    assert other.deviation == pytest.approx(statistics.stdev([3.0, 3.5, 4.0]))


def test_two_jobs_of_one_seed_have_no_spread(tmp_path: Path):
    job(tmp_path / "0", final_val_loss=1.0)
    job(tmp_path / "1", final_val_loss=2.0)
    assert spreads(read_report(tmp_path)) == []


def test_groups_of_equal_weights_come_the_largest_first(tmp_path: Path):
    for place, sha256 in enumerate("abbcb"):
        job(tmp_path / str(place), weights_sha256=sha256 * 64)
    job(tmp_path / "5", weights_sha256=None)
    groups = equal_weights(read_report(tmp_path).rows)
    assert [[row.job for row in rows] for rows in groups.values()] == [["1", "2", "4"], ["0"], ["3"]]


def test_a_setting_explains_the_loss_that_follows_from_it_and_another_does_not(tmp_path: Path):
    for place in range(24):
        overrides = [f"zero.stage={place % 3}", f"optimizer.lr={place}", f"model.num_layers={place // 3 % 2}"]
        job(tmp_path / str(place), overrides, losses=[], final_val_loss=float(place % 3) + 0.001 * (place % 2))
    told = read_report(tmp_path)
    assert explained(told, "zero.stage") > 0.99
    assert explained(told, "model.num_layers") < 0.1
    assert 0 <= explained(told, "optimizer.lr") < 0.2


def test_a_setting_with_a_value_for_each_job_explains_nothing(tmp_path: Path):
    for place in range(5):
        job(tmp_path / str(place), [f"zero.stage={place}"], final_val_loss=float(place))
    assert explained(read_report(tmp_path), "zero.stage") is None
