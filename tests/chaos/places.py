"""Where a process can be killed, and how it is noticed that such a place is passed.

Nothing of zerotrain knows of this: functions of the operating system are wrapped, told apart by the files they are
given, and a few of zerotrain's own by name. A name that is not there any more fails the first start.
"""

import fcntl
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos.strike import LAUNCHER, Striker

LAUNCHERS, RANK_0, OTHER_RANKS, ANY_RANK = "launcher", "rank 0", "other ranks", "any rank"


@dataclass(frozen=True)
class Place:
    """One of those that can be named in a plan."""

    name: str
    kind: str
    """once: at every start. step: in each. switch: between two, in a run whose stage changes. save: beside each step.
    removal: beside each step but the first ones. end: of the whole run. load: where there is a checkpoint. clear: where
    the save before was cut off. aside: where the newest checkpoint is damaged. restart: where the launcher starts the
    ranks again."""
    of: str = ANY_RANK
    """Who passes it."""


PLACES = [
    Place("launch: before the run's folder is opened", "once", LAUNCHERS),
    Place("launch: before the ranks are started", "once", LAUNCHERS),
    Place("start: a rank begins", "once"),
    Place("start: joining the others", "once"),
    Place("start: building the engine", "once"),
    Place("step: forward", "step"),
    Place("step: backward", "step"),
    Place("step: update", "step"),
    Place("step: evaluation", "step"),
    Place("switch: before the first bucket", "switch"),
    Place("switch: between two buckets", "switch"),
    Place("switch: a bucket on its way between the ranks", "switch"),
    Place("switch: behind the last bucket", "switch"),
    Place("switch: told, before the save", "switch"),
    Place("save: before its folder is made", "save", RANK_0),
    Place("save: its folder is made, not locked", "save", RANK_0),
    Place("save: planned", "save"),
    Place("save: half of a block written", "save"),
    Place("save: before the fsync of a file", "save"),
    Place("save: half of its description written", "save", OTHER_RANKS),
    Place("save: before the word that a file is written", "save"),
    Place("save: half of the manifest written", "save", RANK_0),
    Place("save: before the fsync of the manifest", "save", RANK_0),
    Place("save: before the fsync of its folder", "save", RANK_0),
    Place("save: before the rename", "save", RANK_0),
    Place("save: renamed, before the fsync of the parent", "save", RANK_0),
    Place("save: before its lock is removed", "save", RANK_0),
    Place("save: before the word that it is there", "save", RANK_0),
    Place("save: after the word that it is there", "save", RANK_0),
    Place("removal: before the rename to a hidden name", "removal", RANK_0),
    Place("removal: renamed, before the fsync", "removal", RANK_0),
    Place("removal: before a file goes", "removal", RANK_0),
    Place("removal: before the folder goes", "removal", RANK_0),
    Place("load: before the manifest is read", "load", RANK_0),
    Place("load: a block is verified", "load"),
    Place("load: a tensor is filled", "load"),
    Place("load: before metrics.jsonl is cut", "load", RANK_0),
    Place("clear: before a file of a dead save goes", "clear", RANK_0),
    Place("clear: before the folder of a dead save goes", "clear", RANK_0),
    Place("aside: before the rename", "aside", RANK_0),
    Place("aside: after the rename", "aside", RANK_0),
    Place("restart: before the ranks are started again", "restart", LAUNCHERS),
    Place("end: before result.json", "end", RANK_0),
    Place("end: after result.json", "end", RANK_0),
]
BY_NAME = {place.name: place for place in PLACES}
_PARTIAL, _REMOVED = re.compile(r"/\.[^/]+\.partial-[0-9a-f]{16}"), re.compile(r"/\.step-\d+\.removed-[0-9a-f]{16}")
_OF_WRITER = "zerotrain save"
"""The thread of a save that goes on beside the training."""


def arm() -> None:
    """Let the kills that are planned strike in this process."""
    striker = Striker.of_this_process()
    if striker is None:
        return
    _watch_files(striker)
    if striker.rank == LAUNCHER:
        _watch_launcher(striker)
    else:
        _watch_training(striker)
        _watch_changes_of_the_stage(striker)
        _watch_checkpoints(striker)
        striker.passed("start: a rank begins")


