"""Every way to call the engine gives the bits of plain PyTorch at every stage and leaves nothing behind."""

import functools
import gc
import traceback
import weakref
from dataclasses import dataclass
from typing import Any

import calls
import pytest
import torch
from cases import StagesOf, be_late, place, run_over, sha256
from torch.utils.checkpoint import checkpoint

import zerotrain

CASE_ROWS = (
    "calls: Calls",
    """
Loss computed outside the model; several losses added up | same bits | loss outside the model; two losses, one
    backward
Several losses, a backward each, the first in `no_sync` | same bits | two losses, two backwards
`retain_graph=True`, two backwards reduced one by one | same bits as gradients summed over ranks backward by
    backward | retain_graph, both reduced; retain_graph, unannounced reads
A unit called twice in one forward, within another unit, or not at all | same bits; at stage 3 gathered anew for
    each call | a unit twice in one forward; a unit within a unit; units that are not called
A unit that calls itself; an output layer that has weights of its own and calls layers, or a unit | same bits | a unit
    within itself; modules of the late root within one another; a unit within the late root
Two forwards, one backward (preference training) | same bits; at stage 3 the backward of each holds a few units |
    two forwards, one backward
Two forwards, then two backwards, with evaluations between | same bits | two forwards, two backwards; two forwards,
    unannounced reads
Parts of the model alone | same bits, inside `with engine.forward_scope()`; outside it refused at stage 3 | parts of
    the model alone; a part evaluated
`torch.autograd.grad` in the forward (gradient penalty) | same bits; at stage 3 its units stay full until the
    backward; between engine calls refused at stage 3 | gradient penalty; gradients alone, two forwards
torch's `checkpoint` called by the model, around units, with dropout | same bits, `use_reentrant` true and false |
    checkpoint; checkpoint, reentrant
... within a unit | same bits, true and false | checkpoint within a unit; checkpoint within a unit, reentrant
... around calls of the engine, or an evaluation in a hook of the backward | same bits; at stage 3 what it gathers
    stays full for that backward | checkpoint around the engine; evaluation in a backward
... and two forwards, one backward | same bits with `use_reentrant=False`; with true refused | checkpoint, two
    forwards
A loss kept in an attribute of a unit (mixture of experts) | same bits; at stage 3 a unit that computes it after its
    output stays full until the backward | auxiliary loss; auxiliary loss after the output
... while nothing flows back through the unit's output | same bits with `zero.reshard_after_forward=false`; without
    it refused at stage 3 | auxiliary losses alone
Outputs of a class of your own | same bits; at stage 3 the unit stays full until the backward | outputs that cannot
    be looked into
Outputs handed on from unit to unit, parameters as outputs | same bits | outputs handed on
A forward without a backward | same bits as without it; at stage 3 the next call frees what is still full | forward
    without backward
Generation, as long as each rank likes | same bits as without; nothing left gathered | generation
An exception in the forward | same bits as without; memory back at rest | exception in the head's forward; exception
    in a unit's forward
... that the model catches | same bits | an exception that the late root answers
An exception in the backward | same bits as without; memory back at rest; the step's gradients are forgotten |
    exception in the first backward; exception within a unit's backward; exception in the last backward; exception
    under checkpoint; exception while accumulating
An exception in the data or in `train_step` | same bits as without; the step's gradients are forgotten | exception
    in train_step
`loss.backward()` instead of `engine.backward(loss)` | refused, and leaves nothing behind | loss.backward()
""",
)


STAGES = [0, 1, 2, 3]
HARD_STAGES = [0, 2, 3]
"""Stage 1 differs from stage 2 in where the gradient lies, which no call depends on."""
DELAY_S = 0.002


@dataclass(frozen=True)
class Run:
    """A case at one stage."""

    name: str
    stage: int
    prefetch: int = 1
    num_micro_batches: int = 1
    late_rank: int | None = None
    """Sleeps before each gather and reduction."""
    reduction: str = "ordered"


def build(
    stage: int, model: torch.nn.Module | None = None, optimizer: Any = calls.ADAMW, **zero: Any
) -> zerotrain.ZeroEngine:
    config = zerotrain.ZeroConfig(**{"stage": stage, "bucket_mb": calls.BUCKET_MB, "reduction": "ordered"} | zero)
    return zerotrain.build_engine(model or calls.Net(), optimizer=optimizer, zero=config, world=this_world())


@functools.cache
def this_world() -> zerotrain.World:
    """One for all engines of a process: its groups cost more to make than a case to run."""
    return zerotrain.World.current(torch.device("cpu"))


def train(run: Run) -> str:
    """On each rank: the hash of the weights after the case's steps, or what went wrong."""
    try:
        return train_or_raise(run)
    except Exception:
        return traceback.format_exc()


