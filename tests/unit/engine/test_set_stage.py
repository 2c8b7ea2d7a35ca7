"""The stage changes between two steps, and nothing of what is trained does. With threads as ranks."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.unit.checkpoint.runs import (
    KINDS,
    Kind,
    assert_same_counts,
    assert_same_state,
    build,
    counted,
    held,
    joined,
    train,
)
from zerotrain.errors import ConfigError, EngineStateError
from zerotrain.testing.fake_wire import run_threads

ROUND = (0, 1, 2, 3, 1, 0, 3, 0, 2, 0)
"""Every stage, from and to every other that makes a difference."""
HELD = ("parameters", "gradients", "optimizer")


def at_rest(engine: zerotrain.ZeroEngine) -> dict[str, Any]:
    return {name: engine.memory_bytes()[name] for name in HELD}


PLACES = [(kind, size) for index, kind in enumerate(KINDS) for size in ((1, 2), (3,))[index % 2]]
"""The other numbers of ranks are in tests/bits."""


@pytest.mark.case(
    "stages",
    "from each stage to each other; tied, frozen, odd parameters, AdamW, momentum, Muon, adapters "
    "on a frozen base; fp32, bf16, fp16 with a skipped step, clipping",
    "the bits of a fixed stage, after each step; bytes held as at that stage",
)
@pytest.mark.parametrize(("kind", "size"), PLACES)
@pytest.mark.thinned(2)
def test_the_stage_changes_in_mid_run_and_the_bits_do_not(kind: str, size: int) -> None:
    def fixed(world: zerotrain.World, stage: int) -> tuple[list[str], Any, Any, Any]:
        """As many steps at the stage that comes last; what rests at the others is known after two."""
        engine = build(world, KINDS[kind], stage)
        hashes = []
        for step in range(len(ROUND) + 1 if stage == ROUND[-1] else 2):
            train(engine, step, of_rank=world.rank)
            hashes.append(engine.weights_sha256())
        return hashes, held(engine), counted(engine), at_rest(engine)

    def changing(world: zerotrain.World) -> tuple[list[str], Any, Any, list[Any]]:
        engine = build(world, KINDS[kind], 2)
        train(engine, 0, of_rank=world.rank)
        hashes, seen = [engine.weights_sha256()], []
        for step, stage in enumerate(ROUND, 1):
            switch = engine.set_stage(stage)
            assert (switch.stage, engine.options.zero.stage) == (stage, stage)
            assert engine.weights_sha256() == hashes[-1]
            train(engine, step, of_rank=world.rank)
            hashes.append(engine.weights_sha256())
            seen.append(at_rest(engine))
        return hashes, held(engine), counted(engine), seen

    changed, _ = run_threads(changing, size, late_rank=size - 1)
    by_stage = {stage: run_threads(lambda world, stage=stage: fixed(world, stage), size)[0] for stage in range(4)}
    wanted = by_stage[ROUND[-1]]
    for rank in range(size):
        assert changed[rank][0] == wanted[rank][0]
        assert_same_counts(changed[rank][2], wanted[rank][2])
        assert changed[rank][3] == [by_stage[stage][rank][3] for stage in ROUND]
    assert_same_state(joined([each[1] for each in changed]), joined([each[1] for each in wanted]))


@pytest.mark.case(
    "stages", "bytes it sends", "those of state that was sharded and becomes full; none without such state"
)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["hard parameters, AdamW", "hard parameters, bf16, momentum"])
def test_a_change_sends_what_was_shared_and_is_held_whole_and_nothing_else(kind: str, size: int) -> None:
    def on_a_rank(world: zerotrain.World) -> list[zerotrain.StageSwitch]:
        engine = build(world, KINDS[kind], 2)
        train(engine, 0)
        return [engine.set_stage(stage) for stage in (1, 0, 2, 3, 2, 3, 0)]

    results, _ = run_threads(on_a_rank, size)
    padding = 64 * 16 * size * len(ROUND)  # elements that fill up shards, in a few buckets
    for switches in results:
        assert [each.theory_sent_nbytes > 0 for each in switches] == [False, True, False, False, True, False, True]
        for each in switches:
            assert 0 <= each.sent_nbytes - each.theory_sent_nbytes <= (padding * 16 if each.theory_sent_nbytes else 64)


def test_of_buckets_as_they_were_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_a_rank(world: zerotrain.World) -> int:
        engine = build(world, Kind(), 1)
        train(engine, 0)
        storages = [weakref.ref(bucket) for bucket in engine.schedule.buckets]
        engine.set_stage(3)
        train(engine, 1)
        gc.collect()
        return sum(each() is not None for each in storages)

    assert run_threads(on_a_rank, 2)[0] == [0, 0]


def held_storages(engine: zerotrain.ZeroEngine) -> int:
    """Bytes of all memory behind master weights and optimizer state, also where no more than a part is in use."""
    updates = [bucket.update for bucket in engine.schedule.trained]
    tensors = [tensor for update in updates for tensor in (update.master_weight, *update.state.state_tensors())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["hard parameters, AdamW", "hard parameters, bf16, momentum"])
def test_a_rank_gives_back_the_memory_of_what_it_holds_no_more(kind: str, stage: int) -> None:
    def on_a_rank(world: zerotrain.World, first: int) -> int:
        engine = build(world, KINDS[kind], first)
        train(engine, 0)
        if first != stage:
            engine.set_stage(stage)
        return held_storages(engine)

    changed, _ = run_threads(lambda world: on_a_rank(world, 0), 2)
    assert changed == run_threads(lambda world: on_a_rank(world, stage), 2)[0]


@pytest.mark.case("stages", "parameters, hooks on them and torch's schedulers from before", "go on")
def test_what_users_hold_stays_theirs() -> None:
    """References to parameters, hooks and torch's schedulers from before the change."""

    def on_a_rank(world: zerotrain.World, stages: tuple[int, ...]) -> tuple[str, list[int], float]:
        engine = build(world, Kind(), 2)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, gamma=0.5)
        kept, seen = dict(engine.module.named_parameters()), []
        next(iter(kept.values())).register_hook(lambda gradient: seen.append(gradient.numel()))
        for step, stage in enumerate(stages):
            engine.set_stage(stage)
            train(engine, step)
            scheduler.step()
        assert all(kept[name] is each for name, each in engine.module.named_parameters())
        return engine.weights_sha256(), seen, engine.param_groups[0]["lr"]

    changing, _ = run_threads(lambda world: on_a_rank(world, (0, 3, 1)), 2)
    fixed, _ = run_threads(lambda world: on_a_rank(world, (2, 2, 2)), 2)
    assert changing == fixed


