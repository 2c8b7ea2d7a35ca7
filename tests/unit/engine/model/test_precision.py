"""Floating-point arguments in 16 bits: labels keep their bits, weights meet rounded ones, and nothing becomes inf
without a word."""

import functools
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.engine.habits import EVERYWHERE, assert_same, build, in_plain_pytorch
from tests.unit.engine.parts import DTYPES, seeded
from zerotrain.engine.model.precision import MAX_SCALE, PRECISIONS, LossScaler, cast_floating, dtypes_of
from zerotrain.sharding.units import model_parameters

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Regression(nn.Module):
    """forward(x (N, 4), target (N,)) -> the mean square of the error; it begins as a constant."""

    def __init__(self, value: float = 1000.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        nn.init.zeros_(self.linear.weight)
        nn.init.constant_(self.linear.bias, value)

    def forward(self, x: torch.Tensor, target: torch.Tensor, loss: Any = F.mse_loss) -> torch.Tensor:
        return loss(self.linear(x).squeeze(-1), target)


def engine_of(model: nn.Module, precision: str = "bf16", **given: Any) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(model, optimizer=SGD, precision=precision, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize(("precision", "target", "loss"), [("bf16", 1001.5, 2.25), ("fp16", 1000.25, 0.0625)])
def test_a_target_keeps_its_bits(precision, target, loss, as_dict, dtype):
    engine = engine_of(Regression(), precision, max_skipped_steps=1)
    inputs = {"x": torch.ones(2, 4, dtype=dtype), "target": torch.full((2,), target, dtype=dtype)}
    with torch.no_grad():
        assert engine(**inputs).item() == loss
    assert engine.train_step([inputs if as_dict else tuple(inputs.values())]).loss.item() == loss


def test_in_fp16_a_target_beyond_its_range_is_trained_on():
    engine = engine_of(Regression(), zerotrain.PrecisionConfig("fp16", initial_scale=256.0), max_skipped_steps=1)
    result = engine.train_step([{"x": torch.ones(2, 4), "target": torch.full((2,), 1e5), "loss": F.l1_loss}])
    assert result.loss.item() == 99000.0
    assert not result.skipped


LOSSES = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "binary_cross_entropy": lambda out, target: F.binary_cross_entropy(out, target),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "kl_div": lambda out, target: F.kl_div(out, target, reduction="sum"),
    "poisson_nll_loss": F.poisson_nll_loss,
    "gaussian_nll_loss": lambda out, target: F.gaussian_nll_loss(out, target, target + 1),
    "cosine_embedding_loss": lambda out, target: F.cosine_embedding_loss(
        out[None], target[None], torch.ones(1, dtype=torch.int64)
    ),
    "cdist": lambda out, target: torch.cdist(out[None], target[None]).sum(),
    "cross_entropy": lambda out, target: F.cross_entropy(out[None], target[None]),
    "class weights": lambda out, target: F.cross_entropy(out[None], torch.tensor([1]), weight=target),
    "by hand": lambda out, target: ((out - target) ** 2).mean(),
    "weights of samples": lambda out, target: (target * (out - 1).abs()).mean(),
    "grid_sample": lambda out, target: F.grid_sample(
        out.view(1, 1, 2, 3), target.view(1, 1, 3, 2), align_corners=True
    ).sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loss_is_that_of_the_widened_output(precision, loss):
    """Plain PyTorch with `output.float()`, with all bits of the target, forward and backward."""
    model, x = Regression(0.25), torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    target = x.mean(1)
    reference = nn.Linear(4, 1)
    reference.load_state_dict(model.linear.state_dict())
    reference.to(DTYPES[precision])
    engine = engine_of(model, zerotrain.PrecisionConfig(precision, initial_scale=1.0))
    got = engine(x, target, loss)
    expected = loss(reference(x.to(DTYPES[precision])).squeeze(-1).float(), target)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)
    expected.backward()
    weights = {name: value.detach().float() for name, value in reference.named_parameters()}
    for name, value in reference.named_parameters():
        weights[name].grad = value.grad.float()
    SGD(weights.values()).step()
    engine.backward(got)
    engine.step()
    assert_same({name.removeprefix("linear."): value for name, value in engine.full_state_dict().items()}, weights)


class Odd(nn.Module):
    """Reads its arguments in many ways: by its own weights and views of them, by modules that compare dtypes, in units
    that are computed again, by a module in fp32."""

    rounds = staticmethod(lambda value, dtype: value)
    """What plain PyTorch is told to do where the engine rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.randn(8, 8) / 4)
        self.scale = nn.Parameter(torch.ones(8))
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.conv = nn.Conv1d(8, 8, 1)
        self.norm = nn.LayerNorm(8)
        self.places = nn.ModuleList(Placed() for _ in range(2))
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, places: torch.Tensor, target: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        narrow = functools.partial(self.rounds, dtype=self.own.dtype)
        hidden = narrow(x) @ self.own + narrow(x * 2) @ self.own.T
        hidden = hidden + self.rnn(narrow(x))[0] + self.attention(*[narrow(x)] * 3)[0]
        hidden = hidden + self.conv(narrow(x).mT).mT + self.norm(narrow(x))
        hidden = hidden + checkpoint(lambda x: narrow(x) @ self.own, x, use_reentrant=False)
        hidden = hidden * self.scale
        for block in self.places:
            hidden = block(hidden, places, self.rounds)
        error = self.last(narrow(hidden + x)).squeeze(-1) - target
        return (size * error.square()).mean()


class Placed(nn.Module):
    """A unit that reads coordinates beside its hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.of_places, self.linear = nn.Linear(2, 8), nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor, places: torch.Tensor, rounds: Any) -> torch.Tensor:
        dtype = self.linear.weight.dtype
        waves = (places * 1000).sin()
        return hidden + self.linear(rounds(hidden, dtype)).tanh() + self.of_places(rounds(waves, dtype))


