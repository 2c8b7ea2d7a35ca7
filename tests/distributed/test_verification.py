"""Verified steps on real ranks: bits flipped in the memory of one rank, who is named, and no change without a fault."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, SEQ_LEN, VOCAB, make_model, place, run_over
from commands import TINY, result_of
from torch import nn

import zerotrain
from zerotrain.engine.verification import Leaf, Verification
from zerotrain.errors import CorruptionError

NUM_STEPS, EVERY = 6, 2


@dataclass(frozen=True)
class Fault:
    """One flipped bit. Step, rank and element follow from `seed`."""

    what: str = ""
    """weight, gradient, gathered, reduced or state; empty: none."""
    stage: int = 2
    seed: int = 0
    rank: int = 0
    step: int = 4
    """From 1. Every second is verified."""
    is_lasting: bool = False
    """A gradient is wrong whenever this rank computes it."""
    precision: str = "fp32"
    virtual_ranks: int | None = None
    num_micro_batches: int = 1
    accumulate: str = "local"
    shard_size: int | None = None
    optimizer: str = "adamw"
    verifies: bool = True


def rows(step: int, virtual_rank: int, num_micro_batches: int) -> list[Any]:
    """The micro-batches of a virtual rank, as a function of both numbers."""
    generator = torch.Generator().manual_seed(1000 * step + virtual_rank)
    tokens = torch.randint(0, VOCAB, (num_micro_batches, 2, SEQ_LEN + 1), generator=generator)
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def flip(values: torch.Tensor, element: int, bit: int) -> None:
    """Flip a bit of a flat tensor, unseen by PyTorch's counts of writes to parameters."""
    words = values.detach().view(-1).view({2: torch.int16, 4: torch.int32}[values.itemsize])
    words[element] ^= 1 << bit


class Planted:
    """Flips the bit of a fault in an engine of this rank, once; tells where."""

    def __init__(self, fault: Fault, engine: zerotrain.ZeroEngine) -> None:
        self.fault, self.engine, self.draw = fault, engine, random.Random(fault.seed)
        self.bucket = self.draw.choice(engine.schedule.trained)
        self.place = ""
        self.is_due = False

    def flip_in(self, values: torch.Tensor, start: int) -> None:
        """Flip a bit of a parameter's element within a part of the bucket that begins at `start`."""
        end = start + values.numel()
        slots = list(zip(self.bucket.spec.parameters, self.bucket.layout.slots, strict=True))
        slots = [(managed, slot) for managed, slot in slots if slot.offset < end and slot.end > start]
        managed, slot = self.draw.choice(slots)
        element = self.draw.randrange(max(start, slot.offset), min(end, slot.end))
        flip(values, element - start, self.draw.randrange(8 * min(2, values.itemsize)))
        self.place, self.is_due = f"{managed.names[0]} {element - slot.offset}", False

    def before(self, step: int) -> None:
        """Before a step: flip what lies in memory, or wait for the moment of it."""
        if step != self.fault.step or place()[0] != self.fault.rank:
            return
        self.is_due, weights, update = True, self.bucket.weights, self.bucket.update
        weights.finish_gather()
        if weights.refresh is not None:
            weights.refresh.finish()
        if self.fault.what == "weight" and self.engine.plan.shards_parameters:
            self.flip_in(weights.shard, weights.own.start)
        elif self.fault.what == "weight":
            self.flip_in(weights.model_weight.tensor, 0)
        elif self.fault.what == "state":
            span = self.draw.choice(update.spans)
            values = [value for value in update.span_state(span).values() if value.ndim]
            self.flip_in(self.draw.choice(values), update.where.start + span.where.start)

    def watch(self) -> None:
        """Flip in the moment when a buffer is filled."""
        gradient, weights, fault = self.bucket.gradient, self.bucket.weights, self.fault
        gather = gradient.reduction.gather or weights.gather
        reduce, finish_reduce, finish_gather = gradient.reduce, gradient.reduction.handle.finish, gather.finish

        def reduces(*, completes: bool = True, discards: bool = False) -> None:
            is_now = (self.is_due or bool(self.place)) if fault.is_lasting else (self.is_due and not discards)
            if fault.what == "gradient" and is_now:
                self.flip_in(gradient._filled[0], 0)
            reduce(completes=completes, discards=discards)

        def finishes_reduce() -> None:
            finish_reduce()
            if fault.what == "reduced" and self.is_due:
                self.flip_in(gradient.shard, weights.own.start)

        def finishes_gather() -> None:
            finish_gather()
            if fault.what == "gathered" and self.is_due:
                self.flip_in(gather.full, 0)

        gradient.reduce, gradient.reduction.handle.finish, gather.finish = reduces, finishes_reduce, finishes_gather


