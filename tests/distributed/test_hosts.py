"""Ranks of several hosts, which read memory inside a host and send through sockets across: the bits, the bytes between
hosts, and ranks that are late, gone or stopped. Hosts are names that a test gives, and network namespaces in one test.
"""

import ctypes
import os
import re
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    Case,
    batch,
    be_late,
    build,
    micro_batches,
    place,
    reference_weights,
    run_over,
    sha256,
    three_stages,
    train,
    world_by_sockets,
)
from test_shared_memory import CPU, TIMEOUT_S, engines_that_go, held_behind_gathers, killed, stopped, world_of

from benchmarks.errors import BenchmarkError
from benchmarks.network import Host, Network, link, sent_nbytes
from zerotrain import World
from zerotrain.comm import process_groups
from zerotrain.comm.accounts import whereabouts
from zerotrain.comm.accounts.ledger import Ledger
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.scratch import ScratchPool
from zerotrain.comm.wires.memory.hosts import Hosts
from zerotrain.config.schema import ZeroConfig
from zerotrain.errors import CommError
from zerotrain.testing import run_ranks

ORDERED = ZeroConfig(reduction="ordered", bucket_mb=0.05)


def live_on(num_hosts: int) -> None:
    """From now on this rank's engines take the ranks for those of so many hosts."""
    rank, size = place()
    process_groups.host_name = lambda: f"host {rank * num_hosts // size}"


def hosts_of(engine: Any) -> Hosts:
    hosts: Hosts = engine.collectives._wire.gather.keywords["hosts"]
    return hosts


# ---- the bits


def trained_on(args: tuple[int, Case]) -> str:
    num_hosts, case = args
    live_on(num_hosts)
    engine = train(case)
    assert hosts_of(engine).num_hosts == num_hosts
    return engine.weights_sha256()


def require_bits(num_ranks: int, num_hosts: int, reference: Case, cases: list[Case]) -> None:
    expected = [sha256(reference_weights(reference, num_ranks))] * num_ranks
    assert run_over([(num_hosts, case) for case in cases], trained_on, num_ranks) == [expected] * len(cases)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank",
    "the bits of plain PyTorch",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.thinned(2, first=1)
def test_on_two_hosts_every_stage_has_the_bits_of_plain_pytorch(precision: str) -> None:
    """Stages 1 and 2 issue the same collectives: precisions have them in turns; tests/bits has the other."""
    require_bits_of_stages(precision, STAGES_OF[precision])


STAGES_OF = {"fp32": three_stages(0), "bf16": three_stages(1)}


def require_bits_of_stages(precision: str, stages: Sequence[int]) -> None:
    case = Case(ORDERED, precision=precision, num_micro_batches=2)
    whole = {"fp32": {1: {"bucket_mb": 25}}, "bf16": {3: {"overlap": False}}}[precision]
    require_bits(4, 2, case, [case.with_zero(stage=stage, **whole.get(stage, {})) for stage in stages])


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank",
)
def test_micro_batches_that_are_reduced_one_by_one_have_the_bits_of_their_definition() -> None:
    case = Case(ORDERED, num_micro_batches=2, num_steps=1).with_zero(accumulate="reduced")
    require_bits(4, 2, case, [case.with_zero(stage=stage) for stage in (0, 1)])


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank",
)
def test_on_three_hosts_the_bits_are_those_of_plain_pytorch_too() -> None:
    """The last of an odd number of roots goes up as it is."""
    case = Case(ORDERED)
    require_bits(6, 3, case, [case.with_zero(stage=stage) for stage in (2, 3)])


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank",
)
def test_with_four_ranks_on_each_host_the_bits_are_those_of_plain_pytorch_too() -> None:
    case = Case(ORDERED, precision="bf16")
    require_bits(8, 2, case, [case.with_zero(stage=stage) for stage in (0, 3)])


LATE = Case(ZeroConfig(bucket_mb=0.45))


def trained_late(case: tuple[int, str]) -> str:
    """Rank 1 sleeps before each call of a kind."""
    stage, late_at = case
    live_on(2)
    rank, size = place()
    engine = build(LATE.with_zero(stage=stage))
    if rank == 1:
        be_late(engine, (late_at,), 0.03)
    for number in range(LATE.num_steps):
        engine.train_step(micro_batches(batch(number, size, 1), rank))
    assert hosts_of(engine)
    return engine.weights_sha256()


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank",
)
def test_a_rank_that_is_late_changes_no_bit_on_any_host() -> None:
    """The other two are in tests/bits."""
    require_bits_where_late([(0, "reduction"), (2, "gather"), (3, "gather"), (3, "reduction")])


