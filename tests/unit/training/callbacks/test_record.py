"""steps.jsonl: a line for each step, exact, and where each was computed."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from zerotrain import TrainingError
from zerotrain.config.schema import Config
from zerotrain.run import factory
from zerotrain.training.callbacks.record import MIN_BEFORE, MIN_SCORE, NUM_BEFORE, Spike, Spikes
from zerotrain.training.result import STEPS_NAME

# Spikes: a number far above those of the steps before it, and nothing else, is told.


def spikes_in(losses: list[Any], norms: list[Any] | None = None) -> dict[int, Spike]:
    """By the index of the step."""
    spikes = Spikes()
    told = [
        spikes.find_in({"loss": loss, "grad_norm": norm})
        for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True)
    ]
    return {step: spike for step, spike in enumerate(told) if spike is not None}


def falling(steps: int, *, seed: int = 0, noise: float = 0.1) -> list[float]:
    """A loss that falls from 10 to 3, with noise."""
    draw = random.Random(seed)
    return [3 + 7 * math.exp(-step / 100) + draw.gauss(0, noise) for step in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.5])
def test_one_step_far_above_the_others_is_told_and_no_other(noise: float) -> None:
    losses = falling(1000, noise=noise)
    assert spikes_in(losses) == {}
    losses[700] += 12 * max(noise, 0.04)
    found = spikes_in(losses)
    assert list(found) == [700]
    assert (found[700].name, found[700].value) == ("loss", losses[700])
    assert found[700].median == sorted(losses[600:700])[50]


def test_the_larger_of_loss_and_norm_is_told() -> None:
    losses, norms = falling(200), falling(200, seed=1)
    losses[150], norms[150], norms[160] = 20.0, 90.0, 60.0
    found = spikes_in(losses, norms)
    assert {step: spike.name for step, spike in found.items()} == {150: "grad_norm", 160: "grad_norm"}


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_what_is_unknown_or_not_finite_is_no_spike_and_moves_no_median(bad: float | None) -> None:
    losses: list[Any] = falling(200)
    losses[100:160] = [bad] * 60
    assert spikes_in(losses) == {}
    losses[170] = 30.0
    assert list(spikes_in(losses)) == [170]


def test_nothing_is_told_of_the_first_steps_of_a_fall_of_a_level_and_of_what_rises_slowly() -> None:
    first = [1.0] * (MIN_BEFORE - 1) + [1e9]
    assert spikes_in(first) == {}
    assert list(spikes_in([1.0] * MIN_BEFORE + [1e9])) == [MIN_BEFORE]
    assert spikes_in([1.0] * 50 + [1.0 + MIN_SCORE * 0.0099]) == {}
    assert spikes_in([100.0] * 50 + [-1e9] + [100.0] * 9) == {}
    assert spikes_in([0.0] * 50 + [1.0]) == {}
    assert spikes_in([1.01**step for step in range(500)]) == {}


def test_a_curve_that_stays_on_a_higher_level_is_told_until_a_quarter_of_the_steps_before_are_of_it() -> None:
    found = spikes_in([1.0] * 200 + [2.0] * 200)
    assert list(found) == list(range(200, 200 + NUM_BEFORE // 4))


ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
TOKENS = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 8, "vocab_size": 16, "num_sequences": 64}
TINY = {"_target_": "zerotrain.models.MLP", "vocab_size": 16, "hidden_size": 8, "context": 2, "num_layers": 1}


def train(folder, max_steps, *, stage=0, lr=0.001, resume=False, on_nonfinite="skip"):
    config = Config(model=TINY, data=TOKENS, optimizer=ADAMW | {"lr": lr}, scheduler=COSINE)
    config.train.max_steps, config.train.eval_batches, config.train.sample_tokens = max_steps, 1, 0
    config.train.micro_batch_size, config.zero.stage, config.train.log_every = 2, stage, 3
    config.train.on_nonfinite = on_nonfinite
    from_ = [str(folder / f"checkpoints/step-{3:08d}")] if resume else []
    folder.mkdir(exist_ok=True)
    factory.run(factory.RunSpec(config, folder, [], resume_from=from_))
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


def test_a_run_that_its_numbers_end_says_the_command_that_explains_the_step(tmp_path: Path, capsys) -> None:
    with pytest.raises(TrainingError):
        train(tmp_path / "run", 9, lr=1e30, on_nonfinite="stop")
    *_, last = (tmp_path / "run" / STEPS_NAME).read_text().splitlines()
    command = f"which rows and module: zerotrain replay {tmp_path / 'run'} --step {json.loads(last)['step'] + 1}"
    assert command in capsys.readouterr().out.replace("\n", "")