def train(fault: Fault) -> dict[str, Any]:
    """On each rank: train with the fault; {facts of what was found, place of the fault, steps verified, hash}."""
    engine = zerotrain.build_engine(
        make_model(),
        optimizer=OPTIMIZERS[fault.optimizer],
        zero=zerotrain.ZeroConfig(
            stage=fault.stage,
            bucket_mb=0.1,
            reduction="ordered",
            accumulate=fault.accumulate,
            shard_size=fault.shard_size,
        ),
        precision=fault.precision,
        virtual_ranks=fault.virtual_ranks,
    )
    verification = Verification(engine, EVERY if fault.verifies else 2 * NUM_STEPS)
    planted = Planted(fault, engine)
    planted.watch()
    num = fault.num_micro_batches
    outcome: dict[str, Any] = {}
    for step in range(1, NUM_STEPS + 1):
        planted.before(step)
        own = [micro_batch for number in engine.virtual_ranks for micro_batch in rows(step, number, num)]
        arguments: dict[str, Any] = {}
        try:
            for number in verification.turns.virtual_ranks(step):
                leaf = Leaf(number, rows(step, number, num), None)
                arguments["before_update"] = verification.begin(step, leaf, own, arguments)
            engine.train_step(own, **arguments)
        except CorruptionError as error:
            outcome = {"found": dict(error.facts), "text": str(error)}
            break
    outcome = outcome or {"found": None, "hash": engine.weights_sha256()}
    sent_nbytes = engine.ledger.outside_steps.sent_nbytes
    return outcome | {"place": planted.place, "steps": verification.num_steps, "sent_nbytes": sent_nbytes}


def outcomes(faults: list[Fault], size: int) -> list[dict[str, Any]]:
    """What each fault came to. All ranks have found the same."""
    by_fault = run_over(faults, train, size)
    for by_rank in by_fault:
        assert all(each["found"] == by_rank[0]["found"] for each in by_rank)
        by_rank[0]["place"] = next((each["place"] for each in by_rank if each["place"]), "")
    return [by_rank[0] for by_rank in by_fault]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"virtual_ranks": 8, "precision": "bf16"},
    {"num_micro_batches": 2, "precision": "bf16", "optimizer": "sgd"},
    {"num_micro_batches": 2, "accumulate": "reduced"},
]


