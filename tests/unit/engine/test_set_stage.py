"""The stage changes between two steps, and nothing of what is trained does. With threads as ranks."""

import re
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import (
    ADAMW,
    KINDS,
    Kind,
    Matrices,
    assert_same_counts,
    assert_same_state,
    build,
    counted,
    held,
    joined,
    train,
)
from tests.unit.engine.groups.own_optimizers import Momentum
from tests.unit.engine.habits import SGD, Net
from tests.unit.engine.parts import on_ranks, seeded
from zerotrain.errors import ConfigError, EngineStateError

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
def test_the_stage_changes_in_mid_run_and_the_bits_do_not(kind, size):
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


def held_storages(engine: zerotrain.ZeroEngine) -> int:
    """Bytes of all memory behind master weights and optimizer state, also where no more than a part is in use."""
    updates = [bucket.update for bucket in engine.schedule.trained]
    tensors = [tensor for update in updates for tensor in (update.master_weight, *update.state_tensors())]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["hard parameters, AdamW", "hard parameters, bf16, momentum"])
def test_a_rank_gives_back_the_memory_of_what_it_holds_no_more(kind, stage):
    def on_a_rank(world: zerotrain.World, first: int) -> int:
        engine = build(world, KINDS[kind], first)
        train(engine, 0)
        if first != stage:
            engine.set_stage(stage)
        return held_storages(engine)

    changed, _ = run_threads(lambda world: on_a_rank(world, 0), 2)
    assert changed == run_threads(lambda world: on_a_rank(world, stage), 2)[0]


@pytest.mark.case("stages", "weights written in place before it", "stay written")
def test_weights_written_in_place_before_it_stay_written():
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
def test_the_parameters_of_a_model_that_was_saved_or_loaded_can_be_sharded(stage, tmp_path):
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


# ---- what users have around an engine whose stage changes


Seen = list[tuple[str, Any]]


def followed(seen: Seen) -> nn.Module:
    """A model with a parametrization, whose forwards, backwards and gradients are looked at."""

    def make() -> nn.Module:
        made = Net()
        weight_norm(made.blocks[0])
        return made

    model = seeded(make)
    model.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(("input", given[0].detach().clone())))
    model.blocks[1].register_forward_hook(lambda _, __, output: seen.append(("output", output.detach().clone())))
    model.blocks[2].register_full_backward_hook(lambda _, inner, __: seen.append(("backward", inner[0].clone())))
    weight, bias = model.blocks[1].weight, model.first.bias
    weight.register_hook(lambda gradient: seen.append(("gradient", gradient.clone())))
    bias.register_post_accumulate_grad_hook(lambda each: seen.append(("accumulated", each.grad.clone())))
    return model


