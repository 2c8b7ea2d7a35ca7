"""What users do to an optimizer, its groups and its schedule: as in plain PyTorch, or a sentence. Ranks are threads."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.groups.test_optimizers import model
from tests.unit.engine.habits import EVERYWHERE
from tests.unit.engine.parts import Plain, alone, assert_same, engine_on, inputs, train
from zerotrain.comm.world import World
from zerotrain.errors import DisagreementError, EngineStateError

STAGES = pytest.mark.parametrize("stage", range(4))
DECAYING: Any = functools.partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def trained(
    stage: int, size: int, precision: str, optimizer: Any, between: Callable[[Any], object] = lambda engine: None
) -> dict[str, torch.Tensor]:
    """Rank 0's weights of 3 steps, with what is done to the engine after each; the last rank is late."""

    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=optimizer, zero={"stage": stage}, precision=precision)
        for step in range(3):
            train(engine, step)
            between(engine)
        return engine.full_state_dict()

    return run_threads(on_a_rank, size, late_rank=size - 1)[0][0]


# ---- what the optimizer was given


@pytest.mark.case(
    "optimizers",
    "`build_engine(optimizer=partial(AdamW, weight_decay=0.1))`",
    "every parameter decays, as in plain PyTorch: same bits",
)
@EVERYWHERE
def test_weight_decay_of_the_optimizer_is_for_every_parameter(stage, size, precision):
    expected = Plain(size, optimizer=DECAYING, precision=precision).train(0, 1, 2)
    assert_same(trained(stage, size, precision, DECAYING), expected)


@pytest.mark.case(
    "optimizers",
    '`engine.param_groups[0]["lr"] = ...`',
    "reaches every parameter: without `param_groups` there is one group",
)
def test_one_group_holds_all_so_that_a_rate_set_on_the_first_is_set_for_all():
    engine = engine_on(alone(), optimizer=DECAYING)
    (group,) = engine.param_groups
    assert (group["name"], group["weight_decay"]) == ("parameters", 0.5)


def with_a_tensor_rate(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=torch.tensor(0.1), weight_decay=0.1)


@pytest.mark.case("optimizers", "a tensor as `lr`, also changed in place", "same bits")
@EVERYWHERE
def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(stage, size, precision):
    def halve(having_groups: Any) -> None:
        for group in having_groups.param_groups:
            group["lr"].mul_(0.5)

    reference = Plain(size, optimizer=with_a_tensor_rate, precision=precision)
    for step in range(3):
        expected = reference.train(step)
        halve(reference.optimizer)
    assert_same(trained(stage, size, precision, with_a_tensor_rate, halve), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "foreach": {"foreach": True},
    "maximize": {"maximize": True},
    "amsgrad": {"amsgrad": True},
    "tensors as betas": {"betas": (torch.tensor(0.9), torch.tensor(0.99))},
    "a rate of shape (1,)": {"lr": torch.tensor([0.1])},
}


@pytest.mark.case("optimizers", "`foreach`, `maximize`, `amsgrad`, tensors as betas (`fused`: see above)", "same bits")
@STAGES
@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_torchs_optimizers_do_what_they_do_in_plain_pytorch(name, stage):
    optimizer: Any = functools.partial(torch.optim.AdamW, **{"lr": 0.1} | OPTIONS[name])
    assert_same(trained(stage, 2, "fp32", optimizer), Plain(2, optimizer=optimizer).train(0, 1, 2))


# ---- hyperparameters that differ between the ranks


def set_to(value: Any, name: str) -> Callable[[dict[str, Any]], None]:
    return lambda group: group.update({name: value})


