"""Torch optimizers of parameter groups: some work on elements, some need whole tensors."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from zerotrain.errors import ConfigError, argument
from zerotrain.sharding.units import ModelParameter, Unit, matching

# Muon for the matrices inside a model's blocks, AdamW for all else: torch's own optimizers, each where it belongs.


@dataclass(frozen=True, kw_only=True)
class MuonWithAdamW:
    """Makes torch.optim.Muon for matrices and torch.optim.AdamW for all other parameters.

    Muon (K. Jordan et al. 2024) takes the momentum of a whole matrix and replaces it by the nearest orthogonal one.
    The convention is to leave embeddings and output layers to AdamW, whatever their shape.

    Args:
        lr, momentum, weight_decay, nesterov, adjust_lr_fn: as torch.optim.Muon has them.
        matrices: name patterns of the parameters for Muon, such as ["blocks.*.weight"]; of those that match, the
            two-dimensional ones. auto: all two-dimensional parameters in the model's repeated blocks that are no
            embeddings.
        adamw_lr, adamw_betas, adamw_eps, adamw_weight_decay, fused: as torch.optim.AdamW has them.
    """

    lr: float
    adamw_lr: float
    momentum: float = 0.95
    weight_decay: float = 0.1
    nesterov: bool = True
    adjust_lr_fn: str | None = None
    matrices: Sequence[str] | str = "auto"
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    adamw_weight_decay: float = 0.1
    fused: bool = True

    def needs_whole(self, units: Sequence[Unit[ModelParameter]]) -> list[ModelParameter]:
        """The parameters for Muon.

        Raises:
            ConfigError: there are none, a pattern matches none, or `matrices` is neither auto nor a list.
        """
        two_dimensional = []
        for unit in units:
            for managed in unit.parameters:
                if managed.parameter.requires_grad and managed.parameter.ndim == 2:
                    two_dimensional.append((unit, managed))
        if isinstance(self.matrices, str):
            if self.matrices != "auto":
                raise ConfigError(
                    f"{argument('MuonWithAdamW(matrices)', self.matrices)}: must be auto, or a list of name patterns "
                    f"such as {argument('MuonWithAdamW(matrices)', [self.matrices])}"
                )
            chosen = [
                managed
                for unit, managed in two_dimensional
                if not unit.is_root and not any(isinstance(owner, torch.nn.Embedding) for owner, _ in managed.owners)
            ]
            if not chosen:
                raise ConfigError(
                    f"{argument('MuonWithAdamW(matrices)', 'auto')}: found no two-dimensional parameter in a repeated "
                    f"block of the model; name some, such as {argument('MuonWithAdamW(matrices)', ['*.weight'])}, or "
                    "the blocks with zero.units"
                )
            return chosen
        matrices, chosen = [managed for _, managed in two_dimensional], []
        for pattern in self.matrices:
            named = matching(matrices, pattern)
            chosen += named
            if not named:
                candidates = ", ".join(managed.names[0] for managed in matrices[:3])
                raise ConfigError(
                    f"{argument('MuonWithAdamW(matrices)')}: no trainable two-dimensional parameter matches "
                    f"{pattern!r}; there are {candidates or 'none'} and so on"
                )
        return [managed for managed in matrices if managed in chosen]

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer of groups that are all updated whole, or all by elements."""
        if groups[0]["name"].startswith("whole "):
            return torch.optim.Muon(
                groups,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                nesterov=self.nesterov,
                adjust_lr_fn=self.adjust_lr_fn,
            )
        return torch.optim.AdamW(
            groups,
            lr=self.adamw_lr,
            betas=(self.adamw_betas[0], self.adamw_betas[1]),  # a list, where it comes from a yaml
            eps=self.adamw_eps,
            weight_decay=self.adamw_weight_decay,
            fused=self.fused,
        )


