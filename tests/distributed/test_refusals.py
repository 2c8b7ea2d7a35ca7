"""A refusal changes nothing: each public call refused, and then the bits of a run that never was."""

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import refusals
import torch
from cases import place

import zerotrain
from tests.ranks.processes import run_ranks
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.checkpoint.verification import differences

NUM_STEPS_BEHIND = 10


def trained(world: zerotrain.World, stage: int, num_micro_batches: int, num_steps: int) -> tuple[Any, list[str]]:
    """An engine that was never refused, and the hash of its weights after each step."""
    engine = refusals.build(stage, world, num_micro_batches)
    hashes = []
    for _ in range(num_steps):
        refusals.one_step(engine)
        hashes.append(engine.weights_sha256())
    return engine, hashes


def wrong_after(stage: int, num_micro_batches: int, names: list[str], folder: Path) -> list[str]:
    """On each rank: the cases after which the next step has not the bits it should have, or that do not work at all."""
    rank, _ = place()
    world = zerotrain.World.current(torch.device("cpu"))
    cases = {name: (refusals.CASES | refusals.ONE_RANK_IN_NO_SYNC)[name] for name in names}
    never, hashes = trained(world, stage, num_micro_batches, len(cases) + NUM_STEPS_BEHIND)
    engine = refusals.build(stage, world, num_micro_batches)
    engine.save(folder / "good")
    engine.save(folder / "half")
    never.save(folder / "other")
    if rank == 0:
        for number, name in enumerate(("good", "other")):
            (folder / f"rank-{number}").mkdir()
            (folder / f"rank-{number}" / "here").symlink_to(folder / name)
        (folder / "rank-0" / "of-rank-0").symlink_to(folder / "good")
        (folder / "half" / "rank-00001.safetensors").unlink()
    world.barrier()
    wrong = []
    for step, (name, case) in enumerate(cases.items()):
        try:
            if not case(engine, folder):
                refusals.one_step(engine)
            if engine.weights_sha256() != hashes[step]:
                return [*wrong, f"{name}: the weights of its step are others"]
        except BaseException:
            return [*wrong, f"{name}: {traceback.format_exc()}"]
    for _ in range(NUM_STEPS_BEHIND):
        refusals.one_step(engine)
    if engine.weights_sha256() != hashes[-1]:
        wrong.append("the weights at the end")
    return wrong + behind(engine, never, folder)


def behind(engine: Any, never: Any, folder: Path) -> list[str]:
    """What the two differ in, and the engine that was refused from one made of its checkpoint: as they are, and after
    changes that were refused before they were made."""
    refusals.ARGUMENTS["freeze, other names"](engine, folder)
    refusals.ARGUMENTS["add_param_group, other settings"](engine, folder)
    for each in (engine, never):
        each.freeze("blocks.1.*")
        each.add_param_group({"params": "spare.*", "lr": 0.5})
        refusals.one_step(each)
        each.unfreeze("blocks.1.*")
        refusals.one_step(each)
    saved = [(path, read_manifest(path)) for path in (engine.save(folder / "a"), never.save(folder / "b"))]
    wrong = [str(each) for each in differences(*saved)]
    engine.load(folder / "a")
    for each in (engine, never):
        refusals.one_step(each)
    return wrong + ["after a load"] * (engine.weights_sha256() != never.weights_sha256())


PLACEMENTS = [(2, 0, 1), (2, 1, 2), (3, 2, 2), (2, 3, 2)]
"""Ranks, stage, micro-batches."""
ALL = range(len(PLACEMENTS))


def require_bits_after_refusals(placement: int, shares: Sequence[int], folder: Path) -> None:
    """Of the cases, which the placements share, those of these shares."""
    num_ranks, stage, num_micro_batches = PLACEMENTS[placement]
    names = [*refusals.CASES, *(refusals.ONE_RANK_IN_NO_SYNC if stage < 3 else ())]
    names = [name for number, name in enumerate(names) if number % len(PLACEMENTS) in shares]
    assert run_ranks(wrong_after, num_ranks, stage, num_micro_batches, names, folder) == [[]] * num_ranks


@pytest.mark.case(
    "parameters",
    "other names, settings, stages or paths by rank; a wrong call on one rank alone, or on all",
    "refused on all ranks with the arguments of each, and nothing changes",
)
@pytest.mark.case(
    "calls: Calls",
    "An exception in the optimizer, on all ranks",
    "the step's gradients are forgotten; the engine goes on",
)
@pytest.mark.parametrize("placement", [ALL[0], *(pytest.param(each, marks=pytest.mark.slow) for each in ALL[1:])])
def test_after_each_refusal_training_goes_on_with_the_bits_of_a_run_that_was_never_refused(
    placement: int, tmp_path: Path
) -> None:
    """Each case at one placement; tests/bits has it at another."""
    require_bits_after_refusals(placement, [placement], tmp_path)
