"""What certainly has no room in memory or on a disk is refused before any rank starts, and nothing else."""

import math
import resource
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.configs import GPT, config
from zerotrain.config.schema import Config, PlanConfig, TrainConfig, ZeroGroup
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight, room as memory_room
from zerotrain.preflight.check import SURE, require_memory
from zerotrain.preflight.rehearsal import Links, Rehearsals
from zerotrain.preflight.room import Ranks, Room, file_problems, in_memory, refusing_too_large, require_folder
from zerotrain.run import factory
from zerotrain.settings import OffloadConfig, OffloadGroup, PrecisionGroup

MOMENTUM = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1, "momentum": 0.9}
ROW = (torch.zeros(1, 16),)
NUMEL = 2 * 512**2


class Square(nn.Module):
    """Two matrices, each a bucket without padding."""

    def __init__(self, *, fails: Exception | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False, device="meta") for _ in range(2))
        self.fails = fails

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails is not None:
            raise self.fails
        return (rows * self.layers[1](self.layers[0].weight)[0, 0]).exp().sum()


def rehearsals(wanted: Config, num_ranks: int = 1, *, on_host: bool = True) -> Rehearsals:
    wanted.zero.bucket_mb = 1.0
    links = Links.of_run(wanted, num_ranks, on_host=on_host)
    return Rehearsals.of_run(wanted, links, ROW, factory.try_optimizer(wanted, None), Path("/nowhere"))


def require(wanted: Config, room: Room, ranks: Ranks, model: nn.Module | None = None) -> None:
    tried = rehearsals(wanted, ranks.num_ranks, on_host=not room.gpu)
    with tried.at(wanted.zero.stages[0], model or Square()) as rehearsal:
        require_memory(rehearsal, rehearsal.at_rest_nbytes(), wanted, ROW, ranks, room)


