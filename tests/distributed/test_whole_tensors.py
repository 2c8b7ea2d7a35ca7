"""Optimizers that need whole tensors, at stages whose shards cut them: the bits of plain PyTorch, bytes as counted."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from cases import place, run_over, sha256
from torch import nn

import zerotrain
from zerotrain.engine.state.named import pieces
from zerotrain.settings import ZeroConfig

MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=1e-2, fused=False)
ADAFACTOR = functools.partial(torch.optim.Adafactor, lr=1e-2)
STAGES = (0, 1, 2, 3)
SETTINGS = [ZeroConfig(stage=stage, bucket_mb=bucket_mb) for stage, bucket_mb in product(STAGES, (0.002, 25))]
SETTINGS += [ZeroConfig(stage=stage, bucket_mb=0.02, overlap=overlap) for stage in (2, 3) for overlap in (True, False)]


class Block(nn.Module):
    """Matrices of odd shapes, wide and tall, a vector, and a weight of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(15, 47)
        self.tall = nn.Linear(47, 15)
        self.conv = nn.Conv2d(1, 1, kernel_size=3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tall(self.wide(x).relu())
        return self.conv(x[:, None])[:, 0]


class Net(nn.Module):
    """An embedding, three blocks, an output layer: Muon's convention sets the first and the last apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(13, 15)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.output = nn.Linear(15, 13)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.output(x)[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def ids(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 13, (4, 9), generator=torch.Generator().manual_seed(100 * step + rank))


def train(optimizer: Any, precision: str, zero: ZeroConfig) -> zerotrain.ZeroEngine:
    engine = zerotrain.build_engine(
        Net(), optimizer=optimizer, zero=zero, precision=precision, max_grad_norm=0.5 if optimizer is MUON else None
    )
    for step in range(3):
        engine.backward(engine(ids(step, place()[0])))
        engine.step()
    return engine


def hash_after_training(case: tuple[Any, str, ZeroConfig]) -> str:
    return train(*case).weights_sha256()


def is_for_muon(name: str, weight: torch.Tensor) -> bool:
    return name.startswith("blocks.") and weight.ndim == 2


def optimizers_of_plain_pytorch(weights: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    muon = [weight for name, weight in weights.items() if is_for_muon(name, weight)]
    rest = [weight for name, weight in weights.items() if not is_for_muon(name, weight)]
    return [
        torch.optim.Muon(muon, lr=0.02, momentum=0.95, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
    ]


def adafactor_of_plain_pytorch(weights: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(list(weights.values()), lr=1e-2)]


def reference(make_optimizers: Any, precision: str, num_ranks: int, max_norm: float) -> str:
    """The hash after the same training in one process: whole matrices, gradients summed in rank order in fp32."""
    torch.set_num_threads(1)
    model = Net()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model.to(wire)
    optimizers = make_optimizers(weights)
    for step in range(3):
        sums: dict[str, torch.Tensor] = {}
        for rank in range(num_ranks):
            model.zero_grad()
            model(ids(step, rank)).backward()
            for name, parameter in model.named_parameters():
                sums[name] = sums.get(name, 0.0) + parameter.grad.float()
        mean = {name: (value / num_ranks).to(wire).float() for name, value in sums.items()}
        norm = torch.cat([value.double().flatten() for value in mean.values()]).norm()
        coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0).float()
        for name, weight in weights.items():
            weight.grad = mean[name] * coefficient
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return sha256(weights)


@pytest.mark.case(
    "models: Models and optimizers",
    "Muon, Adafactor",
    "the bits of one process with complete tensors, on 2 and 3 ranks",
)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_whole_tensors_are_updated_with_the_bits_of_one_process(num_ranks: int) -> None:
    """Muon for the matrices of the blocks and AdamW for the rest; Adafactor for tensors of any shape."""
    fine = SETTINGS[: 2 * len(STAGES) : 2]
    trainings = {
        (MUON, "fp32"): reference(optimizers_of_plain_pytorch, "fp32", num_ranks, 0.5),
        (MUON, "bf16"): reference(optimizers_of_plain_pytorch, "bf16", num_ranks, 0.5),
        (ADAFACTOR, "fp32"): reference(adafactor_of_plain_pytorch, "fp32", num_ranks, float("inf")),
    }
    assert len(set(trainings.values())) == 3
    cases = [(*training, zero) for training in trainings for zero in (SETTINGS if training == (MUON, "fp32") else fine)]
    got = run_over(cases, hash_after_training, num_ranks)
    expected = [[trainings[optimizer, precision]] * num_ranks for optimizer, precision, _ in cases]
    assert not [case for case, hashes, wanted in zip(cases, got, expected, strict=True) if hashes != wanted]


def what_a_step_takes(zero: ZeroConfig) -> dict[str, Any]:
    engine = train(MUON, "fp32", zero)
    traffic = engine.ledger.last_step
    buckets = engine.schedule.trained
    num_matrices = [bucket.spec.num_whole for bucket in buckets]
    shapes = [slot.shape for bucket in buckets for slot in bucket.layout.slots[: bucket.spec.num_whole]]
    held, num_ranks = engine.memory_bytes(), place()[1]
    num_ways = 3 if engine.plan.shards_parameters else 2
    return {
        "calls": traffic.calls["exchange"],
        "sent": traffic.nbytes["exchange"],
        "theory": engine.theoretical_sent_nbytes(1),
        "theory_without": round(num_ways * 4 * engine.num_parameters * (num_ranks - 1) / num_ranks),
        "buckets_with_matrices": sum(number > 0 for number in num_matrices),
        "numel": sum(rows * columns for rows, columns in shapes),
        "num_parameters": engine.num_parameters,
        "state": held["optimizer"],
        "theory_state": held["theory"]["optimizer"],
        "momentum": sum(
            piece.values.numel()
            for bucket in buckets
            for piece in pieces(bucket, "momentum_buffer")
            if piece.managed.is_updated_whole
        ),
    }


@pytest.mark.case(
    "models: Models and optimizers",
    "their bytes and state",
    "two exchanges a bucket; an owner alone holds the momentum",
    under="Muon, Adafactor",
)
def test_a_step_exchanges_twice_a_bucket_and_an_owner_holds_its_momentum_alone() -> None:
    num_ranks = 3
    stages = [ZeroConfig(stage=stage, bucket_mb=0.005) for stage in (0, 1, 2, 3)]
    replicated, *sharded = run_over(stages, what_a_step_takes, num_ranks)
    for step in replicated:
        assert (step["calls"], step["sent"], step["theory"]) == (0, 0, step["theory_without"])
        assert step["momentum"] == step["numel"]
    for by_rank in sharded:
        numel, num_parameters = by_rank[0]["numel"], by_rank[0]["num_parameters"]
        assert sum(step["momentum"] for step in by_rank) == numel
        for step in by_rank:
            assert step["calls"] == 2 * step["buckets_with_matrices"] > 2
            assert step["sent"] == step["theory"] - step["theory_without"]
            assert step["theory_state"] == round((4 * numel + 8 * (num_parameters - numel)) / num_ranks)
        # A matrix lies where its elements lie, its owner where there is least to do: one part in N is there already.
        share = 3 * 4 * numel * (num_ranks - 1) / num_ranks**2
        assert sum(step["sent"] for step in by_rank) / num_ranks == pytest.approx(share, rel=0.5)
