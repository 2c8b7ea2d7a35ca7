"""Nothing is imported from a folder that is kept out."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from zerotrain.files.kept_out import nothing_imported_from

KEPT = "lies in the folder of the checkpoint, from which nothing is imported"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's folder, with a module wherever one can be laid."""
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000001"
    (checkpoint / "package").mkdir(parents=True)
    for folder in (checkpoint, checkpoint / "package", tmp_path / "run", tmp_path):
        (folder / "laid.py").write_text("")
    (checkpoint / "package" / "__init__.py").write_text("")
    for name in ("laid", "package", "package.laid", "run.laid", "run.checkpoints"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "run"


def refused(name: str, kept_out: Path) -> bool:
    before = list(sys.path)
    with nothing_imported_from(kept_out):
        importlib.util.find_spec(name.partition(".")[0])  # who only asks is not refused
        with pytest.raises(ImportError, match=KEPT):
            importlib.import_module(name)
    return sys.path == before and name not in sys.modules


@pytest.mark.parametrize("named", ["", "checkpoints", "checkpoints/step-00000001"])
@pytest.mark.parametrize("searched", ["", "checkpoints/step-00000001"])
def test_the_whole_run_is_kept_out_whatever_of_it_was_named(named: str, searched: str, run: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(run / searched)
    assert refused("laid", run / named)


def test_a_module_of_a_package_there_and_a_folder_above_that_is_searched(run: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(run / "checkpoints" / "step-00000001")
    assert refused("package.laid", run)
    monkeypatch.syspath_prepend(run.parent)
    assert refused("run.laid", run)


def test_a_link_and_the_folder_where_the_user_is(run: Path, monkeypatch) -> None:
    (run.parent / "link").symlink_to(run)
    monkeypatch.syspath_prepend(run.parent / "link")
    assert refused("laid", run)
    monkeypatch.chdir(run)
    monkeypatch.setattr(sys, "path", ["", *sys.path[1:]])
    assert refused("laid", run.parent / "link")


def test_modules_of_elsewhere_are_found_and_what_is_installed(run: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(run.parent)
    with nothing_imported_from(run):
        assert importlib.import_module("laid").__file__ == str(run.parent / "laid.py")
    with nothing_imported_from(Path(sys.prefix).parent, Path(sys.base_prefix)):
        assert importlib.util.find_spec("this") is not None
        importlib.reload(importlib.import_module("colorsys"))