DIFFERENT: dict[str, tuple[Any, Callable[[dict[str, Any]], object], str]] = {
    "weight decay": (
        DECAYING,
        set_to(0.25, "weight_decay"),
        "weight_decay of group 'parameters': 0.5 on ranks? 0.*, 0.25 on rank 1",
    ),
    "betas": (DECAYING, set_to((0.5, 0.9), "betas"), r"betas of group 'parameters': \[0.9, 0.999\] on rank 0, \[0.5, "),
    "a flag": (DECAYING, set_to(True, "maximize"), "maximize of group 'parameters': False on rank 0, True on rank 1"),
    "momentum": (MOMENTUM, set_to(0.5, "momentum"), "momentum of group 'parameters': 0.9 on rank 0, 0.5 on rank 1"),
    "a whole number": (MOMENTUM, set_to(2, "lr"), "lr of group 'parameters': 0.1 on rank 0, 2 on rank 1"),
    "a tensor": (with_a_tensor_rate, lambda group: group["lr"].fill_(0.5), "lr of group 'parameters': 0.1.* on rank 0"),
    "a setting gone": (MOMENTUM, lambda group: group.pop("dampening"), "dampening .*: 0 on rank 0, none on rank 1"),
}


def differs(name: str, stage: int = 2, size: int = 2, precision: str = "fp32") -> None:
    optimizer, change, answer = DIFFERENT[name]

    def on_a_rank(world: World) -> None:
        engine = engine_on(world, optimizer=optimizer, zero={"stage": stage}, precision=precision)
        train(engine, 0)
        if world.rank == 1:
            change(engine.param_groups[0])
        with pytest.raises(DisagreementError, match="have not done the same since the last step; " + answer) as told:
            train(engine, 1)
        assert "backwards" not in str(told.value)

    run_threads(on_a_rank, size, late_rank=0)


@pytest.mark.case(
    "optimizers",
    "a weight decay, betas, momentum, flag or tensor `lr` that differs on one rank in mid-run",
    "all ranks end in that step, and say which",
)
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_hyperparameter_that_differs_on_one_rank_is_told_at_the_step(name):
    differs(name)


@pytest.mark.case(
    "optimizers", "a weight decay, betas, momentum, flag or tensor `lr` that differs on one rank in mid-run"
)
@EVERYWHERE
def test_weight_decay_that_differs_is_told_everywhere(stage, size, precision):
    differs("weight decay", stage, size, precision)


# ---- torch's schedulers


def by_transformers(optimizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)


def for_each(value: Callable[[int], Any], optimizer: Any) -> list[Any]:
    """One for each group."""
    return [value(number) for number, _ in enumerate(optimizer.param_groups)]


def cosine(optimizer: Any) -> Any:
    return schedulers.CosineAnnealingLR(optimizer, 10)


def one_cycle(optimizer: Any) -> Any:
    return schedulers.OneCycleLR(optimizer, for_each(lambda number: 0.1 * (1 + number), optimizer), total_steps=8)


def by_function(optimizer: Any) -> Any:
    return schedulers.LambdaLR(optimizer, for_each(lambda number: lambda step: 0.9 ** (step * number), optimizer))


def in_sequence(optimizer: Any) -> Any:
    parts = [schedulers.LinearLR(optimizer, 0.1, 1.0, 2), schedulers.CosineAnnealingLR(optimizer, 6)]
    return schedulers.SequentialLR(optimizer, parts, [2])


SCHEDULERS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a function for each group": (DECAYING, by_function),
    "CosineAnnealingLR": (DECAYING, cosine),
    "ReduceLROnPlateau": (DECAYING, lambda each: schedulers.ReduceLROnPlateau(each, patience=0)),
    "OneCycleLR, betas": (DECAYING, one_cycle),
    "OneCycleLR, momentum": (MOMENTUM, one_cycle),
    "SequentialLR": (DECAYING, in_sequence),
    "a tensor as rate": (with_a_tensor_rate, cosine),
    "transformers": (DECAYING, by_transformers),
}


def scheduled(scheduler: Any) -> list[float]:
    scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
    return list(scheduler.get_last_lr())


