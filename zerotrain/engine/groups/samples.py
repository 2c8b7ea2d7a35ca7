"""An optimizer of one small tensor for each group: what a group of a name can have, and comes to."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from zerotrain.engine.groups.optimizer_factory import (
    SAMPLE_SHAPE,
    WHOLE,
    OptimizerFactory,
    build_optimizer,
    require_values,
    sampled_nbytes,
    updates_whole,
)
from zerotrain.engine.groups.trial import Trials
from zerotrain.errors import ConfigError
from zerotrain.sharding.layout import round_up


class GroupSamples:
    """Makes optimizers of small tensors by the names of groups.

    Args:
        factory: makes an optimizer from groups.
        device: on which optimizers are tried; None: they are not.
    """

    def __init__(self, factory: OptimizerFactory, device: torch.device | None) -> None:
        self._factory = factory
        self._trials = None if device is None else Trials(factory, device)
        self._nbytes: dict[bool, int] = {}
        self._all_whole = updates_whole(factory) and not hasattr(factory, "needs_whole")
        self.decays = "weight_decay" in self._of(self.named("parameters")).defaults
        """Whether the optimizer has a weight decay."""

    def named(self, name: str) -> str:
        """The name of a group of parameters of which the optimizer has not said that it updates them whole."""
        return f"{WHOLE}{name}" if self._all_whole else name

    def require_known(self, names: Collection[str], settings: Mapping[str, Any]) -> None:
        """Make sure that the optimizer of some of these groups has each of the settings; ConfigError otherwise."""
        samples = [self._of(name) for name in sorted(names)]
        known = {key for sample in samples for key in sample.defaults}
        if unknown := settings.keys() - known - {"initial_lr"}:
            kinds = " and ".join(dict.fromkeys(type(sample).__name__ for sample in samples))
            raise ConfigError(
                f"param_groups: {kinds} has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}"
            )

    def with_settings(
        self, name: str, given: Mapping[str, Any], saved: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], torch.optim.Optimizer]:
        """The hyperparameters of a group, and a sample of its optimizer, tried on small tensors.

        Args:
            given: of them those count that the optimizer has.
            saved: those of a checkpoint, in place of them.

        Raises:
            ConfigError: the optimizer cannot have a value, or cannot work here.
        """
        sample = self._of(name)
        known = sample.defaults.keys() | {"initial_lr"}
        given = {key: value for key, value in given.items() if key in known}
        require_values(sample, given)
        optimizer = self._of(name, given if saved is None else saved)
        completed = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        if self._trials is not None:
            self._trials.require_fit(completed)
        return completed, optimizer

    def state_nbytes(self, numels: Sequence[int], *, is_whole: bool) -> int:
        """Bytes that the optimizer will keep of tensors of so many elements, each on a border of 256 bytes."""
        if numels and is_whole not in self._nbytes:
            self._nbytes[is_whole] = sampled_nbytes(self._factory, is_whole=is_whole)
        sample_numel = SAMPLE_SHAPE[0] * SAMPLE_SHAPE[1]
        return sum(round_up(numel * self._nbytes[is_whole] // sample_numel, 256) + 256 for numel in numels)

    def _of(self, name: str, settings: Mapping[str, Any] | None = None) -> torch.optim.Optimizer:
        return build_optimizer(
            self._factory, [{"params": [torch.zeros(SAMPLE_SHAPE)], "name": name, **(settings or {})}]
        )
