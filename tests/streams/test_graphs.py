"""Steps as graphs on GPUs that do not exist: a replay comes to the bits of a step without, or is not made."""

import functools
import itertools
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.streams.faults import Planted
from tests.streams.stand_in import Ranks, clocks, run_on_streams
from tests.streams.trainings import _DRAWING, build, net, rows
from tests.unit.checkpoint.slow_disk import SlowDisk
from zerotrain.comm.handles import Handle
from zerotrain.comm.world import World
from zerotrain.engine.buckets.gradient import BucketGradient
from zerotrain.engine.graphs import MAX_RECORDINGS, StepGraphs
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.errors import EngineStateError
from zerotrain.training.sameness import seed_leaf

RATE = 2**-7
"""Exact in fp32, as all rates here: a CPU's kernel reads a number in fp64, and a tensor in fp32."""
NUM_STEPS = 12
"""Two without graphs, and ten replays."""
Result = tuple[str, list[float], Any, int, list[str]]
"""sha256 of the weights, losses, traffic of the last step, replays, reasons."""


def batches(step: int, rank: int, number: int = 1, num_rows: int = 8) -> list[Any]:
    return [(rows(step, index, rank, num_rows=num_rows),) for index in range(number)]


def train(
    world: World,
    stage: int,
    graphs: str = "auto",
    *,
    model: Any = None,
    num_steps: int = NUM_STEPS,
    feed: Callable[[int, int], list[Any]] = batches,
    before: Callable[[Any, int], object] = lambda engine, step: None,
    calls: Callable[[int], dict[str, Any]] = lambda step: {},
    **given: Any,
) -> Result:
    adamw: Any = functools.partial(torch.optim.AdamW, lr=RATE, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = net(num_blocks=2) if model is None else model()
        engine = build(world, stage, model, graphs=graphs, **{"optimizer": adamw, "bucket_mb": 0.01} | given)
        losses = []
        for step in range(num_steps):
            before(engine, step)
            for group in engine.param_groups:
                group["lr"] = RATE * (1 + step / 16)
            losses.append(engine.train_step(feed(step, world.rank), **calls(step)).loss)
        traffic = engine.ledger.last_step
        num_replayed = 0 if engine.graphs is None else engine.graphs.num_replayed
        return engine.weights_sha256(), list(map(float, losses)), traffic, num_replayed, engine.graph_reasons


def both(size: int = 2, **given: Any) -> tuple[Result, Result, Ranks]:
    """Without graphs and with them, on rank 0; and all that was seen with them."""
    without = run_on_streams(lambda world: train(world, graphs="off", **given), size)
    ranks = run_on_streams(lambda world: train(world, **given), size)
    assert set(ranks.faults) <= set(without.faults)  # with one rank, which has no such wire, a look at weights is one
    assert [result[0] for result in ranks.results] == [ranks.results[0][0]] * size
    return without.results[0], ranks.results[0], ranks


ROWS = list(itertools.product(range(4), ("bf16", "fp32"), ("native", "ordered")))


@pytest.mark.parametrize(("stage", "precision", "reduction"), ROWS)
@pytest.mark.thinned(4)
def test_ten_replayed_steps_come_to_the_bits_losses_and_traffic_of_steps_without(stage, precision, reduction):
    without, graphed, _ = both(stage=stage, precision=precision, reduction=reduction)
    assert graphed[:3] == without[:3]
    assert graphed[3:] == (NUM_STEPS - 2, [])


class Drawing(nn.Module):
    """Drops activations, counts its calls in a buffer and averages what it sees: one step writes to all of them.

    Args:
        on_host: it draws a number of Python's too.
        rate: of what it drops.
    """

    def __init__(self, on_host: bool = False, rate: float = 0.3) -> None:
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.BatchNorm1d(64)
        self.on_host, self.rate = on_host, rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.norm(self.first(x)).tanh(), self.rate)
        return self.last(x).square().mean() * (random.random() if self.on_host else 1.0)


def drawing(**given: Any) -> Drawing:
    with _DRAWING:
        torch.manual_seed(0)
        return Drawing(**given)


def seeded(step: int) -> dict[str, Any]:
    return {"before_each": functools.partial(seed_leaf, 0, step)}


