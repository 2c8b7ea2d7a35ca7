"""What the promise of equal bits is made of, broken on purpose one by one, and found by the hash. See
docs/reference/bits.md."""

import functools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import Case, run_over, train_and_hash

import zerotrain
from tests.bits.training import Net, Place, Setup, Training, batch, build, in_plain_pytorch, on_ranks
from tests.ranks.fake_wire import run_threads
from tests.unit.training.runs import SEQ_LEN, VOCAB_SIZE, trainer_of
from zerotrain.data import SyntheticTokens
from zerotrain.models import GPT

SHAPE = {"vocab_size": VOCAB_SIZE, "max_seq_len": SEQ_LEN, "num_layers": 2, "num_heads": 2, "hidden_size": 32}
MODEL = functools.partial(GPT, **SHAPE)


@contextmanager
def threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run(
    folder: Path,
    *,
    make: Any = MODEL,
    initial_seed: int = 0,
    num_threads: int = 1,
    fused: bool = False,
    num_sequences: int = 300,
    zero: zerotrain.ZeroConfig | None = None,
    precision: str | zerotrain.PrecisionConfig = "fp32",
    virtual_ranks: int = 4,
    **settings: Any,
) -> str:
    """The hash of the weights after a run of the Trainer on one rank: 16 sequences a step."""
    with threads(num_threads):
        torch.manual_seed(initial_seed)
        engine = zerotrain.build_engine(
            make(),
            optimizer=functools.partial(torch.optim.AdamW, lr=1e-2, fused=fused),
            zero=zero,
            precision=precision,
            virtual_ranks=virtual_ranks,
            max_grad_norm=0.5,
        )
        data = SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, num_sequences=num_sequences)
        size = {"micro_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3, "eval_batches": 1}
        body = trainer_of(engine, folder, dataset=data, **size | settings).run()
    return str(body["weights_sha256"])


BF16 = {"precision": "bf16"}
FP16 = {"precision": zerotrain.PrecisionConfig("fp16", initial_scale=1024.0)}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "CPU threads of a rank": ({}, {"num_threads": 2}),
    "micro-batch size, of as large a batch": ({}, {"micro_batch_size": 4, "gradient_accumulation_steps": 1}),
    "accumulation, of as large a batch": ({}, {"gradient_accumulation_steps": 1, "virtual_ranks": 8}),
    "virtual ranks, of as large a batch": (
        {"virtual_ranks": 2, "gradient_accumulation_steps": 4},
        {"virtual_ranks": 1, "gradient_accumulation_steps": 8},
    ),
    "seed": ({}, {"seed": 1}),
    "seed of the initial weights": ({}, {"initial_seed": 1}),
    "the data": ({}, {"num_sequences": 400}),
    "precision": ({}, BF16),
    "what is kept in fp32": (BF16, {"precision": zerotrain.PrecisionConfig("bf16", keep_fp32=["*.ln_*"])}),
    "the first loss scale, where small gradients vanish": (
        FP16,
        {"precision": zerotrain.PrecisionConfig("fp16", initial_scale=1.0)},
    ),
    "the optimizer's kernel": ({}, {"fused": True}),
}
"""What must stay equal -> (a run, what is changed in it)."""


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_must_stay_equal_changes_the_hash(name: str, tmp_path: Path) -> None:
    base, changed = SETTINGS[name]
    as_it_was = run(tmp_path, **base)
    assert run(tmp_path, **base) == as_it_was
    assert run(tmp_path, **base | changed) != as_it_was


class Drawing(GPT):
    """With noise that no seed of ours reaches."""

    def __init__(self, draw: Any) -> None:
        super().__init__(**SHAPE)
        self.draw = draw

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids, labels) * (1 + 0.01 * self.draw())


