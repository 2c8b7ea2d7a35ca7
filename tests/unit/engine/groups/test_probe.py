"""Optimizers of one's own: those that work on parts of tensors train, the others are refused with what to do."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.groups import keeping_optimizers as keeping, own_optimizers as own
from tests.unit.engine.groups.optimizer_life import optimizers, refusal, require_right
from tests.unit.engine.groups.own_optimizers import Own
from tests.unit.engine.parts import CPU, Linears, Plain, alone, assert_same, engine_on, inputs, train
from zerotrain.engine.groups.probe import probe
from zerotrain.errors import ConfigError

FITTING = [Own, own.Momentum, own.CountsInItsGroup, own.CountsInATensor]
IN_PARTS = r"it updated a tensor in parts differently than at once.* set `whole_tensor = True` in its class"
ON_OTHERS = "in a test on small tensors, the update of one depended on the others"
FAILS = "its step fails on small tensors .{}"
RANDOM = "two runs of the same steps .* by random numbers"
ANEW = r"it continued differently after it was rebuilt from its state, .*: {} is kept elsewhere; it must keep "
OF_ONE_TENSOR = [own.LayerwiseRate, own.OfUnitNorm, own.Centred, own.OnceInTen, own.InBlocksOf8Bits]
OF_ONE_TENSOR += [own.ProjectsSometimes, own.RoundsByPlace]
REFUSED: dict[type[Own], str] = {
    **dict.fromkeys(OF_ONE_TENSOR, IN_PARTS),
    **dict.fromkeys([own.ClipsAll, own.GuessesItsRate], ON_OTHERS),
    own.Langevin: RANDOM,
    own.WantsAClosure: FAILS.format("TypeError: .*'closure'.*so use AdamW"),
    own.Sharpness: FAILS.format("AssertionError: SAM requires a closure.*so use AdamW"),
    own.MatricesOnly: FAILS.format("ValueError: takes matrices alone"),
    own.Fails: FAILS.format("KeyError: 'layers'.$"),
    own.DoesNothing: "its steps changed no weight of small tensors",
    own.OneNumberOfATensor: r"it keeps 'count' of shape \(1,\).*, which ranks cannot cut",
    own.KeepsAWeight: "it keeps 'weight', a name of the engine's, .* under a name of its own",
    own.InAList: "it keeps 'means', a list, which ranks cannot cut and save",
    **dict.fromkeys([keeping.ByParameter, keeping.MadeWithIt], ANEW.format(r"self\.momenta")),
    keeping.Average: ANEW.format(r"self\.average"),
    keeping.Counts: ANEW.format(r"self\.num_steps"),
    keeping.Around: ANEW.format(r"self\.inner"),
    keeping.OnTheParameter: ANEW.format("what it needs"),
    keeping.InStateOfNoParameter: r"it keeps self\.state\['all'\], which is of no parameter",
}
REFUSED_THOUGH_DECLARED = [own.ClipsAll, own.GuessesItsRate, own.Langevin, own.Sharpness]
REFUSED_THOUGH_DECLARED += [keeping.ByParameter, keeping.Counts, keeping.Average]


def declared(kind: type[Own]) -> type[Own]:
    return type(kind.__name__, (kind,), {"whole_tensor": True})


@pytest.mark.case(
    "optimizers",
    "that calls a closure (LBFGS, SAM)",
    "refused at the build",
    under="an optimizer of your own, element by element",
)
@pytest.mark.case(
    "optimizers",
    "that takes a number over all tensors (clipping within, Prodigy, D-Adaptation), draws noise "
    "(SGLD), changes no weight, or keeps what no rank can cut",
    "refused at the build, declared or not",
    under="an optimizer of your own, element by element",
)
@pytest.mark.case(
    "optimizers",
    "that takes a norm, a mean or the shape of a tensor (LARS, LAMB, Shampoo, gradient centralisation)",
    "refused at the build; with `whole_tensor = True` in its class same bits",
    under="an optimizer of your own, element by element",
)
@pytest.mark.case(
    "optimizers",
    "that keeps it elsewhere: a dict or list of its own, a counter, an optimizer inside it, copies of weights",
    "refused at the build, which names it",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize(
    ("kind", "made"), [(each, each) for each in REFUSED] + [(each, declared(each)) for each in REFUSED_THOUGH_DECLARED]
)
def test_what_does_not_fit_is_refused_with_what_to_do(kind, made):
    with pytest.raises(ConfigError, match=f"optimizer={kind.__name__}: .*{REFUSED[kind]}"):
        engine_on(alone(), optimizer=made)


@pytest.mark.parametrize("kind", [own.MatricesOnly, own.LayerwiseRate, own.OneNumberOfATensor, own.RoundsByPlace])
def test_what_is_declared_may_take_matrices_alone_and_keep_what_it_likes(kind):
    engine = engine_on(alone(), functools.partial(nn.Linear, 3, 5, bias=False), optimizer=declared(kind))
    assert [group["name"] for group in engine.param_groups] == ["whole parameters"]


TORCHS = ["Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]


@pytest.mark.parametrize("options", [{}, {"foreach": True}], ids=["one by one", "foreach"])
@pytest.mark.parametrize("name", TORCHS)
def test_torchs_own_are_rightly_known_to_fit(name, options):
    unknown = type("Unknown", (getattr(torch.optim, name),), {"__module__": "somewhere"})
    factory = functools.partial(unknown, lr=0.01, **options)
    assert not probe(factory, {"name": "parameters", **settings_of(unknown, options)}, CPU)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_torchs_that_need_whole_tensors_are_seen_to(name):
    unknown = type("Unknown", (getattr(torch.optim, name),), {"__module__": "somewhere"})
    factory = functools.partial(unknown, lr=0.01)
    assert not probe(factory, {"name": "whole parameters", **settings_of(unknown, {})}, CPU)
    with pytest.raises(ConfigError, match=r"it keeps .*row_var" if name == "Adafactor" else FAILS.format("ValueError")):
        probe(factory, {"name": "parameters", **settings_of(unknown, {})}, CPU)


RIGHT = {f"torch.optim.{name}" for name in TORCHS} | {"torch.optim.Adafactor"}


def settings_of(kind: Any, options: dict[str, Any]) -> dict[str, Any]:
    (group,) = kind([torch.zeros(2, 2)], lr=0.01, **options).param_groups
    return {name: value for name, value in group.items() if name != "params"}


def test_a_rate_of_zero_before_a_warm_up_hides_nothing():
    with pytest.raises(ConfigError, match=IN_PARTS):
        engine_on(alone(), optimizer=functools.partial(own.OfUnitNorm, lr=0.0))


def test_each_group_of_hyperparameters_is_probed():
    class Optional(Own):
        def __init__(self, params: Any, lr: float = 0.01, normed: bool = False) -> None:
            super().__init__(params, lr, normed=normed)

        def change(self, weight: torch.Tensor, gradient: torch.Tensor, group: Any, state: Any) -> torch.Tensor:
            return gradient / gradient.norm() if group["normed"] else gradient

    groups = [{"params": "*.bias", "lr": 0.1}, {"params": "*"}]
    engine_on(alone(), optimizer=Optional, param_groups=groups)
    with pytest.raises(ConfigError, match=IN_PARTS):
        engine_on(alone(), optimizer=Optional, param_groups=[groups[0], groups[1] | {"normed": True}])


@pytest.mark.parametrize("kind", [own.Momentum, own.LayerwiseRate, own.Langevin])
def test_a_probe_draws_no_random_numbers_and_prints_nothing(kind, capfd, recwarn):
    model = Linears()
    before = torch.get_rng_state()
    try:
        zerotrain.build_engine(model, optimizer=kind, world=alone())
    except ConfigError:
        assert kind is not own.Momentum
    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


# ---- what it keeps


def test_a_hook_on_one_of_torchs_own_is_tried_with_it():
    with pytest.raises(ConfigError, match=f"optimizer=AdamW: {ON_OTHERS}"):
        engine_on(alone(), optimizer=keeping.clipping_all)


TAKEN: list[Any] = [
    keeping.Busy,
    keeping.hooked,
    keeping.with_a_tensor_rate,
    *FITTING,
    *(declared(kind) for kind in (own.LayerwiseRate, own.Centred)),
]


@pytest.mark.case("optimizers", "an optimizer of your own, element by element", "same bits")
@pytest.mark.case(
    "optimizers",
    "that keeps its state in `state`, or as numbers in its groups",
    "moves along with `set_stage`, `freeze` and checkpoints: same bits",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize(("size", "stages"), [(1, (2, 0, 3)), (2, (1, 3, 2)), (2, (3, 0, 1)), (3, (2, 1, 0))])
@pytest.mark.parametrize("optimizer", TAKEN)
@pytest.mark.thinned(2, first=1)
def test_what_is_kept_in_state_and_groups_goes_on_over_every_change_as_in_plain_pytorch(
    optimizer, size, stages, tmp_path
):
    """An unfreezing among them: a group counts on while some of its parameters do not train."""
    require_right(optimizer, size, stages, tmp_path)


def test_a_checkpoint_from_before_the_first_step_takes_back_what_groups_have_counted(tmp_path):
    engine = engine_on(alone(), optimizer=own.CountsInItsGroup)
    engine.save(tmp_path / "first")
    train(engine, 3, 4, 5)
    engine.load(tmp_path / "first")
    train(engine, 0, 1)
    assert_same(engine.full_state_dict(), Plain(1, optimizer=own.CountsInItsGroup).train(0, 1))


def test_adafactor_of_transformers_is_taken_whole():
    transformers = pytest.importorskip("transformers.optimization")

    def adafactor(groups: Any) -> torch.optim.Optimizer:
        return transformers.Adafactor(groups, lr=0.01, relative_step=False, scale_parameter=False)

    class Whole(transformers.Adafactor):  # type: ignore[misc]
        whole_tensor = True

    with pytest.raises(ConfigError, match=r"optimizer=Adafactor: it keeps .* `whole_tensor = True`"):
        engine_on(alone(), optimizer=adafactor)
    engine = engine_on(alone(), Linears, optimizer=lambda groups: Whole(groups, lr=0.01, relative_step=False))
    assert engine.train_step([(inputs(0, 0),)]).grad_norm > 0


# ---- those of a public collection


@pytest.mark.parametrize(("name", "optimizer"), [pytest.param(*each, id=each[0]) for each in optimizers()])
def test_an_optimizer_of_a_collection_trains_as_in_plain_pytorch_or_is_refused(name, optimizer, tmp_path):
    """Of torch's, and of the package pytorch_optimizer where that is installed."""
    if (problem := refusal(optimizer)) is not None:
        assert problem.startswith(("optimizer: ", f"optimizer={name.split('.')[-1]}: "))
        assert name not in RIGHT
        return
    require_right(optimizer, 2, (1, 3, 2), tmp_path)


def test_those_of_torch_that_work_on_elements_are_all_taken():
    assert {name for name, optimizer in optimizers() if refusal(optimizer) is None} >= RIGHT