@pytest.mark.case(
    "hosts: Ranks that compute wrongly",
    "`train.verify_every` at stages 0 to 3: fp32 and bf16, several virtual ranks, micro-batches, a mesh",
    "every step is verified without a difference, and the weights have the bits of a run without it",
)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_verified_steps_change_no_bit_and_raise_no_false_alarm(size: int) -> None:
    faults = [Fault(stage=stage, **SETTINGS[(stage + size // 2) % 4]) for stage in range(4)]
    faults += [Fault(stage=3, **settings) for settings in SETTINGS]
    if size == 4:
        faults += [Fault(stage=stage, shard_size=2, precision="bf16") for stage in (1, 3)]
    plain = outcomes([replace(fault, verifies=False) for fault in faults], size)
    for fault, verified, other in zip(faults, outcomes(faults, size), plain, strict=True):
        assert (verified["steps"], verified["found"]) == (NUM_STEPS // EVERY, None), fault
        assert verified["hash"] == other["hash"], fault
        if fault.stage < 3:  # at 3 parameters are gathered for it
            assert verified["sent_nbytes"] == other["sent_nbytes"]


WHERE_FOUND = [
    (Fault("weight", stage=0, rank=2, step=3), "weights"),
    (Fault("weight", stage=1, rank=1), "weights"),
    (Fault("weight", stage=2, rank=3, precision="bf16"), "weights"),
    (Fault("state", stage=0, rank=3, seed=4), "exp_avg"),
    (Fault("gathered", stage=0, rank=1, seed=3, step=3), ""),
    (Fault("gathered", stage=3, rank=2), "gathered weights"),
    (Fault("gathered", stage=3, rank=2, shard_size=2, seed=1), "gathered weights"),
    *((Fault("gradient", stage=stage, rank=stage, seed=stage), "gradient") for stage in range(4)),
    (Fault("gradient", stage=2, rank=1, step=6, virtual_ranks=8, precision="bf16"), "gradient"),
    (Fault("gradient", stage=3, rank=1, num_micro_batches=2, accumulate="reduced"), "gradient"),
]


@pytest.mark.case(
    "hosts: Ranks that compute wrongly",
    "one bit flipped on one of 4 ranks: a weight, a gradient, a gathered weight, optimizer state",
    "the next verified step names rank, parameter and element, and nothing is updated",
)
def test_one_flipped_bit_is_found_with_its_rank_parameter_and_element() -> None:
    for (fault, what), outcome in zip(WHERE_FOUND, outcomes([fault for fault, _ in WHERE_FOUND], 4), strict=True):
        found = outcome["found"]
        assert found is not None, (fault, outcome)
        assert found["ranks"] == (fault.rank,), (fault, outcome)
        assert found["step"] == fault.step + fault.step % EVERY
        assert what in ("", found["what"])
        assert f"{found['parameter']} {found['element']}" == outcome["place"], (fault, outcome)
        assert f"rank {fault.rank} on " in outcome["text"]
        assert outcome["steps"] == found["step"] // EVERY - 1


def test_a_rank_that_computes_wrongly_again_and_again_is_named() -> None:
    faults = [Fault("gradient", stage=stage, rank=1, step=3, is_lasting=True) for stage in (0, 3)]
    for outcome in outcomes(faults, 4):
        assert outcome["found"]["ranks"] == (1,)
        assert outcome["found"]["evidence"] == "computed again, 3 of 4 ranks agree, rank 1 comes to several results"


def test_two_ranks_name_one_that_varies_and_else_say_that_they_cannot_tell() -> None:
    faults = [
        Fault("gradient", stage=2, rank=1),
        Fault("gathered", stage=3, rank=1),
        Fault("weight", stage=2, rank=1, precision="bf16"),
        Fault("weight", stage=0, rank=1),
    ]
    *told, untold = outcomes(faults, 2)
    assert [outcome["found"]["ranks"] for outcome in told] == [(1,)] * 3
    assert untold["found"]["ranks"] == ()
    assert untold["text"].startswith(f"the ranks do not compute the same: weights of {untold['found']['parameter']}, ")


def test_two_replicas_of_a_mesh_tell_where_they_differ() -> None:
    [outcome] = outcomes([Fault("weight", stage=3, rank=1, shard_size=2, seed=2)], 4)
    found = outcome["found"]
    assert f"{found['parameter']} {found['element']}" == outcome["place"]
    assert (found["what"], found["ranks"]) == ("weights", ())


def test_one_rank_finds_a_result_that_does_not_come_again() -> None:
    [outcome] = outcomes([Fault("gradient", stage=2)], 1)
    assert outcome["found"]["ranks"] == (0,)


WHATS = ("weight", "gradient", "reduced", "gathered", "state")


def random_fault(what: str, stage: int, size: int, number: int) -> Fault:
    """Any rank and element, in a verified step or in one beside it."""
    draw = random.Random(f"{what} {stage} {size} {number}")
    step, seed = draw.choice([3, 4, 4, 5]), draw.randrange(10**6)
    return Fault(what, stage, seed, draw.randrange(size), step, precision=("fp32", "bf16")[number % 2])


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_no_flipped_bit_lets_the_wrong_rank_be_named(size: int) -> None:
    """With -s it prints what was found of each fault."""
    faults = [random_fault(what, stage, size, number) for stage in range(4) for what in WHATS for number in range(2)]
    clean = outcomes([Fault(precision=precision) for precision in ("fp32", "bf16")], size)
    table = []
    for number, (fault, outcome) in enumerate(zip(faults, outcomes(faults, size), strict=True)):
        found = outcome["found"]
        if found is None:
            verdict = "no harm" if outcome["hash"] == clean[number % 2]["hash"] else "missed"
        else:
            assert set(found["ranks"]) <= {fault.rank}, (fault, outcome)
            assert f"{found['parameter']} {found['element']}" == outcome["place"], (fault, outcome)
            verdict = f"{'named' if found['ranks'] else 'found'} after {found['step'] - fault.step} by {found['what']}"
        table.append((size, fault.stage, fault.what, fault.precision, fault.step % EVERY == 0, verdict))
        is_seen = fault.what == "gradient" or (fault.what, fault.stage) in [("weight", 0), ("weight", 1), ("weight", 2)]
        assert verdict != "missed" or fault.step % EVERY or not is_seen, fault
    print(*table, sep="\n")


class Normed(nn.Sequential):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows).square().mean()


def statistics(verifies: bool) -> list[torch.Tensor]:
    """On each rank: the buffers of a batch norm after four steps."""
    torch.manual_seed(0)
    model = Normed(nn.Linear(4, 4), nn.BatchNorm1d(4))
    engine = zerotrain.build_engine(model, optimizer=OPTIMIZERS["sgd"], zero=zerotrain.ZeroConfig(stage=3))
    verification = Verification(engine, EVERY if verifies else 2 * NUM_STEPS)
    for step in range(1, 5):
        inputs = [
            [(torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank)),)] for rank in range(2)
        ]
        arguments: dict[str, Any] = {}
        for number in verification.turns.virtual_ranks(step):
            leaf = Leaf(number, inputs[number], None)
            arguments["before_update"] = verification.begin(step, leaf, inputs[place()[0]], arguments)
        if verifies:
            engine.leaf(place()[0], inputs[place()[0]])
        engine.train_step(inputs[place()[0]], **arguments)
    return list(model.buffers())


def test_statistics_of_batches_are_counted_once_also_where_leaves_are_computed_alone() -> None:
    plain, verified = run_over([False, True], statistics, 2)
    for buffers, others in zip(plain, verified, strict=True):
        assert all(map(torch.equal, buffers, others))


@pytest.mark.case(
    "hosts: Ranks that compute wrongly",
    "`train.verify_every` in a run with restarts, whose rank 2 computes wrongly from some step on",
    "the run stops with the rank's name, is not started again, and goes on elsewhere from the last verified checkpoint",
)
def test_a_run_names_the_wrong_rank_stops_and_goes_on_without_it_to_the_undisturbed_weights(
    launch: Any, tmp_path: Path
) -> None:
    run = (*TINY, "train.max_steps=20", "train.virtual_ranks=4", "train.verify_every=4", "checkpoint.every=2")
    run = (*run, "checkpoint.keep=null", "model._target_=misbehaving.MiscomputingMLP", "+model.at=14")
    in_run = ("hydra.run.dir=run", "launch.max_restarts=3")
    wrong = launch(*run, *in_run, "+model.where=2", "launch.nproc_per_node=4", folder=tmp_path)
    assert wrong.wait() == 1
    found = result_of(tmp_path / "run")["verification"]["corruption"]
    assert (found["ranks"], found["step"]) == ([2], 12)
    assert "verify  every 4 steps each rank computes a virtual rank of another" in wrong.stdout
    assert "found that rank 2 on " in wrong.stderr
    assert "not started again: the same device would compute wrongly again" in wrong.stderr
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last == {"step": 11, "verified_steps": 2, "corrupted_rank": 2}
    sound = (*run, "+model.where=none")
    again = launch(*sound, *in_run, "launch.nproc_per_node=2", "checkpoint.resume=auto", folder=tmp_path)
    assert again.wait() == 0, again.stderr
    assert "step-00000008, step 8" in again.stdout
    assert "step-00000010 is later than that, and was renamed" in again.stdout
    undisturbed = launch(*sound, "hydra.run.dir=other", "train.verify_every=0", folder=tmp_path)
    assert undisturbed.wait() == 0, undisturbed.stderr
    hashes = [result_of(tmp_path / folder)["weights_sha256"] for folder in ("run", "other")]
    assert hashes[0] == hashes[1]