@pytest.fixture
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.case(
    "optimizers",
    "schedulers of torch and transformers over several groups, resumed in the middle with their state",
    "the rates and the bits of plain PyTorch",
)
@pytest.mark.case(
    "optimizers",
    "torch's learning rate schedulers on `engine.optimizer`",
    "the rates and the bits of plain PyTorch, and no warning",
)
@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_schedules_each_group_and_goes_on_from_its_state(name, tmp_path):
    (factory, make), plain = SCHEDULERS[name], model()

    def built() -> tuple[zerotrain.ZeroEngine, Any]:
        engine = zerotrain.build_engine(
            model(), optimizer=factory, decay_all=False, param_groups=[{"params": "0.*", "lr": 0.3}]
        )
        return engine, make(engine.optimizer)

    optimizer = factory(
        [
            {"params": [plain[2].weight]},
            {"params": [plain[1].weight, plain[1].bias, plain[2].bias], "weight_decay": 0.0},
            {"params": [plain[0].weight], "lr": 0.3},
            {"params": [plain[0].bias], "lr": 0.3, "weight_decay": 0.0},
        ]
    )
    theirs, (engine, ours) = make(optimizer), built()
    assert [group["name"] for group in engine.param_groups] == ["matrices", "others", "group 0", "group 0 others"]
    for step in range(6):
        if step == 3:
            engine.save(tmp_path / "middle")
            kept = ours.state_dict()
            engine, ours = built()
            engine.load(tmp_path / "middle")
            ours.load_state_dict(kept)
        engine.backward(engine(torch.full((5, 3), 1.0 + step)).square().mean())
        engine.step()
        optimizer.zero_grad()
        plain(torch.full((5, 3), 1.0 + step)).square().mean().backward()
        optimizer.step()
        assert scheduled(ours) == scheduled(theirs)
    assert_same(engine.full_state_dict(), plain.state_dict())


@pytest.mark.case(
    "optimizers",
    "`optimizer.zero_grad()` before the forward, before the backward or after the step, and `optimizer.step()`",
    "same bits",
)
@EVERYWHERE
def test_a_loop_written_for_torch_trains_as_in_plain_pytorch(stage, size, precision):
    """With zero_grad in each of its three places."""
    expected = Plain(size, optimizer=DECAYING, precision=precision)
    cosine = schedulers.CosineAnnealingLR(expected.optimizer, 5)
    for step in range(3):
        weights = expected.train(step)
        cosine.step()

    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=DECAYING, zero={"stage": stage}, precision=precision)
        optimizer = engine.optimizer
        scheduler = schedulers.CosineAnnealingLR(optimizer, 5)
        for step in range(3):
            optimizer.zero_grad()
            loss = engine(inputs(step, world.rank))
            optimizer.zero_grad(set_to_none=True)
            engine.backward(loss)
            assert optimizer.step().grad_norm > 0
            optimizer.zero_grad()
            scheduler.step()
        return engine.full_state_dict()

    assert_same(run_threads(on_a_rank, size, late_rank=0)[0][0], weights)


def test_the_groups_of_the_optimizer_are_the_engines_and_a_schedule_begins_with_the_rate_of_now():
    engine = engine_on(alone(), optimizer=DECAYING)
    assert engine.optimizer is engine.optimizer
    assert engine.optimizer.param_groups is engine.param_groups
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.param_groups[0]["initial_lr"] == 0.1
    engine.param_groups[0]["lr"] = 0.4
    assert schedulers.LambdaLR(engine.optimizer, lambda step: 1.0).base_lrs == [0.4]
    assert engine.param_groups[0]["initial_lr"] == 0.4


def unscale(optimizer: torch.optim.Optimizer) -> None:
    """As a loop written for torch does."""
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


@pytest.mark.case(
    "optimizers",
    '`engine.optimizer.state_dict()`, `step(closure)`, `group["params"]`',
    "refused, with the call to use instead",
)
@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (lambda engine: engine.optimizer.state_dict(), "has no state dict: its state is sharded over the ranks"),
        (lambda engine: engine.optimizer.load_state_dict({}), "has no state dict"),
        (lambda engine: engine.optimizer.step(lambda: 0.0), "takes no closure here; call engine.backward"),
        (lambda engine: engine.param_groups[0]["params"], "holds only hyperparameters"),
        (lambda engine: unscale(engine.optimizer), "itself: leave out a GradScaler"),
        (lambda engine: engine.optimizer.step(), "step came before a backward"),
    ],
)
def test_what_the_optimizer_cannot_do_is_answered_with_what_can(call, answer):
    with pytest.raises(EngineStateError, match=answer):
        call(engine_on(alone()))


def test_an_optimizer_whose_engine_is_gone_says_so():
    optimizer = engine_on(alone()).optimizer
    with pytest.raises(EngineStateError, match="the engine of this optimizer is gone"):
        optimizer.zero_grad()
