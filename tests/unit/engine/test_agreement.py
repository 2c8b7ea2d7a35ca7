"""What ranks are compared by, in one process."""

import gc
import weakref
from functools import partial

import torch

import zerotrain
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World
from zerotrain.engine.agreement import StepStamps, stamp_differences


def collectives() -> Collectives:
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    return Collectives(world, ledger=Ledger(), ordered=True, overlap=True)


def test_each_number_that_differs_is_told_with_its_ranks():
    stamps = torch.tensor([[3.0, 2, 0.1, 7, 0], [3.0, 1, 0.1, 7, 0], [3.0, 2, 0.1, 7, 0]], dtype=torch.float64)
    assert stamp_differences(stamps) == ["backwards since the last step: 2 on ranks 0, 2, 1 on rank 1"]
    assert stamp_differences(stamps[:1]) == []


def test_a_stamp_counts_steps_and_backwards():
    progress = StepStamps(collectives())
    progress.num_backwards = 2
    one, two, hyperparameters, order, written, signal = progress.stamp([{"lr": 0.25}]).tolist()
    assert (one, two, order, written, signal) == (1, 2, 0, 0, 0)
    assert hyperparameters == int(hyperparameters) > 0
    progress.close_step()
    assert progress.stamp([{"lr": 0.25}]).tolist() == [2, 0, hyperparameters, 0, 0, 0]
    assert progress.describe() == "step 2, idle"


def test_nothing_of_an_engine_holds_its_world_in_a_circle():
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    gone = weakref.ref(world)
    engine = zerotrain.build_engine(
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        world=world,
    )
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step()
    gc.collect()
    gc.disable()  # what only the collector frees may live until Python ends, and gloo's threads with it
    try:
        del engine, world
        assert gone() is None
    finally:
        gc.enable()
