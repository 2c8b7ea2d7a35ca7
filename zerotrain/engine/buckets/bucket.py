"""A bucket at run time: three parts, each on a way of its own."""

from dataclasses import dataclass, field

import torch

from zerotrain.device.memory import give_back_freed
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.buckets.home import Home
from zerotrain.engine.buckets.update import BucketUpdate
from zerotrain.engine.buckets.weights import BucketWeights
from zerotrain.errors import EngineStateError
from zerotrain.sharding.bucketing import BucketSpec
from zerotrain.sharding.layout import BucketLayout


@dataclass(eq=False)
class Bucket:
    """A rank's state of the parameters of one bucket, and their place in a step."""

    weights: BucketWeights
    stays_full: bool = False
    """Kept from the forward to the backward: the resident root, the last unit of the forward, what is read without
    an announcing hook, and what has no announced backward."""
    awaits_backward: bool = False
    """A forward since the last step left it full for its backward. Other calls between may free it."""
    is_read_unannounced: bool = False
    """Whether a parameter of it was read where no hook had announced it: its gradient may come from anywhere."""

    spec: BucketSpec = field(init=False)
    layout: BucketLayout = field(init=False)

    def __post_init__(self) -> None:
        self.spec, self.layout = self.weights.spec, self.weights.layout

    @property
    def homes(self) -> list[Home]:
        """The homes of what it may keep off the device."""
        return [self.weights.home]

    def at_rest(self, tensor: torch.Tensor) -> torch.Tensor:
        """`Home.at_rest` of what it keeps off the device."""
        for home in self.homes:
            tensor = home.at_rest(tensor)
        return tensor

    def forget(self) -> None:
        """It was looked at, and others will be: what that took is given back, to the system where it was memory."""
        for home in self.homes:
            home.forget()
        give_back_freed()

    def leave(self) -> None:
        """Others have taken over what is kept of it: give back what it has off the device."""
        for home in self.homes:
            home.leave()


@dataclass(eq=False, kw_only=True)
class TrainedBucket(Bucket):
    """A bucket of parameters that train."""

    gradient: BucketGradient
    update: BucketUpdate

    @property
    def homes(self) -> list[Home]:
        return [*super().homes, self.update.home]


def require_unchanged(spec: BucketSpec, *, trains: bool) -> None:
    """Refuse parameters told by others than the engine to train, or to train no more.

    Raises:
        EngineStateError: one was told so.
    """
    for index, parameter in enumerate(spec.tensors):
        if parameter.requires_grad is not trains:
            name, call = spec.parameters[index].names[0], "freeze" if trains else "unfreeze"
            raise EngineStateError(
                f"requires_grad of {name} was set to {not trains} after build_engine; call engine.{call}({name!r}) "
                "instead, on all ranks, between engine.step() and the next forward"
            )