def train_or_raise(run: Run) -> str:
    rank, _ = place()
    call = calls.CALLS[run.name]
    settings = {"prefetch": run.prefetch, "reduction": run.reduction}
    engine = build(run.stage, call.model(), reshard_after_forward=call.reshards, **settings)
    if run.late_rank == rank:
        be_late(engine, ("gather", "reduction"), DELAY_S)
    for step in range(calls.NUM_STEPS):
        if call.aside is not None:
            at_rest = held_nbytes(engine)
            call.aside(engine, step, rank)
            assert not call.rests or held_nbytes(engine) == at_rest
        torch.manual_seed(10 * step + rank)
        calls.micro_batches(call, engine, step, rank, run.num_micro_batches)
        engine.step()
    assert held_nbytes(engine) == (shards_nbytes(engine), 0)
    return engine.weights_sha256()


def held_nbytes(engine: zerotrain.ZeroEngine) -> tuple[int, int]:
    """Bytes of parameters held, and of scratch on loan."""
    return engine.memory_bytes()["parameters"], engine.held.pools.lent_nbytes


def shards_nbytes(engine: zerotrain.ZeroEngine) -> int:
    """What a rank holds of the parameters at rest."""
    buckets = [bucket.weights for bucket in engine.schedule.buckets]
    if engine.plan.shards_parameters:
        return sum(weights.shard.nbytes for weights in buckets)
    return sum(weights.model_weight.tensor.nbytes for weights in buckets)


@functools.cache
def reference(name: str, num_ranks: int, num_micro_batches: int) -> str:
    return sha256(calls.reference_weights(calls.CALLS[name], num_ranks, num_micro_batches))


