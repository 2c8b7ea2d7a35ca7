"""`python -m zerotrain VERB`: one command with one frame."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zerotrain.__main__ import MODULES, main

PACKAGE = Path(__file__).resolve().parents[3] / "zerotrain"


def printed(*command: str, folder: Path) -> tuple[int, str, str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(("given", "hint"), [("trian", "; did you mean train?"), ("bogus", "")])
def test_a_verb_that_there_is_not_is_one_line(given: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([given, "zero.stage=3"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{given}: there is no such verb{hint}; there are {', '.join(MODULES)}\n"


def test_a_verb_and_its_older_name_are_one_command(tmp_path: Path) -> None:
    new = printed("-m", "zerotrain", "export", "--help", folder=tmp_path)
    assert new == printed("-m", "zerotrain.export", "--help", folder=tmp_path)
    assert new[0] == 0
    assert new[1].startswith("usage: python -m zerotrain export ")


def test_training_is_the_verb_that_may_be_left_out(tmp_path: Path) -> None:
    wrong = printed("-m", "zerotrain", "train", "zero.stage=9", folder=tmp_path)
    assert wrong == printed("-m", "zerotrain", "zero.stage=9", folder=tmp_path)
    assert (wrong[0], wrong[1], wrong[2].count("\n")) == (2, "", 1)


def test_no_file_of_the_package_hides_one_of_the_standard_library() -> None:
    assert printed("-c", "import dataclasses, inspect", folder=PACKAGE) == (0, "", "")
