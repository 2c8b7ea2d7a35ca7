"""Ranks of several hosts, each in a network namespace of its own: the bytes from host to host, and the bits."""

import ctypes
import functools
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, place, reference_weights, sha256, train

import zerotrain
from benchmarks.errors import BenchmarkError
from benchmarks.network import Host, Network, link, sent_nbytes
from tests.ranks import run_ranks
from zerotrain import World
from zerotrain.comm.collectives import Collectives
from zerotrain.comm.handles import ScratchPool
from zerotrain.comm.ledger import Ledger
from zerotrain.settings import ZeroConfig

CPU = torch.device("cpu")
CLONE_NEWNET = 0x40000000
NUMEL = 2**21
"""Elements of what is gathered and reduced."""
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
    """The bytes that left this host, and the weights."""
    host = network.host_of(*place())
    move_to(host, store)
    collectives = Collectives(World.current(CPU), ledger=Ledger(), ordered=True, overlap=True)
    return {
        "sent": bytes_sent(collectives, str(host.interface)),
        "weights": [train(case).weights_sha256() for case in IN_NAMESPACES],
        "step": [bytes_of_step(stage, str(host.interface)) for stage in (2, 3)],
    }


def bytes_of_step(stage: int, interface: str) -> tuple[int, int]:
    """By this host, in a step of a model of NUMEL elements whose parameters each host holds once; and the formula."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512, bias=False) for _ in range(NUMEL // 512**2)))
    engine = zerotrain.build_engine(
        model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        zero=ZeroConfig(stage, bucket_mb=1, shard_size="host"),
    )
    assert engine.collectives.inside.size == 2
    before = once_quiet(interface)
    engine.backward(engine(torch.ones(2, 512)).sum())
    engine.step()
    sent = once_quiet(interface) - before
    assert engine.ledger.last_step.across_nbytes == engine.theoretical_across_nbytes(1)
    return sent, 2 * engine.theoretical_across_nbytes(1)


def bytes_sent(collectives: Collectives, interface: str) -> dict[str, int]:
    """By this host, in one gather and in one reduction of each precision."""
    size = dist.get_world_size()
    full, shard = torch.zeros(NUMEL), torch.zeros(NUMEL // size)
    before = once_quiet(interface)
    collectives.gather_now("unit", full, shard)
    sent = {"gather": once_quiet(interface) - before}
    for dtype in (torch.float32, torch.bfloat16):
        pool = ScratchPool(dtype=dtype, device=CPU)
        reduction = collectives.reduction("unit", torch.empty(NUMEL // size), pool)
        before = once_quiet(interface)
        reduction.issue(torch.zeros(NUMEL, dtype=dtype))
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
    "hosts: Ranks of several hosts",
    "bytes from host to host, and of a step with `zero.shard_size=host`",
    "what theory says, read from the interface of two network namespaces, and the bits of plain PyTorch",
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
    theory = {"gather": whole, "torch.float32": whole, "torch.bfloat16": whole / 2}
    for said in ranks:
        assert said["weights"] == [sha256(reference_weights(case, 4)) for case in IN_NAMESPACES]
        assert said["sent"] == pytest.approx(theory, rel=0.05)
        for sent, theory_of_step in said["step"]:
            assert theory_of_step == whole  # 2 ranks of 2 (P / 2) (1 - 2 / 4) each
            assert whole <= sent <= 1.02 * whole
