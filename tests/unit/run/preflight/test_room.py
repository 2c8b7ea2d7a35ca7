"""Whether a disk can be offloaded to is asked before any rank starts."""

import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.run.preflight.test_check import config
from zerotrain.config.schema import Config, OffloadGroup, PrecisionGroup, ZeroGroup
from zerotrain.errors import ConfigError
from zerotrain.offload.tier import SAMPLE_NBYTES
from zerotrain.preflight import room as offload_room
from zerotrain.preflight.room import Ranks, file_problems, in_memory, require_room
from zerotrain.run.factory import build_on_meta

Usage = namedtuple("Usage", "total used free")


def to_disk(path: Path | None, **groups: Any) -> Config:
    offload = OffloadGroup("disk", "disk", path=None if path is None else str(path))
    return config(offload=offload, precision=PrecisionGroup("bf16"), **groups)


@pytest.mark.case("offload: Offload", "`offload.path` is a file, cannot be written, or has too little room")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("num_local", [1, 2])
def test_a_disk_is_large_enough_from_what_the_ranks_of_a_machine_place_there_on(
    num_local: int, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = to_disk(tmp_path, zero=ZeroGroup(stage=stage))
    model = build_on_meta(wanted)
    state = sum(each.numel() for each in model.parameters()) * (14 if stage == 3 else 12) * num_local // 2
    needed = state + min(state, num_local * SAMPLE_NBYTES)
    for free in (needed, needed - 1):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        if free == needed:
            require_room(wanted, model, tmp_path, Ranks(2, num_local))
        else:
            with pytest.raises(ConfigError, match=r"^offload\.path: .* GB free, and this run needs .* GB there"):
                require_room(wanted, model, tmp_path, Ranks(2, num_local))


@pytest.mark.parametrize(
    ("stage", "schedule", "nbytes"), [(3, {5: 1}, 14 // 2), (1, {5: 3}, 14 // 2), (3, {5: 0}, 12), (1, {5: 0}, 12)]
)
def test_a_disk_is_to_be_large_enough_for_each_stage(
    stage: int, schedule: dict[int, int], nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of parameters lie there at stage 3 alone, and what stages share less of is larger."""
    wanted = to_disk(tmp_path, zero=ZeroGroup(stage=stage, schedule=schedule))
    model = build_on_meta(wanted)
    state = sum(each.numel() for each in model.parameters()) * nbytes
    needed = state + min(state, SAMPLE_NBYTES)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, needed))
    require_room(wanted, model, tmp_path, Ranks(2, 1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, needed - 1))
    with pytest.raises(ConfigError, match=r"^offload\.path: .* GB free, and this run needs .* GB there"):
        require_room(wanted, model, tmp_path, Ranks(2, 1))


def test_nothing_is_made_and_nothing_asked_of_a_disk_that_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "not/there"
    require_room(to_disk(path), None, None, Ranks(1, 1))
    require_room(config(offload=OffloadGroup(path="/proc/x")), None, tmp_path, Ranks(1, 1))
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
        require_room(to_disk(path), None, tmp_path, Ranks(1, 1))


@pytest.mark.case("offload: Offload", "it lies in memory, as /dev/shm", "a warning")
def test_a_folder_in_memory_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload_room, "file_system_of", lambda _: "tmpfs")
    monkeypatch.setattr(offload_room, "lies_in_memory", lambda folder: folder == tmp_path)
    says = (
        f"offload.path: {tmp_path / 'run'} is in memory (tmpfs), so that offloading to it frees none; "
        "name a folder on a disk"
    )
    assert in_memory(to_disk(tmp_path / "run"), tmp_path) == in_memory(to_disk(None), tmp_path / "run") == [says]
    assert in_memory(config(), tmp_path) == []
    assert in_memory(to_disk(Path("/")), tmp_path) == []


@pytest.mark.parametrize(("device", "num_lines"), [("cpu", 1), ("auto", 0 if torch.cuda.is_available() else 1)])
def test_activations_that_stay_in_the_hosts_memory_are_warned_of_on_a_cpu(
    device: str, num_lines: int, tmp_path: Path
) -> None:
    given = config()
    given.offload.activations, given.launch.device = "cpu", device
    lines = in_memory(given, tmp_path)
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
