"""Runs that are read from a URL, and exports and reports that are written to one."""

import os
import re
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from tests.unit.checkpoint.runs import KINDS, build
from tests.unit.engine.parts import alone
from tests.unit.report.folders import write_job
from zerotrain.checkpoint.mirror import Mirror
from zerotrain.commands import export, inspection, report
from zerotrain.report.files import HEADS
from zerotrain.saved.saved import ABOUT

safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/there" if request.param == "file" else f"memory://{secrets.token_hex(8)}"


@pytest.fixture
def checkpoints(tmp_path: Path) -> dict[str, Path]:
    """Two of one run, of other weights."""
    engines = {name: build(alone(), KINDS["Muon and AdamW"], 0, seed=seed) for seed, name in enumerate(NAMES)}
    return {name: engine.save(tmp_path / "run" / name) for name, engine in engines.items()}


NAMES = ("step-00000002", "step-00000004")


def test_the_newest_whole_checkpoint_of_a_mirror_is_read_or_the_one_that_a_url_names(
    url: str, checkpoints: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = Mirror(url)
    for path in checkpoints.values():
        mirror.push(path)
    for number, source in enumerate((url, f"{url}/{NAMES[0]}", f"{url}/{NAMES[0]}/")):
        out = tmp_path / f"out-{number}"
        assert export.main([source, "--out", str(out)]) == 0
        assert export.main([str(checkpoints[NAMES[number == 0]]), "--out", f"{out}-here"]) == 0
        assert weights_in(str(out)) == weights_in(f"{out}-here")
    mirror._files.rm_file(mirror._path(NAMES[1], "manifest.json"))  # its copy was cut off
    capsys.readouterr()
    assert inspection.main([url]) == 0
    printed = capsys.readouterr()
    assert "verified: the manifest" in printed.out
    assert f"fetched {NAMES[0]} from {url}" in printed.err


def test_an_export_is_written_to_a_url_of_its_own_and_its_list_of_files_is_the_last(
    url: str,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    order: Callable[[], list[str]],
) -> None:
    source, there = str(checkpoints[NAMES[0]]), f"{url}/exported"
    assert export.main([source, "--out", there, "--shard-mb", "0.0005"]) == 0
    assert order()[-1] == ABOUT
    assert len(order()) > 3
    assert capsys.readouterr().out.startswith(f"{there}: step ")
    assert export.main([source, "--out", str(tmp_path / "here"), "--shard-mb", "0.0005"]) == 0
    assert weights_in(there) == weights_in(str(tmp_path / "here"))
    for overwrite in ([], ["--overwrite"]):
        assert export.main([source, "--out", there, *overwrite]) == 2
        assert capsys.readouterr().err == f"--out: got {there}, where something is already; give a new name\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_export_to_a_url_that_a_signal_ends_says_that_files_may_be_there(
    signum: int,
    code: int,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    handlers: None,
) -> None:
    require_size = Mirror._require_size

    def end(*arguments: Any) -> None:  # behind the first file
        require_size(*arguments)
        os.kill(os.getpid(), signum)

    monkeypatch.setattr(Mirror, "_require_size", end)
    assert export.main([str(checkpoints[NAMES[0]]), "--out", f"file://{tmp_path}/user:secret@there"]) == code
    assert [path.name for path in (tmp_path / "user:secret@there").iterdir()] == ["model.safetensors"]
    said = capsys.readouterr().err
    assert said.endswith("; files may be at --out, all of them if zerotrain_export.json is there\n")
    assert (said.count("\n"), "secret" in said) == (1, False)


def test_a_report_is_written_to_a_url_and_replaces_only_a_report(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files, root = fsspec.url_to_fs(url)
    for seed in range(2):
        write_job(tmp_path / "runs" / str(seed), [f"seed={seed}"])
        assert report.main([str(tmp_path / "runs"), "--out", url]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"in {url}: report.html, sweep.csv, sweep.json"
        assert report.main([str(tmp_path / "runs"), "--out", str(tmp_path / "here")]) == 0
        for name in HEADS:  # a page at a URL has no links to folders of this machine
            links = rb"<a [^>]*>|</a>" if name == "report.html" else rb"$^"
            there, here = files.cat_file(f"{root}/{name}"), (tmp_path / "here" / name).read_bytes()
            assert re.sub(links, b"", there) == re.sub(links, b"", here)
    files.pipe_file(f"{root}/report.html", b"notes")
    before = files.find(root, detail=True)
    capsys.readouterr()
    assert report.main([str(tmp_path / "runs"), "--out", url]) == 2
    assert capsys.readouterr().err.startswith(f"{url}/report.html is no report of zerotrain, and stays as it is")
    assert files.find(root, detail=True) == before


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("nope://user:secret@there", "--out: got nope://***@there; Protocol not known: nope"),
        ("file:///dev/null/there", "file:///dev/null/there "),
        ("ftp://user:secret@127.0.0.1:9/there", "ftp://***@127.0.0.1:9/there"),
    ],
)
def test_a_report_that_a_url_does_not_take_is_one_line_without_a_password(
    out: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_job(tmp_path / "0")
    assert report.main([str(tmp_path), "--out", out]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(message)
    assert (said.out, said.err.count("\n"), "secret" in said.err) == ("", 1, False)


@pytest.mark.parametrize(
    ("source", "out", "message"),
    [
        ("nope://there", "here", "RUN: got nope://there; Protocol not known: nope"),
        ("memory://nothing", "here", "memory://nothing has no checkpoint"),
        ("memory://nothing/step-00000004", "here", "memory://nothing has no whole step-00000004: its copy was cut off"),
        ("memory://user:secret@nothing", "here", "memory://***@nothing has no checkpoint"),
        ("run", "nope://user:secret@there", "--out: got nope://***@there; Protocol not known: nope"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line_without_a_password(
    source: str,
    out: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export.main([source, "--out", out]) == 2
    assert capsys.readouterr().err == f"{message}\n"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of signals, which a command that a signal has ended ignores from there on."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The names of the files written to a URL, in their order."""
    names: list[str] = []
    push_files = Mirror.push_files

    def note(self: Mirror, folder: Path, pushed: list[str]) -> None:
        names.extend(pushed)
        push_files(self, folder, pushed)

    monkeypatch.setattr(Mirror, "push_files", note)
    return lambda: names


def weights_in(folder: str) -> dict[str, list[float]]:
    files, root = fsspec.url_to_fs(folder)
    weights: dict[str, torch.Tensor] = {}
    for path in files.glob(f"{root}/*.safetensors"):
        weights |= safetensors_torch.load(files.cat_file(path))
    return {name: tensor.flatten().tolist() for name, tensor in weights.items()}
