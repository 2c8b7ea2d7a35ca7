"""One rank of a run, in a process of its own: from a config to result.json."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.configs import ADAMW, GPT, SYNTHETIC, Rows, config, config_with
from zerotrain.comm.world import World
from zerotrain.commands.evaluate import evaluate
from zerotrain.config.schema import CheckpointConfig, Config, ZeroGroup
from zerotrain.errors import ConfigError, TrainingError
from zerotrain.preflight import check as preflight
from zerotrain.run import factory
from zerotrain.run.factory import RHYTHMS, require_rhythms, rhythms_in_steps


def run(folder: Path, **groups: Any) -> dict[str, Any]:
    settings = config(**groups)
    settings.train.max_steps = 2
    settings.train.eval_batches = 1
    folder.mkdir(exist_ok=True)
    return factory.run(factory.RunSpec(settings, folder, ["train.max_steps=2"]))


def test_mfu_counts_no_operation_that_is_made_twice_to_save_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(factory, "device_peak_flops", lambda device, dtype: 1e12)
    model = GPT | {"num_layers": 2}
    plain = run(tmp_path / "plain", model=model)
    recomputed = run(tmp_path / "recomputed", model=model | {"activation_checkpointing": True})
    assert plain["weights_sha256"] == recomputed["weights_sha256"]
    assert plain["mfu"] / plain["tokens_per_s"] == pytest.approx(recomputed["mfu"] / recomputed["tokens_per_s"])


@pytest.mark.case(
    "checkpoints",
    "and it goes on at step 600 of `{0: 0, 500: 3}`",
    under="`zero.schedule` changes the stage in mid-run",
)
def test_an_engine_is_built_at_the_stage_that_it_goes_on_at(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """It was built at the first stage of the schedule and then changed (2026-11-22)."""
    settings = config(
        zero=ZeroGroup(schedule={0: 0, 2: 3}), checkpoint=CheckpointConfig(every="3", save_at_end=False, keep=None)
    )
    settings.train.max_steps, settings.train.eval_batches = 4, 1
    whole = factory.run(factory.RunSpec(settings, tmp_path, []))
    path = str(tmp_path / "checkpoints/step-00000003")
    for stage, is_changed in ((3, False), (1, True)):
        capsys.readouterr()
        again = factory.run(factory.RunSpec(settings, tmp_path, [], resume_from=[path], stage=stage))
        assert again["weights_sha256"] == whole["weights_sha256"]
        assert again["stage"] == 3
        assert (f"stage {stage} -> 3 after step 3: sent" in capsys.readouterr().out) == is_changed


def test_what_the_engine_refuses_is_said_in_words_of_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.compile=true: works unit by unit, and GPT has no repeated blocks"):
        run(tmp_path, model=GPT | {"compile": True})


@pytest.mark.case(
    "optimizers",
    "with `decay_all=False`; the launcher's config",
    under="`build_engine(optimizer=partial(AdamW, weight_decay=0.1))`",
)
def test_the_config_decays_matrices_alone_and_the_start_of_a_run_says_so(tmp_path, capsys):
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    decaying = ADAMW | {"weight_decay": 0.1}
    engine = factory.build_engine_of(config(optimizer=decaying), world)
    assert {group["name"]: group["weight_decay"] for group in engine.param_groups} == {"matrices": 0.1, "others": 0.0}
    run(tmp_path, optimizer=decaying)
    assert re.search(r"decay +0\.1 on \d+ matrices \([\d,]+\), 0 on \d+ others", capsys.readouterr().out)


def test_data_that_is_not_what_was_checked_is_refused_by_the_ranks(tmp_path: Path) -> None:
    """Seen: the run's own config.yaml came into the corpus between the check and the ranks."""
    checked = preflight.check(config())
    settings = config(data=SYNTHETIC | {"num_sequences": 65})
    with pytest.raises(ConfigError, match="rows: 64 when it was checked, 65 on all ranks"):
        factory.run(factory.RunSpec(settings, tmp_path, [], data_checked=checked))


