"""A save has the state at its begin, whatever changes behind it, and leaves nothing where a rank refuses it."""

import threading
from typing import Any

import pytest
import torch
from torch import nn

import zerotrain
from tests.unit.checkpoint.runs import MOMENTUM, Kind, Matrices, build, train
from tests.unit.checkpoint.slow_disk import SlowDisk
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.manifest import read_manifest
from zerotrain.checkpoint.tensor_file import Entry
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import entries
from zerotrain.engine.state.save import ChunkReader, Snapshot
from zerotrain.errors import ConfigError
from zerotrain.testing.fake_wire import run_threads


class Counter(nn.Module):
    """Keeps a tensor, and a dict, beside the state of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.words = torch.zeros(3), {"seen": 0}

    def get_extra_state(self) -> Any:
        return self.seen


class Worded(Counter):
    def get_extra_state(self) -> Any:
        return self.words


class Counting(Matrices):
    def __init__(self) -> None:
        super().__init__()
        self.counter, self.worded = Counter(), Worded()


def test_what_changes_behind_the_begin_of_a_save_is_not_in_it(tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)
    engine = build(alone(), Kind(Counting), 2)
    extra, own, config = {"rows": [27]}, {"generator": [7]}, {"model": {"layers": 2}}
    save = engine.begin_save(tmp_path / "step", extra=extra, own=own, config=config)
    extra["rows"].append(54)
    own["generator"][0] = config["model"]["layers"] = 8
    engine.module.counter.seen += 1
    engine.module.worded.words["seen"] = 1
    disk.let_go(0)
    content = read_manifest(save.wait()).content
    assert (content["extra"], content["own"]) == ({"rows": [27]}, [{"generator": [7]}])
    assert content["config"] == {"model": {"layers": 2}}
    assert content["extra_state"]["worded._extra_state"] == {"value": {"seen": 0}}
    loaded: list[torch.Tensor] = []
    engine.module.counter.set_extra_state = loaded.append
    engine.module.worded.set_extra_state = loaded.append
    engine.load(tmp_path / "step")
    assert loaded[0].tolist() == [0.0] * 3


def test_a_save_that_one_rank_refuses_leaves_nothing_and_the_next_is_made(tmp_path):
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Counting), 2)
        good, engine.module.worded.words = engine.module.worded.words, {1: 1} if world.rank == 1 else {}
        with pytest.raises(ConfigError, match=r"saving \S+step failed, rank 1: .*has the key 1; keys must be texts"):
            engine.save(tmp_path / "step")
        both.wait()
        assert list(tmp_path.iterdir()) == []
        both.wait()
        engine.module.worded.words = good
        engine.save(tmp_path / "step")
        assert [path.name for path in tmp_path.iterdir()] == ["step"]

    both = threading.Barrier(2)
    run_threads(on_a_rank, 2)


# What waits for room in a save is let go when the save has ended.


def taken(engine: zerotrain.ZeroEngine, staging_nbytes: int | None) -> tuple[Snapshot, dict[Bucket, list[Entry]]]:
    own: dict[Bucket, list[Entry]] = {}
    for bucket, entry in entries(engine.held.holdings, 0):
        own.setdefault(bucket, []).append(entry)
    return Snapshot(own, staging_nbytes, ChunkReader(engine.world.device)), own


def test_a_save_that_ends_lets_go_of_an_update_that_waits_for_room():
    engine = build(alone(), Kind(Matrices, MOMENTUM), 2)
    train(engine, 0)
    snapshot, own = taken(engine, 0)  # without room: an update waits until all was read
    waits = [
        threading.Thread(target=snapshot.keep, args=(next(iter(own)),), daemon=True),
        threading.Thread(target=snapshot.wait_until_read, daemon=True),
    ]
    for wait in waits:
        wait.start()
        wait.join(0.2)
        assert wait.is_alive()
    snapshot.close()
    for wait in waits:
        wait.join(20.0)
        assert not wait.is_alive()
    assert snapshot.copied_nbytes == 0
