"""A run's part in verification: what is computed again, what it costs, and what was found."""

from collections.abc import Mapping, Sequence
from typing import Any

from zerotrain.engine.agreement import require_same
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import TrainStepResult
from zerotrain.engine.verification import Leaf, Verification
from zerotrain.errors import CorruptionError
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.record import environment


class RunVerification(Callback):
    """Verifies steps of a run, and tells of it. All ranks have one.

    Args:
        every: `train.verify_every`, above 0.
    """

    def __init__(self, engine: ZeroEngine, every: int) -> None:
        self.verification, self.every = Verification(engine, every), every

    def begin(
        self,
        step: int,
        further: tuple[Sequence[Any], Any],
        micro_batches: Sequence[Any],
        arguments: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Arguments of a `train_step` that is verified; none for another.

        Args:
            further: (micro-batches, weights) of the leaf for this rank.
            micro_batches, arguments: of the `train_step` to come.
        """
        virtual_ranks = self.verification.turns.virtual_ranks(step)
        if not virtual_ranks:
            return {}
        leaf = Leaf(virtual_ranks[0], *further)
        return {"before_update": self.verification.begin(step, leaf, micro_batches, arguments)}

    def describe(self) -> str:
        """A sentence on the verified steps and their cost, for the start of a run."""
        turns = self.verification.turns
        whose = "another" if turns.size > 1 else "its own"
        price = f"{1 / (turns.leaves * self.every):.2g} of all compute, and one message of digests"
        return f"every {self.every} steps each rank computes a virtual rank of {whose} again: {price}"

    def start(self, run: Run) -> None:
        """Refuse ranks whose devices may round in different ways."""
        facts = environment(run.world.device)
        require_same(run.engine.collectives, {f"train.verify_every: {name}": fact for name, fact in facts.items()})
        self.verification.last_step = run.step
        self._note(run)

    def after_step(self, run: Run, outcome: TrainStepResult) -> None:
        """See `Callback.after_step`."""
        if run.step % self.every == 0:
            self._note(run)
            run.log({"verified_steps": self.verification.num_steps})

    def failure(self, run: Run, error: BaseException) -> None:
        """See `Callback.failure`."""
        if isinstance(error, CorruptionError):
            self._note(run, corruption=dict(error.facts))
            ranks = error.facts["ranks"]
            run.log({"verified_steps": self.verification.num_steps, "corrupted_rank": ranks[0] if ranks else None})

    def _note(self, run: Run, corruption: dict[str, Any] | None = None) -> None:
        verification = self.verification
        facts = {"every": self.every, "steps": verification.num_steps, "last_step": verification.last_step}
        run.result.verification = facts | {"corruption": corruption}
