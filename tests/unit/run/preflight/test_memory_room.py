"""What certainly has no room in memory is refused before any rank starts, and nothing else."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.run.preflight.test_check import config
from tests.unit.run.test_factory import ADAMW
from zerotrain.config.schema import Config, PlanConfig, PrecisionGroup, TrainConfig, ZeroGroup
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight
from zerotrain.preflight import room as memory_room
from zerotrain.preflight.room import Ranks, Room, refusing_too_large, require_memory
from zerotrain.run.factory import build, build_on_meta
from zerotrain.settings import OffloadConfig

MOMENTUM = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.9}
ROW = (torch.zeros(1, 16, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64))


def require(wanted: Config, room: Room, ranks: Ranks, model: nn.Module | None = None, row: Any = ROW) -> None:
    model = build_on_meta(wanted) if model is None else model
    assert model is not None
    factory = build("optimizer", wanted.optimizer)
    require_memory(wanted, model, factory, row, ranks, room, wanted.zero.stages.values())


@pytest.mark.case(
    "offload: Offload",
    "More memory than there is: weights, gradients, optimizer state, rows, saved tensors of a forward",
    "refused before any rank starts, with the bytes",
)
@pytest.mark.parametrize(
    ("groups", "each", "shared"),
    [
        ({"zero": ZeroGroup(stage=0)}, 16, 0),
        ({"zero": ZeroGroup(stage=1)}, 8, 8),
        ({"zero": ZeroGroup(stage=2)}, 4, 12),
        ({"zero": ZeroGroup(stage=3)}, 0, 16),
        ({"zero": ZeroGroup(stage=3, schedule={5: 1})}, 8, 8),
        ({"zero": ZeroGroup(stage=0), "precision": PrecisionGroup("bf16")}, 16, 0),
        ({"zero": ZeroGroup(stage=2), "precision": PrecisionGroup("bf16")}, 2, 14),
        ({"zero": ZeroGroup(stage=2), "optimizer": MOMENTUM}, 4, 8),
        ({"zero": ZeroGroup(stage=1), "offload": OffloadConfig("cpu")}, 8, 8),
        ({"zero": ZeroGroup(stage=1), "offload": OffloadConfig("disk")}, 8, 0),
        ({"zero": ZeroGroup(stage=1), "offload": OffloadConfig("disk", keep=0.5)}, 8, 4),
        ({"zero": ZeroGroup(stage=3), "offload": OffloadConfig("disk", "disk")}, 0, 4),
    ],
)
@pytest.mark.parametrize("ranks", [Ranks(1, 1), Ranks(4, 2)])
def test_bytes_of_an_element_by_stage_precision_and_offloading(
    groups: dict[str, Any], each: int, shared: int, ranks: Ranks
) -> None:
    """`each`: bytes of an element that every rank holds; `shared`: that they share."""
    wanted = config(**groups)
    model = build_on_meta(wanted)
    assert model is not None
    needed = sum(parameter.numel() for parameter in model.parameters()) * (each + shared / ranks.num_ranks)
    require(wanted, Room(math.ceil(needed), gpu=0), ranks)
    with pytest.raises(ConfigError, match=r"^model: needs more memory than there is: weights, gradients and optim"):
        require(wanted, Room(needed - 3, gpu=0), ranks)


def test_a_gpu_holds_what_is_not_offloaded_and_the_host_the_rest() -> None:
    wanted = config(zero=ZeroGroup(stage=0), offload=OffloadConfig("cpu"))
    model = build_on_meta(wanted)
    assert model is not None
    half = 8 * sum(each.numel() for each in model.parameters())
    require(wanted, Room(half, half), Ranks(1, 1))
    with pytest.raises(ConfigError, match=r"of a rank would take .* or more, and its GPU has .* GB; choose"):
        require(wanted, Room(half, half - 1), Ranks(1, 1))
    with pytest.raises(ConfigError, match=r"of 2 ranks of this machine would take .* or more, and there are .* GB"):
        require(wanted, Room(half - 1, half), Ranks(2, 2))


def test_what_does_not_train_has_no_gradient_and_no_state() -> None:
    model = nn.Linear(64, 64, bias=False, device="meta")
    model.add_module("frozen", nn.Linear(1000, 1000, bias=False, device="meta").requires_grad_(False))
    needed = 64 * 64 * 16 + 1000 * 1000 * 4
    require(config(zero=ZeroGroup(stage=0)), Room(needed, gpu=0), Ranks(1, 1), model)


def test_what_the_forward_of_many_rows_saves_counts_and_of_few_is_not_tried() -> None:
    wanted = config(train=TrainConfig(micro_batch_size=2**17))
    with pytest.raises(ConfigError, match=r"^train\.micro_batch_size: .*what the forward of 131072 rows saves"):
        require(wanted, Room(1e9, gpu=0), Ranks(1, 1))
    require(wanted, Room(1e13, gpu=0), Ranks(1, 1))
    require(replace(wanted, train=TrainConfig(micro_batch_size=8)), Room(1e7, gpu=0), Ranks(1, 1))
    recomputing = wanted.model | {"activation_checkpointing": True}
    require(replace(wanted, model=recomputing), Room(1e7, gpu=0), Ranks(1, 1))


class Saving(nn.Module):
    """Of its weights a forward saves none, of the rows exactly what the product needs."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="meta"))
        self.fails = fails

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise RuntimeError("computes with values")
        return (rows * self.weight).sum()


