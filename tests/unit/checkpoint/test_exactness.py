"""After loading, training goes on to the bits of the run that never stopped; what else an engine has comes back too."""

import functools
import itertools
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import ADAMW, KINDS, MOMENTUM, Kind, Matrices, build, counted, held, joined, train
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.errors import CheckpointError, ConfigError, EngineStateError

SHARED = [((stage, size), (3 - stage, other)) for stage in range(4) for size, other in ((1, 4), (4, 2), (2, 1))]


def train_virtually(engine: zerotrain.ZeroEngine, *steps: int) -> None:
    """Each of four virtual ranks has data of its own, and two micro-batches."""
    for step in steps:
        for number in engine.each_virtual_rank():
            for index in range(2):
                generator = torch.Generator().manual_seed(100 * step + 10 * number + index)
                loss = engine(torch.randint(37, (9,), generator=generator))
                if index == 0:
                    with engine.no_sync():
                        engine.backward(loss, weight=0.5)
                else:
                    engine.backward(loss, weight=0.5)
        engine.step()


@pytest.mark.case(
    "checkpoints",
    "training goes on after a load, with as many virtual ranks",
    "same bits as the run that never stopped",
)
@pytest.mark.parametrize(("index", "saving", "loading"), [(i, *pair) for i, pair in enumerate(SHARED)], ids=str)
@pytest.mark.thinned(2)
def test_a_run_goes_on_at_any_placement_to_the_bits_of_the_one_that_never_stopped(
    index: int, saving: tuple[int, int], loading: tuple[int, int], tmp_path: Path
) -> None:
    kind = KINDS["Muon and AdamW, bf16"] if index % 2 else Kind(Matrices, ADAMW)

    def undisturbed(world: zerotrain.World) -> str:
        engine = build(world, kind, saving[0], virtual_ranks=4)
        train_virtually(engine, 0, 1)
        engine.save(tmp_path / "step")
        train_virtually(engine, 2, 3)
        return engine.weights_sha256()

    def resumed(world: zerotrain.World) -> str:
        engine = build(world, kind, loading[0], seed=1, virtual_ranks=4, bucket_mb=0.002)
        engine.load(tmp_path / "step")
        train_virtually(engine, 2, 3)
        return engine.weights_sha256()

    expected, _ = run_threads(undisturbed, saving[1])
    found, _ = run_threads(resumed, loading[1])
    assert {*expected, *found} == {expected[0]}


@pytest.mark.case(
    "checkpoints",
    "parameters frozen, unfrozen or added in mid-run before the save",
    "they are so after the load; same bits",
)
@pytest.mark.parametrize("stage", range(4))
def test_what_was_frozen_unfrozen_and_added_in_mid_run_comes_back(stage: int, tmp_path: Path) -> None:
    kind = Kind(Matrices, MOMENTUM)
    groups = [{"params": ["blocks.*", "output.*"], "weight_decay": 0.1}]

    def engine_of(world: zerotrain.World, seed: int, stage: int) -> zerotrain.ZeroEngine:
        model = Matrices()
        model.load_state_dict(joined_weights[seed])
        model.embedding.requires_grad_(False)
        return zerotrain.build_engine(
            model,
            optimizer=kind.optimizer,
            param_groups=groups,
            zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.003, reduction="ordered"),
            world=world,
        )

    joined_weights = [Matrices().state_dict(), Matrices().state_dict()]

    def undisturbed(world: zerotrain.World) -> Any:
        engine = engine_of(world, 0, stage)
        train(engine, 0, 1)
        engine.freeze("blocks.0.*", "blocks.1.bias")
        train(engine, 2)
        engine.unfreeze("blocks.0.weight")
        engine.add_param_group({"params": ["embedding.*"], "name": "late", "lr": 0.01, "momentum": 0.5})
        train(engine, 3)
        engine.save(tmp_path / "step")
        before = held(engine), counted(engine)["places"]
        train(engine, 4)
        return *before, engine.weights_sha256()

    def resumed(world: zerotrain.World) -> Any:
        engine = engine_of(world, 1, 3 - stage)
        engine.load(tmp_path / "step")
        before = held(engine), counted(engine)["places"]
        assert [group["name"] for group in engine.optimizer.param_groups] == ["group 0", "late"]
        train(engine, 4)
        return *before, engine.weights_sha256()

    expected, _ = run_threads(undisturbed, 2)
    found, _ = run_threads(resumed, 4)
    assert joined([each[0] for each in expected]).keys() == joined([each[0] for each in found]).keys()
    assert {each[2] for each in (*expected, *found)} == {expected[0][2]}
    assert found[0][1] == expected[0][1]


