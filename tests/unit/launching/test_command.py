"""Hydra is not asked for its mode where nobody can have set one, and is where somebody may have."""

import shutil
import sys
from pathlib import Path

import pytest
from hydra._internal.hydra import Hydra

from zerotrain.launching.command import composed_once

CONF = Path(__file__).resolve().parents[3] / "conf"


def is_asked(conf: Path) -> bool:
    before = Hydra.get_mode
    with composed_once(conf):
        is_as_before = Hydra.get_mode is before
    assert Hydra.get_mode is before
    return is_as_before


SETTING_IT = ("hydra.mode=MULTIRUN", "++hydra.mode=RUN", "--config-dir=mine", "--config-name=own", "--config-path=.")


def test_the_config_is_composed_once_with_our_yamls_unless_a_command_line_may_set_the_mode(monkeypatch):
    for arguments in ([], ["zero.stage=2", "seed=0,1", "-m"], ["model=gpt2", "logger=wandb"]):
        monkeypatch.setattr(sys, "argv", ["launch.py", *arguments])
        assert not is_asked(CONF)
    for argument in SETTING_IT:
        monkeypatch.setattr(sys, "argv", ["launch.py", argument])
        assert is_asked(CONF)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("experiment/two.yaml", "# @package _global_\nhydra:\n  mode: MULTIRUN\n"),
        ("experiment/two.yaml", "# @package hydra\nmode: ${oc.env:MODE}\n"),
        ("hydra/own/two.yaml", "mode: MULTIRUN\n"),
    ],
)
def test_hydra_looks_for_its_mode_where_a_yaml_may_set_it(name, text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch.py"])
    shutil.copytree(CONF, tmp_path / "conf")
    (tmp_path / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "conf" / name).write_text(text)
    assert is_asked(tmp_path / "conf")
