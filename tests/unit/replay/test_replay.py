"""`zerotrain replay`: steps again, to the bit, and what a bad one came from. One run for each precision."""

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from zerotrain.commands import replay
from zerotrain.config.schema import Config
from zerotrain.data import fetch as fingerprint
from zerotrain.run import factory
from zerotrain.training import warmup_cosine

POISONED, MISLABELLED, HUGE = 17, 23, 29
"""Rows."""
LATE = (340, 341)
"""Rows of `Long` that two of its steps after the twentieth take."""
ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-2}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
STEPS, ROWS = 6, 48


class Rows(torch.utils.data.Dataset):
    """(features, labels) of a line with some noise; three rows of them are bad."""

    draws = False

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        features = torch.randn(4, generator=torch.Generator().manual_seed(row))
        label = features.sum().view(1)
        if row == POISONED:
            features = torch.full((4,), math.nan)
        if row == HUGE:
            features = features * 1e5
        return features, label + (1000.0 if row in (MISLABELLED, *LATE) else 0.0)


class Data:
    def __init__(self, length: int = 4) -> None:
        self.train, self.validation = Rows(), torch.utils.data.Subset(Rows(), range(length))


class Long(Data):
    """Rows of which two are bad."""

    def __init__(self) -> None:
        super().__init__()
        self.train = [Rows()[row] for row in range(ROWS, 400)]


