"""The names, settings, files and commands that others stand on change only on purpose: `public.txt` keeps them."""

from pathlib import Path

from tests.contract import public
from tests.zygote.client import Zygote

KEPT = Path(__file__).with_name("public.txt")


def test_the_public_names_settings_files_and_commands_are_those_that_were_promised(zygote: Zygote):
    promised = [line for line in KEPT.read_text().splitlines() if not line.startswith("#")]
    found = public.lines(zygote)
    assert [line for line in promised if line not in found] == [], "these went"
    assert [line for line in found if line not in promised] == [], "these came"
    assert found == promised
