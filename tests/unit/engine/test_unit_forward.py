"""What a machine without a compiler and a model without units are told. Bits and memory: tests/distributed."""

import functools
import sysconfig
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import zerotrain
from zerotrain.engine.unit_forward import require_compiler

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def test_a_machine_without_a_compiler_gets_a_sentence() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    refused = pytest.raises(zerotrain.ConfigError, match=r"^compile=True: .* a C\+\+ compiler such as g\+\+, ")
    with inductor_config.patch({"cpp.cxx": ("no-such-compiler",)}), refused:
        zerotrain.build_engine(model, optimizer=SGD, compile=True)


def test_a_python_without_headers_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(zerotrain.ConfigError, match=r"Python\.h, the headers of this Python"):
        require_compiler()


def test_a_model_without_units_is_not_silently_left_as_it_is() -> None:
    with pytest.raises(zerotrain.ConfigError, match=r"Linear has no repeated blocks; name its units with zero\.units"):
        zerotrain.build_engine(nn.Linear(4, 4), optimizer=SGD, activation_checkpointing=True)


def test_units_that_are_named_are_checkpointed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    num_forwards = 0

    def count(*_: object) -> None:
        nonlocal num_forwards
        num_forwards += 1

    model[1][1].register_forward_pre_hook(count)
    zero = zerotrain.ZeroConfig(units=["1"])
    engine = zerotrain.build_engine(model, optimizer=SGD, zero=zero, activation_checkpointing=True)
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert num_forwards == 2
    with torch.no_grad():
        engine(torch.ones(2, 4))
    assert num_forwards == 3
