"""The moving average of weights beside a training."""

from zerotrain.engine.sharded_model import average_problems
from zerotrain.training.callback import Callback, Run
from zerotrain.training.report import say


class EMA(Callback):
    """Lets the engine keep an exponential moving average of its trained weights: see `ZeroEngine.keep_average`.

    Args:
        decay, every, warmup: as for `keep_average`.
        evaluate: whether evaluations use the average in place of the weights, so that val_loss is its loss.
    """

    def __init__(self, *, decay: float = 0.999, every: int = 1, warmup: bool = True, evaluate: bool = True) -> None:
        problems = average_problems(decay=decay, every=every, warmup=warmup)
        if not isinstance(evaluate, bool):
            problems.append(f"evaluate={evaluate}; it must be true or false")
        if problems:
            raise ValueError(problems[0])
        self._decay, self._every, self._warmup, self._evaluate = decay, every, warmup, evaluate

    def prepare(self, run: Run) -> None:
        """See `Callback.prepare`."""
        run.engine.keep_average(decay=self._decay, every=self._every, warmup=self._warmup)
        run.evaluates_average = self._evaluate

    def start(self, run: Run) -> None:
        """Say what is averaged how."""
        average = run.engine.held.average
        assert average is not None  # `prepare` was called
        parts = [f"decay {self._decay} after a warm-up" if self._warmup else f"decay {self._decay}"]
        if self._every > 1:
            parts.append(f"every {self._every} steps")
        if run.step > 0 and average.num_updates:
            parts.append(f"{average.num_updates} updates so far")
        elif run.step > 0:
            parts.append("begins with the next step, since the checkpoint has none")
        if self._evaluate:
            parts.append("evaluations use it")
        say(run.console, f"average of the weights: {', '.join(parts)}")