MORE: dict[str, dict[str, Any]] = {
    "micro-batches": {"stage": 2, "feed": functools.partial(batches, number=3)},
    "each reduced": {
        "stage": 2,
        "feed": functools.partial(batches, number=2),
        "sharding": {"accumulate": "reduced"},
    },
    "virtual ranks": {"stage": 1, "feed": functools.partial(batches, number=2), "virtual_ranks": 4},
    "kept full": {"stage": 3, "sharding": {"reshard_after_forward": False}},
    "no overlap": {"stage": 3, "sharding": {"overlap": False}},
    "no clipping": {"stage": 1, "max_grad_norm": None},
    "one rank, dropout and batch norm": {"stage": 2, "model": drawing, "calls": seeded, "size": 1},
    "state in bf16": {"stage": 2, "precision": zerotrain.PrecisionConfig("bf16", state="bf16")},
    "SGD": {"stage": 0, "optimizer": functools.partial(torch.optim.SGD, lr=RATE, momentum=0.5, fused=True)},
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.thinned(2)
def test_so_do_other_steps(name):
    without, graphed, _ = both(**{"num_steps": 6} | MORE[name])
    assert graphed[:3] == without[:3]
    assert graphed[3:] == (4, [])


def memories(graphs: list[Any]) -> list[int]:
    """The addresses that were there before some graphs were recorded, in the order in which they use them."""
    tensors = [tensor for graph in graphs for _, *tensors in graph for tensor in tensors]
    return list(dict.fromkeys(address for kind, address, *_ in tensors if kind == "memory"))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.thinned(2)
def test_two_recordings_have_the_same_operations_on_the_same_memory(stage):
    """But for three tensors that each has of its own: the inputs, and the norm and factor of the update."""
    listed: list[list[Any]] = []

    def on_a_rank(world: World) -> int:
        def before(engine: Any, step: int) -> None:
            if step in (3, 6):
                listed.append([graph.listed() for graph in clocks().graphs.values()])
                clocks().graphs.clear()
                engine.graphs.forget()

        return train(world, stage, num_steps=7, before=before)[3]

    assert run_on_streams(on_a_rank, 1).results == [2]
    first, second = map(memories, listed)
    places = [place for place, (one, other) in enumerate(zip(first, second, strict=True)) if one != other]
    assert len(places) == 3
    own = {second[place]: first[place] for place in places}
    renamed = [
        [
            (name, *((kind, own.get(address, address), *rest) for kind, address, *rest in tensors))
            for name, *tensors in graph
        ]
        for graph in listed[1]
    ]
    assert renamed == listed[0]
    assert [len(graph) > 10 for graph in renamed] == [True, True]


MOST_TOLD = {0: 52, 1: 53, 2: 53, 3: 52}
"""Kernels and graphs of a replayed step, by stage."""


def a_step(world: World, stage: int, num_blocks: int, graphs: str) -> tuple[int, int, dict[str, int], int]:
    """Buckets; what the host tells the device in the fifth step; its waits; kernels of graphs."""
    counts: list[Any] = []

    def before(engine: Any, step: int) -> None:
        known = clocks()
        counts.append((len(engine.schedule.buckets), +known.kernels, +known.syncs, +known.in_graphs))

    train(world, stage, graphs, model=functools.partial(net, num_blocks=num_blocks), num_steps=6, before=before)
    (_, told, waits, inside), (num_buckets, *after) = counts[4:6]
    return num_buckets, (after[0] - told).total(), after[1] - waits, (after[2] - inside).total()


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
@pytest.mark.thinned(2)
def test_the_host_tells_as_much_for_any_number_of_buckets_and_waits_once(stage):
    few, many = (run_on_streams(lambda world, n=n: a_step(world, stage, n, "auto")).results[0] for n in (2, 8))
    assert (few[0], many[0]) == (2, 8)
    assert few[1] == many[1] <= MOST_TOLD[stage]
    assert few[2] == many[2] == {"event": 1}  # the numbers of the norm have come
    _, told, _, _ = run_on_streams(lambda world: a_step(world, stage, 8, "off")).results[0]
    assert many[3] + many[1] >= told > 3 * many[1]


# ---- ranks, and steps that are none of the graph's


def another_shape(step: int, rank: int) -> list[Any]:
    return batches(step, rank, num_rows=4 if (step, rank) in ((5, 1), (8, 0), (9, 1)) else 8)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_where_one_rank_has_another_step_all_compute_it_without(stage):
    """Once, and the graph stays; twice in a row, and another is recorded."""
    without, graphed, ranks = both(stage=stage, feed=another_shape)
    assert graphed[:2] == without[:2]
    assert graphed[3] == 3 + 2
    assert ranks.results[0][4] == ["the micro-batches of a rank have changed their shapes"]


def test_a_step_computed_anew_counts_in_buffers_once():
    def buffers(world: World, graphs: str) -> list[Any]:
        kept: list[Any] = []

        def before(engine: Any, step: int) -> None:
            kept[:] = [buffer.tolist() for buffer in engine.module.buffers()]

        model = functools.partial(drawing, rate=0.0)
        train(world, 1, graphs, model=model, feed=another_shape, num_steps=8, before=before)
        return kept

    graphed, without = (run_on_streams(functools.partial(buffers, graphs=graphs)).results for graphs in ("auto", "off"))
    assert graphed == without


def uneven(step: int, rank: int) -> list[Any]:
    return batches(step, rank, num_rows=4 * (1 + rank))


def growing(step: int, rank: int) -> list[Any]:
    return batches(step, rank, num_rows=4 + 2 * step)


class Waiting(nn.Module):
    """Looks at its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net(num_blocks=2)
        self.num_large = 0

    @property
    def blocks(self) -> nn.ModuleList:
        return self.inner.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.inner(x)
        self.num_large = int(loss.item() > 100)
        return loss


class Counting(Waiting):
    """Counts its calls on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_large += 1
        return self.inner(x) / self.num_large


def hooked() -> nn.Module:
    model = net(num_blocks=2)
    model.blocks[1].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def averaged(engine: Any, step: int) -> None:
    if step == 1:
        engine.keep_average()


WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "a look at each forward": (
        "train_step(after_each=...) looks at each forward",
        {"calls": lambda step: {"after_each": lambda rank, index, loss, outputs: None}},
    ),
    "a function before each": (
        "train_step(before_each=...) is a function that does not say `only_seeds = True`",
        {"calls": lambda step: {"before_each": lambda rank, index: None}},
    ),
    "a hook": ("blocks.1 has a hook of yours, which the host calls", {"model": hooked}),
    "a look at the loss": (
        "the model lets the host wait for the device in _local_scalar_dense, as .item() does",
        {"model": Waiting},
    ),
    "a count on the host": ("attributes of the model change from step to step", {"model": Counting}),
    "draws on the host": (
        "the model draws random numbers on the host",
        {"model": functools.partial(drawing, on_host=True), "calls": seeded},
    ),
    "draws of several": (
        "the model draws random numbers, seeded for each of several micro-batches",
        {"model": drawing, "calls": seeded, "feed": functools.partial(batches, number=2)},
    ),
    "shapes that grow": ("the shapes of micro-batches change from step to step", {"feed": growing}),
    "shapes by rank": ("the ranks have steps of different shapes", {"feed": uneven, "size": 2}),
    "an average": ("an average of the weights is kept", {"before": averaged}),
    "fp16": ("with precision='fp16' the host changes the scale of the loss", {"precision": "fp16"}),
    "offload": (
        "the host moves what is offloaded",
        {"offload": zerotrain.OffloadConfig(optimizer="cpu"), "stage": 2},
    ),
    "an optimizer of another kind": (
        "the optimizer is none of torch's own with fused=True",
        {"optimizer": functools.partial(torch.optim.AdamW, lr=RATE, foreach=True)},
    ),
    "recomputation": (
        "with activation_checkpointing=True the host keeps the state of random numbers",
        {"activation_checkpointing": True},
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.thinned(3)
def test_what_no_graph_can_be_of_is_computed_without_and_told_once(name):
    reason, given = WITHOUT[name]
    without, graphed, _ = both(**{"stage": 1, "size": 1, "num_steps": MAX_RECORDINGS + 4} | given)
    assert graphed[:3] == without[:3]
    assert graphed[3:] == (0, [reason])


def test_what_cannot_be_recorded_is_computed_without_by_one_rank_and_refused_by_two():
    def once(engine: Any, step: int) -> None:
        """Nothing else of a step sees this."""
        engine.module.blocks[0].forward = functools.partial(_looks, engine.module.blocks[0], step == 2)

    given: dict[str, Any] = {"stage": 1, "num_steps": 5, "before": once}
    without, graphed, _ = both(size=1, **given)
    assert graphed[:2] == without[:2]
    said = "it could not be recorded (RuntimeError: CUDA error: operation not permitted when stream is capturing: "
    assert [reason.startswith(said) for reason in graphed[4]] == [True]
    with pytest.raises(EngineStateError, match=r"could not be recorded as a graph .* the engine with graphs='off'"):
        run_on_streams(lambda world: train(world, **given))


def _looks(block: nn.Module, does: bool, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = type(block).forward(block, x)
    return out * 2 if does and out.sum().item() > 1e9 else out


# ---- what changes behind a graph


def changed(engine: Any, step: int, folder: Path) -> None:
    if step == 3:
        engine.set_stage(2)
    elif step == 6:
        engine.freeze("blocks.0.*")
    elif step == 9:
        engine.save(folder / "saved")
        engine.unfreeze("blocks.0.*")
    elif step == 12:
        engine.load(folder / "saved")
    elif step == 15:
        with torch.no_grad():
            engine.module.blocks[1].scale.clamp_(max=0.99)
    elif step == 17:
        engine.optimizer_step.config.max_grad_norm = 0.01
        engine.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_graph_is_forgotten_where_something_else_is_to_be_computed(size, tmp_path):
    """Of 23 steps each change costs two without; one in place of the weights costs none."""

    def run(world: World, graphs: str) -> Result:
        folder = tmp_path / graphs
        return train(world, 1, graphs, num_steps=23, before=functools.partial(changed, folder=folder))

    without, graphed = (run_on_streams(functools.partial(run, graphs=graphs), size) for graphs in ("off", "auto"))
    assert graphed.faults == []
    assert graphed.results[0][:3] == without.results[0][:3]


def test_a_step_that_is_not_finite_is_skipped_and_the_graph_stays():
    def feed(step: int, rank: int) -> list[Any]:
        return [(inputs * (torch.inf if step in (0, 4) else 1.0),) for (inputs,) in batches(step, rank)]

    without, graphed, _ = both(stage=2, feed=feed, num_steps=8)
    assert graphed[0] == without[0]
    assert graphed[3] == 5  # the first step has begun no state of the optimizer


def test_a_save_beside_replays_is_of_one_step(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    digests: dict[str, list[str]] = {}

    def on_a_rank(world: World, graphs: str) -> str:
        saves: list[Any] = []

        def before(engine: Any, step: int) -> None:
            if step == 4:
                digests.setdefault(graphs, []).append(engine.weights_sha256())
                saves.append(engine.begin_save(tmp_path / graphs, staging_nbytes=2**30))
            elif step == 6:
                disk.let_go(world.rank)

        train(world, 2, graphs, num_steps=7, before=before)
        saves[0].wait()
        return ""

    ranks = run_on_streams(functools.partial(on_a_rank, graphs="auto"))
    assert ranks.faults == []
    loaded = run_on_streams(lambda world: _loaded(world, tmp_path / "auto"))
    assert loaded.results == digests["auto"]


def _loaded(world: World, folder: Path) -> str:
    engine = build(world, 2, net(num_blocks=2))
    engine.load(folder)
    return engine.weights_sha256()


# ---- faults, each planted into one method


PLANTED: dict[str, tuple[Planted, dict[str, Any]]] = {
    "the rate is recorded as a number": (
        Planted(ParamGroups, "show_hyperparameters", 'self.rates[group["name"]]', 'group["lr"]', "", "other bits"),
        {"stage": 2},
    ),
    "an event is asked": (
        Planted(Handle, "is_done", "self._journal.recorded is None and ", "", "", "a collective is asked"),
        {"stage": 2},
    ),
    "the life of a bucket is not brought about": (
        Planted(BucketGradient, "follow_graph", "self.life.become", "str", "", "step came before a backward"),
        {"stage": 2},
    ),
    "a graph is kept behind a change": (
        Planted(StepGraphs, "forget", "self._drop()", "self.key or self._drop()", "", "other bits"),
        {"stage": 1, "before": lambda engine, step: step == 4 and engine.freeze("blocks.0.*")},
    ),
    "a graph is kept for another key": (
        Planted(StepGraphs, "train_step", "tensors if key == self.key else None", "tensors", "", "other bits"),
        {
            "stage": 1,
            "before": lambda engine, step: engine.param_groups[0].update(weight_decay=0.1 + step // 4),
        },
    ),
    "a rank with another key does not tell": (
        Planted(StepGraphs, "_replayed", "CANNOT_REPLAY if tensors is None else ", "", "", "other bits"),
        {"stage": 0, "feed": another_shape},
    ),
    "ranks do not agree before they record": (
        Planted(StepGraphs, "_without", "wish and any(other", "False and any(other", "", "in a graph"),
        {"stage": 0, "feed": lambda step, rank: batches(step, rank, num_rows=4 + step * rank)},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    fault, given = PLANTED[name]
    with fault.planted():
        assert fault.says in found(**{"size": 2} | given)


def found(size: int, **given: Any) -> str:
    """What is wrong with 8 steps, in words."""
    try:
        without, graphed = (
            run_on_streams(functools.partial(train, graphs=graphs, num_steps=8, **given), size)
            for graphs in ("off", "auto")
        )
    except Exception as error:
        return str(error)
    told = [reason for result in graphed.results for reason in result[4]]
    is_other = graphed.results[0][:2] != without.results[0][:2]
    return "; ".join([*graphed.faults, *told, *(["other bits"] if is_other else [])])
