"""The optimizer's state in bf16: the bits of plain PyTorch with a rounding of its own, wherever the state lies."""

import functools
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import MUON, Kind, Matrices, Overflowing, build, train
from tests.unit.engine.parts import alone
from zerotrain.engine.groups.optimizers import _rounded_by_chance
from zerotrain.errors import ConfigError

STATE = zerotrain.PrecisionConfig("bf16", state="bf16")
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=0.05)
KINDS = {
    "AdamW": Kind(Matrices, ADAMW, zerotrain.PrecisionConfig(state="bf16")),
    "AdamW, hard parameters, bf16": Kind(optimizer=ADAMW, precision=STATE),
    "fp16, a step skipped": Kind(
        Overflowing, ADAMW, zerotrain.PrecisionConfig("fp16", initial_scale=1024, state="bf16")
    ),
    "Muon and AdamW, bf16": Kind(Matrices, MUON, STATE),
}


def rounded(value: torch.Tensor, weight: torch.Tensor, step: int) -> torch.Tensor:
    """The rule in numpy's unsigned numbers."""
    bits, of_weight = value.numpy().view(np.uint32), weight.detach().numpy().view(np.uint32)
    chance = (
        ((of_weight * np.uint32(2654435761) + np.uint32(668265263 * step % 2**32)) ^ bits) * np.uint32(2246822519)
    ) >> 16
    return torch.from_numpy(((bits + chance) & np.uint32(0xFFFF0000)).view(np.float32))


def test_a_training_comes_to_the_bits_of_plain_pytorch_that_rounds_its_state() -> None:
    def batch(step: int) -> torch.Tensor:
        return torch.randint(37, (9,), generator=torch.Generator().manual_seed(step))

    torch.manual_seed(0)
    model = Matrices()
    optimizer = ADAMW(model.parameters(), weight_decay=0.01)
    for step in range(1, 8):
        optimizer.zero_grad()
        model(batch(step)).backward()
        optimizer.step()
        for parameter, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(rounded(state[name], parameter, step))
    for stage in range(4):
        torch.manual_seed(0)
        engine = zerotrain.build_engine(
            Matrices(),
            optimizer=functools.partial(ADAMW, weight_decay=0.01),
            precision=KINDS["AdamW"].precision,
            zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.004),
            decay_all=True,
        )
        for step in range(1, 8):
            engine.train_step([(batch(step),)])
        weights = engine.full_state_dict()
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(2)
def test_stages_buckets_offload_and_changes_of_the_stage_change_no_bit(kind: str, size: int) -> None:
    def on_a_rank(world: zerotrain.World, stage: int, then: int, how: dict[str, Any]) -> str:
        engine = build(world, KINDS[kind], stage, **how)
        planned = engine.planned_nbytes()["optimizer"]
        train(engine, 0, 1, of_rank=world.rank)
        if not how and "Muon" not in kind:
            assert engine.memory_bytes()["optimizer"] == planned
        engine.set_stage(then)
        train(engine, 2, 3, 4, of_rank=world.rank)
        return engine.weights_sha256()

    rows: list[tuple[int, int, dict[str, Any]]] = [(stage, (stage + 2) % 4, {}) for stage in range(4)]
    rows += [(2, 2, {"bucket_mb": 1.0}), (1, 3, {"offload": zerotrain.OffloadConfig(optimizer="cpu")})]
    shas = {run_threads(lambda world, row=row: on_a_rank(world, *row), size)[0][0] for row in rows}
    assert len(shas) == 1
    wide = replace(KINDS[kind], precision=replace(KINDS[kind].precision, state="fp32"))

    def in_fp32(world: zerotrain.World) -> str:
        engine = build(world, wide, 1)
        train(engine, 0, 1, 2, 3, 4, of_rank=world.rank)
        return engine.weights_sha256()

    assert run_threads(in_fp32, size)[0][0] not in shas


def states(engine: zerotrain.ZeroEngine) -> set[torch.dtype]:
    return {tensor.dtype for bucket in engine.schedule.trained for tensor in bucket.update.state_tensors()}


@pytest.mark.parametrize(("kind", "stage"), list(product(["AdamW", "Muon and AdamW, bf16"], [0, 3])))
def test_a_checkpoint_goes_on_at_another_stage_and_number_of_ranks_and_in_the_other_dtype(
    kind: str, stage: int, tmp_path: Path
) -> None:
    wide = replace(KINDS[kind], precision=replace(KINDS[kind].precision, state="fp32"))

    def save(world: zerotrain.World) -> str:
        engine = build(world, KINDS[kind], stage)
        train(engine, 0, 1)
        engine.save(tmp_path / "narrow")
        at_save = engine.weights_sha256()
        wider = build(world, wide, stage)
        wider.load(tmp_path / "narrow")
        assert states(wider) <= {torch.float32}
        wider.save(tmp_path / "wide")
        assert wider.weights_sha256() == at_save
        train(wider, 2)
        train(engine, 2, 3)
        return engine.weights_sha256()

    def load(world: zerotrain.World, path: str) -> str:
        engine = build(world, KINDS[kind], 3 - stage, seed=1)
        engine.load(tmp_path / path)
        assert states(engine) <= {torch.bfloat16}
        train(engine, 2, 3)
        return engine.weights_sha256()

    expected = run_threads(save, 2)[0][0]
    for path in ("narrow", "wide"):
        assert run_threads(lambda world, path=path: load(world, path), 2 if stage else 1)[0][0] == expected


@pytest.mark.parametrize("equal", [False, True])
def test_what_shrinks_by_a_thousandth_a_step_shrinks_so_on_average(equal: bool) -> None:
    """Rounded to the nearest it would stay for ever."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.ones(20_000) if equal else torch.randn(20_000, generator=generator)
    values = torch.rand(20_000, generator=generator).add(0.01).bfloat16().float()
    exact = values.double()
    for step in range(1, 301):
        exact *= 0.999
        values = _rounded_by_chance(values * 0.999, weights, torch.tensor(float(step)))
        assert torch.equal(values, values.bfloat16().float())
    assert abs((values.double() / exact - 1).mean()) < 0.01
    kept = torch.tensor([0.0, -1.5, float("inf"), float("-inf")])
    assert torch.equal(_rounded_by_chance(kept.clone(), torch.ones(4), 3), kept)
    number, tensor = (_rounded_by_chance(exact.float(), weights, step) for step in (10**6, torch.tensor(1e6)))
    assert torch.equal(number, tensor)


@pytest.mark.parametrize(
    ("optimizer", "zero", "words"),
    [
        (functools.partial(torch.optim.SGD, lr=0.1), {}, "state='bf16'.* has no effect with SGD"),
        (ADAMW, {"compiled_update": True}, "compiled_update=True.*: its state is in fp32"),
    ],
)
def test_what_has_no_such_state_is_refused(optimizer: Any, zero: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        zerotrain.build_engine(
            Matrices(), optimizer=optimizer, precision=STATE, zero=zerotrain.ZeroConfig(**zero), world=alone()
        )
