"""Parameters as people have them: every case trains at every stage to the bits of plain PyTorch in one process.

The reference gives a parameter that trains and that no rank used in a step a gradient of zeros, as the engine does;
torch's optimizers would skip it. AdamW is not the fused one: torch's fused CPU kernel rounds the last elements of a
tensor whose size is no multiple of the vector width in another way than the rest, and so differs with its padding.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
import uneven
from cases import be_late, place, run_over, three_stages
from torch import nn
from torch.nn import functional

import zerotrain

CASE_ROWS = (
    "parameters",
    """
tied inside a unit | same bits | tied inside a unit
tied across units; a vocabulary of 4N + 1 * | same bits; the parameter is held once, in the root | tied across
    units, vocabulary of 4N + 1
complete layers frozen | same bits | frozen layers
frozen, and read without calling its module | same bits | frozen and read without a call
only biases train | same bits | biases alone
LoRA-style adapters in plain torch | same bits | adapters
integer, boolean and complex parameters and buffers | kept in their dtype, with rank 0's values at the start; same
    bits | integer, boolean and complex ones
zero-sized, 0-dim, one element, transposed, channels-last, (7, 15), (17, 257); smaller than the number of ranks * |
    same bits; shape and strides stay | odd shapes
used by no rank, by one rank alone, in every other step, twice in a forward * | same bits; without use the gradient
    is zeros, see below | unused, of one rank, of every other step
other parts used on each rank: a linear of one block, something in every block * | same bits | one linear of ten
    blocks unused on rank 0; in every block something unused on another rank
experts chosen differently by each rank, in blocks or as the complete model * | same bits; a ModuleList called
    `experts` is no unit, its parameters go with the module around it | a mixture of experts; a mixture of experts
    alone
complete blocks skipped on one rank, as layer drop does * | same bits on gloo; at stage 3 if no more blocks in a row
    than `zero.prefetch`: otherwise the ranks wait for each other, and end with `CommError` | blocks skipped on one
    rank
several parameter groups, an empty one | same bits; an empty group warns | groups of one's own
a group added late * | same bits | a group added late
frozen in mid-run | same bits | frozen in mid-run
unfrozen in mid-run | same bits; new to the optimizer | unfrozen in mid-run
frozen and unfrozen again * | same bits; the optimizer's state of it is lost | frozen and unfrozen again
""",
)


ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=False)
WIDTH = 12
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Block(nn.Module):
    """One unit: (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self, make_inner: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = make_inner()

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        return x + self.inner(self.norm(x), **how).tanh()


class Stack(nn.Module):
    """An input layer, three units, an output layer; the loss is the mean square of what comes out."""

    def __init__(self, make_inner: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.first = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(Block(make_inner) for _ in range(3))
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor, **how: Any) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, **how)
        return self.last(x).float().square().mean()


class TiedPair(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Adapted(nn.Module):
    """LoRA (arXiv 2106.09685) in plain torch: a frozen layer and a trained product of rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.lora_b = nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.lora_a.t() @ self.lora_b.t()


class Shapes(nn.Module):
    """Parameters of every odd shape, all of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.no_rows = nn.Linear(WIDTH, 0)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.transposed = nn.Parameter(torch.randn(WIDTH, 7).t())
        self.odd = nn.Parameter(torch.randn(7, 15))
        self.wide = nn.Parameter(torch.randn(17, 257) / 16)
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.pad(self.no_rows(x), (0, WIDTH))
        x = (x @ self.transposed.t() @ self.odd) * self.temperature + self.one
        x = functional.pad(x, (0, 2)) @ self.wide
        return self.conv(x[:, :256].reshape(-1, 2, 8, 16)).flatten(1)[:, :WIDTH]


class ReadByParent(Stack):
    """Uses a unit's frozen weight before and behind the units, without calling its module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.linear(self.first(x), self.blocks[1].inner.weight)
        for block in self.blocks:
            x = block(x)
        return self.last(functional.linear(x, self.blocks[1].inner.weight)).float().square().mean()


class Sometimes(nn.Module):
    """A parameter that nobody uses, one of rank 0 alone, one of odd steps, and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.of_rank_0, self.of_odd_steps, self.twice = (nn.Parameter(torch.ones(WIDTH)) for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
        x = x * self.twice + self.twice
        x = x * self.of_rank_0 if rank == 0 else x
        return x * self.of_odd_steps if step % 2 else x


class Tables(nn.Module):
    """Parameters and buffers that are no floating-point numbers, wrong everywhere but on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(WIDTH), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("rotation", torch.randn(3, WIDTH, dtype=torch.complex64).t())
        self.register_buffer("none", torch.zeros(0, dtype=torch.int8))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        if place()[0] > 0:
            self.order.data.zero_(), self.phase.data.zero_(), self.mask.zero_(), self.rotation.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x[:, self.order] * self.scale * self.mask
        return turned + (self.phase.real + self.rotation[:, 0].imag).to(x.dtype)


class Embedded(nn.Module):
    """The embedding is the output layer too, and the last unit has the first one's weight."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.blocks[2].inner.weight = self.blocks[0].inner.weight
        self.head = nn.Linear(WIDTH, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, 0].to(self.embedding.weight.dtype).float().abs() * 100).long() % self.embedding.num_embeddings
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden).float(), ids.flip(0))