class OddInPlainPyTorch(Odd):
    rounds = staticmethod(lambda value, dtype: value.to(dtype))


def odd_inputs(step: int, rank: int) -> list[tuple[tuple[torch.Tensor, ...], float]]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    drawn = [torch.rand(size, generator=generator) for size in ((2, 3, 8), (2, 3, 2), (2, 3), (2, 3))]
    return [((drawn[0], drawn[1].double(), drawn[2] + 1, drawn[3]), 1.0)]


@pytest.mark.parametrize("checkpoints", [False, True])
@EVERYWHERE
def test_every_stage_rounds_where_plain_pytorch_must(stage, size, precision, checkpoints):
    """The reference rounds before each product with a weight, in as many words, and nowhere else."""
    precision = "fp16" if precision == "fp32" else precision

    def on_a_rank(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = build(world, stage, precision, seeded(Odd), activation_checkpointing=checkpoints)
        for step in range(2):
            [(inputs, _)] = odd_inputs(step, world.rank)
            engine.backward(engine(*inputs))
            assert not engine.step().skipped
        return engine.full_state_dict()

    expected = in_plain_pytorch(OddInPlainPyTorch, odd_inputs, size, precision, rounds_inputs=False)
    assert_same(run_threads(on_a_rank, size)[0][0], expected)


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    ids: torch.Tensor


class Notes(nn.Module):
    """Notes the dtypes of its arguments: those of the model, and those that reach a part of it that is kept in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.rest = nn.Linear(4, 4, bias=False), nn.Linear(4, 1)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch, *, others: dict[str, torch.Tensor], targets: list[torch.Tensor]) -> torch.Tensor:
        self.seen += [each.dtype for each in (batch.x, batch.ids, others["mask"], *targets)]
        self.exact = self.kept(batch.x)
        assert self.rest(others["narrow"]).dtype == self.rest.weight.dtype
        return F.mse_loss(self.rest(self.exact).squeeze(-1), targets[0])


@pytest.mark.case(
    "precision",
    "inputs and outputs in dicts, dataclasses, named tuples",
    "rounded where they meet weights; gathered in time at stage 3",
)
def test_arguments_in_any_structure_reach_the_model_and_what_is_kept_in_fp32_as_they_are():
    torch.manual_seed(0)
    model = Notes()
    engine = engine_of(model, zerotrain.PrecisionConfig("bf16", keep_fp32=["kept"]))
    batch = Batch(torch.rand(3, 4) + 1000, torch.arange(3))
    others = {"mask": torch.ones(3, dtype=torch.bool), "narrow": torch.ones(3, 4, dtype=torch.bfloat16)}
    engine.backward(engine(batch, others=others, targets=[torch.ones(3), torch.ones(3, dtype=torch.float64)]))
    assert model.seen == [torch.float32, torch.int64, torch.bool, torch.float32, torch.float64]
    expected = F.linear(batch.x, engine.full_state_dict()["kept.weight"])
    assert torch.equal(model.exact, expected.bfloat16())


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        weight = self.linear.weight
        if how == "written in place":
            x.addmm_(weight.detach(), weight.detach())
        elif how == "out":
            torch.mm(x, weight.detach(), out=x)
        elif how == "added in place":
            return (x @ weight).index_add_(0, torch.tensor([0]), x[:1]).sum()
        else:
            return torch.mm(x, weight[:, :3].T).sum()  # of shapes that do not fit either
        return x.sum()


def test_what_would_not_be_written_and_what_fails_otherwise_are_refused_as_by_pytorch():
    engine, x = engine_of(Refused()), torch.rand(4, 4)
    for how, said in (("written in place", "dtype"), ("out", "dtype"), ("shapes", "shapes cannot be multiplied")):
        with pytest.raises(RuntimeError, match=said):
            engine(x, how)
    assert engine(x, "added in place").dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "number", "num_said"), [("fp16", 1e5, 1), ("fp16", 6e4, 0), ("bf16", 1e30, 0)])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_finite_value_does_not_become_inf_without_a_word(precision, number, num_said, evaluates):
    engine = engine_of(Regression(), precision)
    inputs = (torch.full((2, 4), number), torch.ones(2))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if evaluates:
            with torch.no_grad():
                engine(*inputs)
        else:
            engine.train_step([inputs])
        assert len(said) == num_said
        assert all("values that fp16 does not reach, and became inf" in str(each.message) for each in said)


@pytest.mark.parametrize("given", [torch.inf, torch.nan])
def test_of_what_is_not_finite_before_nothing_is_said(given):
    engine = engine_of(Regression(), "fp16")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert not engine(torch.full((2, 4), given), torch.ones(2)).isfinite()


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Placed() for _ in range(2))
        self.loss = nn.HuberLoss()

    def forward(self, hidden: torch.Tensor, places: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, places, Odd.rounds)
        return self.loss(hidden.mean(-1), target)


@pytest.mark.slow
def test_a_compiled_unit_rounds_its_arguments_and_a_compiled_loss_does_not():
    engine = engine_of(seeded(Compiled), compile=True)
    hidden, places, target = torch.rand(2, 3, 8), torch.rand(2, 3, 2), torch.full((2, 3), 1001.5)
    loss = engine(hidden, places, target)
    engine.backward(loss)
    reference, rounded = seeded(Compiled).bfloat16(), hidden.bfloat16()
    for block in reference.blocks:
        rounded = block(rounded, places.bfloat16(), Odd.rounds)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.huber_loss(rounded.mean(-1).float(), target).item(), abs=0.5)
    assert not engine.step().skipped


class Pair(NamedTuple):
    left: Any
    right: Any


class Output(dict):
    """A dict subclass that pytree does not know."""

    label = "kept"


@dataclass
class Derived:
    """Its constructor takes other arguments than it has fields, and its field may be missing."""

    start: Any
    twice: Any = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.start * 2


def test_every_tensor_in_a_structure_is_cast_in_containers_of_the_same_type():
    derived = Derived(torch.ones(2))
    given = Batch({"a": Pair(Output(x=derived), [torch.ones(2), None, "text"])}, torch.arange(2))
    got = cast_floating(given, torch.float16)
    (left, right), half = got.x["a"], torch.ones(2, dtype=torch.float16)
    assert [type(each) for each in (got, got.x["a"], left, left["x"])] == [Batch, Pair, Output, Derived]
    assert left.label == "kept"
    assert torch.equal(left["x"].twice, 2 * half)
    assert torch.equal(right[0], half)
    assert right[1:] == [None, "text"]
    assert got.ids is given.ids
    assert derived.twice.dtype == torch.float32  # nothing in place
    assert cast_floating(derived, torch.float32) is derived
    assert cast_floating(Derived, torch.float16) is Derived  # the class itself is no container


# Which parameters a pattern keeps, and what a kept module is given and gives. Bits and bytes: tests/distributed.


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
    dtypes = dtypes_of(parameters, replace(PRECISIONS["bf16"], keep_fp32=patterns))
    return [each.names[0] for each in parameters if dtypes[each.parameter] == torch.float32]


def test_a_pattern_names_parameters_or_modules_and_a_tied_parameter_by_any_of_its_names():
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


def test_a_module_kept_as_a_whole_gets_fp32_and_gives_the_compute_dtype():
    model = run("router", "norms", "embed")
    fp32, bf16, int64 = torch.float32, torch.bfloat16, torch.int64
    assert model.router.seen == [fp32, fp32, int64, fp32]  # nothing is cast within the router
    assert model.seen == [bf16, bf16, int64]
    assert {module.weight.dtype for module in (*model.norms, *model.router.gates, model.embed)} == {fp32}
    assert model.gain.dtype == bf16


def test_in_fp32_all_is_kept_anyway_and_nothing_is_cast():
    model = run("norms", precision="fp32")
    assert model.seen == [torch.float32, torch.float32, torch.int64]


@pytest.mark.case(
    "precision", "that keeps nothing, or everything", "refused", under="A model, or one parameter, in fp64"
)
def test_a_pattern_that_matches_nothing_is_refused_in_every_precision():
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
def test_a_buffer_in_fp32_that_meets_16_bits_is_named_with_what_to_do(said, make):
    with pytest.raises(zerotrain.ConfigError) as raised:
        around(make(), [])(torch.arange(4))
    assert str(raised.value).startswith(said)
    assert ("keep_fp32=[middle]" in str(raised.value)) == (make is not Table)
    if make is not Table:
        engine = around(make(), ["middle"])
        engine.backward(engine(torch.arange(4)).float().square().mean())
        assert not engine.step().skipped


def test_an_error_that_is_of_no_buffer_stays_pytorchs():
    engine = around(nn.Linear(7, 8), [])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        engine(torch.arange(4))
    with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices' to have"):
        engine(torch.ones(4))


def scales(scaler: LossScaler, overflows: list[bool]) -> list[float]:
    """The scale of each step."""
    seen = []
    for overflowed in overflows:
        seen.append(scaler.scale)
        scaler.update(overflowed=overflowed)
    return seen


@pytest.mark.parametrize("growth_interval", [1, 2, 3])
def test_the_scales_are_those_of_torchs_own_scaler(growth_interval):
    overflows = [bool(bit) for bit in torch.randint(0, 4, (24,), generator=torch.Generator().manual_seed(0)) == 0]
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=growth_interval)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for overflowed in overflows:
        theirs.scale(weight.sum())  # makes its scale
        weight.grad = torch.full((1,), torch.inf if overflowed else 0.0)
        expected.append(theirs.get_scale())
        theirs.step(optimizer)
        theirs.update()
    assert 1.0 < min(expected) < max(expected) < MAX_SCALE  # theirs knows neither limit
    assert scales(LossScaler(scale=2.0**12, growth_interval=growth_interval), overflows) == expected


def test_it_never_comes_under_1_nor_leaves_fp32():
    falling = LossScaler(scale=4.0, growth_interval=1)
    assert scales(falling, [True] * 4) == [4.0, 2.0, 1.0, 1.0]
    rising = LossScaler(scale=MAX_SCALE / 2, growth_interval=1)
    assert scales(rising, [False] * 3) == [MAX_SCALE / 2, MAX_SCALE, MAX_SCALE]


def test_in_fp32_an_input_of_another_dtype_is_refused_as_plain_pytorch_does():
    engine = zerotrain.build_engine(nn.Linear(4, 4), optimizer=SGD)
    with pytest.raises(RuntimeError, match="dtype"):
        engine(torch.ones(1, 4, dtype=torch.float64))
