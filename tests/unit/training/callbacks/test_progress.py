import io
from typing import Any

import pytest
from rich.console import Console

from zerotrain.training.callbacks.progress import MAX_PLAIN_LINES, ProgressDisplay

MEASURED: dict[str, Any] = {
    "train_loss": 2.345,
    "tokens_per_s": 12345.0,
    "mfu": 0.41,
    "grad_norm": 1.23,
    "grad_norm_clipped": 1.0,
    "skipped_steps": 0,
}


def shown(max_steps: int, first_step: int = 0) -> list[str]:
    """The lines of a run that logs each step, outside a terminal."""
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80), max_steps=max_steps, first_step=first_step)
    for step in range(first_step + 1, max_steps + 1):
        progress.advance()
        progress.log(MEASURED, step)
    progress.close()
    return file.getvalue().splitlines()


@pytest.mark.parametrize("max_steps", [1, 7, 100, 5000])
def test_outside_a_terminal_there_are_a_few_plain_lines_whatever_the_length_of_the_run(max_steps):
    lines = shown(max_steps)
    assert 1 <= len(lines) <= MAX_PLAIN_LINES + 1
    assert lines[0] == f"step 1/{max_steps}  loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00"
    assert lines[-1].startswith(f"step {max_steps}/{max_steps}  loss 2.345")


def test_a_run_that_goes_on_shows_its_first_step_and_the_tenths_of_the_whole():
    assert [line.split()[1] for line in shown(100, first_step=74)] == ["75/100", "80/100", "90/100", "100/100"]


def test_in_a_terminal_of_80_columns_there_is_a_bar_with_all_of_the_description():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, legacy_windows=False)
    progress = ProgressDisplay(console=console, max_steps=200)
    for _step in range(1, 151):
        progress.advance()
    progress.log({"val_loss": 2.456}, 150)
    progress.log(MEASURED, 150)
    progress.close()
    assert "150/200" in file.getvalue()
    assert "loss 2.345 val 2.456 12345 tok/s mfu 41% grad 1.23>1.00" in file.getvalue()


def test_in_a_dumb_terminal_there_are_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80, force_terminal=True), max_steps=2)
    progress.advance()
    progress.log(MEASURED, 1)
    progress.close()
    assert file.getvalue() == "step 1/2  loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00\n"


def test_skipped_steps_are_counted_at_the_end_of_the_line():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80), max_steps=2)
    progress.log(MEASURED | {"skipped_steps": 1, "mfu": None}, 1)
    progress.close()
    assert file.getvalue() == "step 1/2  loss 2.345 12345 tok/s grad 1.23>1.00 1 skipped\n"


def test_a_quiet_console_shows_nothing():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, quiet=True), max_steps=2)
    progress.advance()
    progress.log(MEASURED, 1)
    progress.close()
    assert file.getvalue() == ""
