"""What an operator asks of a run that is under way."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import zerotrain
from zerotrain.models import GPT
from zerotrain.training.checkpoints import CheckpointPolicy
from zerotrain.training.control import stage_asked
from zerotrain.training.stop import SAVE, STOP, name_of_stop


@pytest.fixture
def run(make_trainer: Callable[..., Any], tmp_path: Path, screen: Any) -> Callable[..., tuple[Any, Any, str]]:
    """Runs twelve steps, of which some begin with a text in control.yaml; (trainer, result, what was answered)."""

    def begin(asked: dict[int, str], name: str = "run", **changes: Any) -> tuple[Any, Any, str]:
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        control = run_dir / "control.yaml"
        answers: list[str] = []

        def write(step: int) -> None:
            if control.exists():
                answers.append(control.read_text())
            if step in asked:
                control.write_text(asked[step])

        torch.manual_seed(0)
        model = GPT(vocab_size=32, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=32)
        engine = zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2))
        settings = {
            "engine": engine,
            "run_dir": run_dir,
            "max_steps": 12,
            "checkpoint": CheckpointPolicy(at_end=False, keep=None),
        }
        trainer = make_trainer(**settings | {"begin": write} | changes)
        body = trainer.run()
        return trainer, body, control.read_text() if control.exists() else ""

    return begin


def test_a_stage_that_is_asked_for_is_that_of_the_next_step_and_the_bits_are_those_of_any(run, screen):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({3: "stage: 3\n", 7: "stage: 0\n"})
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert [(each["stage"], each["from_step"]) for each in body["stages"]] == [(2, 0), (3, 3), (0, 7)]
    assert yaml.safe_load(answer) == {"answer": ["stage: 0 after step 7"]}
    assert "control.yaml: stage: 3 after step 3" in screen.getvalue()
    assert trainer.engine.options.zero.stage == 0


def test_a_save_is_made_once(run):
    trainer, _, answer = run({5: "save: now"})
    assert [path.name for path in (trainer.run_dir / "checkpoints").iterdir()] == ["step-00000005"]
    assert yaml.safe_load(answer) == {"answer": ["save: step-00000005 is written beside the training"]}


def test_a_stop_saves_and_the_run_goes_on_at_the_stage_that_was_asked_for(run, make_trainer):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({4: "stop: true\nstage: 1\n"})
    assert (body["status"], body["stopped_by"], body["steps"]) == ("stopped", "control.yaml", 4)
    assert len(yaml.safe_load(answer)["answer"]) == 2
    newest = trainer.run_dir / "checkpoints/step-00000004"
    again, body, _ = run({}, "again", checkpoint=CheckpointPolicy(at_end=False, resume=[newest]))
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert again.engine.options.zero.stage == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("stage: 7", "stage: got 7; it must be 0, 1, 2 or 3"),
        ("stage: true", "stage: got True; it must be 0, 1, 2 or 3"),
        ("save: later", "save: got 'later'; it must be now"),
        ("stop: 1", "stop: got 1; it must be true"),
        ("stagee: 3", "stagee: there is no such request; there are stage: 0 to 3, save: now, stop: true"),
        ("stage", "it says no key and value; write stage: 0 to 3, save: now, stop: true"),
    ],
)
def test_what_cannot_be_is_answered_and_the_run_goes_on(run, asked, said):
    _, body, answer = run({2: asked})
    assert (body["status"], body["steps"], len(body["stages"])) == ("completed", 12, 1)
    assert yaml.safe_load(answer) == {"answer": [said]}


def test_no_yaml_is_answered_and_what_is_right_beside_what_is_wrong_is_done(run):
    _, body, answer = run({2: "stage: [3", 6: "stage: 3\nsave: later\n"})
    assert body["stages"][-1]["stage"] == 3
    assert yaml.safe_load(answer) == {"answer": ["stage: 3 after step 6", "save: got 'later'; it must be now"]}


def test_an_empty_file_and_an_answer_ask_for_nothing(run):
    _, body, answer = run({2: "", 4: "answer: [done]\n"})
    assert body["status"] == "completed"
    assert answer == "answer: [done]\n"


def test_the_numbers_that_travel_are_told_apart():
    for stage in range(4):
        assert stage_asked([15 + SAVE + (stage + 1) * (SAVE << 1) + STOP, 0]) == stage
    assert stage_asked([15 + SAVE + STOP, 0]) is None
    assert name_of_stop([STOP, 0]) == "control.yaml"
    assert name_of_stop([STOP, 15]) == "SIGTERM"
    assert name_of_stop([SAVE + (SAVE << 1), 0]) is None


def test_an_answer_that_cannot_be_written_is_said_whatever_the_run_is_called(run, screen, monkeypatch, tmp_path):
    def refuse(source: Path, target: Path) -> None:
        if Path(target).name == "control.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "zero.units=[blocks.*] [").mkdir()
    name = "zero.units=[blocks.*] [/b]"  # a tag that nothing has opened: rich refused it, and rank 0 ended (2026-11-22)
    _, body, _ = run({3: "stage: 3\n"}, name)
    assert body["steps"] == 12
    assert (
        f"warning: {tmp_path / name / 'control.yaml'} cannot be answered in: No space left on device"
        in screen.getvalue()
    )
