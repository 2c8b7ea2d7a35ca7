"""The stage of a run changes between two steps, by a schedule, and nothing of what is trained does."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import zerotrain
from tests.unit.training.test_no_labels import sum_over_threads
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.config.schema import Config, ZeroGroup
from zerotrain.data import SyntheticTokens
from zerotrain.launching.job import Job
from zerotrain.launching.resuming import going_on
from zerotrain.models import GPT
from zerotrain.testing.fake_wire import run_threads
from zerotrain.training import Trainer, warmup_cosine
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.stages import stage_at, stages_from, stages_named

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
ROUND = {0: 0, 2: 1, 4: 2, 6: 3, 8: 1, 10: 0}
"""Each stage, for two steps."""
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {"precision": "fp32", "optimizer": partial(torch.optim.AdamW, lr=1e-2)},
    "bf16, Muon": {"precision": "bf16", "optimizer": zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01)},
    "fp16, its scale growing": {
        "precision": zerotrain.PrecisionConfig("fp16", initial_scale=2.0**6, growth_interval=3),
        "optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    },
    "fp32, adapters on a frozen base": {"precision": "fp32", "optimizer": partial(torch.optim.AdamW, lr=1e-2)},
}
HELD = ("parameters", "gradients", "optimizer")


class Adapted(nn.Linear):
    """With small matrices beside a frozen one, as LoRA has them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features)
        self.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.up(self.down(x))


@pytest.fixture(autouse=True)
def sums(monkeypatch):
    monkeypatch.setattr(zerotrain.World, "sum", sum_over_threads)


def trainer_of(world, model, folder: Path, *, stage: int = 0, kind: str = "fp32", zero=None, **changes) -> Trainer:
    """Of twelve steps, with clipping, an evaluation every four, and two micro-batches in a step."""
    folder.mkdir(exist_ok=True)
    zero = {"stage": stage, "bucket_mb": 0.02} | (zero or {})
    given = {"zero": zerotrain.ZeroConfig(**zero), "max_grad_norm": 0.5} | KINDS[kind]
    engine = zerotrain.build_engine(model(kind), world=world, **given)
    arguments = {
        "engine": engine,
        "world": world,
        "dataset": SyntheticTokens(seq_len=8, vocab_size=16, num_sequences=120),
        "schedule": partial(warmup_cosine, warmup_steps=2),
        "seed": 0,
        "max_steps": 12,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_every": 4,
        "eval_batches": 1,
        "log_every": 1,
        "sample_tokens": 0,
        "run_dir": folder,
        "run_facts": {"stage": stage, "overrides": [], "config_hash": ""},
        "console": Console(file=io.StringIO(), width=80),
    }
    return Trainer(**arguments | changes)


@pytest.fixture
def model():
    """Makes the same model for each rank and each run; its output is tied to its embedding."""

    def new(kind: str) -> GPT:
        made = GPT(vocab_size=16, max_seq_len=8, num_layers=2, num_heads=2, hidden_size=16)
        if "adapters" in kind:
            made.requires_grad_(False)
            for block in made.blocks:
                block.mlp.in_proj = Adapted(block.mlp.in_proj)
        return made

    firsts = {}
    for kind in KINDS:
        torch.manual_seed(0)
        firsts[kind] = new(kind).state_dict()

    def make(kind: str) -> GPT:
        made = new(kind)
        made.load_state_dict(firsts[kind])
        return made

    return make


