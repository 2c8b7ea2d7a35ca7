import io

import pytest
from rich.console import Console

from zerotrain.training.progress import MAX_PLAIN_LINES, ProgressDisplay


@pytest.mark.parametrize("max_steps", [1, 7, 100, 5000])
def test_outside_a_terminal_there_are_a_few_plain_lines_whatever_the_length_of_the_run(max_steps):
    file = io.StringIO()
    with ProgressDisplay(console=Console(file=file, width=80), max_steps=max_steps) as progress:
        for step in range(1, max_steps + 1):
            progress.advance()
            progress.describe(step, "loss 1.234")
    lines = file.getvalue().splitlines()
    assert 1 <= len(lines) <= MAX_PLAIN_LINES + 1
    assert lines[0] == f"step 1/{max_steps}  loss 1.234"
    assert lines[-1] == f"step {max_steps}/{max_steps}  loss 1.234"


def test_in_a_terminal_of_80_columns_there_is_a_bar_with_all_of_the_description():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    description = "loss 2.345 val 2.456 12345 tok/s mfu 41% grad 1.23>1.00"
    with ProgressDisplay(console=console, max_steps=200) as progress:
        for _step in range(1, 151):
            progress.advance()
        progress.describe(150, description)
    assert "150/200" in file.getvalue()
    assert description in file.getvalue()


def test_a_quiet_console_shows_nothing():
    file = io.StringIO()
    with ProgressDisplay(console=Console(file=file, quiet=True), max_steps=2) as progress:
        progress.advance()
        progress.describe(1, "loss")
    assert file.getvalue() == ""
