"""The update that a GPU is told before the host knows whether the step is skipped.

The host would wait for the norm, while the GPU does all that it was told, and then tell it the update while it has
nothing to do: of GPT-2 on an H200 that took 3 of 38 ms. So the update is told at once, with the answer on the GPU
(`found_inf`, torch's own protocol for loss scaling), and the host waits while the GPU updates.
"""

from collections.abc import Sequence

import torch

from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.bucket import TrainedBucket
from zerotrain.engine.buckets.update import BucketUpdate
from zerotrain.engine.groups.optimizers import is_torchs_own
from zerotrain.engine.schedule.gathers import Gathers


def can_go_ahead(trained: Sequence[TrainedBucket]) -> bool:
    """Whether all updates happen on a GPU, by optimizers whose step can be turned off there: torch's own with
    `fused=True`. A class of somebody else's may have inherited that it can, and not do it. The same on all ranks. A CPU
    does not wait."""
    return all(_is_on_gpu(bucket.update) for bucket in trained)


def _is_on_gpu(update: BucketUpdate) -> bool:
    if update.is_away or update.whole is not None or device_of(update.device).is_host:
        return False
    optimizer = update.optimizer
    if optimizer is None:
        return True
    can_be_off = getattr(optimizer, "_step_supports_amp_scaling", False) and is_torchs_own(optimizer)
    return can_be_off and all(group.get("fused", True) for group in optimizer.param_groups)


class UpdateAhead:
    """Updates every bucket if the norm is finite, and changes no bit if it is not. Then comes `end`, or for a step that
    is skipped `take_back`.

    Nothing is sent before: ranks that have not done the same since the last step would wait for each other.

    Args:
        factor: as of `update_all`.
        norm: 0-dim.
    """

    def __init__(self, trained: Sequence[TrainedBucket], factor: torch.Tensor | None, norm: torch.Tensor) -> None:
        self._trained = trained
        self._began: list[tuple[torch.optim.Optimizer, torch.Tensor]] = []
        """The tensors whose state an optimizer has begun in this step."""
        is_finite = norm.isfinite()
        if factor is not None:
            factor = torch.where(is_finite, factor, 1.0)
        is_off = is_finite.logical_not().to(torch.float32)
        dtypes = {bucket.update.master_weight.dtype for bucket in trained}
        factors = {dtype: None if factor is None else factor.to(dtype) for dtype in dtypes}
        for bucket in trained:
            self._update(bucket, factors[bucket.update.master_weight.dtype], is_off)

    def _update(self, bucket: TrainedBucket, factor: torch.Tensor | None, is_off: torch.Tensor) -> None:
        bucket.weights.about_to_change()
        bucket.weights.finish_gather()
        update = bucket.update
        if (optimizer := update.optimizer) is not None:
            self._began += [(optimizer, span.target) for span in update.spans if span.target not in optimizer.state]
        for _ in update.renew(factor, is_off=is_off):
            raise AssertionError(f"{update.spec.name}: an update without whole tensors paused")

    def take_back(self) -> None:
        """The step is skipped: forget the state that it began, whose values nobody has set."""
        for optimizer, target in self._began:
            optimizer.state.pop(target, None)

    def end(self, gathers: Gathers) -> None:
        """The step is made: drop the gradients, and issue the gathers of what was updated."""
        gathers.prepare_updated(self._trained)
        for bucket in self._trained:
            bucket.update.changed()
            gathers.gather_updated(bucket)
            bucket.gradient.drop()
