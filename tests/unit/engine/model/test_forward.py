"""What a machine without a compiler and a model without units are told. Bits and memory: tests/distributed."""

import functools
import sysconfig

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Plain, assert_same, assert_weights, engine_on, on_ranks, seeded, train
from zerotrain.engine.model.forward import require_compiler

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_a_machine_without_a_compiler_gets_a_sentence():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused = pytest.raises(zerotrain.ConfigError, match=r"^compile=True: .* a C\+\+ compiler such as g\+\+, ")
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), refused:
        zerotrain.build_engine(model, optimizer=SGD, compile=True)


def test_a_python_without_headers_gets_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(zerotrain.ConfigError, match=r"Python\.h, the headers of this Python"):
        require_compiler()


class TakesGradients(nn.Module):
    """Of its input, which is the output of the block before, as models of energies do; and of two functions of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        energy = self.first(x).tanh()
        (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        (stress,) = torch.autograd.grad((self.second(x).tanh() * force).sum(), x, create_graph=True)
        return x + 0.1 * energy + 0.01 * (force + stress)


class Energies(nn.Module):
    checkpoints = False

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(TakesGradients() for _ in range(3))
        self.output = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.output(x).square().mean()


class CheckpointsItself(Energies):
    checkpoints = True


@pytest.mark.case(
    "around_a_step",
    "`torch.autograd.grad` within a block's forward, once or more, also where the block is "
    "computed again in the backward",
    "same bits",
)
@pytest.mark.parametrize("zero", [{}, {"prefetch": 0}, {"prefetch": 2}, {"overlap": False}, {"stage": 2}], ids=str)
@pytest.mark.parametrize(("model", "by_engine"), [(Energies, True), (CheckpointsItself, False), (Energies, False)])
@pytest.mark.thinned(2)
@on_ranks(2, late_rank=1)
def test_gradients_taken_in_a_forward_that_is_computed_again_are_those_of_plain_pytorch(world, model, by_engine, zero):
    given = {"stage": 3, "reduction": "ordered"} | zero
    engine = engine_on(world, model, zero=given, activation_checkpointing=by_engine)
    train(engine, 0, 1, 2)
    assert_weights(engine, lambda: Plain(2, Energies).train(0, 1, 2))


class KeepsKeys(nn.Module):
    """Adds its keys to a cache, as layers of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, past_key_values: list[torch.Tensor] | None = None) -> torch.Tensor:
        keys = self.layer(x)
        if past_key_values is not None:
            past_key_values.append(keys)
            keys = torch.stack(past_key_values).sum(0)
        return x + keys


class Caching(nn.Module):
    def __init__(self, use_cache: bool) -> None:
        super().__init__()
        self.layers, self.use_cache = nn.ModuleList([KeepsKeys(), KeepsKeys()]), use_cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, past_key_values=[] if self.use_cache else None)
        return x


def test_a_cache_that_a_unit_would_fill_again_in_the_backward_is_refused():
    """The keys were added twice: other bits, or an error of PyTorch's about shapes."""
    engine = zerotrain.build_engine(
        Caching(use_cache=True), optimizer=functools.partial(torch.optim.SGD, lr=0.1), activation_checkpointing=True
    )
    refusal = (
        r"activation_checkpointing=True: layers\.0 got past_key_values, .* build the model with config\.use_cache=False"
    )
    with pytest.raises(zerotrain.ConfigError, match=refusal):
        engine(torch.ones(2, 8))
    engine.module.use_cache = False
    engine.backward(engine(torch.ones(2, 8)).sum())
    engine.step()
    with torch.no_grad():
        engine.module.use_cache = True
        engine(torch.ones(2, 8))


class Remembers(nn.Module):
    """Keeps numbers in buffers of all kinds: reads and writes them, in place or by another tensor. Some come to be in
    its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.arange(64.0).view(8, 8) / 64)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("moments", torch.zeros(2, 8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.same = nn.Module()
        self.same.register_buffer("moments", self.moments)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        if self.absent is None:
            self.absent = torch.zeros(8)
            self.linear.register_buffer("late", torch.ones(8))
        self.absent = self.absent + 0.1
        self.linear.late.mul_(1.1)
        self.mean = self.mean + x.detach().mean(0)
        self.moments.lerp_(torch.stack([x, x.square()]).detach().mean(1), 0.1)
        hidden = self.spectral(self.norm(x)) + self.linear(x) * (self.same.moments.sum() / self.calls.clone())
        return x + torch.tanh(hidden @ self.table - self.mean - self.absent * self.linear.late.clone())


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Remembers() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.input(x)
        for block in [*self.blocks, self.blocks[0]]:  # the first is called twice
            x = block(x)
        return x.square().mean()


def remembered(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.case(
    "around_a_step",
    "buffers that units with activation checkpointing update: batch norm, `spectral_norm`, own ones",
    "as after one forward, and the same bits",
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_a_unit_that_is_computed_again_updates_its_buffers_once(stage, keeps_graph):
    """Two ranks with buffers of their own, beside plain PyTorch without checkpoints; also with two backwards of one
    forward."""

    def on_a_rank(world: zerotrain.World) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        zero = {"stage": stage, "reduction": "ordered"}
        engine = engine_on(world, Remembering, zero=zero, activation_checkpointing=True)
        for step in range(3):
            loss = engine(remembered(step, world.rank))
            if keeps_graph:
                with engine.no_sync():
                    engine.backward(loss, retain_graph=True)
            engine.backward(loss)
            engine.step()
        return {name: value.clone() for name, value in engine.module.named_buffers()}, engine.full_state_dict()

    ranks = [seeded(Remembering) for _ in range(2)]
    optimizer = torch.optim.SGD(ranks[0].parameters(), lr=0.5)
    for step in range(3):
        for rank, model in enumerate(ranks):
            model.load_state_dict({name: value.detach() for name, value in ranks[0].named_parameters()}, strict=False)
            model.zero_grad()
            loss = model(remembered(step, rank))
            for _ in range(1 + keeps_graph):
                loss.backward(retain_graph=True)
        for mine, other in zip(*(model.parameters() for model in ranks), strict=True):
            mine.grad = (mine.grad + other.grad) / 2
        optimizer.step()

    results = run_threads(on_a_rank, 2, late_rank=1)[0]
    assert_same(
        {name: results[0][1][name] for name, _ in ranks[0].named_parameters()}, dict(ranks[0].named_parameters())
    )
    for (buffers, _), model in zip(results, ranks, strict=True):
        assert_same(buffers, dict(model.named_buffers()))
    assert ranks[0].blocks[0].calls == 6
