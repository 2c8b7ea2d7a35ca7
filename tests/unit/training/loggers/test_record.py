"""steps.jsonl: a line for each step, exact, and where each was computed."""

import json
from pathlib import Path
from typing import Any

import pytest

from zerotrain import TrainingError
from zerotrain.config.schema import Config
from zerotrain.run import factory
from zerotrain.training.result import STEPS_NAME

ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
TOKENS = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 8, "vocab_size": 16, "num_sequences": 64}
TINY = {"_target_": "zerotrain.models.MLP", "vocab_size": 16, "hidden_size": 8, "context": 2, "num_layers": 1}


def train(
    folder: Path, max_steps: int, *, stage: int = 0, lr: float = 1e-3, resume: bool = False, on_nonfinite: str = "skip"
) -> list[Any]:
    config = Config(model=TINY, data=TOKENS, optimizer=ADAMW | {"lr": lr}, scheduler=COSINE)
    config.train.max_steps, config.train.eval_batches, config.train.sample_tokens = max_steps, 1, 0
    config.train.micro_batch_size, config.zero.stage, config.train.log_every = 2, stage, 3
    config.train.on_nonfinite = on_nonfinite
    from_ = [str(folder / f"checkpoints/step-{3:08d}")] if resume else []
    folder.mkdir(exist_ok=True)
    factory.run(config, folder, overrides=[], config_hash="", resume_from=from_)
    return [json.loads(line) for line in (folder / STEPS_NAME).read_text().splitlines()]


def test_each_step_has_its_line_once_and_each_start_too_at_another_stage_and_rate(tmp_path: Path) -> None:
    first = train(tmp_path / "run", 3)
    (tmp_path / "run" / STEPS_NAME).open("a").write('{"step": 4, "loss": 1.0}\n{"step": 5, "lo')
    lines = train(tmp_path / "run", 6, stage=3, lr=2e-3, resume=True)
    assert [(each["step"], "start" in each) for each in lines] == [
        (0, True), *((step, False) for step in (1, 2, 3)), (3, True), *((step, False) for step in (4, 5, 6))
    ]  # fmt: skip
    assert lines[: len(first)] == first
    starts = [each["start"]["settings"] for each in lines if "start" in each]
    assert [(each["zero"]["stage"], each["optimizer"]["lr"]) for each in starts] == [(0, 1e-3), (3, 2e-3)]
    assert starts[0]["train"]["virtual_ranks"] == 1
    metrics = [json.loads(each) for each in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    logged = {each["step"]: each for each in metrics if "train_loss" in each}
    by_step = {each["step"]: each for each in lines if "start" not in each}
    for step, of_step in logged.items():
        assert (by_step[step]["loss"], by_step[step]["grad_norm"]) == (of_step["train_loss"], of_step["grad_norm"])
    hashes = [each["update"] for each in by_step.values()]
    assert len(set(hashes)) == 6
    assert all(len(each) == 16 for each in hashes)


@pytest.mark.parametrize("changed", ["stage", "lr"])
def test_the_hash_of_an_update_follows_from_the_rates_and_from_no_stage(changed: str, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", 2)
    other = train(tmp_path / "other", 2, **{"stage": {"stage": 3}, "lr": {"lr": 2e-3}}[changed])
    assert (plain[1] == other[1]) is (changed == "stage")
    assert plain[1]["grad_norm"] == other[1]["grad_norm"]
    assert (plain[1]["update"] == other[1]["update"]) is (changed == "stage")


def test_a_run_that_its_numbers_end_says_the_command_that_explains_the_step(tmp_path: Path, capsys) -> None:
    with pytest.raises(TrainingError):
        train(tmp_path / "run", 9, lr=1e30, on_nonfinite="stop")
    *_, last = (tmp_path / "run" / STEPS_NAME).read_text().splitlines()
    command = (
        f"which rows and module: python -m zerotrain replay {tmp_path / 'run'} --step {json.loads(last)['step'] + 1}"
    )
    assert command in capsys.readouterr().out.replace("\n", "")
