"""Public calls of an engine that are refused, on one rank alone or on all. What each says of its arguments: tests/unit.

A case is called on all ranks between two steps. It makes its call, sees it refused, and leaves the ranks at the same
place. One of a call within a step makes the step too, where the rank that was refused calls again, and returns True.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calls import BUCKET_MB, Net, StopError, inputs
from torch import nn

import zerotrain
from zerotrain.errors import ZeroTrainError


class Factory:
    """Makes AdamW, unless it is told to fail."""

    fails = False

    def __call__(self, groups: Any) -> torch.optim.Optimizer:
        if self.fails:
            raise StopError("the factory")
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


class Keeping(Net):
    """Keeps a text beside its tensors, which it may refuse to give or to take."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.gives, self.takes = "kept", True, True
        self.register_buffer("seen", torch.zeros(3))
        self.spare = nn.Linear(5, 5).requires_grad_(False)
        self.factory = Factory()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()

    def get_extra_state(self) -> str:
        if not self.gives:
            raise StopError("get_extra_state")
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        if not self.takes:
            raise StopError("set_extra_state")
        self.kept = state


def build(stage: int, world: zerotrain.World, num_micro_batches: int) -> Any:
    """The engine of a `Keeping`, which notes how many micro-batches a step has."""
    model = Keeping()
    model.num_micro_batches = num_micro_batches
    groups = [{"params": ["embed.*", "blocks.*", "out.*"], "name": "net"}]
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=BUCKET_MB, reduction="ordered")
    return zerotrain.build_engine(model, optimizer=model.factory, param_groups=groups, zero=zero, world=world)


def data(engine: Any) -> list[Any]:
    """The micro-batches of the next step on this rank."""
    step, rank = engine.stamps.num_steps, engine.world.rank
    return [(inputs(step, rank, part),) for part in range(engine.module.num_micro_batches)]


def backwards(engine: Any) -> None:
    """Those of the next step."""
    *others, last = data(engine)
    with engine.no_sync():
        for batch in others:
            engine.backward(engine(*batch), weight=1 / (len(others) + 1))
    engine.backward(engine(*last), weight=1 / (len(others) + 1))


def one_step(engine: Any) -> None:
    backwards(engine)
    engine.step()


KINDS = (ZeroTrainError, StopError, TypeError, ValueError, RuntimeError, AttributeError)
"""What a call may be refused with: a word of ours, of the user's code, or of Python."""


def refused(call: Callable[[], object], *words: str) -> None:
    """Make sure that a call is refused on this rank, in a sentence with these words."""
    with pytest.raises(KINDS) as error:
        call()
    said = str(error.value)
    assert not [word for word in words if word not in said], said


@contextlib.contextmanager
def on_rank(engine: Any, rank: int, change: Callable[[bool], None]) -> Iterator[None]:
    """In here something is as it should not be, on one rank alone."""
    if engine.world.rank == rank:
        change(True)
    yield
    change(False)


Case = Callable[[Any, Path], bool | None]


def by_rank(name: str, first: Any, second: Any, *words: str) -> Case:
    """Rank 0 gives `first`, the others `second`; a Path is one within the folder."""

    def case(engine: Any, folder: Path) -> None:
        given = second if engine.world.rank else first
        arguments = tuple(folder / each if isinstance(each, Path) else each for each in given)
        refused(lambda: getattr(engine, name)(*arguments), *words)

    return case


RIGHT: dict[str, Callable[[Any, Path], object]] = {
    "freeze": lambda engine, folder: engine.freeze("blocks.0.*"),
    "unfreeze": lambda engine, folder: engine.unfreeze("blocks.0.*"),
    "add_param_group": lambda engine, folder: engine.add_param_group({"params": ["spare.*"], "lr": 0.5}),
    "set_stage": lambda engine, folder: engine.set_stage(3 - engine.options.zero.stage),
    "save": lambda engine, folder: engine.save(folder / "never"),
    "begin_save": lambda engine, folder: engine.begin_save(folder / "never"),
    "load": lambda engine, folder: engine.load(folder / "good"),
    "load_weights": lambda engine, folder: engine.load_weights(folder / "good"),
    "load_state_dict": lambda engine, folder: engine.load_state_dict({}, strict=False),
}
"""What may be called between two steps alone."""


