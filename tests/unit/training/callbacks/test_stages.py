"""The stage of a run changes between two steps, by a schedule, and nothing of what is trained does."""

import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.training import runs
from tests.unit.training.runs import lines_without_times as lines_of
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.comm.world import World
from zerotrain.config.schema import Config, ZeroGroup
from zerotrain.data import SyntheticTokens
from zerotrain.launching.job import Job
from zerotrain.launching.resuming import going_on
from zerotrain.models import GPT
from zerotrain.training import Trainer, warmup_cosine
from zerotrain.training.callbacks import stages as control_module
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.stages import Control, stage_at, stages_from
from zerotrain.training.request import Request

CHANGES = "`zero.schedule` changes the stage in mid-run"
CONTROL = "`control.yaml` asks for a stage, a save or a stop"
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


def trainer_of(world, tied_model, folder: Path, *, stage: int = 0, kind: str = "fp32", zero=None, **changes) -> Trainer:
    """Of twelve steps, with clipping, an evaluation every four, and two micro-batches in a step."""
    zero = {"stage": stage, "bucket_mb": 0.02} | (zero or {})
    given = {"zero": zerotrain.ZeroConfig(**zero), "max_grad_norm": 0.5} | KINDS[kind]
    arguments = {
        "dataset": SyntheticTokens(seq_len=8, vocab_size=16, num_sequences=120),
        "schedule": partial(warmup_cosine, warmup_steps=2),
        "max_steps": 12,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "eval_every": 4,
        "eval_batches": 1,
        "run_facts": {"stage": stage, "overrides": [], "config_hash": ""},
        "console": Console(file=io.StringIO(), width=80),
    }
    engine = zerotrain.build_engine(tied_model(kind), world=world, **given)
    return runs.trainer_of(engine, folder, **arguments | changes)


def run_on_a_rank(world, tied_model, folder: Path, *, width: int, **changes) -> tuple[dict[str, Any], str]:
    """The result of such a run, and what it said."""
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    return trainer_of(world, tied_model, folder, console=console, **changes).run(), screen.getvalue()


@pytest.fixture
def tied_model():
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


def without_changes(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "stage" not in line]


@pytest.mark.case(
    "checkpoints",
    "`zero.schedule` changes the stage in mid-run",
    "the run at one stage: weights, losses, lines of metrics.jsonl",
)
@pytest.mark.parametrize(("kind", "size"), list(zip(KINDS, (2, 3, 2, 2), strict=True)))
def test_a_run_that_changes_its_stage_every_two_steps_is_the_run_at_one_stage(kind, size, tied_model, tmp_path):
    run = partial(run_on_a_rank, tied_model=tied_model, kind=kind, width=80)
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
    under=CHANGES,
)
@pytest.mark.parametrize("saved_at", [5, 6])
def test_a_run_stopped_between_two_changes_or_at_one_goes_on_at_the_stage_of_its_step(saved_at, tied_model, tmp_path):
    policy = CheckpointPolicy(every_steps=saved_at, at_end=False, keep=None)

    def run(world, folder, **changes):
        return trainer_of(world, tied_model, folder, stages=ROUND, **changes).run()

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
    under=CHANGES,
)
def test_a_run_goes_on_by_the_schedule_of_now_and_a_stage_without_a_step_is_none_of_the_run(
    tied_model, tmp_path, world
):
    """The run was saved at the step of a change, or before, and goes on by a schedule without it."""
    policy = CheckpointPolicy(every_steps=3, keep=None)
    wanted = trainer_of(world, tied_model, tmp_path / "first", checkpoint=policy, stages={0: 2, 6: 3}).run()
    for step, later, stages in (
        (6, {6: 1}, [(0, 2), (6, 1)]),
        (6, {}, [(0, 2)]),
        (6, {9: 0}, [(0, 2), (9, 0)]),
        (3, {2: 1, 9: 0}, [(0, 2), (3, 1), (9, 0)]),
    ):
        policy = CheckpointPolicy(resume=[tmp_path / f"first/checkpoints/step-{step:08d}"])
        second = trainer_of(world, tied_model, tmp_path / "second", checkpoint=policy, stages={0: 2} | later)
        body = second.run()
        assert body["weights_sha256"] == wanted["weights_sha256"]
        assert [(each["from_step"], each["stage"]) for each in body["stages"]] == stages
    assert "memory  stage 1, 0 after step 9, kB of a rank" in second.console.file.getvalue()
    # The first part was never measured: its run saved in mid-stage.
    assert [each["ranks"] is None for each in body["stages"]] == [True, False, False]


