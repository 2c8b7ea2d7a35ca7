"""Floating-point arguments in 16 bits: labels keep their bits, weights meet rounded ones, and nothing becomes inf
without a word."""

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerotrain
from tests.unit.engine.habits import DTYPES, EVERYWHERE, assert_same, build, in_plain_pytorch
from tests.unit.engine.parts import seeded
from zerotrain.testing.fake_wire import run_threads

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
def test_a_target_keeps_its_bits(precision: str, target: float, loss: float, as_dict: bool, dtype: torch.dtype) -> None:
    engine = engine_of(Regression(), precision, max_skipped_steps=1)
    inputs = {"x": torch.ones(2, 4, dtype=dtype), "target": torch.full((2,), target, dtype=dtype)}
    with torch.no_grad():
        assert engine(**inputs).item() == loss
    assert engine.train_step([inputs if as_dict else tuple(inputs.values())]).loss.item() == loss


def test_in_fp16_a_target_beyond_its_range_is_trained_on() -> None:
    engine = engine_of(Regression(), zerotrain.PrecisionConfig("fp16", initial_scale=256.0), max_skipped_steps=1)
    result = engine.train_step([{"x": torch.ones(2, 4), "target": torch.full((2,), 1e5), "loss": F.l1_loss}])
    assert result.loss.item() == 99000.0
    assert not result.skipped


LOSSES = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy": lambda out, target: F.binary_cross_entropy(out, target),
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "soft_margin_loss": F.soft_margin_loss,
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
def test_a_loss_is_that_of_the_widened_output(precision: str, loss: Any) -> None:
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
def test_every_stage_rounds_where_plain_pytorch_must(stage: int, size: int, precision: str, checkpoints: bool) -> None:
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


def test_arguments_in_any_structure_reach_the_model_and_what_is_kept_in_fp32_as_they_are() -> None:
    torch.manual_seed(0)
    model = Notes()
    engine = engine_of(model, zerotrain.PrecisionConfig("bf16", keep_fp32=["kept"]))
    batch = Batch(torch.rand(3, 4) + 1000, torch.arange(3))
    others = {"mask": torch.ones(3, dtype=torch.bool), "narrow": torch.ones(3, 4, dtype=torch.bfloat16)}
    engine.backward(engine(batch, others=others, targets=[torch.ones(3), torch.ones(3, dtype=torch.float64)]))
    assert model.seen == [torch.float32, torch.int64, torch.bool, torch.float32, torch.float64]
    expected = F.linear(batch.x, engine.full_state_dict()["kept.weight"])
    assert torch.equal(model.exact, expected.bfloat16())


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.number = torch._C._len_torch_function_stack()
        return self.linear(x.to(self.linear.weight.dtype)).sum()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_whole_numbers_values_of_16_bits_and_a_model_in_fp32_cost_nothing(precision: str) -> None:
    model = Modes()
    engine = engine_of(model, precision)
    for x in (torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=DTYPES[precision])):
        engine.backward(engine(x))
        assert model.number == 0
    engine(torch.ones(2, 4))
    assert model.number == (precision == "bf16")


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


def test_what_would_not_be_written_and_what_fails_otherwise_are_refused_as_by_pytorch() -> None:
    engine, x = engine_of(Refused()), torch.rand(4, 4)
    for how, said in (("written in place", "dtype"), ("out", "dtype"), ("shapes", "shapes cannot be multiplied")):
        with pytest.raises(RuntimeError, match=said):
            engine(x, how)
    assert engine(x, "added in place").dtype == torch.bfloat16


@pytest.mark.parametrize(("precision", "number", "num_said"), [("fp16", 1e5, 1), ("fp16", 6e4, 0), ("bf16", 1e30, 0)])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_finite_value_does_not_become_inf_without_a_word(
    precision: str, number: float, num_said: int, evaluates: bool
) -> None:
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
def test_of_what_is_not_finite_before_nothing_is_said(given: float) -> None:
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


def test_a_compiled_unit_rounds_its_arguments_and_a_compiled_loss_does_not() -> None:
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


class Transformed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.jacrev(self.linear))(x).float().square().mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_arguments_are_rounded_within_transforms_too(precision: str) -> None:
    x = torch.rand(3, 4)
    engine = engine_of(seeded(Transformed), zerotrain.PrecisionConfig(precision, initial_scale=1.0))
    loss = engine(x)
    engine.backward(loss)
    assert not engine.step().skipped
    assert torch.equal(loss, seeded(Transformed).to(DTYPES[precision])(x.to(DTYPES[precision])))
