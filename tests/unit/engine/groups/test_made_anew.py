"""What an optimizer keeps goes where its parameters go, or it is refused: with what is kept elsewhere, and where to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.engine.groups import keeping_optimizers as keeping
from tests.unit.engine.groups import own_optimizers as own
from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, inputs, train
from zerotrain.comm.ranks.world import World
from zerotrain.errors import ConfigError
from zerotrain.testing.fake_wire import run_threads

ANEW = r"it continued differently after it was rebuilt from its state, .*: {} is kept elsewhere; it must keep "
REFUSED: dict[Any, str] = {
    keeping.ByParameter: ANEW.format(r"self\.momenta"),
    keeping.ById: ANEW.format(r"self\.momenta"),
    keeping.MadeWithIt: ANEW.format(r"self\.momenta"),
    keeping.Average: ANEW.format(r"self\.average"),
    keeping.Counts: ANEW.format(r"self\.num_steps"),
    keeping.Around: ANEW.format(r"self\.inner"),
    keeping.Lookahead: ANEW.format(r"self\.slow and self\.num_steps"),
    keeping.InAnObject: ANEW.format(r"self\.keeper"),
    keeping.OnTheParameter: ANEW.format("what it needs"),
    keeping.InAGlobal: ANEW.format("what it needs"),
    keeping.ADictInItsGroup: ANEW.format("what it needs"),
    keeping.AViewOfItsWeight: ANEW.format("what it needs"),
    keeping.InStateOfNoParameter: r"it keeps self\.state\['all'\], which is neither a tensor nor a number of one param",
    keeping.Nested: r"it keeps self\.state\[parameter\]\['moments'\], which is neither a tensor nor a number of one",
}


@pytest.mark.case(
    "optimizers",
    "that keeps it elsewhere: a dict or list of its own, a counter, an optimizer inside it, copies of weights",
    "refused at the build, which names it",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_later_steps_need_and_no_change_of_stage_would_take_along_is_refused(kind: Any) -> None:
    with pytest.raises(ConfigError, match=f"optimizer={kind.__name__}: .*{REFUSED[kind]}"):
        engine_on(alone(), optimizer=kind)


@pytest.mark.parametrize("kind", [keeping.ByParameter, keeping.Counts, keeping.Average])
def test_it_is_refused_though_declared_to_update_whole_tensors(kind: Any) -> None:
    declared = type(kind.__name__, (kind,), {"whole_tensor": True})
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        engine_on(alone(), optimizer=declared)


def test_a_hook_on_one_of_torchs_own_is_tried_with_it() -> None:
    with pytest.raises(
        ConfigError, match="optimizer=AdamW: in a test on small tensors, the update of one depended on "
    ):
        engine_on(alone(), optimizer=keeping.clipping_all)


TAKEN: list[Any] = [
    keeping.Busy,
    keeping.AroundItsState,
    keeping.hooked,
    keeping.patched,
    keeping.with_a_tensor_rate,
    own.Momentum,
    own.CountsInItsGroup,
]


def changing(world: World, optimizer: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Six steps, with all that makes optimizers anew between them."""
    settings: dict[str, Any] = {"optimizer": optimizer, "zero": {"stage": 1, "reduction": "ordered"}}
    engine = engine_on(world, **settings)
    train(engine, 0)
    engine.set_stage(3)
    train(engine, 1)
    engine.set_stage(0)
    train(engine, 2)
    engine.save(folder / "checkpoint")
    engine = engine_on(world, **settings | {"zero": {"stage": 2, "reduction": "ordered"}})
    train(engine, 7)
    engine.load(folder / "checkpoint")
    train(engine, 3)
    engine.freeze("output.*")
    train(engine, 4)
    engine.set_stage(1)
    train(engine, 5)
    return engine.full_state_dict()


@pytest.mark.case(
    "optimizers",
    "that keeps its state in `state`, or as numbers in its groups",
    "moves along with `set_stage`, `freeze` and checkpoints: same bits",
    under="an optimizer of your own, element by element",
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("optimizer", TAKEN)
@pytest.mark.thinned(2, first=1)
def test_what_is_kept_in_state_and_groups_goes_on_over_every_change_as_in_plain_pytorch(
    optimizer: Any, size: int, tmp_path: Path
) -> None:
    got = run_threads(lambda world: changing(world, optimizer, tmp_path), size)[0][0]
    plain = Plain(size, optimizer=optimizer)
    plain.train(0, 1, 2, 3)
    plain.model.output.requires_grad_(False)
    expected = plain.train(4, 5)
    assert_same(got, expected)


def test_a_checkpoint_from_before_the_first_step_takes_back_what_groups_have_counted(tmp_path: Path) -> None:
    engine = engine_on(alone(), optimizer=own.CountsInItsGroup)
    engine.save(tmp_path / "first")
    train(engine, 3, 4, 5)
    engine.load(tmp_path / "first")
    train(engine, 0, 1)
    assert_same(engine.full_state_dict(), Plain(1, optimizer=own.CountsInItsGroup).train(0, 1))


def test_adafactor_of_transformers_is_taken_whole() -> None:
    transformers = pytest.importorskip("transformers.optimization")

    def adafactor(groups: Any) -> torch.optim.Optimizer:
        return transformers.Adafactor(groups, lr=0.01, relative_step=False, scale_parameter=False)

    class Whole(transformers.Adafactor):  # type: ignore[misc]
        whole_tensor = True

    with pytest.raises(ConfigError, match="optimizer=Adafactor: factors whole matrices"):
        engine_on(alone(), optimizer=adafactor)
    engine = engine_on(alone(), Linears, optimizer=lambda groups: Whole(groups, lr=0.01, relative_step=False))
    assert engine.train_step([(inputs(0, 0),)]).grad_norm > 0
