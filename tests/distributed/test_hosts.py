"""Ranks of several hosts, which read memory inside a host and send through sockets across: the bits, the bytes between
hosts, and ranks that are gone or late. Hosts are names that ranks are given, but where bytes are counted."""

from itertools import product
from typing import Any

import cases as settings_of_cases
import pytest
import torch
import torch.distributed as dist
from cases import Case, be_late, batch, build, micro_batches, place, reference_weights, run_over, sha256, train, train_and_hash
from zerotrain.comm import process_groups
from zerotrain.config.schema import ZeroConfig

STAGES = (0, 1, 2, 3)
ORDERED = ZeroConfig(reduction="ordered")


def live_on(num_hosts: int) -> None:
    """From now on this rank's engines take the ranks for those of so many hosts."""
    rank, size = place()
    setattr(process_groups, "host_name", lambda: f"host {rank * num_hosts // size}")  # noqa: B010


def train_on_two_hosts(case: Case) -> str:
    live_on(2)
    engine = train(case)
    assert engine.collectives._wire._hosts is not None
    return engine.weights_sha256()


def test_bits():
    import time
    references = [Case(ORDERED, num_steps=3), Case(ORDERED, precision="bf16", num_micro_batches=2)]
    settings = [(case.with_zero(stage=s, bucket_mb=b)) for case in references for s in STAGES for b in (0.02, 25)]
    expected = [[sha256(reference_weights(case, 4))]*4 for case in references for _ in range(8)]
    t=time.time()
    got = run_over(settings, train_on_two_hosts, 4)
    print(time.time()-t)
    assert got == expected