def frozen(model: nn.Module, *patterns: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    return model


@dataclass(frozen=True)
class Case:
    """A model, and what its user does to it."""

    make: Callable[[int], nn.Module] = lambda num_ranks: Stack()
    changes: dict[int, Callable[[Any], None]] = field(default_factory=dict)
    """Before step k: calls of the engine."""
    groups: list[dict[str, Any]] | None = None
    tells_place: bool = False
    """Whether the forward gets rank and step."""

    @property
    def num_steps(self) -> int:
        """The first makes the optimizer's state, and the second uses it; as many behind the last change."""
        return 2 + max(self.changes, default=int(self.tells_place))


CASES = {
    "tied inside a unit": Case(lambda num_ranks: Stack(TiedPair)),
    "tied across units, vocabulary of 4N + 1": Case(lambda num_ranks: Embedded(4 * num_ranks + 1)),
    "frozen layers": Case(lambda num_ranks: frozen(Stack(), "first.*", "blocks.1.*")),
    "frozen and read without a call": Case(lambda num_ranks: frozen(ReadByParent(), "blocks.1.*")),
    "biases alone": Case(lambda num_ranks: frozen(Stack(), "*weight")),
    "adapters": Case(lambda num_ranks: frozen(Stack(Adapted), "first.*", "last.*", "*norm.*")),
    "integer, boolean and complex ones": Case(lambda num_ranks: Stack(Tables)),
    "odd shapes": Case(lambda num_ranks: Stack(Shapes)),
    "unused, of one rank, of every other step": Case(lambda num_ranks: Stack(Sometimes), tells_place=True),
    "one linear of ten blocks unused on rank 0": Case(lambda num_ranks: uneven.OneLinearOfOneRank(), tells_place=True),
    "in every block something unused on another rank": Case(
        lambda num_ranks: uneven.EveryBlockOnAnotherRank(), tells_place=True
    ),
    "blocks skipped on one rank": Case(lambda num_ranks: uneven.SkippedBlocks(), tells_place=True),
    "a mixture of experts": Case(lambda num_ranks: uneven.Mixture(), tells_place=True),
    "a mixture of experts alone": Case(lambda num_ranks: uneven.ExpertsAlone(), tells_place=True),
    "groups of one's own": Case(
        groups=[
            {"params": ["*.bias", "*norm*"], "weight_decay": 0.0},
            {"params": "last.weight", "lr": 0.05, "betas": (0.8, 0.9)},
            {"params": []},
            {"params": "*", "name": "rest"},
        ]
    ),
    "a group added late": Case(
        lambda num_ranks: frozen(Stack(), "last.*", "blocks.0.*"),
        {2: lambda engine: engine.add_param_group({"params": ["last.*"], "lr": 0.1, "weight_decay": 0.0})},
        groups=[{"params": "first.*"}, {"params": "blocks.*", "lr": 0.003}],
    ),
    "frozen in mid-run": Case(changes={2: lambda engine: engine.freeze("blocks.1.*", "*.bias")}),
    "unfrozen in mid-run": Case(
        lambda num_ranks: frozen(Stack(), "first.*", "blocks.[01].*"),
        {1: lambda engine: engine.unfreeze("blocks.1.*"), 3: lambda engine: engine.unfreeze("first.*", "blocks.0.*")},
    ),
    "frozen and unfrozen again": Case(
        changes={1: lambda engine: engine.freeze("last.*", "*norm*"), 3: lambda engine: engine.unfreeze("last.*")}
    ),
}
"""By name, as docs/reference/cases/parameters.md lists them."""


@dataclass(frozen=True)
class Run:
    """One case in one setting."""

    case: str
    stage: int
    precision: str = "fp32"
    num_micro_batches: int = 1
    bucket_mb: float = 0.001
    late_rank: int | None = None
    """Sleeps a moment before each gather and reduction."""


def inputs(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    return torch.randn(6, 7, generator=torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank))


def train(run: Run) -> dict[str, torch.Tensor]:
    """On each rank: all steps of a case in our engine; rank 0 gets the weights."""
    rank, size = place()
    case = CASES[run.case]
    torch.manual_seed(0)
    engine = zerotrain.build_engine(
        case.make(size),
        optimizer=ADAMW,
        zero=zerotrain.ZeroConfig(stage=run.stage, bucket_mb=run.bucket_mb, reduction="ordered"),
        precision=run.precision,
        param_groups=case.groups,
    )
    if rank == run.late_rank:
        be_late(engine, ("gather", "reduction"), 0.002)
    for step in range(case.num_steps):
        case.changes.get(step, lambda engine: None)(engine)
        for index in range(run.num_micro_batches):
            how = {"rank": rank, "step": step} if case.tells_place else {}
            loss = engine(inputs(step, index, rank), **how)
            if index < run.num_micro_batches - 1:
                with engine.no_sync():
                    engine.backward(loss, weight=1 / run.num_micro_batches)
            else:
                engine.backward(loss, weight=1 / run.num_micro_batches)
        engine.step()
    return engine.full_state_dict()


class Plain:
    """The engine's calls in plain PyTorch, one process for all ranks: fp32 weights beside a model in the wire's dtype.

    What is frozen is kept in the wire's dtype alone.
    """

    def __init__(self, run: Run, num_ranks: int) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.run, self.num_ranks, self.case = run, num_ranks, CASES[run.case]
        self.model, self.wire = self.case.make(num_ranks), WIRE[run.precision]
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.is_floating_point()}
        self.weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(self.wire)
        self.optimizer = ADAMW(self._groups())
        self.freeze(*(name for name, p in self.parameters.items() if not p.requires_grad))

    def _groups(self) -> list[dict[str, Any]]:
        if self.case.groups is None:
            return [{"params": list(self.weights.values())}]
        left = dict(self.weights)
        groups = []
        for group in self.case.groups:
            names = self._matching(group["params"], left)
            groups.append(group | {"params": [left.pop(name) for name in names]})
        return groups

    def _matching(self, patterns: Any, names: Any) -> list[str]:
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]

    def freeze(self, *patterns: str) -> None:
        for name in self._matching(patterns, self.parameters):
            self.parameters[name].requires_grad_(False)
            self.weights[name].copy_(self.weights[name].to(self.wire))
            self.weights[name].grad = None
            self.optimizer.state.pop(self.weights[name], None)

    def unfreeze(self, *patterns: str) -> None:
        for name in self._matching(patterns, self.parameters):
            self.parameters[name].requires_grad_(True)

    def add_param_group(self, group: dict[str, Any]) -> None:
        names = self._matching(group["params"], self.parameters)
        for each in self.optimizer.param_groups:
            each["params"] = [p for p in each["params"] if not any(p is self.weights[name] for name in names)]
        self.optimizer.add_param_group(group | {"params": [self.weights[name] for name in names]})
        self.unfreeze(*names)

    def step(self, step: int) -> None:
        self.case.changes.get(step, lambda engine: None)(self)
        training = {name: p for name, p in self.parameters.items() if p.requires_grad}
        sums = {name: torch.zeros_like(self.weights[name]) for name in training}
        for rank in range(self.num_ranks):
            mine = {name: torch.zeros_like(self.weights[name]) for name in training}
            for index in range(self.run.num_micro_batches):
                how = {"rank": rank, "step": step} if self.case.tells_place else {}
                loss = self.model(inputs(step, index, rank).to(self.wire), **how)
                (loss * (1 / self.run.num_micro_batches)).backward()
                for name, parameter in training.items():
                    mine[name] += 0 if parameter.grad is None else parameter.grad
                self.model.zero_grad()
            for name in training:
                sums[name] += mine[name].to(self.wire)
        for name in training:
            self.weights[name].grad = (sums[name] / self.num_ranks).to(self.wire).float()
        self.optimizer.step()
        with torch.no_grad():
            for name in training:
                self.parameters[name].copy_(self.weights[name])

    def trained(self) -> dict[str, torch.Tensor]:
        for step in range(self.case.num_steps):
            self.step(step)
        for name, parameter in self.parameters.items():
            parameter.data = self.weights[name]
        return self.model.state_dict()


