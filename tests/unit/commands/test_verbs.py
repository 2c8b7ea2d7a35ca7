"""`python -m zerotrain VERB`: one command with one frame."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from tests.zygote.client import Zygote
from zerotrain.__main__ import MODULES, main
from zerotrain.commands.frame import exit_code
from zerotrain.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[3] / "zerotrain"


PLANS = "; python launch.py plan.only=true plans a run"


@pytest.mark.parametrize(("given", "hint"), [("trian", "; did you mean train?"), ("bogus", ""), ("plan", PLANS)])
def test_a_verb_that_there_is_not_is_one_line(given: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([given, "zero.stage=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{given}: there is no such verb{hint}; there are {', '.join(MODULES)}\n"


def test_training_is_the_verb_that_may_be_left_out(zygote: Zygote, tmp_path: Path) -> None:
    wrong = zygote.run(["train", "zero.stage=9"], tmp_path, module="zerotrain")
    assert wrong == zygote.run(["zero.stage=9"], tmp_path, module="zerotrain")
    assert (wrong.code, wrong.out, wrong.err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("verb", MODULES)
def test_a_folder_that_is_gone_is_one_line_of_each_verb(verb, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit) as ended:
        main([verb, "x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "the working directory no longer exists; change to one that does\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (IsADirectoryError(errno.EISDIR, "Is a directory", "a\nb"), 2, "a\\nb: Is a directory"),
        (PermissionError(errno.EACCES, "Permission denied"), 2, "[Errno 13] Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device", "disk"), 1, "disk: No space left on device"),
        (ConfigError("--out: is wrong"), 2, "--out: is wrong"),
    ],
)
def test_what_the_disk_refuses_is_one_line_and_the_users_to_mend_unless_it_is_full(error, code, said, capsys) -> None:
    def work() -> None:
        raise error

    assert exit_code(work) == code
    assert capsys.readouterr().err == f"{said}\n"


EXTRAS = (
    "datasets", "deepspeed", "huggingface_hub", "matplotlib", "mlflow", "optuna", "peft", "psutil", "pyarrow",
    "safetensors", "sqlalchemy", "tensorboard", "tokenizers", "torchmetrics", "trackio", "transformers", "wandb",
    "zstandard",
)  # fmt: skip
"""Packages that `make train` does not install."""


def test_each_verb_is_there_with_the_packages_that_training_needs_alone() -> None:
    modules = [*MODULES.values(), "zerotrain.launching.task"]
    program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # to import one of these fails, as if it were absent
for each in {modules!r}:
    importlib.import_module(each)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("verb", ["train", "alive", "slurm", "prepare", "tokenizer"])
def test_a_verb_that_needs_no_torch_is_there_at_once(verb: str) -> None:
    """A probe of a cluster asks `alive` every few seconds; torch takes one to import."""
    program = f"import sys, {MODULES[verb]}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
