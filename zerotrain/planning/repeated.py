"""Rehearses a model of many alike blocks with a few of them, since each further block adds the same.

At an equal distance from the start of a phase, or from its end, memory is linear in the number of blocks; between both
it is linear in the place. So the most of each half of each phase is linear in the number of blocks. (The most of a
whole step is not: one half may overtake another.) Three numbers of blocks are rehearsed: the first and the last give
each line, and the middle one must lie on it.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerotrain.config.schema import Config
from zerotrain.engine.buckets.bucket import TrainedBucket
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.schedule.reductions import MAX_LARGEST_BUCKETS_IN_FLIGHT
from zerotrain.planning.live import OTHERS, Look

if TYPE_CHECKING:
    from zerotrain.planning.rehearsal import StagePlan

KEPT = (4, 5, 6)
"""Numbers of blocks that are rehearsed, at equal distances."""
MAX_PREFETCH = 2
"""Units gathered ahead, at most: more would span all blocks that are rehearsed."""
MIN_BLOCKS = 20
SLACK_NBYTES = 2**20
"""Numbers for the norm are added up once there are enough of them, and not in each block."""
BY_A_FORWARD_NBYTES = 4096
"""A forward may leave small tensors that it makes once."""
EXACT = ("parameters", "gradients", "optimizer", "host", "disk", "saved", "sums", "sent", "fetched", "stored", "flops")
"""Fields of a plan that grow by as much with each block."""
_PLAIN = (int, float, str, bool, type(None), torch.dtype)
_OF_TORCH = frozenset(vars(nn.Module()))


def may_be_cut(config: Config) -> bool:
    """Whether no setting names single blocks, and none lets more blocks be under way than are rehearsed. The windows of
    offloaded state are not on a line."""
    of_model = (config.model.get("freeze"), config.optimizer.get("groups"))
    named = (*of_model, config.zero.unit_patterns, config.precision.keep_fp32)
    return config.zero.prefetch <= MAX_PREFETCH and {*config.offload.tiers} == {"device"} and not any(named)


@dataclass(frozen=True)
class Blocks:
    """The longest run of blocks that are alike in a model."""

    name: str
    """The name of the list that they are in."""
    run: range
    """Their places."""

    @classmethod
    def of(cls, model: nn.Module) -> "Blocks | None":
        """None where they are few."""
        found = [
            cls(name, run)
            for name, module in model.named_modules()
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) >= MIN_BLOCKS
            for run in _runs([*module])
        ]
        longest = max(found, key=lambda each: len(each.run), default=None)
        if longest is None or len(longest.run) < MIN_BLOCKS or not longest._own_their_parameters(model):
            return None
        return longest

    def copied(self, model: nn.Module, num_kept: int) -> nn.Module:
        """A copy of the model with so many of them."""
        copy = deepcopy(model)
        self.cut(copy, num_kept)
        return copy

    def cut(self, model: nn.Module, num_kept: int) -> "Blocks":
        """Leave so many of them in the model."""
        blocks: Any = model.get_submodule(self.name)
        kept = self.run[:num_kept]
        del blocks[kept.stop : self.run.stop]
        return Blocks(self.name, kept)

    def _own_their_parameters(self, model: nn.Module) -> bool:
        blocks: Any = model.get_submodule(self.name)
        inside = [each for at in self.run for _, each in blocks[at].named_parameters(remove_duplicate=False)]
        ours = {id(each) for each in inside}
        everywhere = [each for _, each in model.named_parameters(remove_duplicate=False) if id(each) in ours]
        return len(ours) == len(inside) == len(everywhere)


def _runs(blocks: Sequence[nn.Module]) -> Iterator[range]:
    start, first = 0, _described(blocks[0])
    for place, block in enumerate(blocks[1:], 1):
        described = _described(block)
        if not _are_alike(first, described, place - start):
            yield range(start, place)
            start, first = place, described
    yield range(start, len(blocks))


def _described(block: nn.Module) -> list[tuple[Any, Any]]:
    """All that could make a block differ from another, as (name, value)."""
    found: list[tuple[Any, Any]] = []
    for name, module in block.named_modules(remove_duplicate=False):
        found.append((name, type(module)))
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            is_there = tensor is not None
            found.append(
                ((name, key), is_there and (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad))
            )
        for key, value in vars(module).items():
            if key not in _OF_TORCH:
                found.append(((name, key), value))
            elif isinstance(value, dict) and key.endswith("hooks"):
                found.append(((name, key), len(value)))
    return found


def _are_alike(first: list[tuple[Any, Any]], other: list[tuple[Any, Any]], distance: int) -> bool:
    """Whether they differ at most in the numbers of their places."""
    return len(first) == len(other) and all(
        which == which_of_other and _is_same(value, value_of_other, distance)
        for (which, value), (which_of_other, value_of_other) in zip(first, other, strict=True)
    )


def _is_same(value: Any, other: Any, distance: int) -> bool:
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) is int and other - value == distance:
        return True
    if isinstance(value, tuple):
        return len(value) == len(other) and all(_is_same(*each, distance=0) for each in zip(value, other, strict=True))
    return isinstance(value, (*_PLAIN, type)) and value == other


def grows_evenly(engine: ZeroEngine) -> bool:
    """Whether each further block would add the same buckets: each has buckets of its own, the last too, which is cut
    smaller in a small model; two would share none in a larger model, where more may be shared; and fewer blocks than
    are rehearsed have reductions under way at once."""
    by_block: dict[str, list[tuple[Any, ...]]] = {}
    for bucket in engine.schedule.buckets:
        units = bucket.spec.units
        if len(units) > 1 or (isinstance(bucket, TrainedBucket) and bucket.update.owners):
            return False
        if not units[0].is_root:
            kind = (bucket.spec.trainable, bucket.spec.dtype)
            by_block.setdefault(units[0].name, []).append((kind, bucket.layout.padded_numel))
    first, *others = by_block.values()
    if any(each != first for each in others):
        return False
    numels = [sum(numel for kind, numel in first if kind == each) for each in {kind for kind, _ in first}]
    most_shared = engine.options.bucket_numel_for({bucket.spec.units[0] for bucket in engine.schedule.buckets})
    largest = max(bucket.layout.padded_numel for bucket in engine.schedule.trained)
    spans = MAX_LARGEST_BUCKETS_IN_FLIGHT * largest <= (KEPT[0] - 1) * sum(numels)
    return spans and 2 * min(numels) > most_shared


class UnevenError(Exception):
    """Blocks do not add the same."""


def require_even(forwards: Sequence[tuple[int, int, int]], of_all: tuple[int, int, int], num: int) -> None:
    """Require that a forward of the whole model lies on the lines of those with `KEPT` blocks: a block that does
    something else at its place, or looks back at all before it, is off them.

    Args:
        forwards, of_all: (operations, flops, bytes that are alive behind it).

    Raises:
        UnevenError: it does not.
    """
    for few, whole, slack in zip(zip(*forwards, strict=True), of_all, (0, 0, BY_A_FORWARD_NBYTES), strict=True):
        expected = _line(few, num, slack=slack)
        if abs(expected - whole) > (slack and max(whole // 1000, slack)):
            raise UnevenError


def with_all(plans: Sequence["StagePlan"], looks: Sequence[Sequence[Look]], num: int) -> "StagePlan":
    """The plan with so many blocks, of those with `KEPT` and what was alive in each.

    Raises:
        UnevenError: they do not lie on lines.
    """
    phases = [[[*group] for _, group in groupby(each, key=lambda look: look.phase)] for each in looks]
    if any(each.peak is None for each in plans) or len({tuple(each[0].phase for each in few) for few in phases}) > 1:
        raise UnevenError
    total, most = max((_most(num, three) for three in zip(*phases, strict=True)), key=lambda found: found[0])
    if total < 100 * SLACK_NBYTES:
        raise UnevenError
    kinds = {
        kind: _line([look.by_kind.get(kind, 0) for look in most], num, slack=SLACK_NBYTES)
        for kind in ("gathered", OTHERS)
    }
    last = plans[-1]
    lent = _lent([plan.scratch - plan.sums for plan in plans])
    beside = (last.peak or 0) - last.scratch - max(each.total for each in looks[-1])
    exact = {name: _line([getattr(plan, name) for plan in plans], num, slack=0) for name in EXACT}
    scratch = lent + exact["sums"]
    operations = [plan.operations or 0 for plan in plans]
    return replace(
        last,
        **exact,  # type: ignore[arg-type]
        operations=_line(operations, num, slack=operations[0] // 100),
        scratch=scratch,
        gathered=kinds["gathered"],
        activations=kinds[OTHERS],
        peak=total + scratch + beside + SLACK_NBYTES,
        peak_phase=most[0].phase,
    )


def _lent(values: Sequence[int]) -> int:
    """Scratch without sums of micro-batches. Buffers are lent as reductions come and go: the number under way when the
    largest comes depends on the number of blocks, without a trend. If it grows, reductions of more blocks may be under
    way than are rehearsed."""
    first, middle, last = values
    if first + SLACK_NBYTES < middle and middle + SLACK_NBYTES < last:
        raise UnevenError
    return max(values)


def _most(num: int, phases: Sequence[Sequence[Look]]) -> tuple[int, list[Look]]:
    """The most of a phase with so many blocks, and the looks that tell it. Between its ends memory rises or falls from
    block to block: a half that has less than the other and grows no faster holds no most, and where it is cut need not
    be the same place.
    """
    halves = [[_highest(looks, place) for looks in phases] for place in (0, 1)]
    found = []
    for half, other in (halves, halves[::-1]):
        try:
            found.append((_line([look.total for look in half], num, slack=SLACK_NBYTES), half))
        except UnevenError:
            is_less = all(here.total <= there.total for here, there in zip(half, other, strict=True))
            is_steeper = half[2].total - half[1].total > other[2].total - other[1].total + SLACK_NBYTES
            if not is_less or is_steeper:
                raise
    if not found:
        raise UnevenError
    return max(found, key=lambda each: each[0])


def _highest(looks: Sequence[Look], place: int) -> Look:
    """The highest look of the first half (0) or the second (1); a single look is in both."""
    middle = len(looks) // 2
    return max((looks[:middle], looks[middle:])[place] or looks, key=lambda look: look.total)


def _line(values: Sequence[int], num: int, *, slack: int) -> int:
    """The value at so many blocks, of those at `KEPT`, of which the one between may lie so far from the line. The
    steepest line that this leaves is taken: a plan may say more than there is, and not less."""
    first, middle, last = values
    at_first, _, at_last = KEPT
    off = abs(2 * middle - first - last)
    if off > 2 * slack:
        raise UnevenError
    return last + (last - first + off) * (num - at_last) // (at_last - at_first)