@pytest.mark.case(
    "checkpoints", "buffers that differ between ranks", "each rank's own where as many load; otherwise rank 0's"
)
@pytest.mark.parametrize("stage", [0, 3])
def test_ranks_whose_buffers_differ_get_each_its_own_and_other_numbers_of_ranks_those_of_rank_0(
    stage: int, tmp_path: Path
) -> None:
    kind = KINDS["hard parameters, AdamW"]

    def save(world: zerotrain.World) -> torch.Tensor:
        engine = build(world, kind, stage)
        generator = torch.Generator().manual_seed(world.rank)
        engine.backward(engine(torch.randint(37, (9,), generator=generator)))
        engine.step()
        engine.save(tmp_path / "step")
        return engine.module.norm.running_mean.clone()

    def load(world: zerotrain.World) -> torch.Tensor:
        engine = build(world, kind, stage, seed=1)
        engine.load(tmp_path / "step")
        return engine.module.norm.running_mean.clone()

    saved, _ = run_threads(save, 3)
    assert not torch.equal(saved[0], saved[1])
    assert all(map(torch.equal, run_threads(load, 3)[0], saved))
    assert all(torch.equal(each, saved[0]) for each in run_threads(load, 2)[0])


@pytest.mark.case(
    "checkpoints",
    "learning rate as a tensor, schedules, hyperparameters changed in mid-run",
    "come back; `fused`, `foreach`, `capturable` stay what the engine was built with",
)
def test_a_learning_rate_that_is_a_tensor_a_schedule_and_other_hyperparameters_come_back(tmp_path: Path) -> None:
    def optimizer() -> Any:
        return functools.partial(torch.optim.AdamW, lr=torch.tensor(0.05), betas=(0.8, 0.9))

    def save(world: zerotrain.World) -> list[dict[str, Any]]:
        engine = build(world, Kind(Matrices, optimizer()), 1)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        engine.param_groups[0]["weight_decay"] = 0.25
        for step in range(2):
            train(engine, step)
            scheduler.step()
        engine.save(tmp_path / "step", extra={"epoch": scheduler.last_epoch})
        return [{**group, "initial_lr": group["initial_lr"]} for group in engine.param_groups]

    def load(world: zerotrain.World) -> list[dict[str, Any]]:
        engine = build(world, Kind(Matrices, optimizer()), 2, seed=1)
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)
        scheduler.last_epoch = engine.load(tmp_path / "step")["epoch"]
        assert isinstance(engine.param_groups[0]["lr"], torch.Tensor)
        assert engine.param_groups[0]["betas"] == (0.8, 0.9)
        assert scheduler.last_epoch == 2
        return [{**group, "initial_lr": group["initial_lr"]} for group in engine.param_groups]

    (saved, _), _ = run_threads(save, 2)
    (loaded,), _ = run_threads(load, 1)
    assert saved == loaded
    assert float(loaded[0]["lr"]) == pytest.approx(0.0005)


@pytest.mark.case("checkpoints", "another precision", "takes up the master weights")
@pytest.mark.parametrize(("saving", "loading"), list(itertools.permutations(["fp32", "bf16", "fp16"], 2)))
def test_another_precision_takes_up_the_master_weights(saving: str, loading: str, tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> str:
        engine = build(world, Kind(Matrices, precision=saving), 2)
        train(engine, 0, 1)
        engine.save(tmp_path / "step")
        return engine.weights_sha256()

    def load(world: zerotrain.World) -> str:
        engine = build(world, Kind(Matrices, precision=loading), 3, seed=1)
        engine.load(tmp_path / "step")
        return engine.weights_sha256()

    assert {*run_threads(save, 2)[0]} == {*run_threads(load, 3)[0]}


@pytest.mark.case(
    "checkpoints",
    "an engine that has trained loads an older one; one that has not is saved",
    "as if the steps between had not been",
)
@pytest.mark.parametrize("stage", range(4))
def test_an_engine_that_has_trained_goes_back_and_one_that_has_not_can_be_saved(stage: int, tmp_path: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices, ADAMW), stage)
        engine.save(tmp_path / "untrained")
        train(engine, 0, 1)
        once = engine.weights_sha256()
        engine.load(tmp_path / "untrained")
        assert engine.stamps.num_steps == 0
        train(engine, 0, 1)
        assert engine.weights_sha256() == once

    run_threads(on_a_rank, 2)