OptimizerFactory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
"""Makes an optimizer from parameter groups. It may have an attribute `whole_tensor`, as an optimizer's class may: true
where each tensor is updated whole, apart from the others. Or it may have a method `needs_whole(units)`: the
parameters to update whole. The names of their groups begin with "whole ", and they are never mixed with the
rest."""

NEEDS_EVERYTHING = {"LBFGS": "needs all parameters at once", "SparseAdam": "needs sparse gradients"}
"""Optimizers of torch for which neither a shard nor a whole tensor is enough."""

SAMPLE_SHAPE = (64, 64)
WHOLE = "whole "
"""The beginning of the names of groups with parameters to update whole."""


def build_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Make an optimizer of groups that are all to be updated whole, or all by elements.

    Raises:
        ConfigError: it is known to need more than it would get, or refuses what it gets.
    """
    optimizer = _make(factory, groups)
    kind = type(optimizer).__name__
    if kind in NEEDS_EVERYTHING:
        raise ConfigError(f"optimizer={kind}: {NEEDS_EVERYTHING[kind]}, which no rank has; use AdamW, SGD or the like")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError(
            f"optimizer={kind}: differentiable=True asks for gradients through the update, and shards are updated "
            "outside of any graph; leave it out"
        )
    return optimizer


def require_values(optimizer: torch.optim.Optimizer, settings: Mapping[str, Any]) -> None:
    """Refuse values of a group's settings that its optimizer cannot have. Torch looks only at its arguments, so one is
    made with them.

    Raises:
        ConfigError: they have not, in the words of the optimizer.
    """
    kind, defaults = type(optimizer), optimizer.defaults
    if not settings:
        return
    try:
        allowed = inspect.signature(kind).parameters
        keywords = {name: value for name, value in defaults.items() if name in allowed}
        kind([torch.zeros(SAMPLE_SHAPE)], **keywords)
    except Exception:  # a user's class that cannot be made so
        return
    for name, value in settings.items():
        if isinstance(value, str) and isinstance(defaults.get(name), Real):
            raise ConfigError(f"{argument('param_groups')}: {name}={value!r} is a text; {kind.__name__} takes a number")
    try:
        keywords |= {name: value for name, value in settings.items() if name in allowed}
        kind([torch.zeros(SAMPLE_SHAPE)], **keywords)
    except (ValueError, TypeError, LookupError) as error:
        listing = ", ".join(f"{name}={value}" for name, value in settings.items())
        raise ConfigError(f"{argument('param_groups')}: {kind.__name__} cannot have {listing}: {error}") from error


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is one of torch's, as torch made it: nobody has hung anything on its step."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    is_torchs = f"{type(optimizer).__module__}.".startswith("torch.optim.")
    return is_torchs and not any(hooks) and "step" not in vars(optimizer)


def needing_whole(factory: OptimizerFactory, units: Sequence[Unit[ModelParameter]]) -> list[ModelParameter]:
    """The trainable parameters of `units` that the optimizer needs whole: those it names, or all, or none.

    Raises:
        ConfigError: it names none where it must, or cannot work here.
    """
    choose = getattr(factory, "needs_whole", None)
    if choose is not None:
        return list(choose(units))
    if not updates_whole(factory):
        return []
    trainable = [managed for unit in units for managed in unit.parameters if managed.parameter.requires_grad]
    vector = next((managed.names[0] for managed in trainable if managed.parameter.ndim != 2), None)
    if vector is not None and isinstance(_sample(factory), torch.optim.Muon):
        raise ConfigError(
            f"optimizer=Muon: updates only matrices, and {vector} is none; use "
            f"{argument('zerotrain.MuonWithAdamW(...)')}, which leaves the rest to AdamW"
        )
    return trainable


def updates_whole(factory: OptimizerFactory) -> bool:
    """Whether any parameters may be updated whole."""
    if hasattr(factory, "needs_whole") or getattr(factory, "whole_tensor", False):
        return True
    sample = _sample(factory)
    # Torch's own with a separate update of each tensor; any other class says so itself.
    is_torchs = isinstance(sample, torch.optim.Adafactor | torch.optim.Muon)
    return is_torchs or getattr(sample, "whole_tensor", False)


def _sample(factory: OptimizerFactory) -> torch.optim.Optimizer:
    return _make(factory, [{"params": [torch.zeros(SAMPLE_SHAPE)], "name": "whole matrices"}])


def _make(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    try:
        optimizer = factory(groups)
    except TypeError as error:  # it compares a text with a number, and names neither
        settings = "".join(f"{name}={value!r}, " for name, value in getattr(factory, "keywords", {}).items())
        raise ConfigError(f"optimizer: {settings}{error}") from error
    except ValueError as error:
        raise ConfigError(f"optimizer: {error}") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: makes a {type(optimizer).__name__} of its groups; it must make a torch.optim.Optimizer"
        )
    return optimizer


def tensors_of_state(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The state tensors of a torch optimizer, without 0-dim counters."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim > 0]


# The optimizer's state in bf16 between updates, which compute with it in fp32.
#
# Adam's second moment falls by a thousandth in a step, and neighbours in bf16 differ by a 128th to a 256th: rounded to
# the nearest it would grow and never fall. So it is rounded up or down by chance, more often to the nearer one. The
# chance is made of the element's own bits (its weight, the value to round) and the number of the step. So it is the
# same on every rank, at every stage and after a restart, and no generator is drawn from.


NARROWED = (torch.float32, torch.bfloat16)
"""State in these dtypes, with a number for each element, is kept in the state's dtype."""
_OF_WEIGHT, _OF_STEP, _OF_ALL = -1640531535, 668265263, -2048144777
"""Odd 32-bit numbers, with which a multiplication mixes bits (primes of xxHash). A sum in place of the `xor` between
them would let values fall too often, by a fifth in 400 steps."""