def before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of a function each time before it is called."""
    original = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        look(*arguments, **named)
        return original(*arguments, **named)

    setattr(owner, name, watched)


def after(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Call `look` with the arguments of a function each time it has returned."""
    original = getattr(owner, name)

    def watched(*arguments: Any, **named: Any) -> Any:
        value = original(*arguments, **named)
        look(*arguments, **named)
        return value

    setattr(owner, name, watched)


def _watch_launcher(striker: Striker) -> None:
    from zerotrain.launching import rank_process, spawn
    from zerotrain.launching.job import Job
    from zerotrain.launching.resuming import Attempts

    before(rank_process, "main", lambda *_: arm())  # of ranks that are forked from here
    before(Job, "open_folder", lambda *_: striker.passed("launch: before the run's folder is opened"))
    before(spawn, "_run_once", lambda *_: striker.passed("launch: before the ranks are started"))
    after(Attempts, "begin_next", lambda *_: striker.passed("restart: before the ranks are started again"))


def _watch_training(striker: Striker) -> None:
    import torch.distributed as dist

    from zerotrain.engine.buckets.bucket import JointUpdate
    from zerotrain.launching.presence import Presence
    from zerotrain.models.gpt import HiddenLayer
    from zerotrain.run import factory

    def begin(_: Any, step: int) -> None:
        striker.step = step

    def forward(layer: Any, hidden: Any) -> None:
        striker.passed("step: forward" if layer.training else "step: evaluation")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: striker.passed("step: backward"))

    before(Presence, "begin", begin)
    before(dist, "init_process_group", lambda *_, **__: striker.passed("start: joining the others"))
    before(factory, "build_engine_of", lambda *_: striker.passed("start: building the engine"))
    before(HiddenLayer, "forward", forward)
    before(JointUpdate, "run", lambda *_: striker.passed("step: update"))


class _Change:
    """A change of the stage, in this process."""

    def __init__(self, striker: Striker) -> None:
        self._striker = striker
        self.num_moved: int | None = None
        """Buckets of the one that is under way; None between two."""

    def begin(self, *_: Any) -> None:
        self.num_moved = 0
        self._striker.passed("switch: before the first bucket")

    def bucket(self, *_: Any) -> None:
        assert self.num_moved is not None
        if self.num_moved:
            self._striker.passed("switch: between two buckets")
        self.num_moved += 1

    def wait(self, handle: Any) -> None:
        if self.num_moved is not None and handle.is_under_way:
            self._striker.passed("switch: a bucket on its way between the ranks")

    def end(self, *_: Any) -> None:
        self.num_moved = None
        self._striker.passed("switch: behind the last bucket")

    def told(self, *_: Any) -> None:
        self._striker.passed("switch: told, before the save")


def _watch_changes_of_the_stage(striker: Striker) -> None:
    from zerotrain.comm.handles import Handle
    from zerotrain.engine.build import Builder
    from zerotrain.engine.sharded_model import ShardedModel
    from zerotrain.training.callbacks.stages import RunStages

    change = _Change(striker)
    before(ShardedModel, "move_to", change.begin)
    before(Builder, "moved", change.bucket)
    before(Handle, "wait", change.wait)
    after(ShardedModel, "move_to", change.end)
    after(RunStages, "after_step", change.told)


def _watch_checkpoints(striker: Striker) -> None:
    from zerotrain.checkpoint.tensor_file import Reader
    from zerotrain.comm.ledger import Notes
    from zerotrain.engine.state import from_checkpoint as checkpoint
    from zerotrain.engine.state.save import Writing

    def told(_: Any, name: str, *__: Any) -> None:
        if name == "end":
            striker.passed("save: before the word that it is there")
        elif name.startswith("error"):
            striker.passed("save: before the word that a file is written")

    before(Writing, "run", lambda *_: striker.passed("save: planned"))
    before(Notes, "leave", told)
    after(
        Notes, "leave", lambda _, name, *__: name == "end" and striker.passed("save: after the word that it is there")
    )
    before(checkpoint, "read_manifest", lambda *_: striker.passed("load: before the manifest is read"))
    before(Reader, "block", lambda *_: striker.passed("load: a block is verified"))
    before(Reader, "read", lambda *_: striker.passed("load: a tensor is filled"))


