"""The reduction of one bucket's gradient over the ranks: this rank's part of what comes of it."""

import torch

from zerotrain.comm.handles import Gather, Scratch
from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.home import EngineParts
from zerotrain.engine.buckets.norm import block_squares
from zerotrain.engine.model.forward import named_range


class BucketReduction:
    """Reduces what one bucket was filled with, once or for each of several backwards, and adds those up.

    Args:
        shard: (shard_numel,) compute dtype: gets this rank's part.
        whole: (padded_numel,) around the shard, where gradients are replicated; None where they are sharded.
    """

    def __init__(self, name: str, shard: torch.Tensor, whole: torch.Tensor | None, parts: EngineParts) -> None:
        options, collectives, self.shard = parts.options, parts.collectives, shard
        self._name, self._master = name, options.precision.master
        sums_pool = parts.pools.pool_of(self._master)
        sends_masters = options.widens or options.leaves_per_rank > 1
        wire_pool = self._wire_pool = sums_pool if sends_masters else parts.pools.pool_of(shard.dtype)
        self.wire_itemsize = wire_pool.dtype.itemsize
        """Bytes of an element while it is reduced."""
        # On a GPU an exact norm is of use where the gradients have fixed bits too.
        on_host, clips = device_of(shard.device).is_host, options.config.max_grad_norm is not None
        self.has_exact_norm = clips if on_host else options.ordered
        """Whether squares beyond fp32 are finite in the norm."""
        self.sums_itemsize = (sums_pool if options.ordered else wire_pool).dtype.itemsize
        """Bytes of an element of a sum of several ranks, on its way to their replicas."""
        self.completes = True
        """Whether the reduction under way, or the last, is of the step's last backward."""
        self._widened: Scratch | None = None
        """The gradient in the dtype of the wire, if it was filled in another."""
        self._sum: torch.Tensor | None = None
        """(shard_numel,) master dtype: what the backwards of this step have reduced, from the second on."""
        self._squares: torch.Tensor | None = None
        """The result of `take_squares` to come, where a gather is under way."""
        self.handle = collectives.reduction(name, shard, wire_pool, sums_pool, leaves_per_rank=options.leaves_per_rank)
        """To be prepared before anything of the other ranks may come: maybe before this rank's own part."""
        self._updated = shard if whole is None or options.plan.shards_optimizer else whole
        """The gradient for this rank's optimizer."""
        self.gather: Gather | None = None
        if whole is not None and not options.plan.shards_optimizer:
            self.gather = collectives.gather(f"the gradient of {name}", whole, shard)

    @property
    def ends_with_gather(self) -> bool:
        """Whether the reduced shards are gathered at once, since the optimizer is replicated."""
        return self.gather is not None and self.completes

    def keep_sum(self) -> None:
        """Another backward will be reduced: keep what those before it came to."""
        self._finish_gather()
        if self._sum is None:
            self._sum = self.shard.to(self._master, copy=True)

    def issue(self, root: torch.Tensor, *, completes: bool) -> None:
        """Issue it.

        Args:
            root: (padded_numel,) the sum of this rank's leaves.
            completes: it is the step's last.
        """
        if root.dtype != self._wire_pool.dtype:
            self._widened = self._wire_pool.take(root.numel())
            root = self._widened.storage[: root.numel()].copy_(root)
        self.completes = completes
        with named_range("reduce", self._name):
            self.handle.issue(root)

    def finish(self) -> None:
        """Wait for it, and leave the sum over all backwards in `shard`. Before loans of others are given back.

        If the optimizer is replicated, issue the gather of the reduced shards. `reduced` waits for it.
        """
        with named_range("wait for reduce", self._name):
            self.handle.wait()
        with named_range("sum", self._name):
            self.handle.finish()
        if self._sum is not None:
            self.shard.copy_(self._sum.add_(self.shard))
            if self._sum.dtype == self.shard.dtype:
                self._sum = None
        if self._widened is not None:
            self.give_back()
        if self.gather is not None and self.completes:
            # Squared before others' shards arrive: on a GPU the gather writes to this memory on a stream of its own.
            self._squares = block_squares(self.shard, exact=self.has_exact_norm)
            with named_range("gather gradient", self._name):
                self.gather.issue()

    def take_squares(self, loss_scale: float, *, exact: bool = False) -> torch.Tensor:
        """(shard_numel / 64,) fp64: the sum of squares of each block of `shard`, for the norm; see `block_squares`.

        Args:
            loss_scale: a power of two that the gradient is too large by, and will be divided by later.
            exact: also where squares beyond fp32 would make it NaN.
        """
        with named_range("square", self._name):
            squares, self._squares = self._squares, None
            if squares is None:
                squares = block_squares(self.shard, exact=exact or self.has_exact_norm)
            # Unscale the squares before they are cut: the cut depends on their size.
            return squares if loss_scale == 1.0 else squares.div_(loss_scale**2)

    def reduced(self) -> torch.Tensor:
        """The reduced gradient over this rank's optimizer range, compute dtype."""
        self._finish_gather()
        return self._updated

    def drop(self) -> None:
        """Forget what it came to. A reduction that was prepared will not come, on any rank."""
        self._finish_gather()
        self.handle.withdraw()
        self._sum = self._squares = None

    def give_back(self) -> None:
        """Nothing is on the wire any more: end the loan."""
        if self._widened is not None:
            self._wire_pool.give_back(self._widened)
            self._widened = None

    def _finish_gather(self) -> None:
        if self.gather is not None and self.gather.is_under_way:
            with named_range("wait for gather gradient", self._name):
                self.gather.finish()
