"""What waits for room in a save is let go when the save has ended."""

import threading

import zerotrain
from tests.unit.checkpoint.runs import MOMENTUM, Kind, Matrices, build, train
from tests.unit.engine.parts import alone
from zerotrain.checkpoint.tensor_file import Entry
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.named import entries
from zerotrain.engine.state.save import ChunkReader, Snapshot


def taken(engine: zerotrain.ZeroEngine, staging_nbytes: int | None) -> tuple[Snapshot, dict[Bucket, list[Entry]]]:
    own: dict[Bucket, list[Entry]] = {}
    for bucket, entry in entries(engine.held.holdings, 0):
        own.setdefault(bucket, []).append(entry)
    return Snapshot(own, staging_nbytes, ChunkReader(engine.world.device)), own


def test_a_save_that_ends_lets_go_of_an_update_that_waits_for_room() -> None:
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
