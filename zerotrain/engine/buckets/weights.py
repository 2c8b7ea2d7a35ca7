"""The weights of one bucket: what the model reads, whole or as this rank's shard."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from zerotrain.comm.handles import Gather
from zerotrain.engine.buckets.home import EngineParts
from zerotrain.engine.buckets.life import WEIGHT_TRANSITIONS, Life, WeightState
from zerotrain.engine.model.forward import named_range
from zerotrain.engine.model.live_parameter import UnreadyParameter, live_class, set_data, set_grad, settle
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout, FlatBuffer

_MODULUS = 2**50
"""fp64 holds whole numbers up to 2**53, and the stamp of a step is made of them."""

_version_of: Any = torch._C.TensorBase._version.__get__  # type: ignore[attr-defined]


class BucketWeights:
    """Owns the storage behind a bucket's parameters. They are `LiveParameter`s, and until it is full
    `UnreadyParameter`s. The schedule sets their owner.

    Args:
        values: (padded_numel,) the initial weights in the master dtype. If that is the compute dtype too, its storage
            becomes the model's.
    """

    watch: Callable[[torch.Tensor], object] | None = None
    """Called with the weights that a gather has brought, while a step is verified: see `engine.verification`."""
    before_change: Callable[[], None] | None = None
    """Called by `about_to_change`, while a save reads the bucket beside the training."""

    def __init__(self, spec: BucketSpec, layout: BucketLayout, values: FlatBuffer, parts: EngineParts) -> None:
        plan, collectives = parts.options.plan, parts.collectives
        self.spec, self.layout, self.plan = spec, layout, plan
        self.life = Life(f"weights of {spec.name}", WeightState.FULL, WEIGHT_TRANSITIONS)
        self.model_weight = values
        """(padded_numel,) compute dtype; the parameters are views of it. If they are sharded, it has memory only while
        in use."""
        if values.tensor.dtype != spec.dtype:
            self.model_weight = FlatBuffer.zeros(layout, spec.dtype, values.tensor.device)
            self.model_weight.tensor.copy_(values.tensor)
        self._classes = [live_class(kind) for kind in map(type, spec.tensors)]
        for parameter, view in zip(spec.tensors, self.model_weight.views(), strict=True):
            set_data(parameter, view)
            set_grad(parameter, None)
        self._become_live()
        settle(spec.tensors, None)
        self.writes = Writes(spec.tensors)
        whole, rank = self.model_weight.tensor, collectives.shards.rank
        self.own = layout.shard(rank)
        """This rank's range of the bucket."""
        self.shard = self.part = whole[self.own]
        """(shard_numel,) compute dtype, this rank's range. Within model_weight where that is always held."""
        self.refresh: Gather | None = None
        """Brings the replicas' shards into `part` after an update. None: nothing is sharded, or has replicas."""
        if plan.shards_parameters:
            self._part_range = layout.part(rank)
            self.part = self.shard = whole[self._part_range].clone()
            """Compute dtype, the parameters that this rank holds; `shard` is a view of it where it has replicas."""
            self.gather = collectives.gather_inside(spec.name, whole, self.part)
            if collectives.across.size > 1:
                self.shard = self.part[self._own_in_part]
                self.refresh = collectives.gather_across(spec.name, self.part, self.shard)
        else:
            self.gather = collectives.gather(spec.name, whole, self.shard)
        self.home = parts.homes.of_shard(plan, self.part)
        if self.refresh is not None:
            self.home.tell(self.follow_part)
        self.home.put_away()
        self.home.forget()

    @property
    def _own_in_part(self) -> slice:
        start = self._part_range.start
        return slice(self.own.start - start, self.own.stop - start)

    def follow_part(self) -> None:
        """The part has other memory under it: so has the shard in it."""
        self.shard.data = self.part[self._own_in_part]

    @property
    def is_full(self) -> bool:
        return self.life.state is WeightState.FULL

    @property
    def held(self) -> torch.Tensor:
        """Compute dtype, what this rank always holds: its shard, or (padded_numel,) all."""
        return self.shard if self.plan.shards_parameters else self.model_weight.tensor

    @property
    def held_nbytes(self) -> int:
        """Bytes of the model weight held now."""
        keeps_part = self.plan.shards_parameters and not self.home.nbytes
        return self.model_weight.held_nbytes + (self.part.nbytes if keeps_part else 0)

    def prepare_gather(self) -> None:
        """Be ready for the other ranks' parts: the model no longer reads them, and a gather comes."""
        # A unit without a call since the last step has not waited for that step's gather.
        self.finish_gather()
        if self.refresh is None:
            self.gather.prepare()
        elif not self.home.moves:
            self.refresh.finish()
            self.refresh.prepare()

    def fetch_shard(self) -> None:
        """Begin to bring the shard to the device, for a gather to come soon."""
        if self.life.state is WeightState.SHARD:
            self.home.fetch()

    def start_gather(self) -> None:
        """Issue the all-gather of the model weight unless it is there or under way."""
        if self.life.state is not WeightState.SHARD:
            return
        if self.refresh is not None:
            self.refresh.finish()
        self.life.become(WeightState.GATHERING)
        self.model_weight.allocate()
        with named_range("gather", self.spec.name):
            if self.home.moves:
                self.home.open()
            self.gather.issue()

    def finish_gather(self) -> None:
        """Wait for the gather under way, if any, and give the parameters their class back."""
        if self.life.state is not WeightState.GATHERING:
            return
        with named_range("wait for gather", self.spec.name):
            self.gather.finish()
            if self.home.moves:
                self.home.close(changed=False)
        if self.watch is not None:
            self.watch(self.model_weight.tensor)
        self.life.become(WeightState.FULL)
        self._become_live()

    def reshard(self) -> None:
        """Keep this rank's shard only: the parameters are not ready, and where they are sharded, have no memory."""
        if self.life.state is not WeightState.FULL:
            return
        if self.plan.shards_parameters:
            self.take_writes()
        self.life.become(WeightState.SHARD)
        for parameter in self.spec.tensors:
            parameter.__class__ = UnreadyParameter
        if self.plan.shards_parameters:
            self.model_weight.release()

    def about_to_change(self) -> None:
        """Call before the bucket's weights, master weights or optimizer state change: a save may be reading them, and a
        refresh sending them."""
        if self.refresh is not None:
            self.refresh.finish()
        # Read once: the thread that saves takes it away when it has all.
        if (announce := self.before_change) is not None:
            announce()

    def take_writes(self) -> None:
        """Bring `held` up to date with what others than the engine have written into the parameters."""
        if (
            self.life.state is WeightState.FULL
            and self.writes.look(self.model_weight.tensor)
            and self.plan.shards_parameters
        ):
            self.about_to_change()
            self.home.put_away()
            self.part.copy_(self.model_weight.tensor[self._part_range])

    def begin_refill(self) -> None:
        """`shard` is about to be replaced, or a part of it; between steps."""
        self.about_to_change()
        if self.plan.shards_parameters:
            self.finish_gather()
            self.reshard()
            self.home.put_away()
        else:
            self.start_gather()
            self.finish_gather()

    def end_refill(self) -> None:
        """`shard` was replaced on all ranks: bring their parts to where whole weights are held. Collective."""
        self.reshard()
        if not self.plan.shards_parameters:
            self.start_gather()
            self.finish_gather()
        elif self.refresh is not None:
            self.home.open()
            self.refresh.issue()
            self.refresh.finish()
            self.home.close()
        self.writes.start_anew()

    def drain(self) -> None:
        """Wait for the gather under way, or prepared in a failed update, on all ranks alike."""
        if self.gather.is_prepared:
            self.reshard()
            self.start_gather()
        if self.refresh is not None and self.refresh.is_prepared:
            self.refresh.issue()
        self._finish_all()

    def let_go(self) -> None:
        """Other buckets take the parameters over: give them their class back, complete or not."""
        self._finish_all()
        self._become_live()

    def _finish_all(self) -> None:
        self.finish_gather()
        if self.refresh is not None:
            self.refresh.finish()

    def _become_live(self) -> None:
        for parameter, kind in zip(self.spec.tensors, self._classes, strict=True):
            parameter.__class__ = kind

    def data_was_read(self) -> None:
        """Somebody got hold of the memory of a parameter."""
        if not self.plan.shards_parameters:
            self.about_to_change()
        self.writes.may_be_uncounted = True


