"""The state by name: every element once, in every role, wherever a stage puts it."""

import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import Linears, Plain, alone, assert_same, engine_on, train
from zerotrain.checkpoint.manifest import WEIGHT
from zerotrain.comm.world import World
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.fill import Keeps, KeptTensor, Source, fill_state
from zerotrain.engine.state.named import GRADIENT, NamedPiece, capture, full_weights, pieces, roles
from zerotrain.sharding.layout import slot_view
from zerotrain.sharding.units import ManagedParameter
from zerotrain.testing.fake_wire import run_threads

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0, fused=False)
MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01, fused=False)
BUCKETS = {"bucket_mb": 0.002}
"""Several parameters a bucket, on two ranks some of them cut in two."""


class PartlyFrozen(Linears):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.output.bias.requires_grad_(False)


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
def test_the_pieces_of_all_ranks_are_every_element_of_every_parameter_once_in_every_role(size: int, stage: int) -> None:
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
def test_a_frozen_bucket_has_its_weight_alone(stage: int) -> None:
    def on_a_rank(world: World) -> tuple[dict[str, Any], list[str]]:
        engine = engine_on(world, PartlyFrozen, optimizer=ADAMW, zero=BUCKETS | {"stage": stage})
        train(engine, 0)
        frozen = [bucket for bucket in engine.schedule.buckets if not bucket.spec.trainable]
        assert [roles(bucket) for bucket in frozen] == [[WEIGHT]] * len(frozen)
        assert held(frozen, GRADIENT) == held(frozen, "exp_avg") == {}
        return held(frozen, WEIGHT), [each.names[0] for bucket in frozen for each in bucket.spec.parameters]

    ranks, _ = run_threads(on_a_rank, 2)
    assert sorted(ranks[0][1]) == ["blocks.1.bias", "blocks.1.weight", "output.bias"]
    for name, number in (("blocks.1.bias", 8), ("blocks.1.weight", 64), ("output.bias", 5)):
        places = [[index for place, _ in rank.get(name, []) for index in place] for rank, _ in ranks]
        if stage < 3:
            assert places == [list(range(number))] * 2
        else:
            assert sorted(itertools.chain(*places)) == list(range(number))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_momentum_of_a_whole_tensor_is_its_owners_alone(stage: int) -> None:
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
def test_what_is_captured_and_restored_is_as_it_was(stage: int, precision: str) -> None:
    def on_a_rank(world: World) -> None:
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

    run_threads(on_a_rank, 2)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_captured_is_what_all_ranks_have_together(stage: int) -> None:
    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, optimizer=ADAMW, zero=BUCKETS | {"stage": stage})
        train(engine, 0, 1)
        found = {}
        for bucket in engine.schedule.buckets:
            whole = capture(bucket, "exp_avg", torch.float32, engine.collectives)
            for slot, managed in zip(bucket.layout.slots, bucket.spec.parameters, strict=True):
                found[managed.names[0]] = slot_view(whole, slot).clone()
        return dict(sorted(found.items()))

    plain = Plain(2, optimizer=ADAMW)
    plain.train(0, 1)
    expected = {name: plain.optimizer.state[p]["exp_avg"] for name, p in sorted(plain.parameters.items())}
    for found in run_threads(on_a_rank, 2)[0]:
        assert_same(found, expected)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_full_weights_are_those_of_plain_pytorch_in_their_shapes_and_strides(stage: int) -> None:
    class Transposed(Linears):
        def __init__(self) -> None:
            super().__init__()
            self.input.weight = nn.Parameter(torch.randn(3, 8).t())

    def on_a_rank(world: World) -> dict[str, torch.Tensor]:
        engine = engine_on(world, Transposed, zero=BUCKETS | {"stage": stage})
        train(engine, 0, 1)
        found = {}
        for bucket in engine.schedule.buckets:
            for managed, value in full_weights(bucket, engine.collectives):
                assert value.stride() == managed.stride == replace(managed).stride  # which is asked for anew
                found[managed.names[0]] = value.clone()
        return dict(sorted(found.items()))

    expected = dict(sorted(Plain(2, Transposed).train(0, 1).items()))
    for found in run_threads(on_a_rank, 2)[0]:
        assert_same(found, expected)


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
def test_neither_weights_nor_buffers_of_a_state_dict_follow_the_training(stage: int) -> None:
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