class SumInNoOrder(torch.autograd.Function):
    """Rows added as atomic additions of a GPU are: in the order in which they happen to come."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        ctx.num = len(rows)
        order = list(range(len(rows)))
        random.SystemRandom().shuffle(order)
        total = torch.zeros_like(rows[0])
        for index in order:
            total = total + rows[index]
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(ctx.num, *grad.shape)


class Unordered(GPT):
    """Whose loss depends on the sum of its 32 embeddings."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        out = super().forward(ids, labels)
        return out if labels is None else out + SumInNoOrder.apply(self.wte.weight).square().mean()


MODELS: dict[str, Any] = {
    "draws from a generator of its own": functools.partial(Drawing, np.random.default_rng().random),
    "looks at the clock": functools.partial(Drawing, lambda: time.perf_counter_ns() % 1000 / 1000),
    "adds in no fixed order": functools.partial(Unordered, **SHAPE),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_no_function_of_its_inputs_and_torchs_random_numbers_changes_the_hash(
    name: str, tmp_path: Path
) -> None:
    assert run(tmp_path, make=MODELS[name]) != run(tmp_path, make=MODELS[name])


GLOBAL: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),
}


@pytest.mark.parametrize("of", GLOBAL)
def test_a_model_that_draws_from_global_generators_alone_does_not(of: str, tmp_path: Path) -> None:
    hashes = set()
    for drawn_before in range(2):
        for _ in range(drawn_before):
            GLOBAL[of]()
        hashes.add(run(tmp_path, make=functools.partial(Drawing, GLOBAL[of])))
    assert len(hashes) == 1


class Remembering(Net):
    """Which keeps something from one forward to the next, as batch norms do: here in a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: torch.Tensor, place: Place) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean, place)


def test_a_model_that_remembers_its_last_forward_differs_with_the_number_of_ranks() -> None:
    training = Training(make=Remembering, virtual_ranks=4)
    assert len({on_ranks(training, Setup(num_ranks)).sha256 for num_ranks in (1, 2, 4)}) == 3
    assert len({on_ranks(training, Setup(2, stage)).sha256 for stage in range(4)}) == 1


def in_ones_own_loop(world: zerotrain.World, syncs: bool) -> str:
    """Two backwards for each virtual rank; all but the last of a virtual rank in no_sync, or none."""
    engine = build(Training(virtual_ranks=4), Setup(world.size), world)
    for step in range(3):
        for number in engine.each_virtual_rank():
            for index in range(2):
                with engine.no_sync() if index == 0 and not syncs else nullcontext():
                    place = (step, number, index)
                    engine.backward(engine(batch(place), place))
        engine.step()
    return engine.weights_sha256()


@pytest.mark.parametrize("syncs", [False, True])
def test_backwards_before_the_last_of_a_virtual_rank_belong_into_no_sync(syncs: bool) -> None:
    loop = functools.partial(in_ones_own_loop, syncs=syncs)
    hashes = [run_threads(loop, num, in_turns=True)[0][0] for num in (1, 2, 4)]  # each rank seeds, and draws weights
    if syncs:
        assert len(set(hashes)) == 3
    else:
        assert set(hashes) == {in_plain_pytorch(Training(virtual_ranks=4, weight=lambda place: 2.0)).sha256}


def test_another_number_of_ranks_changes_the_hash_where_virtual_ranks_are_left_out() -> None:
    """The default: as many as ranks."""
    by_ranks = {num_ranks: on_ranks(Training(virtual_ranks=num_ranks), Setup(num_ranks)).sha256 for num_ranks in (2, 4)}
    assert by_ranks[2] != by_ranks[4]
    assert by_ranks[2] == in_plain_pytorch(Training(virtual_ranks=2)).sha256


def test_the_native_reduction_of_three_ranks_changes_the_hash() -> None:
    """gloo adds in an order of its own, in bf16."""
    case = Case(zerotrain.ZeroConfig(reduction="ordered"), precision="bf16")
    ordered, native, finer = run_over(
        [case, case.with_zero(reduction="native"), case.with_zero(reduction="native", bucket_mb=0.02)],
        train_and_hash,
        3,
    )
    assert len(set(ordered)) == len(set(native)) == 1
    assert ordered[0] != native[0]
    assert native[0] != finer[0]
