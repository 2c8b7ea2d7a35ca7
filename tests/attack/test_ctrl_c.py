"""Ctrl-C in the first seconds, while modules are imported, ends launch.py with a line at most and exit code 130."""

from pathlib import Path

import pytest
from commands import REPOSITORY, TINY, by_hand

HERE = Path(__file__).parent


@pytest.mark.parametrize("module", ["hydra", "omegaconf.errors", "zerotrain.launching.command", "torch", "torch.nn"])
def test_while_a_module_is_imported(tmp_path: Path, module: str):
    search = f"{HERE / 'interrupting'}:{REPOSITORY}"
    command = by_hand(*TINY, folder=tmp_path, PYTHONPATH=search, INTERRUPT_AT=module)
    assert command.wait() == 130
    assert command.stderr == "stopped by Ctrl-C\n"
    assert command.wait_until_gone() == []
