"""The state of buckets under another plan, one bucket at a time: kept where it lies, cut, or gathered.

Borders of buckets and of shards are the same under every plan, so between two that shard the optimizer's state nothing
of it moves. Beside what the larger of two plans holds, one bucket is whole meanwhile.
"""

import gc
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from zerotrain.comm.collectives import Collectives
from zerotrain.device.device import lies_on_host
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.buckets.parts.spans import Span, update_range
from zerotrain.engine.buckets.update import BucketUpdate
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.engine.state.named import capture, per_element
from zerotrain.engine.state.transfer import described_state, placed, shared_state
from zerotrain.sharding.flat_buffer import FlatBuffer
from zerotrain.sharding.plan import Plan


class Switch:
    """Moves what is kept of buckets. All ranks take part.

    Args:
        buckets: as they lie now.
        plan: where they are to lie.
    """

    def __init__(self, buckets: Sequence[Bucket], plan: Plan, collectives: Collectives) -> None:
        self._plan, self._collectives = plan, collectives
        self._is_gathered = (
            any(bucket.weights.plan.shards_optimizer for bucket in buckets) and not plan.shards_optimizer
        )
        # A rank whose shards hold nothing of some parameters learns from the others what is kept of them.
        self._given_up: dict[str, StorageWeakRef] = {}
        """Memory that parameters had and have no more, by the name of the bucket."""
        self._by_span = shared_state(described_state(buckets), collectives) if self._is_gathered else {}
        self._whole = self._described_whole(buckets) if self._is_gathered else {}

    def _described_whole(self, buckets: Sequence[Bucket]) -> dict[tuple[str, int], dict[str, Any]]:
        """What owners keep of tensors that are updated whole, by bucket and place in it: of a tensor its shape and
        dtype."""
        mine = {
            (bucket.spec.name, slot): {name: _told(value) for name, value in bucket.update.whole_state(slot).items()}
            for bucket in buckets
            if isinstance(bucket, TrainedBucket) and bucket.update.whole is not None
            for slot in bucket.update.whole.targets
        }
        everyone: dict[tuple[str, int], dict[str, Any]] = {}
        for of_rank in self._collectives.gather_objects(mine, name="optimizer state"):
            everyone |= of_rank
        return everyone

    def master_of(self, bucket: Bucket) -> torch.Tensor | None:
        """The master weight of a bucket over the range that this rank is to update; None where it is the model's."""
        if not isinstance(bucket, TrainedBucket):
            return None
        update, current = bucket.update, bucket.update.current_weight()
        if not update.has_copy:
            return None
        held, wanted = update.where, update_range(bucket.layout, self._plan, self._collectives.shards.rank)
        if _is_within(wanted, held):
            return current if wanted == held else current[_relative(wanted, held)].clone()
        device = self._collectives.world.device
        full = torch.empty(bucket.layout.padded_numel, dtype=current.dtype, device=device)
        self._collectives.gather_now(f"master weights of {bucket.spec.name}", full, current.to(full.device))
        return full

    def memory_for(self, weights: BucketWeights) -> FlatBuffer:
        """The whole weights of a bucket where the model is to read them. Sharded parameters get memory of their own:
        theirs is given back between uses, and who read a `p.data` from before died of SIGSEGV (2026-11-22); nor does
        torch give back what numpy has seen, as it has what was saved or loaded on a CPU."""
        if not self._plan.shards_parameters:
            return weights.model_weight
        self._given_up[weights.spec.name] = StorageWeakRef(weights.model_weight.tensor.untyped_storage())
        return weights.model_weight.copy()

    def tell_of_held(self) -> None:
        """Warn of memory that parameters had and somebody keeps. The old buckets are gone."""
        if any(not memory.expired() for memory in self._given_up.values()):
            gc.collect()
        if held := [name for name, memory in self._given_up.items() if not memory.expired()]:
            warnings.warn(
                f"engine.set_stage: what parameters of {', '.join(held)} were in is still held by a tensor taken from "
                "them before (p.data, p.detach(), a state dict, the graph of a loss): it has their values of now from "
                "here on, and its memory stays; take such a tensor anew, or let it go before",
                stacklevel=2,
            )

    def move_state(self, old: Bucket, new: Bucket) -> None:
        """Give a new bucket what the optimizer keeps of an old one, which keeps nothing."""
        if not isinstance(old, TrainedBucket) or not isinstance(new, TrainedBucket):
            return
        if self._is_gathered:
            self._gather_spans(old, new)
        else:
            for span in new.update.spans:
                _cut(old.update, new.update, span)
        if new.update.whole is not None:
            self._move_whole(old.update, new.update)
        new.update.home.put_away()
        new.update.home.forget()

    def _gather_spans(self, old: TrainedBucket, new: TrainedBucket) -> None:
        keys = {managed.span for managed in old.spec.parameters if not managed.is_updated_whole}
        for span in new.update.spans:
            for name, value in self._by_span.get(span.key, {}).items():
                if not isinstance(value, torch.dtype):
                    new.update.span_state(span)[name] = placed(value, new.update.device)
        kept = {name: value for key in keys for name, value in self._by_span.get(key, {}).items()}
        for name, dtype in sorted((name, value) for name, value in kept.items() if isinstance(value, torch.dtype)):
            whole = capture(old, name, dtype, self._collectives)
            for span in old.update.spans:
                old.update.span_state(span).pop(name, None)
            for span in new.update.spans:
                if name in self._by_span.get(span.key, {}):
                    new.update.span_state(span)[name] = whole[span.where]  # not copied: a bucket is whole but once

    def _move_whole(self, old: BucketUpdate, new: BucketUpdate) -> None:
        assert old.whole is not None
        assert new.whole is not None
        rank = self._collectives.shards.rank
        for slot, owner in enumerate(old.owners):
            kept = old.whole_state(slot) if slot in old.whole.targets else {}
            if self._is_gathered:
                kept = self._from_owner(new, slot, owner, kept)
            if slot in new.whole.targets and (kept or owner == rank):
                new.whole_state(slot).update(kept)

    def _from_owner(self, new: BucketUpdate, slot: int, owner: int, own: Mapping[str, Any]) -> dict[str, Any]:
        kept = {}
        for name, told in self._whole.get((new.spec.name, slot), {}).items():
            if not (isinstance(told, tuple) and isinstance(told[1], torch.dtype)):
                kept[name] = own[name] if name in own else placed(told, new.device)
                continue
            shape, dtype = told
            device = self._collectives.world.device
            if name in own:
                values = own[name].to(device).contiguous()
            else:
                values = torch.empty(shape, dtype=dtype, device=device)
            self._collectives.broadcast(
                values.view(-1).view(torch.uint8), name=f"{name} of {new.spec.name}", source=owner
            )
            kept[name] = values
        return kept


def _told(value: Any) -> Any:
    """(shape, dtype) of a tensor; of what is kept once the value, and whether it lies on the device."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return list(value.shape), value.dtype
    return (value.cpu(), not lies_on_host(value)) if isinstance(value, torch.Tensor) else (value, False)


def _cut(old: BucketUpdate, new: BucketUpdate, span: Span) -> None:
    """Give a span the part of an old one in which it lies."""
    wanted = _absolute(span, new)
    for source in old.spans:
        held = _absolute(source, old)
        if _is_within(wanted, held):
            state = old.span_state(source)
            elements = per_element(source.target, state)
            for name, value in list(state.items()):
                if held == wanted:
                    new.span_state(span)[name] = value
                elif name in elements:
                    new.span_state(span)[name] = value[_relative(wanted, held)].clone()
                else:
                    new.span_state(span)[name] = deepcopy(value)


def _absolute(span: Span, update: BucketUpdate) -> slice:
    """Which elements of the bucket a span is."""
    return slice(update.where.start + span.where.start, update.where.start + span.where.stop)


def _relative(part: slice, whole: slice) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _is_within(part: slice, whole: slice) -> bool:
    return bool(whole.start <= part.start and part.stop <= whole.stop)
