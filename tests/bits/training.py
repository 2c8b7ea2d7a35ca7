"""One small training by its definition, in plain PyTorch in one process, and the same with an engine on each rank.

What the bits are a function of is a `Training`; how many ranks run it, and how, is a `Setup`, and may change no bit.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import sum_by_tree
from zerotrain.training.sameness import seed_leaf

SEED, NUM_STEPS = 5, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 1024.0
"""The first, in fp16."""
RANKS = {8: (1, 2, 4, 8), 6: (3, 6)}
"""Virtual ranks -> numbers of ranks that can share them."""
FINE_MB, WHOLE_MB = 0.0003, 25.0
"""Buckets of a few parameters; one for all."""
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=False)
Place = tuple[int, int, int]
"""(step, virtual rank, micro-batch of it)"""
_DRAWING = threading.Lock()
"""Threads share the generator of random numbers."""
MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01, fused=False)


class Block(nn.Module):
    """A square layer with dropout behind it, and a scale that odd virtual ranks do not use."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        x = self.dropout(self.linear(x)).tanh()
        return x if place[1] % 2 else x * self.scale


class Net(nn.Module):
    """Four blocks between an input and an output layer; returns the loss.

    Args:
        skips: whether a block, by its number, is left out at a place.
    """

    def __init__(
        self,
        make_block: Callable[[], nn.Module] = Block,
        skips: Callable[[int, Place], bool] = lambda block, place: False,
    ) -> None:
        super().__init__()
        self.input = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(make_block() for _ in range(4))
        self.output = nn.Linear(8, 5)
        self.skips = skips

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        x = self.input(x)
        for index, block in enumerate(self.blocks):
            x = x if self.skips(index, place) else block(x, place)
        return self.output(x.to(self.output.weight.dtype)).to(x.dtype).float().square().mean()


@dataclass(frozen=True, eq=False)
class Training:
    """What the bits of the weights are a function of."""

    make: Callable[[], nn.Module] = Net
    """forward(x, place) -> loss."""
    virtual_ranks: int = 8
    precision: str = "fp32"
    num_micro_batches: int = 2
    """Of a virtual rank."""
    max_grad_norm: float | None = None
    muon: bool = False
    keeps_output: bool = False
    """Whether the output layer is kept in fp32."""
    growth_interval: int = 2000
    frozen: Mapping[int, str] = field(default_factory=dict)
    """Step -> beginning of the names of what is frozen in it."""
    weight: Callable[[Place], float] = lambda place: 1.0
    """Of the loss of a micro-batch; one that weighs 0 counts for nothing, also where it is nan."""
    num_steps: int = NUM_STEPS


@dataclass(frozen=True)
class Setup:
    """How a training is run."""

    num_ranks: int
    stage: int = 2
    overlap: bool = True
    bucket_mb: float = FINE_MB
    is_late: bool = False
    """Whether the last rank is late with every collective."""
    activation_checkpointing: bool = False
    stages: Mapping[int, int] = field(default_factory=dict)
    """Steps done, and the stage from there on; before the first `stage`."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `ZeroConfig`."""
    offload: zerotrain.OffloadConfig | None = None
    saves_to: Path | None = None
    """Where it saves in its midst, before step `saves_at`."""
    saves_at: int = 2
    goes_on_from: Path | None = None
    """What another has saved so."""

    @property
    def first_step(self) -> int:
        return 0 if self.goes_on_from is None else self.saves_at


@dataclass(frozen=True)
class Outcome:
    """What came of a training. Of rank 0, and the others must agree in all but the weights, which they do not get."""

    weights: dict[str, torch.Tensor] = field(compare=False)
    """fp32, by name."""
    sha256: str
    scales: list[float]
    """The loss scale of each step, 1.0 but in fp16; and the one after the last."""
    skipped: list[bool]


def batch(place: Place) -> torch.Tensor:
    step, number, micro_batch = place
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1000 * step + 10 * number + micro_batch))


# ---- on ranks


def on_ranks(training: Training, setup: Setup) -> Outcome:
    """Train with an engine on each of some threads.

    Raises:
        AssertionError: the ranks do not agree on what came of it or on the order of collectives, or one still holds a
            buffer on loan.
    """
    outcomes, board = run_threads(
        functools.partial(on_a_rank, training, setup),
        setup.num_ranks,
        late_rank=setup.num_ranks - 1 if setup.is_late else None,
        in_turns=setup.saves_to is None,  # a save is waited for by threads that take no turns
    )
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert all(order == board.orders[0] for order in board.orders)
    return outcomes[0]


def on_a_rank(training: Training, setup: Setup, world: zerotrain.World) -> Outcome:
    engine = build(training, setup, world)
    if setup.goes_on_from is not None:
        engine.load(setup.goes_on_from)
    scales, skipped = [], []
    for step in range(setup.first_step, training.num_steps):
        if step in setup.stages:
            engine.set_stage(setup.stages[step])
        change_what_trains(engine, training.frozen.get(step - 1, ""), training.frozen.get(step, ""))
        places = list(product([step], engine.virtual_ranks, range(training.num_micro_batches)))
        result = engine.train_step(
            [(batch(place), place) for place in places],
            weights=[training.weight(place) / training.num_micro_batches for place in places],
            before_each=functools.partial(seed_leaf, SEED, step),
        )
        scales.append(result.loss_scale)
        skipped.append(result.skipped)
        if setup.saves_to is not None and step + 1 == setup.saves_at:
            engine.save(setup.saves_to)
    scales.append(engine.loss_scale)
    assert engine.held.pools.lent_nbytes == 0
    return Outcome(engine.full_state_dict(), engine.weights_sha256(), scales, skipped)


