import os
import time

import pytest
import torch
import torch.distributed as dist

from zerotrain.testing import RankError, run_ranks


def own_rank() -> torch.Tensor:
    return torch.tensor(dist.get_rank())


def raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("on purpose")
    dist.barrier()


def die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_results_come_back_by_rank() -> None:
    assert [value.item() for value in run_ranks(own_rank, 3)] == [0, 1, 2]


def test_an_exception_names_its_rank_and_comes_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*ValueError: on purpose"):
        run_ranks(raise_on_rank_1, 2)


def test_a_rank_that_dies_is_named() -> None:
    with pytest.raises(RankError, match="rank 1 died without an answer"):
        run_ranks(die_on_rank_1, 2)


def test_ranks_without_an_answer_are_named_and_ended() -> None:
    with pytest.raises(RankError, match=r"ranks \[.*1\] gave no answer within 2 s"):
        run_ranks(sleep_on_rank_1, 2, timeout_s=2)
