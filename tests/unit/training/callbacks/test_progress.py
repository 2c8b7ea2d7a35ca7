import io
import re
from typing import Any

import pytest
from rich.console import Console

from zerotrain.training.callbacks.console import MAX_PLAIN_LINES, ProgressDisplay, short

MEASURED: dict[str, Any] = {
    "train_loss": 2.345,
    "tokens_per_s": 12345.0,
    "mfu": 0.41,
    "grad_norm": 1.23,
    "grad_norm_clipped": 1.0,
    "skipped_steps": 0,
}


def progress_lines(max_steps: int, first_step: int = 0) -> list[str]:
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
    lines = progress_lines(max_steps)
    assert 1 <= len(lines) <= MAX_PLAIN_LINES + 1
    assert lines[0] == f"step 1/{max_steps}  loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00"
    assert lines[-1].startswith(f"step {max_steps}/{max_steps}  loss 2.345")


def test_a_run_that_goes_on_shows_its_first_step_and_the_tenths_of_the_whole():
    assert [line.split()[1] for line in progress_lines(100, first_step=74)] == ["75/100", "80/100", "90/100", "100/100"]


def test_a_terminal_of_80_columns_has_room_for_all_numbers():
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


def in_terminal(width: int, *, num_steps: int, max_steps: int, clock=None) -> list[str]:
    """What a terminal has shown, one after the other, of a run that was logged and evaluated after step 100."""
    file = io.StringIO()
    console = Console(
        file=file, width=width, force_terminal=True, color_system=None, legacy_windows=False, get_time=clock
    )
    progress = ProgressDisplay(console=console, max_steps=max_steps)
    for step in range(1, num_steps + 1):
        progress.advance()
        if step == 100:
            progress.log(MEASURED | {"skipped_steps": 3}, step)
            progress.log({"val_loss": 2.456}, step)
    progress.close()
    return [line.strip() for line in re.split(r"[\r\n]|\x1b\[[\d;?]*[A-Za-z]", file.getvalue()) if line.strip()]


def test_a_number_of_an_earlier_step_says_its_step():
    assert "loss 2.345@100 val 2.456@100 3 skipped 12345 tok/s" in in_terminal(120, num_steps=150, max_steps=200)[-1]
    assert "loss 2.345 val 2.456 3 skipped 12345 tok/s" in in_terminal(120, num_steps=100, max_steps=200)[-1]


def test_the_time_left_says_that_it_is():
    seconds = iter(range(10_000))
    lines = in_terminal(80, num_steps=150, max_steps=200, clock=lambda: float(next(seconds)))
    assert re.match(r"150/200 \d+ (s|min) left ", lines[-1])
    assert "left" not in in_terminal(80, num_steps=200, max_steps=200)[-1]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 99, 100, 120])
@pytest.mark.parametrize("max_steps", [200, 2_000_000])
def test_a_word_is_never_broken_however_narrow_the_terminal_is(width: int, max_steps: int):
    words = {"loss", "2.345@100", "val", "2.456@100", "3", "skipped", "12345", "tok/s", "mfu", "41%", "grad"}
    for line in in_terminal(width, num_steps=150, max_steps=max_steps):
        assert len(line) <= width
        numbers = re.sub(r"^\d+/\d+ ?|\d+ (h \d+ min|min|s) left ?|[━╸╺]|@100|1\.23>1\.00", "", line).split()
        assert set(numbers) <= words | {"2.345", "2.456"}


def test_the_last_line_has_the_last_evaluation():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80), max_steps=4)
    progress.log({"val_loss": 5.5}, 0)
    for step in range(1, 5):
        progress.advance()
        progress.log(MEASURED, step)
        if step % 2 == 0:
            progress.log({"val_loss": 3.0 - step / 4}, step)
    progress.close()
    losses = [line.partition(" 12345")[0] for line in file.getvalue().splitlines()]
    assert losses == [
        "step 1/4  loss 2.345 val 5.500@0",
        "step 2/4  loss 2.345 val 5.500@0",
        "step 3/4  loss 2.345 val 2.500@2",
        "step 4/4  loss 2.345 val 2.500@2",
        "step 4/4  loss 2.345 val 2.000",
    ]


def test_in_a_dumb_terminal_there_are_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80, force_terminal=True), max_steps=2)
    progress.advance()
    progress.log(MEASURED, 1)
    progress.close()
    assert file.getvalue() == "step 1/2  loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00\n"


def test_skipped_steps_are_counted_beside_the_losses():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80), max_steps=2)
    progress.log(MEASURED | {"skipped_steps": 1, "mfu": None}, 1)
    progress.close()
    assert file.getvalue() == "step 1/2  loss 2.345 1 skipped 12345 tok/s grad 1.23>1.00\n"


def test_a_line_says_epoch_tokens_and_outside_a_terminal_the_time_left_too():
    file, seconds = io.StringIO(), iter(range(0, 10_000, 60))
    console = Console(file=file, width=80, get_time=lambda: float(next(seconds)))
    progress = ProgressDisplay(console=console, max_steps=10)
    for _ in range(5):
        progress.advance()
    progress.log(MEASURED | {"epoch": 0.314, "tokens": 1_234_567}, 5)
    line = file.getvalue()
    assert line.startswith("step 5/10  loss 2.345 epoch 0.31 1.23M tokens 12345 tok/s mfu 41% grad 1.23>1.00 ")
    assert re.search(r"\d+ min left\n$", line)


def test_data_that_is_no_text_has_samples():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, width=80), max_steps=2)
    progress.log(MEASURED | {"tokens_per_s": None, "samples_per_s": 84.2, "tokens": None, "epoch": 1.5}, 1)
    assert file.getvalue() == "step 1/2  loss 2.345 epoch 1.50 84 samples/s mfu 41% grad 1.23>1.00\n"


@pytest.mark.parametrize(
    ("number", "said"), [(0, "0"), (999, "999"), (1200, "1.2k"), (34e6, "34M"), (1.5e9, "1.5G"), (2e12, "2T")]
)
def test_a_number_of_tokens_is_short(number: float, said: str):
    assert short(number) == said


def test_a_quiet_console_shows_nothing():
    file = io.StringIO()
    progress = ProgressDisplay(console=Console(file=file, quiet=True), max_steps=2)
    progress.advance()
    progress.log(MEASURED, 1)
    progress.close()
    assert file.getvalue() == ""
