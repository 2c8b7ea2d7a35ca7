"""The one writer of state: what a source gives comes into all buckets, and an error of one rank is told by all."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.engine.parts import engine_on, train
from zerotrain.comm.world import World
from zerotrain.engine.state.fill import Source, fill
from zerotrain.engine.state.named import NamedPiece
from zerotrain.errors import CheckpointError
from zerotrain.testing.fake_wire import run_threads

PACKAGE = Path(zerotrain.__file__).parent


class Numbers(Source):
    """Has one number for all weights; fails where it is asked for a parameter."""

    doing = "loading a number"

    def __init__(self, number: float, fails_at: str = "") -> None:
        self._number, self._fails_at = number, fails_at

    def read(self, piece: NamedPiece) -> None:
        if piece.managed.names[0] == self._fails_at:
            raise OSError(5, "Input/output error", "numbers")
        piece.values.fill_(self._number)


def test_nothing_else_replaces_what_buckets_hold():
    """A second protocol of beginning, reading and ending would be another way to be wrong."""
    calls = re.compile(r"\.(begin_refill|end_refill|refilled)\(")
    found = {path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if calls.search(path.read_text())}
    assert found == {Path("engine/state/fill.py"), Path("engine/buckets/update.py")}  # the latter behind an update


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_weights_are_replaced_at_every_stage_and_without_state_the_optimizers_stays(stage, precision):
    def on_a_rank(world: World) -> tuple[dict[str, Any], list[bool]]:
        engine = engine_on(world, optimizer=torch.optim.AdamW, zero={"stage": stage}, precision=precision)
        train(engine, 0)
        kept = [[each.clone() for each in bucket.update.state.state_tensors()] for bucket in engine.schedule.trained]
        fill(Numbers(0.1), engine.schedule.buckets, engine.collectives)
        engine.schedule.end_update()
        same = [
            torch.equal(before, now)
            for tensors, bucket in zip(kept, engine.schedule.trained, strict=True)
            for before, now in zip(tensors, bucket.update.state.state_tensors(), strict=True)
        ]
        return engine.full_state_dict(), same

    for state, same in run_threads(on_a_rank, 2)[0]:
        assert all(same)
        assert all(torch.equal(value, torch.full_like(value, 0.1)) for value in state.values())


@pytest.mark.parametrize("stage", range(4))
def test_what_one_rank_cannot_read_all_tell(stage):
    def on_a_rank(world: World) -> str:
        engine = engine_on(world, zero={"stage": stage, "bucket_mb": 0.0003})
        source = Numbers(0.1, fails_at="output.bias" if world.rank == 1 else "")
        with pytest.raises(CheckpointError) as failed:
            fill(source, engine.schedule.buckets, engine.collectives)
        return str(failed.value)

    said = run_threads(on_a_rank, 2)[0]
    assert said[0] == said[1]
    assert said[0].startswith("loading a number failed, rank 1: numbers: Input/output error; the engine holds a part")
