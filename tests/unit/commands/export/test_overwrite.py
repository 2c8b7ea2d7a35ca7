"""`--overwrite` and `--out` erase nothing but what an earlier export has written."""

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zerotrain
from tests.unit.commands.export.test_export import exported, refused
from zerotrain.commands.export import FILES, require_apart
from zerotrain.saved.saved import ABOUT


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint."""
    run = tmp_path_factory.mktemp("saved") / "run"
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    engine = zerotrain.build_engine(torch.nn.Linear(4, 4), optimizer=optimizer)
    engine.save(run / "checkpoints" / "step-00000000")
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def contents(folder: Path) -> dict[str, str | bytes | None]:
    """All that lies in a folder: links, files and folders."""

    def content(path: Path) -> str | bytes | None:
        return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None

    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


def said_by(out: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((out / ABOUT).read_text())
    return found


def test_an_export_notes_its_files_and_is_replaced_with_none_left(run: Path, tmp_path: Path) -> None:
    out = exported(run, tmp_path / "out", "--shard-mb", "0.00005")
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert said_by(out)[FILES] == names
    exported(run, out, "--overwrite", "--dcp")
    assert sorted(contents(out)) == sorted([*said_by(out)[FILES], ABOUT])  # type: ignore[misc]
    exported(run, out, "--overwrite")
    assert sorted(contents(out)) == ["model.safetensors", ABOUT]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "run"]


def a_file(out: Path) -> None:
    (out / "thesis.txt").write_text("years")


def a_hidden_file_deep_inside(out: Path) -> None:
    (out / "mine" / "deep").mkdir(parents=True)
    (out / "mine" / "deep" / ".notes").write_text("years")


def an_empty_folder(out: Path) -> None:
    (out / "mine").mkdir()


def a_link_to_a_folder(out: Path) -> None:
    (out / "mine").symlink_to(out.parent / "run")


def a_link_in_place_of_a_file_of_the_export(out: Path) -> None:
    (out / "model.safetensors").rename(out.parent / "weights")
    (out / "model.safetensors").symlink_to(out.parent / "weights")


def a_folder_in_place_of_a_file_of_the_export(out: Path) -> None:
    (out / "model.safetensors").unlink()
    (out / "model.safetensors").mkdir()
    (out / "model.safetensors" / "thesis.txt").write_text("years")


def a_fifo(out: Path) -> None:
    os.mkfifo(out / "fifo")


@pytest.mark.parametrize(
    ("put", "name"),
    [
        (a_file, "thesis.txt"),
        (a_hidden_file_deep_inside, "mine"),
        (an_empty_folder, "mine"),
        (a_link_to_a_folder, "mine"),
        (a_link_in_place_of_a_file_of_the_export, "model.safetensors"),
        (a_folder_in_place_of_a_file_of_the_export, "model.safetensors"),
        (a_fifo, "fifo"),
    ],
)
def test_what_a_user_has_put_there_is_named_and_stays(
    put: Callable[[Path], None], name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = exported(run, tmp_path / "out")
    put(out)
    before = contents(tmp_path)
    said = refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert said == (
        f"--overwrite: {out / name} was not written by the export in that folder; move it away, or give a new name"
    )
    assert contents(tmp_path) == before


def test_a_file_that_comes_while_the_new_export_is_written_stays(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = exported(run, tmp_path / "out")
    write = zerotrain.commands.export.write_safetensors

    def written(*given: object, **options: object) -> int:
        a_file(out)
        return write(*given, **options)

    monkeypatch.setattr(zerotrain.commands.export, "write_safetensors", written)
    assert f"{out}/thesis.txt was not written" in refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert sorted(contents(out)) == sorted(["model.safetensors", "thesis.txt", ABOUT])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "run"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (None, "was exported by an older zerotrain, which did not note its files; give a new name"),
        (
            ["../thesis.txt"],
            "does not list the files of an export: files[0]: got ../thesis.txt; it must be the name of a file",
        ),
        (["/etc/passwd"], "does not list the files of an export"),
        (["mine/../../thesis.txt"], "does not list the files of an export"),
        (
            ["model.safetensors", 3],
            "does not list the files of an export: files[1]: got 3; it must be the name of a file",
        ),
        ({"thesis.txt": 1}, "does not list the files of an export: files: got a mapping; it must be a list"),
        ([""], "does not list the files of an export"),
        ([f"{'a/' * 3000}b"], "model.safetensors was not written by the export in that folder"),
    ],
)
def test_a_list_of_files_is_believed_within_its_folder_alone(
    files: object, said: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    out = exported(run, tmp_path / "out")
    told = {name: each for name, each in said_by(out).items() if name != FILES}
    (out / ABOUT).write_text(json.dumps(told if files is None else told | {FILES: files}))
    before = contents(tmp_path)
    assert said in refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "content", [b"", b"[" * 5000, b"[]", b'{"files": "model.safetensors"}', b"\xff", b'{"files":["\\ud800"]}']
)
def test_what_only_looks_like_an_export_is_not_replaced(
    content: bytes, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ABOUT).write_bytes(content)
    (out / "model.safetensors").write_bytes(b"mine")
    before = contents(tmp_path)
    assert str(out) in refused([str(run), "--out", str(out), "--overwrite"], capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("overwrite", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("given", ["run", "run/checkpoints", "run/checkpoints/step-00000000", "link", "old/link"])
@pytest.mark.parametrize(
    "out",
    ["run/out", "run/checkpoints/out", "run/checkpoints/step-00000000/out", "link/out", "x/../run/out", "run/a/b/c"],
)
def test_an_export_does_not_lie_in_its_run(
    out: str, given: str, overwrite: tuple[str, ...], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "link").symlink_to(run / "checkpoints" / "step-00000000")
    before = contents(tmp_path)
    said = refused([str(tmp_path / given), "--out", str(tmp_path / out), *overwrite], capsys)
    assert ", the folder to export; give another folder" in said
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["out", "link", "out/.", "out/run/..", "above/out"])
def test_a_run_that_lies_in_an_earlier_export_is_not_replaced(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = exported(run, tmp_path / "out")
    run.rename(out / "run")
    (tmp_path / "link").symlink_to(out)
    (tmp_path / "above").symlink_to(tmp_path)
    before = contents(tmp_path)
    refused([str(out / "run"), "--out", str(tmp_path / name), "--overwrite"], capsys)
    assert contents(tmp_path) == before
    told = said_by(out)  # though it calls the run's files its own
    told[FILES] = [str(path.relative_to(out)) for path in out.rglob("*") if path.is_file() and path.name != ABOUT]
    (out / ABOUT).write_text(json.dumps(told))
    before = contents(tmp_path)
    refused([str(out / "run"), "--out", str(tmp_path / name), "--overwrite"], capsys)
    assert contents(tmp_path) == before


@pytest.mark.slow
def test_a_mount_hides_no_run(run: Path, tmp_path: Path) -> None:
    isolated = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*isolated, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    (tmp_path / "mounted").mkdir()
    check = (
        "import sys; from pathlib import Path; from zerotrain.commands.export import require_apart\n"
        f"require_apart(Path({str(tmp_path / 'mounted/out')!r}), Path({str(run / 'checkpoints/step-00000000')!r}), [])"
    )
    for mounted in (run, run / "checkpoints"):
        mount = ["sh", "-c", 'mount --bind "$1" "$2" && exec "$3" -c "$4"', "sh", str(mounted)]
        command = [*isolated, *mount, str(tmp_path / "mounted"), sys.executable, check]
        assert ", the folder to export" in subprocess.run(command, capture_output=True, text=True).stderr


def test_the_model_and_the_tokenizer_that_are_read_are_not_replaced(tmp_path: Path) -> None:
    """Adapters would lose the model that they are for."""
    model, apart = tmp_path / "model", tmp_path / "apart"
    model.mkdir()
    with pytest.raises(zerotrain.ConfigError, match="which is read for this export, lies there"):
        require_apart(model, tmp_path / "checkpoint", [model])
    require_apart(apart, tmp_path / "checkpoint", [model])
    require_apart(model / "out", tmp_path / "checkpoint", [model])
