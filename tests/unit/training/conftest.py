import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zerotrain
from zerotrain.comm.world import World
from zerotrain.data import SyntheticTokens
from zerotrain.data import fetch as fingerprint
from zerotrain.models import GPT
from zerotrain.training import Trainer, constant

SEQ_LEN = 16
VOCAB_SIZE = 32
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture(autouse=True)
def all_rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that data is told apart by all of its rows, however busy the machine is."""
    monkeypatch.setattr(fingerprint, "_CHEAP_S", 60.0)


@pytest.fixture
def world() -> World:
    return World.current(torch.device("cpu"))


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB_SIZE, max_seq_len=SEQ_LEN, num_layers=2, num_heads=2, hidden_size=32)


@pytest.fixture
def dataset() -> SyntheticTokens:
    return SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, num_sequences=200)


@pytest.fixture
def screen() -> io.StringIO:
    """What the user sees."""
    return io.StringIO()


@pytest.fixture
def make_trainer(world, model, dataset, screen, tmp_path: Path) -> Callable[..., Trainer]:
    """A Trainer of a tiny GPT on counting sequences, in one process; keywords replace its arguments."""

    def make(*, optimizer: Any = ADAMW, **changes: Any) -> Trainer:
        arguments = {
            "world": world,
            "dataset": dataset,
            "schedule": constant,
            "seed": 0,
            "max_steps": 4,
            "micro_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "eval_every": 0,
            "eval_batches": 2,
            "log_every": 1,
            "sample_tokens": 0,
            "run_dir": tmp_path,
            "run_facts": {"stage": 2, "overrides": ["train.max_steps=4"], "config_hash": "abc"},
            "console": Console(file=screen, width=80),
        }
        if "engine" not in changes:
            arguments["engine"] = zerotrain.build_engine(model, optimizer=optimizer, decay_all=False, world=world)
        return Trainer(**arguments | changes)

    return make