def life(world: zerotrain.World, precision: str, stages: tuple[int, ...]) -> Seen:
    """A loop of one's own, of as many steps as stages."""
    seen: Seen = []
    model = followed(seen)
    engine = zerotrain.build_engine(
        model,
        optimizer=Momentum,
        zero=zerotrain.ZeroConfig(stage=stages[0], bucket_mb=0.0005, reduction="ordered", units=["blocks.*"]),
        precision=precision,
        max_grad_norm=0.5,
        activation_checkpointing=precision == "bf16",
        world=world,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(engine.optimizer, T_max=len(stages))
    kept, weak = dict(model.named_parameters()), {name: weakref.ref(p) for name, p in model.named_parameters()}
    kept["last.bias"].marked = "mine"
    model.last.weight.register_hook(lambda gradient: seen.append(("after the build", gradient.clone())))
    with torch.no_grad(), engine.forward_scope():
        average = AveragedModel(engine.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for step, stage in enumerate(stages):
        engine.set_stage(stage)
        seen.append(("gradients between steps", [parameter.grad for parameter in kept.values()]))
        for number in (0, 1):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + 10 * number + world.rank))
            loss = engine(x).float().square().mean() / 2
            if number:
                engine.backward(loss)
                continue
            with engine.no_sync():
                engine.backward(loss)
        seen.append(("norm", engine.step().grad_norm))
        scheduler.step()
        seen.append(("rate", engine.param_groups[0]["lr"]))
        with torch.no_grad(), engine.forward_scope():
            average.update_parameters(engine.module)
            seen.append(("kept", {name: parameter.detach().clone() for name, parameter in kept.items()}))
            seen.append(("state", {name: value.clone() for name, value in engine.module.state_dict().items()}))
        seen.append(("average", [parameter.clone() for parameter in average.parameters()]))
        seen.append(("full", engine.full_state_dict()))
        assert all(each() is kept[name] is engine.module.get_parameter(name) for name, each in weak.items())
        assert engine.module.get_parameter("last.bias").marked == "mine"
    return seen


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.case(
    "stages",
    "hooks on modules and gradients from before or behind the build, `p.grad` in and between "
    "steps, weak references, attributes on parameters, a parametrization, an optimizer of your "
    "own, `AveragedModel`, `module.state_dict()`; accumulation, checkpointed activations",
    "all of it as at a fixed stage, bit for bit",
)
@pytest.mark.case("stages", "parameters, hooks on them and torch's schedulers from before", "go on")
@pytest.mark.filterwarnings("error::UserWarning:zerotrain")
@pytest.mark.parametrize(("size", "precision"), [(1, "fp32"), (2, "bf16"), (3, "fp32")])
def test_what_users_hook_hold_and_follow_is_what_it_is_at_a_fixed_stage(size, precision):
    changing, _ = run_threads(lambda world: life(world, precision, ROUND), size, late_rank=size - 1)
    fixed, _ = run_threads(lambda world: life(world, precision, (1,) * len(ROUND)), size)
    for rank in range(size):
        assert [name for name, _ in changing[rank]] == [name for name, _ in fixed[rank]]
        names = {name for (name, got), (_, wanted) in zip(changing[rank], fixed[rank], strict=True)}
        assert len(names) == 12
        for (name, got), (_, wanted) in zip(changing[rank], fixed[rank], strict=True):
            assert same(got, wanted), name


@pytest.mark.case(
    "stages",
    "`p.data`, `p.detach()` or a state dict from before",
    "at stages 0 to 2 the parameter's own memory goes on; a change to 3 leaves such a tensor the "
    "values of then, and its memory to it, which a warning says",
)
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(1)
def test_a_tensor_taken_from_a_parameter_goes_on_until_the_parameters_are_sharded_and_then_stays(
    world, precision, tmp_path
):
    """Behind a change from stage 2 to 3 the next look at a `p.data` from before died of SIGSEGV; behind a save one from
    0 to 1 left it behind without a word (2026-11-22)."""
    engine = build(world, Kind(precision=precision), 2)
    train(engine, 0)
    parameter = engine.module.blocks[0].weight
    taken = parameter.data
    engine.save(tmp_path / precision)
    for stage in (0, 1, 2):
        engine.set_stage(stage)
        train(engine, 1)
        with torch.no_grad(), engine.forward_scope():
            assert torch.equal(taken, parameter)
            assert taken.data_ptr() == parameter.data_ptr()
    before = taken.clone()
    with pytest.warns(UserWarning, match=re.escape("still in use by a tensor taken from them before (p.data")):
        engine.set_stage(3)
    train(engine, 2)
    assert torch.equal(taken, before)
    engine.set_stage(1)
    train(engine, 3)
    with torch.no_grad(), engine.forward_scope():
        assert not torch.equal(taken, parameter)
        assert not torch.equal(before, parameter)
    del taken
    engine.set_stage(3)  # a warning would be an error


def refused(attempt: Callable[[], Any], kind: type[Exception] = EngineStateError) -> str:
    with pytest.raises(kind) as error:
        attempt()
    return str(error.value)


def batch() -> torch.Tensor:
    return torch.arange(9)


def in_a_hook(engine: zerotrain.ZeroEngine) -> str:
    handle = engine.module.blocks[0].register_forward_hook(lambda *_: engine.set_stage(3))
    try:
        return refused(lambda: engine(batch()))
    finally:
        handle.remove()


def in_a_hook_on_a_gradient(engine: zerotrain.ZeroEngine) -> str:
    handle = engine.module.blocks[0].weight.register_hook(lambda _: engine.set_stage(3) and None)
    try:
        return refused(lambda: engine.backward(engine(batch())))
    finally:
        handle.remove()


def in_a_scope(engine: zerotrain.ZeroEngine) -> str:
    with engine.forward_scope():
        return refused(lambda: engine.set_stage(3))


def while_it_accumulates(engine: zerotrain.ZeroEngine) -> str:
    with engine.no_sync():
        engine.backward(engine(batch()))
        within = refused(lambda: engine.set_stage(3))
    assert refused(lambda: engine.set_stage(3)) == within
    engine.zero_grad()
    return within


