"""Building an engine in Python: what is refused, in the words of Python, and what is needed for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.zygote.client import Zygote
from zerotrain.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "value", "answer"),
    [
        ("model", None, "model: got an object of type NoneType; it must be an nn.Module"),
        ("optimizer", "adamw", "optimizer: got an object of type str; it must be functools.partial"),
        ("zero", 3, "zero: got an object of type int; it must be a zerotrain.ZeroConfig"),
        ("precision", torch.bfloat16, "precision: got an object of type dtype; it must be a name such as bf16"),
        ("max_grad_norm", 0, "max_grad_norm: got 0; it must be a number above 0, or None for no clipping"),
        ("max_skipped_steps", 0, "max_skipped_steps: got 0; it must be 1 or more steps; the default is 20"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_python_too(argument: str, value: Any, answer: str) -> None:
    arguments = {"model": torch.nn.Linear(2, 2), "optimizer": torch.optim.AdamW} | {argument: value}
    with pytest.raises(ConfigError, match=answer):
        zerotrain.build_engine(**arguments)


def test_all_values_out_of_range_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        zerotrain.build_engine(
            torch.nn.Linear(2, 2),
            optimizer=torch.optim.AdamW,
            zero=zerotrain.ZeroConfig(stage=4, prefetch=-1),
            precision="fp8",
            max_grad_norm=-1.0,
        )
    names = [problem.split(":")[0] for problem in refused.value.problems]
    assert names == ["zero.stage", "zero.prefetch", "precision.name", "max_grad_norm"]


def test_settings_that_change_later_change_nothing_in_the_engine() -> None:
    zero = zerotrain.ZeroConfig(stage=3)
    engine = zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.AdamW, zero=zero)
    zero.prefetch = 7
    assert engine.options.zero.prefetch == 1


def test_an_engine_needs_neither_hydra_nor_omegaconf(tmp_path: Path, zygote: Zygote) -> None:
    program = """
import sys
for name in list(sys.modules):  # all of the package is imported anew
    if name.partition(".")[0] in ("zerotrain", "hydra", "omegaconf"):
        del sys.modules[name]
sys.modules |= dict.fromkeys(("hydra", "omegaconf"))  # an import of None fails

import torch, zerotrain
engine = zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.AdamW, zero=zerotrain.ZeroConfig(stage=3))
engine.backward(engine(torch.ones(1, 2)).sum())
print(engine.step().skipped)
"""
    (tmp_path / "program.py").write_text(program)
    ending = zygote.run_python(["program.py"], tmp_path)
    assert (ending.out, ending.code) == ("False\n", 0), ending.err
