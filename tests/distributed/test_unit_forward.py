"""Checkpointed units: the same bits at every stage. Compiled ones: tests/bits."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cases import OPTIMIZERS, SEQ_LEN, VOCAB, batch, micro_batches, over, place
from torch._dynamo.utils import counters

import zerotrain
from tests.ranks import run_ranks
from zerotrain.models import GPT


@dataclass(frozen=True)
class Run:
    """One way to train the GPT of `make_model`."""

    stage: int
    compile: bool = False
    checkpointing: bool = False
    dropout: float = 0.0
    precision: str = "fp32"


def build(run: Run) -> zerotrain.ZeroEngine:
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, max_seq_len=SEQ_LEN, num_layers=3, num_heads=4, hidden_size=64, dropout=run.dropout)
    return zerotrain.build_engine(
        model,
        optimizer=OPTIMIZERS["adamw"],
        zero=zerotrain.ZeroConfig(stage=run.stage, bucket_mb=0.15),
        precision=run.precision,
        max_grad_norm=0.5,
        compile=run.compile,
        activation_checkpointing=run.checkpointing,
    )


def train(run: Run) -> dict[str, Any]:
    """On each rank: two steps of two micro-batches, an evaluation after each; what came of it."""
    rank, size = place()
    engine = build(run)
    torch.manual_seed(rank + 1)  # of the dropout
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    if not run.compile:  # a hook within the graph would be compiled with it, and a count that changes anew each time
        engine.module.blocks[1].mlp.in_proj.register_forward_hook(count)
    counters["stats"].clear()
    losses = []
    for step in range(2):
        losses.append(engine.train_step(micro_batches(batch(step, size, 2), rank)).loss.item())
        with torch.no_grad():  # of another length: nothing is compiled for it
            engine(batch(step, size, 1)[0, rank, :, : SEQ_LEN // 2])
    return {
        "sha256": engine.weights_sha256(),
        "losses": losses,
        "num_forwards": num_forwards,
        "num_graphs": counters["stats"]["unique_graphs"],
    }


def train_over(runs: list[Run], num_ranks: int, cache_dir: Path | None = None) -> list[dict[str, Any]]:
    """What each run came to on rank 0; all ranks have the same weights."""
    by_rank = run_ranks(with_cache, num_ranks, cache_dir, runs)
    for others in zip(*by_rank, strict=True):
        assert len({each["sha256"] for each in others}) == 1
    return by_rank[0]


def with_cache(cache_dir: Path | None, runs: list[Run]) -> list[dict[str, Any]]:
    """On each rank: all runs, with torch.compile's files in a folder of this test."""
    if cache_dir is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
        torch._inductor.config.cpp.vec_isa_ok = True  # else it compiles small programs to see what the compiler can
    return over(runs, train)


def test_checkpointing_computes_units_twice_and_changes_no_bit_at_any_stage() -> None:
    switches = (False, True, True, True, True)
    runs = [
        Run(stage, checkpointing=switch, dropout=dropout, precision=precision)
        for dropout, precision in ((0.0, "fp32"), (0.1, "fp32"), (0.1, "bf16"))
        for stage, switch in zip((0, 0, 1, 2, 3), switches, strict=True)
    ]
    results = train_over(runs, 2)
    for plain, *checkpointed in (results[:5], results[5:10], results[10:]):
        # Two steps of two micro-batches and one evaluation: only forwards that train are computed again.
        assert [each["num_forwards"] for each in (plain, *checkpointed)] == [6] + [10] * 4
        for each in checkpointed:
            assert (each["sha256"], each["losses"]) == (plain["sha256"], plain["losses"])
    assert len({each["sha256"] for each in results}) == 3
