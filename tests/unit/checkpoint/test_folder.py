"""Which checkpoints of a run are there, may be loaded, and stay. A removal that fails or is killed, at each of its
calls to the system, leaves nothing that looks like a checkpoint and is none."""

import errno
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.unit.checkpoint.runs import KINDS, build
from tests.unit.checkpoint.slow_disk import fail, interrupt, kill, killed_in
from tests.unit.engine.parts import alone
from zerotrain.checkpoint import verify
from zerotrain.checkpoint.folder import (
    PARTIAL,
    PartialFolder,
    best_in,
    candidates,
    checkpoints_in,
    entries,
    first_whole,
    newest_first,
    remove_all,
    remove_dead,
    remove_half_links,
    remove_old,
    set_aside,
    set_best,
    step_name,
    step_of,
)
from zerotrain.errors import CheckpointError

CALLS = ("open", "fsync", "rename", "unlink", "rmdir")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, of which the others are copies."""
    return build(alone(), KINDS["Muon and AdamW"], 0).save(tmp_path_factory.mktemp("saved") / "step-00000000")


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """Makes the folder of a run with these steps saved."""

    def make(*steps: int, name: str = "run") -> Path:
        for step in steps:
            shutil.copytree(saved, tmp_path / name / "checkpoints" / step_name(step))
        return tmp_path / name

    return make


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in checkpoints_in(folder)]


def hidden_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def test_a_name_sorts_by_step_and_longer_ones_still_do(run: Callable[..., Path]) -> None:
    assert step_name(100) == "step-00000100"
    assert steps_in(run(123456789, 99999999, 20, 3) / "checkpoints") == [3, 20, 99999999, 123456789]


def test_what_is_no_whole_checkpoint_of_a_step_is_none(run: Callable[..., Path]) -> None:
    folder = run(100) / "checkpoints"
    cut_off = PartialFolder(folder / "step-00000200")
    (cut_off.path / "manifest.json").touch()
    (folder / "step-00000300").mkdir()
    for name in ("step-400", "step-000000500", "best", ".step-00000600.removed-0123456789abcdef", "step-00000700.old"):
        shutil.copytree(folder / "step-00000100", folder / name)
    (folder / "step-00000800").touch()
    assert steps_in(folder) == [100]
    assert entries(folder, PARTIAL) == [cut_off.path]
    cut_off.remove()
    assert checkpoints_in(folder / "nowhere") == checkpoints_in(folder / "step-00000800") == []


@pytest.mark.case(
    "checkpoints",
    "a checkpoint, a folder of them or a run is named; there is none, or only a save that was cut off",
    "those that may be loaded, the newest first; one sentence",
)
def test_a_checkpoint_a_folder_of_them_and_a_run_can_be_named(run: Callable[..., Path]) -> None:
    path = run(100, 200, 1000)
    newest_first = [path / "checkpoints" / step_name(step) for step in (1000, 200, 100)]
    assert candidates(path) == candidates(path / "checkpoints") == newest_first
    assert candidates(newest_first[1]) == [newest_first[1]]


def test_of_those_in_a_folder_the_newest_that_is_whole_is_taken(run: Callable[..., Path]) -> None:
    folder = run(100, 200, 1000) / "checkpoints"
    [third, second, first] = newest_first(folder)
    [weights] = third.glob("*.safetensors")
    weights.write_bytes(b"")
    (second / "manifest.json").write_text("{}")
    taken, problems = first_whole(newest_first(folder), verify)
    assert taken is not None
    assert (taken[0], taken[1].content) == (first, verify(first).content)
    assert [str(path) in problem for path, problem in zip((third, second), problems, strict=True)] == [True, True]
    assert first_whole([third, second], verify) == (None, problems)
    assert first_whole(newest_first(folder / "none"), verify) == (None, [])


@pytest.mark.case(
    "checkpoints", "a checkpoint, a folder of them or a run is named; there is none, or only a save that was cut off"
)
def test_a_name_with_nothing_to_load_is_told_in_one_sentence(run: Callable[..., Path], tmp_path: Path) -> None:
    def told(path: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            candidates(path)
        assert "\n" not in str(error.value)
        return str(error.value).replace(f"{tmp_path}/", "")

    allowed = (
        "give the folder of a checkpoint (it has manifest.json), a folder of checkpoints (such as "
        "checkpoints/step-00000100), or a run's folder (it has checkpoints/)"
    )
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.pt").touch()
    partial = PartialFolder(tmp_path / "cut" / "checkpoints" / "step-00000100")
    (partial.path / "manifest.json").touch()
    assert told(tmp_path / "nowhere") == f"nowhere is not there: {allowed}"
    assert told(tmp_path / "model.pt") == f"model.pt is a file: {allowed}"
    assert told(tmp_path / "empty") == f"empty has no checkpoint in it: {allowed}"
    only = f"only a save that was cut off is there ({partial.path.name})"
    assert told(tmp_path / "cut") == f"cut has no checkpoint: {only}"
    assert told(tmp_path / "cut" / "checkpoints") == f"cut/checkpoints has no checkpoint: {only}"
    assert "is of a save that was cut off or is still under way" in told(partial.path)
    removed = partial.path.with_name(".step-00000100.removed-0123456789abcdef")
    shutil.copytree(partial.path, removed)
    assert "is of a removal that was cut off" in told(removed)
    partial.remove()


@pytest.mark.case("checkpoints", "old checkpoints are removed", "the newest stays, and each of every so many steps")
@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (None, None, [10, 20, 25, 30, 40, 45]),
        (None, 20, [10, 20, 25, 30, 40, 45]),
        (2, None, [40, 45]),
        (1, 20, [20, 40, 45]),
        (3, 10, [10, 20, 30, 40, 45]),
        (99, None, [10, 20, 25, 30, 40, 45]),
        (0, None, [45]),
    ],
)
def test_the_newest_and_every_so_many_steps_stay(
    keep: int | None, keep_every: int | None, left: list[int], run: Callable[..., Path]
) -> None:
    steps = [10, 20, 25, 30, 40, 45]
    folder = run(*steps) / "checkpoints"
    gone = remove_old(folder, keep=keep, keep_every=keep_every)
    assert [step_of(path) for path in gone] == [step for step in steps if step not in left]
    assert steps_in(folder) == left
    assert sorted(path.name for path in folder.iterdir()) == [step_name(step) for step in left]


def test_a_link_to_a_checkpoint_elsewhere_and_what_is_no_step_stay(run: Callable[..., Path], tmp_path: Path) -> None:
    folder = run(20, 30) / "checkpoints"
    elsewhere = run(10, name="other") / "checkpoints" / step_name(10)
    (folder / step_name(10)).symlink_to(elsewhere)
    partial = PartialFolder(folder / step_name(40))
    (folder / "best").mkdir()
    remove_old(folder, keep=1, keep_every=None)
    assert steps_in(folder) == [10, 30]
    assert partial.path.is_dir()
    assert (folder / "best").is_dir()
    verify(elsewhere)
    partial.remove()


def link_of(folder: Path) -> str | None:
    return os.readlink(folder / "best") if os.path.lexists(folder / "best") else None


def test_the_best_stays_until_another_is_and_can_be_named(run: Callable[..., Path]) -> None:
    folder = run(10, 20, 30, 40) / "checkpoints"
    assert best_in(folder) is best_in(folder / "nowhere") is None
    set_best(folder / step_name(20), folder)
    assert best_in(folder) == folder / step_name(20)
    assert candidates(folder / "best") == [folder / step_name(20)]
    verify(folder / "best")
    remove_old(folder, keep=1, keep_every=None)
    assert steps_in(folder) == [20, 40]
    set_best(folder / step_name(40), folder)
    remove_old(folder, keep=1, keep_every=None)
    assert steps_in(folder) == [40]
    assert sorted(path.name for path in folder.iterdir()) == ["best", step_name(40)]
    set_best(None, folder)
    set_best(None, folder)
    assert [path.name for path in folder.iterdir()] == [step_name(40)]


@pytest.mark.parametrize("target", ["../../other", "/etc", "step-1", ".", "step-00000010/..", "step-00000010/"])
def test_a_link_that_names_no_checkpoint_beside_it_is_nobodys_best_and_stays(
    target: str, run: Callable[..., Path]
) -> None:
    folder = run(10, 20) / "checkpoints"
    (folder / "best").symlink_to(target)
    assert best_in(folder) is None
    remove_old(folder, keep=1, keep_every=None)
    assert steps_in(folder) == [20]
    with pytest.raises(CheckpointError, match="best is there, and is no link to a checkpoint beside it; move it away"):
        set_best(folder / step_name(20), folder)
    remove_all(folder)
    assert link_of(folder) == target


@pytest.mark.case(
    "checkpoints",
    "killed at any of its calls to the system",
    "the link names the checkpoint of before or the new one",
    under="`checkpoint.best`: the best evaluation is neither the first nor the last, saves wait or not",
)
def test_killed_at_any_call_the_link_names_the_one_of_before_or_the_new_one(run: Callable[..., Path]) -> None:
    folder = run(10, 20) / "checkpoints"
    seen = []
    for name in ("symlink", "replace", "fsync"):
        set_best(folder / step_name(10), folder)

        def set_other(monkeypatch: pytest.MonkeyPatch, name: str = name) -> None:
            interrupt(monkeypatch, [name], 0, kill)
            set_best(folder / step_name(20), folder)

        assert killed_in(set_other)
        seen.append(link_of(folder))
    assert seen == [step_name(10), step_name(10), step_name(20)]


def test_a_link_that_was_killed_before_it_got_its_name_goes_and_nothing_else(run: Callable[..., Path]) -> None:
    folder = run(10) / "checkpoints"

    def make(monkeypatch: pytest.MonkeyPatch) -> None:
        interrupt(monkeypatch, ["replace"], 0, kill)
        set_best(folder / step_name(10), folder)

    assert killed_in(make)
    [left] = folder.glob("best.*")
    (folder / f"best.{'0' * 16}.tmp").write_text("of a user's")
    (folder / "best.tmp").symlink_to(step_name(10))
    remove_half_links(folder)
    assert not os.path.lexists(left)
    assert sorted(path.name for path in folder.iterdir()) == [f"best.{'0' * 16}.tmp", "best.tmp", step_name(10)]
    remove_half_links(folder / "nowhere")


@pytest.fixture
def num_calls(run: Callable[..., Path]) -> int:
    folder = run(1, 2, 3, name="counted") / "checkpoints"
    with pytest.MonkeyPatch.context() as monkeypatch:
        calls = interrupt(monkeypatch, CALLS, -1, lambda: None)
        remove_old(folder, keep=1, keep_every=None)
    return len(calls)


def test_the_hidden_names_are_on_the_disk_before_the_first_file_goes(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run(1, 2, 3) / "checkpoints"
    calls = interrupt(monkeypatch, CALLS, -1, lambda: None)
    remove_old(folder, keep=1, keep_every=None)
    assert {*calls} == {*CALLS}
    assert [call for call in calls if call in ("fsync", "rename")] == ["fsync", "rename", "rename", "fsync"]
    assert calls.index("unlink") > max(at for at, call in enumerate(calls) if call == "fsync")


@pytest.mark.case(
    "checkpoints",
    "a removal killed at any of its calls to the system",
    "every folder with a step's name is complete; the next removal does the rest",
)
def test_killed_at_any_call_it_leaves_whole_checkpoints_and_the_next_removal_finishes_it(
    num_calls: int, run: Callable[..., Path]
) -> None:
    seen = set()
    for at in range(num_calls):
        folder = run(1, 2, 3, name=f"run-{at}") / "checkpoints"

        def remove(monkeypatch: pytest.MonkeyPatch, at: int = at, folder: Path = folder) -> None:
            interrupt(monkeypatch, CALLS, at, kill)
            remove_old(folder, keep=1, keep_every=None)

        assert killed_in(remove)
        for path in candidates(folder.parent):
            verify(path)
        seen.add((len(checkpoints_in(folder)), len(hidden_in(folder))))
        remove_old(folder, keep=1, keep_every=None)
        assert [path.name for path in folder.iterdir()] == [step_name(3)]
    assert seen >= {(3, 0), (2, 1), (1, 2), (1, 1)}


@pytest.mark.case(
    "checkpoints",
    "an I/O error or a read-only disk at any of them",
    "one sentence; no checkpoint that stays is touched",
)
@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS], ids=["input/output error", "read-only"])
def test_an_error_at_any_call_is_one_sentence_and_costs_no_checkpoint_that_stays(
    code: int, num_calls: int, run: Callable[..., Path]
) -> None:
    for at in range(num_calls):
        folder = run(1, 2, 3, name=f"run-{at}") / "checkpoints"
        with pytest.MonkeyPatch.context() as monkeypatch:
            interrupt(monkeypatch, CALLS, at, lambda: fail(code))
            with pytest.raises(CheckpointError) as error:
                remove_old(folder, keep=1, keep_every=None)
        said = str(error.value)
        assert said.startswith(f"an old checkpoint could not be removed: {folder}")
        assert f"{os.strerror(code)}; training can go on" in said
        for path in candidates(folder):
            verify(path)
        assert steps_in(folder)[-1] == 3
        remove_old(folder, keep=1, keep_every=None)
        assert [path.name for path in folder.iterdir()] == [step_name(3)]


def test_one_that_is_broken_is_set_aside_and_its_step_can_be_saved_again(run: Callable[..., Path]) -> None:
    folder = run(1, 2) / "checkpoints"
    moved = set_aside(folder / step_name(2))
    assert moved.name.startswith("step-00000002.aside-")
    assert steps_in(folder) == [1]
    verify(moved)
    PartialFolder(folder / step_name(2)).remove()
    with pytest.raises(CheckpointError, match="step-00000002: No such file or directory: it cannot be renamed"):
        set_aside(folder / step_name(2))


def test_what_saves_have_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "outside").mkdir()
    folder = tmp_path / "checkpoints"
    ours = ["step-00000003", "step-00000004.aside-0123456789abcdef", ".step-00000005.partial-0123456789abcdef"]
    ours.append(".step-00000006.removed-0123456789abcdef")
    others = ["mine", "step-3", "step-00000007.old", ".step-00000005.partial-x"]
    for name in ours + others:
        (folder / name).mkdir(parents=True)
        (folder / name / "a").write_text("a")
    (folder / "step-00000008").symlink_to(tmp_path / "outside")
    set_best(folder / "step-00000003", folder)
    remove_all(folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)
    assert (tmp_path / "outside").is_dir()
    remove_all(tmp_path / "none")


@pytest.mark.parametrize("num_removed", range(4))
def test_a_removal_of_a_dead_save_that_is_killed_anywhere_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_removed: int
) -> None:
    """Its lock was removed among the first: the rest was nobody's, and stayed (`make chaos`, 2026-11-22)."""
    dead = tmp_path / f".step-00000003.partial-{'0' * 16}"
    dead.mkdir()
    for name in ("lock", "rank-00000.safetensors", "described-00001.json", "manifest.json"):
        (dead / name).touch()
    listed, scanned = os.listdir, os.scandir  # in the worst order of the names, which a file system may have
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listed(path), key=lambda name: name != "lock"))
    monkeypatch.setattr(
        os, "scandir", lambda path: nullcontext(sorted(scanned(path), key=lambda entry: entry.name != "lock"))
    )

    def removal(monkeypatch: pytest.MonkeyPatch) -> None:
        interrupt(monkeypatch, ["unlink"], num_removed, kill)
        remove_dead(tmp_path)

    assert killed_in(removal)
    remove_dead(tmp_path)
    assert listed(tmp_path) == []