def a_gradient(engine: Any) -> None:
    engine.backward(engine(inputs(99, engine.world.rank)))


def with_a_gradient_on_one_rank(name: str) -> Case:
    def case(engine: Any, folder: Path) -> None:
        if engine.world.rank == 1:
            with engine.no_sync():
                a_gradient(engine)
        refused(lambda: RIGHT[name](engine, folder), "rank 1: ", "while a gradient waits")
        engine.zero_grad()

    return case


def between_backward_and_step(name: str, lone_rank: int | None = None) -> Case:
    """Called by all ranks, or by one alone: the step is made all the same."""

    def case(engine: Any, folder: Path) -> bool:
        backwards(engine)
        if lone_rank in (None, engine.world.rank):
            refused(lambda: RIGHT[name](engine, folder), "while a gradient waits")
        engine.step()
        return True

    return case


def inside(scope: str, name: str, *words: str) -> Case:
    def case(engine: Any, folder: Path) -> None:
        with getattr(engine, scope)():
            if scope == "no_sync":
                a_gradient(engine)
            refused(lambda: RIGHT[name](engine, folder), *words)
        engine.zero_grad()

    return case


def beside_a_save(case: Case) -> Case:
    def beside(engine: Any, folder: Path) -> None:
        under_way = engine.begin_save(folder / f"beside-{engine.stamps.num_steps}")
        case(engine, folder)
        assert under_way.wait().is_dir()

    return beside


# ---- the calls of a step: who is refused calls again, as the others do


def in_a_step(wrong: Callable[[Any], object], *words: str, rank: int | None = 1) -> Case:
    """Called wrong before the step, on one rank or on all."""

    def case(engine: Any, folder: Path) -> bool:
        if rank in (None, engine.world.rank):
            refused(lambda: wrong(engine), *words)
        one_step(engine)
        return True

    return case


def backward_of_no_loss(engine: Any, folder: Path) -> bool:
    """On one rank; then of the right one."""
    *others, last = data(engine)
    weight = 1 / (len(others) + 1)
    with engine.no_sync():
        for batch in others:
            engine.backward(engine(*batch), weight=weight)
    loss = engine(*last)
    if engine.world.rank == 1:
        refused(lambda: engine.backward(5), "give it the loss")
    engine.backward(loss, weight=weight)
    engine.step()
    return True


def backward_fails_in_no_sync(engine: Any, folder: Path) -> bool:
    """On one rank alone, which computes its micro-batches anew; where parameters are sharded the others would wait."""
    if engine.world.rank == 1 and engine.options.zero.stage < 3:
        with engine.no_sync():
            loss = engine(inputs(94, 1))
            handle = engine.module.out.weight.register_hook(fail)
            refused(lambda: engine.backward(loss))
            handle.remove()
    one_step(engine)
    return True


def hyperparameters_by_rank(engine: Any, folder: Path) -> bool:
    """The step is refused, and made when they are the same again."""
    backwards(engine)
    group, right = engine.param_groups[0], engine.param_groups[0]["lr"]
    if engine.world.rank == 1:
        group["lr"] = 0.25
    refused(engine.step, "lr of group 'net': 0.01 on rank", "0.25 on rank 1")
    group["lr"] = right
    engine.step()
    return True


def update_fails(engine: Any, folder: Path) -> bool:
    """On all ranks alike: the step's gradient is forgotten, and a second step is one without a backward."""
    backwards(engine)
    group, right = engine.param_groups[0], engine.param_groups[0]["lr"]
    group["lr"] = None
    refused(engine.step, "lr of group 'net' was set to None; it must be a number")
    refused(engine.step, "step came before a backward")
    group["lr"] = right
    return False


def train_step_with(*words: str, rank: int | None = 1, **wrong: Any) -> Case:
    """Refused before anything is computed, so that the rank can call it again."""

    def case(engine: Any, folder: Path) -> bool:
        if rank in (None, engine.world.rank):
            refused(lambda: engine.train_step(**{"micro_batches": data(engine)} | wrong), *words)
        engine.train_step(data(engine))
        return True

    return case


def callback_of_a_leaf_fails(engine: Any, folder: Path) -> None:
    refused(lambda: engine.leaf(0, data(engine), before_each=fail))


