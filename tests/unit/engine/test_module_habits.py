"""What users do to a model beside training it: copies, hooks, new parts, torch.compile."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import EVERYWHERE, SGD, Net, build
from tests.unit.engine.parts import DTYPES, Losses, Plain, alone, assert_same, on_ranks, seeded
from tests.unit.engine.test_habits import inputs


def one_step(engine: zerotrain.ZeroEngine) -> None:
    engine.backward(engine(inputs(engine.world.rank)).float().square().mean())
    engine.step()


def saved_and_loaded(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.case(
    "around_a_step",
    "`deepcopy`, `pickle` or `torch.save` of `engine.module`",
    "a plain module with the weights of now, in the compute precision; at stage 3 inside "
    "`engine.forward_scope()`, outside it refused",
)
@EVERYWHERE
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.thinned(2)
@on_ranks(late_rank=0)
def test_a_copy_of_the_module_is_a_plain_module_with_the_weights_of_now(world, name, stage, size, precision):
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=0.0005, units=["blocks.*"])
    engine = zerotrain.build_engine(
        seeded(Net), optimizer=SGD, zero=zero, precision=precision, activation_checkpointing=True, world=world
    )
    one_step(engine)
    if stage == 3:
        with pytest.raises(zerotrain.EngineStateError, match="forward_scope"):
            COPIES[name](engine.module)
    with engine.forward_scope() if stage == 3 else nullcontext():
        other = COPIES[name](engine.module)
    assert {type(parameter) for parameter in other.parameters()} == {nn.Parameter}
    weights = engine.full_state_dict()
    for key, parameter in other.named_parameters():
        if world.rank == 0:
            assert torch.equal(parameter, weights[key].to(parameter.dtype))
    x = inputs(world.rank).to(next(other.parameters()).dtype)
    before = engine(x)
    assert torch.equal(other(x), before)
    one_step(engine)  # changes the engine's model alone
    assert torch.equal(other(x), before)
    other(x).float().sum().backward()  # and the copy is trained by nobody
    assert other.first.weight.grad is not None
    one_step(engine)


@pytest.mark.case(
    "around_a_step",
    "`AveragedModel(engine.module)`",
    "as in plain PyTorch; at stage 3 inside `with torch.no_grad(), engine.forward_scope()`",
)
@EVERYWHERE
@pytest.mark.thinned(3)
@on_ranks(late_rank=0)
def test_an_average_of_the_weights_is_that_of_plain_pytorch(world, stage, size, precision):
    """What AveragedModel does, of a model in the compute precision."""
    engine = build(world, stage, precision)
    scope: Any = engine.forward_scope if stage == 3 else nullcontext
    with torch.no_grad(), scope():
        average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    seen = []
    for _ in range(3):
        one_step(engine)
        with torch.no_grad(), scope():
            average.update_parameters(engine.module)
        seen.append(engine.full_state_dict())
    if world.rank == 0:
        plain = seeded(Net).to(next(average.parameters()).dtype)
        expected = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for weights in seen:
            plain.load_state_dict(weights)
            expected.update_parameters(plain)
        for mine, other in zip(average.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, other)
    return engine.full_state_dict()


@pytest.mark.case(
    "around_a_step",
    "`functional_call(engine.module, weights, ...)` inside `engine.forward_scope()`",
    "uses the weights of the call",
)
@EVERYWHERE
def test_weights_given_to_functional_call_are_used_and_get_the_gradients(stage, size, precision):
    dtype = DTYPES[precision]

    def call(module: nn.Module, rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model = seeded(Net)
        given = {key: (2 * p).detach().to(dtype).requires_grad_() for key, p in model.named_parameters()}
        output = torch.func.functional_call(module, given, (inputs(rank).to(dtype),))
        used = [value for key, value in given.items() if not key.startswith("last")]
        return output, dict(zip(given, torch.autograd.grad(output.float().square().mean(), used), strict=False))

    def on_a_rank(world: zerotrain.World) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        engine = build(world, stage, precision)
        one_step(engine)
        with engine.forward_scope():
            result = call(engine.module, world.rank)
        one_step(engine)
        return result

    for rank, (output, gradients) in enumerate(run_threads(on_a_rank, size, late_rank=0)[0]):
        expected, expected_gradients = call(seeded(Net).to(dtype), rank)
        assert torch.equal(output, expected)
        assert all(torch.equal(gradients[key], value) for key, value in expected_gradients.items())


@pytest.mark.case(
    "around_a_step",
    "keep a list of parameters from before the build, or attributes on them",
    "they are the model's own, with the weights of now; at stage 3 read them inside "
    "`engine.forward_scope()`, outside it refused",
)
@EVERYWHERE
@on_ranks(late_rank=0)
def test_a_list_of_parameters_from_before_the_build_stays_what_the_model_has(world, stage, size, precision):
    model = seeded(Net)
    kept = list(model.named_parameters())
    for _, parameter in kept:
        parameter.mark = "mine"
    engine = build(world, stage, precision, model)
    for _ in range(2):
        one_step(engine)
        weights = engine.full_state_dict()
        if stage == 3:
            with pytest.raises(zerotrain.EngineStateError, match="forward_scope"):
                kept[0][1].sum()
        with torch.no_grad(), engine.forward_scope() if stage == 3 else nullcontext():
            for (name, parameter), now in zip(kept, engine.module.parameters(), strict=True):
                assert parameter is now
                assert parameter.mark == "mine"
                value = parameter + 0  # on every rank
                assert world.rank or torch.equal(value, weights[name].to(parameter.dtype))


@pytest.mark.case(
    "around_a_step",
    "read or set `p.grad`, `clip_grad_norm_`, `module.zero_grad()` between backward and step",
    'refused: "the gradient of ... is in the engine", with the calls to make; before the backward '
    "and after the step as in plain PyTorch",
)
@EVERYWHERE
@on_ranks(late_rank=0)
def test_gradients_that_are_in_the_engine_are_answered_with_the_call_to_make(world, stage, size, precision):
    engine = build(world, stage, precision)
    nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)  # nothing to clip yet, as in plain PyTorch
    engine.module.zero_grad()
    for is_last in (False, True):
        with nullcontext() if is_last else engine.no_sync():
            engine.backward(engine(inputs(world.rank)).float().square().mean())
        for look in (
            lambda: engine.module.first.weight.grad,
            lambda: nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0),
            lambda: engine.module.zero_grad(),
        ):
            with pytest.raises(zerotrain.EngineStateError, match=r"max_grad_norm=.*engine\.zero_grad\(\)"):
                look()
    engine.step()
    engine.module.zero_grad()
    assert engine.module.first.weight.grad is None


@pytest.mark.case(
    "around_a_step",
    "`parameter.register_hook`, `register_post_accumulate_grad_hook`, before or after the build",
    "as in plain PyTorch; `p.grad` is that of this backward",
)
@EVERYWHERE
def test_hooks_on_gradients_see_this_ranks_own_whenever_they_were_registered(stage, size, precision):
    def hook_all(module: nn.Module, seen: dict[str, list[torch.Tensor]]) -> None:
        for name, parameter in module.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone())
            )
            parameter.register_hook(lambda grad, name=name: seen.setdefault(name, []).append(grad.clone()))

    def on_a_rank(world: zerotrain.World) -> dict[str, list[torch.Tensor]]:
        model, seen = seeded(Net), {}
        hook_all(model, seen)
        engine = build(world, stage, precision, model)
        hook_all(engine.module, seen)
        one_step(engine)
        hook_all(engine.module, seen)
        return seen

    def plain(rank: int) -> dict[str, list[torch.Tensor]]:
        dtype = DTYPES[precision]
        model = seeded(Net).to(dtype)
        model(inputs(rank).to(dtype)).float().square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    for rank, seen in enumerate(run_threads(on_a_rank, size, late_rank=0)[0]):
        expected = plain(rank)
        assert set(seen) == set(expected)
        for name, gradients in seen.items():
            assert len(gradients) == 4
            assert all(torch.equal(gradient, expected[name]) for gradient in gradients)


CHANGES: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a parameter": (lambda module: setattr(module.first, "weight", nn.Parameter(torch.ones(16, 8))), "first.weight"),
    "a module": (lambda module: module.blocks.__setitem__(1, nn.Linear(16, 16)), "blocks.1"),
    "an adapter": (
        lambda module: module.blocks[2].register_parameter("adapter", nn.Parameter(torch.ones(2))),
        "blocks.2.adapter",
    ),
    "assigned": (
        lambda module: module.load_state_dict({n: p + 1 for n, p in seeded(Net).named_parameters()}, assign=True),
        "first.weight",
    ),
    "normalised": (lambda module: nn.utils.weight_norm(module.first), "first.weight_g"),
}


@pytest.mark.case(
    "around_a_step",
    "replace a parameter, add or replace a layer, `load_state_dict(assign=True)`, `weight_norm` after the build",
    'refused at the next forward: "... came into the model after build_engine"',
)
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2)
def test_what_comes_into_the_model_after_the_build_is_found_at_the_next_forward(world, change, stage):
    (write, name), engine = CHANGES[change], build(world, stage, "fp32")
    with engine.forward_scope():
        write(engine.module)
    for _ in range(2):
        with pytest.raises(zerotrain.EngineStateError, match=f"{name}, a .* came into the model after"):
            engine(inputs(world.rank))


@pytest.mark.case(
    "around_a_step", "add dropout, a frozen module, a parametrization after the build", "as in plain PyTorch"
)
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_parts_without_parameters_frozen_ones_and_ties_may_come(world, stage):
    engine = build(world, stage, "fp32")
    module = engine.module
    module.dropout = nn.Dropout()
    module.critic = nn.Linear(2, 2).requires_grad_(False)
    module.first.bias = module.first.bias
    nn.utils.parametrize.register_parametrization(module.last, "weight", nn.Identity())
    one_step(engine)


TRANSFORMS: dict[str, Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]] = {
    "jacrev": lambda model, x: torch.func.jacrev(model)(x[0]).float().square().mean(),
    "vmap of grad": lambda model, x: (
        torch.func.vmap(torch.func.grad(lambda z: model(z).float().square().sum()))(x).float().square().mean()
    ),
    "vmap": lambda model, x: torch.func.vmap(model)(x).float().square().mean(),
    "jacrev before an ordinary forward": lambda model, x: (
        torch.func.jacrev(model)(x[0]).float().square().mean() + model(x).float().square().mean()
    ),
    "an ordinary forward before and after vmap of grad": lambda model, x: (
        model(x).float().mean()
        + torch.func.vmap(torch.func.grad(lambda z: model(z).float().square().sum()))(x).float().square().mean()
        + model(x).float().square().mean()
    ),
}


@pytest.mark.case(
    "around_a_step",
    "`jacrev`, `grad`, `vmap` of `engine.module` inside `engine.forward_scope()`, also beside ordinary forwards",
    "as in plain PyTorch",
)
@EVERYWHERE
@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_torch_func_makes_of_the_model_is_trained(name, stage, size, precision):
    dtype = DTYPES[precision]

    def on_a_rank(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = build(world, stage, precision)
        with engine.forward_scope():
            loss = TRANSFORMS[name](engine.module, inputs(world.rank).to(dtype))
        engine.backward(loss)
        engine.step()
        return engine.full_state_dict()

    def losses(model: nn.Module, step: int, rank: int) -> Losses:
        yield TRANSFORMS[name](model, inputs(rank).to(dtype)), 1.0

    expected = Plain(size, Net, SGD, precision, losses=losses).train(0)
    assert_same(run_threads(on_a_rank, size, late_rank=0)[0][0], expected)


@pytest.mark.case(
    "around_a_step",
    "`torch.compile` of the whole model, before or after the build",
    "trains as it is, with a graph for each unit; `compile=True` compiles units by themselves",
)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("place", ["before", "in place before", "in place after", "within forward_scope"])
def test_a_model_that_is_compiled_as_a_whole_trains_as_it_is(place, stage):
    torch._dynamo.reset()
    expected = build(alone(), stage, "fp32")
    model = seeded(Net)
    if place == "in place before":
        model.compile(backend="aot_eager")
    engine = build(alone(), stage, "fp32", torch.compile(model, backend="aot_eager") if place == "before" else model)
    if place == "in place after":
        engine.module.compile(backend="aot_eager")
    for _ in range(2):
        one_step(expected)
        if place == "within forward_scope":
            compiled = torch.compile(engine.module, backend="aot_eager")
            with engine.forward_scope():
                output = compiled(inputs(0))
            engine.backward(output.square().mean())
            engine.step()
        else:
            one_step(engine)
    got = {name.removeprefix("_orig_mod."): value for name, value in engine.full_state_dict().items()}
    for name, value in expected.full_state_dict().items():
        assert torch.allclose(got[name], value)


@pytest.mark.case(
    "around_a_step", "copy or pickle the engine itself", 'refused: "an engine can be neither copied nor pickled"'
)
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_engine_itself_is_neither_copied_nor_pickled(copied):
    with pytest.raises(zerotrain.EngineStateError, match=r"pickle engine\.module"):
        copied(build(alone(), 3, "fp32"))


def test_nothing_of_an_engine_holds_its_world_in_a_circle():
    world = alone()
    gone = weakref.ref(world)
    engine = build(world, 2, "fp32")
    one_step(engine)
    gc.collect()
    gc.disable()  # what only the collector frees may live until Python ends, and gloo's threads with it
    try:
        del engine, world
        assert gone() is None
    finally:
        gc.enable()


def test_an_engine_that_is_collected_while_another_model_is_built_disturbs_nothing():
    """The garbage collector runs where it likes: here it does while PyTorch goes through its hooks."""
    engine = build(alone(), 2, "fp32")
    engine.module.circle = [engine]
    gone = weakref.ref(engine)
    del engine

    def collect(*_: Any) -> None:
        gc.collect()

    handles = [register_module_parameter_registration_hook(hook) for hook in (collect, lambda *_: None)]
    try:
        assert torch.nn.Linear(2, 2).weight.requires_grad
        assert gone() is None
    finally:
        for handle in handles:
            handle.remove()
