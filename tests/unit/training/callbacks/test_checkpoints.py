"""A run that goes on is the run that never stopped."""

import json
import os
import random
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.training import warmup_cosine
from zerotrain.training.callbacks import checkpoints as checkpoints_module
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

TIMES = (
    "tokens_per_s",
    "labels_per_s",
    "samples_per_s",
    "step_ms_median",
    "data_wait_ms",
    "comm_wait_ms",
    "update_ms",
    "mfu",
    "train_s",
    "wall_time_s",
    "peak_nbytes",
    "sent_nbytes",
)
"""What is measured, and never twice the same."""


class Draws(nn.Module):
    """Its loss depends on random numbers of every origin."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 32)
        self.own = torch.Generator().manual_seed(7)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.calls += 1
        noise = torch.rand(1, generator=self.own) * random.random() if self.training else 0.0
        logits = self.head(self.dropout(self.embedding(ids)) + noise)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


@pytest.fixture
def start(make_trainer, tmp_path: Path):
    """Makes a Trainer of twelve steps in the folder of a name."""

    def make(name: str, *, lr: float = 1e-2, **changes: Any) -> Any:
        torch.manual_seed(0)
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        optimizer = partial(torch.optim.AdamW, lr=lr)
        engine = zerotrain.build_engine(
            Draws(), optimizer=optimizer, max_grad_norm=0.5, world=changes.pop("world", None)
        )
        settings: dict[str, Any] = {
            "engine": engine,
            "run_dir": run_dir,
            "max_steps": 12,
            "eval_every": 4,
            "log_every": 2,
        }
        settings |= {"schedule": partial(warmup_cosine, warmup_steps=3), "settings": {"optimizer": {"lr": lr}}}
        return make_trainer(**settings | changes)

    return make


def path_of(trainer: Any, step: int) -> Path:
    return trainer.run_dir / "checkpoints" / f"step-{step:08d}"


def names_in(trainer: Any) -> list[str]:
    return sorted(path.name for path in (trainer.run_dir / "checkpoints").iterdir())


def lines_of(trainer: Any) -> list[dict[str, Any]]:
    lines = map(json.loads, (trainer.run_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


EVERY_THREE = CheckpointPolicy(every_steps=3, keep=None)


@pytest.mark.case(
    "stopping",
    "a module that draws from a generator of its own, from Python's or numpy's",
    "the same numbers as in one go",
)
@pytest.mark.case(
    "stopping",
    "in its own folder, or in another",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
@pytest.mark.parametrize("step", [3, 6, 12])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(start, asynchronous, step):
    whole = start("whole", checkpoint=CheckpointPolicy(every_steps=3, keep=None, asynchronous=asynchronous))
    wanted = whole.run()
    assert names_in(whole) == [f"step-{each:08d}" for each in (3, 6, 9, 12)]
    again = start("again", checkpoint=CheckpointPolicy(resume=[path_of(whole, step)]))
    torch.manual_seed(99)
    got = again.run()
    assert got["weights_sha256"] == wanted["weights_sha256"]
    assert lines_of(again) == lines_of(whole)
    for name in ("steps", "skipped_steps", "final_train_loss", "final_val_loss", "status"):
        assert got[name] == wanted[name], name
    assert got["train_s"] > 0
    assert got["resumed_from"] == str(path_of(whole, step))
    assert again.engine.module.calls == whole.engine.module.calls
    assert again.data_state == whole.data_state


@pytest.mark.case(
    "stopping",
    "in its own folder, or in another",
    "no line of metrics.jsonl doubled or lost; no checkpoint replaced",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
def test_a_run_in_its_own_folder_doubles_no_line_and_replaces_no_checkpoint(start, screen):
    first = start("run", checkpoint=EVERY_THREE)
    wanted, lines = first.run(), lines_of(first)
    newest = (path_of(first, 12) / "manifest.json").read_text()
    second = start("run", checkpoint=CheckpointPolicy(every_steps=3, keep=None, resume=[path_of(first, 6)]))
    assert second.run()["weights_sha256"] == wanted["weights_sha256"]
    assert lines_of(second) == lines
    kept = names_in(second)
    assert [name for name in kept if "aside" not in name] == [f"step-{each:08d}" for each in (3, 6, 9, 12)]
    [aside] = [name for name in kept if name.startswith("step-00000012.aside-")]
    assert (second.run_dir / "checkpoints" / aside / "manifest.json").read_text() == newest
    assert f"step-00000012 is later than that, and was renamed to {aside}" in screen.getvalue()


def test_of_its_own_folder_a_run_that_begins_with_anothers_keeps_what_comes_before(start):
    """Of the same step too, which it could not save again."""
    for name in ("run", "another"):
        start(name, checkpoint=EVERY_THREE).run()
    another = start("another").run_dir / "checkpoints" / "step-00000006"
    again = start("run", checkpoint=CheckpointPolicy(every_steps=3, keep=None, resume=[another]))
    assert again.run()["checkpoint"] == str(path_of(again, 12))
    kept = names_in(again)
    assert [name.partition(".aside-")[0] for name in kept if "aside" in name] == [
        f"step-{each:08d}" for each in (6, 9, 12)
    ]
    assert [name for name in kept if "aside" not in name] == [f"step-{each:08d}" for each in (3, 9, 12)]


@pytest.mark.case(
    "stopping",
    "the newest checkpoint is damaged",
    "the newest intact one is taken; lines say which were skipped, and why",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
def test_the_newest_that_is_what_was_written_is_taken(start, screen):
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    for step, name in ((12, "manifest.json"), (9, "rank-00000.safetensors")):
        damaged = path_of(first, step) / name
        damaged.write_bytes(damaged.read_bytes()[:-10])
    to_try = [path_of(first, step) for step in (12, 9, 6)]
    second = start("run", checkpoint=CheckpointPolicy(resume=to_try, keep=None))
    assert second.run()["resumed_from"] == str(path_of(first, 6))
    said = screen.getvalue()
    assert said.count("warning: skipped a checkpoint that cannot be loaded") == 2
    assert "step-00000012/manifest.json" in said
    assert "step-00000009/rank-00000.safetensors" in said


@pytest.mark.case(
    "stopping",
    "the newest checkpoint is damaged",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
def test_where_none_can_be_taken_up_nothing_is_trained(start):
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    to_try = [path_of(first, step) for step in (12, 9)]
    for path in to_try:
        (path / "rank-00000.safetensors").unlink()
    second = start("run", checkpoint=CheckpointPolicy(resume=to_try))
    with pytest.raises(CheckpointError, match=r"(?s)step-00000012/rank-00000.*step-00000009/rank-00000"):
        second.run()
    assert second.result.steps == 0
    assert second.result.status == "failed"


def test_only_the_newest_stay_and_those_of_a_rhythm(start):
    trainer = start("run", checkpoint=CheckpointPolicy(every_steps=1, keep=2, keep_every=5))
    trainer.run()
    assert names_in(trainer) == [f"step-{each:08d}" for each in (5, 10, 11, 12)]


def test_a_run_saves_when_it_is_time(start, screen):
    trainer = start("run", checkpoint=CheckpointPolicy(every_s=0.0, keep=None, at_end=False), max_steps=3)
    body = trainer.run()
    assert names_in(trainer) == [f"step-{each:08d}" for each in (1, 2, 3)]
    assert screen.getvalue().count("saved checkpoints/step-") == 3
    assert ("a step during a save took" in screen.getvalue()) == (body["save_step_ratio"] is not None)
    assert body["checkpoint"] == str(path_of(trainer, 3))
    assert body["save_pause_ms"] > 0
    never = start("never", checkpoint=CheckpointPolicy(every_s=1000.0, at_end=False), max_steps=3)
    assert never.run()["checkpoint"] is None


@pytest.mark.parametrize(
    ("step_s", "saved"), [(60.0, [3, 6, 9, 12]), (90.0, [2, 4, 6, 8, 10, 12]), (100.0, [2, 4, 6, 8, 10, 12])]
)
def test_each_interval_is_counted_from_the_save_before(start, monkeypatch, step_s: float, saved: list[int]):
    """With checkpoint.every=15m each step saved once the first 15 minutes were over: no test saw it (2026-11-23)."""
    now_s = [1000.0]
    monkeypatch.setattr(checkpoints_module, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def begin(step: int) -> None:
        now_s[0] += step_s

    trainer = start("run", checkpoint=CheckpointPolicy(every_s=180.0, keep=None, at_end=False), begin=begin)
    trainer.run()
    assert names_in(trainer) == [f"step-{step:08d}" for step in saved]


@pytest.mark.case(
    "stopping",
    "stopped before an evaluation that was due",
    "it is made up for",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
@pytest.mark.parametrize("step", [4, 6])
def test_a_run_that_is_told_to_stop_saves_and_goes_on_as_if_it_had_not(start, step):
    """After step 4 an evaluation is due, which the stop leaves to who goes on."""
    wanted = start("whole").run()
    first = start("run", checkpoint=CheckpointPolicy(at_end=False))
    first.begin = lambda number: number == step and os.kill(os.getpid(), signal.SIGTERM)
    stopped = first.run()
    assert (stopped["status"], stopped["stopped_by"], stopped["steps"]) == ("stopped", "SIGTERM", step)
    assert stopped["checkpoint"] == str(path_of(first, step))
    second = start("run", checkpoint=CheckpointPolicy(resume=[path_of(first, step)]))
    got = second.run()
    assert got["weights_sha256"] == wanted["weights_sha256"]
    assert lines_of(second) == lines_of(start("whole"))


@pytest.mark.case(
    "stopping",
    "with a setting or hyperparameter changed",
    "the new value holds, with a line that says so",
    under=(
        "a run that goes on, at another stage, number of ranks and size of buckets; dropout, labels "
        "that differ, accumulation, AdamW, Muon, fp16"
    ),
)
def test_a_hyperparameter_that_was_changed_since_is_that_of_now(start, screen):
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    second = start("again", lr=3e-3, checkpoint=CheckpointPolicy(resume=[path_of(first, 6)]))
    second.run()
    last = {line["step"]: line["lr"] for line in lines_of(second) if "lr" in line}
    before = {line["step"]: line["lr"] for line in lines_of(first) if "lr" in line}
    assert last[6] == before[6]
    assert last[8] == pytest.approx(0.3 * before[8])
    assert "optimizer.lr: 0.01 until now, 0.003 from here on" in screen.getvalue()
    third = start("third", lr=3e-3, checkpoint=CheckpointPolicy(resume=[path_of(second, 12)]), max_steps=14)
    third.run()
    assert "until now" not in screen.getvalue().split("resumes from")[-1].replace("max_steps", "")
    fourth = start("fourth", lr=1e-2, checkpoint=CheckpointPolicy(resume=[path_of(third, 14)]), max_steps=16)
    fourth.run()
    assert fourth.engine.param_groups[0]["initial_lr"] == 1e-2


@pytest.mark.case(
    "stopping", "a save fails beside the training", "reported at once, training goes on; exit code 1 at the end"
)
def test_a_save_that_fails_costs_no_training_and_is_told_at_once_and_in_the_end(start, screen):
    wanted = start("whole").run()
    trainer = start("run", checkpoint=EVERY_THREE)
    (trainer.run_dir / "checkpoints").write_text("no folder")
    with pytest.raises(CheckpointError, match="step-00000003 was not saved"):
        trainer.run()
    result = json.loads((trainer.run_dir / "result.json").read_text())
    assert (result["status"], result["steps"], result["weights_sha256"]) == ("failed", 12, wanted["weights_sha256"])
    assert result["checkpoint"] is None
    assert "step-00000012 was not saved" in result["error"]
    told = screen.getvalue().split("model   Draws")[-1]
    assert told.index("warning: step-00000003 was not saved") < told.index("step 12/12")


def test_the_checkpoint_of_a_loop_of_ones_own_does_not_say_where_the_run_is(start, tmp_path: Path):
    trainer = start("run")
    trainer.engine.save(tmp_path / "own", extra={"rows": 3})
    with pytest.raises(CheckpointError, match="own was not saved by a run"):
        start("again", checkpoint=CheckpointPolicy(resume=[tmp_path / "own"])).run()


def test_a_run_that_is_further_than_asked_for_is_refused(start):
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    second = start("again", checkpoint=CheckpointPolicy(resume=[path_of(first, 12)]), max_steps=10)
    with pytest.raises(ConfigError, match=r"train.max_steps: got 10, but .* is of step 12"):
        second.run()


class Tracker:
    """A service that gives each run an id."""

    def __init__(self, run: str | None = None) -> None:
        self.run, self.steps = run or "new", []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"run": self.run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.steps == []
        self.run = state["run"]


def test_a_tracking_service_goes_on_in_its_own_run(start):
    first = start("run", checkpoint=EVERY_THREE, sinks=[Tracker("7f3a")])
    first.run()
    tracker = Tracker()
    start("again", checkpoint=CheckpointPolicy(resume=[path_of(first, 6)]), sinks=[tracker]).run()
    assert tracker.run == "7f3a"
    assert min(tracker.steps) > 6


def test_weights_alone_may_be_begun_with(start, screen):
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    second = start("again", checkpoint=CheckpointPolicy(init_from=path_of(first, 12), at_end=False))
    second.checkpoints.resume()
    assert second.engine.weights_sha256() == first.engine.weights_sha256()
    assert second.engine.stamps.num_steps == 0


def test_a_run_that_may_not_go_on_changes_nothing_and_says_nothing_of_what_would_change(start, screen):
    """Later checkpoints were set aside, lines of metrics.jsonl dropped, and a setting told "from here on"."""
    first = start("run", checkpoint=EVERY_THREE)
    first.run()
    before, lines = names_in(first), lines_of(first)
    again = start("run", lr=3e-3, seed=5, checkpoint=CheckpointPolicy(resume=[path_of(first, 6)]))
    with pytest.raises(ConfigError, match=r"read other rows, .*: seed: 0 there, 5 here"):
        again.run()
    assert (names_in(again), lines_of(again)) == (before, lines)
    assert "from here on" not in screen.getvalue()
