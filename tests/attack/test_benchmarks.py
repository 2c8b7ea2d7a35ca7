"""Benchmarks whose peers are commands of their own, or need a disk: each way once, small."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import export, offload, plans


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