def leaf_while_a_gradient_waits(engine: Any, folder: Path) -> bool:
    backwards(engine)
    refused(lambda: engine.leaf(0, data(engine)), "while a gradient waits")
    engine.step()
    return True


def fail(*_: Any) -> None:
    raise StopError


class Unreadable(list[Any]):
    """Micro-batches that cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        raise StopError


def signals(engine: Any) -> None:
    for wrong in ("15", float("nan"), 2.5, -1, 2**40):
        refused(functools.partial(setattr, engine, "signal", wrong), "engine.signal: got")
    engine.signal = None


def state_dict_hook_fails(engine: Any, folder: Path) -> None:
    """On rank 0 alone, which has the weights."""
    engine.module.gives = False
    if engine.world.rank == 0:
        refused(engine.full_state_dict, "get_extra_state")
    else:
        engine.full_state_dict()
    engine.module.gives = True


def module_fails(name: str, attribute: str, rank: int, *words: str) -> Case:
    def case(engine: Any, folder: Path) -> None:
        given = {"blocks.0.up.bias": torch.ones(32), "_extra_state": "other", "seen": torch.ones(3)}
        with on_rank(engine, rank, lambda is_in: setattr(engine.module, attribute, not is_in)):
            if name == "load_state_dict":
                refused(lambda: engine.load_state_dict(given, strict=False), *words)
            else:
                refused(lambda: RIGHT[name](engine, folder), *words)
        assert engine.module.kept == "kept"
        assert engine.module.seen.sum() == 0

    return case


def factory_fails(engine: Any, folder: Path) -> None:
    with on_rank(engine, 1, lambda is_in: setattr(engine.module.factory, "fails", is_in)):
        refused(lambda: RIGHT["add_param_group"](engine, folder), "engine.add_param_group failed, rank 1: ", "factory")
    assert [group["name"] for group in engine.param_groups] == ["net"]


def elsewhere(name: str, place: str, *words: str) -> Case:
    """One path, which leads each rank to a folder of its own, as on machines that share none."""

    def case(engine: Any, folder: Path) -> None:
        before = Path.cwd()
        os.chdir(folder / f"rank-{min(engine.world.rank, 1)}")
        try:
            refused(lambda: getattr(engine, name)(f"/proc/self/cwd/{place}"), *words)
        finally:
            os.chdir(before)

    return case


def other_calls(first: str, second: str) -> Case:
    def case(engine: Any, folder: Path) -> None:
        name = second if engine.world.rank else first
        call = RIGHT.get(name) or (lambda engine, folder: getattr(engine, name)())
        refused(lambda: call(engine, folder), f"engine.{first} on rank 0", f"engine.{second} on rank")

    return case


def freeze_while_others_step(engine: Any, folder: Path) -> None:
    a_gradient(engine)
    if engine.world.rank == 0:
        engine.zero_grad()
        refused(lambda: engine.freeze("blocks.0.*"), "engine.freeze on rank 0, norm on rank")
    else:
        refused(engine.step, "engine.freeze on rank 0, norm on rank")
    engine.zero_grad()


WAITS = "while a gradient waits"
IN_FORWARD = "during a forward"
STATES = {
    f"{name}, {way}": case
    for name in RIGHT
    for way, case in {
        "between backward and step": between_backward_and_step(name),
        "by one rank alone between backward and step": between_backward_and_step(name, 1),
        "within forward_scope": inside("forward_scope", name, IN_FORWARD),
        "within no_sync": inside("no_sync", name, WAITS),
        "beside a save, within forward_scope": beside_a_save(inside("forward_scope", name, IN_FORWARD)),
    }.items()
}
ONE_RANK_IN_NO_SYNC = {f"{name}, one rank with a gradient": with_a_gradient_on_one_rank(name) for name in RIGHT}
"""Where parameters are gathered, no rank has a backward that the others have not."""
ARGUMENTS: dict[str, Case] = {
    "freeze, other names": by_rank(
        "freeze", ["blocks.0.*"], ["blocks.1.*"], "engine.freeze: what it changes differs", "blocks.0.norm.weight"
    ),
    "freeze, no such name on one rank": by_rank("freeze", ["blocks.0.*"], ["no"], "engine.freeze failed, rank 1: "),
    "unfreeze, other names": by_rank("unfreeze", ["blocks.0.*"], ["spare.*"], "engine.unfreeze failed, rank 1: "),
    "add_param_group, other settings": by_rank(
        "add_param_group",
        [{"params": "spare.*", "lr": 0.5}],
        [{"params": "spare.*", "lr": 0.25}],
        "the new group differs between the ranks: ",
        "lr=0.5",
        "lr=0.25",
    ),
    "set_stage, other stages": by_rank("set_stage", [0], [3], "engine.set_stage: differs between the ranks: 0 on"),
    "save, other paths": by_rank("save", [Path("a")], [Path("b")], "engine.save: path differs", "/a on rank 0"),
    "save, no path on one rank": by_rank("save", [None], [Path("b")], "engine.save failed, rank 0: "),
    "load, other paths": by_rank("load", [Path("good")], [Path("no")], "engine.load: path differs"),
    "load, no path on one rank": by_rank("load", [None], [Path("good")], "engine.load failed, rank 0: "),
    "load, a file of one rank is missing": by_rank("load", [Path("half")], [Path("half")], "half"),
    "load_weights, no path on one rank": by_rank("load_weights", [None], [Path("good")], "load_weights failed, rank 0"),
    "load, another checkpoint on rank 1": elsewhere("load", "here", "/proc/self/cwd/here is another on this rank"),
    "load, nothing on rank 1": elsewhere("load", "of-rank-0", "rank 1: ", "of-rank-0"),
    "load_weights, nothing on rank 1": elsewhere("load_weights", "of-rank-0", "rank 1: ", "of-rank-0"),
    "save, no common folder": elsewhere("save", "new", "rank 1: ", "nothing was saved"),
    "load_state_dict, a list on rank 0": by_rank("load_state_dict", [[1]], [{}], "got a list"),
    "signal, of a wrong type": in_a_step(signals, "engine.signal: got None"),
    "any_rank, of a wrong type": in_a_step(lambda engine: engine.any_rank("no")),
}
USERS: dict[str, Case] = {
    "full_state_dict, the model fails on rank 0": state_dict_hook_fails,
    "save, the model fails on rank 0": module_fails("save", "gives", 0, "get_extra_state"),
    "save, the model fails on rank 1": module_fails("save", "gives", 1, "get_extra_state"),
    "load_state_dict, the model fails on rank 0": module_fails("load_state_dict", "takes", 0, "set_extra_state"),
    "load_state_dict, the model fails on rank 1": module_fails("load_state_dict", "takes", 1, "set_extra_state"),
    "add_param_group, the factory fails on rank 1": factory_fails,
    "train_step, the data fails on rank 1": train_step_with(micro_batches=Unreadable([1])),
    "train_step, the callback fails": train_step_with(before_each=fail, rank=None),
    "leaf, the callback fails": callback_of_a_leaf_fails,
    "backward, the model fails on rank 1 in no_sync": backward_fails_in_no_sync,
}
STEPS: dict[str, Case] = {
    "backward, no loss on rank 1": backward_of_no_loss,
    "step, without a backward on rank 1": in_a_step(lambda engine: engine.step(), "before a backward"),
    "step, other hyperparameters": hyperparameters_by_rank,
    "step, an update that fails": update_fails,
    "train_step, a tensor on rank 1": train_step_with("got a tensor", micro_batches=[torch.ones(4, 16)]),
    "leaf, while a gradient waits": leaf_while_a_gradient_waits,
    "forward, of what cannot be computed": in_a_step(lambda engine: engine(torch.ones(3, 3)), rank=None),
}
OTHER_CALLS: dict[str, Case] = {
    f"{first} on rank 0, {second} on the others": other_calls(first, second)
    for first, second in [("freeze", "unfreeze"), ("full_state_dict", "weights_sha256"), ("set_stage", "load_weights")]
} | {"freeze on rank 0, step on the others": freeze_while_others_step}
BESIDE_A_SAVE = {
    f"{name}, beside a save": beside_a_save(ARGUMENTS[name])
    for name in ("save, other paths", "load, other paths", "set_stage, other stages")
}
CASES = ARGUMENTS | USERS | STEPS | STATES | OTHER_CALLS | BESIDE_A_SAVE
