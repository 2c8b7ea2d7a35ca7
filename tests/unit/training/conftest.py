import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import zerotrain
from tests.unit.training.runs import ADAMW, SEQ_LEN, VOCAB_SIZE, tiny_gpt, trainer_of
from zerotrain.comm.world import World
from zerotrain.data import SyntheticTokens, fetch as fingerprint
from zerotrain.models import GPT
from zerotrain.training import Trainer


@pytest.fixture(autouse=True)
def all_rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that data is told apart by all of its rows, however busy the machine is."""
    monkeypatch.setattr(fingerprint, "_CHEAP_S", 60.0)


@pytest.fixture
def world() -> World:
    return World.current(torch.device("cpu"))


@pytest.fixture
def model() -> GPT:
    return tiny_gpt(num_layers=2, num_heads=2, hidden_size=32)


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

    def make(*, optimizer: Any = ADAMW, engine: Any = None, run_dir: Path = tmp_path, **changes: Any) -> Trainer:
        engine = engine or zerotrain.build_engine(model, optimizer=optimizer, decay_all=False, world=world)
        console = Console(file=screen, width=80)
        return trainer_of(engine, run_dir, **{"dataset": dataset, "world": world, "console": console} | changes)

    return make