def stages_of(number: int) -> tuple[int, ...]:
    """At stage 3 calls matter most; every second case is at one of the others too."""
    return (3,) if number % 2 else (number // 2 % 3, 3)


@pytest.fixture(scope="module")
def hashes(once: Any) -> dict[str, list[list[str]]]:
    """Name -> stage -> rank -> hash, of all cases on two ranks; tests/bits has the other stages."""
    runs = [Run(name, stage) for number, name in enumerate(calls.CALLS) for stage in stages_of(number)]
    results = iter(once("calls", lambda: run_over(runs, train, 2)))
    return {name: [next(results) for _ in stages_of(number)] for number, name in enumerate(calls.CALLS)}


@pytest.mark.parametrize("name", calls.CALLS)
def test_a_way_to_call_gives_the_bits_of_plain_pytorch(name: str, hashes: Any) -> None:
    assert hashes[name] == [[reference(name, 2, 1)] * 2] * len(hashes[name])


def expect_reference(runs: list[Run], num_ranks: int) -> None:
    for run, by_rank in zip(runs, run_over(runs, train, num_ranks), strict=True):
        assert by_rank == [reference(run.name, num_ranks, run.num_micro_batches)] * num_ranks, run


def zero_or_two(number: int) -> tuple[int, ...]:
    return 2 * (number % 2), 3


def two_or_zero(number: int) -> tuple[int, ...]:
    return 2 - 2 * (number % 2), 3


def late_runs(stages_of: StagesOf) -> list[Run]:
    """The hard ways on three ranks, one of them late, with accumulation."""
    settings = {"prefetch": 0, "num_micro_batches": 2}
    return [
        Run(name, stage, late_rank=stage % 3, **settings)
        for number, name in enumerate(calls.HARD)
        for stage in stages_of(number)
    ]


@pytest.mark.slow
def test_the_hard_ways_with_three_ranks_one_of_them_late_with_accumulation() -> None:
    expect_reference(late_runs(zero_or_two), 3)


NATIVE = (*calls.HARD, "units that are not called")


def native_runs(stages_of: StagesOf) -> list[Run]:
    return [Run(name, stage, reduction="native") for number, name in enumerate(NATIVE) for stage in stages_of(number)]


def test_the_hard_ways_with_the_reduction_of_the_backend() -> None:
    """gloo's own, which on two ranks adds as any other: a sum of two has but one order. At stages 0 and 2 those that
    the late ranks have not there."""
    expect_reference(native_runs(two_or_zero), 2)


# ---- memory


def most_full_in_backward(_: None) -> float:
    """The most weights full at once in a backward at stage 3, in blocks, without the head; seen from every block."""
    rank, _ = place()
    engine = build(3, Deep())
    buckets = [bucket.weights for unit in engine.schedule.units[1:] for bucket in unit.buckets]
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        if engine.schedule.phase.value == "backward":
            most = max(most, sum(weights.model_weight.held_nbytes for weights in set(buckets)))

    for block in engine.module.blocks:
        block.up.register_full_backward_hook(look)
    calls.preference(engine, 0, rank)
    assert held_nbytes(engine)[0] == shards_nbytes(engine)
    return most / max(weights.model_weight.tensor.nbytes for weights in buckets)


class Deep(calls.Net):
    num_blocks = 8


@pytest.mark.case("calls: Calls", "Two forwards, one backward (preference training)")
def test_a_backward_at_stage_3_holds_few_units_full_also_of_two_forwards() -> None:
    for by_rank in run_over([None], most_full_in_backward, 2):
        # The block whose backward runs, the one gathered ahead, the one just left, and the unit kept from the forward.
        assert all(0 < most <= 4 for most in by_rank)


# ---- refusals


def reentrant_twice(engine: Any, rank: int) -> None:
    engine.module.checkpoint = functools.partial(checkpoint, use_reentrant=True)
    calls.preference(engine, 0, rank)


def only_attributes(engine: Any, rank: int) -> None:
    try:
        engine.backward(engine(calls.inputs(0, rank)))
    finally:
        engine.module.is_greedy = False


def refused(what: tuple[int, bool]) -> str:
    """On each rank: the answer, if a step can be made after it."""
    stage, of_checkpoints = what
    rank, _ = place()
    engine = build(stage, calls.CALLS["checkpoint"].model() if of_checkpoints else calls.Greedy())
    with pytest.raises(zerotrain.EngineStateError) as answer:
        (reentrant_twice if of_checkpoints else only_attributes)(engine, rank)
    calls.ordinary(engine, 0, rank)
    engine.step()
    return str(answer.value)


@pytest.mark.case(
    "calls: Calls",
    "while nothing flows back through the unit's output",
    under="A loss kept in an attribute of a unit (mixture of experts)",
)
@pytest.mark.case(
    "calls: Calls",
    "and two forwards, one backward",
    under="torch's `checkpoint` called by the model, around units, with dropout",
)
def test_what_cannot_be_is_answered_with_what_to_do_and_the_next_step_works() -> None:
    asked = [(stage, True) for stage in STAGES] + [(3, False)]
    for what, answers in zip(asked, run_over(asked, refused, 2), strict=True):
        said = "checkpoint with use_reentrant=False" if what[1] else "set zero.reshard_after_forward=False"
        assert all(said in answer for answer in answers), what


# ---- the end of an engine


def trained_anew(stage: int, model: torch.nn.Module) -> str:
    """On each rank: the hash of the weights after a step of a new engine."""
    engine = build(stage, model)
    calls.ordinary(engine, 1, place()[0])
    engine.step()
    return engine.weights_sha256()


def after_an_engine(stage: int) -> tuple[list[str], str]:
    """On each rank: what of an engine is still alive after it and after its model, where garbage is not collected; and
    whether the model gives between the two what it gave and trains on in another engine, or what it says."""
    rank, _ = place()
    build(stage)  # the first optimizer of a process imports parts of torch, which leave their frames to the collector
    gc.collect()
    gc.disable()
    model = calls.Net()
    engine = build(stage, model)
    calls.ordinary(engine, 0, rank)
    engine.step()
    with torch.no_grad():
        expected = engine(calls.inputs(0, rank))
    bucket = engine.schedule.trained[0]
    state = bucket.update.state_tensors()[0]
    of_engine = [weakref.ref(each) for each in (engine, engine.schedule, bucket.update, state, bucket.gradient)]
    of_model = [weakref.ref(each) for each in (bucket.weights.model_weight.tensor, model)]
    del engine, state, bucket
    alive = [str(each()) for each in of_engine if each() is not None]
    alive += [name for name, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks]
    try:
        said = str(torch.equal(model(calls.inputs(0, rank)), expected))
        copy = calls.Net()
        copy.load_state_dict(model.state_dict())
        assert trained_anew(stage, model) == trained_anew(stage, copy)
    except zerotrain.EngineStateError as error:
        said = str(error)
    del model
    alive += [str(each()) for each in of_model if each() is not None]
    gc.enable()
    return alive, said


@pytest.mark.case(
    "calls: Calls",
    "A deleted engine",
    "frees all it held, without the garbage collector; its model works on at stages 0 to 2 and refuses at stage 3",
)
def test_a_deleted_engine_frees_all_it_held_and_its_model_works_or_says_what_to_do() -> None:
    by_stage = run_over(STAGES, after_an_engine, 2)
    assert all(alive == [] for by_rank in by_stage for alive, _ in by_rank)
    *replicated, sharded = [[answer for _, answer in by_rank] for by_rank in by_stage]
    assert replicated == [["True", "True"]] * 3
    assert all("load engine.full_state_dict() into a new model" in answer for answer in sharded)
