"""What the settings freeze in a run, and what a run that goes on makes of other settings."""

import io
import json
from pathlib import Path

from rich.console import Console

import zerotrain
from tests.unit.training.runs import ADAMW, tiny_gpt, trainer_of
from zerotrain.training import warmup_cosine
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy


def run(folder, until, by_hand=None, resume=None):
    """The engine after a run, and what the run said; what is frozen for good has been so before the engine."""
    model, told = tiny_gpt(hidden_size=4), io.StringIO()
    for name in (name for name, steps in until.items() if steps is None):
        model.get_parameter(name).requires_grad_(False)
    engine = zerotrain.build_engine(model, optimizer=ADAMW, decay_all=False)
    if by_hand is not None:
        engine.freeze(by_hand)
    policy = CheckpointPolicy(every_steps=2, keep=None, resume=[] if resume is None else [resume])
    how = {"frozen": until, "schedule": warmup_cosine, "checkpoint": policy}
    trainer_of(engine, folder, console=Console(file=told, width=200), **how).run()
    return engine, told.getvalue()


def frozen(engine: zerotrain.ZeroEngine) -> set[str]:
    return {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}


def test_a_run_that_goes_on_follows_other_settings_and_leaves_what_others_have_frozen(tmp_path: Path) -> None:
    engine, told = run(
        tmp_path / "first", {"wpe.weight": None, "wte.weight": 3, "ln_f.bias": 4}, by_hand="blocks.0.ln_1.*"
    )
    by_hand = {"blocks.0.ln_1.weight", "blocks.0.ln_1.bias"}
    assert frozen(engine) == by_hand | {"wpe.weight", "ln_f.bias"}
    assert "1 more parameters train after step 3: 128 elements" in told
    saved = tmp_path / "first/checkpoints/step-00000002"
    extra = json.loads((saved / "manifest.json").read_text())["extra"]["trainer"]["run"]
    assert sorted(extra["frozen"]) == ["ln_f.bias", "wpe.weight", "wte.weight"]

    same, told = run(tmp_path / "same", {"wpe.weight": None, "wte.weight": 3, "ln_f.bias": 4}, resume=saved)
    assert same.weights_sha256() == engine.weights_sha256()
    assert frozen(same) == frozen(engine)
    other, told = run(tmp_path / "other", {"ln_f.weight": None, "wte.weight": 4}, resume=saved)
    assert frozen(other) == by_hand | {"ln_f.weight", "wte.weight"}
    assert "2 more parameters train after step 2: 68 elements" in told
    none, _ = run(tmp_path / "none", {}, resume=saved)
    assert frozen(none) == by_hand