def build(training: Training, setup: Setup, world: zerotrain.World) -> zerotrain.ZeroEngine:
    with _DRAWING:
        torch.manual_seed(0)
        model = training.make()
    zero = {"stage": setup.stage, "bucket_mb": setup.bucket_mb, "overlap": setup.overlap, "reduction": "ordered"}
    return zerotrain.build_engine(
        model,
        optimizer=MUON if training.muon else ADAMW,
        zero=zerotrain.ZeroConfig(**zero | setup.more),
        precision=zerotrain.PrecisionConfig(
            training.precision,
            keep_fp32=["output"] if training.keeps_output else [],
            initial_scale=LOSS_SCALE,
            growth_interval=training.growth_interval,
        ),
        max_grad_norm=training.max_grad_norm,
        virtual_ranks=training.virtual_ranks,
        offload=setup.offload,
        activation_checkpointing=setup.activation_checkpointing,
        world=world,
    )


def change_what_trains(engine: zerotrain.ZeroEngine, before: str, now: str) -> None:
    if before and before != now:
        engine.unfreeze(f"{before}*")
    if now and before != now:
        engine.freeze(f"{now}*")


# ---- by the definition


@functools.cache
def in_plain_pytorch(training: Training) -> Outcome:
    """Each leaf apart, rounded to the precision of the wire; their sum by one tree in fp32; the mean, rounded again;
    clipped, and without the loss scale; torch's own optimizers on fp32 weights."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype, model = DTYPES[training.precision], training.make()
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(dtype)
    if training.keeps_output:
        model.output.float()
    copy_into(model, weights)
    wire = {name: parameter.dtype for name, parameter in model.named_parameters()}
    optimizers = optimizers_of(training, weights)
    scales, skipped, num_clean = [LOSS_SCALE if training.precision == "fp16" else 1.0], [], 0
    for step in range(training.num_steps):
        trained = what_trains(training, step, weights, optimizers)
        leaves = [leaf(training, model, step, number, scales[-1]) for number in range(training.virtual_ranks)]
        for name, weight in weights.items():
            mean = sum_by_tree([each[name].to(wire[name]).float() for each in leaves]) / training.virtual_ranks
            weight.grad = mean.to(wire[name]).float() if name in trained else None
        skipped.append(not update(training, [weights[name] for name in trained], optimizers, scales[-1]))
        num_clean = 0 if skipped[-1] else num_clean + 1
        factor = 0.5 if skipped[-1] else 2.0 if num_clean % training.growth_interval == 0 else 1.0
        scales.append(scales[-1] * factor)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return Outcome(weights, sha256(weights), scales, skipped)


def copy_into(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def leaf(training: Training, model: nn.Module, step: int, number: int, scale: float) -> dict[str, torch.Tensor]:
    """What one virtual rank computes in a step: the sum of its micro-batches' gradients, one after the other."""
    sums = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in model.named_parameters()}
    for place in product([step], [number], range(training.num_micro_batches)):
        seed = hashlib.sha256(" ".join(map(str, (SEED, *place))).encode()).digest()
        torch.manual_seed(int.from_bytes(seed[:8], "big"))
        model.zero_grad()
        loss = model(batch(place).to(DTYPES[training.precision]), place)
        if factor := training.weight(place) / training.num_micro_batches:
            (loss * (factor * scale)).backward()
        for name, parameter in model.named_parameters():
            sums[name] += 0 if parameter.grad is None else parameter.grad
    return sums


def update(
    training: Training, trained: list[torch.Tensor], optimizers: list[torch.optim.Optimizer], scale: float
) -> bool:
    """Clip and step; returns whether it did, which it does not where one element is not finite."""
    norm = torch.cat([weight.grad.double().flatten() for weight in trained]).norm() / scale
    if not norm.isfinite():
        return False
    limit = float("inf") if training.max_grad_norm is None else training.max_grad_norm
    for weight in trained:
        weight.grad *= (torch.clamp(limit / (norm + 1e-6), max=1.0) / scale).float()
    for optimizer in optimizers:
        optimizer.step()
    return True


def optimizers_of(training: Training, weights: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    if not training.muon:
        return [ADAMW(list(weights.values()))]
    is_for_muon = {name: name.startswith("blocks.") and weight.ndim == 2 for name, weight in weights.items()}
    return [
        torch.optim.Muon(
            [weight for name, weight in weights.items() if is_for_muon[name]], lr=0.02, momentum=0.95, weight_decay=0.1
        ),
        torch.optim.AdamW(
            [weight for name, weight in weights.items() if not is_for_muon[name]],
            lr=0.01,
            betas=(0.9, 0.95),
            weight_decay=0.1,
        ),
    ]


def what_trains(
    training: Training, step: int, weights: dict[str, torch.Tensor], optimizers: list[torch.optim.Optimizer]
) -> list[str]:
    """The names of what trains in a step. What is frozen loses its optimizer state, and what its master weight has
    more than the compute precision."""
    frozen = training.frozen.get(step)
    for name, weight in weights.items():
        if frozen and name.startswith(frozen):
            weight.copy_(weight.to(DTYPES[training.precision]))
            for optimizer in optimizers:
                optimizer.state.pop(weight, None)
    return [name for name in weights if not (frozen and name.startswith(frozen))]


def sha256(weights: dict[str, torch.Tensor]) -> str:
    """Over the bytes of the weights in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


def assert_same(training: Training, setup: Setup) -> None:
    """Run it so, and compare with plain PyTorch: each weight, the hash of all, and what the loss scale went through."""
    expected, got = in_plain_pytorch(training), on_ranks(training, setup)
    for name, weight in expected.weights.items():
        assert torch.equal(got.weights[name], weight), name
    assert got == expected