class Writes:
    """Finds what others than the engine write into the parameters of a bucket: `load_state_dict`, `clamp_`,
    `p.data.mul_`. PyTorch counts: the version of a parameter grows with each write but those to `p.data`.

    Args:
        parameters: of the bucket; the engine itself writes to their memory, which counts nothing.
    """

    may_be_uncounted = False
    """Whether somebody got hold of a parameter's `data` since the last look: what is written there counts nothing."""
    are_new = False
    """Whether a look found any that the master weight does not have yet."""
    digest = 0
    """Hash of the weights after each write since the ranks compared it, a whole number below 2**50, equal on all ranks.
    0 if nobody has written, or through `p.data` alone."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self._num_versions = self._count()

    def _count(self) -> int:
        # Each parameter that is not ready would cost a call into Python.
        with torch._C.DisableTorchFunctionSubclass():
            return sum(map(_version_of, self._parameters))

    def look(self, weights: torch.Tensor) -> bool:
        """Whether there may be any since the last look.

        Args:
            weights: all of the bucket, as the model reads it.
        """
        counted = (num_versions := self._count()) != self._num_versions
        if not (counted or self.may_be_uncounted):
            return False
        self._num_versions, self.may_be_uncounted, self.are_new = num_versions, False, True
        if counted:
            # A sum over the bits of all weights. It waits for the device, at the writer's cost alone.
            bits = weights.view({2: torch.int16, 4: torch.int32}[weights.itemsize])
            self.digest = (31 * self.digest + int(bits.sum(dtype=torch.int64).item()) % _MODULUS + 1) % _MODULUS
        return True

    def start_anew(self) -> None:
        """The engine has replaced the weights; what was written before is gone."""
        self.count_update()
        self._num_versions = self._count()
        self.may_be_uncounted = self.are_new = False
        self.digest = 0

    def count_update(self) -> None:
        """The engine has changed the weights: PyTorch must refuse a graph from before, which would compute its
        gradients with weights it was not made with."""
        torch.autograd.graph.increment_version(self._parameters)
        self._num_versions += len(self._parameters)
