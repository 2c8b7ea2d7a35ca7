"""fp16 with its loss scale, parameters kept in fp32, steps that are skipped, and whatever structure tensors come in."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from cases import (
    OPTIMIZERS,
    Case,
    StagesOf,
    batch,
    build,
    make_model,
    micro_batches,
    place,
    reference_run,
    run_over,
    sha256,
    two_stages,
)
from torch import nn

import zerotrain
from zerotrain.errors import ConfigError, TrainingError
from zerotrain.settings import ZeroConfig
from zerotrain.sharding.plan import STAGES, Placement

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES_AND_PRECISIONS = list(product(range(4), DTYPES))
FP16 = Case(ZeroConfig(bucket_mb=0.1), precision="fp16", num_steps=2)
NORMS = "*ln_*"
NORM_NBYTES = (5 + 5 + 1) * 8
"""What one rank tells the other for the gradient norm, and to compare what they have done."""
Answers = Callable[[Callable[[Any], Any]], list[list[Any]]]


def call(job: tuple[Callable[[Any], Any], Any]) -> Any:
    fn, value = job
    return fn(value)


@pytest.fixture(scope="module")
def answers(once: Any) -> Answers:
    """What a function of this file returned for each of its values on each of two ranks: one start for all of them."""
    values = {
        resume_scale: [OVERFLOWING],
        stop: range(4),
        break_backward: range(4),
        exhaust: [2],
        usage: range(4),
        train_structured: STAGES_AND_PRECISIONS,
        held_dtypes: STAGES_AND_PRECISIONS,
    }
    jobs = [(fn, value) for fn in values for value in values[fn]]
    results = once("precision", lambda: run_over(jobs, call, 2))
    return lambda wanted: [by_rank for (fn, _), by_rank in zip(jobs, results, strict=True) if fn is wanted]


def train_by_hand(engine: zerotrain.ZeroEngine, case: Case, steps: range) -> list[zerotrain.StepResult]:
    """As `engine.train_step`, but with the losses that the case makes infinite."""
    rank, size = place()
    results = []
    for step in steps:
        for index, inputs in enumerate(micro_batches(batch(step, size, case.num_micro_batches), rank)):
            is_last = index == case.num_micro_batches - 1
            with nullcontext() if is_last else engine.no_sync():
                loss = engine(*inputs) * case.factor(step, rank)
                engine.backward(loss, weight=1 / case.num_micro_batches)
        results.append(engine.step())
    return results


def train(case: Case) -> dict[str, Any]:
    engine = build(case)
    results = train_by_hand(engine, case, range(case.num_steps))
    return {"sha256": engine.weights_sha256(), "scales": [each.loss_scale for each in results]}


HALF_PRECISIONS = {
    "fp16": FP16,
    "fp16, no clipping": replace(FP16, max_grad_norm=None, optimizer="sgd"),
    "fp16, norms in fp32": replace(FP16, keep_fp32=NORMS),
    "bf16, norms in fp32": replace(FP16, precision="bf16", keep_fp32=NORMS),
    "bf16, one block in fp32": replace(FP16, precision="bf16", keep_fp32="blocks.1"),
}


@pytest.mark.case(
    "precision", "fp16 and bf16; names kept in fp32", "same bits, the reference following the same dtypes"
)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 1), (3, 2)])
@pytest.mark.thinned(2, first=1)
def test_half_precisions_give_the_bits_of_plain_pytorch(num_ranks: int, num_micro_batches: int) -> None:
    """At stage 3 and another; tests/bits has the others."""
    require_bits(num_ranks, num_micro_batches, two_stages)


def require_bits(num_ranks: int, num_micro_batches: int, stages_of: StagesOf) -> None:
    cases = [replace(case, num_micro_batches=num_micro_batches) for case in HALF_PRECISIONS.values()]
    if num_ranks > 2:  # two cores: half of them with more ranks
        cases = cases[::2]
    expected = [sha256(reference_run(case, num_ranks)[0]) for case in cases]
    assert len(set(expected)) == len(expected)
    stages = [stages_of(number) for number in range(len(cases))]
    settings = [case.with_zero(stage=stage) for case, own in zip(cases, stages, strict=True) for stage in own]
    got = [{each["sha256"] for each in by_rank} for by_rank in run_over(settings, train, num_ranks)]
    assert got == [{value} for value, own in zip(expected, stages, strict=True) for _ in own]


# ---- the loss scale


OVERFLOWING = replace(FP16, initial_scale=2.0**10, growth_interval=2, num_steps=9, overflows=((1, 1), (2, 1), (6, 0)))
"""Steps 1 and 2 overflow on rank 1 alone, step 6 on rank 0 alone."""
SCALES = [2.0**power for power in (10, 10, 9, 8, 8, 9, 9, 8, 8)]


@pytest.mark.case("precision", "fp16: an overflow on one rank", "skips the step on all; the exact sequence of scales")
def test_an_overflow_on_one_rank_halves_the_scale_on_all_and_clean_steps_double_it() -> None:
    weights, scales = reference_run(OVERFLOWING, 2)
    assert scales == SCALES
    for by_rank in run_over([OVERFLOWING.with_zero(stage=stage) for stage in range(4)], train, 2):
        assert by_rank == [{"sha256": sha256(weights), "scales": SCALES}] * 2


def resume_scale(case: Case) -> list[float]:
    """The scales of a run that hands its scaler's state to another engine after each step."""
    scales, state = [], None
    for step in range(case.num_steps):
        engine = build(case)
        assert engine.loss_scaler is not None
        if state is not None:
            engine.loss_scaler.load_state_dict(state)
        scales += [result.loss_scale for result in train_by_hand(engine, case, range(step, step + 1))]
        state = engine.loss_scaler.state_dict()
    return scales