def lines_of(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def without_changes(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "stage" not in line]


@pytest.mark.case(
    "checkpoints",
    "`zero.schedule` changes the stage in mid-run",
    "the run at one stage: weights, losses, lines of metrics.jsonl",
)
@pytest.mark.parametrize(("kind", "size"), list(zip(KINDS, (2, 3, 2, 2), strict=True)))
def test_a_run_that_changes_its_stage_every_two_steps_is_the_run_at_one_stage(kind, size, model, tmp_path):
    def run(world, folder, **changes):
        screen = io.StringIO()
        trainer = trainer_of(world, model, folder, kind=kind, console=Console(file=screen, width=80), **changes)
        return trainer.run(), screen.getvalue()

    fixed, _ = run_threads(partial(run, folder=tmp_path / "fixed", stage=2), size)
    changing, _ = run_threads(partial(run, folder=tmp_path / "changing", stages=ROUND), size, late_rank=size - 1)
    for (wanted, _), (got, _) in zip(fixed, changing, strict=True):
        for name in ("weights_sha256", "final_train_loss", "final_val_loss", "skipped_steps", "steps"):
            assert got[name] == wanted[name], name
    lines = lines_of(tmp_path / "changing")
    assert without_changes(lines) == lines_of(tmp_path / "fixed")
    assert [(line["step"], line["stage"]) for line in lines if "stage" in line] == list(ROUND.items())[1:]
    (body, shown), (_, shown_by_another) = changing[0], changing[1]
    assert [(each["from_step"], each["stage"]) for each in body["stages"]] == list(ROUND.items())
    assert body["stage"] == 0
    for entry in body["stages"]:
        assert len(entry["ranks"]) == size
        for usage in entry["ranks"]:
            beyond = [usage[f"{name}_nbytes"] - usage[f"theory_{name}_nbytes"] for name in HELD]
            assert all(0 <= each <= 12_000 for each in beyond), entry["stage"]  # padding of a few buckets
        if entry["from_step"]:
            assert f"-> {entry['stage']} after step {entry['from_step']}: sent " in shown
    [of_fixed], at_2 = fixed[0][0]["stages"], body["stages"][2]
    for usage in (*of_fixed["ranks"], *at_2["ranks"]):
        assert usage.pop("peak_nbytes") > 0
    assert at_2["ranks"] == of_fixed["ranks"]
    assert at_2["ranks"][0]["sent_nbytes"] > 0
    assert shown_by_another == ""
    rows = [line.split("  ")[0].split() for line in map(str.strip, shown.splitlines()) if line.count("/") == 4]
    assert rows == [[f"{stage},", str(rank)] for stage in ROUND.values() for rank in range(size)]
    assert "stage 0 from step 0, 1 from step 2, 2 from step 4" in " ".join(shown.split())


@pytest.mark.case(
    "checkpoints",
    "and it was stopped before, at or behind a change",
    "it goes on at the stage of its step, whatever stage saved",
    under="`zero.schedule` changes the stage in mid-run",
)
@pytest.mark.parametrize("saved_at", [5, 6])
def test_a_run_stopped_between_two_changes_or_at_one_goes_on_at_the_stage_of_its_step(saved_at, model, tmp_path):
    policy = CheckpointPolicy(every_steps=saved_at, at_end=False, keep=None)

    def run(world, folder, **changes):
        return trainer_of(world, model, folder, stages=ROUND, **changes).run()

    [whole, _], _ = run_threads(partial(run, folder=tmp_path / "whole", checkpoint=policy), 2)
    path = tmp_path / "whole" / "checkpoints" / f"step-{saved_at:08d}"
    resumed = CheckpointPolicy(resume=[path], at_end=False)
    for built_at in (0, 3):
        folder = tmp_path / f"again-{built_at}"
        [again, _], _ = run_threads(partial(run, folder=folder, checkpoint=resumed, stage=built_at), 2, late_rank=1)
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert lines_of(folder) == lines_of(tmp_path / "whole")
        shape = [(each["from_step"], each["stage"], len(each["ranks"])) for each in again["stages"]]
        assert shape == [(step, stage, 2) for step, stage in ROUND.items()]


@pytest.mark.case(
    "checkpoints",
    "and it was stopped before, at or behind a change",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_a_run_goes_on_by_the_schedule_of_now_whatever_stage_has_saved(model, tmp_path, world):
    first = trainer_of(world, model, tmp_path / "first", stage=3, checkpoint=CheckpointPolicy(every_steps=5, keep=None))
    wanted = first.run()
    policy = CheckpointPolicy(resume=[tmp_path / "first" / "checkpoints" / "step-00000005"])
    second = trainer_of(world, model, tmp_path / "second", checkpoint=policy, stages={0: 3, 4: 1, 9: 2})
    got = second.run()
    assert got["weights_sha256"] == wanted["weights_sha256"]
    assert [(each["from_step"], each["stage"]) for each in got["stages"]] == [(0, 3), (5, 1), (9, 2)]
    assert "memory  stage 1, 2 after step 9, kB of a rank" in second.console.file.getvalue()
    # The first part was never measured: its run saved in mid-stage.
    assert [each["ranks"] is None for each in got["stages"]] == [True, False, False]


def test_a_stage_that_no_step_was_trained_at_is_none_of_the_run(model, tmp_path, world):
    """The run was saved at the step of a change, and goes on by a schedule without it."""
    policy = CheckpointPolicy(every_steps=6, keep=None)
    trainer_of(world, model, tmp_path / "first", checkpoint=policy, stages={0: 2, 6: 3}).run()
    policy = CheckpointPolicy(resume=[tmp_path / "first" / "checkpoints" / "step-00000006"])
    for later, stages in ({6: 1}, [(0, 2), (6, 1)]), ({}, [(0, 2)]), ({9: 0}, [(0, 2), (9, 0)]):
        body = trainer_of(world, model, tmp_path / "second", checkpoint=policy, stages={0: 2} | later).run()
        assert [(each["from_step"], each["stage"]) for each in body["stages"]] == stages


@pytest.mark.case(
    "checkpoints",
    "where control.yaml has asked for another stage, or the newest manifest is damaged",
    "built at that stage; or at the stage of the newest readable manifest",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_the_stage_of_the_step_that_a_run_goes_on_at_is_known_from_its_checkpoint(model, tmp_path, world):
    """Before its ranks build an engine: with `zero.schedule={0: 0, 500: 3}` they built one at stage 0 to go on at step
    600, and a model that fits at stage 3 alone could not go on (2026-11-22)."""
    schedule, run_dir = {0: 2, 6: 3}, tmp_path / "run"

    def ask(step: int) -> None:
        if step == 3:
            (run_dir / "control.yaml").write_text("stage: 1\n")

    policy = CheckpointPolicy(every_steps=2, at_end=False, keep=None)
    trainer = trainer_of(world, model, run_dir, stages=schedule, max_steps=8, begin=ask, checkpoint=policy)
    trainer.run()
    for step, stage in {2: 2, 4: 1, 6: 3, 8: 3}.items():
        path = run_dir / "checkpoints" / f"step-{step:08d}"
        stages, found = stages_from(read_manifest(path), schedule)
        assert (found, stage_at(stages, found)) == (step, stage)
    job = Job(config=Config(zero=ZeroGroup(schedule=schedule)), run_dir=run_dir, overrides=[])
    assert going_on(job).stage == 3
    for step in (6, 8):
        (run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json").write_text("{}")
    assert going_on(job).stage == 1  # of the newest that can be read
    trainer.engine.save(tmp_path / "of-a-loop", extra={"trainer": [1]})
    assert stages_from(read_manifest(tmp_path / "of-a-loop"), schedule) == (schedule, 8)
    assert stages_from(None, schedule) == (schedule, 0)


def test_a_run_with_one_stage_has_the_table_it_had(model, tmp_path, world):
    trainer = trainer_of(world, model, tmp_path / "run", stage=2, max_steps=2)
    body = trainer.run()
    shown = trainer.console.file.getvalue()
    assert "stage," not in shown.split("steps, train loss")[1]
    [entry] = body["stages"]
    assert (entry["stage"], entry["from_step"], entry["sent_nbytes"]) == (2, 0, None)
    assert entry["ranks"][0]["parameters_nbytes"] == body["memory_bytes"]["parameters"]


def test_an_entry_at_the_last_step_changes_nothing(model, tmp_path, world):
    body = trainer_of(world, model, tmp_path / "run", max_steps=2, stages={0: 1, 2: 3}).run()
    assert [each["stage"] for each in body["stages"]] == [1]


def test_stages_are_named_from_where_a_run_is():
    assert stages_named({0: 2}) == "stage 2"
    assert stages_named({0: 2, 500: 3, 900: 0}) == "stage 2, 3 after step 500, 0 after step 900"
    assert stages_named({0: 2, 500: 3, 900: 0}, 500) == "stage 3, 0 after step 900"


PLANNED = 10**6
NO_PLAN = dict.fromkeys(("parameters", "gradients", "optimizer", "offloaded", "scratch", "sent"), 0)


@pytest.mark.parametrize(
    ("memory", "alternatives", "goes_on_at", "words"),
    [
        (
            2 * PLANNED,
            {"0": PLANNED + 9, "2": PLANNED - 10**12, "3": PLANNED - 10**13},
            2,
            "stage 2 holds 1000 GB less",
        ),
        (2 * PLANNED, {"2": PLANNED - 10, "3": PLANNED - 30, "0": PLANNED + 9}, 3, "stage 3 holds 30 B less"),
        (2 * PLANNED, {"2": PLANNED, "0": PLANNED + 9}, 1, "and no other stage holds less"),
        (10**15, {"2": PLANNED - 10**12}, 1, ""),
        (1, {}, 1, ""),
    ],
    ids=["the best that fits", "none fits: the least", "none holds less", "within the budget", "nothing was chosen"],
)
def test_a_stage_that_was_chosen_and_holds_more_than_it_may_is_changed_after_three_steps(
    memory, alternatives, goes_on_at, words, model, tmp_path
):
    plan = NO_PLAN | {"stage": 1, "peak": PLANNED, "memory": memory, "alternatives": alternatives}
    facts = {"stage": 1, "overrides": [], "config_hash": "", "memory_bytes": {"planned": plan}}
    policy = CheckpointPolicy(every_steps=5, at_end=False, keep=None)

    def run(world, folder, **changes):
        screen = io.StringIO()
        console = Console(file=screen, width=200)
        return trainer_of(world, model, folder, stage=1, console=console, **changes).run(), screen.getvalue()

    [(wanted, _), _], _ = run_threads(partial(run, folder=tmp_path / "fixed"), 2)
    given = {"folder": tmp_path / "chosen", "run_facts": facts, "checkpoint": policy}
    [(got, shown), _], _ = run_threads(partial(run, **given), 2, late_rank=1)
    assert got["weights_sha256"] == wanted["weights_sha256"]
    stages = {0: 1} if goes_on_at == 1 else {0: 1, 3: goes_on_at}
    assert {each["from_step"]: each["stage"] for each in got["stages"]} == stages
    assert ("a rank held" in shown, words in shown) == (bool(words), True)
    resumed = CheckpointPolicy(resume=[tmp_path / "chosen" / "checkpoints" / "step-00000005"], at_end=False)
    [(again, _), _], _ = run_threads(partial(run, folder=tmp_path / "again", checkpoint=resumed), 2)
    assert (again["stage"], again["weights_sha256"]) == (goes_on_at, wanted["weights_sha256"])