def require_bits_where_late(cases: list[tuple[int, str]]) -> None:
    expected = [sha256(reference_weights(LATE, 4))] * 4
    assert run_over(cases, trained_late, 4) == [expected] * len(cases)


CHANGING = (0, 3, 1, 2, 3)
"""The stage of each step."""


def trained_at_changing_stages(case: Case) -> str:
    live_on(2)
    rank, size = place()
    engine = build(case)
    for number, stage in enumerate(CHANGING):
        engine.set_stage(stage)
        engine.train_step(micro_batches(batch(number, size, 1), rank))
    assert hosts_of(engine)
    return engine.weights_sha256()


def test_stages_may_change_on_any_host() -> None:
    """Memory that was given back at stage 3 cannot be read by others afterwards: what is gathered there is staged."""
    cases = [Case(ORDERED, precision=precision, num_steps=len(CHANGING)) for precision in ("fp32", "bf16")]
    expected = [[sha256(reference_weights(case, 4))] * 4 for case in cases]
    assert run_over(cases, trained_at_changing_stages, 4) == expected


# ---- what goes from host to host

CLONE_NEWNET = 0x40000000
NUMEL = 2**21
"""Of what is gathered and reduced."""
IN_NAMESPACES = [
    Case(ZeroConfig(reduction="ordered", stage=stage, bucket_mb=0.05), precision=precision, num_steps=1)
    for stage, precision in ((2, "fp32"), (3, "bf16"))
]


def move_to(host: Host, store: str) -> None:
    """From now on this rank is on a host, and meets the others in a file: no server tells names there."""
    rank, size = place()
    dist.barrier()  # a rank that has yet to connect to the others would find those gone that were faster
    dist.destroy_process_group()
    with Path(f"/proc/{host.process}/ns/net").open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.environ["GLOO_SOCKET_IFNAME"] = str(host.interface)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)


def in_a_namespace(network: Network, store: str) -> dict[str, Any]:
    """Why memory is not shared, bytes that left this host by memory and sockets and by sockets alone, weights."""
    host = network.host_of(*place())
    move_to(host, store)
    worlds = {"hosts": World.current(CPU), "sockets": world_by_sockets()}
    made = {name: Collectives(world, ledger=Ledger(), ordered=True, overlap=True) for name, world in worlds.items()}
    return {
        "not shared": made["hosts"].not_shared,
        "sent": {name: bytes_sent(collectives, str(host.interface)) for name, collectives in made.items()},
        "weights": [train(case).weights_sha256() for case in IN_NAMESPACES],
    }