@pytest.mark.slow
def test_a_scaler_with_the_state_of_another_goes_on_with_its_scales(answers: Answers) -> None:
    assert answers(resume_scale) == [[SCALES, SCALES]]


# ---- when steps are skipped


def stop(stage: int) -> dict[str, Any]:
    """Three steps with an infinite loss on rank 1 after a good one; then a good one again."""
    case = replace(FP16, precision="bf16", overflows=((1, 1), (2, 1), (3, 1)), max_skipped_steps=3)
    engine = build(case.with_zero(stage=stage))
    train_by_hand(engine, case, range(1))
    before = engine.weights_sha256()
    skipped = [result.skipped for result in train_by_hand(engine, case, range(1, 3))]
    try:
        train_by_hand(engine, case, range(3, 4))
        message = "nothing was raised"
    except TrainingError as error:
        message = str(error)
    unchanged = engine.weights_sha256() == before
    [after] = train_by_hand(engine, case, range(4, 5))
    held = engine.memory_bytes()
    return {
        "skipped": skipped,
        "message": message,
        "unchanged": unchanged,
        "done_after": not after.skipped,
        "weights_at_rest": held["parameters"] < 1.1 * held["theory"]["parameters"],
    }


@pytest.mark.case("precision", "gradients that stay inf or nan", "all ranks stop, with the name of the parameter")
def test_too_many_skipped_steps_in_a_row_stop_all_ranks_with_the_first_bad_parameter(
    answers: Answers,
) -> None:
    for first, second in answers(stop):
        assert first == second
        assert first["message"] == (
            "the gradient was not finite in 3 steps in a row; lower the optimizer's lr, look at the data, or let more "
            "steps be skipped (max_skipped_steps). In the backward it was first nan in "
            "ln_f.bias; the loss was inf on rank 1"
        )
        assert first["skipped"] == [True, True]
        assert first["unchanged"]
        assert first["done_after"]
        assert first["weights_at_rest"]


def break_backward(stage: int) -> str:
    """A gradient that becomes infinite on its way through the middle block of rank 0, where the loss is finite."""
    rank, size = place()
    model = make_model()
    if rank == 0:
        model.blocks[2].register_forward_pre_hook(lambda _module, inputs: inputs[0].register_hook(overflow) and None)
    engine = build(replace(FP16, precision="fp32", max_skipped_steps=1).with_zero(stage=stage), model)
    engine.backward(engine(*micro_batches(batch(0, size, 1), rank)[0]))
    with pytest.raises(TrainingError) as raised:
        engine.step()
    return str(raised.value).partition(". ")[2]


