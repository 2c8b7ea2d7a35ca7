"""A probe of an optimizer on small tensors: whether ranks can train with it as plain PyTorch does.

A rank updates a flat piece of many tensors as one tensor, with an optimizer of its own. A change of stage, a change of
what trains and a checkpoint build that optimizer again from its state and its groups. So the probe makes some steps on
small tensors, and the same steps on flat pieces of them and with an optimizer that is built again in their midst. All
must come to the same bits. The probe misses a behaviour that begins after these steps. Torch's own optimizers make one
step: tests try each.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zerotrain.checkpoint.manifest import AVERAGE, WEIGHT
from zerotrain.device.device import lies_on_host
from zerotrain.device.kinds import device_of
from zerotrain.engine.groups.hyperparameters import Hyperparameters, as_plain, is_number, saved_group, without_objects
from zerotrain.engine.groups.optimizers import WHOLE, OptimizerFactory, is_torchs_own
from zerotrain.errors import ConfigError, argument

NUM_STEPS = 11
"""Some optimizers look at more than one element in every tenth step only."""
STEPS_BEFORE_ANEW = 5
"""Odd, and followed by a tenth step."""
SHAPES = ((48, 96), (67,), *[(1, 4)] * 8)
"""The first is above 4096 elements: optimizers with state in 8 bits leave smaller tensors alone. The second is no
multiple of what a processor computes at once. In the last ones a gradient may well be orthogonal to its weight."""
MATRICES = ((48, 96), (16, 12))
"""For an optimizer of whole tensors that takes matrices alone."""
BORDERS = (128, 704)
"""Between the pieces: multiples of 64, as the borders of shards are."""
RATE = 0.5
"""The learning rate, instead of one that may be too small to see anything, or 0 before a warm-up."""
FAILS = "its step fails on small tensors ({}: {})"
NO_CLOSURE = "; step() is called without a closure, so use AdamW, SGD or another optimizer that needs none"
NOTHING = "its steps changed no weight of small tensors; use one whose step updates the weights it is given"
RANDOM = (
    "two runs of the same steps on small tensors came to other weights, by random numbers most likely: copies of a "
    "weight would drift apart between ranks and stages; use one without noise"
)
IN_PARTS = (
    "in a test on small tensors, it updated a tensor in parts differently than at once, and ranks hold parts. It "
    "updates each tensor by itself: {}, and ranks gather tensors for it"
)
EVERYTHING = (
    "in a test on small tensors, the update of one depended on the others (a norm or a number over all of them), which "
    "no rank has; use one that updates each tensor by itself, such as AdamW ({} clips over the whole model)"
)
UNFIT = (
    "it keeps {}, which ranks cannot cut and save; it must keep each under a name of its own in self.state[parameter]: "
    "a number, a tensor of no dimension or one of the weight's shape (of any, if {})"
)
ELSEWHERE = (
    "in a test on small tensors, it continued differently after it was rebuilt from its state, as engine.set_stage, "
    "freeze and checkpoints rebuild it: {} is kept elsewhere; it must keep what later steps need in "
    "self.state[parameter], as tensors and numbers"
)

Tensors = list[torch.Tensor]
Split = Callable[[Tensors], list[Tensors]]


def probe(
    factory: OptimizerFactory,
    settings: Mapping[str, Any],
    device: torch.device,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> frozenset[str]:
    """Refuse an optimizer of these hyperparameters if it does something else in an engine than in plain PyTorch.

    Args:
        settings: of a group, with its "name".
        shapes: of the small tensors.

    Returns:
        The names of the numbers that its steps change in a group.

    Raises:
        ConfigError: it does not, or its step fails.
    """
    is_whole, rate = settings["name"].startswith(WHOLE), settings.get("lr")
    settings = {**settings, "lr": rate * 0 + RATE} if is_number(rate) else settings
    runs = _Runs(lambda tensors: factory([{"params": tensors, **settings}]), settings, device, shapes)
    optimizer = runs.make([torch.ones(shapes[0], device=device)])
    try:
        with device_of(device).keep_generators():
            if is_torchs_own(optimizer):
                (tensor,) = optimizer.param_groups[0]["params"]
                tensor.grad = torch.ones_like(tensor)
                with torch.no_grad():
                    # Without the things that torch puts around it: they import its compiler, which takes half a second.
                    inspect.unwrap(type(optimizer).step)(optimizer)
                return runs.own
            problem = _find_problem(runs, is_whole)
    except Exception as error:
        if is_whole and shapes is SHAPES:
            return probe(factory, settings, device, MATRICES)
        problem = FAILS.format(type(error).__name__, (str(error).splitlines() or [""])[0])
        problem += NO_CLOSURE if "closure" in problem else ""
    if problem:
        raise ConfigError(f"optimizer={type(optimizer).__name__}: {problem}")
    return runs.own


def _find_problem(runs: "_Runs", is_whole: bool) -> str | None:
    """The sentence about an optimizer's forbidden behaviour; None if it has none such."""
    plain = runs.run(_as_one, as_engine=False)
    (optimizer,) = plain.optimizers
    groups = ({**group, "params": None} for group in (runs.settings, plain.group))
    settings, stepped = (without_objects(saved_group(group)) for group in groups)
    runs.own = frozenset(name for name, value in stepped.items() if value != settings.get(name, ""))
    if not plain.rows.diff(dim=0).any():
        return NOTHING
    if unfit := list(dict.fromkeys(_unfit_in_state(optimizer, is_whole))):
        return UNFIT.format(" and ".join(unfit), argument("its class says `whole_tensor = True`"))
    if not runs.give(plain, _apart if is_whole else _in_pieces):
        if not runs.give(plain, _as_one, as_engine=False):
            return RANDOM
        if not is_whole and runs.give(plain, _apart):
            return IN_PARTS.format(argument("set `whole_tensor = True` in its class"))
        return EVERYTHING.format(argument("max_grad_norm"))
    attributes, rebuilt, is_same = _attributes(optimizer), dict[str, str](), False
    with suppress(Exception):
        renewed = runs.run(_as_one, is_renewed=True)
        rebuilt, is_same = _attributes(renewed.optimizers[0]), runs.agree(plain, renewed)
    lost = [name for name, text in attributes.items() if text != rebuilt.get(name)]
    # A counter or a logger may count for nothing; a tensor that nobody needs would not be kept.
    if is_same and not any("tensor(" in attributes[name] for name in lost):
        return None
    return ELSEWHERE.format(" and ".join(f"self.{name}" for name in lost or attributes) or "what it needs")


