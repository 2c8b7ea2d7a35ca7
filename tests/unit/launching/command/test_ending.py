"""What the end of a run says."""

import sys
from pathlib import Path

import pytest

from zerotrain.launching.command import print_ending


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