def overflow(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 1e30 * 1e30


def test_the_first_bad_parameter_is_where_the_backward_went_wrong(answers: Answers) -> None:
    for by_rank in answers(break_backward):
        for said in by_rank:
            assert said.startswith("In the backward it was first ")
            assert "in blocks.1.mlp.out_proj.bias; the loss was finite on every rank" in said


def exhaust(stage: int) -> tuple[list[float], str]:
    case = replace(FP16, initial_scale=4.0, overflows=tuple((step, 0) for step in range(9))).with_zero(stage=stage)
    engine = build(case)
    scales = []
    for step in range(9):
        scales.append(engine.loss_scale)
        try:
            train_by_hand(engine, case, range(step, step + 1))
        except TrainingError as error:
            return scales, str(error)
    return scales, "nothing was raised"


@pytest.mark.case("precision", "fp16: no smaller scale is left", "all ranks stop")
def test_a_scale_that_cannot_be_halved_any_more_stops_the_training(answers: Answers) -> None:
    [by_rank] = answers(exhaust)
    for scales, message in by_rank:
        assert scales == [4.0, 2.0, 1.0]
        assert message.startswith("the gradient overflows fp16 even at a loss scale of 1; use precision='bf16'")


# ---- bytes


def usage(stage: int) -> dict[str, Any]:
    case = replace(FP16, keep_fp32=NORMS)
    engine = build(case.with_zero(stage=stage))
    train_by_hand(engine, case, range(case.num_steps))
    kept = sum(b.layout.numel for b in engine.schedule.buckets if b.spec.dtype == torch.float32)
    padding = sum((b.layout.padded_numel - b.layout.numel) * b.spec.dtype.itemsize for b in engine.schedule.buckets)
    return engine.memory_bytes() | {
        "numel": engine.num_parameters,
        "kept": kept,
        "padding": padding,
        "sent": engine.ledger.last_step.sent_nbytes,
        "theory_sent": engine.theoretical_sent_nbytes(case.num_micro_batches),
    }


@pytest.mark.case("precision", "`precision.keep_fp32`", "four bytes held and sent, no second master")
def test_kept_parameters_take_four_bytes_held_and_sent_and_have_no_second_master(answers: Answers) -> None:
    for plan, by_rank in zip(STAGES, answers(usage), strict=True):
        for held in by_rank:
            nbytes = 2 * held["numel"] + 2 * held["kept"]
            assert held["kept"] == 7 * 2 * 64

            def share(placement: Placement) -> int:
                return 2 if placement is Placement.SHARDED else 1

            assert held["theory"] == {
                "parameters": nbytes // share(plan.parameters),
                "gradients": nbytes // share(plan.gradients),
                "optimizer": (12 * held["numel"] - 4 * held["kept"]) // share(plan.optimizer),
                "offloaded": 0,
            }
            assert held["parameters"] == (nbytes + held["padding"]) // share(plan.parameters)
            assert held["gradients"] == (nbytes + held["padding"]) // share(plan.gradients)
            assert held["padding"] < 0.03 * nbytes
            if plan.shards_parameters:
                assert nbytes < held["sent"] <= held["theory_sent"] == 3 * nbytes // 2
            else:
                assert held["theory_sent"] == nbytes
                assert held["sent"] == held["theory_sent"] + held["padding"] + NORM_NBYTES


# ---- structures


@dataclass(frozen=True)
class Hidden:
    """What the blocks of `Structured` hand on."""

    states: torch.Tensor
    ids: torch.Tensor
    note: str = "untouched"


class Pair(NamedTuple):
    left: Hidden
    right: list[torch.Tensor]


class Output(dict):
    """As the outputs of Hugging Face's models: a dict whose values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Layer(nn.Module):
    """Takes and returns tensors inside a dataclass and a dict."""

    rounds = staticmethod(lambda states, dtype: states)
    """The engine does, where a weight meets them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, given: Output) -> Output:
        states = self.linear(self.rounds(given.hidden.states, self.linear.weight.dtype)).tanh()
        return Output(hidden=replace(given.hidden, states=states), seen=[*given.seen, states.dtype])


class RoundingLayer(Layer):
    """In plain PyTorch."""

    rounds = staticmethod(lambda states, dtype: states.to(dtype))


