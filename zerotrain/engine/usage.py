"""An engine's bytes on this rank, held and sent, beside those of ZeRO's formulas."""

from dataclasses import dataclass
from typing import Any

from zerotrain.engine.groups.optimizers import tensors_of_state
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.sharding.plan import Plan


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
    """Whether saved tensors of forwards go there too, beside these bytes."""

    @property
    def step_s(self) -> float:
        """Seconds of a step's transfers, beside which it computes."""
        return self.fetched_nbytes / self.fetched_per_s + self.stored_nbytes / self.stored_per_s


class Usage:
    """The bytes of an engine, held and sent, as they are now."""

    held: ShardedModel

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self.held.schedule.buckets)

    def group_sizes(self) -> list[tuple[int, int]]:
        """(parameters in training, their elements) of each of the `param_groups`."""
        sizes = [(0, 0) for _ in self.held.groups.hyperparameters]
        for bucket in self.held.schedule.trained:
            for managed, slot in zip(bucket.spec.parameters, bucket.layout.slots, strict=True):
                num_parameters, numel = sizes[managed.group]
                sizes[managed.group] = (num_parameters + 1, numel + slot.numel)
        return sizes

    def planned_nbytes(self) -> dict[str, int]:
        """Bytes this rank holds between steps, by the kinds of `memory_bytes`, before the first step too: with the
        optimizer state to come, as measured on a sample. An optimizer that keeps factors of a matrix makes it inexact.
        """
        held, optimizer = self.memory_bytes(), 0
        for update in (bucket.update for bucket in self.held.schedule.trained):
            if not update.home.moves:
                optimizer += update.planned_nbytes()
                optimizer += 0 if self.held.average is None else update.master_weight.nbytes
        return {
            "parameters": held["parameters"],
            "gradients": held["gradients"],
            "optimizer": optimizer,
            "offloaded": held["offloaded"],
        }

    def sums_nbytes(self, num_micro_batches: int) -> int:
        """A rank's further bytes, while a step adds up micro-batches and virtual ranks.

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
            "theory": self._theory(),
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
        """Bytes this rank sends in a step by ZeRO's count (section 7), without padding and without the norm's few
        bytes: its reduce-scatters and its gathers; and those of tensors that are updated whole, on their way to their
        owners and back.

        Replicated parameters take one gather: of gradients where the optimizer is replicated, of updated parameters
        where it is sharded. Sharded ones take one for each forward and one for each backward, or one a step where they
        are kept.
        """
        return sum(self._sent_nbytes(num_micro_batches)) + sum(
            bucket.update.sent_nbytes for bucket in self.held.schedule.trained
        )

    def theoretical_across_nbytes(self, num_micro_batches: int) -> int:
        """Those of them from one of its replicas to another, but for tensors that are updated whole: sums of gradients,
        and one gather. With k ranks of N that hold the parameters once, and P bytes of these, that is 2 P/k (1 - k/N);
        sums of gradients of 16 bits are sent in fp32."""
        return self._sent_nbytes(num_micro_batches)[1]

    def _sent_nbytes(self, num_micro_batches: int) -> tuple[int, int]:
        """Bytes for gradients and weights (inside, across)."""
        options, trained, collectives = self.held.options, self.held.schedule.trained, self.held.collectives
        num_inside, num_across = collectives.inside.size, collectives.across.size
        gathered, frozen = self._parameter_nbytes()
        num_gathers, refreshed = 1, gathered
        if options.plan.shards_parameters:
            gathered += frozen
            num_gathers = 2 * num_micro_batches if options.zero.reshard_after_forward else 1
        num_reductions = num_micro_batches if options.reduces_each else 1
        reduced = added = 0
        for bucket in trained:
            reduced += num_reductions * bucket.layout.numel * bucket.gradient.reduction.wire_itemsize
            added += num_reductions * bucket.layout.numel * bucket.gradient.reduction.sums_itemsize
        inside = round((num_inside - 1) / num_inside * (reduced + gathered * num_gathers))
        return inside, round((num_across - 1) / num_across * (added + refreshed) / num_inside)

    def _switch_nbytes(self, plan: Plan) -> int:
        """Bytes a rank sends so that everything lies as a plan has it: its share of what was sharded, and is held
        whole."""
        old, sent = self.held.schedule.plan, 0
        num_ranks, num_inside = self.held.world.shards.size, self.held.collectives.inside.size
        if old.shards_parameters and not plan.shards_parameters:
            sent += sum(self._parameter_nbytes()) * (num_inside - 1) // num_inside
        if old.shards_optimizer and not plan.shards_optimizer:
            sent += self._optimizer_nbytes() * (num_ranks - 1) // num_ranks
        return sent

    def _parameter_nbytes(self) -> tuple[int, int]:
        """Bytes of all parameters that train and of all frozen ones, in the dtypes they are held in, without padding.
        Tied ones count once."""
        nbytes = {True: 0, False: 0}
        for bucket in self.held.schedule.buckets:
            nbytes[bucket.spec.trainable] += bucket.layout.numel * bucket.spec.dtype.itemsize
        return nbytes[True], nbytes[False]

    @property
    def _num_trained(self) -> int:
        """Elements that train."""
        return sum(bucket.layout.numel for bucket in self.held.schedule.trained)

    def _optimizer_nbytes(self) -> int:
        """Bytes of all ranks together, without padding: optimizer state, master weights if they are copies,
        and the average of weights."""
        trained = self.held.schedule.trained
        slots = [slot for bucket in trained for slot in bucket.layout.slots[: bucket.spec.num_whole]]
        num_whole = sum(slot.numel for slot in slots)
        # By elements, as measured on what this rank updates; of whole tensors, of which it may own none, on a sample.
        updated = sum(span.target.numel() for bucket in trained for span in bucket.update.spans)
        held = sum(tensor.nbytes for bucket in trained for tensor in tensors_of_state(bucket.update.optimizer))
        state = (self._num_trained - num_whole) * (held // updated if updated else 0)
        state += self.held.groups.sampled_nbytes(num_whole, is_whole=True)
        copies = [bucket for bucket in trained if bucket.update.separate_master_nbytes]
        copies += [bucket for bucket in trained if bucket.update.average is not None]
        return state + sum(bucket.layout.numel * bucket.update.master_weight.itemsize for bucket in copies)

    def _theory(self) -> dict[str, int]:
        """Bytes of a rank at rest by ZeRO's formulas (section 5), without padding: each kind of state whole, or a share
        of it where the plan shards it: parameters over the ranks that hold them once, all else over all."""
        plan, trained = self.held.schedule.plan, self.held.schedule.trained
        trained_nbytes, frozen_nbytes = self._parameter_nbytes()
        theory = {}
        num_ranks, num_inside = self.held.world.shards.size, self.held.collectives.inside.size
        for kind, num_shards, nbytes in (
            ("parameters", num_inside if plan.shards_parameters else 1, trained_nbytes + frozen_nbytes),
            ("gradients", num_ranks if plan.shards_gradients else 1, trained_nbytes),
            ("optimizer", num_ranks if plan.shards_optimizer else 1, self._optimizer_nbytes()),
        ):
            theory[kind] = round(nbytes / num_shards)
        moved = sum(bucket.layout.numel for bucket in trained if bucket.update.home.nbytes)
        offloaded = theory["optimizer"] * moved // max(self._num_trained, 1)
        theory["optimizer"] -= offloaded
        if any(bucket.weights.home.nbytes for bucket in self.held.schedule.buckets):
            offloaded += theory["parameters"]
            theory["parameters"] = 0
        return theory | {"offloaded": offloaded}


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