def numel_of(wanted: Config) -> int:
    model = factory.build_on_meta(wanted)
    assert model is not None
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.case(
    "offload: Offload",
    "More memory than there is: weights, gradients, optimizer state, rows, a step with large micro-batches",
    "refused before any rank starts, with the bytes",
)
@pytest.mark.parametrize(
    ("groups", "each", "shared"),
    [
        ({"zero": ZeroGroup(stage=0)}, 16, 0),
        ({"zero": ZeroGroup(stage=1)}, 8, 8),
        ({"zero": ZeroGroup(stage=2)}, 4, 12),
        ({"zero": ZeroGroup(stage=3)}, 0, 16),
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
def test_bytes_of_an_element_by_stage_precision_and_offloading(groups, each, shared, ranks):
    """`each`: bytes of an element that every rank holds; `shared`: that they share."""
    needed = NUMEL * (each + shared / ranks.num_ranks)
    require(config(**groups), Room(1.005 * needed, gpu=0), ranks)  # what is offloaded begins on a border
    with pytest.raises(ConfigError, match=r"^model: needs more memory than there is: weights, gradients and optim"):
        require(config(**groups), Room(needed - 3, gpu=0), ranks)


def test_a_gpu_holds_what_is_not_offloaded_and_the_host_the_rest() -> None:
    wanted, half = config(zero=ZeroGroup(stage=0), offload=OffloadConfig("cpu")), 8 * NUMEL
    require(wanted, Room(1.005 * half, half), Ranks(1, 1))
    with pytest.raises(ConfigError, match=r"of a rank would take .* or more, and its GPU has .* GB; choose"):
        require(wanted, Room(1.005 * half, half - 1), Ranks(1, 1))
    with pytest.raises(ConfigError, match=r"of 2 ranks of this machine would take .* or more, and there are .* GB"):
        require(wanted, Room(half - 1, half), Ranks(2, 2))


def test_what_does_not_train_has_no_gradient_and_no_state() -> None:
    model = nn.Linear(64, 64, bias=False, device="meta")
    model.add_module("frozen", nn.Linear(1000, 1000, bias=False, device="meta").requires_grad_(False))
    needed = 64 * 64 * 16 + 1000 * 1000 * 4
    require(config(zero=ZeroGroup(stage=0)), Room(1.005 * needed, gpu=0), Ranks(1, 1), model)


@pytest.mark.case(
    "offload: Offload",
    "More memory than there is: weights, gradients, optimizer state, rows, a step with large micro-batches",
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_with_many_rows_is_rehearsed_and_one_with_few_is_not(precision: str) -> None:
    wanted = config(train=TrainConfig(micro_batch_size=2**18), precision=PrecisionGroup(precision))
    peak = rehearsals(replace(wanted, model={"_target_": f"{__name__}.Square"})).plan(2).peak
    assert peak is not None
    assert peak > 2**22 * 8  # the product and its exponential
    require(wanted, Room(math.ceil(SURE * peak), gpu=0), Ranks(1, 1))
    with pytest.raises(ConfigError, match=r"^train\.micro_batch_size: .*a step with micro-batches of 262144 rows of a"):
        require(wanted, Room(SURE * peak - 1, gpu=0), Ranks(1, 1))
    at_rest = Room(NUMEL * 20, gpu=0)
    for error in (RuntimeError("computes with values"), KeyError("meta"), AssertionError(), AttributeError("of meta")):
        require(wanted, at_rest, Ranks(1, 1), Square(fails=error))
    require(replace(wanted, train=TrainConfig(micro_batch_size=8)), at_rest, Ranks(1, 1))


@pytest.mark.parametrize("zero", [ZeroGroup(stage=3), ZeroGroup(stage=2, schedule={5: 3})], ids=["3", "3 later"])
def test_a_model_of_countless_layers_is_refused_while_it_is_built(zero, monkeypatch):
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
def test_a_stage_that_no_step_is_trained_at_needs_no_room(last, is_refused, monkeypatch):
    wanted = config(zero=ZeroGroup(stage=3, schedule={4: 0}), train=TrainConfig(max_steps=last))
    per_element = 8.0 * numel_of(wanted)  # 4 on each of four ranks, or 16
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


# Whether a disk can be offloaded to is asked before any rank starts.


Usage = namedtuple("Usage", "total used free")


def to_disk(path: Path | None, **groups: Any) -> Config:
    offload = OffloadGroup("disk", "disk", path=None if path is None else str(path))
    return config(offload=offload, precision=PrecisionGroup("bf16"), **groups)


@pytest.mark.case("offload: Offload", "`offload.path` is a file, cannot be written, or has too little room")
@pytest.mark.parametrize(
    ("zero", "nbytes"),
    [
        (ZeroGroup(stage=1), 12 / 2),
        (ZeroGroup(stage=3), 14 / 2),
        (ZeroGroup(stage=3, schedule={5: 1}), 14 / 2),
        (ZeroGroup(stage=1, schedule={5: 3}), 14 / 2),
        (ZeroGroup(stage=3, schedule={5: 0}), 12),
        (ZeroGroup(stage=1, schedule={5: 0}), 12),
    ],
)
@pytest.mark.parametrize("num_local", [1, 2])
def test_a_disk_is_large_enough_for_what_the_ranks_of_a_machine_place_there_at_each_stage(
    num_local: int, zero: ZeroGroup, nbytes: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nbytes`: of an element on one of two ranks. Shards of parameters lie there at stage 3 alone."""
    wanted = to_disk(tmp_path, zero=zero, model=GPT | {"hidden_size": 256}, train=TrainConfig(max_steps=9))
    needed = 2 * num_local * nbytes * numel_of(wanted)  # and as large a sample, of which the ranks measure the speed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 1.01 * needed))
    preflight.check(wanted, num_local, 2, run_dir=tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 0.99 * needed))
    with pytest.raises(ConfigError, match=r"^offload\.path: .* GB free, and this run needs .* GB there"):
        preflight.check(wanted, num_local, 2, run_dir=tmp_path)


def test_nothing_is_made_and_nothing_asked_of_a_disk_that_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "not/there"
    require_folder(to_disk(path), None)
    require_folder(config(offload=OffloadGroup(path="/proc/x")), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case(
    "offload: Offload",
    "`offload.path` is a file, cannot be written, or has too little room",
    "refused before any rank starts",
)
@pytest.mark.parametrize("what", ["file", "link"])
def test_what_is_no_folder_is_told(what: str, tmp_path: Path) -> None:
    path = tmp_path / what
    if what == "file":
        path.touch()
    else:
        path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no file can be made in .* \(it is no folder\); name another folder"):
        require_folder(to_disk(path), tmp_path)


@pytest.mark.case("offload: Offload", "it lies in memory, as /dev/shm", "a warning")
def test_a_folder_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "file_system_of", lambda _: "tmpfs")
    monkeypatch.setattr(memory_room, "lies_in_memory", lambda folder: folder == tmp_path)
    says = (
        f"offload.path: {tmp_path / 'run'} is in memory (tmpfs), so that offloading to it frees none; "
        "name a folder on a disk"
    )
    assert in_memory(to_disk(tmp_path / "run"), tmp_path) == in_memory(to_disk(None), tmp_path / "run") == [says]
    assert in_memory(config(), tmp_path) == []
    assert in_memory(to_disk(Path("/")), tmp_path) == []


@pytest.mark.parametrize(("device", "num_lines"), [("cpu", 1), ("auto", 0 if torch.cuda.is_available() else 1)])
def test_activations_that_stay_in_the_hosts_memory_are_warned_of_on_a_cpu(device, num_lines, tmp_path):
    wanted = config()
    wanted.offload.activations, wanted.launch.device = "cpu", device
    lines = in_memory(wanted, tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["offload.activations=cpu"] * num_lines


def test_a_process_that_may_open_too_few_files_is_told_before_any_rank_starts() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, hard))
        assert file_problems(2) == []
        [line] = file_problems(3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert line == "launch: a process may open 24 files here, and each rank needs 25; raise it: ulimit -n 1024"
