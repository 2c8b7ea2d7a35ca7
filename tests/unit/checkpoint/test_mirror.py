"""A mirror of checkpoints: cut off at any call it never gives a half one, and nothing damaged comes back."""

import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoint.runs import KINDS, build
from tests.unit.engine.parts import alone
from zerotrain.checkpoint import checkpoints_in, verify
from zerotrain.checkpoint.folder import step_name
from zerotrain.checkpoint.manifest import MANIFEST, read_manifest
from zerotrain.checkpoint.mirror import Mirror, fetch_newest
from zerotrain.errors import CheckpointError

KIND = KINDS["Muon and AdamW"]
CALLS = ("ls", "info", "cat_file", "open", "rm_file", "rm", "exists", "makedirs", "pipe_file")


class Cut(BaseException):
    """The process is gone."""


class Cutting:
    """A file system that is cut off at one of its calls, or at a write of one of its files."""

    def __init__(self, files: Any, at: int, error: BaseException) -> None:
        self._files, self._at, self._error, self.num_calls = files, at, error, 0

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls == self._at:
            raise self._error

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._files, name)
        if name not in CALLS:
            return attribute

        def call(*arguments: Any, **named: Any) -> Any:
            self._count()
            if name == "pipe_file":
                attribute(arguments[0], arguments[1][:100])
                self._count()
            answer = attribute(*arguments, **named)
            if name == "open" and arguments[1] == "wb":
                write = answer.write
                answer.write = lambda block: (write(bytes(block)[:7]), self._count(), write(bytes(block)[7:]))
            return answer

        return call


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of other weights."""
    folder = tmp_path_factory.mktemp("saved")
    return [build(alone(), KIND, 0, seed=seed).save(folder / f"of {seed}") for seed in (0, 1)]


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(f"file://{tmp_path}/there")


def named(checkpoint: Path, step: int, folder: Path) -> Path:
    return Path(shutil.copytree(checkpoint, folder / step_name(step)))


def cut_offs(mirror: Mirror, error: BaseException) -> Iterator[None]:
    """One cut after the other, at each call of what is done with the mirror inside, until nothing is cut off."""
    files = mirror._files
    for at in range(1, 200):
        mirror._files = cutting = Cutting(files, at, error)
        yield
        mirror._files = files
        if cutting.num_calls < at:
            return
    raise AssertionError("there is no end of calls")


@pytest.mark.parametrize("error", [Cut(), OSError(28, "No space left on device"), RuntimeError("403 Forbidden")])
def test_a_copy_cut_off_at_any_call_is_none_and_the_next_one_makes_it_whole(
    error: BaseException, saved: list[Path], mirror: Mirror, tmp_path: Path
) -> None:
    old, new = named(saved[0], 1, tmp_path / "old"), named(saved[1], 2, tmp_path / "new")
    mirror.push(old)
    for number, _ in enumerate(cut_offs(mirror, error)):
        with suppress(Cut, CheckpointError):
            mirror.push(new)
        mirror._files = getattr(mirror._files, "_files", mirror._files)
        path, problems = fetch_newest(mirror, tmp_path / f"here {number}", None)
        assert path is not None
        assert verify(path).text() == read_manifest(new if path.name == new.name else old).text()
        assert all("is damaged" in problem for problem in problems)
        shutil.rmtree(tmp_path / "there" / new.name, ignore_errors=True)
    mirror.push(new)
    assert fetch_newest(mirror, tmp_path / "last", 1)[0] == tmp_path / "last" / new.name
    assert number > 7


def test_another_checkpoint_of_the_same_step_is_never_mixed_with_the_one_before(
    saved: list[Path], mirror: Mirror, tmp_path: Path
) -> None:
    old, new = named(saved[0], 1, tmp_path / "old"), named(saved[1], 1, tmp_path / "new")
    texts = {read_manifest(path).text() for path in (old, new)}
    for number, _ in enumerate(cut_offs(mirror, Cut())):
        files = mirror._files
        mirror._files = files._files
        mirror.push(old)
        mirror._files = files
        with suppress(Cut, CheckpointError):
            mirror.push(new)
        mirror._files = files._files
        path, _ = fetch_newest(mirror, tmp_path / f"here {number}", None)
        assert path is None or verify(path).text() in texts
    assert path is not None
    assert verify(path).text() == read_manifest(new).text()


def test_what_is_fetched_appears_when_it_is_whole(saved: list[Path], mirror: Mirror, tmp_path: Path) -> None:
    mirror.push(named(saved[0], 1, tmp_path / "own"))
    here = tmp_path / "here"
    for _ in cut_offs(mirror, Cut()):
        try:
            path, _ = fetch_newest(mirror, here, None)
        except (Cut, CheckpointError):
            path = None
        assert checkpoints_in(here) == ([] if path is None else [path])
        if path is not None:
            verify(path)
            shutil.rmtree(path)


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda path: (path / "rank-00000.safetensors").unlink(), "cannot be fetched"),
        (lambda path: (path / "rank-00000.safetensors").write_bytes(b""), "not what was written, from its block 0"),
        (lambda path: (path / "rank-00000.safetensors").open("ab").write(b"x"), "more or fewer bytes than the"),
        (lambda path: (path / MANIFEST).write_text("{"), "is damaged"),
        (lambda path: (path / MANIFEST).unlink(), "its copy was cut off"),
    ],
)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(
    damage: Any, line: str, saved: list[Path], mirror: Mirror, tmp_path: Path
) -> None:
    for step in (1, 2):
        mirror.push(named(saved[0], step, tmp_path / "own"))
    damage(tmp_path / "there" / step_name(2))
    lines: list[str] = []
    path, problems = fetch_newest(mirror, tmp_path / "here", None, lines.append)
    assert path == tmp_path / "here" / step_name(1)
    assert line in [*problems, *lines][0]
    assert (problems == []) == ("cut off" in line)  # it was never whole, so it is no problem
    mirror.push(tmp_path / "own" / step_name(2))  # what was lost is copied again
    assert fetch_newest(mirror, tmp_path / "here", 1) == (tmp_path / "here" / step_name(2), [])


def test_a_checkpoint_damaged_here_is_not_copied(saved: list[Path], mirror: Mirror, tmp_path: Path) -> None:
    path = named(saved[0], 1, tmp_path / "own")
    file = path / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"does not take step-00000001: rank-00000\.safetensors is not what was"):
        mirror.push(path)
    assert fetch_newest(mirror, tmp_path / "here", None)[0] is None


@pytest.mark.parametrize(("call", "name"), [("open", "rank-00000.safetensors"), ("pipe_file", MANIFEST)])
def test_a_server_that_takes_a_file_and_keeps_it_not_is_found_out(
    call: str, name: str, saved: list[Path], mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, take = mirror._files, getattr(mirror._files, call)
    monkeypatch.setattr(files, call, lambda place, *how: take(f"{tmp_path}/lost", *how))
    path = named(saved[0], 1, tmp_path / "own")
    with pytest.raises(CheckpointError, match=f"does not take step-00000001: .*{name}"):
        mirror.push(path)
    monkeypatch.undo()
    assert fetch_newest(mirror, tmp_path / "here", None) == (None, [])
    mirror.push(path)
    assert fetch_newest(mirror, tmp_path / "here", None)[0] == tmp_path / "here" / step_name(1)


def test_old_ones_and_cut_off_copies_go_and_other_entries_stay(
    saved: list[Path], mirror: Mirror, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        mirror.push(named(saved[0], step, tmp_path / "own"))
    there = tmp_path / "there"
    (there / "notes").mkdir()
    (there / step_name(4)).mkdir()
    mirror.remove_old(2)
    assert sorted(path.name for path in there.iterdir()) == ["notes", step_name(2), step_name(3)]
    mirror.remove_old(None)
    assert mirror.steps() == [3, 2]


def test_no_password_is_shown(tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/there")
    mirror._files = Cutting(mirror._files, 1, ValueError("no s3://key:secret@bucket/run"))
    with pytest.raises(CheckpointError) as refusal:
        mirror.steps()
    assert "secret" not in str(refusal.value)
