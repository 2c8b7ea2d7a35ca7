"""The device that a rank takes, and groups that do not fit it. No GPU is needed: torch is asked how many there are."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerotrain.comm import world as worlds
from zerotrain.comm.world import World, choose_device, num_gpus_for
from zerotrain.device.kinds import Cuda
from zerotrain.errors import ConfigError

GPU = torch.device("cuda", 1)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID", "ZEROTRAIN_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(worlds, "num_gpus", lambda: 1)
    return monkeypatch


def test_a_task_that_sees_one_gpu_takes_it_whatever_its_local_rank(one_gpu):
    one_gpu.setenv("LOCAL_RANK", "3")
    assert choose_device("cuda", 3) == choose_device("auto", 3) == torch.device("cuda", 0)
    assert num_gpus_for(4) == 4


@pytest.mark.parametrize("started_by", ["TORCHELASTIC_RUN_ID", "ZEROTRAIN_STORE", None])
def test_ranks_that_one_process_starts_do_not_share_a_gpu(started_by, one_gpu):
    if started_by is not None:  # otherwise this is the launcher itself
        one_gpu.setenv("LOCAL_RANK", "1")
        one_gpu.setenv(started_by, "x")
    assert choose_device("cuda", 0) == torch.device("cuda", 0)
    assert num_gpus_for(2) == 1
    with pytest.raises(ConfigError, match="local rank 1 has no GPU: this machine has 1"):
        choose_device("cuda", 1)


def test_each_rank_has_its_own_where_there_are_several(one_gpu):
    one_gpu.setenv("LOCAL_RANK", "3")
    one_gpu.setattr(worlds, "num_gpus", lambda: 4)
    assert choose_device("cuda", 3) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="has no GPU"):
        choose_device("cuda", 4)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This is one of two ranks whose group the caller has made."""
    monkeypatch.setattr(worlds.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(worlds.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(worlds.dist, "get_backend", lambda: "gloo")
    return monkeypatch


def test_a_model_on_a_gpu_is_refused_where_the_group_is_gloos(two_ranks):
    """It would send device memory as if it were the host's."""
    two_ranks.setattr(worlds, "backend_of", lambda _group, _device: "gloo")
    with pytest.raises(ConfigError, match="the process group is gloo and the model is on cuda:1, whose memory gloo"):
        World.current(GPU)


@pytest.mark.parametrize("current", [0, 1])
def test_a_model_on_another_gpu_than_the_collectives_is_refused(current, two_ranks):
    two_ranks.setattr(worlds, "backend_of", lambda _group, _device: "nccl")
    two_ranks.setattr(torch.cuda, "current_device", lambda: current)
    two_ranks.setattr(worlds.dist, "get_rank", lambda: 1)
    two_ranks.setattr(World, "_around", classmethod(lambda _cls, device, _local_rank, **_: device))
    if current == GPU.index:
        assert World.current(GPU) == GPU  # type: ignore[comparison-overlap]
        assert Cuda(GPU).is_current
        assert Cuda(torch.device("cuda")).is_current
        return
    with pytest.raises(ConfigError, match=r"the model is on cuda:1, .*torch\.cuda\.set_device\(1\)"):
        World.current(GPU)


def ranks_along_axes() -> list[list[int]]:
    shards = World.current(torch.device("cpu")).shards
    axes = shards.axes(2, torch.device("cpu"))
    assert shards.axes(2, torch.device("cpu")) is axes
    groups = [group for axis in axes for group in (axis.gather_group, axis.reduce_group)]
    assert len(set(map(id, groups))) == 4
    return [dist.get_process_group_ranks(group) for group in groups]


def test_a_mesh_has_neighbours_inside_and_the_ranks_of_one_place_across():
    expected = [[[0, 1]] * 2 + [[0, 2]] * 2, [[0, 1]] * 2 + [[1, 3]] * 2]
    expected += [[[2, 3]] * 2 + [[0, 2]] * 2, [[2, 3]] * 2 + [[1, 3]] * 2]
    assert run_ranks(ranks_along_axes, 4, timeout_s=20) == expected
