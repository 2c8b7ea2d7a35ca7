"""What an exception says fits on a terminal and in a file, whatever it holds."""

import pytest

from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import duration, printable


def test_what_can_be_printed_stays_as_it_is() -> None:
    assert printable("zero.stage: got 9\n\tgrößer 日本") == "zero.stage: got 9\n\tgrößer 日本"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("half \ud800", r"half \ud800"),
        ("a\rb\0c", r"a\rb\x00c"),
        ("\u2028", r"\u2028"),
    ],
)
def test_what_cannot_is_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
    printable(text).encode("utf-8")


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    shown = printable("begin" + "x" * 5_000_000 + "end")
    assert len(shown) < 2100
    assert shown.startswith("beginxxx")
    assert shown.endswith("xxxend")
    assert "[... 4998008 characters ...]" in shown


def test_a_problem_with_a_setting_is_one_line() -> None:
    error = ConfigError("data.path=a\nb", "seed: got 1")
    assert error.problems == (r"data.path=a\nb", "seed: got 1")
    assert str(error) == "data.path=a\\nb\nseed: got 1"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.2, "0 s"), (99, "99 s"), (130, "2 min"), (5_940, "99 min"), (7_500, "2 h 5 min"), (400_000, "111 h 7 min")],
)
def test_a_time_to_wait_has_one_or_two_units(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown
