"""Runs that are saved and loaded, on threads as ranks: models with hard parameters, and all that an engine holds."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from zerotrain.engine.state.named import buffers, counts, pieces, roles

_ONE_SEED_AT_A_TIME = threading.Lock()
State = dict[tuple[str, str], torch.Tensor]


class Hard(nn.Module):
    """Tied over units, frozen in the midst, transposed, without elements, of one element, of odd shapes; a buffer; a
    parameter of integers; kept by the engine in fp32 at any precision: the batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.norm = nn.BatchNorm1d(24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.output = nn.Linear(24, 37, bias=False)
        self.output.weight = self.embedding.weight
        self.odd = nn.Parameter(torch.randn(7, 15))
        self.turned = nn.Parameter(torch.randn(24, 24).t())
        self.none = nn.Parameter(torch.zeros(0))
        self.one = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.blocks[1].weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        x = self.norm(self.embedding(tokens).float()).to(self.turned.dtype)
        for block in self.blocks:
            x = x + block(x).tanh()
        x = x @ self.turned * self.one + self.odd.sum() + self.none.sum()
        return nn.functional.cross_entropy(self.output(x).float(), tokens)


class Matrices(nn.Module):
    """For optimizers of whole matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24 + 8 * (i == 2)) for i in range(3))
        self.output = nn.Linear(32, 37)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x).tanh()
        return nn.functional.cross_entropy(self.output(x).float(), tokens)


class Overflowing(Matrices):
    """Has an infinite gradient in its third forward."""

    num_calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        loss = super().forward(tokens)
        return loss + (self.output.bias * float("inf")).float().sum() if self.num_calls == 3 else loss


class Adapters(nn.Module):
    """A frozen base and small matrices beside it, as LoRA has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(24, 3, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(3, 24, bias=False) for _ in range(3))
        for module in (self.embedding, self.blocks):
            module.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block, down, up in zip(self.blocks, self.down, self.up, strict=True):
            x = x + block(x).tanh() + up(down(x))
        return nn.functional.cross_entropy((x @ self.embedding.weight.t()).float(), tokens)


ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.05)
MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)
MUON: Any = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01)
SCALED = zerotrain.PrecisionConfig("fp16", initial_scale=2.0**10, growth_interval=3)


@dataclass(frozen=True)
class Kind:
    """What is trained."""

    model: Callable[[], nn.Module] = Hard
    optimizer: Any = ADAMW
    precision: Any = "fp32"


KINDS = {
    "hard parameters, AdamW": Kind(),
    "hard parameters, bf16, momentum": Kind(optimizer=MOMENTUM, precision="bf16"),
    "fp16, a step skipped": Kind(Overflowing, precision=SCALED),
    "Muon and AdamW": Kind(Matrices, MUON),
    "Muon and AdamW, bf16": Kind(Matrices, MUON, "bf16"),
    "a frozen base in bf16 with adapters": Kind(Adapters, precision="bf16"),
}


def build(
    world: zerotrain.World, kind: Kind, stage: int, *, seed: int = 0, bucket_mb: float = 0.004, **how: Any
) -> zerotrain.ZeroEngine:
    with _ONE_SEED_AT_A_TIME:
        torch.default_generator.manual_seed(seed)
        model = kind.model()
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=bucket_mb, reduction="ordered")
    return zerotrain.build_engine(
        model, optimizer=kind.optimizer, precision=kind.precision, zero=zero, world=world, max_grad_norm=1.0, **how
    )


def train(engine: zerotrain.ZeroEngine, *steps: int, of_rank: int = 0) -> None:
    """A step for each number; ranks of the same `of_rank` have the same data."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * of_rank + step)
        engine.backward(engine(torch.randint(37, (9,), generator=generator)))
        engine.step()


def saved_by_two_ranks(path: Path, kind: Kind) -> Path:
    """A checkpoint of one step at stage 2, with `extra` of one number."""

    def save(world: zerotrain.World) -> None:
        engine = build(world, kind, 2)
        train(engine, 0)
        engine.save(path, extra={"rows": 9})

    run_threads(save, 2)
    return path


def held(engine: zerotrain.ZeroEngine) -> list[tuple[str, str, int, torch.Tensor]]:
    """(name, role, first element, flat copy) of everything that this rank holds of parameters and optimizer state."""
    return [
        (piece.managed.names[0], role, piece.in_tensor.start if piece.in_tensor else 0, piece.values.flatten().clone())
        for bucket in engine.schedule.buckets
        for role in roles(bucket)
        for piece in pieces(bucket, role)
    ]


def counted(engine: zerotrain.ZeroEngine) -> dict[str, Any]:
    """What else of an engine a checkpoint brings back; the same on all ranks, but for counts of what a rank holds."""
    return {
        "step": engine.stamps.num_steps,
        "skipped": engine.optimizer_step.num_skipped_in_a_row,
        "scaler": engine.loss_scaler.state_dict() if engine.loss_scaler else None,
        "groups": [dict(group) for group in engine.param_groups],
        "first rates": [group["initial_lr"] for group in engine.param_groups],
        "places": engine.held.groups.places,
        "counts": counts(engine.held.holdings),
        "buffers": {name: each.clone() for name, each in buffers(engine.module, engine.schedule.buckets).items()},
    }


def joined(of_ranks: list[list[tuple[str, str, int, torch.Tensor]]]) -> State:
    """Whole tensors of what the ranks hold. What several hold must be the same."""
    parts: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for name, role, start, values in (each for of_rank in of_ranks for each in of_rank):
        parts.setdefault((name, role), []).append((start, values))
    state = {}
    for (name, role), of_tensor in parts.items():
        numel = max(start + values.numel() for start, values in of_tensor)
        whole, is_there = torch.empty(numel, dtype=of_tensor[0][1].dtype), torch.zeros(numel, dtype=torch.bool)
        for start, values in of_tensor:
            there = is_there[start : start + values.numel()]
            part = whole[start : start + values.numel()]
            assert torch.equal(part[there], values[there]), f"{role} of {name} differs between two ranks"
            part.copy_(values)
            there.fill_(True)
        assert is_there.all()
        state[name, role] = whole
    return state


def assert_same_state(left: State, right: State) -> None:
    assert left.keys() == right.keys()
    assert [key for key in left if left[key].dtype != right[key].dtype or not torch.equal(left[key], right[key])] == []


def assert_same_counts(left: dict[str, Any], right: dict[str, Any]) -> None:
    for key in left.keys() - {"buffers", "counts"}:
        assert left[key] == right[key], key
    common = left["counts"].keys() & right["counts"].keys()
    assert {name: left["counts"][name] for name in common} == {name: right["counts"][name] for name in common}
    assert left["buffers"].keys() == right["buffers"].keys()
    assert all(torch.equal(left["buffers"][name], right["buffers"][name]) for name in left["buffers"])


@dataclass
class Saved:
    """A checkpoint, what the run held that saved it, and what it came to with one step more."""

    path: Path
    state: State
    counts: dict[str, Any]
    after: str


def saved_run(path: Path, kind: Kind, stage: int, size: int, **how: Any) -> Saved:
    """Trains three steps, all ranks on the same data, saves, and makes one step more."""

    def on_a_rank(world: zerotrain.World) -> tuple[Any, dict[str, Any], str]:
        engine = build(world, kind, stage, **how)
        train(engine, 0, 1, 2)
        engine.param_groups[0]["lr"] *= 0.5
        before = held(engine), counted(engine)
        assert engine.save(path, extra={"rows": 27}) == path
        train(engine, 3)
        return *before, engine.weights_sha256()

    results, _ = run_threads(on_a_rank, size)
    return Saved(path, joined([each[0] for each in results]), results[0][1], results[0][2])


def assert_loads(saved: Saved, kind: Kind, stage: int, size: int, **how: Any) -> str:
    """An engine of other weights that loads it holds the same; returns what it comes to with one step more."""

    def on_a_rank(world: zerotrain.World) -> tuple[Any, dict[str, Any], str]:
        engine = build(world, kind, stage, seed=1, **how)
        assert engine.load(saved.path) == {"rows": 27}
        now = held(engine), counted(engine)
        train(engine, 3)
        return *now, engine.weights_sha256()

    results, _ = run_threads(on_a_rank, size)
    assert_same_state(joined([each[0] for each in results]), saved.state)
    for _, found, after in results:
        assert_same_counts(found, saved.counts)
        assert after == results[0][2]
    return results[0][2]


def same_mean(size: int, other: int) -> bool:
    """Whether the mean of equal gradients has the same bits on so many ranks: a third of three of them is rounded."""
    return (size == 3) == (other == 3)
