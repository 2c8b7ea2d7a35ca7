"""The moving average of weights, beside the training: the bits of a few lines of plain PyTorch. Threads as ranks."""

import re
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, Kind, build, train
from tests.unit.engine.parts import alone, on_ranks
from zerotrain.errors import ConfigError, EngineStateError

State = dict[str, Any]
ROUND = (0, 1, 2, 3, 1, 0, 3, 0, 2, 0)
"""Every stage, from and to every other that makes a difference."""
DECAY = 0.9


class Plain:
    """What an average is by its definition, from the full weights after each step."""

    def __init__(self, *, warmup: bool = False, num_updates: int = 0, average: State | None = None) -> None:
        self.warmup, self.num_updates, self.average = warmup, num_updates, average

    def update(self, weights: State) -> None:
        if self.average is None:
            self.average = {name: each.clone() for name, each in weights.items()}
        decay = min(DECAY, (1 + self.num_updates) / (10 + self.num_updates)) if self.warmup else DECAY
        if self.num_updates > 0:
            follow = get_ema_multi_avg_fn(decay)
            follow([self.average[name] for name in weights], list(weights.values()), self.num_updates)
        self.num_updates += 1


def followed(engine: zerotrain.ZeroEngine, plain: Plain, *steps: int, of_rank: int = 0) -> None:
    """Train, and let the plain average follow."""
    for step in steps:
        before = engine.weights_sha256()
        train(engine, step, of_rank=of_rank)
        weights = parameters_of(engine)
        if engine.weights_sha256() != before and weights:
            plain.update(weights)


def parameters_of(engine: zerotrain.ZeroEngine) -> State:
    """Full weights of parameters of floating-point numbers, on rank 0."""
    names = [name for name, each in engine.module.named_parameters(remove_duplicate=False) if each.is_floating_point()]
    return {name: each for name, each in engine.full_state_dict().items() if name in names}


def of_engine(engine: zerotrain.ZeroEngine) -> State:
    with engine.averaged():
        return parameters_of(engine)


def assert_equal(found: State, wanted: State | None) -> None:
    assert wanted is not None
    assert found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


def assert_average(engine: zerotrain.ZeroEngine, plain: Plain) -> None:
    found = of_engine(engine)
    if engine.world.rank == 0:
        assert_equal(found, plain.average)


@pytest.mark.case(
    "checkpoints", "the stage changes after each step, from each to each other", "the same bits",
    under="`engine.keep_average()`, `with engine.averaged():`",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "size"), [("Muon and AdamW, bf16", 3), ("fp16, a step skipped", 2)])
@on_ranks()
def test_the_stage_changes_in_mid_run_and_its_bits_do_not(world, kind, size):
    engine, plain = build(world, KINDS[kind], 2), Plain(warmup=True)
    engine.keep_average(decay=DECAY)
    for step, stage in enumerate(ROUND):
        followed(engine, plain, step, of_rank=world.rank)
        engine.set_stage(stage)
        assert_average(engine, plain)


PLACES = [("Muon and AdamW", 3, 3, 0, 1), ("hard parameters, bf16, momentum", 0, 2, 2, 3)]


@pytest.mark.parametrize(("kind", "stage", "size", "later", "other_size"), PLACES)
def test_it_goes_on_from_a_checkpoint_at_any_stage_and_number_of_ranks(kind, stage, size, later, other_size, tmp_path):
    saved: dict[str, Any] = {}

    def save(world: zerotrain.World) -> None:
        engine, plain = build(world, KINDS[kind], stage), Plain(warmup=True)
        engine.keep_average(decay=DECAY)
        followed(engine, plain, 0, 1)
        saving = engine.begin_save(tmp_path / "saved")
        saved.update(
            vars(plain) | {"average": {k: v.clone() for k, v in plain.average.items()}} if plain.average else {}
        )
        train(engine, 2)
        saving.wait()

    def resume(world: zerotrain.World) -> None:
        engine = build(world, KINDS[kind], later, seed=1, bucket_mb=0.002)
        engine.keep_average(decay=DECAY)
        train(engine, 5)  # what it has averaged so far is gone
        engine.load(tmp_path / "saved")
        plain = Plain(warmup=True, num_updates=2, average=saved["average"])
        assert_average(engine, plain)
        followed(engine, plain, 2, 3)
        assert_average(engine, plain)

    run_threads(save, size)
    run_threads(resume, other_size)