def bytes_sent(collectives: Collectives, interface: str) -> dict[str, int]:
    """By this host, in one gather and in one reduction of each precision."""
    size = dist.get_world_size()
    full, shard = collectives.zeros(NUMEL, torch.float32), collectives.zeros(NUMEL // size, torch.float32)
    before = once_quiet(interface)
    collectives.gather_now("unit", full, shard)
    sent = {"gather": once_quiet(interface) - before}
    for dtype in (torch.float32, torch.bfloat16):
        pool = ScratchPool(dtype=dtype, device=CPU)
        reduction = collectives.reduction("unit", torch.empty(NUMEL // size), pool)
        before = once_quiet(interface)
        reduction.issue(collectives.zeros(NUMEL, dtype))
        reduction.finish()
        sent[str(dtype)] = once_quiet(interface) - before
    return sent


def once_quiet(interface: str) -> int:
    """What this host has sent, when no rank sends any more and none goes on."""
    dist.barrier()
    before = -1
    while (now := sent_nbytes(interface)) != before:
        before = now
        time.sleep(0.05)
    dist.barrier()
    return now


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "bytes from host to host",
    "parameters and gradients once, read from the interface of two network namespaces; in fp32 "
    "half of the bytes of sockets",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
def test_between_hosts_that_are_namespaces_goes_what_theory_says_and_the_bits_are_those_of_plain_pytorch(
    tmp_path: Path,
) -> None:
    if os.getuid() != 0:
        pytest.skip("a process with threads enters a network namespace as root alone")
    with ExitStack() as stack:
        try:
            network = stack.enter_context(link("1gbit"))
        except BenchmarkError as error:
            pytest.skip(str(error))
        ranks = run_ranks(in_a_namespace, 4, network, str(tmp_path / "store"))
    whole = 4 * NUMEL
    # In 16 bits sums travel in fp32: with two ranks on a host, the bytes of sockets.
    theory = {"gather": whole / 2, "torch.float32": whole / 2, "torch.bfloat16": whole / 2}
    by_sockets = {"gather": whole, "torch.float32": whole, "torch.bfloat16": whole / 2}
    for said in ranks:
        assert said["not shared"] == ""
        assert said["weights"] == [sha256(reference_weights(case, 4)) for case in IN_NAMESPACES]
        assert said["sent"]["hosts"] == pytest.approx(theory, rel=0.05)
        assert said["sent"]["sockets"] == pytest.approx(by_sockets, rel=0.05)


# ---- ranks that are gone or stopped


def killed_on_two_hosts(case: tuple[int, bool]) -> str:
    live_on(2)
    return killed(case)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank is killed or stopped, or gathers something else",
    "reported on every host, at once or after the timeout",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
@pytest.mark.parametrize("case", [(0, False), (2, False), (3, True)])
def test_a_rank_that_is_killed_is_told_of_on_every_host(case: tuple[int, bool]) -> None:
    """Long before the five minutes that a collective waits, or the test waits for its ranks."""
    told = run_ranks(killed_on_two_hosts, 4, case)
    assert told[1] == "killed"
    for rank in (0, 2, 3):
        assert told[rank].startswith(f"rank {rank} failed in ")
        assert re.search("Connection (closed|reset) by peer", told[rank])
        assert "(step 2, " in told[rank]
    assert "rank 1 is gone" in told[0]
    assert "(rank 1, on another host)" in told[3]


def stopped_on_two_hosts(_: None) -> list[str]:
    live_on(2)
    return stopped(None)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank is killed or stopped, or gathers something else",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
def test_a_rank_that_is_stopped_is_told_of_on_every_host_after_the_timeout() -> None:
    told = [each for [each] in run_ranks(stopped_on_two_hosts, 4, None)]
    assert f"Timed out waiting {TIMEOUT_S:g} s for rank 1" in told[0]
    assert re.search("Timed out waiting .* \\(rank 1, on another host\\)|rank 2 is gone", told[3])
    assert all(each.startswith(f"rank {rank} failed in ") for rank, each in enumerate(told))
    assert "rank 0 failed in " in told[1]


# ---- the life of it


def engines_that_go_on_two_hosts(_: None) -> tuple[list[int], int]:
    """Threads that move data, see `engines_that_go`, and those that are left and wait for other hosts."""
    live_on(2)
    counts = engines_that_go(None)
    return counts, sum(thread.name == "zerotrain arrivals" for thread in threading.enumerate())


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "an engine is deleted with reductions or gathers under way",
    "its threads end, and nobody holds gathered memory",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
def test_an_engine_takes_its_threads_with_it() -> None:
    assert run_ranks(engines_that_go_on_two_hosts, 4, None) == [([0, 2, 1, 0], 0)] * 4


def held_on_two_hosts(_: None) -> int:
    live_on(2)
    return held_behind_gathers(None)


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "an engine is deleted with reductions or gathers under way",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
def test_what_was_gathered_is_held_by_nobody_when_the_gather_is_done() -> None:
    assert run_ranks(held_on_two_hosts, 4, None) == [0] * 4


def another_gather(_: None) -> str:
    """What a rank is told where rank 1 gathers something else."""
    live_on(2)
    whereabouts.GRACE_S = 0.5
    rank, size = place()
    collectives = Collectives(world_of(TIMEOUT_S), ledger=Ledger(), ordered=True, overlap=True)
    for name in ("b" if rank == 1 else "a", "c"):
        gather = collectives.gather(name, torch.empty(64 * size), torch.ones(64))
        try:
            gather.issue()
            gather.finish()
        except CommError as error:
            return str(error)
    return ""


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "a rank is killed or stopped, or gathers something else",
    under=(
        "several hosts with 2, 4, 8, ... neighbouring ranks each: every stage and precision, accumulation, a late rank"
    ),
)
def test_ranks_that_gather_something_else_are_told_on_every_host() -> None:
    told = run_ranks(another_gather, 4, None)
    assert any("sends another collective" in each for each in told[:2])
    assert all(each.startswith(f"rank {rank} failed in gather of") for rank, each in enumerate(told))


# ---- where it cannot be


def on_three_and_one(_: None) -> tuple[str, str]:
    """Why memory is not shared, and the weights."""
    rank = dist.get_rank()
    process_groups.host_name = lambda: f"host {rank // 3}"
    engine = train(Case(ORDERED))
    return engine.collectives.not_shared, engine.weights_sha256()


@pytest.mark.case(
    "hosts: Ranks of one host, which read each other's memory",
    "hosts of 1, of 3, of different numbers or of scattered ranks",
)
def test_where_hosts_do_not_hold_as_many_ranks_all_send_by_sockets_to_the_same_bits_and_say_why() -> None:
    told = run_ranks(on_three_and_one, 4, None)
    expected = sha256(reference_weights(Case(ORDERED), 4))
    assert all(why.startswith("the ranks by host are 0-2 | 3; ") and bits == expected for why, bits in told)
