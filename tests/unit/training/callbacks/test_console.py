import io
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from zerotrain import ZeroConfig, build_engine
from zerotrain.training.callbacks.console import MAX_PLAIN_LINES, ShowProgress, ShowStart
from zerotrain.training.callbacks.evaluation import num_eval_rows
from zerotrain.training.callbacks.stages import RunStages

MEASURED: dict[str, Any] = {
    "train_loss": 2.345,
    "tokens_per_s": 12345.0,
    "mfu": 0.41,
    "grad_norm": 1.23,
    "grad_norm_clipped": 1.0,
    "skipped_steps": 0,
}


class Progress:
    """`ShowProgress` of a run of so many steps."""

    def __init__(self, max_steps: int, first_step: int = 0, **terminal: Any) -> None:
        self.file = io.StringIO()
        console = Console(**{"file": self.file, "width": 80, "legacy_windows": False, "color_system": None} | terminal)
        self.run: Any = SimpleNamespace(console=console, max_steps=max_steps, step=first_step)
        self.shown = ShowProgress()
        self.shown.start(self.run)

    def advance(self, to: int) -> None:
        outcome: Any = None
        while self.run.step < to:
            self.run.step += 1
            self.shown.after_step(self.run, outcome)

    def log(self, **changes: Any) -> None:
        self.shown.log(self.run, MEASURED | changes)

    def log_evaluation(self, loss: float) -> None:
        self.shown.log(self.run, {"val_loss": loss})

    def end(self) -> str:
        self.shown.end(self.run)
        return self.file.getvalue()


def progress_lines(max_steps: int, first_step: int = 0) -> list[str]:
    """The lines of a run that logs each step, outside a terminal."""
    progress = Progress(max_steps, first_step)
    for step in range(first_step + 1, max_steps + 1):
        progress.advance(step)
        progress.log()
    return progress.end().splitlines()


@pytest.mark.parametrize("max_steps", [1, 7, 100, 5000])
def test_outside_a_terminal_there_are_a_few_plain_lines_whatever_the_length_of_the_run(max_steps):
    lines = progress_lines(max_steps)
    assert 1 <= len(lines) <= MAX_PLAIN_LINES + 1
    assert lines[0] == f"step 1/{max_steps}  loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00"
    assert lines[-1].startswith(f"step {max_steps}/{max_steps}  loss 2.345")


def test_a_run_that_goes_on_shows_its_first_step_and_the_tenths_of_the_whole():
    assert [line.split()[1] for line in progress_lines(100, first_step=74)] == ["75/100", "80/100", "90/100", "100/100"]


def in_terminal(width: int, *, num_steps: int, max_steps: int, clock=None) -> list[str]:
    """What a terminal has shown, one after the other, of a run that was logged and evaluated after step 100."""
    progress = Progress(max_steps, width=width, force_terminal=True, get_time=clock)
    progress.advance(100)
    progress.log(skipped_steps=3)
    progress.log_evaluation(2.456)
    progress.advance(num_steps)
    return [line.strip() for line in re.split(r"[\r\n]|\x1b\[[\d;?]*[A-Za-z]", progress.end()) if line.strip()]


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
    progress = Progress(4)
    progress.log_evaluation(5.5)
    for step in range(1, 5):
        progress.advance(step)
        progress.log()
        if step % 2 == 0:
            progress.log_evaluation(3.0 - step / 4)
    losses = [line.partition(" 12345")[0] for line in progress.end().splitlines()]
    assert losses == [
        "step 1/4  loss 2.345 val 5.500@0",
        "step 2/4  loss 2.345 val 5.500@0",
        "step 3/4  loss 2.345 val 2.500@2",
        "step 4/4  loss 2.345 val 2.500@2",
        "step 4/4  loss 2.345 val 2.000",
    ]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "loss 2.345 12345 tok/s mfu 41% grad 1.23>1.00"),
        ({"skipped_steps": 1, "mfu": None}, "loss 2.345 1 skipped 12345 tok/s grad 1.23>1.00"),
        (
            {"tokens_per_s": None, "samples_per_s": 84.2, "tokens": None, "epoch": 1.5},
            "loss 2.345 epoch 1.50 84 samples/s mfu 41% grad 1.23>1.00",
        ),
    ],
    ids=["in a dumb terminal", "a skipped step", "data that is no text"],
)
def test_a_plain_line_has_what_was_measured(changes, line, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    progress = Progress(2, force_terminal=not changes)
    progress.advance(1)
    progress.log(**changes)
    assert progress.end() == f"step 1/2  {line}\n"


def test_a_line_says_epoch_tokens_and_outside_a_terminal_the_time_left_too():
    seconds = iter(range(0, 10_000, 60))
    progress = Progress(10, get_time=lambda: float(next(seconds)))
    progress.advance(5)
    progress.log(epoch=0.314, tokens=1_234_567)
    line = progress.file.getvalue()
    assert line.startswith("step 5/10  loss 2.345 epoch 0.31 1.23M tokens 12345 tok/s mfu 41% grad 1.23>1.00 ")
    assert re.search(r"\d+ min left\n$", line)


# The first lines of a run say what trains, on what, where and for how long, in any terminal.


EXPECTED = """\
model   GPT, 27,008 parameters trained, 0 frozen
data    SyntheticTokens, 3,200 tokens to train on, 320 tokens to
        validate
eval    16 of 20 rows each time; train.eval_batches=all reads all
ranks   1 on CPU, threads of each: 1; fp32
memory  stage 2, kB of a rank: 110.1 parameters, 110.1 gradients, 220.2
        optimizer
steps   4 of 64 tokens, 256 tokens to go; an epoch is 50 steps
decay   0.01 on 10 matrices (26,112), 0 on 18 others (896)
"""


def shown(trainer, **terminal) -> str:
    file = io.StringIO()
    stages = RunStages({0: 2}, trainer.gradient_accumulation_steps)
    start = ShowStart(stages, trainer.feed.sampler, trainer.validation_sets, num_eval_rows(trainer.eval_batches))
    console = Console(file=file, legacy_windows=False, **terminal)
    run: Any = SimpleNamespace(
        console=console, engine=trainer.engine, dataset=trainer.dataset, step=0, max_steps=trainer.max_steps
    )
    start.start(run)
    return file.getvalue()


def test_what_runs_is_said_in_a_few_lines_of_80_columns(make_trainer):
    trainer = make_trainer()
    text = shown(trainer, width=80)
    names = ["model", "data", "eval", "ranks", "memory", "steps", "decay"]
    assert re.findall(r"^\w+", text, re.MULTILINE) == names
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())
    assert shown(trainer, width=72) == EXPECTED