@pytest.mark.case(
    "checkpoints",
    "where control.yaml has asked for another stage, or the newest manifest is damaged",
    "built at that stage; or at the stage of the newest readable manifest",
    under=CHANGES,
)
def test_the_stage_of_the_step_that_a_run_goes_on_at_is_known_from_its_checkpoint(tied_model, tmp_path, world):
    """Before its ranks build an engine: with `zero.schedule={0: 0, 500: 3}` they built one at stage 0 to go on at step
    600, and a model that fits at stage 3 alone could not go on (2026-11-22)."""
    schedule, run_dir = {0: 2, 6: 3}, tmp_path / "run"

    def ask(step: int) -> None:
        if step == 3:
            (run_dir / "control.yaml").write_text("stage: 1\n")

    policy = CheckpointPolicy(every_steps=2, at_end=False, keep=None)
    trainer = trainer_of(world, tied_model, run_dir, stages=schedule, max_steps=8, begin=ask, checkpoint=policy)
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


PLANNED = 10**6
NO_PLAN = dict.fromkeys(("parameters", "gradients", "optimizer", "offloaded", "scratch", "sent"), 0)


@pytest.mark.parametrize(
    ("memory", "alternatives", "goes_on_at", "words"),
    [
        (2 * PLANNED, {"0": PLANNED + 9, "2": PLANNED - 10**12, "3": PLANNED - 10**13}, 2, "holds 1000 GB less"),
        (2 * PLANNED, {"2": PLANNED - 10, "3": PLANNED - 30, "0": PLANNED + 9}, 3, "stage 3 holds 30 B less"),
        (2 * PLANNED, {"2": PLANNED, "0": PLANNED + 9}, 1, "and no other stage holds less"),
        (10**15, {"2": PLANNED - 10**12}, 1, ""),
        (1, {}, 1, ""),
    ],
    ids=["the best that fits", "none fits: the least", "none holds less", "within the budget", "nothing was chosen"],
)
def test_a_stage_that_was_chosen_and_holds_more_than_it_may_is_changed_after_three_steps(
    memory, alternatives, goes_on_at, words, tied_model, tmp_path
):
    plan = NO_PLAN | {"stage": 1, "peak": PLANNED, "memory": memory, "alternatives": alternatives}
    facts = {"stage": 1, "overrides": [], "config_hash": "", "memory_bytes": {"planned": plan}}
    policy = CheckpointPolicy(every_steps=5, at_end=False, keep=None)

    run = partial(run_on_a_rank, tied_model=tied_model, stage=1, width=200)
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


# What an operator asks of a run that is under way.


@pytest.fixture
def run(make_trainer: Callable[..., Any], tmp_path: Path, screen: Any) -> Callable[..., tuple[Any, Any, str]]:
    """Runs twelve steps, of which some begin with a text in control.yaml; (trainer, result, what was answered)."""

    def begin(asked: dict[int, str], name: str = "run", **changes: Any) -> tuple[Any, Any, str]:
        run_dir = tmp_path / name
        control = run_dir / "control.yaml"

        def write(step: int) -> None:
            if step in asked:
                control.write_text(asked[step])

        engine = zerotrain.build_engine(runs.tiny_gpt(), optimizer=runs.ADAMW)
        settings = {"engine": engine, "run_dir": run_dir, "max_steps": 12, "begin": write}
        trainer = make_trainer(**settings | {"checkpoint": CheckpointPolicy(at_end=False, keep=None)} | changes)
        body = trainer.run()
        return trainer, body, control.read_text() if control.exists() else ""

    return begin


@pytest.mark.case(
    "stopping",
    "`control.yaml` asks for a stage, a save or a stop",
    "done after the step, to the same bits; answered in the file and the log; a run that goes on keeps the stage",
)
def test_a_stage_that_is_asked_for_is_that_of_the_next_step_and_the_bits_are_those_of_any(run, screen):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({3: "stage: 3\n", 7: "stage: 0\n"})
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert [(each["stage"], each["from_step"]) for each in body["stages"]] == [(2, 0), (3, 3), (0, 7)]
    assert yaml.safe_load(answer) == {"answer": ["stage: 0 after step 7"]}
    assert "control.yaml: stage: 3 after step 3" in screen.getvalue()
    assert trainer.engine.options.zero.stage == 0