class Net(nn.Module):
    """In fp16 the squares of huge features overflow in `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (self.second(self.drop(self.first(features))).float() - labels.float()).square().mean()


def config_of(precision: str = "fp32") -> Config:
    config = Config(model={"_target_": f"{__name__}.Net"}, data={"_target_": f"{__name__}.Data"}, optimizer=ADAMW)
    config.scheduler, config.precision.name = COSINE, precision
    config.train.max_steps, config.train.eval_batches, config.train.sample_tokens = STEPS, 1, 0
    config.train.micro_batch_size, config.train.gradient_accumulation_steps, config.train.virtual_ranks = 2, 2, 2
    config.train.max_grad_norm, config.launch.threads_per_rank, config.checkpoint.every = 1.0, 1, "2"
    config.precision.initial_scale, config.zero.stage = 2.0**10, 3
    return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each precision, whose middle was gone on with at another stage. Three rows tell its data from others."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprint, "_CHEAP_S", 0.0)
        patch.setattr(fingerprint, "_MAX_S", 0.0)
        for precision in ("fp32", "fp16"):
            folder = folders[precision] = tmp_path_factory.mktemp(precision)
            config = config_of(precision)
            config.checkpoint.keep = None
            factory.run(factory.RunSpec(config, folder, []))
            config.zero.stage = 1
            factory.run(factory.RunSpec(config, folder, [], resume_from=[str(folder / "checkpoints/step-00000004")]))
    return folders


def replayed(tmp_path: Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "replay.json"
    code = replay.main([*map(str, arguments), "--trust-code", "--out", str(out)])
    return code, json.loads(out.read_text())


def step_of_row(runs: dict[str, Path], tmp_path: Path, row: int, precision: str = "fp32") -> dict[str, Any]:
    for step in range(1, STEPS + 1):
        code, body = replayed(tmp_path, runs[precision], "--step", step, "--rows")
        assert (code, body["replay"], body["step"], body["recorded"]) == (0, "zerotrain", step, True)
        if row in body["worst"]["rows"]:
            return body
    raise AssertionError(f"row {row} is in no micro-batch that stands out")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("step", [1, 3, STEPS])
def test_a_step_is_as_the_run_recorded_it_from_a_checkpoint_and_from_the_beginning_and_nothing_changes(
    runs: dict[str, Path], step: int, stage: int, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in runs["fp32"].rglob("*") if path.is_file()}
    code, body = replayed(tmp_path, runs["fp32"], "--step", step, f"zero.stage={stage}")
    assert (code, body["differs"], body["from_step"]) == (0, None, 0 if step < 3 else 2 if step == 3 else 4)
    lines = [json.loads(each) for each in (runs["fp32"] / "steps.jsonl").read_text().splitlines()]
    [recorded] = [each for each in lines if each["step"] == step and "start" not in each]
    assert {name: body[name] for name in recorded if name != "step"} == {
        name: value for name, value in recorded.items() if name != "step"
    }
    assert {path: path.read_bytes() for path in runs["fp32"].rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("precision", "row", "told"),
    [
        ("fp32", POISONED, "the input of first (Linear) in the forward"),
        ("fp16", HUGE, "first (Linear) in the forward"),
        ("fp32", MISLABELLED, None),
    ],
)
def test_the_row_and_the_module_behind_a_bad_step_are_named(runs, precision, row, told, tmp_path) -> None:
    body = step_of_row(runs, tmp_path, row, precision)
    assert body["skipped"] is (told is not None)
    assert told is None or told in body["nonfinite"]
    alone = {each["row"]: each["alone"]["grad_norm"] for each in body["rows"]}
    assert alone[row] is None if told is not None else alone[row] == max(alone.values())
    others = [norm for each, norm in alone.items() if each != row]
    assert None not in others


def test_the_worst_step_is_the_first_that_was_not_finite_and_its_batch_can_be_kept(runs, tmp_path) -> None:
    batch = tmp_path / "batch.safetensors"
    code, body = replayed(tmp_path, runs["fp32"], "--worst", "--save-batch", batch)
    assert code == 0
    assert body["skipped"]
    assert POISONED in body["worst"]["rows"]
    features = load_file(batch)["0"]
    expected = torch.stack([Rows()[row][0] for row in body["worst"]["rows"]])
    torch.testing.assert_close(features, expected, rtol=0, atol=0, equal_nan=True)


def test_a_run_says_the_command_as_a_step_stands_out_and_the_command_finds_the_row(tmp_path, capsys) -> None:
    config = config_of()
    config.data, config.train.max_steps = {"_target_": f"{__name__}.Long"}, 44
    (tmp_path / "run").mkdir()
    factory.run(factory.RunSpec(config, tmp_path / "run", []))
    lines = [each for each in capsys.readouterr().out.splitlines() if "stands out" in each]
    lines_of_record = (tmp_path / "run/steps.jsonl").read_text().splitlines()[1:]
    losses = [json.loads(each)["loss"] for each in lines_of_record]
    step, again = (number for number, loss in enumerate(losses, 1) if loss > 1e4)
    assert 20 < step < again
    assert len(lines) == 1, "the second comes too soon after the first"
    assert lines[0].startswith(f"step {step}: ")
    assert lines[0].endswith(f"which rows: zerotrain replay {tmp_path / 'run'} --step {step}")
    for asked, found in ((["--worst"], (step, again)), (["--step", step], (step,))):
        code, body = replayed(tmp_path, tmp_path / "run", *asked)
        assert (code, body["differs"]) == (0, None)
        assert body["step"] in found
        assert {row - ROWS for row in LATE} & set(body["worst"]["rows"])


def test_the_first_step_that_differs_is_named_and_what_is_different_here(runs, tmp_path, capsys) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(runs["fp32"], folder)
    lines = [json.loads(each) for each in (folder / "steps.jsonl").read_text().splitlines()]
    for each in lines:
        each.get("start", {})["torch"] = "2.11.0"
        if each["step"] == 5 and "start" not in each:
            each["update"] = "0" * 16
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    assert replayed(tmp_path, folder, "--step", 4)[0] == 0
    code, body = replayed(tmp_path, folder, "--step", 6)
    assert code == 1
    assert body["differs"].startswith("step 5 differs: update: recorded '0000000000000000', now ")
    assert body["causes"] == [f"torch: 2.11.0 in the run, {torch.__version__} here"]
    assert "step 5 differs" in capsys.readouterr().out


def test_threads_and_settings_that_were_others_are_named(runs: dict[str, Path], tmp_path: Path) -> None:
    """As if the run had been gone on with from step 4 at another rate and with other threads."""
    folder = tmp_path / "copy"
    shutil.copytree(runs["fp32"], folder)
    shutil.rmtree(folder / "checkpoints/step-00000004")
    lines = [json.loads(each) for each in (folder / "steps.jsonl").read_text().splitlines()]
    for each in lines:
        if "start" in each and each["step"] == 4:
            each["start"]["threads"] = 7
            each["start"]["settings"]["optimizer"]["lr"] = 0.5
            each["start"]["settings"]["train"]["max_grad_norm"] = None
        if "start" not in each and each["step"] == 5:
            each["loss"] = 0.25
    (folder / "steps.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    code, body = replayed(tmp_path, folder, "--step", 4, "--around", 1)
    assert code == 1
    assert body["differs"].startswith("step 5 differs: loss: recorded 0.25, now ")
    assert body["causes"] == [
        "threads: 7 in the run, 1 here",
        "optimizer.lr: 0.5 in the run, 0.01 here",
        "train.max_grad_norm: None in the run, 1.0 here",
    ]
    skipped = {each["step"] for each in lines if each.get("skipped")}
    assert [each["step"] for each in body["around"]] == [3, 4, 5]
    for each in body["around"]:
        done = each["step"] - 1 - sum(step < each["step"] for step in skipped)
        assert each["lr"] == pytest.approx(1e-2 * warmup_cosine(done, STEPS, warmup_steps=2, final_fraction=0.1))


def test_a_row_that_has_changed_is_the_cause_that_is_left(runs, tmp_path, monkeypatch, capsys) -> None:
    _, body = replayed(tmp_path, runs["fp32"], "--step", 4)
    changed = body["worst"]["rows"][0]
    assert changed > 3, "none of the validation, whose first items are in the fingerprint"
    given = Rows.__getitem__

    def row_of(self: Rows, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        features, label = given(self, row)
        return features, label + (1e-3 if row == changed else 0)

    monkeypatch.setattr(Rows, "__getitem__", row_of)
    code, body = replayed(tmp_path, runs["fp32"], "--step", 6)
    assert code == 0, "begins behind it"
    code, body = replayed(tmp_path, runs["fp32"], "--step", 4)
    assert (code, body["causes"]) == (1, [])
    assert body["differs"].startswith("step 4 differs: loss: ")
    told = " ".join(capsys.readouterr().out.split())
    assert "its rows, or the code of the model or the data, are not as they were" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--step", "0"], "--step: got 0; it must be 1 or more"),
        (["--step", "9"], "--step: got 9; the run has recorded 6 steps; give one of them, or the next"),
        (["--step", "7"], "--step: got 7; the run has 6 steps"),
        (["--step", "2", "train.max_steps=9"], "train.max_steps=9: has no effect on a replay"),
        (["--step", "2", "zero.stag=9"], "zero.stag=9: is no setting with a value of this run"),
        (["--step", "2", "--around", "-1"], "--around: got -1; it must be 0 or more steps"),
        (["--step", "2", "data.length=5"], "data: validation rows: 4 in the run, 5 here; items of validation: "),
    ],
)
def test_wrong_input_is_answered_in_one_line(runs, arguments, told, tmp_path, capsys) -> None:
    code = replay.main([str(runs["fp32"]), *arguments, "--trust-code", "--out", str(tmp_path / "r.json")])
    [line] = capsys.readouterr().err.splitlines()
    assert code == 2
    assert line.startswith(told), line
    assert not (tmp_path / "r.json").exists()


@pytest.mark.parametrize("option", ["--out", "--save-batch"])
def test_a_file_of_a_user_stays_and_what_cannot_be_written_is_refused_before_a_step_is_computed(
    runs: dict[str, Path],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replay, "replay", None)
    theirs, link = tmp_path / "theirs.json", tmp_path / "link"
    theirs.write_text('{"replay": 1}')
    link.symlink_to("nowhere")
    why = {theirs: "is there already; give a new name"}
    why[tmp_path / "no/such"] = "cannot be written: No such file or directory; give a file in a folder"
    for path in (*why, link, tmp_path, "/proc/x", "x" * 300):
        arguments = [str(runs["fp32"]), "--step", "2", "--trust-code", option, str(path)]
        assert replay.main(arguments) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{option}: got {path}, which {why.get(path, '')}")
    assert theirs.read_text() == '{"replay": 1}'
    assert {each.name for each in tmp_path.iterdir()} == {"theirs.json", "link"}


def test_a_batch_that_no_package_can_write_is_refused_before_anything_is_computed(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    arguments = ["--step", "2", "--save-batch", str(tmp_path / "b"), "--trust-code"]
    assert replay.main([str(runs["fp32"]), *arguments]) == 2
    told = "--save-batch needs safetensors, which is not installed; pip install 'zerotrain[hf]'\n"
    assert capsys.readouterr() == ("", told)


def test_a_run_without_record_and_a_damaged_checkpoint(runs, tmp_path, capsys) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(runs["fp32"], folder)
    [tensors, *_] = sorted((folder / "checkpoints/step-00000004").glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-8])
    code, body = replayed(tmp_path, folder, "--step", 5)
    assert (code, body["from_step"]) == (0, 2)
    assert "skipped a checkpoint" in capsys.readouterr().out
    (folder / "steps.jsonl").unlink()
    assert replay.main([str(folder), "--step", "2", "--trust-code", "--out", str(tmp_path / "r.json")]) == 2
    assert "the oldest checkpoint is of step 2" in capsys.readouterr().err
    code, body = replayed(tmp_path, folder, "--step", 3)
    assert (code, body["recorded"]) == (0, False)