def differing(runs: list[Run], num_ranks: int) -> list[str]:
    """Train all runs; name those that are not the reference's to the bit, and the first parameter that shows it."""
    wrong = []
    reference = functools.cache(lambda run: Plain(run, num_ranks).trained())
    for run, (got, *_) in zip(runs, run_over(runs, train, num_ranks), strict=True):
        expected = reference(replace(run, stage=0, bucket_mb=0, late_rank=None))
        assert list(got) == list(expected)
        unequal = [name for name in expected if not torch.equal(got[name], expected[name])]
        if unequal:
            wrong.append(f"{run}: {unequal[0]} and {len(unequal) - 1} more")
    return wrong


HARD = (
    "tied across units, vocabulary of 4N + 1",
    "odd shapes",
    "unused, of one rank, of every other step",
    "a group added late",
    "frozen and unfrozen again",
)


def hard_run(case: str, stage: int, precision: str) -> Run:
    return Run(case, stage, precision, num_micro_batches=2, bucket_mb=0.003, late_rank=stage % 3)


HARD_RUNS = [
    hard_run(case, stage, precision)
    for number, case in enumerate(HARD)
    for stage, precision in ((number % 3, ("fp32", "bf16")[number % 2]), (3, "fp32"), (3, "bf16"))
]
UNEVEN = (
    "one linear of ten blocks unused on rank 0",
    "in every block something unused on another rank",
    "blocks skipped on one rank",
    "a mixture of experts",
    "a mixture of experts alone",
)
"""Who uses what is over after three steps, and changes at the second."""


