"""The table of targets, from numbers made up for it."""

from dataclasses import replace

import pytest

from benchmarks.report import report
from benchmarks.results import Comparison, Measurement
from benchmarks.standing import Standing
from benchmarks.targets import verdicts
from benchmarks.workload import Workload


def measurement(engine: str, step_ms: float, **values: float) -> Measurement:
    defaults = {
        "loss": 2.5,
        "start_nbytes": 100_000_000,
        "peak_nbytes": 500_000_000,
        "sent_nbytes": 55_600_000,
        "counted_nbytes": 55_600_000,
        "theory_nbytes": 55_600_000,
        "full_speed_ms": None,
        "host_ms": None,
        "device_peak_nbytes": None,
        "other_load": 0.0,
    }
    return Measurement(engine=engine, step_ms=step_ms, **(defaults | values))


def comparison(*measurements: Measurement, link_bit_per_s: int | None = None, **workload: str) -> Comparison:
    return Comparison(
        "python -m benchmarks", "2026-01-01", "a machine", Workload(**workload), link_bit_per_s, [*measurements]
    )


ROUND = [
    measurement("alone", 300),
    measurement("zero2", 330),
    measurement("ddp", 400),
    measurement("fsdp2_kept", 600),
    measurement("deepspeed2", 500),
]


def test_a_stage_is_held_against_the_fastest_peer_of_its_own_stage() -> None:
    standing = Standing(comparison(*ROUND))
    assert standing.best_peer_ms("zero2") == 500
    assert standing.ddp_ms == 400
    assert standing.floor_ms == 300


def test_a_target_is_met_or_missed_by_its_figure() -> None:
    table = verdicts([comparison(*ROUND), comparison(*ROUND, link_bit_per_s=1_000_000_000)])
    against_peer = next(line for line in table.splitlines() if "best peer" in line and "stage 2" in line)
    assert "0.660 <= 0.75: met" in against_peer
    assert "**0.660 > 0.45: missed**" in against_peer


def test_what_was_not_run_is_said_to_be_not_measured() -> None:
    table = verdicts([comparison(measurement("zero2", 330))])
    assert next(line for line in table.splitlines() if "DDP" in line and "stage 2" in line).count("not measured") == 1


def test_a_step_on_a_link_cannot_beat_its_bytes() -> None:
    standing = Standing(comparison(*ROUND, link_bit_per_s=1_000_000_000))
    assert standing.limit_ms("zero2") == pytest.approx(8 * 55.6)
    assert Standing(comparison(*ROUND)).limit_ms("zero2") == 300


def test_the_limits_of_bf16_on_one_host_are_their_own() -> None:
    slower = [measurement("zero2", 440), *ROUND[2:]]
    lines = verdicts([comparison(*slower, precision="bf16")]).splitlines()
    row = next(line for line in lines if "time against the best peer" in line and "stage 2" in line)
    assert "0.880 <= 0.90: met" in row


def test_rounds_count_by_their_median() -> None:
    rounds = comparison(*(measurement("zero2", step_ms) for step_ms in (900, 330, 331)))
    assert rounds.medians()["zero2"].step_ms == 331
    assert "330 - 900" in report(rounds)


def test_a_different_loss_is_told() -> None:
    astray = comparison(*ROUND, measurement("fsdp2", 600, loss=2.6))
    assert "**Losses differ** by more than 0.0001 of their median: fsdp2" in report(astray)
    assert "did the same work" in report(comparison(*ROUND))


def test_an_engine_that_failed_is_told() -> None:
    broken = replace(comparison(*ROUND), failures={"fsdp2": "fsdp2: rank 0 ended with exit code 1:\nTraceback"})
    assert "**fsdp2 failed**: fsdp2: rank 0 ended with exit code 1" in report(broken)


def test_results_are_read_as_they_were_written(tmp_path) -> None:
    written = comparison(*ROUND, link_bit_per_s=1_000_000_000, precision="bf16")
    written.save(tmp_path / "results.json")
    assert Comparison.load(tmp_path / "results.json") == written
