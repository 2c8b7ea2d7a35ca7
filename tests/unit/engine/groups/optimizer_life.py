"""A life of an engine with an optimizer: what trains, the stage and the process change, beside plain PyTorch.

`python -m tests.unit.engine.groups.optimizer_life` prints a table of all optimizers of torch and, if it is installed,
of the package pytorch_optimizer.
"""

import functools
import importlib
import inspect
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, train
from zerotrain.comm.world import World
from zerotrain.errors import ConfigError

FROZEN = ("input.weight", "blocks.0.weight", "blocks.2.*")
"""They begin to train after two steps."""
PACKAGES = ("torch.optim", "pytorch_optimizer")
ARGUMENTS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 100},
    "VSGD": {"lr": 0.0001},
    "Ranger21": {"num_iterations": 20, "num_warm_up_iterations": 2, "num_warm_down_iterations": 2},
}
"""Arguments that a class cannot be made without."""


class PartlyFrozen(Linears):
    def __init__(self) -> None:
        super().__init__()
        freeze(self)


def freeze(model: Linears, frozen: bool = True) -> None:
    for parameter in (model.input.weight, model.blocks[0].weight, *model.blocks[2].parameters()):
        parameter.requires_grad_(not frozen)


def live(world: World, optimizer: Any, folder: Path, stages: tuple[int, int, int]) -> list[dict[str, torch.Tensor]]:
    """The weights after five steps, with a change of what trains after two and of the stage after four; and after a
    sixth, by this engine and by another that has loaded the checkpoint."""
    engine = engine_on(world, PartlyFrozen, optimizer=optimizer, zero={"stage": stages[0], "reduction": "ordered"})
    train(engine, 0, 1)
    engine.unfreeze(*FROZEN)
    train(engine, 2, 3)
    engine.set_stage(stages[1])
    train(engine, 4)
    weights = [engine.full_state_dict()]
    engine.save(folder / "checkpoint")
    train(engine, 5)
    weights.append(engine.full_state_dict())
    other = engine_on(world, PartlyFrozen, optimizer=optimizer, zero={"stage": stages[2], "reduction": "ordered"})
    train(other, 9)
    other.load(folder / "checkpoint")
    train(other, 5)
    return [*weights, other.full_state_dict()]


def live_plainly(size: int, optimizer: Any) -> list[dict[str, torch.Tensor]]:
    """The same in plain PyTorch, which has no stages."""
    plain = Plain(size, PartlyFrozen, optimizer)
    plain.train(0, 1)
    freeze(plain.model, False)
    fifth = plain.train(2, 3, 4)
    sixth = plain.train(5)
    return [fifth, sixth, sixth]


def require_right(optimizer: Any, size: int, stages: tuple[int, int, int], folder: Path) -> None:
    expected = live_plainly(size, optimizer)
    got = run_threads(lambda world: live(world, optimizer, folder, stages), size)[0][0]
    for weights, plain in zip(got, expected, strict=True):
        assert_same(weights, plain)


def refusal(optimizer: Any) -> str | None:
    """The sentence by which a build refuses an optimizer; None: it does not."""
    try:
        engine_on(alone(), PartlyFrozen, optimizer=optimizer)
    except ConfigError as error:
        return str(error)
    return None


def optimizers() -> Iterator[tuple[str, Any]]:
    """The optimizer classes of the packages that are installed, by name, with the arguments that they need."""
    for package in PACKAGES:
        try:
            module = importlib.import_module(package)
        except ImportError:
            continue
        for name, kind in vars(module).items():
            if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and not inspect.isabstract(kind):
                required = [
                    each.name
                    for each in list(inspect.signature(kind).parameters.values())[1:]
                    if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD and each.name != "lr"
                ]
                takes_groups = "params" in inspect.signature(kind).parameters
                made = functools.partial(kind, **{"lr": 0.01} | ARGUMENTS.get(name, {}))
                if takes_groups and set(required) <= ARGUMENTS.get(name, {}).keys() and _can_be_made(made):
                    yield f"{package}.{name}", made


def _can_be_made(optimizer: Any) -> bool:
    """Whether a model can have it in plain PyTorch, with no other package."""
    try:
        optimizer(list(Linears().parameters()))
    except (ImportError, NotImplementedError):
        return False
    except Exception:  # the build answers it
        pass
    return True


def declared(optimizer: Any) -> Any:
    """An optimizer whose class says that it updates each tensor by itself."""
    kind = type(optimizer.func.__name__, (optimizer.func,), {"whole_tensor": True})
    return functools.partial(kind, *optimizer.args, **optimizer.keywords)


def outcome(optimizer: Any, folder: Path) -> str:
    if (problem := refusal(optimizer)) is not None:
        return f"refused: {problem}"
    for size, stages in ((1, (2, 0, 3)), (2, (1, 3, 2)), (2, (3, 0, 1))):
        try:
            require_right(optimizer, size, stages, folder / f"{size}{stages[0]}")
        except Exception as error:
            return f"WRONG at {size} ranks, stages {stages}: {repr(error).splitlines()[0]}"
    return "right"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for title, made in optimizers():
        if len(sys.argv) < 2 or title.split(".")[-1] in sys.argv[1:]:
            with tempfile.TemporaryDirectory() as place:
                said = outcome(made, Path(place))
                print(f"{title} | {said}", flush=True)
                if "whole_tensor" in said:
                    print(f"{title}, declared | {outcome(declared(made), Path(place))}", flush=True)
