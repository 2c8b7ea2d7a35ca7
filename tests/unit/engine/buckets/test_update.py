"""The update of one bucket: what is updated as one, from which weights, and what is kept of it."""

import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.fake_wire import run_threads
from tests.unit.engine.parts import SGD, alone, engine_on
from zerotrain.comm.world import World
from zerotrain.engine.buckets.update import step_on_lent
from zerotrain.engine.buckets.whole_tensors import Updates
from zerotrain.engine.model.live_parameter import UnreadyParameter


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
    (update,) = engine.schedule.updates
    assert list(update.run(torch.tensor(0.25))) == []  # nothing travels, so it does not pause
    assert bucket.update.master_weight[:100].unique().tolist() == [-1.0]
    assert (not bucket.weights.is_full) == (stage > 0)
    assert isinstance(engine.module.matrix, UnreadyParameter) == (stage > 0)


# One call of the optimizer for several buckets.


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many tensors each call of an optimizer has updated."""
    numbers: list[int] = []

    def step(optimizer: torch.optim.Optimizer, updates: Updates) -> None:
        numbers.append(len(updates))
        step_on_lent(optimizer, updates)

    monkeypatch.setattr("zerotrain.engine.buckets.bucket.step_on_lent", step)
    return numbers


class Uneven(nn.Module):
    """Vectors of these lengths, each a bucket where buckets are small."""

    lengths = (64, 64, 64, 256, 64, 128)

    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(torch.zeros(length) for length in self.lengths)

    def forward(self, power: int) -> torch.Tensor:
        return sum((vector.float() + 1).pow(power).sum() for vector in self.vectors)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "AdamW, fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
    "AdamW, foreach": functools.partial(torch.optim.AdamW, lr=0.1, foreach=True),
    "SGD": MOMENTUM,
    "Adagrad, which has state before its first step": functools.partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_call_updates_the_spans_of_neighbouring_buckets_to_the_bits_of_plain_pytorch(name, calls):
    make, plain = OPTIMIZERS[name], Uneven()
    optimizer = make(plain.parameters())
    engine = engine_on(alone(), Uneven, optimizer=make, zero={"stage": 1, "bucket_mb": 0.0001})
    num_buckets = len(engine.schedule.trained)
    assert num_buckets == len([*plain.parameters()])
    for step in range(3):
        calls.clear()
        engine.train_step([(3,)])
        assert calls == [num_buckets]
        optimizer.zero_grad()
        plain(3).backward()
        optimizer.step()
        if step == 1:  # each bucket has the state of its spans, whoever made it
            engine.set_stage(3)
    for parameter_name, value in engine.full_state_dict().items():
        assert torch.equal(value, plain.state_dict()[parameter_name]), parameter_name
    for bucket in engine.schedule.trained:
        assert {span.target for span in bucket.update.spans} == set(bucket.update.optimizer.state)


@pytest.mark.parametrize(
    ("share", "joined"), [(8, [[64, 64, 64], [256], [64, 128]]), (2, [[64, 64, 64], [256, 64], [128]])]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_call_takes_as_many_buckets_as_the_largest_one_or_a_share_of_all_allows(
    precision, share, joined, calls, monkeypatch
):
    monkeypatch.setattr("zerotrain.engine.buckets.bucket.MIN_JOINT_NUMEL", 0)
    monkeypatch.setattr("zerotrain.engine.buckets.bucket.JOINT_SHARE", share)
    engine = engine_on(alone(), Uneven, optimizer=SGD, precision=precision, zero={"bucket_mb": 0.0001})
    engine.train_step([(1,)])
    assert [[bucket.layout.padded_numel for bucket in joint.buckets] for joint in engine.schedule.updates] == joined
    assert calls == list(map(len, joined))
    assert all(value.unique().tolist() == [-0.5] for value in engine.full_state_dict().values())
    if precision == "bf16":  # one buffer for the fp32 gradients of a call
        assert engine.held.pools.pool_of(torch.float32).held_nbytes == 4 * max(map(sum, joined))
