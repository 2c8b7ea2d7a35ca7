"""What the distributed tests train: small models, batches by step, and the same training in plain PyTorch.

The reference is one process without our engine: each rank's gradient computed apart, rounded to the wire's precision,
summed in rank order in fp32; torch's own clipping rule; torch's own optimizer on fp32 weights.
"""

import functools
import hashlib
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerotrain
from zerotrain.models import GPT
from zerotrain.testing import run_ranks

VOCAB, SEQ_LEN, SEQUENCES = 256, 32, 2
OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """One way to train the test's GPT."""

    zero: zerotrain.ZeroConfig
    precision: str = "fp32"
    num_micro_batches: int = 1
    optimizer: str = "adamw"
    max_grad_norm: float | None = 0.5
    num_steps: int = 3

    def with_zero(self, **settings: Any) -> "Case":
        return replace(self, zero=replace(self.zero, **settings))


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, max_seq_len=SEQ_LEN, num_layers=3, num_heads=4, hidden_size=64)


def batch(step: int, num_ranks: int, num_micro_batches: int) -> torch.Tensor:
    """(micro-batches, ranks, SEQUENCES, SEQ_LEN + 1) tokens of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (num_micro_batches, num_ranks, SEQUENCES, SEQ_LEN + 1), generator=generator)


def micro_batches(tokens: torch.Tensor, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(each[rank, :, :-1], each[rank, :, 1:]) for each in tokens]


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def build(case: Case, model: nn.Module | None = None) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(
        model or make_model(),
        optimizer=OPTIMIZERS[case.optimizer],
        zero=case.zero,
        precision=case.precision,
        max_grad_norm=case.max_grad_norm,
    )


def train(case: Case) -> zerotrain.ZeroEngine:
    """On each rank: train as the case says."""
    rank, size = place()
    engine = build(case)
    for step in range(case.num_steps):
        engine.train_step(micro_batches(batch(step, size, case.num_micro_batches), rank))
    return engine


def train_and_hash(case: Case) -> str:
    """On each rank: the hash of the weights after training as the case says."""
    return train(case).weights_sha256()


def over(values: list[Any], fn: Any) -> list[Any]:
    """On each rank: `fn` of each value, one after another in the same processes."""
    return [fn(value) for value in values]


def run_over(values: list[Any], fn: Any, size: int) -> list[list[Any]]:
    """What `fn(value)` returned on each rank, for each value. One start of the ranks for all: it takes a second."""
    by_rank = run_ranks(over, size, values, fn) if size > 1 else [over(values, fn)]
    return [list(each) for each in zip(*by_rank, strict=True)]


def hashes_over_ranks(cases: list[Case], size: int) -> list[str]:
    """The hash of each case, on which all ranks agree."""
    by_case = run_over(cases, train_and_hash, size)
    assert all(len(set(by_rank)) == 1 for by_rank in by_case)
    return [by_rank[0] for by_rank in by_case]


def reference_weights(case: Case, num_ranks: int) -> dict[str, torch.Tensor]:
    """Name -> fp32 weight after the same training in plain PyTorch, in one process."""
    torch.set_num_threads(1)
    model = make_model()
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(wire)
    matrices = {"params": [weight for weight in weights.values() if weight.ndim >= 2]}
    others = {"params": [weight for weight in weights.values() if weight.ndim < 2], "weight_decay": 0.0}
    optimizer = OPTIMIZERS[case.optimizer]([matrices, others])
    for step in range(case.num_steps):
        tokens = batch(step, num_ranks, case.num_micro_batches)
        mean: dict[str, torch.Tensor] = {}
        for rank in range(num_ranks):
            mine: dict[str, torch.Tensor] = {}
            for inputs in micro_batches(tokens, rank):
                model.zero_grad()
                (model(*inputs) * (1 / case.num_micro_batches / num_ranks)).backward()
                add_to(mine, {name: parameter.grad.float() for name, parameter in model.named_parameters()})
            add_to(mean, {name: value.to(wire).float() for name, value in mine.items()})
        mean = {name: value.to(wire).float() for name, value in mean.items()}
        norm = torch.cat([value.double().flatten() for value in mean.values()]).norm()
        limit = float("inf") if case.max_grad_norm is None else case.max_grad_norm
        coefficient = torch.clamp(limit / (norm + 1e-6), max=1.0).float()
        for name, weight in weights.items():
            weight.grad = mean[name] * coefficient
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return weights


def add_to(sums: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        sums[name] = sums[name] + value if name in sums else value.clone()


def sha256(weights: dict[str, torch.Tensor]) -> str:
    """Over the bytes of the weights in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()
