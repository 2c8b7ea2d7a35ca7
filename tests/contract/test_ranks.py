import os
import time

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.ranks import RankError, run_ranks


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def sleep() -> None:
    time.sleep(3600)


class CommError(Exception):
    """Named as the one of zerotrain, of which `tests.ranks` imports nothing."""


LOSSES = {
    "of the backend": RuntimeError("[.../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9614"),
    "of the engine": CommError("rank 0 failed in gather of blocks.0"),
}


def lose_another(loss: str, causes: dict[int, str]) -> None:
    """Rank 0 says at once that another one is gone, which says why, if it does, a moment later."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = _get_default_store()  # a file: no connection that the end of another rank could close
    store.add("arrived", 1)
    while store.add("arrived", 0) < size:
        time.sleep(0.01)
    if rank not in causes:
        raise LOSSES[loss]
    time.sleep(0.5)
    if causes[rank] == "raises":
        raise ValueError("on purpose")
    if causes[rank] == "dies":
        os._exit(3)
    time.sleep(3600)


def test_an_exception_names_its_rank_and_comes_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*ValueError: on purpose"):
        run_ranks(raise_on_rank_1, 2)


def test_ranks_without_an_answer_are_named_and_ended():
    with pytest.raises(RankError, match=r"ranks \[0, 1\] gave no answer within 2 s"):
        run_ranks(sleep, 2, timeout_s=2)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("cause", "told"),
    [("raises", r"^rank 1 failed:(?s:.*)ValueError: on purpose"), ("dies", "^rank 1 died without an answer")],
)
def test_the_first_cause_is_told_even_if_the_loss_of_its_rank_was_heard_first(loss, cause, told):
    with pytest.raises(RankError, match=told):
        run_ranks(lose_another, 2, loss, {1: cause})
