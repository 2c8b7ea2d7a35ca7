"""Weights that others than the engine change: kept, at every stage and in 16 bits, or refused with a sentence."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import EVERYWHERE, Net, build
from tests.unit.engine.parts import DTYPES, alone, assert_same, on_ranks, seeded
from tests.unit.engine.test_habits import inputs

NUM_STEPS = 3


def write_a_few(module: nn.Module) -> None:
    """What is not written keeps the bits that only the master weight has."""
    module.blocks[1].weight[3].fill_(0.25)
    module.last.bias[:1] = 0


def set_from_vector(module: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    nn.utils.vector_to_parameters(vector.roll(1), module.parameters())


Write = Callable[[nn.Module], object]
clamp: Write = torch.no_grad()(lambda module: [each.clamp_(-0.1, 0.1) for each in module.parameters()])
WRITES: dict[str, Write] = {
    "clamp": clamp,
    "clamp uncounted": lambda module: [each.data.clamp_(-0.1, 0.1) for each in module.parameters()],
    "replace data": lambda module: [setattr(each, "data", each.data * 0.5) for each in module.parameters()],
    "set from vector": set_from_vector,
    "load": lambda module: module.load_state_dict({name: v.flip(0) * 0.5 for name, v in module.state_dict().items()}),
    "write a few": torch.no_grad()(write_a_few),
}


class Normalised(Net):
    """Normalises a weight in its forward, in place, as ArcFace and old weight normalisation do."""

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.copy_(functional.normalize(self.first.weight.float(), dim=0))
            self.blocks[1].weight.data.mul_(0.5)
        return super().forward(x, state)


class Student(Net):
    """With a frozen teacher in the same module, which follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(16, 16).requires_grad_(False)

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        x = super().forward(x, state)
        return x - self.teacher(x)


def follow(module: nn.Module) -> None:
    with torch.no_grad():
        module.teacher.weight.lerp_(module.blocks[0].weight, 0.25)
        module.teacher.bias.data.mul_(0.5).add_(module.blocks[0].bias.data, alpha=0.5)


def plainly(size: int, precision: str, make: Callable[[], nn.Module], write: Write) -> dict[str, torch.Tensor]:
    """fp32 weights beside a model for each rank in the compute dtype; a write replaces the elements that it changes."""
    weights = {name: parameter.detach().clone() for name, parameter in seeded(make).named_parameters()}
    models = [seeded(make).to(DTYPES[precision]) for _ in range(size)]
    trained = [name for name, parameter in models[0].named_parameters() if parameter.requires_grad]
    for _ in range(NUM_STEPS):
        sums = {name: torch.zeros_like(weights[name]) for name in trained}
        for rank, model in enumerate(models):
            write(model)
            model(inputs(rank).to(DTYPES[precision])).float().square().mean().backward()
            for name in trained:
                gradient = model.get_parameter(name).grad
                sums[name] += torch.zeros(()) if gradient is None else gradient
            model.zero_grad()
        for name, parameter in models[0].named_parameters():
            held = parameter.detach()
            # What is frozen is in the compute dtype alone.
            kept = parameter.requires_grad and held == weights[name].to(held.dtype)
            weights[name] = torch.where(torch.as_tensor(kept), weights[name], held.float())
        for name in trained:
            mean = (sums[name] / size).to(DTYPES[precision]).float()
            weights[name].add_(mean, alpha=-0.1)
        for model in models:
            for name in trained:
                model.get_parameter(name).data.copy_(weights[name])
    return weights


def train(
    world: zerotrain.World, stage: int, precision: str, make: Callable[[], nn.Module], write: Write, scoped: bool
) -> dict[str, torch.Tensor]:
    engine = build(world, stage, precision, seeded(make))
    for _ in range(NUM_STEPS):
        with torch.no_grad(), engine.forward_scope() if scoped else nullcontext():
            write(engine.module)
        engine.backward(engine(inputs(world.rank)).float().square().mean())
        engine.step()
    return engine.full_state_dict()


@pytest.mark.case(
    "around_a_step",
    "write weights between steps: `load_state_dict`, `clamp_`, `p.data.clamp_`, `p.data = ...`, `vector_to_parameters`",
    "kept, also in 16 bits, where elements that are not written keep their master weight",
)
@EVERYWHERE
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.thinned(2)
def test_weights_written_between_steps_are_trained_on(write, stage, size, precision):
    """In a `forward_scope` at stage 3 and on two ranks, else outside; tests/bits has it the other way round."""
    require_trained_on(write, stage, size, precision, scoped=stage == 3 or size == 2)


def require_trained_on(write: Write, stage: int, size: int, precision: str, *, scoped: bool) -> None:
    got, _ = run_threads(lambda world: train(world, stage, precision, Net, write, scoped), size, late_rank=1)
    assert_same(got[0], plainly(size, precision, Net, write))


@pytest.mark.case("around_a_step", "write weights in the forward (normalised weights)", "kept")
@EVERYWHERE
def test_weights_written_in_the_forward_are_trained_on(stage, size, precision):
    got, _ = run_threads(lambda world: train(world, stage, precision, Normalised, bool, False), size, late_rank=1)
    assert_same(got[0], plainly(size, precision, Normalised, bool))


@pytest.mark.case("around_a_step", "let a frozen teacher or target network in the same module follow", "kept")
@EVERYWHERE
def test_a_frozen_teacher_in_the_same_module_follows(stage, size, precision):
    got, _ = run_threads(lambda world: train(world, stage, precision, Student, follow, True), size, late_rank=1)
    assert_same(got[0], plainly(size, precision, Student, follow))


@pytest.mark.case(
    "around_a_step",
    "at stage 3",
    'the same inside `with torch.no_grad(), engine.forward_scope()`; outside it refused: "... '
    'write them with engine.load_state_dict(...)"',
    under=(
        "write weights between steps: `load_state_dict`, `clamp_`, `p.data.clamp_`, `p.data = ...`, "
        "`vector_to_parameters`"
    ),
)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@on_ranks(2)
def test_where_a_rank_has_its_part_alone_a_write_between_engine_calls_is_refused(world, write):
    engine = build(world, 3, "fp32")
    with pytest.raises(zerotrain.EngineStateError, match=r"engine\.load_state_dict"):
        write(engine.module)


@pytest.mark.case(
    "around_a_step",
    "write other weights on each rank",
    'all ranks end: "weights written in place, as a hash: ... on rank 0, ..."; a write through '
    "`p.data` at stages 0 to 2 is not compared",
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_ranks_that_write_other_weights_are_told(world, stage, precision):
    engine = build(world, stage, precision)
    with torch.no_grad(), engine.forward_scope():
        engine.module.first.weight.add_(world.rank)
    engine.backward(engine(inputs(world.rank)).sum())
    with pytest.raises(zerotrain.DisagreementError, match="weights written in place"):
        engine.step()


@pytest.mark.case(
    "around_a_step",
    '`.double()`, `.to("meta")`, `p.data = ` something of another shape',
    'refused: "... lies in memory of the engine"; `.to` the same device and `.to(memory_format=...)` change nothing',
)
def test_what_cannot_lie_in_the_engines_memory_is_refused_where_it_is_said():
    engine = build(alone(), 2, "fp32")
    with pytest.raises(zerotrain.EngineStateError, match=r"first\.weight lies in memory of the engine"):
        engine.module.double()
    engine.module.to("cpu").to(memory_format=torch.channels_last)
    engine.backward(engine(inputs(0)).sum())
    engine.step()
