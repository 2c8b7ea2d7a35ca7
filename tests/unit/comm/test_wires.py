"""The tree by which means are added, against one that adds two by two."""

import pytest
import torch

from zerotrain.comm.wires import mean_by_tree


def parts_of(num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_ranks, 67, generator=torch.Generator().manual_seed(0)).to(dtype)


def mean_one_by_one(parts: torch.Tensor) -> torch.Tensor:
    level = [part if part.dtype == torch.float64 else part.float() for part in parts]
    while len(level) > 1:
        level = [sum(level[index : index + 2]) for index in range(0, len(level), 2)]
    return (level[0] / len(parts)).to(parts.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 9, 200])
def test_the_mean_of_a_matrix_of_parts_is_added_row_by_row(num_ranks, dtype):
    parts = parts_of(num_ranks, dtype)
    out = torch.empty(67, dtype=dtype)
    mean_by_tree(parts, out, num_ranks)
    assert torch.equal(out, mean_one_by_one(parts))


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e38])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_the_mean_is_a_quotient_to_the_last_bit_also_where_fp32_ends(num_ranks, scale):
    parts = parts_of(num_ranks, torch.float32) * scale
    out = torch.empty(67)
    mean_by_tree(list(parts), out, num_ranks)
    assert torch.equal(out, mean_one_by_one(parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_ranks", "rank"), [(size, rank) for size in (2, 3, 8) for rank in range(size)])
def test_parts_of_which_one_is_the_result_itself_are_added_in_rank_order(num_ranks, rank, dtype):
    parts = parts_of(num_ranks, dtype)
    expected = mean_one_by_one(parts)
    received = torch.cat([part for index, part in enumerate(parts) if index != rank])
    out = parts[rank].clone()  # as where gradients are replicated: the own part is what the sum goes over
    scattered = list(received.view(num_ranks - 1, -1))
    scattered.insert(rank, out)
    mean_by_tree(scattered, out, num_ranks)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("leaves", [1, 2, 3, 4])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_may_be_sums_of_several_leaves_each_and_the_mean_is_over_the_leaves(num_ranks, leaves, dtype):
    parts = parts_of(num_ranks, dtype)
    total = mean_one_by_one(parts.double()) * num_ranks
    for given in (parts, list(parts)):
        out = torch.empty(67, dtype=dtype)
        mean_by_tree(given, out, num_ranks * leaves)
        torch.testing.assert_close(out, (total / (num_ranks * leaves)).to(dtype))
