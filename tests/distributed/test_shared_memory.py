"""Ranks that read each other's memory: nothing is sent by sockets, and a rank that is gone, stopped, forked or does
something else is told of. The bits are those of `test_parity.py`, whose ranks are such ones."""

import gc
import os
import resource
import signal
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, batch, build, micro_batches, place, resident_nbytes, run_over, train

import zerotrain
from zerotrain.comm.accounts import whereabouts
from zerotrain.comm.accounts.ledger import Ledger
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ranks.world import Shards, World
from zerotrain.comm.scratch import ScratchPool
from zerotrain.comm.wires.memory.local_ranks import LocalRanks
from zerotrain.config.schema import ZeroConfig
from zerotrain.errors import CommError
from zerotrain.settings import OffloadConfig
from zerotrain.testing import run_ranks

CPU = torch.device("cpu")
TIMEOUT_S = 5.0


def local_ranks(engine: zerotrain.ZeroEngine) -> LocalRanks:
    ranks: LocalRanks = engine.collectives._wire.gather.keywords["ranks"]
    return ranks


def step(engine: zerotrain.ZeroEngine, number: int) -> None:
    rank, size = place()
    engine.train_step(micro_batches(batch(number, size, 1), rank))


# ---- what is moved


def tensors_sent_by_gloo(case: Case) -> tuple[int, int, int]:
    """Of two steps: sends by gloo above what the norm takes, copies of what lay in other memory, collectives."""
    sent, names = [], ("all_gather_single", "all_gather_into_tensor", "all_to_all_single", "reduce_scatter")
    engine = build(case)
    functions = [(dist, name) for name in names if hasattr(dist, name)] + [(dist.ProcessGroup, "send")]
    originals = {function: getattr(*function) for function in functions}
    for each, original in originals.items():
        setattr(*each, lambda *args, each=each, call=original, **named: sent.append(each) or call(*args, **named))
    try:
        step(engine, 0)
        step(engine, 1)
    finally:
        for each, original in originals.items():
            setattr(*each, original)
    return len(sent), local_ranks(engine).num_staged, sum(engine.ledger.last_step.calls.values())


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "parameters and gradients",
    "none goes through a socket or is copied before the read; offloaded state is copied",
)
def test_no_parameter_or_gradient_goes_through_a_socket_or_is_copied_to_be_read() -> None:
    cases = [
        Case(ZeroConfig(stage=stage, bucket_mb=0.05), precision=precision, num_micro_batches=1 + (stage + number) % 2)
        for stage in range(4)
        for number, precision in enumerate(("fp32", "bf16"))
    ]
    for by_rank in run_over(cases, tensors_sent_by_gloo, 2):
        for num_sent, num_staged, num_collectives in by_rank:
            assert (num_sent, num_staged) == (0, 0)
            assert num_collectives > 10


def offloaded(parameters: str) -> tuple[bool, str]:
    """Whether anything was copied to be read, and the weights."""
    torch.manual_seed(0)
    engine = zerotrain.build_engine(
        torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))),
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        zero=ZeroConfig(stage=3, bucket_mb=0.02),
        offload=OffloadConfig(parameters=parameters),
    )
    for _ in range(2):
        engine.backward(engine(torch.full((2, 64), 1.0 + dist.get_rank())).square().mean())
        engine.step()
    return local_ranks(engine).num_staged > 0, engine.weights_sha256()


@pytest.mark.case("hosts: Ranks of one host, which read each other's memory", "parameters and gradients")
def test_what_lies_in_other_memory_is_copied_to_be_read() -> None:
    (there, there_too), (elsewhere, elsewhere_too) = run_over(["device", "cpu"], offloaded, 2)
    assert (there[0], elsewhere[0]) == (False, True)
    assert there[1] == there_too[1] == elsewhere[1] == elsewhere_too[1]


# ---- ranks that are gone, stopped, or do something else


def world_of(timeout_s: float) -> World:
    """In groups of its own, which wait for so long."""
    gathers, reductions = (dist.new_group(timeout=timedelta(seconds=timeout_s)) for _ in range(2))
    rank, size = place()
    return World(rank, size, rank, CPU, shards=Shards(rank, size, gathers, reductions), group=gathers)


def trained_until(
    stage: int, timeout_s: float, end: Callable[[zerotrain.ZeroEngine], None], *, in_forward: bool = False
) -> str:
    """What a rank is told when rank 1 does `end` in the midst of its second backward, or forward."""
    whereabouts.GRACE_S = 0.5
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    engine = zerotrain.build_engine(
        model,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),
        zero=ZeroConfig(stage=stage, bucket_mb=0.02),
        world=world_of(timeout_s),
    )
    try:
        for number in range(3):
            if number == 1 and dist.get_rank() == 1:
                hooked = model[3].register_forward_pre_hook if in_forward else model[3].register_full_backward_hook
                hooked(lambda *_: end(engine))
            engine.backward(engine(torch.ones(2, 64, requires_grad=True)).square().mean())
            engine.step()
    except CommError as error:
        return str(error)
    return "nothing was raised"


