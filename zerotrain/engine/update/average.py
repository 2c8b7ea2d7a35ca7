"""How a moving average of weights follows them: by which share, at which steps."""

from dataclasses import dataclass
from numbers import Integral, Real

from zerotrain.errors import ConfigError, EngineStateError


@dataclass(kw_only=True)
class Average:
    """The average of an engine, but for its numbers, which lie in the buckets.

    Raises:
        ConfigError: a value that it cannot have.
    """

    decay: float
    every: int
    """Steps from one update to the next."""
    warmup: bool
    """Lets the decay grow to its value, so that the first weights are forgotten sooner."""
    num_updates: int = 0
    """So far; 0: it has no numbers yet, and is the weights."""
    is_in_use: bool = False
    """Whether weights and average have changed places."""

    def __post_init__(self) -> None:
        if problems := average_problems(decay=self.decay, every=self.every, warmup=self.warmup):
            raise ConfigError(*(f"engine.keep_average: {each}" for each in problems))
        self.decay, self.every = float(self.decay), int(self.every)  # of numpy's numbers too

    def share(self, step: int) -> float | None:
        """The share of what lies between weights and average by which step `step`, from 1, brings it nearer; None: the
        average is not due.

        With a warm-up the decay after t updates is min(decay, (1 + t) / (10 + t)), as in TensorFlow's
        ExponentialMovingAverage and in diffusers' EMAModel.
        """
        if step % self.every:
            return None
        grown = (1 + self.num_updates) / (10 + self.num_updates) if self.warmup else 1.0
        return 1 - min(self.decay, grown)

    def require_out_of_use(self, what: str) -> None:
        """Make sure that it has not taken the place of the weights.

        Raises:
            EngineStateError: it has.
        """
        if self.is_in_use:
            raise EngineStateError(
                f"{what} inside `with engine.averaged()`, where the average is in use; leave it first"
            )


def average_problems(*, decay: object, every: object, warmup: object) -> list[str]:
    """A line for each of these values that an average cannot have."""
    problems = []
    if isinstance(decay, bool) or not isinstance(decay, Real) or decay < 0 or not decay < 1:
        problems.append(f"decay={decay}; it must be at least 0 and below 1, such as 0.999")
    if isinstance(every, bool) or not isinstance(every, Integral) or every < 1:
        problems.append(f"every={every}; it must be a whole number of steps, at least 1")
    if not isinstance(warmup, bool):
        problems.append(f"warmup={warmup}; it must be true or false")
    return problems