class _Run(NamedTuple):
    """The results of some steps."""

    rows: torch.Tensor
    """(NUM_STEPS + 1, numel) fp32, the elements before and after each step."""
    optimizers: list[torch.optim.Optimizer]
    """One, or one for each tensor or piece."""
    group: dict[str, Any]
    """The settings of their groups after the last step."""


@dataclass
class _Runs:
    """Runs of steps on small tensors."""

    make: Callable[[Tensors], torch.optim.Optimizer]
    settings: Mapping[str, Any]
    device: torch.device
    shapes: Sequence[tuple[int, ...]]
    own: frozenset[str] = frozenset()
    """The names of the numbers that steps change in a group."""

    def give(self, other: "_Run", split: Split, *, as_engine: bool = True) -> bool:
        """Whether a run comes to the same as another. False if it fails."""
        with suppress(Exception):
            return self.agree(other, self.run(split, as_engine=as_engine))
        return False

    def agree(self, run: "_Run", other: "_Run") -> bool:
        """Whether two runs have come to the same weights and numbers: on a host to the same bits, as plain PyTorch has
        them there."""
        for name in self.own:
            if repr(as_plain(run.group.get(name))) != repr(as_plain(other.group.get(name))):
                return False
        rtol, atol = (0.0, 0.0) if lies_on_host(run.rows) else (1e-4, 1e-6)
        return torch.allclose(run.rows, other.rows, rtol=rtol, atol=atol, equal_nan=True)

    def run(self, split: Split, *, as_engine: bool = True, is_renewed: bool = False) -> "_Run":
        """Make `NUM_STEPS` steps.

        Args:
            split: into the tensors, or the pieces of them, that have an optimizer each.
            as_engine: groups get their own numbers as in an engine.
            is_renewed: the optimizers are made anew after `STEPS_BEFORE_ANEW`.
        """
        group = Hyperparameters(self.settings, self.own, counting=self.counting())
        weights = [0.001 * wave for wave in self.waves(0)]
        parts = split(weights if as_engine else list(map(torch.nn.Parameter, weights)))
        optimizers = [self.make(part) for part in parts]
        rows = [_row(parts)]
        for step in range(NUM_STEPS):
            if is_renewed and step == STEPS_BEFORE_ANEW:
                old_parts, old_optimizers = parts, optimizers  # held, or others would get the same places in memory
                parts = [[tensor.detach().clone() for tensor in part] for part in parts]
                optimizers, group.counting = [self.make(part) for part in parts], self.counting()
                for old_part, old, part, new in zip(old_parts, old_optimizers, parts, optimizers, strict=True):
                    for old_tensor, tensor in zip(old_part, part, strict=True):
                        if old_tensor in old.state:
                            new.state[tensor] = deepcopy(old.state[old_tensor])
            for optimizer, part, gradients in zip(optimizers, parts, split(self.gradients(step)), strict=True):
                for tensor, gradient in zip(part, gradients, strict=True):
                    tensor.grad = gradient
                if as_engine:
                    group.show(optimizer.param_groups[0])
                optimizer.step()
            if as_engine:
                group.count_step()
            rows.append(_row(parts))
        return _Run(torch.stack(rows), optimizers, group if as_engine else optimizers[0].param_groups[0])

    def counting(self) -> torch.optim.Optimizer | None:
        return self.make([torch.ones(8, 8, device=self.device)]) if self.own else None

    def gradients(self, step: int) -> Tensors:
        """Small, middling or large, each a hundredfold in its last two thirds, with means of both signs."""
        gradients = [wave + (-1) ** index for index, wave in enumerate(self.waves(step + 1))]
        for gradient in gradients:
            gradient.view(-1)[gradient.numel() // 3 :].mul_(100)
            gradient.mul_(100.0 ** (step % 3 - 1))
        return gradients

    def waves(self, number: int) -> Tensors:
        """Numbers of -1.5 to 1.5, random to the eye."""
        numels = [torch.Size(shape).numel() for shape in self.shapes]
        places = torch.arange(1 + number, sum(numels) + 1 + number, dtype=torch.float64, device="cpu")
        values = (1.5 * places.square().sin()).float().to(self.device)
        return [part.view(shape) for part, shape in zip(values.split(numels), self.shapes, strict=True)]


def _as_one(tensors: Tensors) -> list[Tensors]:
    return [tensors]


def _apart(tensors: Tensors) -> list[Tensors]:
    return [[tensor] for tensor in tensors]


def _in_pieces(tensors: Tensors) -> list[Tensors]:
    return [[piece] for piece in torch.cat([tensor.flatten() for tensor in tensors]).tensor_split(BORDERS)]


def _row(parts: list[Tensors]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for part in parts for tensor in part])


def _unfit_in_state(optimizer: torch.optim.Optimizer, is_whole: bool) -> Iterator[str]:
    """The parts of an optimizer's state of no tensor, or unfit for a checkpoint: nothing is cut where tensors are
    updated whole."""
    tensors = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    for tensor, state in optimizer.state.items():
        if id(tensor) not in tensors:
            yield f"self.state[{tensor!r}], which is of no parameter"
            continue
        for name, value in state.items():
            if name in (WEIGHT, AVERAGE):
                yield f"{name!r}, a name of the engine's"
            elif isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value):
                if value.ndim > 0 and not is_whole and value.shape != tensor.shape:
                    yield f"{name!r} of shape {tuple(value.shape)}"
            elif type(value) not in (bool, int, float, str, type(None)):
                yield f"{name!r}, a {type(value).__name__}"


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """The attributes of an optimizer as text, without those that torch gives every optimizer."""
    of_torch = vars(torch.optim.SGD([torch.zeros(())])).keys() | {"step", "_step_count", "_opt_called"}
    return {name: repr(value) for name, value in vars(optimizer).items() if name not in of_torch}
