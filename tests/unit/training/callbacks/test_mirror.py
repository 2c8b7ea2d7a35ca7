"""What a mirror that fails does to a run: nothing but a line, and another try."""

import io
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from zerotrain.errors import CheckpointError
from zerotrain.training.callbacks import mirror as module
from zerotrain.training.callbacks.mirror import RunMirror


class Flaky:
    """A mirror that takes nothing until it has been tried so often."""

    url = "s3://bucket/run"
    moved_s = 0.0

    def __init__(self, failures: int) -> None:
        self.failures, self.pushed, self.num_tries = failures, list[str](), 0

    def push(self, path: Path) -> None:
        self.num_tries += 1
        if self.num_tries <= self.failures:
            raise CheckpointError(f"{self.url} does not take {path.name}: 403")
        self.pushed.append(path.name)

    def remove_old(self, keep: int | None) -> None:
        pass


def run_of(folder: Path) -> Any:
    screen = io.StringIO()
    result = SimpleNamespace(mirror=None)
    return SimpleNamespace(console=Console(file=screen, width=200), folder=folder, result=result), screen


def test_a_mirror_that_fails_is_told_and_tried_again(tmp_path: Path) -> None:
    run, screen = run_of(tmp_path)
    mirror: Any = Flaky(2)
    copies = RunMirror(mirror, 2)
    copies.start(run)
    copies.after_save(run, Path("step-00000002"))
    while not mirror.num_tries:
        time.sleep(0.01)
    copies.after_save(run, Path("step-00000003"))
    copies.after_save(run, Path("step-00000004"))
    copies.end(run)
    assert mirror.pushed == ["step-00000004"]  # the newest of those that waited
    assert run.result.mirror == {"url": mirror.url, "newest": "step-00000004", "failures": 2, "problem": None}
    lines = screen.getvalue().splitlines()
    assert lines[0].endswith("does not take step-00000002: 403; the run goes on, and tries again")
    assert lines[-1] == "step-00000004 is at s3://bucket/run now"


def test_a_run_ends_though_its_mirror_never_takes_a_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_TRIES_S", 1.5)
    run, screen = run_of(tmp_path)
    mirror: Any = Flaky(10**6)
    copies = RunMirror(mirror, 2)
    copies.start(run)
    copies.after_save(run, Path("step-00000001"))
    while not run.result.mirror["failures"]:
        time.sleep(0.01)
    copies.after_save(run, Path("step-00000002"))
    copies.end(run)
    problem = "s3://bucket/run does not take step-00000002: 403"
    assert run.result.mirror == {"url": mirror.url, "newest": None, "failures": mirror.num_tries, "problem": problem}
    assert mirror.num_tries >= 2
    assert len(screen.getvalue().splitlines()) == 1


def test_a_run_that_fails_does_not_wait_for_a_copy_that_hangs(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path)
    mirror: Any = Flaky(0)
    hanging = Event()
    mirror.push = lambda path: hanging.wait()
    copies = RunMirror(mirror, 2)
    copies.start(run)
    copies.after_save(run, Path("step-00000002"))
    copies.failure(run, RuntimeError("a rank is gone"))
    assert run.result.mirror == {"url": mirror.url, "newest": None, "failures": 0, "problem": None}
    hanging.set()
    copies.end(run)
    assert run.result.mirror["newest"] == "step-00000002"


def test_a_run_ends_though_the_copy_under_way_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALLED_S", 0.3)
    run, screen = run_of(tmp_path)
    mirror: Any = Flaky(0)
    hanging = Event()

    def push(path: Path) -> None:  # blocks for a second, and then none
        for _ in range(10):
            mirror.moved_s = time.monotonic()
            time.sleep(0.1)
        hanging.wait()

    mirror.push = push
    copies = RunMirror(mirror, 2)
    copies.start(run)
    copies.after_save(run, Path("step-00000002"))
    began_s = time.monotonic()
    copies.end(run)
    assert time.monotonic() - began_s > 1
    problem = "s3://bucket/run has taken nothing for 0.3 s"
    assert run.result.mirror == {"url": mirror.url, "newest": None, "failures": 1, "problem": problem}
    assert screen.getvalue() == f"warning: {problem}; the run ends without its last copy\n"
    hanging.set()
