"""The bytes that an engine holds and sends on this rank, beside those of ZeRO's formulas."""

from dataclasses import dataclass
from typing import Any

from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.sharding.plan import Plan, Volume


@dataclass(frozen=True)
class Offloaded:
    """A rank's bytes on one tier, and their cost in a step."""

    where: str
    """In words."""
    nbytes: int
    fetched_nbytes: int
    """In a step."""
    stored_nbytes: int
    fetched_per_s: float
    """Bytes a second of this rank, measured when the engine was built, on all ranks at once."""
    stored_per_s: float
    has_activations: bool
    """Whether what forwards save goes there too, which the bytes do not count."""

    @property
    def step_s(self) -> float:
        """Seconds of a step's transfers, beside which it computes."""
        return self.fetched_nbytes / self.fetched_per_s + self.stored_nbytes / self.stored_per_s


class Usage:
    """The bytes that an engine holds and sends, as they are now."""

    held: ShardedModel

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self.held.schedule.buckets)

    def group_sizes(self) -> list[tuple[int, int]]:
        """(parameters, their elements) that train in each of the `param_groups`."""
        sizes = [(0, 0) for _ in self.held.groups.hyperparameters]
        for bucket in self.held.schedule.trained:
            for managed, slot in zip(bucket.spec.parameters, bucket.layout.slots, strict=True):
                num_parameters, numel = sizes[managed.group]
                sizes[managed.group] = (num_parameters + 1, numel + slot.numel)
        return sizes

    def planned_nbytes(self) -> dict[str, int]:
        """Bytes a rank is to hold at rest by ZeRO's formulas: {parameters, gradients, optimizer} on the device, and
        what of them is offloaded. Known before the first step, from a step of the optimizer on a sample, and to no byte
        where it keeps factors of a matrix."""
        trained, num_whole = self.held.schedule.trained, self._num_whole
        num_by_elements = self._num_trained - num_whole
        copies = sum(bucket.layout.numel * 4 for bucket in trained if bucket.update.state.separate_master_nbytes)
        sampled = self.held.groups.sampled_nbytes
        state = sampled(num_whole, is_whole=True) + sampled(num_by_elements, is_whole=False)
        average = 4 * self._num_trained if self.held.average is not None else 0
        return self._split(self._volume.memory_nbytes(self.held.schedule.plan, state + copies + average))

    def sums_nbytes(self, num_micro_batches: int) -> int:
        """Bytes that a rank holds beside those, while a step adds up micro-batches and virtual ranks.

        For P elements and L virtual ranks on each rank these are log2(L) sums of P in fp32. With several micro-batches
        there is one more (in fp32 at stages 0 and 1 none, where it is the gradient itself), or with
        zero.accumulate='reduced' a shard of it (in fp32 none).

        Args:
            num_micro_batches: of a virtual rank.
        """
        leaves = of_micro_batches = shards = 0
        for bucket in self.held.schedule.trained:
            numel, precision = bucket.layout.padded_numel, bucket.gradient.precision
            leaves += numel * precision.master.itemsize * (self.held.options.leaves_per_rank.bit_length() - 1)
            if precision.separate_master or self.held.options.plan.shards_gradients:
                of_micro_batches += numel * precision.master.itemsize
            if precision.separate_master:
                shards += bucket.layout.shard_numel * precision.master.itemsize
        if num_micro_batches == 1:
            return leaves
        return leaves + (shards if self.held.options.reduces_each else of_micro_batches)

    def memory_bytes(self) -> dict[str, Any]:
        """Bytes this rank holds now, by kind, and under "theory" what ZeRO's formulas give without padding.

        "offloaded" lies off the device, all others on it; "scratch" is what the buffers reused from step to step hold
        beside the model state.
        """
        schedule, trained = self.held.schedule, self.held.schedule.trained
        return {
            "parameters": sum(bucket.weights.held_nbytes for bucket in schedule.buckets),
            "gradients": sum(bucket.gradient.held_nbytes for bucket in trained),
            "optimizer": sum(bucket.update.held_nbytes for bucket in trained),
            "offloaded": self.held.homes.placed_nbytes,
            "scratch": self.held.pools.held_nbytes
            + self.held.homes.windows_nbytes
            + sum(bucket.gradient.accumulator_nbytes for bucket in trained),
            "theory": self._split(self._volume.memory_nbytes(schedule.plan, self._optimizer_nbytes())),
        }

    def offloaded(self, num_micro_batches: int) -> list[Offloaded]:
        """This rank's bytes off the device, by tier, and their cost in a step.

        Args:
            num_micro_batches: of a step.
        """
        rows = []
        for tier, rates in self.held.homes.rates.items():
            fetched, stored = moved_nbytes(self.held, num_micro_batches, tier.name)
            activations = self.held.homes.has_activations(tier)
            rows.append(
                Offloaded(tier.where, tier.placed_nbytes, fetched, stored, rates.fetched, rates.stored, activations)
            )
        return rows

    def theoretical_sent_nbytes(self, num_micro_batches: int) -> int:
        """Bytes this rank sends in a step by ZeRO's count, without padding and without the norm's few bytes; and
        those of tensors that are updated whole, on their way to their owners and back."""
        whole_tensors = sum(bucket.update.sent_nbytes for bucket in self.held.schedule.trained)
        num_reductions = num_micro_batches if self.held.options.reduces_each else 1
        reshards = self.held.options.zero.reshard_after_forward
        return (
            self._volume.sent_nbytes(self.held.options.plan, num_micro_batches, reshards, num_reductions)
            + whole_tensors
        )

    def _switch_nbytes(self, plan: Plan) -> int:
        """Bytes a rank sends so that everything lies as a plan has it: its share of what was sharded, and is held
        whole."""
        volume, old = self._volume, self.held.schedule.plan
        gathered = 0
        if old.shards_parameters and not plan.shards_parameters:
            gathered += volume.trainable_nbytes + volume.frozen_nbytes
        if old.shards_optimizer and not plan.shards_optimizer:
            gathered += self._optimizer_nbytes()
        return gathered * (self.held.world.shards.size - 1) // self.held.world.shards.size

    @property
    def _volume(self) -> Volume:
        """The bytes of all parameters, in the dtypes they are held in, and of gradients in that they are reduced in."""
        nbytes = {True: 0, False: 0}
        for bucket in self.held.schedule.buckets:
            nbytes[bucket.spec.trainable] += bucket.layout.numel * bucket.spec.dtype.itemsize
        trained = self.held.schedule.trained
        return Volume(
            trainable_nbytes=nbytes[True],
            frozen_nbytes=nbytes[False],
            num_shards=self.held.world.shards.size,
            reduced_nbytes=sum(bucket.layout.numel * bucket.gradient.reduction.wire_itemsize for bucket in trained),
        )

    @property
    def _num_trained(self) -> int:
        """Elements that train."""
        return sum(bucket.layout.numel for bucket in self.held.schedule.trained)

    @property
    def _num_whole(self) -> int:
        """Elements that are updated whole."""
        trained = self.held.schedule.trained
        return sum(slot.numel for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole])

    def _optimizer_nbytes(self) -> int:
        """Bytes of all ranks together, without padding: optimizer state, master weights if they are copies,
        and the average of weights."""
        trained, num_whole = self.held.schedule.trained, self._num_whole
        # By elements, as measured on what this rank updates; of whole tensors, of which it may own none, on a sample.
        updated = sum(span.target.numel() for bucket in trained for span in bucket.update.spans)
        held = sum(bucket.update.state.element_state_nbytes() for bucket in trained)
        state = (self._num_trained - num_whole) * (held // updated if updated else 0)
        state += self.held.groups.sampled_nbytes(num_whole, is_whole=True)
        copies = [bucket for bucket in trained if bucket.update.state.separate_master_nbytes]
        copies += [bucket for bucket in trained if bucket.update.state.average is not None]
        return state + sum(bucket.layout.numel * bucket.update.master_weight.itemsize for bucket in copies)

    def _split(self, theory: dict[str, int]) -> dict[str, int]:
        """Bytes by kind, with those that lie off the device as a kind of their own."""
        trained = self.held.schedule.trained
        moved = sum(bucket.layout.numel for bucket in trained if bucket.update.home.nbytes)
        shards_are_off = any(bucket.weights.home.nbytes for bucket in self.held.schedule.buckets)
        offloaded = {
            "parameters": theory["parameters"] if shards_are_off else 0,
            "optimizer": theory["optimizer"] * moved // max(self._num_trained, 1),
        }
        on_device = {kind: nbytes - offloaded.get(kind, 0) for kind, nbytes in theory.items()}
        return on_device | {"offloaded": sum(offloaded.values())}


def moved_nbytes(held: ShardedModel, num_micro_batches: int, tier: str) -> tuple[int, int]:
    """(fetched, stored) in a step, of what lies on a tier: the optimizer's, for the update and back; shards, for
    each gather and behind the update."""
    offload, trained = held.options.offload, held.schedule.trained
    state = sum(bucket.update.home.nbytes for bucket in trained) if offload.optimizer == tier else 0
    if offload.parameters != tier:
        return state, state
    num_gathers = 2 * num_micro_batches if held.options.zero.reshard_after_forward else 1
    gathered = sum(bucket.weights.home.nbytes for bucket in held.schedule.buckets)
    masters = sum(bucket.weights.home.nbytes for bucket in trained if not bucket.update.has_copy)
    updated = sum(bucket.weights.home.nbytes for bucket in trained)
    return state + num_gathers * gathered + masters, state + updated
