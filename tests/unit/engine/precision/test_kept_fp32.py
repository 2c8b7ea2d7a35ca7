"""Which parameters a pattern keeps, and what a kept module is given and gives. Bits and bytes: tests/distributed."""

import functools
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from zerotrain.engine.model.precision import dtypes_of, precision_named
from zerotrain.sharding.units import model_parameters


class Router(nn.Module):
    """Notes the dtypes it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(4, 2) for _ in range(2))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, *, extra: dict[str, torch.Tensor]) -> dict[str, Any]:
        inner = self.gates[0](x)
        self.seen += [x.dtype, extra["bias"].dtype, extra["ids"].dtype, inner.dtype]
        return {"scores": self.gates[1](x) + inner, "ids": extra["ids"]}


class Routed(nn.Module):
    """A router, norms in a ModuleList, a tied output layer, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(2))
        self.router = Router()
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for norm in self.norms:
            hidden = norm(hidden)
        routed = self.router(hidden, extra={"bias": hidden, "ids": ids})
        self.seen += [hidden.dtype, routed["scores"].dtype, routed["ids"].dtype]
        return self.head(hidden).float().sum() + routed["scores"].float().sum()


def kept(*patterns: str) -> list[str]:
    parameters = model_parameters(Routed())
    dtypes = dtypes_of(parameters, precision_named("bf16", patterns))
    return [each.names[0] for each in parameters if dtypes[each.parameter] == torch.float32]


def test_a_pattern_names_parameters_or_modules_and_a_tied_parameter_by_any_of_its_names() -> None:
    norms = ["norms.0.weight", "norms.0.bias", "norms.1.weight", "norms.1.bias"]
    assert kept("*norm*") == kept("norms") == kept("norms.?") == norms
    assert kept("gain", "*.bias") == ["gain", *norms[1::2], "router.gates.0.bias", "router.gates.1.bias"]
    assert kept("head") == kept("embed.weight") == ["embed.weight"]


def run(*patterns: str, precision: str = "bf16") -> Routed:
    model = Routed()
    engine = zerotrain.build_engine(
        model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        precision=zerotrain.PrecisionConfig(precision, list(patterns)),
    )
    engine.backward(engine(torch.arange(5)))
    engine.step()
    return model


def test_a_module_kept_as_a_whole_gets_fp32_and_gives_the_compute_dtype() -> None:
    model = run("router", "norms", "embed")
    fp32, bf16, int64 = torch.float32, torch.bfloat16, torch.int64
    assert model.router.seen == [fp32, fp32, int64, fp32]  # nothing is cast within the router
    assert model.seen == [bf16, bf16, int64]
    assert {module.weight.dtype for module in (*model.norms, *model.router.gates, model.embed)} == {fp32}
    assert model.gain.dtype == bf16


def test_a_kept_module_computes_with_the_bits_of_its_inputs_in_fp32() -> None:
    given = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).bfloat16()
    model = run("norms")
    norm = nn.LayerNorm(4)
    norm.load_state_dict({name: value.detach().clone() for name, value in model.norms[0].state_dict().items()})
    assert torch.equal(model.norms[0](given), norm(given.float()).bfloat16())


def test_in_fp32_all_is_kept_anyway_and_nothing_is_cast() -> None:
    model = run("norms", precision="fp32")
    assert model.seen == [torch.float32, torch.float32, torch.int64]


def test_a_pattern_that_matches_nothing_is_refused_in_every_precision() -> None:
    for precision in ("fp32", "bf16", "fp16"):
        with pytest.raises(
            zerotrain.ConfigError, match=r"^precision\.keep_fp32: no module or parameter matches 'rms'; "
        ):
            run("norms", "rms", precision=precision)


class Waves(nn.Module):
    """Has a buffer of its own in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("frequencies", torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x @ self.frequencies)


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.ones(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.numbers


BUFFERS = {
    "middle has buffers in fp32 (_u, _v), which PyTorch refuses beside bf16 (": lambda: (
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    ),
    "middle has buffers in fp32 (frequencies), which PyTorch refuses beside bf16 (": Waves,
    "middle has buffers in fp32 (numbers), which PyTorch refuses beside bf16 (": Table,
}


def around(middle: nn.Module, keep: list[str]) -> zerotrain.ZeroEngine:
    parts = OrderedDict(embed=nn.Embedding(5, 8), middle=middle, last=nn.Linear(8, 1))
    return zerotrain.build_engine(
        nn.Sequential(parts),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        precision=zerotrain.PrecisionConfig("bf16", keep),
    )


@pytest.mark.parametrize(("said", "make"), BUFFERS.items(), ids=["spectral_norm", "own", "of no parameters"])
def test_a_buffer_in_fp32_that_meets_16_bits_is_named_with_what_to_do(said: str, make: Any) -> None:
    with pytest.raises(zerotrain.ConfigError) as raised:
        around(make(), [])(torch.arange(4))
    assert str(raised.value).startswith(said)
    assert ("keep_fp32=[middle]" in str(raised.value)) == (make is not Table)
    if make is not Table:
        engine = around(make(), ["middle"])
        engine.backward(engine(torch.arange(4)).float().square().mean())
        assert not engine.step().skipped


def test_an_error_that_is_of_no_buffer_stays_pytorchs() -> None:
    engine = around(nn.Linear(7, 8), [])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.arange(4))
    with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices' to have"):
        engine(torch.ones(4))
