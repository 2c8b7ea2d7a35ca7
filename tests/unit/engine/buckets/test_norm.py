import math

import pytest
import torch

from zerotrain.engine.buckets.norm import (
    CHUNK_NUMEL,
    MAX_SQUARES,
    TREE_NUMEL,
    StepSquares,
    add_digit_sums,
    block_squares,
    clip_coefficient,
    digit_sums,
    norm_of_digit_sums,
)


def norm_over(shards: list[torch.Tensor], *, exact: bool = True) -> torch.Tensor:
    rows = torch.stack([digit_sums(block_squares(shard, exact=exact)) for shard in shards])
    return norm_of_digit_sums(add_digit_sums(rows))


@pytest.mark.parametrize("max_squares", [1, 300, MAX_SQUARES])
def test_the_squares_of_a_step_are_those_of_its_buckets_however_many_are_kept(monkeypatch, max_squares):
    monkeypatch.setattr("zerotrain.engine.buckets.norm.MAX_SQUARES", max_squares)
    generator = torch.Generator().manual_seed(0)
    buckets = [torch.rand(100, dtype=torch.float64, generator=generator) * 2.0**e for e in range(-30, 30, 5)]
    rows = torch.stack([digit_sums(squares.clone()) for squares in buckets])
    step = StepSquares()
    for squares in buckets:
        step.add(squares.clone())
    for _ in range(2):  # a step that was broken off may come again
        assert torch.equal(step.digit_sums(), add_digit_sums(rows))
    step.add(torch.ones(max_squares, dtype=torch.float64))
    step.add(torch.ones(1, dtype=torch.float64))
    step.clear()
    step.add(buckets[0].clone())
    assert torch.equal(step.digit_sums(), rows[0])


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e8])
def test_no_cut_into_shards_and_no_order_of_them_changes_a_bit(scale):
    generator = torch.Generator().manual_seed(0)
    # Blocks of very different size, so that a sum in another order would round differently.
    spread = torch.exp2(torch.randint(-30, 10, (5000, 1), generator=generator).float())
    values = (torch.randn(5000, 64, generator=generator) * spread * scale).flatten()
    whole = norm_over([values])
    for num_shards in (2, 3, 7, 100):
        shards = list(values.view(-1, 64).tensor_split(num_shards))
        assert torch.equal(norm_over([shard.flatten() for shard in shards]), whole)
        assert torch.equal(norm_over([shard.flatten() for shard in reversed(shards)]), whole)
    assert whole.item() == pytest.approx(math.sqrt(math.fsum((values.double() ** 2).tolist())), rel=1e-12)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_each_block_however_many_there_are(dtype, exact):
    values = torch.randn(2 * CHUNK_NUMEL + 640, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = values.double().view(-1, 64).square().sum(1)
    squares = block_squares(values, exact=exact)
    assert torch.equal(squares[7:10], block_squares(values[448:640], exact=exact))
    torch.testing.assert_close(squares, expected, rtol=1e-14 if exact else 1e-6, atol=0)


@pytest.mark.parametrize("scale", [1e-12, 1e-8, 1.0, 1e8])
def test_padding_with_zeros_changes_nothing(scale):
    """Of small gradients the highest digit lies far below that of 1."""
    values = torch.randn(640, generator=torch.Generator().manual_seed(0)) * scale
    zeros = torch.zeros(64)
    assert torch.equal(norm_over([values, zeros]), norm_over([values]))
    assert torch.equal(norm_over([torch.cat([zeros, values, zeros])]), norm_over([values]))


def test_the_norm_of_nothing_but_zeros_is_zero():
    assert norm_over([torch.zeros(128), torch.zeros(64)]).item() == 0.0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_element_that_is_not_finite_makes_the_norm_nan(value):
    shard = torch.ones(128)
    shard[77] = value
    assert math.isnan(norm_over([torch.ones(64), shard]).item())


def test_the_clip_coefficient_is_that_of_torch():
    parameter = torch.nn.Parameter(torch.zeros(64))
    parameter.grad = torch.full((64,), 3.0)
    norm = norm_over([parameter.grad.clone()])
    coefficient = clip_coefficient(norm, max_norm=2.0)
    expected = parameter.grad * coefficient.float()
    torch.nn.utils.clip_grad_norm_([parameter], 2.0)
    torch.testing.assert_close(parameter.grad, expected)
    assert clip_coefficient(norm, max_norm=100.0).item() == 1.0
    assert clip_coefficient(norm, max_norm=None).item() == 1.0


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a GPU, on tensors of the CPU."""
    monkeypatch.setattr("zerotrain.device.device.Device.is_host", False)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree_numel", [64, 3 * 64, TREE_NUMEL])
def test_on_a_gpu_a_block_has_the_same_bits_whatever_lies_beside_it(dtype, tree_numel, monkeypatch):
    monkeypatch.setattr("zerotrain.engine.buckets.norm.TREE_NUMEL", tree_numel)
    shard = torch.randn(64 * 10, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = shard.clone()
    squares = block_squares(shard, exact=True)
    assert torch.equal(shard, before)
    for index, block in enumerate(shard.view(-1, 64)):
        terms = [value * value for value in block.tolist()]  # exact in fp64
        while len(terms) > 1:
            half = len(terms) // 2
            terms = [a + b for a, b in zip(terms[:half], terms[half:], strict=True)]
        assert squares[index].item() == terms[0]
        assert torch.equal(block_squares(block.contiguous(), exact=True), squares[index : index + 1])


@pytest.mark.usefixtures("on_gpu")
def test_on_a_gpu_the_norm_of_a_shard_is_one_vector_norm_where_bits_are_not_fixed():
    shards = [torch.randn(64 * number, generator=torch.Generator().manual_seed(number)) for number in (3, 7)]
    assert [block_squares(shard, exact=False).shape for shard in shards] == [(1,), (1,)]
    expected = torch.cat(shards).double().norm()
    torch.testing.assert_close(norm_over(shards, exact=False), expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(norm_over(shards), expected, rtol=1e-15, atol=0.0)