@pytest.mark.filterwarnings("ignore:param_groups. group .* holds no parameter")
def test_every_case_trains_to_the_bits_of_plain_pytorch_at_every_stage() -> None:
    """Those of UNEVEN below."""
    cases = [case for case in CASES if case not in UNEVEN]
    assert differing([Run(case, stage) for number, case in enumerate(cases) for stage in three_stages(number)], 2) == []


@pytest.mark.case(
    "hosts: Ranks of one host",
    "every stage, precision and size of buckets; 2, 3, 4, 6, 9 ranks; accumulation, a late rank",
)
def test_hard_cases_on_3_ranks_one_of_them_late_with_accumulation_and_in_bf16() -> None:
    """At stage 3 in both precisions, at the others in turns; tests/bits has the rest."""
    assert differing(HARD_RUNS, 3) == []


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_that_use_different_parts_of_a_model_neither_wait_for_each_other_nor_change_a_bit(num_ranks: int) -> None:
    """At stage 3, and at stage 0 on two ranks or on three, where it is not: at 1 on two, at 2 on three, which issue the
    same collectives. All of it is in tests/bits."""
    runs = [
        Run(case, stage, bucket_mb=0.004, late_rank=stage % num_ranks)
        for number, case in enumerate(UNEVEN)
        for stage in ((0, num_ranks - 1)[(number + num_ranks) % 2], 3)
    ]
    runs += [Run(case, 3, "bf16", num_micro_batches=2, bucket_mb=0.02, late_rank=0) for case in UNEVEN[:1]]
    assert differing(runs, num_ranks) == []
