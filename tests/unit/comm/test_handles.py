"""Ranks' parts are added in rank order in fp32, in whatever they come."""

import pytest
import torch

from zerotrain.comm.handles import sum_in_rank_order


def parts_of(num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_ranks, 67, generator=torch.Generator().manual_seed(0)).to(dtype)


def added_one_by_one(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 9, 200])
def test_a_matrix_of_parts_is_added_row_by_row(num_ranks: int, dtype: torch.dtype) -> None:
    parts = parts_of(num_ranks, dtype)
    out = torch.empty(67, dtype=dtype)
    sum_in_rank_order(parts, out)
    assert torch.equal(out, added_one_by_one(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_ranks", "rank"), [(size, rank) for size in (2, 3, 8) for rank in range(size)])
def test_parts_that_lie_in_the_scratch_and_in_the_result_itself_are_added_in_rank_order(
    num_ranks: int, rank: int, dtype: torch.dtype
) -> None:
    parts = parts_of(num_ranks, dtype)
    expected = added_one_by_one(parts)
    received = torch.cat([part for index, part in enumerate(parts) if index != rank])
    out = parts[rank].clone()  # as where gradients are replicated: the own part is what the sum goes over
    scattered = list(received.view(num_ranks - 1, -1))
    scattered.insert(rank, out)
    sum_in_rank_order(scattered, out, scratch=received)
    assert torch.equal(out, expected)
