"""Metrics of training on several ranks: the digits of one process, after a resume too, and nothing in other steps."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases import run_over, trainer_of
from torch.utils.data import Dataset

import zerotrain
from zerotrain.comm.world import World
from zerotrain.data import GlobalBatchSampler
from zerotrain.models import GPT
from zerotrain.training import Accuracy, Callback, Metric, Perplexity, TorchMetric
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

torchmetrics = pytest.importorskip("torchmetrics")
CLASSES, ROWS, PER_MICRO_BATCH, ACCUMULATED, STEPS, LOG_EVERY = 32, 11, 2, 2, 8, 3


class Masked(Dataset[Any]):
    """Of sequence i the first i // 2 labels count: of two sequences none."""

    draws = False

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(CLASSES, (9,), generator=torch.Generator().manual_seed(index))
        labels = tokens[1:].clone()
        labels[index // 2 :] = -100
        return tokens[:-1], labels


def model_of() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=CLASSES, max_seq_len=8, num_layers=1, num_heads=2, hidden_size=16)


def f1() -> Any:
    return torchmetrics.classification.MulticlassF1Score(CLASSES)


def metrics_of(of: list[str]) -> dict[str, Metric]:
    return {"accuracy": Accuracy(of=of), "f1": TorchMetric(f1(), of=of), "perplexity": Perplexity(of=of)}


class Traffic(Callback):
    """Notes what has gone over the wire in each step, and beside it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def before_step(self, run: Any) -> None:
        step, outside = run.engine.ledger.last_step, run.engine.ledger.outside_steps
        self.seen.append((dict(step.nbytes), dict(step.calls), sum(outside.calls.values())))


def trained(
    folder: Path, name: str, stage: int = 0, lr: float = 0.0, of: list[str] | None = None, resume: Path | None = None,
    virtual_ranks: int | None = None, max_steps: int = STEPS,
) -> tuple[str, list[dict[str, Any]], list[Any]]:  # fmt: skip
    """(hash of the weights, metrics of each line of training, what went over the wire in each step)."""
    world, traffic = World.current(torch.device("cpu")), Traffic()
    engine = zerotrain.build_engine(
        model_of(),
        optimizer=partial(torch.optim.AdamW, lr=lr, weight_decay=0.0),
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.005),
        world=world,
        virtual_ranks=virtual_ranks,
    )
    run_dir = folder / name
    run_dir.mkdir(exist_ok=True)
    body = trainer_of(
        engine, SimpleNamespace(train=Masked(), validation=Masked()), run_dir, seed=3, max_steps=max_steps,
        micro_batch_size=PER_MICRO_BATCH, gradient_accumulation_steps=ACCUMULATED, log_every=LOG_EVERY,
        callbacks={"traffic": traffic, **(metrics_of(of) if of else {})},
        checkpoint=CheckpointPolicy(every_steps=5, at_end=False, resume=[resume] if resume else []),
    ).run()  # fmt: skip
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    shown = ("step", "train_loss", "train_accuracy", "train_f1", "train_perplexity")
    told = [{key: line[key] for key in shown if key in line} for line in lines if "train_loss" in line]
    return body["weights_sha256"], told, traffic.seen


def in_one_process(num_virtual_ranks: int) -> list[dict[str, float]]:
    """The same lines in plain PyTorch and torchmetrics, micro-batch by micro-batch, of weights that stay."""
    model, rows = model_of(), Masked()
    sampler = GlobalBatchSampler(
        num_sequences=ROWS, micro_batch_size=PER_MICRO_BATCH, num_micro_batches=ACCUMULATED, rank=0, num_ranks=1,
        leaves_per_rank=num_virtual_ranks, seed=3,
    )  # fmt: skip
    lines, right, total, loss_sum, score = [], 0, 0, 0.0, f1()
    for step in range(STEPS):
        of_step = sampler.micro_batches(step * sampler.global_batch_size)
        for index in range(ACCUMULATED):
            for read in of_step[index::ACCUMULATED]:
                ids, labels = (torch.stack(each) for each in zip(*(rows[row] for row in read.rows), strict=True))
                counts = labels != -100
                with torch.no_grad():
                    logits, loss = model(ids)[counts], model(ids, labels)
                if counts.any():
                    right += int((logits.argmax(-1) == labels[counts]).sum())
                    loss_sum += loss.double().item() * int(counts.sum())
                    total += int(counts.sum())
                    score.update(logits, labels[counts])
        if step == 0 or (step + 1) % LOG_EVERY == 0 or step + 1 == STEPS:
            values = {"train_accuracy": right / total, "train_f1": float(score.compute())}
            lines.append({"step": step + 1, **values, "train_perplexity": math.exp(loss_sum / total)})
            right, total, loss_sum, score = 0, 0, 0.0, f1()
    return lines


@pytest.mark.case(
    "losses",
    "Metrics of training, over the micro-batches since the last line: accumulated, of uneven labels, some of none",
    "the digits of one process on 1, 2 and 3 ranks, at stages 0 and 3; bits, bytes and collectives of steps as without",
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.thinned(3, first=2)
def test_metrics_of_training_are_those_of_one_process_and_other_steps_send_what_they_did(
    size: int, tmp_path: Path
) -> None:
    wanted = in_one_process(size)
    runs = [("plain", None), ("training", ["training"]), ("both", ["training", "validation"])]
    cases = [{"stage": stage, "of": of, "name": f"{name}{stage}"} for stage in (0, 3) for name, of in runs]
    of_cases = run_over(cases, partial(_of_case, tmp_path), size)
    for (plain, *others), stage in zip((of_cases[:3], of_cases[3:]), (0, 3), strict=True):
        for by_rank in others:
            for (hash_, lines, seen), (plain_hash, plain_lines, plain_seen) in zip(by_rank, plain, strict=True):
                assert hash_ == plain_hash, stage
                assert [line.pop("train_loss") for line in lines] == [line["train_loss"] for line in plain_lines]
                assert lines == wanted, stage
                assert seen == plain_seen


def _of_case(folder: Path, case: dict[str, Any]) -> Any:
    return trained(folder, **case)


def test_they_are_the_same_on_other_ranks_at_another_stage_and_after_a_resume_between_two_lines(tmp_path: Path) -> None:
    """The checkpoint is of step 5, and lines are of steps 3, 6 and 8: what was measured of steps 4 and 5 goes on."""
    common: dict[str, Any] = {"lr": 0.01, "of": ["training"], "virtual_ranks": 4}
    found = []
    for size, stage, goes_on_with in ((1, 0, 4), (2, 3, 1)):
        whole = {"name": f"whole{size}", "stage": stage, **common}
        checkpoint = tmp_path / f"whole{size}" / "checkpoints" / "step-00000005"
        again = {"name": f"again{size}", "stage": 2, "resume": checkpoint, **common}
        for case, num_ranks in ((whole, size), (again, goes_on_with)):
            [[(hash_, lines, _), *_]] = run_over([case], partial(_of_case, tmp_path), num_ranks)
            found.append((hash_, lines))
    assert len({line["train_perplexity"] for line in found[0][1]}) == 4  # it does train
    assert found[1:] == found[:1] * 3