def test_what_is_asked_for_holds_until_the_next_entry_of_the_schedule_and_over_one_of_its_own_step(run):
    _, body, _ = run({4: "stage: 3\n", 6: "stage: 0\n"}, stages={0: 2, 6: 1, 9: 2})
    assert [(each["stage"], each["from_step"]) for each in body["stages"]] == [(2, 0), (3, 4), (0, 6), (2, 9)]


@pytest.mark.case("stopping", "`control.yaml` asks for a stage, a save or a stop")
def test_a_save_is_made_once(run):
    trainer, _, answer = run({5: "save: now"})
    assert [path.name for path in (trainer.run_dir / "checkpoints").iterdir()] == ["step-00000005"]
    assert yaml.safe_load(answer) == {"answer": ["save: step-00000005 is written beside the training"]}


@pytest.mark.case("stopping", "`control.yaml` asks for a stage, a save or a stop")
def test_a_stop_saves_and_the_run_goes_on_at_the_stage_that_was_asked_for(run, make_trainer):
    _, wanted, _ = run({}, "whole")
    trainer, body, answer = run({4: "stop: true\nstage: 1\n"})
    assert (body["status"], body["stopped_by"], body["steps"]) == ("stopped", "control.yaml", 4)
    assert len(yaml.safe_load(answer)["answer"]) == 2
    newest = trainer.run_dir / "checkpoints/step-00000004"
    again, body, _ = run({}, "again", checkpoint=CheckpointPolicy(at_end=False, resume=[newest]))
    assert body["weights_sha256"] == wanted["weights_sha256"]
    assert again.engine.options.zero.stage == 1


@pytest.mark.case(
    "stopping",
    "what cannot be, or no yaml",
    "answered; the run goes on",
    under=CONTROL,
)
def test_what_cannot_be_is_answered_and_the_run_goes_on_to_its_bits(run, screen):
    _, wanted, _ = run({}, "whole")
    _, body, answer = run({1: "", 2: "stage: [3", 4: "answer: [done]\n", 6: "stage: 7", 8: "stage: 3\nsave: later\n"})
    assert (body["status"], body["weights_sha256"]) == ("completed", wanted["weights_sha256"])
    assert [each["stage"] for each in body["stages"]] == [2, 3]
    assert yaml.safe_load(answer) == {"answer": ["stage: 3 after step 8", "save: got 'later'; it must be now"]}
    assert "\ncontrol.yaml: stage: got 7; it must be 0, 1, 2 or 3\n" in screen.getvalue()
    assert screen.getvalue().count("\ncontrol.yaml: ") == 3


@pytest.fixture
def control(tmp_path: Path, world: World, screen: io.StringIO) -> Control:
    return Control(tmp_path / "control.yaml", world, Console(file=screen, width=1000))


