"""Training beside a save: it comes to the bits of training without, and what is saved is the state at the begin."""

import errno
import functools
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.ranks.processes import HANG_S
from tests.unit.checkpoint.runs import (
    KINDS,
    MOMENTUM,
    Kind,
    Matrices,
    Saved,
    assert_loads,
    build,
    counted,
    held,
    joined,
    train,
)
from tests.unit.checkpoint.slow_disk import SlowDisk, fail
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.tensor_file import Entry
from zerotrain.engine.state import save as snapshot
from zerotrain.engine.state.named import owned_pieces
from zerotrain.errors import CheckpointError, ConfigError

PLACES = [(kind, stage, 2 + (index // 2 + stage) % 2) for index, kind in enumerate(KINDS) for stage in (index % 3, 3)]
"""Kinds have stages 0 to 2 in turns; tests/bits has the others."""


def trained_nbytes(engine: zerotrain.ZeroEngine) -> int:
    """Of what this rank saves that updates change."""
    own = [piece for bucket in engine.schedule.trained for piece in owned_pieces(bucket, engine.world.rank)]
    return sum(piece.values.nbytes for piece in own)


@pytest.mark.case(
    "checkpoints",
    "training beside a save, every kind above, stages 0 to 3, each bucket met unwritten, a slow "
    "disk, no room for copies",
    "the bits of training without; the checkpoint is the state at the begin, bit for bit",
)
@pytest.mark.parametrize(("kind", "stage", "size"), PLACES)
@pytest.mark.thinned(3)
def test_training_beside_a_save_comes_to_the_same_bits_and_the_state_at_its_begin_is_saved(
    kind: str, stage: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(world: zerotrain.World) -> zerotrain.ZeroEngine:
        engine = build(world, KINDS[kind], stage)
        train(engine, 0, 1, 2)
        engine.param_groups[0]["lr"] *= 0.5
        return engine

    def undisturbed(world: zerotrain.World) -> list[str]:
        engine = begun(world)
        return [(train(engine, step), engine.weights_sha256())[1] for step in (3, 4)]

    def disturbed(world: zerotrain.World, path: Path, disk: SlowDisk, staging_nbytes: int | None) -> Any:
        engine = begun(world)
        before, counts, nbytes = held(engine), counted(engine), trained_nbytes(engine)
        save = engine.begin_save(path, extra={"rows": 27}, staging_nbytes=staging_nbytes)
        train(engine, 3)
        after = [engine.weights_sha256()]
        if staging_nbytes is not None:
            assert save.copied_nbytes == min(nbytes, staging_nbytes)  # all of it was met unwritten, or waited for
        disk.let_go(world.rank)
        engine.param_groups[0]["lr"] *= 2.0
        engine.param_groups[0]["lr"] *= 0.5
        train(engine, 4)
        assert save.wait() == path
        assert save.is_done
        assert save.error is None
        return before, counts, [*after, engine.weights_sha256()]

    expected, _ = run_threads(undisturbed, size)
    with_little_room = ("slow", 0.0003, None) if (stage + size) % 4 < 2 else ("without room", 0.0003, 0)
    for name, pause_s, staging_nbytes in (("held", None, 2**30), with_little_room):
        path = tmp_path / name
        with monkeypatch.context() as patched:
            disk = SlowDisk(patched, pause_s)
            patched.setattr(snapshot, "CHUNK_NBYTES", 256)  # tensors of which a part is written when the update comes
            given = functools.partial(disturbed, path=path, disk=disk, staging_nbytes=staging_nbytes)
            found, _ = run_threads(given, size)
        assert [each[2] for each in found] == expected
        verify(path)
        saved = Saved(path, joined([each[0] for each in found]), found[0][1], expected[0][0])
        assert assert_loads(saved, KINDS[kind], 3 - stage, size) == expected[0][0]


@pytest.mark.case(
    "checkpoints", "memory of copies in front of updates", "at most `staging_nbytes`, by default one bucket"
)
def test_copies_take_no_more_than_was_allowed_by_default_the_largest_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[int]] = {0: [], 1: []}
    real = snapshot.Snapshot._copy

    def on_a_rank(world: zerotrain.World) -> tuple[int, int]:
        engine = build(world, Kind(Matrices), 2)
        train(engine, 0)

        def copy(self: snapshot.Snapshot, entry: Entry) -> None:
            real(self, entry)
            rank = int(self is not saves[0]._snapshot)
            seen[rank].append(self._held_nbytes)
            if len(seen[rank]) == 1:
                threading.Timer(0.1, disk.let_go, [rank]).start()  # until then there is room for one bucket alone

        by_bucket = [
            sum(piece.values.nbytes for piece in owned_pieces(bucket, world.rank)) for bucket in engine.schedule.buckets
        ]
        saves.insert(world.rank, engine.begin_save(tmp_path / "step"))
        both.wait()
        if world.rank == 0:
            monkeypatch.setattr(snapshot.Snapshot, "_copy", copy)
        both.wait()
        train(engine, 1, 2)
        saves[world.rank].wait()
        return max(by_bucket), sum(by_bucket)

    saves: list[Any] = []
    both = threading.Barrier(2)
    disk = SlowDisk(monkeypatch)
    found, _ = run_threads(on_a_rank, 2)
    for rank, (largest, total) in enumerate(found):
        assert 0 < max(seen[rank]) <= largest < total


@pytest.mark.case(
    "checkpoints",
    "one rank fails beside the training",
    "raised on all ranks by `wait`, nothing left, training goes on to the same bits",
)
@pytest.mark.case("checkpoints", "no space or an I/O error at any of them, on any rank")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_rank_that_fails_beside_the_training_fails_the_save_on_all_and_the_training_goes_on_to_the_same_bits(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, file = os.write, f"rank-{failing:05d}.safetensors"
    num_writes = 0

    def write(descriptor: int, data: Any) -> int:
        nonlocal num_writes
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(file):
            num_writes += 1
            if num_writes == 5:  # of the first save
                fail(errno.ENOSPC)
        return real(descriptor, data)

    def on_a_rank(world: zerotrain.World, saves: bool) -> str:
        engine = build(world, KINDS["Muon and AdamW"], 2)
        train(engine, 0)
        save = engine.begin_save(tmp_path / "step", staging_nbytes=0) if saves else None
        train(engine, 1, 2)  # waits until all was read, or the save has ended
        if save is not None:
            said = rf"saving \S+step failed, rank {failing}: \S+{file}: No space left on device; nothing was saved"
            with pytest.raises(CheckpointError, match=said):
                save.wait()
            assert save.is_done
            assert isinstance(save.error, CheckpointError)
        train(engine, 3)
        if saves:
            engine.save(tmp_path / "after")
        return engine.weights_sha256()

    expected, _ = run_threads(functools.partial(on_a_rank, saves=False), 3)
    monkeypatch.setattr(os, "write", write)
    found, _ = run_threads(functools.partial(on_a_rank, saves=True), 3)
    assert found == expected
    assert [path.name for path in tmp_path.iterdir()] == ["after"]
    verify(tmp_path / "after")


@pytest.mark.case("checkpoints", "a rank that is not heard of any more", "ends the save on all, named")
def test_a_rank_of_which_nothing_is_heard_ends_the_save_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, told = SlowDisk(monkeypatch), threading.Event()
    disk.let_go(0)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        make_wire = world.shards.make_wire
        assert make_wire is not None
        make_wire(True).store().set_timeout(timedelta(seconds=0.3))
        train(engine, 0)
        save = engine.begin_save(tmp_path / "step", staging_nbytes=2**30)
        train(engine, 1, 2)
        if world.rank == 1:
            assert told.wait(HANG_S)
            disk.let_go(1)
        with pytest.raises(
            CheckpointError, match=r"rank 1: nothing was heard of it for 0\.3 s: its process is gone, or"
        ):
            save.wait()
        told.set()

    run_threads(on_a_rank, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case(
    "checkpoints",
    "a second save while one is under way",
    "waits for it; an error that nobody has read is raised on all ranks",
)
def test_a_second_save_waits_for_the_first_and_raises_its_error_on_all_ranks_unless_it_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)

    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        first = engine.begin_save(tmp_path / "first")
        assert not first.is_done
        assert first.error is None
        assert not (tmp_path / "first").exists()
        threading.Timer(0.05, disk.let_go, [world.rank]).start()
        second = engine.begin_save(tmp_path / "second")
        assert first.is_done
        assert (tmp_path / "first" / "manifest.json").is_file()
        second.wait()
        with monkeypatch.context() as patched:
            if world.rank == 1:
                patched.setattr(snapshot.Snapshot, "require_unwritten", lambda self: 1 / 0)
            for is_read in (False, True):
                failed = engine.begin_save(tmp_path / "failed")
                if is_read or world.rank == 0:  # where one has not read it, all are told
                    with pytest.raises(CheckpointError, match=r"saving .*failed failed, rank ."):
                        failed.wait()
                if not is_read:
                    with pytest.raises(CheckpointError, match=r"saving .*failed failed, rank .: ZeroDivisionError"):
                        engine.save(tmp_path / "third")
        engine.save(tmp_path / "fourth")

    run_threads(on_a_rank, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "fourth", "second"]


WRITES: dict[str, Callable[[torch.nn.Parameter], object]] = {
    "in place": lambda parameter: parameter.fill_(0.5),
    "through data": lambda parameter: parameter.data.fill_(0.5),
    "data as a whole": lambda parameter: setattr(parameter, "data", torch.full_like(parameter, 0.5)),
}


@pytest.mark.case(
    "checkpoints",
    "weights written while they are saved",
    'saved as they were before; in place in fp32 at stages 0 to 2 the save fails: "... was '
    'written in place while it was saved"',
)
@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize(
    ("stage", "precision"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")]
)
@pytest.mark.thinned(2)
def test_a_weight_that_is_written_beside_a_save_is_saved_as_it_was_or_the_save_fails_with_its_name(
    stage: int, precision: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SlowDisk(monkeypatch)
    kind = Kind(Matrices, MOMENTUM, precision)
    fails = how == "in place" and stage < 3 and precision == "fp32"

    def on_a_rank(world: zerotrain.World) -> Any:
        engine = build(world, kind, stage)
        train(engine, 0)
        before = held(engine), counted(engine)
        save = engine.begin_save(tmp_path / "step", extra={"rows": 27}, staging_nbytes=2**30)
        with torch.no_grad(), engine.forward_scope():
            WRITES[how](engine.module.blocks[1].weight)
        if stage != 2:  # found by the update, or by the thread when it has read all
            train(engine, 1)
        else:
            engine.full_state_dict()  # takes the write into the master weight
        disk.let_go(world.rank)
        if not fails:
            save.wait()
        else:
            with pytest.raises(
                CheckpointError, match=r"blocks\.1\.weight was written in place while it was saved: wait"
            ):
                save.wait()
        state = engine.full_state_dict()
        assert stage != 2 or world.rank or (state["blocks.1.weight"] == 0.5).all()
        return before

    found, _ = run_threads(on_a_rank, 2)
    assert (tmp_path / "step").exists() is not fails
    if not fails:
        saved = Saved(tmp_path / "step", joined([each[0] for each in found]), found[0][1], "")
        assert_loads(saved, kind, 3 - stage, 2)


@pytest.mark.case(
    "checkpoints",
    "`freeze`, `load`, `load_state_dict` during a save",
    "wait, or copy first; the state at the begin is saved",
)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("change", ["freeze", "load", "load_state_dict", "full_state_dict"])
def test_what_changes_the_state_during_a_save_waits_or_copies(
    change: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Kind(Matrices, MOMENTUM)

    def on_a_rank(world: zerotrain.World) -> Any:
        engine = build(world, kind, stage)
        engine.save(tmp_path / "untrained")
        train(engine, 0)
        before = held(engine), counted(engine)
        with_a_slow_disk.wait()
        save = engine.begin_save(tmp_path / "step", extra={"rows": 27})
        if change == "freeze":
            engine.freeze("blocks.0.*")
        elif change == "load":
            engine.load(tmp_path / "untrained")
        elif change == "load_state_dict":
            engine.load_state_dict({name: torch.zeros_like(each) for name, each in Matrices().state_dict().items()})
        else:
            engine.full_state_dict()
        train(engine, 1)
        save.wait()
        return before

    with_a_slow_disk = threading.Barrier(2, lambda: SlowDisk(monkeypatch, 0.001))
    found, _ = run_threads(on_a_rank, 2)
    saved = Saved(tmp_path / "step", joined([each[0] for each in found]), found[0][1], "")
    assert_loads(saved, kind, 2, 3)


def test_what_the_engine_had_is_let_go_of_when_a_save_is_done(tmp_path: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        train(engine, 0)
        save = engine.begin_save(tmp_path / "step")
        save.wait()
        memory = weakref.ref(engine.schedule.buckets[0].weights)
        assert all(bucket.weights.before_change is None for bucket in engine.schedule.buckets)
        gc.disable()
        try:
            del engine
            assert memory() is None
        finally:
            gc.enable()
        assert save.held_s >= 0.0
        assert save.pause_s > 0.0

    run_threads(on_a_rank, 1)


@pytest.mark.case("checkpoints", "a process that ends during a save", "ends, leaves no folder, says so")
def test_a_process_that_ends_leaves_no_half_checkpoint_and_a_word(tmp_path: Path) -> None:
    script = """
import os, sys, threading, time
from pathlib import Path
import torch, zerotrain
real, begun = os.write, threading.Event()
def write(file, data):
    if "rank-" in os.readlink(f"/proc/self/fd/{file}"):
        begun.set()
        time.sleep(0.2)
    return real(file, data)
os.write = write
engine = zerotrain.build_engine(torch.nn.Linear(600, 600), optimizer=torch.optim.SGD)
save = engine.begin_save(Path(sys.argv[1]) / "step")
begun.wait()
assert not save.is_done
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert "its process ended before the save was done; call wait() on what engine.begin_save returns" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.case("checkpoints", "`own`, which differs by rank", "comes back to it where as many ask; otherwise None")
def test_what_each_rank_gives_of_its_own_comes_back_to_it_where_as_many_ask(tmp_path: Path) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, Kind(Matrices), 2)
        engine.save(tmp_path / "step", own={"generator": [world.rank, 7]})
        engine.save(tmp_path / "without")
        with pytest.raises(ConfigError, match=r"own\['seed'\] is of type tuple"):
            engine.save(tmp_path / "refused", own={"seed": (1, 2)})
        with pytest.raises(ConfigError, match="staging_nbytes is -1; give 0 or more bytes"):
            engine.begin_save(tmp_path / "refused", staging_nbytes=-1)

    def own(world: zerotrain.World) -> list[Any]:
        engine = build(world, Kind(Matrices), 3)
        return [engine.own_of(tmp_path / name) for name in ("step", "without")]

    run_threads(save, 2)
    assert run_threads(own, 2)[0] == [[{"generator": [0, 7]}, None], [{"generator": [1, 7]}, None]]
    assert run_threads(own, 3)[0] == [[None, None]] * 3


@pytest.mark.case(
    "checkpoints",
    "`load` or `load_weights` while a save is under way",
    "waits for it: the checkpoint can be loaded then, also as the newest of a run",
)
@pytest.mark.parametrize("takes", ["load", "load_weights", "load_weights of the run"])
def test_a_load_of_what_is_being_saved_waits_for_the_folder(
    takes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoints" / "step-00000001"

    def on_a_rank(world: zerotrain.World) -> tuple[str, str]:
        engine = build(world, Kind(Matrices, MOMENTUM), 2)
        train(engine, 0)
        saved = engine.weights_sha256()
        with_a_slow_disk.wait()
        engine.begin_save(path)
        train(engine, 1)
        if takes == "load":
            engine.load(path)
        else:
            engine.load_weights(path if takes == "load_weights" else tmp_path)
        return saved, engine.weights_sha256()

    with_a_slow_disk = threading.Barrier(2, lambda: SlowDisk(monkeypatch, 0.01))
    for saved, loaded in run_threads(on_a_rank, 2, late_rank=0)[0]:
        assert saved == loaded
