"""Where the ranks of this machine run, and what the end of a run says."""

import sys
from pathlib import Path

import pytest

from zerotrain.launching.command.task import device_for, print_ending


@pytest.mark.parametrize(
    ("wanted", "num_ranks", "num_gpus", "device"),
    [
        ("auto", 2, 0, "auto"),
        ("auto", 1, 1, "auto"),
        ("auto", 2, 2, "auto"),
        ("auto", 2, 1, "cpu"),
        ("auto", 8, 4, "cpu"),
        ("cuda", 2, 1, "cuda"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_ranks_run_on_gpus_where_each_has_one_and_a_line_says_where_not(wanted, num_ranks, num_gpus, device):
    chosen, why = device_for(wanted, num_ranks, num_gpus)
    assert chosen == device
    assert (why is None) == (device == wanted)


def test_the_line_names_both_numbers_and_what_uses_the_gpu():
    _, why = device_for("auto", 2, 1)
    assert why == (
        "launch.device=auto: 2 ranks need a GPU each and this machine has 1 GPU, so they run on the CPU; "
        "launch.nproc_per_node=1 uses the GPU"
    )


def ending(tmp_path: Path, capsys: pytest.CaptureFixture[str], **result: object) -> list[str]:
    run_dir = tmp_path / "outputs/2026-11-21/23-04-45-123456"
    known = {"status": "completed", "steps": 400, "overrides": ["zero.stage=3"], "checkpoint": None, "error": None}
    print_ending(known | result, run_dir, tmp_path, None)
    return capsys.readouterr().out.splitlines()


def test_the_end_says_where_things_are_and_how_to_go_on(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    saved, goes_on = ending(tmp_path, capsys, checkpoint="step-00000400")
    assert saved == "completed; in outputs/2026-11-21/23-04-45-123456: result.json, metrics.jsonl, ranks/, checkpoints/"
    assert goes_on == (
        "to go on: python launch.py hydra.run.dir=outputs/2026-11-21/23-04-45-123456 zero.stage=3 "
        "train.max_steps=800 checkpoint.resume=auto"
    )
    _, goes_on = ending(tmp_path, capsys, status="stopped", checkpoint="step-00000003")
    assert "train.max_steps" not in goes_on


def test_without_a_checkpoint_the_end_says_how_to_get_one(tmp_path: Path, capsys):
    _, following = ending(tmp_path, capsys)
    assert "checkpoint.save_at_end=true" in following
    assert "to go on:" not in following
