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


def row_of(table: str, *words: str) -> str:
    return next(line for line in table.splitlines() if all(word in line for word in words))


def test_a_target_is_met_or_missed_by_its_figure_against_the_fastest_peer_of_its_own_stage() -> None:
    on_a_link = comparison(*ROUND, link_bit_per_s=1_000_000_000)
    table = verdicts([comparison(*ROUND), on_a_link])
    assert "**0.660 > 0.65: missed** | **0.660 > 0.45: missed**" in row_of(table, "best peer", "stage 2")
    assert "0.825 <= 0.88: met" in row_of(table, "DDP", "stage 2")
    assert Standing(on_a_link).limit_ms("zero2") == pytest.approx(8 * 55.6)  # a step cannot beat its bytes
    assert row_of(verdicts([comparison(measurement("zero2", 330))]), "DDP", "stage 2").count("not measured") == 1


def test_the_limits_of_bf16_and_of_the_interface_on_one_host_are_their_own() -> None:
    slower = [measurement("zero1", 440), measurement("deepspeed1", 500)]
    table = verdicts([comparison(*slower), comparison(*slower, precision="bf16")])
    row = row_of(table, "time against the best peer", "stage 1")
    assert "**0.880 > 0.75: missed** | 0.880 <= 0.90: met" in row
    by_memory = [measurement("zero2", 330, sent_nbytes=100_000)]
    row = row_of(verdicts([comparison(*by_memory), comparison(*ROUND)]), "bytes on the interface", "stage 2")
    assert "0.002 <= 0.02: met | **1.000 > 0.02: missed**" in row


def test_a_report_has_medians_where_a_step_goes_other_losses_and_engines_that_failed() -> None:
    rounds = comparison(*(measurement("zero2", step_ms) for step_ms in (900, 330, 331)))
    assert rounds.medians()["zero2"].step_ms == 331
    assert "330 - 900" in report(rounds)
    split = {"compute_ms": 300.4, "exposed_ms": 12.0, "update_ms": 10.0, "other_ms": 7.6, "threads_ms": 30.0}
    ours = measurement("zero2", 330, num_ops=1240.0, num_calls=3979.0, **split)
    text = report(comparison(ours, measurement("ddp", 400, threads_ms=33.0, num_ops=810.0, num_calls=781.0)))
    assert "| zerotrain stage 2 | 300.4 | 12.0 | 10.0 | 7.6 | 30.0 | 1,240 | 3,979 |" in text
    assert "| DDP |  |  |  |  | 33.0 | 810 | 781 |" in text
    astray = comparison(*ROUND, measurement("fsdp2", 600, loss=2.6))
    assert "**Losses differ** by more than 0.0001 of their median: fsdp2" in report(astray)
    broken = replace(comparison(*ROUND), failures={"fsdp2": "fsdp2: rank 0 ended with exit code 1:\nTraceback"})
    assert "**fsdp2 failed**: fsdp2: rank 0 ended with exit code 1" in report(broken)
    assert "did the same work" in report(broken)


def test_results_are_read_as_they_were_written(tmp_path) -> None:
    written = comparison(*ROUND, link_bit_per_s=1_000_000_000, precision="bf16")
    written.save(tmp_path / "results.json")
    assert Comparison.load(tmp_path / "results.json") == written
