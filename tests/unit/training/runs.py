"""Runs of tiny models: how they are built, and what they leave in their folders."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import Dataset

import zerotrain
from zerotrain.data import SyntheticTokens
from zerotrain.models import GPT
from zerotrain.training import Trainer, constant

SEQ_LEN = 16
VOCAB_SIZE = 32
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
TIMES = (
    "tokens_per_s", "labels_per_s", "samples_per_s", "step_ms_median", "data_wait_ms", "comm_wait_ms", "update_ms",
    "mfu", "train_s", "wall_time_s", "peak_nbytes", "sent_nbytes",
)  # fmt: skip
"""What is measured, and never twice the same."""


class Changed(Dataset):
    """The sequences of others, each passed through a function (row, ids, labels) -> (ids, labels)."""

    def __init__(self, items, change) -> None:
        self.items, self.change = items, change

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.change(row, *self.items[row])


def mask_ends(row, ids, labels):
    """Count only the first few labels of a sequence, another number in each, in some none at all."""
    labels = labels.clone()
    labels[row * 5 % 17 :] = -100
    return ids, labels


class Notebook:
    """A sink that keeps what it gets; `failing` makes its first line its last."""

    def __init__(self, failing=False):
        self.lines, self.is_closed, self.failing = [], False, failing

    def log(self, metrics, step):
        if self.failing:
            raise ConnectionError("nobody listens")
        self.lines.append({"step": step} | metrics)

    def close(self):
        self.is_closed = True


def tiny_gpt(**changes: Any) -> GPT:
    """The same weights each time."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB_SIZE, "max_seq_len": SEQ_LEN, "num_layers": 1, "num_heads": 1, "hidden_size": 16}
    return GPT(**shape | changes)


def trainer_of(engine: zerotrain.ZeroEngine, folder: Path, **changes: Any) -> Trainer:
    """A Trainer of four steps of four sequences in a folder; keywords replace its arguments."""
    folder.mkdir(exist_ok=True)
    arguments = {
        "engine": engine,
        "world": engine.world,
        "dataset": SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, num_sequences=200),
        "schedule": constant,
        "seed": 0,
        "max_steps": 4,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "eval_every": 0,
        "eval_batches": 2,
        "log_every": 1,
        "sample_tokens": 0,
        "run_dir": folder,
        "run_facts": {"stage": 2, "overrides": ["train.max_steps=4"], "config_hash": "abc"},
        "console": Console(quiet=True),
    }
    return Trainer(**arguments | changes)


def lines_in(folder: Path, having: str = "step") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that have a number of this name."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if having in line]


def lines_without_times(folder: Path) -> list[dict[str, Any]]:
    """Its lines without what is measured."""
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines_in(folder)]


def result_in(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result
