"""A save that fails or is killed, at each of its calls to the system: the last good checkpoint stays whole, none is
half under the new name, and training can go on."""

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, build, train
from tests.unit.checkpoint.slow_disk import fail, interrupt, kill, killed_in
from tests.unit.engine.parts import alone
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.errors import CheckpointError

KIND = KINDS["Muon and AdamW"]
CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink")


@pytest.fixture(scope="module")
def num_calls(tmp_path_factory: pytest.TempPathFactory) -> int:
    engine, folder = build(alone(), KIND, 2), tmp_path_factory.mktemp("counted")
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = interrupt(monkeypatch, CALLS, -1, lambda: None)
        engine.save(folder / "checkpoints" / "step")
    assert calls.index("rename") < calls.index("unlink")
    assert {*CALLS} == {*calls}
    assert len(calls) >= 10
    return len(calls)


def partial_folders(parent: Path) -> list[Path]:
    return list(parent.glob(".*.partial-*"))


@pytest.mark.case(
    "checkpoints",
    "a save killed at any of its calls to the system",
    "the last checkpoint is complete, the new one complete or not there; the next save removes the rest",
)
def test_killed_at_any_call_it_leaves_the_last_one_and_a_partial_folder_that_the_next_save_removes(
    num_calls: int, tmp_path: Path
) -> None:
    engine = build(alone(), KIND, 2)
    good = engine.save(tmp_path / "checkpoints" / "good")
    phases = set()
    for at in range(num_calls):
        target = tmp_path / "checkpoints" / f"step-{at}"

        def save(monkeypatch: pytest.MonkeyPatch, at: int = at, target: Path = target) -> None:
            interrupt(monkeypatch, CALLS, at, kill)
            engine.save(target)  # makes no autograd graph, so a fork may run it

        is_killed = killed_in(save)
        verify(good)
        if target.exists():
            verify(target)  # whole, or not there
        else:
            assert is_killed
        phases.add((target.exists(), bool(partial_folders(target.parent))))
        engine.save(tmp_path / "checkpoints" / "next")
        assert partial_folders(target.parent) == []
        shutil.rmtree(tmp_path / "checkpoints" / "next")
    assert phases >= {(False, True), (True, False)}


def test_all_of_it_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calls = build(alone(), KIND, 2), []
    fsync, rename, write = os.fsync, os.rename, os.write

    def path_of(descriptor: int) -> Path:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}"))

    monkeypatch.setattr(os, "write", lambda file, data: (calls.append(("write", path_of(file))), write(file, data))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(("fsync", path_of(file))), fsync(file))[1])
    monkeypatch.setattr(os, "rename", lambda *paths: (calls.append(("rename", Path(paths[0]))), rename(*paths))[1])
    engine.save(tmp_path / "checkpoints" / "step")
    (folder,) = [path for name, path in calls if name == "rename"]
    order = [name if path.parent == folder else name + " of folder" for name, path in calls]
    assert calls[0] == ("fsync", tmp_path)  # in which "checkpoints" was made
    assert calls.index(("rename", folder)) == len(calls) - 2
    assert calls[-1] == ("fsync", tmp_path / "checkpoints")
    assert calls[-3] == ("fsync", folder)
    for name in ("rank-00000.safetensors", "manifest.json"):
        written = max(index for index, call in enumerate(calls) if call == ("write", folder / name))
        assert ("fsync", folder / name) in calls[written:-3]
    assert order.count("fsync") == 2


@pytest.mark.case(
    "checkpoints",
    "no space or an I/O error at any of them, on any rank",
    "raised on all ranks, nothing left, training goes on",
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=["no space", "input/output error"])
def test_an_error_at_any_call_is_told_and_training_goes_on(num_calls: int, code: int, tmp_path: Path) -> None:
    engine = build(alone(), KIND, 2)
    before = engine.weights_sha256()
    for at in range(num_calls):
        target = tmp_path / "checkpoints" / f"step-{at}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            interrupt(monkeypatch, CALLS, at, lambda: fail(code))
            try:
                engine.save(target)
            except CheckpointError as error:
                assert os.strerror(code) in str(error)  # noqa: PT017
                assert "training can go on" in str(error)  # noqa: PT017
        assert not target.exists() or verify(target)
        assert partial_folders(tmp_path / "checkpoints") == []
    assert engine.weights_sha256() == before
    train(engine, 0)
    engine.save(tmp_path / "checkpoints" / "last")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Half a MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("needs root, to mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.case("checkpoints", "no space or an I/O error at any of them, on any rank")
def test_a_disk_that_fills_up_is_told_and_the_last_checkpoint_stays(small_disk: Path) -> None:
    def on_a_rank(world: zerotrain.World) -> None:
        engine = build(world, KIND, 2)
        train(engine, 0)
        for number in range(100):
            try:
                engine.save(small_disk / f"step-{number}")
            except CheckpointError as error:
                assert "No space left on device; nothing was saved" in str(error)  # noqa: PT017
                break
        train(engine, 1)

    run_threads(on_a_rank, 2)
    saved = sorted(small_disk.iterdir())
    assert 1 <= len(saved) < 99
    for path in saved:
        verify(path)


@pytest.mark.case("checkpoints", "the name is taken", "refused; nothing is replaced")
@pytest.mark.parametrize("name", ["a checkpoint", "an empty folder", "a file", "a link that leads nowhere"])
def test_what_has_the_name_already_is_not_replaced(name: str, tmp_path: Path) -> None:
    target = tmp_path / "step"
    engine = build(alone(), KIND, 2)
    make: dict[str, Callable[[], object]] = {
        "a checkpoint": lambda: engine.save(target),
        "an empty folder": target.mkdir,
        "a file": target.touch,
        "a link that leads nowhere": lambda: target.symlink_to("nowhere"),
    }
    make[name]()
    with pytest.raises(CheckpointError, match="step exists already, and a checkpoint never replaces anything"):
        engine.save(target)
    assert list(tmp_path.iterdir()) == [target]


def test_a_name_that_is_taken_while_the_save_runs_is_not_replaced(tmp_path: Path) -> None:
    other = PartialFolder(tmp_path / "step")
    engine = build(alone(), KIND, 2)
    engine.save(tmp_path / "step")
    with pytest.raises(CheckpointError, match="exists already"):
        other.publish(Manifest({"files": [], "parameters": {}, "buffers": {}}))
    other.remove()
    verify(tmp_path / "step")


def test_a_save_that_is_under_way_beside_is_left_alone_and_foreign_folders_too(tmp_path: Path) -> None:
    alive = PartialFolder(tmp_path / "other")
    foreign = tmp_path / ".mine.partial-0123456789abcdef"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("kept")
    engine = build(alone(), KIND, 2)
    engine.save(tmp_path / "step")
    assert alive.path.is_dir()
    assert (foreign / "notes.txt").read_text() == "kept"
    alive.remove()