@pytest.mark.case("checkpoints", "weights written in place before the save", "saved")
@pytest.mark.parametrize("stage", range(3))
def test_weights_written_in_place_are_saved(stage: int, tmp_path: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices, precision="bf16"), stage)
        train(engine, 0)
        with torch.no_grad(), engine.forward_scope():
            engine.module.output.weight.fill_(0.5)
        engine.save(tmp_path / "step")
        train(engine, 1)
        engine.load(tmp_path / "step")
        state = engine.full_state_dict()
        assert world.rank != 0 or (state["output.weight"] == 0.5).all()

    run_threads(on_a_rank, 2)


class Recurrent(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.case("checkpoints", "a graph from before the load", "refused by PyTorch itself; detached it trains")
@pytest.mark.parametrize("stage", range(4))
def test_a_graph_from_before_a_load_is_refused_by_pytorch_itself(stage: int, tmp_path: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Recurrent, ADAMW), stage)
        engine.save(tmp_path / "step")
        state = engine(torch.ones(3, 8))
        engine.load(tmp_path / "step")
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            engine.backward(engine(state).square().mean())
        engine.backward(engine(state.detach()).square().mean())
        engine.step()

    run_threads(on_a_rank, 2)


@pytest.mark.case("checkpoints", "save or load in the midst of a step", "refused")
def test_in_the_midst_of_a_step_nothing_is_saved_or_loaded(tmp_path: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        engine.save(tmp_path / "step")
        tokens = torch.arange(9)
        with engine.no_sync():
            engine.backward(engine(tokens))
        for call in (lambda: engine.save(tmp_path / "other"), lambda: engine.load(tmp_path / "step")):
            with pytest.raises(EngineStateError, match=r"while a gradient waits; call engine\.step\(\) first"):
                call()
        engine.backward(engine(tokens))
        engine.step()
        with engine.forward_scope(), pytest.raises(EngineStateError, match="during a forward"):
            engine.save(tmp_path / "other")
        assert not (tmp_path / "other").exists()

    run_threads(on_a_rank, 2)


@pytest.mark.case(
    "checkpoints", "`extra` that JSON would change, or that differs between ranks", "refused, the place named"
)
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"generator": torch.zeros(3)}, r"extra\['generator'\] is of type Tensor"),
        ([1, (2, 3)], r"extra\[1\] is of type tuple"),
        ({1: 2}, "extra has the key 1; keys must be texts"),
    ],
    ids=["tensor", "tuple", "number as key"],
)
def test_what_json_would_change_is_refused_and_what_differs_between_ranks(
    extra: Any, said: str, tmp_path: Path
) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        with pytest.raises(ConfigError, match=said):
            engine.save(tmp_path / "step", extra=extra)
        with pytest.raises(
            ConfigError, match=r"engine.save: extra differs between the ranks: .* on rank 0, .* on rank 1"
        ):
            engine.save(tmp_path / "step", extra={"rank": world.rank})

    run_threads(on_a_rank, 2)
    assert list(tmp_path.iterdir()) == []


def test_each_rank_reads_its_share_to_verify_and_then_its_own_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))

    kind = Kind(Wide, functools.partial(torch.optim.SGD, lr=0.1))
    run_threads(lambda world: build(world, kind, 3, bucket_mb=4).save(tmp_path / "step"), 1)
    nbytes = (tmp_path / "step" / "rank-00000.safetensors").stat().st_size
    assert nbytes > 2**24
    read: dict[int, int] = {}
    real = os.preadv

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        count = real(descriptor, buffers, offset)
        thread = threading.get_ident()
        read[thread] = read.get(thread, 0) + count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    run_threads(lambda world: build(world, kind, 3, bucket_mb=4).load(tmp_path / "step"), 4)
    # A quarter to verify and a quarter that is its own; blocks of 1 MiB at the border of each of four buckets beside.
    assert max(read.values()) <= nbytes // 2 + 5 * 2**20