def killed(case: tuple[int, bool]) -> str:
    """Rank 1 is killed; a child from before the engine answers for it, since the others are ended where none does."""
    setattr(dist, "barrier", lambda: None)  # noqa: B010 -- at the end ranks would wait for the killed one
    setattr(dist, "destroy_process_group", lambda: None)  # noqa: B010
    if dist.get_rank() == 1:
        gone, _kept = os.pipe()
        if os.fork() == 0:
            os.close(_kept)
            os.read(gone, 1)
            return "killed"
    stage, in_forward = case
    return trained_until(stage, 300.0, lambda _: os.kill(os.getpid(), signal.SIGKILL), in_forward=in_forward)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank is killed in a backward",
    "the others end at once, and say so",
)
@pytest.mark.parametrize("case", [(0, False), (2, False), (3, True)])
def test_a_rank_that_is_killed_is_told_of_at_once(case: tuple[int, bool]) -> None:
    """Long before the five minutes that a collective waits, or the test waits for its ranks: also by what cleans up
    behind the error, and the end of the engine, which wait for the same once more."""
    told = run_ranks(killed, 3, case)
    assert told[1] == "killed"
    for rank in (0, 2):
        assert told[rank].startswith(f"rank {rank} failed in ")
        assert "Connection closed by peer: rank " in told[rank]
        assert "(step 2, " in told[rank]


def stopped(_: None) -> list[str]:
    """Rank 1 is stopped until rank 0 has given up on it."""
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    rank = dist.get_rank()
    told = trained_until(2, TIMEOUT_S, lambda _: os.kill(os.getpid(), signal.SIGSTOP))
    if rank == 0:
        os.kill(int(pids[1]), signal.SIGCONT)
    return [told]


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank is stopped",
    "reported after the timeout; it fails when it goes on",
)
def test_a_rank_that_is_stopped_is_told_of_after_the_timeout_and_fails_when_it_goes_on() -> None:
    [[waiting], [continued]] = run_ranks(stopped, 2, None)
    assert f"Timed out waiting {TIMEOUT_S:g} s for rank 1; no answer from rank 1" in waiting
    assert "Connection closed by peer: rank 0 is gone; rank 0 failed in " in continued


def another_collective(names: tuple[str, str], numels: tuple[int, int]) -> tuple[str, bool]:
    """What a rank is told that gathers something else than the other, and whether it got anything of it."""
    whereabouts.GRACE_S = 0.5
    rank = dist.get_rank()
    collectives = Collectives(world_of(TIMEOUT_S), ledger=Ledger(), ordered=True, overlap=True)
    full = torch.full((2 * numels[rank],), -1.0)
    gather = collectives.gather(names[rank], full, torch.ones(numels[rank]))
    try:
        gather.issue()
        gather.finish()
    except CommError as error:
        return str(error), bool((full.view(2, -1)[1 - rank] == -1).all())
    return "", False


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "ranks gather something else",
    "an error on both; neither gets any data",
)
@pytest.mark.parametrize(("names", "numels"), [(("a", "b"), (64, 64)), (("a", "a"), (64, 128))])
def test_ranks_that_gather_something_else_are_told_and_get_nothing_of_it(names: Any, numels: Any) -> None:
    results = run_ranks(another_collective, 2, names, numels)
    assert all(kept for _, kept in results)
    assert any("sends another collective" in told for told, _ in results)
    assert all(told.startswith(f"rank {rank} failed in gather of") for rank, (told, _) in enumerate(results))


# ---- the life of it


def courier_threads() -> int:
    gc.collect()
    return sum(thread.name == "zerotrain courier" for thread in threading.enumerate())


def engines_that_go(_: None) -> list[int]:
    """Threads of an engine, of two, and when they are gone: one with reductions under way, one with gathers."""
    counts = [courier_threads()]
    first, second = build(Case(ZeroConfig(stage=2, bucket_mb=0.05))), build(Case(ZeroConfig(stage=1, bucket_mb=0.05)))
    counts.append(courier_threads())
    rank, size = place()
    step(second, 0)
    first.backward(first(*micro_batches(batch(0, size, 1), rank)[0]))
    weights = first.module.blocks[0]
    first = None
    counts.append(courier_threads())
    second = None
    counts.append(courier_threads())
    assert all(torch.isfinite(parameter).all() for parameter in weights.parameters())  # the memory outlives them
    step(build(Case(ZeroConfig(stage=3, bucket_mb=0.05))), 0)
    return counts


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "an engine is deleted with reductions or gathers under way; two at once",
    "its thread, connections and pages go; parameters stay",
)
def test_an_engine_takes_its_thread_with_it_and_two_do_not_meet() -> None:
    assert run_ranks(engines_that_go, 2, None) == [[0, 2, 1, 0]] * 2


