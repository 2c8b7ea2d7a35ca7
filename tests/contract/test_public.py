"""The names, settings, files and commands that others stand on change only on purpose: `public.txt` keeps them."""

from pathlib import Path

from tests.contract import public
from tests.zygote.client import Zygote

KEPT = Path(__file__).with_name("public.txt")


def test_the_public_names_settings_files_and_commands_are_those_that_were_promised(zygote: Zygote):
    promised = [line for line in KEPT.read_text().splitlines() if not line.startswith("#")]
    assert differences(promised, public.lines(zygote)) == []


def test_a_difference_is_seen():
    assert differences(["== a", "f(x)"], ["== a", "f(x)"]) == []
    assert differences(["== a", "f(x)"], ["== a", "f(x, y=1)"]) == ["went: a: f(x)", "came: a: f(x, y=1)"]
    assert differences(["== a", "x"], ["== b", "x"]) == ["went: a: x", "came: b: x"]


def differences(promised: list[str], found: list[str]) -> list[str]:
    before, now = _with_titles(promised), _with_titles(found)
    went = [f"went: {line}" for line in before if line not in now]
    return went + [f"came: {line}" for line in now if line not in before]


def _with_titles(lines: list[str]) -> list[str]:
    title, named = "", []
    for line in lines:
        if line.startswith("== "):
            title = line.removeprefix("== ")
        else:
            named.append(f"{title}: {line}")
    return named
