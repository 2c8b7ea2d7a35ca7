"""The Trainer on several ranks: the same sequences, losses and text, whatever stage and ranks share the work."""

import functools
import io
import itertools
import json
import re
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import trainer_of
from rich.console import Console
from torch.utils.data import Dataset

import zerotrain
from tests.ranks import run_ranks
from zerotrain.data import TextDataset
from zerotrain.models import GPT
from zerotrain.training import clock as metrics, warmup_cosine

GLOBAL_BATCH_SIZE = 12
SEQ_LEN = 24
NUM_STEPS = 6
TEXT = "".join(f"{number} times {number} is {number * number}.\n" for number in range(150))


class RaggedLabels(Dataset):
    """Another dataset with only the first few labels of each sequence counted, in some none at all."""

    def __init__(self, sequences: Any) -> None:
        self.sequences = sequences

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = self.sequences[index]
        labels[index * 5 % 17 :] = -100
        return ids, labels


def on_ragged_text(
    folder: Path, stage: int, optimizer: Any, **settings: Any
) -> tuple[zerotrain.ZeroEngine, TextDataset]:
    """An engine of four virtual ranks with dropout and clipping, and a text of whose sequences few labels count."""
    dataset = TextDataset(str(folder / "text.txt"), seq_len=SEQ_LEN, cache_dir=str(folder))
    dataset.train = RaggedLabels(dataset.train)
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=settings.pop("bucket_mb", 0.1))
    model = GPT(vocab_size=256, max_seq_len=SEQ_LEN, num_layers=2, num_heads=2, hidden_size=32, dropout=0.1)
    own = {"zero": zero, "max_grad_norm": 0.5, "virtual_ranks": 4}
    return zerotrain.build_engine(model, optimizer=optimizer, **own, **settings), dataset


def run_stages(stages: tuple[int, ...], *arguments: Any) -> list[dict[str, Any]]:
    return [run_stage(stage, *arguments) for stage in stages]


def run_stage(stage: int, folder: Path, num_micro_batches: int, ragged: bool) -> dict[str, Any]:
    """One run, in which each step takes a second; what this rank returned, wrote and showed of it."""
    metrics.time = types.SimpleNamespace(perf_counter=itertools.count().__next__)
    world = zerotrain.World.current(torch.device("cpu"))
    dataset = TextDataset(str(folder / "text.txt"), seq_len=SEQ_LEN, cache_dir=str(folder))
    if ragged:
        dataset.train, dataset.validation = RaggedLabels(dataset.train), RaggedLabels(dataset.validation)
    torch.manual_seed(0)
    engine = zerotrain.build_engine(
        GPT(vocab_size=256, max_seq_len=SEQ_LEN, num_layers=2, num_heads=2, hidden_size=32),
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.1),
        max_grad_norm=1.0,
        world=world,
    )
    screen = io.StringIO()
    run_dir = folder / f"stage{stage}-rank{world.rank}"
    run_dir.mkdir()
    body = trainer_of(
        engine,
        dataset,
        run_dir,
        schedule=functools.partial(warmup_cosine, warmup_steps=2),
        max_steps=NUM_STEPS,
        micro_batch_size=GLOBAL_BATCH_SIZE // (world.size * num_micro_batches),
        gradient_accumulation_steps=num_micro_batches,
        eval_every=3,
        eval_batches=100,
        sample_tokens=10,
        console=Console(file=screen, width=80),
    ).run()
    lines = [json.loads(line) for file in run_dir.glob("metrics.jsonl") for line in file.read_text().splitlines()]
    return {
        "body": body,
        "files": sorted(path.name for path in run_dir.iterdir()),
        "losses": [line.get("train_loss", line.get("val_loss")) for line in lines],
        "screen": screen.getvalue(),
    }


def train(
    folder: Path, num_ranks: int, num_micro_batches: int, *, ragged: bool, stages: tuple[int, ...] = (0, 1, 2, 3)
) -> list[list[dict[str, Any]]]:
    """The runs at each stage, by rank."""
    folder.mkdir()
    (folder / "text.txt").write_text(TEXT)
    return run_ranks(run_stages, num_ranks, stages, folder, num_micro_batches, ragged)


@pytest.mark.parametrize("ragged", [False, True], ids=["all labels", "ragged labels"])
@pytest.mark.thinned(2, first=1)
def test_the_losses_and_tokens_of_a_run_do_not_depend_on_the_ranks_and_micro_batches_that_share_a_batch(
    tmp_path: Path, ragged: bool
) -> None:
    [[alone]] = train(tmp_path / "alone", 1, 1, ragged=ragged, stages=(0,))
    assert len(alone["losses"]) == NUM_STEPS + 3  # evaluations before, half way and after
    if not ragged:
        assert alone["body"]["tokens_per_s"] == GLOBAL_BATCH_SIZE * SEQ_LEN
    for num_ranks, num_micro_batches in ((2, 1), (2, 3), (4, 1)):
        folder = tmp_path / f"{num_ranks}x{num_micro_batches}"
        [run], *_ = train(folder, num_ranks, num_micro_batches, ragged=ragged, stages=(3,))
        assert run["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert run["body"]["tokens_per_s"] == alone["body"]["tokens_per_s"]


def test_every_stage_ends_with_the_same_weights_losses_and_text_and_only_the_first_rank_writes(
    tmp_path: Path,
) -> None:
    first_rank, second_rank = train(tmp_path / "runs", 2, 2, ragged=True)
    for run in first_rank:
        assert run["files"] == ["metrics.jsonl", "result.json", "steps.jsonl"]
        assert "train loss" in run["screen"]
    for run in second_rank:
        assert (run["files"], run["screen"]) == ([], "")
    for run in first_rank[1:]:
        assert run["body"]["weights_sha256"] == first_rank[0]["body"]["weights_sha256"]
        assert run["losses"] == first_rank[0]["losses"]
        assert sample(run) == sample(first_rank[0])
    assert [run["body"]["weights_sha256"] for run in second_rank] == [
        run["body"]["weights_sha256"] for run in first_rank
    ]


def sample(run: dict[str, Any]) -> str:
    """The generated text, between its two rules."""
    found = re.search(r"of the validation text ─+\n(.*)\n─+\n", run["screen"], re.DOTALL)
    assert found is not None
    return found[1]
