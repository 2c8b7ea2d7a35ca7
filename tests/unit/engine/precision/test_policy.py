import functools

import pytest
import torch
from torch import nn

import zerotrain

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_in_16_bits_a_floating_input_of_any_dtype_is_cast() -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        engine = zerotrain.build_engine(nn.Linear(4, 4), optimizer=SGD, precision=precision)
        for given in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert engine(torch.ones(1, 4, dtype=given)).dtype == dtype


def test_in_fp32_an_input_of_another_dtype_is_refused_as_plain_pytorch_does() -> None:
    engine = zerotrain.build_engine(nn.Linear(4, 4), optimizer=SGD)
    with pytest.raises(RuntimeError, match="dtype"):
        engine(torch.ones(1, 4, dtype=torch.float64))


def test_a_precision_that_is_none_is_refused() -> None:
    with pytest.raises(zerotrain.ConfigError, match=r"precision\.name: got fp8; it must be fp32, bf16 or fp16"):
        zerotrain.build_engine(nn.Linear(4, 4), optimizer=SGD, precision="fp8")
