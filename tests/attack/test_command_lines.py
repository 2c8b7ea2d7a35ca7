"""A wrong command line gets a line for each mistake and exit code 2, before any rank starts; nothing is overwritten."""

from pathlib import Path

import pytest
from attacks import Attack, carry_out
from command_lines import GROUPS

from tests.zygote.client import Zygote

ALL = [pytest.param(attack, id=f"{name}: {attack}") for name, attacks in GROUPS.items() for attack in attacks]


@pytest.mark.parametrize("attack", ALL)
@pytest.mark.thinned(2)
def test_what_is_wrong_is_said_in_a_line(attack: Attack, zygote: Zygote, tmp_path: Path):
    carry_out(attack, zygote, tmp_path)
