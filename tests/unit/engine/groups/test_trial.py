"""Optimizers of one's own: those that work on parts of tensors train, the others are refused with what to do."""

import functools
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.engine.groups import own_optimizers as own
from tests.unit.engine.groups.own_optimizers import Own
from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, train
from zerotrain.comm.ranks.world import World
from zerotrain.engine.groups import trial
from zerotrain.errors import ConfigError
from zerotrain.testing.fake_wire import run_threads

FITTING = [Own, own.Momentum, own.CountsInItsGroup, own.FlatOnly]
IN_PARTS = r"it updated a tensor in parts differently than at once.* set `whole_tensor = True` in its class"
ON_OTHERS = "in a test on small tensors, the update of one depended on the others"
REFUSED: dict[type[Own], str] = {
    **dict.fromkeys(
        [own.LayerwiseRate, own.LayerwiseAdam, own.OfUnitNorm, own.ClipsEachTensor, own.SignOfTheMean], IN_PARTS
    ),
    **dict.fromkeys([own.Centred, own.OnceInTen, own.MatricesOnly, own.InBlocksOf8Bits], IN_PARTS),
    **dict.fromkeys([own.ClipsAll, own.GuessesItsRate], ON_OTHERS),
    own.KeepsNumbersInItsGroup: "its step changes k in its param_groups",
    **dict.fromkeys([own.Langevin, own.PythonsNoise, own.DrawsLater], "its step draws random numbers"),
    **dict.fromkeys([own.WantsAClosure, own.GoesBackward, own.Sharpness], "its step calls a closure"),
    own.Fails: "its step fails on small tensors .KeyError: 'layers'.",
    own.FailsLater: "its step fails on small tensors .KeyError: 'rate'.",
}


def declared(kind: type[Own]) -> type[Own]:
    return type(kind.__name__, (kind,), {"whole_tensor": True})


@pytest.mark.case("optimizers", "an optimizer of your own, element by element", "same bits")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", FITTING)
@pytest.mark.thinned(2, first=1)
def test_what_fits_trains_at_every_stage_as_in_plain_pytorch(kind: type[Own], size: int) -> None:
    def on_a_rank(world: World, stage: int) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=kind, zero={"stage": stage})
        train(engine, 0, 1)
        return engine.full_state_dict()

    # Plain PyTorch has no flat tensors: there the rule itself, which looks at no shape, stands for the one that does.
    expected = Plain(size, optimizer=Own if kind is own.FlatOnly else kind).train(0, 1)
    for stage in range(4):
        assert_same(run_threads(functools.partial(on_a_rank, stage=stage), size, late_rank=0)[0][0], expected)


@pytest.mark.case(
    "optimizers",
    "that calls a closure (LBFGS, SAM)",
    "refused at the build",
    under="an optimizer of your own, element by element",
)
@pytest.mark.case(
    "optimizers",
    "that takes a number over all tensors (clipping within, Prodigy, D-Adaptation), draws noise "
    "(SGLD), or changes its arguments in its `param_groups`",
    "refused at the build, declared or not",
    under="an optimizer of your own, element by element",
)
@pytest.mark.case(
    "optimizers",
    "that takes a norm, a mean or the shape of a tensor (LARS, LAMB, Shampoo, gradient centralisation)",
    "refused at the build; with `whole_tensor = True` in its class same bits",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_is_refused_with_what_to_do(kind: type[Own]) -> None:
    with pytest.raises(ConfigError, match=f"optimizer={kind.__name__}: .*{REFUSED[kind]}"):
        engine_on(alone(), optimizer=kind)


@pytest.mark.case(
    "optimizers",
    "that takes a norm, a mean or the shape of a tensor (LARS, LAMB, Shampoo, gradient centralisation)",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("kind", [own.LayerwiseRate, own.LayerwiseAdam, own.Centred])
@pytest.mark.parametrize("stage", range(4))
def test_what_is_declared_to_update_whole_tensors_trains_as_in_plain_pytorch(kind: type[Own], stage: int) -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=declared(kind), zero={"stage": stage})
        train(engine, 0, 1)
        return engine.full_state_dict()

    assert_same(run_threads(on_a_rank, 2, late_rank=1)[0][0], Plain(2, optimizer=kind).train(0, 1))


@pytest.mark.case(
    "optimizers",
    "that takes a number over all tensors (clipping within, Prodigy, D-Adaptation), draws noise "
    "(SGLD), or changes its arguments in its `param_groups`",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("kind", [own.ClipsAll, own.GuessesItsRate, own.Langevin, own.Sharpness])
def test_what_whole_tensors_are_not_enough_for_is_refused_though_declared(kind: type[Own]) -> None:
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        engine_on(alone(), optimizer=declared(kind))


def test_a_declared_optimizer_may_want_shapes_that_are_not_tried() -> None:
    """Its own error comes with the first step."""
    engine = engine_on(alone(), optimizer=declared(own.Fails))
    with pytest.raises(KeyError, match="layers"):
        train(engine, 0)


TORCHS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_are_rightly_known_to_fit(name: str, options: dict[str, Any]) -> None:
    unknown = type("Unknown", (getattr(torch.optim, name),), {"__module__": "somewhere"})
    trials = trial.Trials(functools.partial(unknown, lr=0.01, **options), torch.device("cpu"))
    trials.require_fit({"name": "parameters", **settings_of(unknown, options)})


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torchs_that_need_whole_tensors_are_seen_to(name: str) -> None:
    unknown = type("Unknown", (getattr(torch.optim, name),), {"__module__": "somewhere"})
    trials = trial.Trials(functools.partial(unknown, lr=0.01), torch.device("cpu"))
    trials.require_fit({"name": "whole parameters", **settings_of(unknown, {})})
    with pytest.raises(ConfigError, match=IN_PARTS):
        trials.require_fit({"name": "parameters", **settings_of(unknown, {})})


def settings_of(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    (group,) = kind([torch.zeros(2, 2)], lr=0.01, **options).param_groups
    return {name: value for name, value in group.items() if name != "params"}


def test_a_rate_of_zero_before_a_warm_up_hides_nothing() -> None:
    with pytest.raises(ConfigError, match=IN_PARTS):
        engine_on(alone(), optimizer=functools.partial(own.OfUnitNorm, lr=0.0))


def test_each_group_of_hyperparameters_is_tried_once() -> None:
    class Optional(Own):
        def __init__(self, params: Any, lr: float = 0.01, normed: bool = False) -> None:
            super().__init__(params, lr, normed=normed)

        def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            return gradient / gradient.norm() if group["normed"] else gradient

    groups = [{"params": "*.bias", "lr": 0.1}, {"params": "*"}]
    engine_on(alone(), optimizer=Optional, param_groups=groups)
    with pytest.raises(ConfigError, match=IN_PARTS):
        engine_on(alone(), optimizer=Optional, param_groups=[groups[0], groups[1] | {"normed": True}])


@pytest.mark.parametrize("kind", [own.Momentum, own.LayerwiseRate, own.Langevin, own.DrawsLater])
def test_a_trial_draws_no_random_numbers_and_prints_nothing(
    kind: type[Own], capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    model = Linears()
    before = torch.get_rng_state()
    try:
        zerotrain.build_engine(model, optimizer=kind, world=alone())
    except ConfigError:
        assert kind is not own.Momentum
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