class Structured(nn.Module):
    """Takes a named tuple with a dataclass and a list in it, in each of which are tensors."""

    def __init__(self, dtype: torch.dtype, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dtype = dtype
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.register_buffer("table", torch.linspace(0, 1, 8, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, pair: Pair) -> torch.Tensor:
        assert isinstance(pair, Pair)
        assert isinstance(pair.left, Hidden)
        assert pair.left.note == "untouched"
        assert pair.left.ids.dtype == torch.int64
        assert (self.table.dtype, self.count.dtype) == (torch.float64, torch.int64)
        assert pair.left.states.dtype == pair.right[0].dtype == self.dtype
        out = Output(hidden=pair.left, seen=[])
        for layer in self.layers:
            out = layer(out)
        return (out.hidden.states * pair.right[0] * self.table.to(out.hidden.states.dtype)).float().square().mean()


def structured_inputs(step: int, rank: int, dtype: torch.dtype) -> Pair:
    generator = torch.Generator().manual_seed(10 * step + rank)
    states, factors = torch.randn(2, 4, 8, generator=generator, dtype=dtype)
    return Pair(Hidden(states, torch.arange(4)), [factors])


INPUT_DTYPES = {"fp32": torch.float32, "bf16": torch.float64, "fp16": torch.float32}
"""They reach the model as they are."""


def train_structured(setting: tuple[int, str]) -> dict[str, torch.Tensor]:
    stage, precision = setting
    engine = zerotrain.build_engine(
        Structured(INPUT_DTYPES[precision]),
        optimizer=OPTIMIZERS["sgd"],
        zero=ZeroConfig(stage=stage, bucket_mb=1e-4),
        precision=zerotrain.PrecisionConfig(precision, initial_scale=1024.0),
    )
    for step in range(2):
        engine.backward(engine(structured_inputs(step, place()[0], INPUT_DTYPES[precision])))
        assert not engine.step().skipped
    return engine.full_state_dict()


def structured_reference(precision: str) -> dict[str, torch.Tensor]:
    model = Structured(INPUT_DTYPES[precision], RoundingLayer)
    compute = DTYPES[precision]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = OPTIMIZERS["sgd"](weights.values())
    scale = 1024.0 if precision == "fp16" else 1.0
    for parameter in model.parameters():
        parameter.data = parameter.data.to(compute)
    for step in range(2):
        for weight in weights.values():
            weight.grad = torch.zeros_like(weight)
        for rank in range(2):
            model.zero_grad()
            (model(structured_inputs(step, rank, INPUT_DTYPES[precision])) * (scale / 2)).backward()
            for name, parameter in model.named_parameters():
                weights[name].grad += parameter.grad.float()
        for weight in weights.values():
            weight.grad = weight.grad.to(compute).float() / scale
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    return {**weights, "table": model.table, "count": model.count}


@pytest.mark.case(
    "precision",
    "inputs and outputs in dicts, dataclasses, named tuples",
    "rounded where they meet weights; gathered in time at stage 3",
)
def test_tensors_in_any_structure_are_rounded_at_weights_and_announce_the_backward_of_a_unit(answers: Answers) -> None:
    for (stage, precision), (got, _) in zip(STAGES_AND_PRECISIONS, answers(train_structured), strict=True):
        expected = structured_reference(precision)
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), (stage, precision, name)


class MixedDtypes(nn.Module):
    """One unit in three dtypes: bf16, fp16 and fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ParameterList(torch.ones(3, 5, dtype=d) / 3 for d in self.DTYPES) for _ in "ab")

    DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def held_dtypes(setting: tuple[int, str]) -> tuple[set[torch.dtype], bool]:
    """The dtypes of all parameters, and whether rank 0's values survived."""
    stage, precision = setting
    engine = zerotrain.build_engine(
        MixedDtypes(), optimizer=OPTIMIZERS["sgd"], zero=ZeroConfig(stage=stage), precision=precision
    )
    expected = {name: value.detach().float() for name, value in MixedDtypes().named_parameters()}
    got = engine.full_state_dict()
    same = all(torch.equal(value, expected[name]) for name, value in got.items())
    return {parameter.dtype for parameter in engine.module.parameters()}, same


@pytest.mark.case("precision", "parameters of several dtypes in a unit", "held in the compute dtype over fp32 masters")
def test_parameters_of_fp32_bf16_and_fp16_are_held_in_the_compute_dtype_over_fp32_masters(answers: Answers) -> None:
    for (_, precision), by_rank in zip(STAGES_AND_PRECISIONS, answers(held_dtypes), strict=True):
        assert by_rank == [({DTYPES[precision]}, True)] * 2


# ---- what is refused


def refused(build_it: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as raised:
        build_it()
    return str(raised.value)


@pytest.mark.case(
    "precision", "that keeps nothing, or everything", "refused", under="A model, or one parameter, in fp64"
)
def test_patterns_that_keep_nothing_or_everything_are_refused() -> None:
    nothing = refused(lambda: build(replace(FP16, keep_fp32="*rms*")))
    assert nothing.startswith(
        "precision.keep_fp32: no module or parameter matches '*rms*'; there are wte, wpe, blocks.*.ln_1, "
    )
    everything = refused(lambda: build(replace(FP16, keep_fp32="*")))
    assert everything == "precision.keep_fp32: keeps every parameter; use precision='fp32', or name fewer"
