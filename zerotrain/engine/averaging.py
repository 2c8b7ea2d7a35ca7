"""The moving average of weights of an engine: begun, and used in place of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from zerotrain.engine.model.forward import makes_memory
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.engine.update.average import Average
from zerotrain.errors import CommError, ConfigError, EngineStateError


class Averaging:
    """Keeps an average of what a sharded model trains."""

    def __init__(self, held: ShardedModel) -> None:
        self._held = held

    @makes_memory
    def keep_average(self, *, decay: float = 0.999, every: int = 1, warmup: bool = True) -> None:
        """Keep an exponential moving average of the weights from here on: `step` updates it, `averaged` uses it, `save`
        and `load` have it too, so call this before `load`.

        Collective, between steps. Each rank keeps the average of the elements that it updates, in fp32, where the
        optimizer's state lies: 4P/N bytes at stages 1 to 3 and 4P at stage 0, for P elements on N ranks. Nothing is
        sent for it in a step. The first update copies the weights; later ones are
        `average.lerp_(weights, 1 - decay)`, as those of torch's `AveragedModel` with `get_ema_multi_avg_fn(decay)`. A
        skipped step updates nothing.

        Args:
            decay: at least 0 and below 1.
            every: steps from one update to the next.
            warmup: after t updates the decay is min(decay, (1 + t) / (10 + t)).

        Raises:
            ConfigError: a value that it cannot have, other values by rank, or the engine keeps an average already.
            EngineStateError: gradients of a step are waiting.
        """
        held = self._held

        def plan() -> tuple[Average, dict[str, object]]:
            if held.average is not None:
                raise ConfigError("engine.keep_average: the engine keeps an average already, and has room for one")
            average = Average(decay=decay, every=every, warmup=warmup)
            return average, {"decay": average.decay, "every": average.every, "warmup": warmup}

        held.average = held.between_steps("engine.keep_average", "an average cannot begin", plan)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the engine computes with the average in place of the weights, and `full_state_dict` and
        `weights_sha256` are those of the average; frozen parameters and buffers are what they are. Afterwards the
        weights are back, bit for bit.

        Collective, between steps. Shards change places in memory, a few MiB at a time. Afterwards, as after a step,
        stages 1 and 2 gather the weights; so do they on entry. Nothing can be trained, saved or loaded inside.

        Raises:
            EngineStateError: there is no average, it is in use already, or gradients of a step are waiting.
        """
        held = self._held

        def plan() -> tuple[Average, dict[str, object]]:
            held.require_whole()
            if held.average is None:
                raise EngineStateError("engine.averaged: there is no average of weights; call engine.keep_average()")
            return held.average, {}

        average = held.between_steps("engine.averaged", "the average cannot be used", plan)
        if average.num_updates == 0:  # it is the weights
            yield
            return
        self._swap(average)
        try:
            yield
        except CommError:  # there is nobody to train with
            with held.breaks_if_it_fails("engine.averaged"):
                raise
        except BaseException:
            with suppress(Exception):  # the first cause is what the user reads
                self._swap(average, gathers=False)  # other ranks may be elsewhere: the next forward gathers
            raise
        self._swap(average)

    @makes_memory
    def _swap(self, average: Average, *, gathers: bool = True) -> None:
        schedule = self._held.schedule
        with self._held.breaks_if_it_fails("engine.averaged"):
            if gathers:
                schedule.gathers.prepare_updated(schedule.trained)
            for bucket in schedule.trained:
                bucket.weights.finish_gather()
                bucket.update.swap_average()
                bucket.forget()
                if gathers:
                    schedule.gathers.gather_updated(bucket)
            schedule.end_update()
        self._held.weights_changed()
        average.is_in_use = not average.is_in_use
