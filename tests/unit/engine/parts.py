"""Parts of an engine on ranks that are threads: one bucket by itself, or an engine of a few small layers."""

import copy
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPools
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import EngineParts, Homes
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.options import EngineOptions
from zerotrain.settings import EngineConfig, PrecisionConfig, ZeroConfig
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout, FlatBuffer
from zerotrain.sharding.units import ManagedParameter, Unit

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SGD: Any = functools.partial(torch.optim.SGD, lr=0.5)
_ONE_SEED_AT_A_TIME = threading.Lock()


def alone() -> World:
    return World(rank=0, size=1, local_rank=0, device=CPU)


@dataclass
class OneBucket:
    """A bucket of parameters p0, p1, ..., whose elements count up from 0 through all of them, and what holds it."""

    world: World
    shapes: Sequence[tuple[int, ...]] = ((5,), (64,), (3, 3))
    stage: int = 2
    precision: str = "fp32"
    kind: type[nn.Parameter] = nn.Parameter
    overlap: bool = True
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        given = EngineConfig(ZeroConfig(stage=self.stage), PrecisionConfig(self.precision), max_grad_norm=1.0)
        self.options = EngineOptions.resolve(given, self.world)
        self.ledger = Ledger()
        self.collectives = Collectives(self.world, ledger=self.ledger, ordered=True, overlap=self.overlap)
        self.parameters, start = [], 0
        for shape in self.shapes:
            values = torch.arange(start, start + torch.Size(shape).numel(), dtype=torch.float32).view(shape)
            self.parameters.append(self.kind(values))
            start += values.numel()
        wire = DTYPES[self.precision]
        managed = [ManagedParameter(p, [f"p{i}"], [], dtype=wire) for i, p in enumerate(self.parameters)]
        unit = Unit("unit", [nn.Module()], managed)
        self.spec = BucketSpec("unit", [unit], managed, trainable=True)
        self.layout = BucketLayout.pack(self.shapes, self.world.shards.size)
        self.pools = ScratchPools(CPU)
        self.pool = self.pools.pool_of(wire)

    def weights(self) -> BucketWeights:
        values = FlatBuffer(self.layout, torch.zeros(self.layout.padded_numel))
        for view, parameter in zip(values.views(), self.parameters, strict=True):
            view.copy_(parameter.detach())
        return BucketWeights(self.spec, self.layout, values, self._parts())

    def gradient(self) -> BucketGradient:
        """Of parameters that are in the bucket's dtype."""
        for parameter in self.parameters:
            parameter.data = parameter.data.to(self.spec.dtype)
        return BucketGradient(self.spec, self.layout, self._parts())

    def _parts(self) -> EngineParts:
        groups = ParamGroups(self.spec.parameters, self.spec.units, SGD, None, device=CPU)
        homes = Homes(self.options.offload, self.world, self.options.zero.prefetch)
        return EngineParts(self.options, groups, self.collectives, self.pools, homes)

    def flat(self, values: Sequence[torch.Tensor | float | None]) -> torch.Tensor:
        """(padded_numel,) fp32: one value or tensor for each parameter, None for zeros; zeros between."""
        flat = torch.zeros(self.layout.padded_numel)
        for slot, value in zip(self.layout.slots, values, strict=True):
            if value is not None:
                flat[slot.offset : slot.end] = value.flatten() if isinstance(value, torch.Tensor) else value
        return flat