@contextmanager
def widened_state(
    optimizer: torch.optim.Optimizer, targets: Iterable[torch.Tensor], dtype: torch.dtype
) -> Iterator[None]:
    """In here the optimizer has its state of tensors in fp32; before and behind it in `dtype`, in memory that stays."""
    if dtype == torch.float32:
        yield
        return
    narrow: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
    targets = list(targets)
    for target, name, value in _narrowed(optimizer, targets):
        if value.dtype == dtype:
            narrow[target, name] = value
            optimizer.state[target][name] = value.float()
    try:
        yield
    finally:
        for target, name, value in _narrowed(optimizer, targets):
            if (kept := narrow.get((target, name))) is None:
                kept = torch.empty_like(value, dtype=dtype)
            step = optimizer.state[target].get("step", 0)
            optimizer.state[target][name] = kept.copy_(_rounded_by_chance(value, target.detach(), step))


def _narrowed(
    optimizer: torch.optim.Optimizer, targets: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """(tensor, name, value) of the state that is kept in another dtype between updates."""
    for target in targets:
        for name, value in optimizer.state[target].items() if target in optimizer.state else ():
            if type(value) is torch.Tensor and value.dtype in NARROWED and value.shape == target.shape:
                yield target, name, value


def _rounded_by_chance(values: torch.Tensor, weights: torch.Tensor, step: Any) -> torch.Tensor:
    """fp32 values with as many bits as bf16 has, in their memory."""
    number: Any = step.to(torch.int32) * _OF_STEP if isinstance(step, torch.Tensor) else int(step) * _OF_STEP
    if isinstance(number, int):
        number = (number + 2**31) % 2**32 - 2**31  # as the product in 32 bits
    bits = values.view(torch.int32)
    chance = weights.view(torch.int32).mul(_OF_WEIGHT).add_(number).bitwise_xor_(bits).mul_(_OF_ALL)
    bits.add_(chance.bitwise_right_shift_(16).bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
    return values
