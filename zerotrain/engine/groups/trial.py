"""A trial, on small tensors, of whether an optimizer can work on what ranks hold.

A rank updates a flat piece of many tensors as one tensor, with an optimizer of its own. An optimizer that takes a norm,
a mean or any other number over more than one element gives other weights then, and its class name does not tell. So the
trial makes some steps on whole tensors, as in plain PyTorch, and the same steps on flat pieces of them. The results are
compared up to rounding, since a vectorised kernel may round the last elements of a tensor in another way than the rest;
numbers over several elements differ by far more, as the gradients of the pieces differ a hundredfold. Then the steps
are made once more, on whole tensors, with an optimizer that is made anew in their midst from the state of the first:
this shows state that it keeps elsewhere. The trial misses what an optimizer begins to do after these steps. torch's own
are known (a test tries each): they make one step.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerotrain.device.kinds import device_of
from zerotrain.engine.groups.hyperparameters import told
from zerotrain.engine.groups.made_anew import differing, kept_elsewhere, made_anew, tensors_alone, unfit_in_state
from zerotrain.engine.groups.optimizer_factory import OptimizerFactory
from zerotrain.engine.groups.own_numbers import own_numbers
from zerotrain.errors import ConfigError

NUM_STEPS = 11
"""Some optimizers look at more than one element in every tenth step only."""
STEPS_BEFORE_ANEW = 5
"""Odd, and followed by a tenth step."""
SHAPES = ((16, 12), (64,), (2, 8, 2, 2), (48, 96))
"""The last is above 4096 elements: optimizers with state in 8 bits leave smaller tensors alone."""
BORDERS = (128, 704)
"""Between the pieces: multiples of 64, as the borders of shards are."""
RATE = 0.5
"""The learning rate, instead of one that may be too small to see anything, or 0 before a warm-up."""
OF_STEP, OF_SIZE, OF_LARGEST = 1e-3, 1e-6, 5e-7
"""How far two results may lie apart: as parts of the last step, of the weight, and of the largest it has been."""

Tensors = list[torch.Tensor]
Choice = Callable[[Tensors], Tensors]
Split = Callable[[Tensors], list[Tensors]]

CLOSURE = (
    "its step calls a closure, which would run the model again during an update; use AdamW, SGD or another optimizer "
    "without a closure"
)
RANDOM = (
    "its step draws random numbers, which differ between ranks and stages, so that copies of a weight drift apart; "
    "use one without noise"
)
OWN_NUMBERS = (
    "its step changes {} in its param_groups, which engine.param_groups overwrite before each step; let it keep such "
    "numbers in its state"
)
FAILS = "its step fails on small tensors ({}: {})"
WHOLE = (
    "in a test on small tensors, it updated a tensor in parts differently than at once, and ranks hold parts. It "
    "updates each tensor by itself: set `whole_tensor = True` in its class, and ranks gather tensors for it"
)
EVERYTHING = (
    "in a test on small tensors, the update of one depended on the others (a norm or a number over all of them), which "
    "no rank has; use one that updates each tensor by itself, such as AdamW (max_grad_norm clips over the whole model)"
)
FORM = "its step changes the shape or dtype of a weight; it must keep both"
ELSEWHERE = (
    "in a test on small tensors, it continued differently after it was rebuilt from its state, as engine.set_stage, "
    "freeze and checkpoints rebuild it: {} is kept elsewhere; it must keep what later steps need in "
    "self.state[parameter], as tensors and numbers"
)
UNFIT = (
    "it keeps {}, which is neither a tensor nor a number of one parameter, so that it cannot be sharded; "
    "it must keep each under a name of its own in self.state[parameter]"
)


class _ProblemError(Exception):
    """An optimizer does what it must not."""


class _NoRandomNumbers(TorchDispatchMode):
    """In here what would draw is not done, so that the user's next random numbers stay what they were."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, only to keep it out of here

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in op.tags:
            raise _ProblemError(RANDOM)
        return op(*args, **(kwargs or {}))


