"""What the settings freeze in a run, and what a run that goes on makes of other settings."""

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import zerotrain
from zerotrain.data import SyntheticTokens
from zerotrain.models import GPT
from zerotrain.training import Trainer, warmup_cosine
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.stages import RunFreezing


def run(
    folder: Path,
    until: dict[str, int | None],
    max_steps: int = 4,
    by_hand: str | None = None,
    resume: Path | None = None,
) -> tuple[zerotrain.ZeroEngine, str]:
    """The engine after a run, and what the run said; what is frozen for good has been so before the engine."""
    torch.manual_seed(0)
    model = GPT(vocab_size=16, max_seq_len=8, num_layers=1, num_heads=1, hidden_size=4)
    dataset = SyntheticTokens(seq_len=8, vocab_size=16, num_sequences=64)
    for name, steps in until.items():
        if steps is None:
            model.get_parameter(name).requires_grad_(False)
    world, told = zerotrain.World.current(torch.device("cpu")), io.StringIO()
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    engine = zerotrain.build_engine(model, optimizer=optimizer, decay_all=False, world=world)
    if by_hand is not None:
        engine.freeze(by_hand)
    folder.mkdir()
    Trainer(
        engine=engine,
        world=world,
        dataset=dataset,
        schedule=warmup_cosine,
        frozen=until,
        seed=0,
        max_steps=4,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        eval_every=0,
        eval_batches=1,
        log_every=1,
        sample_tokens=0,
        run_dir=folder,
        run_facts={"stage": 2, "overrides": [], "config_hash": ""},
        console=Console(file=told, width=200),
        checkpoint=CheckpointPolicy(every_steps=2, keep=None, resume=[] if resume is None else [resume]),
    ).run()
    return engine, told.getvalue()


def frozen(engine: zerotrain.ZeroEngine) -> set[str]:
    return {name for name, parameter in engine.module.named_parameters() if not parameter.requires_grad}


def test_a_run_that_goes_on_follows_other_settings_and_leaves_what_others_have_frozen(tmp_path: Path) -> None:
    engine, told = run(
        tmp_path / "first", {"wpe.weight": None, "wte.weight": 3, "ln_f.bias": 4}, by_hand="blocks.0.ln_1.*"
    )
    by_hand = {"blocks.0.ln_1.weight", "blocks.0.ln_1.bias"}
    assert frozen(engine) == by_hand | {"wpe.weight", "ln_f.bias"}
    assert "1 more parameters train after step 3: 64 elements" in told
    saved = tmp_path / "first/checkpoints/step-00000002"
    extra = json.loads((saved / "manifest.json").read_text())["extra"]["trainer"]["run"]
    assert sorted(extra["frozen"]) == ["ln_f.bias", "wpe.weight", "wte.weight"]

    same, told = run(tmp_path / "same", {"wpe.weight": None, "wte.weight": 3, "ln_f.bias": 4}, resume=saved)
    assert same.weights_sha256() == engine.weights_sha256()
    assert frozen(same) == frozen(engine)
    other, told = run(tmp_path / "other", {"ln_f.weight": None, "wte.weight": 4}, resume=saved)
    assert frozen(other) == by_hand | {"ln_f.weight", "wte.weight"}
    assert "2 more parameters train after step 2: 36 elements" in told
    none, _ = run(tmp_path / "none", {}, resume=saved)
    assert frozen(none) == by_hand


def test_a_run_that_freezes_nothing_or_for_good_changes_nothing_of_its_engine(tmp_path: Path) -> None:
    """Each change cuts the buckets anew, and is told to the other ranks."""
    states: list[Any] = []

    def state_after(until: dict[str, int | None]) -> tuple[bool, dict[str, Any]]:
        torch.manual_seed(0)
        model = GPT(vocab_size=16, max_seq_len=8, num_layers=1, num_heads=1, hidden_size=4)
        for name in until:
            model.get_parameter(name).requires_grad_(False)
        engine = zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2))
        freezing, schedule = RunFreezing(engine, Console(quiet=True), until), engine.schedule
        freezing.start(type("Beginning", (), {"step": 0}))
        freezing.after_step(type("Step", (), {"step": 1, "is_last": False}), None)
        return engine.schedule is schedule, freezing.state_dict()

    states = [state_after({}), state_after({"wpe.weight": None})]
    assert states == [(True, {}), (True, {"frozen": ["wpe.weight"]})]
