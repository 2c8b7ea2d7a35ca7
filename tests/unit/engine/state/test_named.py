"""The state by name: every element once, in every role, wherever a stage puts it."""

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import Plain, alone, engine_on, on_ranks, train
from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.world import World
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.fill import Keeps, KeptTensor, Source, fill_state
from zerotrain.engine.state.named import GRADIENT, NamedPiece, capture, pieces, roles
from zerotrain.sharding.units import ManagedParameter
from zerotrain.testing.fake_wire import run_threads

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0, fused=False)
MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01, fused=False)
BUCKETS = {"bucket_mb": 0.002}
"""Several parameters a bucket, on two ranks some of them cut in two."""


def held(buckets: list[Bucket], role: str) -> dict[str, list[tuple[range | None, list[float]]]]:
    """By name: which elements this rank holds, and their values."""
    found: dict[str, list[tuple[range | None, list[float]]]] = {}
    for bucket in buckets:
        for piece in pieces(bucket, role):
            place = None if piece.in_tensor is None else range(piece.in_tensor.start, piece.in_tensor.stop)
            found.setdefault(piece.managed.names[0], []).append((place, piece.values.flatten().tolist()))
            assert piece.role == role
            if piece.in_tensor is not None and piece.in_bucket is not None:
                slot = bucket.layout.slots[[m.names[0] for m in bucket.spec.parameters].index(piece.managed.names[0])]
                assert piece.in_bucket == slice(slot.offset + place.start, slot.offset + place.stop)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_pieces_of_all_ranks_are_every_element_of_every_parameter_once_in_every_role(size, stage):
    def on_a_rank(world: World) -> dict[str, Any]:
        engine = engine_on(world, optimizer=ADAMW, zero=BUCKETS | {"stage": stage})
        train(engine, 0, 1)
        buckets = engine.schedule.buckets
        assert {tuple(roles(bucket)) for bucket in buckets} == {(WEIGHT, "exp_avg", "exp_avg_sq")}
        return {role: held(buckets, role) for role in (WEIGHT, "exp_avg", "exp_avg_sq", GRADIENT)}

    ranks, _ = run_threads(on_a_rank, size)
    plain = Plain(size, optimizer=ADAMW)
    weights = plain.train(0, 1)
    state = {name: plain.optimizer.state[parameter] for name, parameter in plain.parameters.items()}
    expected = {WEIGHT: weights} | {
        role: {name: kept[role] for name, kept in state.items()} for role in ("exp_avg", "exp_avg_sq")
    }
    expected[GRADIENT] = {name: parameter.grad for name, parameter in plain.parameters.items()}
    for role, values in expected.items():
        is_cut = stage >= 1 or role == GRADIENT
        for name, value in values.items():
            by_rank = [rank[role].get(name, []) for rank in ranks]
            for every in [list(itertools.chain(*by_rank))] if is_cut else by_rank:
                every.sort(key=lambda piece: piece[0].start)
                assert [index for place, _ in every for index in place] == list(range(value.numel())), (role, name)
                got = torch.tensor([each for _, values in every for each in values])
                assert torch.equal(got, value.flatten()), (role, name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_momentum_of_a_whole_tensor_is_its_owners_alone(stage):
    def on_a_rank(world: World) -> dict[str, Any]:
        engine = engine_on(world, optimizer=MUON, zero=BUCKETS | {"stage": stage})
        train(engine, 0)
        names = {role for bucket in engine.schedule.buckets for role in roles(bucket)}
        assert names <= {WEIGHT, "momentum_buffer", "exp_avg", "exp_avg_sq"}
        return {role: held(engine.schedule.buckets, role) for role in ("momentum_buffer", "exp_avg")}

    ranks, _ = run_threads(on_a_rank, 3)
    matrices = [f"blocks.{index}.weight" for index in range(4)]
    for name in matrices:
        holders = [rank["momentum_buffer"][name] for rank in ranks if name in rank["momentum_buffer"]]
        assert len(holders) == (1 if stage else 3)
        assert all(place is None and len(values) == 64 for pieces in holders for place, values in pieces)
    for rank in ranks:
        assert set(rank["momentum_buffer"]) <= set(matrices)
        assert not set(rank["exp_avg"]) & set(matrices)


class Captured(Source):
    """Has (padded_numel,) of one bucket by role, for the parameters of some spans."""

    has_state = True

    def __init__(self, wholes: dict[str, torch.Tensor], keys: list[tuple[int, int]]) -> None:
        self.wholes, self.keys = wholes, keys

    def keeps(self, managed: ManagedParameter) -> Keeps:
        kept = {role: KeptTensor(None, whole.dtype) for role, whole in self.wholes.items()}
        return kept if managed.span in self.keys else {}

    def begin(self, bucket: Bucket, role: str) -> None:
        self.whole = self.wholes[role]

    def read(self, piece: NamedPiece) -> None:
        piece.values.copy_(self.whole[piece.in_bucket])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_what_is_captured_and_restored_is_as_it_was(world, stage, precision):
    engine = engine_on(world, optimizer=ADAMW, precision=precision, zero=BUCKETS | {"stage": stage})
    train(engine, 0)
    for bucket in engine.schedule.trained:
        before, wholes = {}, {}
        keys = [span.key for span in bucket.update.spans]
        for role in ("exp_avg", "exp_avg_sq"):
            before[role] = [bucket.update.span_state(span)[role].clone() for span in bucket.update.spans]
            wholes[role] = capture(bucket, role, torch.float32, engine.collectives)
            assert wholes[role].shape == (bucket.layout.padded_numel,)
        fill_state(Captured(wholes, keys), bucket)
        for role, values in before.items():
            for span, value in zip(bucket.update.spans, values, strict=True):
                assert torch.equal(bucket.update.span_state(span)[role], value)
        if keys:
            fill_state(Captured({"other": torch.ones(bucket.layout.padded_numel)}, keys[1:]), bucket)
            others = ["other" in bucket.update.span_state(span) for span in bucket.update.spans]
            assert others == [key in keys[1:] for key in keys]


# Full weights that were taken out stay what they are.


class Normed(nn.Module):
    """With a buffer that each forward writes to, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)).pow(3).mean()


@pytest.mark.parametrize("stage", range(4))
def test_neither_weights_nor_buffers_of_a_state_dict_follow_the_training(stage):
    zero = zerotrain.ZeroConfig(stage=stage)
    engine = zerotrain.build_engine(Normed(), optimizer=torch.optim.SGD, zero=zero, world=alone())
    state = engine.full_state_dict()
    before = {name: value.clone() for name, value in state.items()}
    assert "norm.running_mean" in before
    assert "scratch" not in before
    engine.backward(engine(torch.randn(4, 3)))
    engine.step()
    assert all(torch.equal(value, before[name]) for name, value in state.items())
    after = engine.full_state_dict()
    assert [name for name in before if torch.equal(after[name], before[name])] == []
