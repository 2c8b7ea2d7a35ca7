"""Benchmarks whose peers are commands of their own, or need a disk: each way once, small."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import choice, export, offload, plans


def rows_of(capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """The table that was printed last, by the first column."""
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    cells = [[each.strip() for each in line.strip("|").split("|")] for line in told]
    return {name: figures for name, *figures in cells[1:]}


def test_every_tool_exports_the_same_weights(
    all_rows: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = export.COMPARED if all_rows else ["ours, weights", "DCP format_utils, weights"]
    export.main(["--folder", str(tmp_path), "--size", "tiny", "--rounds", "1", "--ways", *ways])
    rows = rows_of(capsys)
    assert rows.keys() == {export.BARE} | {name for name in ways if find_spec("deepspeed") or "DeepSpeed" not in name}
    assert all(float(figures[2]) > 0 for name, figures in rows.items() if name != export.BARE)
    assert not list(tmp_path.iterdir())


def test_offloading_trains_to_one_loss_whichever_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "4", "--rows", "8", "--steps", "1", "--rounds", "1", "--without-deepspeed"]
    offload.main(["--folder", str(tmp_path), *sizes])
    rows = rows_of(capsys)
    assert rows.keys() == {offload.BARE, *offload.OURS}
    assert len({rows[name][-1] for name in offload.OURS}) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_plan_stands_beside_what_a_rank_holds(capsys: pytest.CaptureFixture[str]) -> None:
    plans.main(["--models", "small", "--stages", "3", "--tools", "zerotrain"])
    rows = [line.strip("|").split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| GPT")]
    [[said, held, ratio]] = [[float(cell) for cell in cells[3:]] for cells in rows]
    assert 1 <= ratio < 1.05
    assert said == pytest.approx(ratio * held, rel=0.01)
    assert 0.5 * held < plans.said("FSDP2", "GPT, small", 3, 2) / 1e6 < held


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="memory cgroups need root")
def test_a_way_lives_within_its_limit_or_is_killed(tmp_path: Path) -> None:
    options = choice.options_of(["--width", "64", "--layers", "2", "--rows", "1", "--steps", "2"])
    asked = [*choice.settings_of(options), "plan.memory_gb=2", *(f"{name}=auto" for name in choice.CHOSEN)]
    lives = choice.run_ranks_of(asked, choice.SHARED, 2 * 10**9, tmp_path)
    assert lives.way == ("1", "false", "device")
    assert lives.step_ms is not None
    assert lives.step_ms > 0
    killed = choice.run_ranks_of(asked, choice.SHARED, 10**8, tmp_path)
    assert killed.step_ms is None
    assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize(
    ("medians", "step_ms", "cells"),
    [
        ({"fast": 80.0, "chosen": 88.0}, 90.0, ["stage 2", "80", "stage 1, recompute", "88", "1.10"]),
        ({"fast": 80.0}, 90.0, ["stage 2", "80", "stage 1, recompute, killed in a turn", "", ""]),
        ({"fast": 80.0}, None, ["stage 2", "80", "refused or killed", "", ""]),
        ({}, None, ["none", "", "refused or killed", "", ""]),
    ],
)
def test_a_row_tells_the_chosen_way_over_the_fastest(
    medians: dict[str, float], step_ms: float | None, cells: list[str]
) -> None:
    ways = {"fast": ("2", "false", "device"), "chosen": ("1", "true", "device")}
    found = choice.Run(step_ms, ways["chosen"], "")
    row = choice.row_of("0.6", "2 of 16", {ways[name]: ms for name, ms in medians.items()}, found)
    assert row == ["0.6", "2 of 16", *cells]
