"""Groups of one's own and changes of what trains, in a world of one. Refused ones: test_refused_builds."""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.groups.test_optimizers import model, one_step
from tests.unit.engine.parts import assert_same
from tests.unit.engine.test_refused_builds import build
from zerotrain.errors import EngineStateError


def test_a_group_shows_what_it_sets_and_takes_the_rest_from_the_optimizer():
    engine = build([{"params": "*.bias", "lr": 0.5, "name": "biases"}, {"params": ["*"]}])
    biases, rest = engine.param_groups
    assert (biases["name"], biases["lr"], biases["initial_lr"], biases["weight_decay"]) == ("biases", 0.5, 0.5, 0.5)
    assert (rest["name"], rest["lr"], rest["initial_lr"]) == ("group 1", 0.1, 0.1)
    assert "params" not in biases


def test_parameters_may_be_named_by_themselves_and_the_first_group_that_names_one_has_it():
    plain = model()
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    engine = build([{"params": [plain[0].weight], "lr": 0.0}, {"params": ["*"]}], plain)
    one_step(engine)
    moved = {name for name, value in engine.full_state_dict().items() if not torch.equal(value, before[name])}
    assert moved == set(before) - {"0.weight"}


def test_an_empty_group_is_kept_with_a_warning_and_may_be_filled_later():
    with pytest.warns(UserWarning, match="group 'group 0' holds no parameter"):
        engine = build([{"params": []}, {"params": "*"}])
    assert len(engine.param_groups) == 2
    one_step(engine)


def test_the_backward_of_a_forward_from_before_a_change_is_refused():
    engine = build(plain=nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    loss = engine(torch.ones(5, 3)).square().mean()
    engine.freeze("0.weight")
    with pytest.raises(EngineStateError, match=r"computed before .* a change of what trains"):
        engine.backward(loss)


def test_a_change_frees_the_buckets_it_replaces_at_once():
    engine = build()
    one_step(engine)
    old = [weakref.ref(bucket.update.master_weight) for bucket in engine.schedule.buckets]
    gc.disable()  # what only the garbage collector frees is held for minutes
    try:
        engine.freeze("0.*")
        assert [each() for each in old] == [None] * len(old)
    finally:
        gc.enable()


OPTIMIZERS = {
    "AdamW with amsgrad": functools.partial(torch.optim.AdamW, lr=0.1, amsgrad=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "NAdam": functools.partial(torch.optim.NAdam, lr=0.1),
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "RMSprop": functools.partial(torch.optim.RMSprop, lr=0.1, centered=True, momentum=0.5),
}


@pytest.mark.case(
    "parameters",
    "any of torch's element-wise optimizers over such changes",
    "parameters that go on training keep their state",
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_goes_on_training_keeps_its_state_and_what_is_unfrozen_starts_anew(name):
    optimizer, plain = OPTIMIZERS[name], model()
    engine = build([{"params": "*"}], model(), optimizer)
    reference = optimizer([{"params": list(plain.parameters())}])
    for step in range(6):
        if step == 2:
            engine.freeze("0.*")
            plain[0].requires_grad_(False)
        if step == 4:
            engine.unfreeze("0.weight")
            plain[0].weight.requires_grad_(True)
            reference.state.pop(plain[0].weight)
            if anew := optimizer([plain[0].weight]).state:  # of one that makes it with the group
                reference.state[plain[0].weight] = anew[plain[0].weight]
        one_step(engine)
        reference.zero_grad()
        plain(torch.ones(5, 3)).square().mean().backward()
        reference.step()
    assert_same(engine.full_state_dict(), plain.state_dict())


class RowsLater(torch.optim.SGD):
    """Keeps, later than it is probed, a tensor that is neither of the weight's shape nor a single number."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            state["count"] = state.get("count", 0) + 1
            if state["count"] > 12:
                state["rows"] = torch.zeros(3)


def test_a_change_is_refused_with_state_that_cannot_be_cut():
    engine = build(optimizer=functools.partial(RowsLater, lr=0.1))
    for _ in range(13):
        one_step(engine)
    with pytest.raises(EngineStateError, match=r"keeps 'rows' of shape \(3,\)"):
        engine.freeze("0.*")
    one_step(engine)
