import pytest
import torch

from zerotrain.comm.collectives import MAX_RANKS_OF_EXCHANGE, Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.world import World


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, MAX_RANKS_OF_EXCHANGE, MAX_RANKS_OF_EXCHANGE + 1, 200])
def test_parts_are_added_in_rank_order_in_fp32_however_many_ranks_there_are(num_ranks: int, dtype: torch.dtype) -> None:
    rank, numel = num_ranks - 1, 67
    world = World(rank=rank, size=num_ranks, local_rank=0, device=torch.device("cpu"))
    collectives = Collectives(world, ledger=Ledger(), ordered=True, overlap=True)
    parts = torch.randn(num_ranks, numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    # As an exchange leaves it, without this rank's own part, or as an all-to-all does, with it.
    is_exchange = collectives.received_numel(parts.numel()) < parts.numel()
    assert is_exchange == (num_ranks <= MAX_RANKS_OF_EXCHANGE)
    received = (parts[:rank] if is_exchange else parts).flatten().clone()
    got = torch.empty(numel, dtype=dtype)
    collectives.finish_reduce(parts.flatten().clone(), received, got)
    assert torch.equal(got, expected.to(dtype))