@on_ranks(2)
def test_without_one_in_the_checkpoint_it_begins_with_the_next_step(world, tmp_path):
    engine = build(world, Kind(), 2)
    train(engine, 0)
    engine.save(tmp_path / "without")
    engine, plain = build(world, Kind(), 3), Plain()
    engine.keep_average(decay=DECAY, warmup=False)
    train(engine, 5, 6)
    engine.load(tmp_path / "without")
    before = engine.weights_sha256()
    with engine.averaged():
        assert engine.weights_sha256() == before
    followed(engine, plain, 1, 2)
    assert_average(engine, plain)


def test_without_one_in_the_engine_that_of_a_checkpoint_is_dropped_with_a_warning(tmp_path):
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(), 2)
        engine.keep_average()
        train(engine, 0)
        engine.save(tmp_path / "with")
        train(engine, 1)
        expected = engine.weights_sha256()
        engine = build(world, Kind(), 1, seed=1)
        engine.load(tmp_path / "with")
        train(engine, 1)
        assert engine.weights_sha256() == expected
        engine.save(tmp_path / "again")
        engine.load(tmp_path / "again")

    said = (
        f"engine.load: {tmp_path}/with holds an average of weights, which is dropped; call engine.keep_average() before"
    )
    with pytest.warns(RuntimeWarning, match=re.escape(said)) as warned:
        run_threads(on_a_rank, 2)
    assert len(warned) == 1
    sizes = [sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors")) for name in ("with", "again")]
    assert sizes[0] > 1.2 * sizes[1]


@pytest.mark.parametrize(
    ("precision", "optimizer", "parameters", "update"),
    [("fp32", "cpu", "cpu", "device"), ("bf16", "disk", "disk", "device"), ("bf16", "cpu", "device", "host")],
)
def test_it_is_offloaded_with_the_state_of_the_optimizer(precision, optimizer, parameters, update, tmp_path):
    offload = zerotrain.OffloadConfig(optimizer=optimizer, parameters=parameters, update=update, path=str(tmp_path))
    kind = Kind(precision=precision)

    def on_a_rank(world: zerotrain.World) -> dict[str, Any]:
        engine, plain = build(world, kind, 3, offload=offload), Plain(warmup=True)
        engine.keep_average(decay=DECAY)
        followed(engine, plain, 0, 1, of_rank=world.rank)
        engine.set_stage(1)
        assert_average(engine, plain)
        engine.save(tmp_path / "saved")
        followed(engine, plain, 2, of_rank=world.rank)
        assert_average(engine, plain)
        expected = engine.weights_sha256()
        engine.load(tmp_path / "saved")
        engine.set_stage(3)
        train(engine, 2, of_rank=world.rank)
        assert_average(engine, plain)
        assert engine.weights_sha256() == expected
        for update in (bucket.update for bucket in engine.schedule.trained):
            average = update.average.nbytes if update.average is not None else 0
            assert average == 4 * update.master_weight.numel()
            state = sum(tensor.nbytes for tensor in update.state_tensors())
            assert update.home.nbytes >= average + update.separate_master_nbytes + state
        return engine.memory_bytes()

    for held in run_threads(on_a_rank, 2)[0]:
        assert held["optimizer"] == held["theory"]["optimizer"] == 0
        assert held["theory"]["offloaded"] <= held["offloaded"]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["hard parameters, AdamW", "a frozen base in bf16 with adapters"])
def test_it_takes_four_bytes_of_each_element_a_rank_updates_and_nothing_is_sent_in_a_step(kind, stage):
    def on_a_rank(world: zerotrain.World, averages: bool) -> tuple[Any, ...]:
        engine = build(world, KINDS[kind], stage)
        if averages:
            engine.keep_average()
        planned, ledger = engine.planned_nbytes()["optimizer"], engine.ledger
        before = ledger.outside_steps.sent_nbytes
        train(engine, 0, 1)
        held = engine.memory_bytes()
        numel = sum(bucket.layout.numel for bucket in engine.schedule.trained)
        updated = sum(bucket.update.master_weight.numel() for bucket in engine.schedule.trained)
        outside = ledger.outside_steps.sent_nbytes - before
        kept = [planned, held["theory"]["optimizer"], held["optimizer"]]
        return kept, [numel, updated], [ledger.last_step.calls, ledger.last_step.nbytes, outside]

    (without, *_), board = run_threads(lambda world: on_a_rank(world, False), 2)
    (having, *_), other_board = run_threads(lambda world: on_a_rank(world, True), 2)
    (kept, [numel, updated], sent), (kept_with_it, _, sent_with_it) = without, having
    theory = 4 * numel // (2 if stage else 1)
    more = [after - before for after, before in zip(kept_with_it, kept, strict=True)]
    assert more == [4 * updated, theory, 4 * updated]
    assert sent_with_it == sent
    assert board.orders == other_board.orders