def test_an_example_of_a_chat_is_printed_with_what_is_learnt_and_no_escape_of_its_own(make_trainer):
    trainer = make_trainer()
    trainer.dataset.example = lambda: [("[bold]Hi\x1b[31m\n", False), ("Ho", True)]
    assert shown(trainer, width=80).endswith("learns the parts in >> << of\n[bold]Hi\\x1b[31m\n>>Ho<<\n")
    assert "\x1b[32mHo\x1b[0m" in shown(trainer, width=80, force_terminal=True, color_system="standard")


@pytest.mark.parametrize("eval_batches", [3, "all"])
def test_an_evaluation_that_reads_all_rows_needs_no_word(make_trainer, eval_batches):
    assert "\neval" not in shown(make_trainer(eval_batches=eval_batches), width=80)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gradient_accumulation_steps": 2}, r"220\.2 optimizer, 110\.\d for sums of micro-batches\n"),
        ({"micro_batch_size": 64}, r"4 of 1,024 tokens, 4,096 tokens to go; an epoch is 3\.1 steps\n"),
    ],
)
def test_the_sums_of_micro_batches_and_a_tenth_of_few_steps_are_said(make_trainer, changes, said):
    assert re.search(said, shown(make_trainer(**changes), width=120))


def test_frozen_parameters_are_counted_apart(make_trainer, model):
    trainer = make_trainer()
    trainer.engine.freeze("wte.*")
    assert "25,984 parameters trained, 1,024 frozen" in shown(trainer, width=80)


def test_sequences_are_counted_where_nobody_knows_the_tokens(make_trainer, dataset):
    del dataset.train.tokens_per_sequence
    text = shown(make_trainer(), width=80)
    assert "200 rows to train on" in text
    assert "4 of 4 rows; an epoch is 50 steps" in text


def test_a_dataset_tells_of_itself_where_it_can(make_trainer, dataset):
    dataset.summary = lambda: "3 files, 9 tokens"
    assert "data    SyntheticTokens: 3 files, 9 tokens\n" in shown(make_trainer(), width=80)


def test_a_run_that_repeats_its_data_is_told_so(make_trainer):
    """200 sequences, 4 of them in a step."""
    assert "warning" not in shown(make_trainer(max_steps=50), width=80)
    assert "warning the run reads each row 3.2 times; more data or" in shown(make_trainer(max_steps=160), width=80)
    trainer = make_trainer(max_steps=40)
    trainer.feed.sampler.rows_consumed = 340
    assert "warning the run reads each row 2.5 times; more data or" in shown(trainer, width=80)


@pytest.mark.parametrize(
    ("reduction", "said"), [("ordered", ""), ("native", "; the bits depend on the number of ranks without")]
)
def test_virtual_ranks_are_said_and_when_their_bits_follow_the_ranks(make_trainer, model, reduction, said):
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    engine = build_engine(model, optimizer=optimizer, zero=ZeroConfig(reduction=reduction), virtual_ranks=4)
    line = next(line for line in shown(make_trainer(engine=engine), width=140).splitlines() if line.startswith("ranks"))
    assert line.endswith("fp32; virtual ranks: 4, 4 on each") == (said == "")
    assert said in line