class Passing(Saving):
    """Computes gradients of other products in its forward, and keeps none of what they saved."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            torch.autograd.grad((rows * self.weight).exp().sum(), self.weight)
        return super().forward(rows)


@pytest.mark.case(
    "offload: Offload",
    "More memory than there is: weights, gradients, optimizer state, rows, saved tensors of a forward",
)
@pytest.mark.parametrize("model", [Saving, Passing])
@pytest.mark.parametrize(("precision", "nbytes"), [("fp32", 4), ("bf16", 2)])
def test_what_is_saved_is_counted_to_the_byte(precision: str, nbytes: int, model: type[Saving]) -> None:
    wanted = config(train=TrainConfig(micro_batch_size=2**18), precision=PrecisionGroup(precision), optimizer=ADAMW)
    row = (torch.zeros(1, 16),)
    needed, state = 2**22 * nbytes, 16
    require(wanted, Room(needed + state, gpu=0), Ranks(1, 1), model(), row)
    with pytest.raises(ConfigError, match="what the forward of 262144 rows saves"):
        require(wanted, Room(needed, gpu=0), Ranks(1, 1), model(), row)
    require(wanted, Room(needed, gpu=0), Ranks(1, 1), Saving(fails=True), row)


@pytest.mark.parametrize("zero", [ZeroGroup(stage=3), ZeroGroup(stage=2, schedule={5: 3})], ids=["3", "3 later"])
def test_a_model_of_countless_layers_is_refused_while_it_is_built(
    zero: ZeroGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on may be at the later stage alone."""
    monkeypatch.setattr(memory_room, "PATIENCE_S", 0.0)
    wanted = config(zero=zero)
    made: list[nn.Module] = []
    with (
        pytest.raises(
            ConfigError, match=r"^model: needs more memory than there is: the weights of a rank would take 1.28e-07 GB"
        ),
        refusing_too_large(wanted, Ranks(2, 1), Room(100.0, gpu=0)),
    ):
        made.extend(nn.Linear(4, 4, bias=False, device="meta") for _ in range(10**6))
    assert len(made) == 3  # of 64 bytes each, shared by two
    with refusing_too_large(wanted, Ranks(2, 1), Room(100.0, gpu=0)):
        for _ in range(100):
            nn.Linear(4, 4, bias=False, device="meta")  # and dropped
    made.extend(nn.Linear(4, 4, bias=False, device="meta") for _ in range(100))  # behind it nothing is counted


def test_a_model_of_countless_layers_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "PLANNING_S", 0.0)
    wanted, made = config(plan=PlanConfig(only=True)), list[nn.Module]()
    with (
        pytest.raises(
            ConfigError, match=r"^model: has 16 parameters after 0 s, and is not complete; a plan builds all "
        ),
        refusing_too_large(wanted, Ranks(2, 1), Room(math.inf, math.inf)),
    ):
        made.extend(nn.Linear(4, 4, bias=False, device="meta") for _ in range(10**6))


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"data": ("seq_len", 10**14)}, "data: needs more memory than there is: the 8 rows of a step of a rank would "),
        ({"model": ("hidden_size", 10**7)}, "model: needs more memory than there is: weights, gradients and optimizer"),
        (
            {"model": ("hidden_size", 10**12)},
            "model: needs more memory than there is: Storage size calculation overflow",
        ),
    ],
)
def test_before_any_rank_starts(groups: dict[str, tuple[str, int]], problem: str) -> None:
    wanted = config()
    for group, (name, number) in groups.items():
        wanted = replace(wanted, **{group: getattr(wanted, group) | {name: number}})
    with pytest.raises(ConfigError) as refused:
        preflight.check(wanted)
    assert refused.value.problems[0].startswith(problem)


@pytest.mark.parametrize(("last", "is_refused"), [(5, True), (4, False)])
def test_a_stage_that_no_step_is_trained_at_needs_no_room(
    last: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = config(zero=ZeroGroup(stage=3, schedule={4: 0}), train=TrainConfig(max_steps=last))
    model = build_on_meta(wanted)
    assert model is not None
    per_element = 8.0 * sum(each.numel() for each in model.parameters())  # 4 on each of four ranks, or 16
    monkeypatch.setattr(memory_room, "available_nbytes", lambda: per_element)
    if is_refused:
        with pytest.raises(ConfigError, match="weights, gradients and optimizer state at stage 0 of a rank"):
            preflight.check(wanted, 1, 4)
    else:
        preflight.check(wanted, 1, 4)


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "available_nbytes", lambda: 1200.0)
    monkeypatch.setattr(memory_room, "most_of_process", lambda: 500.0)
    assert [Room.of_machine(None, num_local) for num_local in (1, 4)] == [Room(500.0, 0), Room(300.0, 0)]