class Poisoned(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.weight.sum() * float("nan")


def test_what_training_ends_with_is_said_in_words_of_the_config(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotrain.models.Poisoned", Poisoned, raising=False)
    settings = config(model={"_target_": "zerotrain.models.Poisoned"})
    settings.train.max_skipped_steps, settings.train.eval_batches = 2, 1
    with pytest.raises(TrainingError, match=r"train\.on_nonfinite=skip, train\.max_skipped_steps"):
        factory.run(factory.RunSpec(settings, tmp_path, []))


class Unordered(Poisoned):
    """A model with an operation that has no deterministic variant."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        torch.zeros(4).put_(ids.flatten() % 4, torch.arange(float(ids.numel())))
        return self.weight.sum()


def test_what_has_no_deterministic_variant_stops_a_deterministic_run_by_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr("zerotrain.models.Unordered", Unordered, raising=False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    model = {"_target_": "zerotrain.models.Unordered"}
    assert run(tmp_path / "any", model=model)["status"] == "completed"
    monkeypatch.setitem(os.environ, "CUBLAS_WORKSPACE_CONFIG", ":16:8")
    settings = config(model=model)
    settings.train.deterministic = True
    try:
        with pytest.raises(RuntimeError, match="put_"):
            factory.run(factory.RunSpec(settings, tmp_path, []))
        assert not torch.backends.cudnn.benchmark
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("every", "steps", "seconds"),
    [
        ("100", 100, None),
        ("600s", None, 600.0),
        ("15m", None, 900.0),
        ("2h", None, 7200.0),
        ("0.5epoch", 6, None),
        (None, None, None),
    ],
)
def test_what_is_kept_of_a_run_is_as_the_config_says(every: str | None, steps: int | None, seconds: float | None):
    given = CheckpointConfig(every=every, keep=None, keep_every=7, asynchronous=False, init_from="llama", strict=False)
    config = Config(checkpoint=given)
    in_steps = rhythms_in_steps(config, range(100), num_ranks=1)["checkpoint.every"]
    spec = factory.RunSpec(config, Path(), [], resume_from=["run/checkpoints/step-00000100"])
    policy = factory._policy(spec, in_steps)
    assert (policy.every_steps, policy.every_s) == (steps, seconds)
    assert (policy.keep, policy.keep_every, policy.asynchronous, policy.strict) == (None, 7, False, False)
    assert (policy.resume, policy.init_from) == ([Path("run/checkpoints/step-00000100")], Path("llama"))
    assert policy.at_end
    given.save_at_end = False
    assert not factory._policy(spec, in_steps).at_end


def halving(step: int, max_steps: int, *, times: int = 1) -> float:
    return 0.5 ** (step * times // max_steps)


def test_any_function_may_be_the_schedule(tmp_path: Path) -> None:
    schedule = {"_target_": f"{__name__}.halving", "_partial_": True, "times": 2}
    settings = config(scheduler=schedule)
    settings.train.max_steps, settings.train.log_every, settings.train.eval_every = 4, 1, 0
    preflight.check(settings)
    factory.run(factory.RunSpec(settings, tmp_path, []))
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert [line["lr"] for line in lines if "lr" in line] == [1e-3, 1e-3, 5e-4, 5e-4]


def test_without_validation_nothing_is_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("some words " * 400)
    text = {"_target_": "zerotrain.data.TextDataset", "path": str(tmp_path / "text"), "seq_len": 16}
    settings = config(data=text | {"validation_fraction": 0, "cache_dir": str(tmp_path / "cache")})
    settings.train.max_steps, settings.train.eval_every = 2, 1
    preflight.check(settings)
    result = factory.run(factory.RunSpec(settings, tmp_path, []))
    assert (result["status"], result["steps"], result["final_val_loss"]) == ("completed", 2, None)
    assert "val_loss" not in (tmp_path / "metrics.jsonl").read_text()
    assert "tokens after 16 of the training text" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"^data.validation is empty, so that there is nothing to evaluate on"):
        evaluate(tmp_path)


STOPPING = {"early": {"_target_": "zerotrain.training.callbacks.early_stopping.EarlyStopping", "patience": 2}}


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"callbacks": STOPPING}, "callbacks.early.metric: needs evaluations, and data.validation is empty; give"),
        (
            {"checkpoint": CheckpointConfig(best="val_loss")},
            "checkpoint.best: needs evaluations, and data.validation is empty; give data.validation_fraction=0.1",
        ),
    ],
)
def test_what_needs_a_validation_is_refused_without_one(groups: dict[str, Any], problem: str) -> None:
    preflight.check(config(**groups))
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(data={"_target_": f"{__name__}.Unvalidated"}, **groups))
    [line] = refused.value.problems
    assert line.startswith(problem)


class Unvalidated:
    def __init__(self) -> None:
        self.train = [(torch.arange(16), torch.arange(1, 17))] * 4
        self.validation: list[Any] = []


class Random:
    """Draws what it holds, as many a first dataset does."""

    def __init__(self) -> None:
        self.train = self.validation = [(torch.randn(4), torch.rand(1)) for _ in range(3)]


def test_a_dataset_that_draws_what_it_holds_is_the_same_in_every_process() -> None:
    """It was refused: "it has changed since it was checked"."""
    made = []
    for rank in range(3):
        torch.manual_seed(rank)
        before = torch.get_rng_state()
        settings = config(data={"_target_": f"{__name__}.Random"})
        settings.seed = 0 if rank < 2 else 1
        made.append(torch.stack([part for part, _ in factory.build_data(settings).train]))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])


# The steps that rhythms of epochs and tokens come to.


def rhythms(given: Any, rows: Any = None, num_ranks: int = 1, **train: Any) -> list[int | None]:
    config = config_with(eval_every=given, log_every=given, **train)
    config.checkpoint = CheckpointConfig(every=given if given is None else str(given))
    steps = rhythms_in_steps(config, rows or Rows(), num_ranks)
    return [steps[name] for name in RHYTHMS]


@pytest.mark.parametrize(
    ("given", "others", "steps"),
    [
        (100, {}, 100),
        ("100", {"num_ranks": 8}, 100),
        ("1epoch", {}, 250),
        ("0.1epoch", {}, 25),
        ("0.1 epochs", {"num_ranks": 2}, 12),  # 12.5, to the even one
        ("0.1epoch", {"num_ranks": 4, "virtual_ranks": 1}, 25),
        ("0.1epoch", {"gradient_accumulation_steps": 5}, 5),
        ("0.0001epoch", {}, 1),
        ("1.6e4tokens", {}, 250),
        ("640 tokens", {}, 10),
    ],
)
def test_a_rhythm_comes_to_whole_steps_of_the_global_batch(given: Any, others: dict[str, Any], steps: int) -> None:
    assert rhythms(given, **others) == [steps] * 3


def test_a_time_is_no_number_of_steps_and_nothing_stays_nothing() -> None:
    assert rhythms(None) == [None] * 3
    config = config_with(eval_every=0)
    assert rhythms_in_steps(config, Rows(), 1)["train.eval_every"] == 0
    assert rhythms_in_steps(config, Rows(), 1)["checkpoint.every"] is None


def test_tokens_need_data_that_tells_them_and_each_setting_has_its_line() -> None:
    config = config_with(eval_every="5e6tokens", log_every="0.1epoch")
    config.checkpoint.every = "5tokens"
    with pytest.raises(ConfigError) as refused:
        require_rhythms(config, range(1000), 1)
    why = "the data does not tell how many tokens each of its rows has; give a number of epochs or of steps"
    assert refused.value.problems == (f"train.eval_every=5e6tokens: {why}", f"checkpoint.every=5tokens: {why}")
    config.train.log_every = "never"  # which is told where settings are checked
    require_rhythms(config, range(1000), 1)
