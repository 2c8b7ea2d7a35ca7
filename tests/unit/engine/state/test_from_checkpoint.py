"""A checkpoint fits the model whose elements lie in the same order."""

import functools
from pathlib import Path

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.engine.parts import alone
from zerotrain.errors import CheckpointError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Image(nn.Sequential):
    """A convolution over some channels, and the mean of what it gives."""

    def __init__(self, num_channels: int, memory_format: torch.memory_format) -> None:
        super().__init__(nn.Conv2d(num_channels, 4, 3).to(memory_format=memory_format))


def build(num_channels: int, memory_format: torch.memory_format) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(Image(num_channels, memory_format), optimizer=SGD, world=alone())


def test_the_stride_of_a_dimension_of_one_means_nothing(tmp_path: Path) -> None:
    saving, loading = build(1, torch.contiguous_format), build(1, torch.channels_last)
    weights = [engine.module[0].weight for engine in (saving, loading)]
    assert weights[0].stride() != weights[1].stride()
    saving.save(tmp_path / "step")
    loading.load(tmp_path / "step")
    assert torch.equal(*weights)


def test_elements_in_another_order_are_refused_with_what_to_do(tmp_path: Path) -> None:
    build(2, torch.contiguous_format).save(tmp_path / "step")
    with pytest.raises(
        CheckpointError, match=r"0\.weight lies in memory with strides .*build the model in that memory"
    ):
        build(2, torch.channels_last).load(tmp_path / "step")
