"""The update of one bucket: what is updated as one, from which weights, and what is kept of it."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.engine.parts import SGD, alone, engine_on
from zerotrain.comm.world import World
from zerotrain.engine.model.live_parameter import UnreadyParameter
from zerotrain.testing.fake_wire import run_threads


class Given(nn.Module):
    """A matrix and two vectors; the gradient of each is the number that its loss is called with."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.full((10, 10), start))
        self.one = nn.Parameter(torch.full((70,), start))
        self.other = nn.Parameter(torch.full((3,), start))

    def forward(self, *gradients: float) -> torch.Tensor:
        parameters = (self.matrix, self.one, self.other)
        return sum(p.float().sum() * g for p, g in zip(parameters, gradients, strict=True))


GROUPS = [{"params": ["matrix"], "lr": 1.0}, {"params": ["one"], "lr": 10.0}, {"params": ["other"], "lr": 100.0}]
ONE_BUCKET = {"bucket_mb": 1.0}
MOMENTUM: Any = functools.partial(torch.optim.SGD, lr=1.0, momentum=0.5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_group_of_a_bucket_is_one_tensor_to_the_optimizer_and_has_its_own_rate(size, stage):
    def on_a_rank(world: World) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
        engine = engine_on(world, Given, zero=ONE_BUCKET | {"stage": stage}, param_groups=GROUPS)
        (bucket,) = engine.schedule.trained
        engine.backward(engine(2, 3, 5))
        engine.step()
        start = bucket.update.where.start
        spans = [(span.key[0], start + span.where.start, start + span.where.stop) for span in bucket.update.spans]
        return engine.full_state_dict(), spans

    results, _ = run_threads(on_a_rank, size)
    weights = results[0][0]
    assert {name: value.unique().tolist() for name, value in weights.items()} == {
        "matrix": [-2.0],
        "one": [-30.0],
        "other": [-500.0],
    }
    # 100 elements, 28 of padding; 70, and 58 to the next block of 64; 3, and the rest.
    whole = {0: range(128), 1: range(128, 256), 2: range(256, 320 if size == 1 else 384)}
    for rank, (_, spans) in enumerate(results):
        if stage == 0:
            assert spans == [(group, place.start, place.stop) for group, place in whole.items()]
        covered = sorted(place for _, *ends in spans for place in range(*ends))
        share = 384 // size if size > 1 else 320
        assert covered == list(range(whole[2].stop) if stage == 0 else range(rank * share, (rank + 1) * share))
        assert all(range(*ends)[0] in whole[group] and range(*ends)[-1] in whole[group] for group, *ends in spans)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_too_small_for_bf16_add_up_in_the_master_weight(stage):
    """bf16 has no number between 1 and 1 + 2**-7; 8 steps of 2**-10 reach that one."""

    def on_a_rank(world: World) -> tuple[dict[str, torch.Tensor], float]:
        engine = engine_on(
            world, functools.partial(Given, 1.0), optimizer=SGD, precision="bf16", zero=ONE_BUCKET | {"stage": stage}
        )
        for _ in range(8):
            engine.backward(engine(-(2**-9), 0, 0))  # the rate is 0.5
            engine.step()
        with torch.no_grad(), engine.forward_scope():
            return engine.full_state_dict(), engine.module.matrix.max().item()

    weights, in_bf16 = run_threads(on_a_rank, 2)[0][0]
    assert weights["matrix"].unique().tolist() == [1 + 2**-7] == [in_bf16]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_multiplies_the_gradient_with_the_factor_and_sends_sharded_weights_to_rest(stage):
    engine = engine_on(alone(), Given, zero=ONE_BUCKET | {"stage": stage})
    (bucket,) = engine.schedule.trained
    engine.backward(engine(8, 8, 8))
    assert list(bucket.update.run(torch.tensor(0.25))) == []  # nothing travels, so it does not pause
    assert bucket.update.master_weight[:100].unique().tolist() == [-1.0]
    assert (not bucket.weights.is_full) == (stage > 0)
    assert isinstance(engine.module.matrix, UnreadyParameter) == (stage > 0)