def held_behind_gathers(_: None) -> int:
    """Of 20 buffers of 32 MiB that were gathered into and let go at once, those that were there a moment longer."""
    collectives, num_held = Collectives(world_of(TIMEOUT_S), ledger=Ledger(), ordered=True, overlap=True), 0
    shard = torch.ones(2**23 // dist.get_world_size())
    for number in range(20):
        before = resident_nbytes()
        full = torch.zeros(2**23)
        gather = collectives.gather(str(number), full, shard)
        gather.issue()
        gather.finish()
        del full, gather
        num_held += number > 0 and resident_nbytes() - before > 2**24
    return num_held


def test_what_was_gathered_is_held_by_nobody_when_the_gather_is_done() -> None:
    """The thread held it a moment longer: a change of the stage ended with a bucket too much (2026-11-22)."""
    assert run_ranks(held_behind_gathers, 2, None) == [0, 0]


def leaves_early(_: None) -> list[float]:
    """Rank 0 gathers, and is gone before rank 1 has come."""
    collectives = Collectives(world_of(TIMEOUT_S), ledger=Ledger(), ordered=True, overlap=True)
    rank, sent = dist.get_rank(), collectives.zeros(4, torch.float32)
    if rank == 1:
        for _ in range(20):
            torch.randn(300, 300) @ torch.randn(300, 300)
    full = torch.empty(8)
    gather = collectives.gather("unit", full, sent.fill_(rank))
    gather.issue()
    if rank == 1:
        gather.finish()
    del collectives, gather, sent
    assert courier_threads() == 0
    return full.tolist()


def test_what_a_rank_has_sent_arrives_though_it_leaves_without_waiting() -> None:
    assert run_ranks(leaves_early, 2, None) == [[0.0] * 4 + [1.0] * 4] * 2


def forked(stage: int) -> list[bool]:
    """A child of a rank, forked between steps, overwrites all weights and lives on while the rank trains."""
    engine, alone = build(Case(ZeroConfig(stage=stage, bucket_mb=0.05))), build(Case(ZeroConfig(stage=stage)))
    step(engine, 0)
    step(alone, 0)
    engine.weights_sha256()
    ready, go = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's threads, which the child does not use
        child = os.fork()
    if child == 0:
        for bucket in engine.schedule.buckets:
            bucket.weights.held.fill_(float("nan"))
        os.write(go, b"x")
        signal.pause()
    os.read(ready, 1)
    step(engine, 1)
    step(alone, 1)
    same = engine.weights_sha256() == alone.weights_sha256()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return [same]


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank forks, and the child writes to the weights",
    "its writes are its own; it reads the weights of now, and zeros once the rank has moved them "
    "(`set_stage`, `unfreeze`)",
)
@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_forked_process_does_to_the_weights_is_not_done_to_the_rank(stage: int) -> None:
    assert run_ranks(forked, 2, stage) == [[True]] * 2


# ---- where it cannot be


def limited(_: None) -> tuple[str, str, str]:
    """Rank 1 may not make large files: why ranks send by sockets, and the weights before and after."""
    before = train(Case(ZeroConfig(bucket_mb=0.05))).weights_sha256()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, resource.RLIM_INFINITY))
    engine = train(Case(ZeroConfig(bucket_mb=0.05)))
    return engine.collectives.not_shared, before, engine.weights_sha256()


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "one rank is limited, on another host, or has shared memory off",
    "all send by sockets, to the same bits, and say why",
)
def test_where_one_rank_cannot_all_send_by_sockets_to_the_same_bits_and_say_why() -> None:
    for why, before, after in run_ranks(limited, 2, None):
        assert why.startswith("rank 1: it cannot make memory that others can read: [Errno 27] File too large")
        assert before == after


def told_not_to(_: None) -> str:
    world = world_of(TIMEOUT_S)
    if dist.get_rank() == 1:
        object.__setattr__(world.shards, "shared_memory", False)
    collectives = Collectives(world, ledger=Ledger(), ordered=True, overlap=True)
    full, pool = torch.empty(2), ScratchPool(dtype=torch.float32, device=CPU)
    collectives.gather_now("unit", full, torch.tensor([float(world.rank)]))
    reduction = collectives.reduction("unit", torch.empty(1), pool)
    reduction.issue(full)
    reduction.finish()
    assert (full.tolist(), reduction.out.tolist()) == ([0.0, 1.0], [float(world.rank)])
    return collectives.not_shared


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "one rank is limited, on another host, or has shared memory off",
)
def test_where_one_rank_is_told_not_to_none_does() -> None:
    assert run_ranks(told_not_to, 2, None) == ["rank 1: it has shared_memory=False", ""]