class Trials:
    """Tries the optimizers that a factory makes on a device, each set of hyperparameters once."""

    def __init__(self, factory: OptimizerFactory, device: torch.device) -> None:
        self._factory, self._device = factory, device
        self._passed: set[str] = set()

    def require_fit(self, settings: Mapping[str, Any]) -> None:
        """Make sure that an optimizer of these hyperparameters does here what it does in plain PyTorch, or raise
        ConfigError."""
        tried = {name: told(value) for name, value in settings.items() if name not in ("name", "lr", "initial_lr")}
        key = repr((settings["name"].startswith("whole "), tried))
        if key not in self._passed and device_of(self._device).holds_values:
            trial = _Trial(self._factory, settings, self._device)
            if problem := trial.problem():
                raise ConfigError(f"optimizer={trial.kind}: {problem}")
            self._passed.add(key)


class _Trial:
    """The trial of one set of hyperparameters."""

    def __init__(self, factory: OptimizerFactory, settings: Mapping[str, Any], device: torch.device) -> None:
        self._factory, self._device = factory, device
        self._settings = {name: _rate_like(value) if name == "lr" else value for name, value in settings.items()}
        self._is_whole = settings["name"].startswith("whole ")
        self._sample = self._optimizer([torch.ones(SHAPES[0], device=device)])
        self.kind = type(self._sample).__name__

    def problem(self) -> str | None:
        """The sentence on what the optimizer does that it must not; None for nothing."""
        if is_torchs_own(self._sample):
            # Without what torch puts around it, which imports its compiler: half a second of each start.
            return self._failure_of_sample(partial(inspect.unwrap(type(self._sample).step), self._sample))
        failures = []
        for chosen in (list, _matrices) if self._is_whole else (list, _matrices, _flat):
            try:
                with _NoRandomNumbers():
                    rows, optimizer = self._watch(chosen, _in_one)
            except _ProblemError as problem:
                return str(problem)
            except Exception as error:
                failures.append(_failure(error))
            else:
                return self._problem_in_parts(rows, optimizer, chosen)
        with_closure = partial(self._sample.step, lambda: torch.zeros((), requires_grad=True))
        if self._failure_of_sample(self._sample.step) and not self._failure_of_sample(with_closure):
            return CLOSURE
        return None if self._is_whole else failures[0]  # one that is declared may want shapes that are not tried

    def _failure_of_sample(self, step: Callable[[], object]) -> str | None:
        """The sentence on what one step fails with; None if it does not."""
        (tensor,) = self._sample.param_groups[0]["params"]
        tensor.grad = torch.ones_like(tensor)
        try:
            with torch.no_grad():
                step()
        except Exception as error:
            return _failure(error)
        return None

    def _problem_in_parts(self, rows: torch.Tensor, optimizer: torch.optim.Optimizer, chosen: Choice) -> str | None:
        (shown,) = optimizer.param_groups
        changed = [name for name, value in self._settings.items() if told(shown.get(name)) != told(value)]
        if changed:
            return OWN_NUMBERS.format(", ".join(changed))
        if not self._is_whole and self._gives(rows, chosen, _pieces):
            return self._problem_made_anew(rows, optimizer, chosen)
        if self._gives(rows, chosen, _apart):
            return self._problem_made_anew(rows, optimizer, chosen) if self._is_whole else WHOLE
        return EVERYTHING if self._gives(rows, chosen, _in_one) else RANDOM

    def _problem_made_anew(self, rows: torch.Tensor, optimizer: torch.optim.Optimizer, chosen: Choice) -> str | None:
        """The sentence on what the optimizer keeps that does not go along when it is made anew; None for nothing."""
        if unfit := unfit_in_state(optimizer, is_whole=self._is_whole):
            return UNFIT.format(" and ".join(unfit))
        before, names = kept_elsewhere(optimizer), []
        with suppress(Exception):
            renewed, made = self._watch(chosen, _in_one, anew_after=STEPS_BEFORE_ANEW)
            after = kept_elsewhere(made)
            if _agree(rows, renewed) and not differing(tensors_alone(before), tensors_alone(after)):
                return None
            names = differing(before, after)
        names = names or [name for name, kept in tensors_alone(before).items() if kept]
        return ELSEWHERE.format(" and ".join(f"self.{name}" for name in names) or "what it needs")

    def _gives(self, rows: torch.Tensor, chosen: Choice, split: Split) -> bool:
        """Whether tensors split over several optimizers become what they do with one. False if it fails."""
        with suppress(Exception):
            return _agree(rows, self._watch(chosen, split)[0])
        return False

    def _watch(
        self, chosen: Choice, split: Split, anew_after: int | None = None
    ) -> tuple[torch.Tensor, torch.optim.Optimizer]:
        """Let `NUM_STEPS` be made.

        Args:
            split: which of the tensors, or which pieces of them, have an optimizer of their own.
            anew_after: steps after which all is made anew.

        Returns:
            (NUM_STEPS + 1, numel) fp32, the elements before and after each step; and the first optimizer, in the end.
        """
        parts = self._parts(chosen, split, _weights())
        optimizers = [self._optimizer(part) for part in parts]
        rows, former = [_row(parts)], []
        for step in range(NUM_STEPS):
            if step == anew_after:
                former.append((parts, optimizers))  # or others would get the same places in memory
                renewed = [made_anew(*each, self._optimizer) for each in zip(optimizers, parts, strict=True)]
                parts, optimizers = [part for part, _ in renewed], [optimizer for _, optimizer in renewed]
            gradients = self._parts(chosen, split, _gradients(step))
            for optimizer, part, theirs in zip(optimizers, parts, gradients, strict=True):
                self._step(optimizer, part, theirs)
            rows.append(_row(parts))
        return torch.stack(rows), optimizers[0]

    def _parts(self, chosen: Choice, split: Split, tensors: Tensors) -> list[Tensors]:
        return split(chosen([tensor.to(self._device, copy=True) for tensor in tensors]))

    def _step(self, optimizer: torch.optim.Optimizer, tensors: Tensors, gradients: Tensors) -> None:
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient
        with own_numbers(optimizer, [self._settings]):
            optimizer.step()
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != forms:
            raise _ProblemError(FORM)

    def _optimizer(self, tensors: Tensors) -> torch.optim.Optimizer:
        return self._factory([{"params": tensors, **self._settings}])