UNREADABLE = {
    "a tag that runs something": ("a: !!python/object/apply:os.system [ls]", "it cannot be read: line 1 has a tag (!)"),
    "an alias of nothing": ("stage: *x", "it cannot be read: line 1 has an anchor (&) or an alias (*)"),
    "depth": ("[" * 2000, "it cannot be read: its lists and mappings are nested more than 64 deep"),
    "two of a name": ("stage: 1\nstage: 3", "it cannot be read: stage is there twice"),
    "no text": (b"stage: \xff\xfe", "it cannot be read: 'utf-8' codec can't decode byte 0xff"),
    "true for a number": ("stage: true", "stage: got True; it must be 0, 1, 2 or 3"),
    "another name": ("stagee: 3", "stagee: there is no such request; there are stage: 0 to 3, save: now, stop: true"),
    "a word": ("stage", "it has no key and value; write stage: 0 to 3, save: now, stop: true"),
    "a half of a character": ('stage: "\\ud800"', "stage: got '\\ud800'; it must be 0, 1, 2 or 3"),
    "escapes of a terminal": ('"\\e[2J\\u202e": 3', "\\x1b[2J\\u202e: there is no such request"),
    "a line that forges another": ('"a\\nanswer": 3', "a\\nanswer: there is no such request"),
    "a long text": ("stage: " + "x" * 60_000, "stage: got 'xxxxxxxx"),
    "200 MB": (None, "it cannot be read: it has more than the 65,536 bytes that are allowed here; write stage"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_whatever_it_holds_is_answered_in_yaml_that_a_terminal_can_take(control, tmp_path, screen, case):
    content, said = UNREADABLE[case]
    path = tmp_path / "control.yaml"
    if content is None:
        path.touch()
        os.truncate(path, 200 * 10**6)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert control.ask(None) == Request()
    control.after_step(SimpleNamespace(step=1), None)
    [answer] = yaml.safe_load(path.read_text())["answer"]
    assert answer.startswith(said)
    assert answer.isprintable()
    assert len(answer) < 700
    assert screen.getvalue() == f"control.yaml: {answer}\n"
    assert control.ask(None) == Request()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "it is a FIFO, and must be a regular file"),
        (lambda path: path.symlink_to("nothing"), "No such file or directory"),
    ],
)
def test_what_is_no_file_is_answered_in_its_place_and_nobody_waits(control, tmp_path, make, said):
    path = tmp_path / "control.yaml"
    make(path)
    assert control.ask(None) == Request()
    control.after_step(SimpleNamespace(step=1), None)
    said = f"it cannot be read: {said}; write stage: 0 to 3, save: now, stop: true"
    assert yaml.safe_load(path.read_text()) == {"answer": [said]}
    assert path.is_file()
    assert not path.is_symlink()
    assert control.ask(None) == Request()


def test_a_folder_is_answered_in_the_log_once_and_stays(control, tmp_path, screen):
    path = tmp_path / "control.yaml"
    path.mkdir()
    for step in range(1, 4):
        assert control.ask(None) == Request()
        control.after_step(SimpleNamespace(step=step), None)
    assert path.is_dir()
    refused, warning = screen.getvalue().splitlines()
    assert refused.startswith("control.yaml: it cannot be read: it is a folder, and must be a regular file; write")
    assert warning == f"warning: the answer cannot be written to {path}: Is a directory"
    assert [each.name for each in tmp_path.iterdir()] == ["control.yaml"]


def test_other_ranks_look_at_nothing(tmp_path, screen):
    control = Control(tmp_path / "control.yaml", World(3, 4, 3, torch.device("cpu")), Console(file=screen))
    (tmp_path / "control.yaml").write_text("stage: 3\nnonsense: 1\n")
    assert control.ask(None) == Request()
    control.after_step(SimpleNamespace(step=1), None)
    assert (tmp_path / "control.yaml").read_text() == "stage: 3\nnonsense: 1\n"
    assert screen.getvalue() == ""


def test_a_file_that_changes_while_it_is_read_is_left_for_the_next_look(control, tmp_path, monkeypatch):
    def read(path: Path, *, max_nbytes: int) -> bytes:
        content = real(path, max_nbytes=max_nbytes)
        path.write_text("stage: 1\nsave: now\n")
        return content

    real = control_module.read_regular
    (tmp_path / "control.yaml").write_text("stage: 3\n")
    with monkeypatch.context() as patch:
        patch.setattr(control_module, "read_regular", read)
        assert control.ask(None) == Request()
        control.after_step(SimpleNamespace(step=1), None)
    assert control.ask(None) == Request(stage=1, save=True)
    control.after_step(SimpleNamespace(step=2), None)
    assert len(yaml.safe_load((tmp_path / "control.yaml").read_text())["answer"]) == 2


def test_a_request_that_comes_before_the_answer_to_another_is_done_too(control, tmp_path, screen):
    path = tmp_path / "control.yaml"
    path.write_text("stage: 3\n")
    assert control.ask(None).stage == 3
    path.write_text("stop: true\n")
    control.after_step(SimpleNamespace(step=1), None)
    assert screen.getvalue() == "control.yaml: stage: 3 after step 1\n"
    assert control.ask(None) == Request(stop="control.yaml")
    control.after_step(SimpleNamespace(step=2), None)
    assert yaml.safe_load(path.read_text()) == {"answer": ["stop: after step 2, saved"]}