def _watch_files(striker: Striker) -> None:
    write, write_text = os.write, Path.write_text

    def half_written(descriptor: int, data: Any) -> int:
        place = _written(_path(descriptor))
        if place is not None and striker.is_due(place):
            write(descriptor, memoryview(data)[: len(data) // 2])
            striker.strike()
            return len(data) // 2
        return write(descriptor, data)

    def half_described(path: Path, text: str, *rest: Any, **named: Any) -> int:
        if path.name.startswith("described-") and striker.is_due("save: half of its description written"):
            write_text(path, text[: len(text) // 2])
            striker.strike()
        return write_text(path, text, *rest, **named)

    def watch(owner: Any, name: str, place_before: Callable[..., str | None], *, is_after: bool = False) -> None:
        def look(*arguments: Any, **named: Any) -> None:
            if (place := place_before(*arguments, **named)) is not None:
                striker.passed(place)

        (after if is_after else before)(owner, name, look)

    os.write, Path.write_text = half_written, half_described  # type: ignore[assignment]
    watch(os, "fsync", _synced)
    watch(os, "mkdir", _made)
    watch(fcntl, "flock", _locked)
    watch(os, "rename", _renamed)
    watch(os, "rename", _was_renamed, is_after=True)
    watch(os, "replace", _replaced)
    watch(os, "replace", _was_replaced, is_after=True)
    watch(os, "unlink", _unlinked)
    watch(os, "rmdir", _removed)


def _path(of: Any, folder: int | None = None) -> str:
    """Absolute, of what a function of the operating system was given."""
    name = os.readlink(f"/proc/self/fd/{of}") if isinstance(of, int) else os.path.abspath(os.fspath(of))
    return name if folder is None else f"{os.readlink(f'/proc/self/fd/{folder}')}/{os.fspath(of)}"


def _is_writer() -> bool:
    return threading.current_thread().name == _OF_WRITER


def _written(path: str) -> str | None:
    if _PARTIAL.search(path) is None:
        return None
    return "save: half of the manifest written" if path.endswith("/manifest.json") else "save: half of a block written"


def _synced(descriptor: int) -> str | None:
    path = _path(descriptor)
    if _PARTIAL.search(path):
        if path.endswith("/manifest.json"):
            return "save: before the fsync of the manifest"
        return (
            "save: before the fsync of a file"
            if path.endswith(".safetensors")
            else ("save: before the fsync of its folder")
        )
    return None


def _made(path: Any, *_: Any, **__: Any) -> str | None:
    return "save: before its folder is made" if _PARTIAL.search(_path(path)) else None


def _locked(file: Any, *_: Any) -> str | None:
    if not isinstance(file, int) or _PARTIAL.search(_path(file)) is None or os.fstat(file).st_size:
        return None
    return None if len(os.listdir(os.path.dirname(_path(file)))) > 1 else "save: its folder is made, not locked"


def _renamed(source: Any, target: Any, **_: Any) -> str | None:
    if _REMOVED.search(_path(target)):
        return "removal: before the rename to a hidden name"
    if ".aside-" in _path(target):
        return "aside: before the rename"
    return "save: before the rename" if _PARTIAL.search(_path(source)) else None


def _was_renamed(source: Any, target: Any, **_: Any) -> str | None:
    if _REMOVED.search(_path(target)):
        return "removal: renamed, before the fsync"
    if ".aside-" in _path(target):
        return "aside: after the rename"
    return "save: renamed, before the fsync of the parent" if _PARTIAL.search(_path(source)) else None


def _replaced(source: Any, target: Any, **_: Any) -> str | None:
    names = {"metrics.jsonl": "load: before metrics.jsonl is cut", "result.json": "end: before result.json"}
    return names.get(os.path.basename(target))


def _was_replaced(source: Any, target: Any, **_: Any) -> str | None:
    return "end: after result.json" if os.path.basename(target) == "result.json" else None


def _unlinked(name: Any, *, dir_fd: int | None = None) -> str | None:
    path = _path(name, dir_fd)
    if _REMOVED.search(path):
        return "removal: before a file goes"
    if path.endswith("/lock") and _is_writer():
        return "save: before its lock is removed"
    return "clear: before a file of a dead save goes" if _PARTIAL.search(path) and not _is_writer() else None


def _removed(name: Any, *, dir_fd: int | None = None) -> str | None:
    path = _path(name, dir_fd)
    if _REMOVED.search(path):
        return "removal: before the folder goes"
    return "clear: before the folder of a dead save goes" if _PARTIAL.search(path) and not _is_writer() else None
