"""Linear layers that multiply in fp8: as torchao's in plain PyTorch, with one sha256 over stages, ranks and buckets."""

import copy
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.ranks.fake_wire import run_threads
from zerotrain.device.device import Device
from zerotrain.settings import problems_in

float8 = pytest.importorskip("torchao.float8")
ADAMW: Any = partial(torch.optim.AdamW, lr=1e-2)
NUM_LEAVES = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow, self.odd = (
            nn.LayerNorm(32),
            nn.Linear(32, 64),
            nn.Linear(64, 32),
            nn.Linear(32, 7),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.narrow(self.wide(self.norm(inputs)).relu()) + self.odd(inputs).sum(-1, keepdim=True)


def make_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.ModuleDict(
            {"first": nn.Linear(16, 32), "blocks": nn.Sequential(Block(), Block()), "head": nn.Linear(32, 16)}
        )


MODEL = make_model()
ROWS = torch.randn(3, NUM_LEAVES, 5, 16, generator=torch.Generator().manual_seed(6))


def loss_of(model: Any, rows: torch.Tensor) -> torch.Tensor:
    rows = rows.to(model["first"].weight.dtype)
    return model["head"](model["blocks"](model["first"](rows))).float().square().mean()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = copy.deepcopy(MODEL)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return loss_of(self.parts, rows)


def in_fp8(model: nn.Module) -> nn.Module:
    """The layers of the blocks in fp8, by torchao alone."""
    config = float8.Float8LinearConfig(emulate=True)
    names = {f"parts.blocks.{number}.{name}" for number in range(2) for name in ("wide", "narrow")}
    return float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in names, config=config)


def precision(**others: Any) -> zerotrain.PrecisionConfig:
    return zerotrain.PrecisionConfig("bf16", **{"matmul": "fp8"} | others)


def train(world: zerotrain.World, stage: int, **zero: Any) -> tuple[list[float], str]:
    engine = zerotrain.build_engine(
        Loss(), optimizer=ADAMW, precision=precision(), virtual_ranks=NUM_LEAVES, world=world,
        zero=zerotrain.ZeroConfig(stage=stage, reduction="ordered", **zero),
    )  # fmt: skip
    losses = []
    for rows in ROWS:
        for leaf in engine.each_virtual_rank():
            loss = engine(rows[leaf])
            engine.backward(loss)
            losses.append(float(loss.detach()))
        engine.step()
    return losses, engine.weights_sha256()


def test_losses_are_those_of_torchao_in_plain_pytorch_at_the_first_step():
    plain = in_fp8(Loss().bfloat16())
    expected = [float(plain(rows).detach()) for rows in ROWS[0]]
    losses, _ = run_threads(partial(train, stage=0), 1)[0][0]
    assert losses[:NUM_LEAVES] == expected
    without = Loss().bfloat16()
    assert [float(without(rows).detach()) for rows in ROWS[0]] != expected


def test_one_sha256_over_stages_ranks_and_buckets():
    hashes = set()
    for size in (1, 2, 4):
        for stage in range(4):
            ranks, _ = run_threads(
                partial(train, stage=stage, bucket_mb=(0.001, 25)[stage % 2]), size, late_rank=size - 1
            )
            hashes |= {sha256 for _, sha256 in ranks}
    assert len(hashes) == 1


def test_names_and_sizes_choose_the_layers_and_the_names_of_parameters_stay():
    def layers(**others: Any) -> list[str]:
        engine = zerotrain.build_engine(Loss(), optimizer=ADAMW, precision=precision(**others))
        assert engine.full_state_dict().keys() == Loss().state_dict().keys()
        return [name for name, module in engine.module.named_modules() if type(module).__name__ == "Float8Linear"]

    assert layers() == [f"parts.blocks.{number}.{name}" for number in range(2) for name in ("wide", "narrow")]
    assert layers(fp8_modules=["*.1.wide"]) == ["parts.blocks.1.wide"]
    with pytest.raises(
        zerotrain.ConfigError, match=r"no nn.Linear in the units has a name of .*fp8_min_size=33 or more"
    ):
        layers(fp8_min_size=33)


def test_what_cannot_multiply_in_fp8_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch):
    build = partial(zerotrain.build_engine, Loss(), optimizer=ADAMW, precision=precision())
    with pytest.raises(zerotrain.ConfigError, match="works unit by unit, and Linear has no repeated blocks"):
        zerotrain.build_engine(nn.Linear(16, 16), optimizer=ADAMW, precision=precision())
    with monkeypatch.context() as patch:
        patch.setattr(Device, "multiplies_fp8", False)
        with pytest.raises(
            zerotrain.ConfigError, match="multiplies no fp8, which Ada, Hopper and later GPUs do; leave it out"
        ):
            build()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        zerotrain.ConfigError, match=r"needs torchao, which is not installed; pip install 'zerotrain\[fp8\]'"
    ):
        build()
    assert problems_in(precision(matmul="int8", fp8_modules="*", fp8_min_size=0)) == [
        "matmul: got int8; it must be fp8, or None; the default is None",
        "fp8_modules: got *; it must be a list of name patterns such as ['*norm*']; the default is ['*']",
        "fp8_min_size: got 0; it must be 1 or more rows and columns; the default is 16",
    ]