@on_ranks(2)
def test_every_so_many_steps(world):
    engine, plain = build(world, Kind(), 1), Plain()
    engine.keep_average(decay=DECAY, every=3, warmup=False)
    train(engine, 0, 1)
    followed(engine, plain, 2)
    train(engine, 3, 4)
    followed(engine, plain, 5)
    train(engine, 6)
    assert_average(engine, plain)


@pytest.mark.case(
    "checkpoints",
    "`engine.keep_average()`, `with engine.averaged():`",
    "inside the model computes with the average, afterwards with the weights, to the bit, after an exception too",
)
@pytest.mark.parametrize("stage", range(4))
def test_the_model_computes_with_it_and_after_an_exception_with_the_weights(stage):
    tokens = torch.arange(9)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, KINDS["Muon and AdamW, bf16"], stage)
        engine.keep_average(decay=0.5, warmup=False)
        train(engine, 0, 1)
        before, [loss, average] = engine.weights_sha256(), [engine(tokens).item(), of_engine(engine)]
        with torch.inference_mode(), engine.averaged():
            assert engine(tokens).item() != loss
        assert engine(tokens).item() == loss
        with pytest.raises(IndexError), engine.averaged():
            engine(tokens + 37)
        assert engine(tokens).item() == loss
        assert engine.weights_sha256() == before
        engine.load_state_dict(average)
        with torch.no_grad():
            averaged = engine(tokens).item()
        with engine.averaged(), torch.no_grad():
            assert engine(tokens).item() == averaged
        train(engine, 2)

    run_threads(on_a_rank, 2)


REFUSED = {
    "engine.backward was called": lambda engine: engine.backward(engine(torch.arange(9))),
    "a checkpoint cannot be saved": lambda engine: engine.save("nowhere"),
    "a checkpoint cannot be loaded": lambda engine: engine.load("nowhere"),
    "weights cannot be loaded": lambda engine: engine.load_state_dict({}),
    "the stage cannot change": lambda engine: engine.set_stage(3),
    "what trains cannot change": lambda engine: engine.freeze("odd"),
    "the average cannot be used": lambda engine: engine.averaged().__enter__(),
}


@on_ranks(2)
def test_nothing_changes_inside(world):
    engine = build(world, Kind(), 2)
    engine.keep_average()
    train(engine, 0, 1)
    before = engine.weights_sha256()
    with engine.averaged():
        for what, call in REFUSED.items():
            said = f"{what} inside `with engine.averaged()`, where the average is in use; leave it first"
            with pytest.raises(EngineStateError, match=f"^{re.escape(said)}$"):
                call(engine)
    assert engine.weights_sha256() == before
    train(engine, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"decay": 1.0}, "engine.keep_average: decay=1.0; it must be at least 0 and below 1, such as 0.999"),
        ({"decay": float("nan")}, "decay=nan; it must be at least 0 and below 1, such as 0.999"),
        ({"decay": "0.9"}, "decay=0.9; it must be at least 0 and below 1, such as 0.999"),
        ({"every": 0}, "engine.keep_average: every=0; it must be a whole number of steps, at least 1"),
        ({"every": 1.5}, "every=1.5; it must be a whole number of steps, at least 1"),
    ],
)
def test_a_value_that_it_cannot_have_is_refused(given, said):
    engine = build(alone(), Kind(), 2)
    with pytest.raises(ConfigError, match=re.escape(said)):
        engine.keep_average(**given)
    engine.keep_average(decay=0, every=2)
    with pytest.raises(ConfigError, match="the engine keeps an average already, and has room for one"):
        engine.keep_average()


@on_ranks(2)
def test_one_that_differs_by_rank_or_is_not_there_is_refused(world):
    engine = build(world, Kind(), 2)
    with pytest.raises(EngineStateError, match="there is no average of weights; call"):
        engine.averaged().__enter__()
    said = "engine.keep_average: decay differs between the ranks: 0.5 on rank 0, 0.75 on rank 1; give all ranks the"
    with pytest.raises(ConfigError, match=said):
        engine.keep_average(decay=(0.5, 0.75)[world.rank])
    engine.keep_average()
