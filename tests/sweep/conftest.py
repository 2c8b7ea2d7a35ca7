import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import TINY, Command, by_hand

from tests.zygote.client import Zygote

SETTINGS = (*TINY, "train.max_steps=4", "launch.nproc_per_node=2")
MISBEHAVING = "model: {_target_: misbehaving.MisbehavingMLP, action: ACTION, at: 3}"
SAVING = "checkpoint: {every: 1, asynchronous: false}"
CASES = {
    "well0": "seed: 10",
    "well1": "seed: 11",
    "well2": "seed: 12",
    "well3": "seed: 13",
    "one_more": "seed: 14",
    "raises": MISBEHAVING.replace("ACTION", "raise"),
    "killed": f"{MISBEHAVING.replace('ACTION', 'kill once')}\n{SAVING}",
    "no_number": MISBEHAVING.replace("ACTION", "poison"),
    "refused": "zero: {stage: 9}",
    "pauses": f"{MISBEHAVING.replace('ACTION', 'pause')}\n{SAVING}",
}
"""What a job of a sweep is to meet: a yaml of its own."""


@pytest.fixture
def sweep(zygote: Zygote, tmp_path: Path) -> Callable[..., Command]:
    """Starts a sweep of some of the cases, in `sweep` of the test's folder."""
    (tmp_path / "conf/case").mkdir(parents=True)
    for name, settings in CASES.items():
        (tmp_path / f"conf/case/{name}.yaml").write_text(f"# @package _global_\n{settings}\n")
    given = ("-m", "--config-dir=conf", *SETTINGS, "hydra.sweep.dir=sweep")
    start = functools.partial(by_hand, folder=tmp_path, zygote=zygote)
    return lambda cases, *more: start(*given, f"+case={cases}", *more)
