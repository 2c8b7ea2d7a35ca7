"""`python -m benchmarks.virtual_ranks`: what it costs that a rank runs several virtual ranks.

Two engines in the same processes train the same model on as many micro-batches, step about: one whose ranks accumulate
them (as many virtual ranks as ranks), and one whose ranks run each as a virtual rank. Printed are medians of their
steps, the ratio, and what they hold beside the model state: all of it, and what `engine.sums_nbytes` says of sums. That
as many virtual ranks as ranks cost nothing is asserted by tests; run this module in two checkouts to see it.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

import zerotrain
from benchmarks.report import markdown
from benchmarks.rounds import machine
from tests.ranks.processes import run_ranks
from zerotrain.models import GPT

VOCAB, SEQ_LEN, SEQUENCES = 512, 128, 2
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=3e-4, fused=True)


def engine_of(stage: int, precision: str, virtual_ranks: int) -> zerotrain.ZeroEngine:
    torch.manual_seed(0)
    model = GPT(vocab_size=VOCAB, max_seq_len=SEQ_LEN, num_layers=6, num_heads=8, hidden_size=384)
    zero = zerotrain.ZeroConfig(stage=stage)
    return zerotrain.build_engine(
        model, optimizer=ADAMW, zero=zero, precision=precision, max_grad_norm=1.0, virtual_ranks=virtual_ranks
    )


def measure(stage: int, precision: str, leaves: int, num_steps: int) -> list[tuple[list[float], int, int]]:
    """On each rank: of the engine that accumulates and of the one with leaves, the milliseconds of each step, the bytes
    of all its scratch, and those of the sums in it by the formula."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(0, VOCAB, (SEQUENCES, SEQ_LEN + 1), generator=generator) for _ in range(leaves)]
    micro_batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
    engines = [engine_of(stage, precision, size), engine_of(stage, precision, size * leaves)]
    step_ms: list[list[float]] = [[], []]
    for step in range(num_steps + 2):
        for index in (0, 1) if step % 2 else (1, 0):
            dist.barrier()
            started_s = time.perf_counter()
            engines[index].train_step(micro_batches)
            dist.barrier()
            if step >= 2:
                step_ms[index].append(1e3 * (time.perf_counter() - started_s))
    scratch = [engine.memory_bytes()["scratch"] for engine in engines]
    formula = [engines[0].sums_nbytes(leaves), engines[1].sums_nbytes(1)]
    return list(zip(step_ms, scratch, formula, strict=True))


def main() -> None:
    """Print a table: a row for each precision and stage."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.virtual_ranks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--leaves", type=int, default=2, help="virtual ranks of each, a power of two (default 2)")
    parser.add_argument("--steps", type=int, default=15, help="steps measured of each engine (default 15)")
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3], choices=range(4))
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    given = parser.parse_args()
    names = ["precision", "stage", "accumulated, ms", f"V = {given.leaves} N, ms", "ratio"]
    rows = [[*names, "scratch, MB (sums by formula)", f"of V = {given.leaves} N"]]
    for precision in given.precisions:
        for stage in given.stages:
            accumulated, leaves = run_ranks(measure, given.ranks, stage, precision, given.leaves, given.steps)[0]
            plain_ms, leaves_ms = statistics.median(accumulated[0]), statistics.median(leaves[0])
            ratio = statistics.median(b / a for a, b in zip(accumulated[0], leaves[0], strict=True))
            held = [f"{each[1] / 1e6:.1f} ({each[2] / 1e6:.1f})" for each in (accumulated, leaves)]
            rows.append([precision, str(stage), f"{plain_ms:.0f}", f"{leaves_ms:.0f}", f"{ratio:.3f}", *held])
    print(f"{given.ranks} ranks, {given.leaves} micro-batches of each in a step; {machine()}\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
