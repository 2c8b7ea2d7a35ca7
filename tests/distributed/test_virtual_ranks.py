"""A run of the Trainer ends with the same weights on any number of ranks that share as many virtual ranks."""

import functools
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import trainer_of
from test_training import TEXT, on_ragged_text

import zerotrain
from zerotrain.testing import run_ranks
from zerotrain.training import warmup_cosine

MUON = zerotrain.MuonWithAdamW(lr=0.02, adamw_lr=0.01)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
KINDS = list(product(("fp32", "bf16"), (False, True)))
"""(precision, whether Muon updates the matrices)"""


def run_kinds(folder: Path, stages: tuple[int, ...]) -> list[list[str]]:
    """The hash of the weights and the record of the steps of each kind, by stage."""
    return [[run(folder, stage, *kind) for kind in KINDS] for stage in stages]


def run(folder: Path, stage: int, precision: str, muon: bool) -> str:
    """With dropout, two micro-batches for each virtual rank, and sequences in which few labels count."""
    world = zerotrain.World.current(torch.device("cpu"))
    torch.manual_seed(world.rank)  # what was drawn before must not matter
    settings = {"precision": precision, "activation_checkpointing": stage == 3, "world": world}
    engine, dataset = on_ragged_text(folder, stage, MUON if muon else ADAMW, **settings)
    with torch.no_grad():
        torch.manual_seed(0)
        weights = {name: torch.randn(p.shape) / 30 for name, p in engine.module.named_parameters()}
    engine.load_state_dict(weights, strict=False)
    run_dir = folder / f"{world.size}-{world.rank}-{stage}-{precision}-{muon}"
    run_dir.mkdir()
    body = trainer_of(
        engine,
        dataset,
        run_dir,
        schedule=functools.partial(warmup_cosine, warmup_steps=1),
        max_steps=4,
        gradient_accumulation_steps=2,
        eval_every=3 - world.size % 2,
    ).run()
    of_rank_0 = folder / f"{world.size}-0-{stage}-{precision}-{muon}"
    lines = (of_rank_0 / "steps.jsonl").read_text().splitlines(keepends=True)[1:]  # but for where it was computed
    assert len(lines) == 4
    return body["weights_sha256"] + "".join(lines)


@pytest.fixture(scope="module")
def alone(once: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """One rank, all four virtual ranks."""
    return once("virtual ranks", lambda: runs_on(1, (2,), tmp_path_factory.mktemp("alone"))[0])


def runs_on(num_ranks: int, stages: tuple[int, ...], folder: Path) -> list[list[str]]:
    (folder / "text.txt").write_text(TEXT)
    by_rank = run_ranks(run_kinds, num_ranks, folder, stages)
    assert all(each == by_rank[0] for each in by_rank)
    return by_rank[0]


@pytest.mark.case(
    "ranks", "a run of the Trainer: dropout, checkpointing, labels of which few count, Muon", "same weights"
)
@pytest.mark.parametrize(("num_ranks", "stages"), [(1, (0,)), (2, (1, 3)), (4, (0, 2))])
@pytest.mark.thinned(3, first=1)
def test_any_number_of_ranks_ends_with_the_same_weights_and_the_same_record_of_its_steps(
    num_ranks: int, stages: tuple[int, ...], alone: list[str], tmp_path: Path
) -> None:
    assert len(set(alone)) == len(KINDS)
    assert runs_on(num_ranks, stages, tmp_path) == [alone] * len(stages)