def between_a_backward_and_its_step(engine: zerotrain.ZeroEngine) -> str:
    engine.backward(engine(batch()))
    said = refused(lambda: engine.set_stage(3))
    engine.zero_grad()
    return said


def between_two_virtual_ranks(engine: zerotrain.ZeroEngine) -> str:
    for number in engine.each_virtual_rank():
        if number % 2:
            said = refused(lambda: engine.set_stage(3))
        engine.backward(engine(batch()))
    engine.zero_grad()
    return said


WITHIN_A_STEP: dict[Callable[[zerotrain.ZeroEngine], str], str] = {
    in_a_hook: "the stage cannot change during a forward; call it between two steps",
    in_a_hook_on_a_gradient: "the stage cannot change during a backward; call it between two steps",
    in_a_scope: "the stage cannot change during a forward; call it between two steps",
    while_it_accumulates: "the stage cannot change while a gradient waits; call engine.step() first",
    between_a_backward_and_its_step: "the stage cannot change while a gradient waits; call engine.step() first",
    between_two_virtual_ranks: "the stage cannot change while a gradient waits; call engine.step() first",
}


@pytest.mark.case(
    "stages",
    "in a forward, a `forward_scope` or a hook on a gradient, between micro-batches (in "
    "`no_sync`, or each reduced), virtual ranks, or a backward and its step",
    "refused; the step goes on, or the next works",
)
@pytest.mark.parametrize(
    ("attempt", "size", "accumulate"),
    [(each, size, "local") for each in WITHIN_A_STEP for size in (1, 2)] + [(while_it_accumulates, 2, "reduced")],
)
@pytest.mark.thinned(3)
def test_within_a_step_it_is_refused_and_the_next_step_works(attempt, size, accumulate):
    in_leaves = attempt is between_two_virtual_ranks

    def built(world: zerotrain.World) -> zerotrain.ZeroEngine:
        return zerotrain.build_engine(
            seeded(Matrices),
            optimizer=ADAMW,
            zero=zerotrain.ZeroConfig(stage=2, bucket_mb=0.004, reduction="ordered", accumulate=accumulate),
            virtual_ranks=2 * size if in_leaves else None,
            world=world,
        )

    def step(engine: zerotrain.ZeroEngine) -> None:
        engine.train_step([(batch(),)] * 2)

    def on_a_rank(world: zerotrain.World, tries: bool) -> tuple[str, int]:
        engine = built(world)
        step(engine)
        if tries:
            assert attempt(engine) == WITHIN_A_STEP[attempt]
        step(engine)
        stage = engine.options.zero.stage
        engine.set_stage(3)
        step(engine)
        return engine.weights_sha256(), stage

    trying, _ = run_threads(lambda world: on_a_rank(world, True), size, late_rank=0)
    wanted, _ = run_threads(lambda world: on_a_rank(world, False), size)
    assert trying == wanted


@pytest.mark.case("stages", "a backward of a loss from before", "refused")
@pytest.mark.parametrize(("before", "after"), [(0, 3), (2, 0), (2, 3), (3, 1)])
def test_a_loss_from_before_it_is_refused(before, after):
    def on_a_rank(world: zerotrain.World) -> str:
        engine = build(world, Kind(Matrices), before)
        train(engine, 0)
        loss = engine(batch())
        engine.set_stage(after)
        said = refused(lambda: engine.backward(loss))
        train(engine, 1)
        return said

    for said in run_threads(on_a_rank, 2)[0]:
        assert "or before a change of what trains or of the stage" in said


@pytest.mark.case("stages", '`True`, `1.0`, `"3"`, 4, a tensor', "refused; nothing has changed")
@pytest.mark.parametrize("size", [1, 2])
@on_ranks()
def test_what_is_no_stage_is_refused(world, size):
    """True was taken for 1, torch.tensor(3) for itself; 1.0 was a TypeError (2026-11-22)."""
    engine = build(world, Kind(Matrices), 2)
    for asked in (4, -1, 2**70, True, 1.0, 1.5, float("nan"), "3", None, [3], torch.tensor(3)):
        said = refused(partial(engine.set_stage, asked), ConfigError)
        shown = repr(asked) if isinstance(asked, str) else str(asked)
        assert said == f"stage: got {shown}; it must be 0, 1, 2 or 3; the default is 2"
        assert engine.options.zero.stage == 2
    train(engine, 0)


