"""A run keeps an average of its weights: what it evaluates, saves and says of it, and that it trains as without."""

import io
import json
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from tests.ranks.fake_wire import run_threads
from tests.unit.training.callbacks.test_stages import tied_model, trainer_of
from tests.unit.training.runs import lines_in
from zerotrain.checkpoint.folder import checkpoints_in
from zerotrain.training import constant
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy
from zerotrain.training.callbacks.early_stopping import EarlyStopping
from zerotrain.training.callbacks.ema import EMA
from zerotrain.training.callbacks.evaluation import evaluate_all

__all__ = ["tied_model"]  # a fixture of the runs
STAGES = {0: 2, 5: 3, 7: 0}


def run(world, tied_model, folder: Path, **changes):
    """Twelve steps, an evaluation every four. Returns the trainer, what it said, and the hash of its weights."""
    screen = io.StringIO()
    trainer = trainer_of(
        world, tied_model, folder, kind="bf16, Muon", console=Console(file=screen, width=200), **changes
    )
    trainer.run()
    return trainer, screen.getvalue(), trainer.engine.weights_sha256()


def losses_of(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_loss"] for line in lines_in(folder, "val_loss")}


def test_evaluations_are_of_the_average_and_the_training_is_that_without_it(tied_model, tmp_path):
    policy = CheckpointPolicy(every_steps=4, keep=None, best="val_loss")

    def on_a_rank(world):
        bare = run(world, tied_model, tmp_path / "bare", stages=STAGES)
        keeping = run(world, tied_model, tmp_path / "keeping", callbacks={"ema": EMA(evaluate=False)}, stages=STAGES)
        stopping = EarlyStopping(patience=99)
        callbacks = {"ema": EMA(decay=0.5, warmup=False), "stopping": stopping}
        evaluating = run(
            world, tied_model, tmp_path / "evaluating", callbacks=callbacks, checkpoint=policy, stages=STAGES
        )
        assert bare[2] == keeping[2] == evaluating[2]
        engine = evaluating[0].engine
        engine.load_weights(tmp_path / "evaluating/checkpoints/step-00000012", averaged=True)
        dataset = evaluating[0].dataset.validation
        loss = evaluate_all(engine=engine, world=world, dataset=dataset, num_sequences=8, micro_batch_size=2)[
            "val_loss"
        ]
        return loss, stopping.state_dict()["best"], evaluating[1], keeping[1]

    [(loss, best, said, other_said), *_], _ = run_threads(on_a_rank, 2)
    bare, keeping, evaluating = (losses_of(tmp_path / name) for name in ("bare", "keeping", "evaluating"))
    assert bare == keeping
    assert bare[0] == evaluating[0]
    assert all(bare[step] != evaluating[step] for step in (4, 8, 12))
    assert evaluating[12] == loss
    assert best == min(evaluating.values())
    found = json.loads((tmp_path / "evaluating/checkpoints/step-00000012/manifest.json").read_text())
    assert found["extra"]["trainer"]["run"]["best"]["value"] == min(list(evaluating.values())[1:])
    assert "average of the weights: decay 0.5, evaluations use it\n" in said
    assert "average of the weights: decay 0.999 after a warm-up\n" in other_said


def test_a_run_that_goes_on_has_the_average_of_one_that_never_stopped(tied_model, tmp_path):
    def on_a_rank(world, folder, ema, **changes):
        callbacks = {"ema": EMA(decay=0.9)} if ema else {}
        how = {"schedule": constant, "callbacks": callbacks, "checkpoint": CheckpointPolicy(keep=None)}
        trainer, said, weights = run(world, tied_model, tmp_path / folder, **how | changes)
        if not ema:
            return said, weights, None
        with trainer.engine.averaged():
            return said, weights, trainer.engine.weights_sha256()

    def ranks(folder, *, ema=True, goes_on_from=None, **changes):
        if goes_on_from is not None:
            changes["checkpoint"] = CheckpointPolicy(resume=checkpoints_in(tmp_path / goes_on_from / "checkpoints"))
        return run_threads(partial(on_a_rank, folder=folder, ema=ema, **changes), 2)[0][0]

    _, weights, average = ranks("whole", stage=2)
    ranks("half", stage=3, max_steps=6)
    said, *found = ranks("rest", goes_on_from="half", stage=1)
    assert found == [weights, average]
    assert "average of the weights: decay 0.9 after a warm-up, 6 updates so far, evaluations use it\n" in said
    said, *found = ranks("without", ema=False, goes_on_from="half")
    assert found == [weights, None]
    path = tmp_path / "half/checkpoints/step-00000006"
    assert f"warning: {path} holds an average of weights, which is dropped; callbacks=ema would go on with it\n" in said
    said, weights, average = ranks("after", goes_on_from="without", max_steps=13)
    assert average == weights  # one update
    assert "after a warm-up, begins with the next step, since the checkpoint has none, evaluations use it\n" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decay": 1}, "decay=1; it must be at least 0 and below 1, such as 0.999"),
        ({"decay": True}, "decay=True; it must be at least 0 and below 1, such as 0.999"),
        ({"every": 0}, "every=0; it must be a whole number of steps, at least 1"),
        ({"warmup": None}, "warmup=None; it must be true or false"),
        ({"evaluate": "no"}, "evaluate=no; it must be true or false"),
    ],
)
def test_a_value_that_it_cannot_have_is_refused(given, said):
    with pytest.raises(ValueError, match=f"^{said}$"):
        EMA(**given)
