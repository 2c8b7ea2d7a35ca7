"""Deferred initialisation: the bits of the ordinary constructor, and no memory for its large parameters."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from zerotrain.engine.model.deferred import MAX_STEPS, MIN_NBYTES, deferred_init
from zerotrain.models import GPT

WIDE = 192
"""A matrix of so many rows and columns is large enough to be deferred."""


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return make()

    return build


def linears(init: Callable[[torch.Tensor], object]) -> nn.Module:
    """Three layers, all drawn a second time once all are there, as many models do."""
    model = nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(3)))

    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init(module.weight)

    return model.apply(reset)


OUTSIDE = torch.arange(2.0 * WIDE * WIDE)
"""Has been there before."""


class Computed(nn.Module):
    """Parameters made of other tensors, some of which change afterwards."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.randn(WIDE, WIDE)
        self.scaled = nn.Parameter(base * 0.02)
        self.joined = nn.Parameter(torch.cat([base, self.scaled.detach()]))
        base.zero_()
        self.rows = nn.Parameter(torch.empty(WIDE, WIDE).uniform_())
        with torch.no_grad():
            self.rows[3].fill_(1.0)
            self.rows.t().mul_(torch.arange(WIDE, dtype=torch.float32))
            self.mean = self.rows.mean().item()
            self.scaled.div_(self.rows.std())
        self.after = nn.Parameter(torch.rand(WIDE, WIDE, generator=torch.Generator().manual_seed(5)) + self.mean)
        self.copied = copy.deepcopy(self.after)
        self.seen = nn.Parameter(OUTSIDE[WIDE * WIDE :].view(WIDE, WIDE))
        self.from_outside = nn.Parameter(torch.empty(WIDE, WIDE).copy_(self.seen))
        self.twice = nn.Parameter(torch.tensor(self.scaled.tolist()))


class Held(nn.Module):
    """What is no parameter has its values at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDE, WIDE)
        self.register_buffer("table", torch.arange(WIDE * WIDE).view(WIDE, WIDE).cos())
        self.frequencies = {"in a dict": torch.randn(WIDE, WIDE)}
        self.alias = self.layer.weight.data


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": lambda: GPT(vocab_size=200, max_seq_len=160, num_layers=2, num_heads=4, hidden_size=128),
    "normal": lambda: linears(lambda weight: nn.init.normal_(weight, std=0.02)),
    "truncated normal": lambda: linears(nn.init.trunc_normal_),
    "orthogonal": lambda: linears(nn.init.orthogonal_),
    "padding": lambda: nn.Embedding(WIDE, WIDE, padding_idx=3),
    "bf16": lambda: linears(nn.init.xavier_uniform_).bfloat16(),
    "copied layers": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDE, 2, WIDE), 2),
    "computed": Computed,
    "held": Held,
}


@pytest.mark.case(
    "models: Models and optimizers",
    "initial weights of a model that is given as a function",
    "those of the ordinary way at every stage",
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODELS)
def test_the_values_and_the_next_random_number_are_those_of_the_ordinary_constructor(name):
    plain = seeded(MODELS[name])()
    next_number = torch.rand(())
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        model, values = deferred_init(seeded(MODELS[name]))
    assert torch.equal(torch.rand(()), next_number)
    expected = dict(plain.named_parameters())
    for parameter_name, parameter in reversed(list(model.named_parameters())):  # in no particular order
        with values.values_of(parameter) as value:
            assert torch.equal(value, expected[parameter_name]), parameter_name


@pytest.mark.parametrize("name", ["GPT", "normal", "truncated normal", "orthogonal", "padding", "bf16"])
def test_large_parameters_have_no_memory(name):
    model, values = deferred_init(MODELS[name])
    large = [each for each in model.parameters() if each.nbytes >= MIN_NBYTES]
    assert large
    assert sum(each.untyped_storage().nbytes() for each in large) == 0
    with values.values_of(large[0]):
        assert sum(each.untyped_storage().nbytes() for each in large) == large[0].nbytes
    assert sum(each.untyped_storage().nbytes() for each in large) == 0


def test_what_is_no_parameter_has_its_values_at_once():
    plain = seeded(Held)()
    with pytest.warns(UserWarning, match=r"initial values of layer\.weight cannot be computed again"):
        model, _ = deferred_init(seeded(Held))
    assert torch.equal(model.table, plain.table)
    assert torch.equal(model.frequencies["in a dict"], plain.frequencies["in a dict"])
    assert torch.equal(model.alias, plain.alias)


def test_while_the_constructor_runs_memory_is_held_for_one_layer():
    held_nbytes: list[int] = []
    weights: list[nn.Parameter] = []

    class Watched(nn.Linear):
        def reset_parameters(self) -> None:
            super().reset_parameters()
            weights.append(self.weight)
            with torch._C.DisableTorchFunction():  # or looking would count as reading the values
                held_nbytes.append(sum(each.untyped_storage().nbytes() for each in weights))

    deferred_init(lambda: nn.Sequential(*(Watched(WIDE, WIDE) for _ in range(4))))
    assert held_nbytes == [WIDE * WIDE * 4] * 4


def test_what_is_written_by_many_operations_is_held_and_named():
    class ByRow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDE, WIDE))
            with torch.no_grad():
                for row in self.weight:
                    row.normal_()

    assert WIDE > MAX_STEPS
    plain = seeded(ByRow)()
    with pytest.warns(UserWarning, match="weight cannot be computed again"):
        model, values = deferred_init(seeded(ByRow))
    with values.values_of(model.weight) as value:
        assert torch.equal(value, plain.weight)