@pytest.mark.case(
    "checkpoints", "another model, optimizer or grouping", "refused on all ranks, with the names; nothing has changed"
)
def test_another_model_or_optimizer_is_refused_on_all_ranks_before_anything_has_changed(tmp_path: Path) -> None:
    class Longer(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.more = torch.nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros(2))

    class Other(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.output = torch.nn.Linear(32, 41)

    class Turned(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.output.weight = torch.nn.Parameter(self.output.weight.detach().t().contiguous().t())

    class Tied(Matrices):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].bias = self.blocks[0].bias

    def save(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        train(engine, 0)
        engine.save(tmp_path / "step")
        longer = build(world, Kind(Longer), 2)
        longer.save(tmp_path / "longer")

    run_threads(save, 2)
    cases = [
        ("step", Kind(Longer), r"it lacks more\.weight, more\.bias\n\S+ does not fit the engine: it lacks seen$"),
        ("longer", Kind(Matrices), r"the model has no more\.weight, more\.bias"),
        ("step", Kind(Other), r"output\.weight is of shape \(37, 32\) in it, and of shape \(41, 32\) in the"),
        (
            "step",
            Kind(Turned),
            r"output\.weight lies in memory with strides \(32, 1\), and the model's with \(1, 37\); build the",
        ),
        ("step", Kind(Tied), r"blocks\.0\.bias is tied as \['blocks\.0\.bias'\], and the model's as"),
        ("step", Kind(Matrices, MOMENTUM), "its optimizer is AdamW, and the engine's SGD"),
        ("step", KINDS["Muon and AdamW"], r"its parameter groups are \['parameters'\], and the engine's"),
    ]
    for name, kind, said in cases:

        def load(world: zerotrain.World, name: str = name, kind: Kind = kind, said: str = said) -> None:
            engine = build(world, kind, 3)
            before = engine.weights_sha256()
            with pytest.raises(CheckpointError, match=said):
                engine.load(tmp_path / name)
            assert engine.weights_sha256() == before
            assert engine.stamps.num_steps == 0

        run_threads(load, 2)


def test_the_stride_of_a_dimension_of_one_means_nothing(tmp_path: Path) -> None:
    def engine_of(memory_format: torch.memory_format) -> zerotrain.ZeroEngine:
        model = torch.nn.Conv2d(1, 4, 3).to(memory_format=memory_format)
        return zerotrain.build_engine(model, optimizer=functools.partial(torch.optim.SGD, lr=0.1))

    saving, loading = engine_of(torch.contiguous_format), engine_of(torch.channels_last)
    assert saving.module.weight.stride() != loading.module.weight.stride()
    saving.save(tmp_path / "step")
    loading.load(tmp_path / "step")
    assert torch.equal(saving.module.weight, loading.module.weight)


class Counting(torch.nn.Linear):
    """Keeps something beside its tensors."""

    def __init__(self) -> None:
        super().__init__(37, 37)
        self.seen: Any = {"texts": ["a"], "number": 0}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


class WithExtraState(Matrices):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counting()
        self.table = Counting()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) + self.table(self.counts.weight).mean()


@pytest.mark.case(
    "checkpoints",
    "`get_extra_state` of modules: a tensor, or what JSON can hold",
    "rank 0's comes back to all, as it was at the begin; anything else is refused, named",
)
@pytest.mark.parametrize(("saving", "loading"), [(2, 3), (3, 1)])
def test_what_modules_keep_as_extra_state_comes_back_rank_0s_to_all_and_what_cannot_be_saved_is_refused(
    saving: int, loading: int, tmp_path: Path
) -> None:
    kind = Kind(WithExtraState)

    def save(world: zerotrain.World) -> None:
        engine = build(world, kind, saving)
        train(engine, 0)
        engine.module.counts.seen = {"texts": ["b"], "number": 7 + world.rank}
        engine.module.table.seen = torch.arange(6, dtype=torch.int16).view(2, 3) + world.rank
        extra, own, config = {"rows": [27]}, {"rank": [world.rank]}, {"model": {"layers": 2}}
        under_way = engine.begin_save(tmp_path / "step", extra=extra, own=own, config=config)
        extra["rows"][0] = own["rank"][0] = config["model"]["layers"] = 8
        engine.module.counts.seen["number"] = 0
        engine.module.table.seen.zero_()
        content = read_manifest(under_way.wait()).content
        assert (content["extra"], content["own"]) == ({"rows": [27]}, [{"rank": [0]}, {"rank": [1]}])
        assert content["config"] == {"model": {"layers": 2}}
        if world.rank == 1:
            engine.module.counts.seen = (1, 2)
        with pytest.raises(
            ConfigError, match=r"refused failed, rank 1: .*: counts\._extra_state is of type tuple; it may hold dicts"
        ):
            engine.save(tmp_path / "refused")
        build(world, Kind(Matrices), saving).save(tmp_path / "without")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step", "without"]

    def load(world: zerotrain.World) -> Any:
        engine = build(world, kind, loading, seed=1)
        engine.load(tmp_path / "step")
        with pytest.raises(CheckpointError, match=r"it lacks counts\._extra_state, table\._extra_state"):
            engine.load(tmp_path / "without")
        return engine.module.counts.seen, engine.module.table.seen

    run_threads(save, 2)
    for counts, table in run_threads(load, 3)[0]:
        assert counts == {"texts": ["b"], "number": 7}
        assert table.dtype == torch.int16
        assert torch.equal(table, torch.arange(6, dtype=torch.int16).view(2, 3))
