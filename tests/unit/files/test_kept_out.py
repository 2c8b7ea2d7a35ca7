"""Nothing is imported from a folder that is kept out."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerotrain.files.kept_out import nothing_imported_from, refusal, require_no_kernels

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


# What a folder of Hugging Face would have run.


OWN_CODE = ValueError("it contains custom code\nPlease pass the argument `trust_remote_code=True`")


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": "evil/kernel@main:f"},
        {"_attn_implementation_internal": "paged|evil/kernel"},
        {"experts_implementation": {"": "evil/kernel"}},
        {"text_config": {"attn_implementation": {"vision": "sdpa", "text": "evil/kernel"}}},
        {"parts": [{"attn_implementation": "evil/kernel"}]},
        SimpleNamespace(
            model_type="a", text_config=SimpleNamespace(model_type="b", _attn_implementation="evil/kernel")
        ),
    ],
)
def test_code_of_the_hub_is_refused(fields: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^x asks for code of the hub \(.*evil/kernel.*\), which zerotrain does not run"
    ):
        require_no_kernels(fields, "x")


def test_what_transformers_has_itself_is_not() -> None:
    require_no_kernels(
        {"attn_implementation": "sdpa", "text_config": {"_attn_implementation": None}, "n": ["a/b"]}, "x"
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"auto_map": {"AutoTokenizer": ["a.T", None]}}, " (a.T)"),
        ({"auto_map": ["a.T", "b.U"]}, " (a.T, b.U)"),
        ({"auto_map": {"A": "a.\x1b[2J", "B": 7}}, r" (a.\x1b[2J, 7)"),
        ({"auto_map": 7}, ""),
        ([], ""),
    ],
)
def test_what_a_folder_would_have_run_is_named(content: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    assert refusal(str(tmp_path), OWN_CODE) == f"it has code of its own{said}, which zerotrain does not run"
    assert refusal(str(tmp_path), ValueError("another\nreason")) == "another"
    assert refusal(str(tmp_path), KeyError()) == "KeyError"