def _failure(error: Exception) -> str:
    return FAILS.format(type(error).__name__, (str(error).splitlines() or [""])[0])


# ---- the tensors that are tried, and how they are cut


@cache
def _weights() -> Tensors:
    return [0.001 * tensor for tensor in _waves(0)]


@cache
def _gradients(step: int) -> Tensors:
    """Small, middling or large, each a hundredfold in its last two thirds, with means of both signs."""
    gradients = [wave + sign for wave, sign in zip(_waves(step + 1), (1, -1, 1, -1), strict=True)]
    for gradient in gradients:
        gradient.view(-1)[gradient.numel() // 3 :].mul_(100)
        gradient.mul_(100.0 ** (step % 3 - 1))
    return gradients


def _waves(number: int) -> Tensors:
    """Numbers of -1.5 to 1.5 that look random, and leave the user's random numbers as they are."""
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    values = 1.5 * torch.arange(1 + number, sum(numels) + 1 + number, dtype=torch.float64, device="cpu").square().sin()
    return [part.view(shape) for part, shape in zip(values.float().split(numels), SHAPES, strict=True)]


def _flat(tensors: Tensors) -> Tensors:
    return [torch.cat([tensor.flatten() for tensor in tensors])]


def _matrices(tensors: Tensors) -> Tensors:
    return [tensor for tensor in tensors if tensor.ndim == 2]


def _in_one(tensors: Tensors) -> list[Tensors]:
    return [tensors]


def _apart(tensors: Tensors) -> list[Tensors]:
    return [[tensor] for tensor in tensors]


def _pieces(tensors: Tensors) -> list[Tensors]:
    return [[piece] for piece in _flat(tensors)[0].tensor_split(BORDERS)]


def _row(parts: list[Tensors]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for part in parts for tensor in part])


def _agree(plain: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two results of `_watch` are the same up to rounding."""
    sizes = plain.abs()
    steps = plain.diff(dim=0, prepend=plain[:1]).abs()
    allowed = OF_STEP * steps + OF_SIZE * sizes + OF_LARGEST * sizes.cummax(dim=0).values
    same = (plain == other) | ((plain - other).abs() <= allowed) | (plain.isnan() & other.isnan())
    return bool(same.all())


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, as torch made it: nobody has hung anything on its step."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return is_torchs and not any(hooks) and "step" not in vars(optimizer)


def _rate_like(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, RATE)
    return RATE if isinstance(value, int | float) else value