@pytest.mark.case(
    "stages",
    "in a forward, a `forward_scope` or a hook on a gradient, between micro-batches (in "
    "`no_sync`, or each reduced), virtual ranks, or a backward and its step",
    "refused; the step goes on, or the next works",
)
def test_it_comes_between_steps_and_all_ranks_ask_for_the_same_stage() -> None:
    def on_a_rank(world: zerotrain.World) -> list[str]:
        engine = build(world, Kind(), 2)
        said = []
        engine.backward(engine(torch.zeros(3, dtype=torch.int64)))
        with pytest.raises(EngineStateError, match="while a gradient waits") as waiting:
            engine.set_stage(3)
        said.append(str(waiting.value))
        engine.step()
        for stage in (4, world.rank):
            with pytest.raises(ConfigError) as wrong:
                engine.set_stage(stage)
            said.append(str(wrong.value))
        engine.set_stage(3)
        train(engine, 1)
        return said

    for said in run_threads(on_a_rank, 2)[0]:
        assert said[1].startswith("stage: got 4; it must be 0, 1, 2 or 3")
        assert said[2].startswith("engine.set_stage: differs between the ranks: 0 on rank 0, 1 on rank 1")


@pytest.mark.case("stages", "weights written in place before it", "stay written")
def test_weights_written_in_place_before_it_stay_written() -> None:
    def on_a_rank(world: zerotrain.World, stages: tuple[int, ...]) -> str:
        engine = build(world, Kind(), stages[0])
        for step, stage in enumerate(stages[1:]):
            train(engine, step)
            with torch.no_grad(), engine.forward_scope():
                next(engine.module.parameters()).mul_(0.5)
            engine.set_stage(stage)
        train(engine, 9)
        return engine.weights_sha256()

    changing, _ = run_threads(lambda world: on_a_rank(world, (1, 3, 0, 2)), 2)
    fixed, _ = run_threads(lambda world: on_a_rank(world, (0, 0, 0, 0)), 2)
    assert changing == fixed


@pytest.mark.case("checkpoints", "the stage changes to 3 after a save or a load", "no memory is pinned down")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_parameters_of_a_model_that_was_saved_or_loaded_can_be_sharded(stage: int, tmp_path: Path) -> None:
    """Torch pins memory down that numpy has seen, and a save reads by numpy: "Trying to resize storage that is not
    resizable", as the stage of a run with checkpoints changed to 3 (2026-11-22)."""

    def on_a_rank(world: zerotrain.World) -> tuple[str, str, int, Any]:
        engine = build(world, Kind(), stage)
        train(engine, 0)
        engine.save(tmp_path / "first")
        engine.load(tmp_path / "first")
        before = engine.weights_sha256()
        engine.set_stage(3)
        after, got = engine.weights_sha256(), engine.memory_bytes()["parameters"]
        wanted = build(world, Kind(), 3).memory_bytes()["parameters"]
        train(engine, 1)
        return before, after, got, wanted

    for before, after, got, wanted in run_threads(on_a_rank, 2)[0]:
        assert (before, got) == (after, wanted)