@pytest.mark.case(
    "stages",
    "another stage on another rank, though it be none",
    "an error on all ranks names both; nothing has changed",
)
@pytest.mark.parametrize("of_rank_1", [0, 4, None])
def test_ranks_that_ask_for_different_stages_are_told_also_where_one_of_them_is_none(of_rank_1):
    """One rank alone refused a 4, and the other waited for it (2026-11-22)."""

    def on_a_rank(world: zerotrain.World) -> str:
        engine = build(world, Kind(Matrices), 2)
        said = refused(lambda: engine.set_stage(of_rank_1 if world.rank else 3), ConfigError)
        train(engine, 0)
        assert engine.options.zero.stage == 2
        return said

    for said in run_threads(on_a_rank, 2)[0]:
        assert said == (
            f"engine.set_stage: differs between the ranks: 3 on rank 0, {of_rank_1} on rank 1; give all ranks the same"
        )


@pytest.mark.case("stages", "the stage it has", "nothing is moved or sent")
def test_the_stage_it_has_already_is_no_change():
    """At stage 3 all weights were gathered for it (2026-11-22)."""

    def on_a_rank(world: zerotrain.World) -> zerotrain.StageSwitch:
        engine = build(world, Kind(Matrices), 3)
        train(engine, 0)
        buckets = engine.schedule.buckets
        switch = engine.set_stage(3)
        assert engine.schedule.buckets is buckets
        train(engine, 1)
        return switch

    assert run_threads(on_a_rank, 2)[0] == [zerotrain.StageSwitch(3, sent_nbytes=0, theory_sent_nbytes=0)] * 2


@pytest.mark.case("stages", "a save is under way", "it is waited for; the checkpoint has the state at its begin")
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(("before", "after"), [(0, 3), (2, 0), (3, 0)])
@on_ranks(2, late_rank=1)
def test_a_save_under_way_has_the_state_at_its_begin(world, before, after, tmp_path):
    engine = build(world, Kind(), before)
    train(engine, 0, of_rank=world.rank)
    sha256 = engine.weights_sha256()
    save = engine.begin_save(tmp_path / "first")
    engine.set_stage(after)
    train(engine, 1, of_rank=world.rank)
    save.wait()
    wanted = engine.weights_sha256()
    again = build(world, Kind(), 1, seed=1)
    again.load(tmp_path / "first")
    assert again.weights_sha256() == sha256
    train(again, 1, of_rank=world.rank)
    assert again.weights_sha256() == wanted


# ---- the bytes that it says it sends, and does


FROZEN, TRAINED = 256 * 256, 64 * 64


class Adapted(nn.Module):
    """A frozen matrix, and a trained one beside it; shards of two ranks and of four have no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Linear(256, 256, bias=False), nn.Linear(64, 64, bias=False)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x)[:, :64]).square().mean()


@pytest.mark.case(
    "stages", "bytes it sends", "those of state that was sharded and becomes full; none without such state"
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("precision", "optimizer", "each_trained"),
    [("fp32", SGD, 0), ("bf16", SGD, 4), ("fp32", partial(SGD, momentum=0.9), 4)],
    ids=["SGD", "bf16", "momentum"],
)
def test_a_change_of_the_stage_sends_what_it_says(precision, optimizer, each_trained, size):
    """`each_trained`: bytes of an element that the optimizer keeps and the change to stage 0 moves."""

    def on_a_rank(world: zerotrain.World) -> list[zerotrain.StageSwitch]:
        zero = zerotrain.ZeroConfig(stage=3)
        engine = zerotrain.build_engine(Adapted(), optimizer=optimizer, precision=precision, zero=zero, world=world)
        engine.backward(engine(torch.ones(1, 256)))
        engine.step()
        return [engine.set_stage(stage) for stage in (2, 3, 0)]

    itemsize = 4 if precision == "fp32" else 2
    weights = (FROZEN + TRAINED) * itemsize
    theory = [nbytes * (size - 1) // size for nbytes in (weights, 0, weights + TRAINED * each_trained)]
    for switches in run_threads(on_a_rank, size)[0]:
        assert [each.theory_sent_nbytes for each in switches] == theory
        assert all(0 <= each.sent_nbytes - each.theory_sent_nbytes < 1000 for each in switches)