class Linears(nn.Module):
    """Four blocks of a square weight and a bias between an input and an output layer; returns a number."""

    num_blocks, width = 4, 8

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(3, self.width)
        self.blocks = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(self.num_blocks))
        self.output = nn.Linear(self.width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.output(x).float().square().mean()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with _ONE_SEED_AT_A_TIME:
        torch.default_generator.manual_seed(0)  # torch.manual_seed also formats the stack, for GPUs that may come
        return make()


def engine_on(
    world: World, make: Callable[[], nn.Module] = Linears, *, optimizer: Any = SGD, zero: Any = None, **settings: Any
) -> zerotrain.ZeroEngine:
    """An engine of small buckets, of the same initial weights on every rank."""
    zero = ZeroConfig(**({"bucket_mb": 0.0003} | (zero or {})))
    return zerotrain.build_engine(seeded(make), optimizer=optimizer, zero=zero, world=world, **settings)


def train(engine: zerotrain.ZeroEngine, *steps: int) -> None:
    for step in steps:
        engine.backward(engine(inputs(step, engine.world.rank)))
        engine.step()


def on_ranks(size: int | None = None, **nasty: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on each of some threads that are ranks, as `world`.

    Args:
        size: None: the test's own parameter of that name.
        nasty: see `run_threads`; a rank of -1 is the last.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**given: Any) -> None:
            number = size or given["size"]
            ranks = {name: rank % number for name, rank in nasty.items()}
            run_threads(lambda world: test(world=world, **given), number, **ranks)

        signature = inspect.signature(test)
        own = [parameter for name, parameter in signature.parameters.items() if name != "world"]
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return run

    return decorate


def sum_by_tree(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours in pairs, then the sums in pairs, and so on."""
    while len(leaves) > 1:
        leaves = [sum(leaves[index : index + 2]) for index in range(0, len(leaves), 2)]
    return leaves[0]


Losses = Iterable[tuple[torch.Tensor, float]]
"""Of the micro-batches of a rank, each with its weight."""


def one_loss(model: nn.Module, step: int, rank: int) -> Losses:
    yield model(inputs(step, rank).to(next(model.parameters()).dtype)), 1.0


def copy_into(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


class Plain:
    """The same training in plain PyTorch: the mean of each rank's own gradient, added by a tree.

    In 16 bits a copy of the model computes, and gradients are rounded where they travel. What weighs 0 is left out.

    Args:
        losses: (model, step, rank) -> the losses of a step, each computed when the one before is done with.
        cast: brings what is not computed in `precision` back to fp32.
        scale: of losses, taken out of the mean.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[], nn.Module] = Linears,
        optimizer: Any = SGD,
        precision: str = "fp32",
        *,
        losses: Callable[[nn.Module, int, int], Losses] = one_loss,
        cast: Callable[[nn.Module], object] = lambda model: None,
        scale: float = 1.0,
    ) -> None:
        self.size, self.model, self.losses, self.scale = size, seeded(make), losses, scale
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = optimizer(list(self.parameters.values()))
        self.compute = self.model if precision == "fp32" else copy.deepcopy(self.model)
        for parameter in self.compute.parameters() if precision != "fp32" else ():
            parameter.data = parameter.data.to(DTYPES[precision])
        cast(self.compute)

    def gradients(self, step: int) -> dict[str, torch.Tensor]:
        computing = dict(self.compute.named_parameters())
        if self.compute is not self.model:
            copy_into(self.compute, self.parameters)
        leaves: dict[str, list[torch.Tensor]] = {name: [] for name in computing}
        for rank in range(self.size):
            sums = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}
            for loss, weight in self.losses(self.compute, step, rank):
                self.compute.zero_grad()
                if weight:
                    (loss * (weight * self.scale)).backward()
                for name, parameter in computing.items():
                    sums[name] += 0 if parameter.grad is None else parameter.grad
            for name, parameter in computing.items():
                leaves[name].append(sums[name].to(parameter.dtype).to(sums[name].dtype))
        means = {name: sum_by_tree(each) / self.size for name, each in leaves.items()}
        return {name: mean.to(computing[name].dtype).to(mean.dtype) / self.scale for name, mean in means.items()}

    def train(self, *steps: int) -> dict[str, torch.Tensor]:
        for step in steps:
            for name, gradient in self.gradients(step).items():
                self.parameters[name].grad = gradient if self.parameters[name].requires_grad else None
            self.optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}


def assert_weights(engine: zerotrain.ZeroEngine, expected: Callable[[], dict[str, torch.Tensor]]) -> None:
    """Rank 0 compares the weights. Collective."""
    got = engine.full_state_dict()
    if engine.world.rank == 0:
        assert_same(got, expected())


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


class Counted(nn.Module):
    """Two vectors; the gradient of each is what its loss is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.zeros(70))]) for _ in range(2))

    def forward(
        self, *gradients: float, breaks_off: bool = False, by: type[BaseException] = ZeroDivisionError
    ) -> torch.Tensor:
        first, last = (block[0].float().sum() * g for block, g in zip(self.blocks, gradients, strict=True))
        if breaks_off:
            first.register_hook(functools.partial(fail, by))
        return first + last


def fail(by: type[BaseException] = ZeroDivisionError, *_: Any) -> None:
    """Of the two gradients of a backward one is there when the other breaks off."""
    raise by
