"""The first lines of a run say what trains, on what, where and for how long, in any terminal."""

import io
import re
from functools import partial

import pytest
import torch
from rich.console import Console

from zerotrain import PrecisionConfig, ZeroConfig, build_engine
from zerotrain.training.callbacks.console import print_start
from zerotrain.training.callbacks.evaluation import num_eval_rows

EXPECTED = """\
model   GPT, 27,008 parameters trained, 0 frozen
data    SyntheticTokens, 3,200 tokens to train on, 320 tokens to
        validate
eval    16 of 20 rows each time; train.eval_batches=all reads all
ranks   1 on CPU, threads of each: 1; fp32
memory  stage 2, kB of a rank: 108 parameters, 108 gradients, 216.1
        optimizer
steps   4 of 64 tokens, 256 tokens to go; an epoch is 50 steps
decay   0.01 on 10 matrices (26,112), 0 on 18 others (896)
"""


def shown(trainer, **terminal) -> str:
    file = io.StringIO()
    print_start(
        Console(file=file, legacy_windows=False, **terminal),
        engine=trainer.engine,
        dataset=trainer.dataset,
        validation_sets=trainer.validation_sets,
        num_eval_rows=num_eval_rows(trainer.eval_batches),
        sampler=trainer.feed.sampler,
        plan_name="stage 2",
        num_steps=trainer.max_steps,
    )
    return file.getvalue()


def test_what_runs_is_said_in_a_few_lines_of_80_columns(make_trainer):
    trainer = make_trainer()
    text = shown(trainer, width=80)
    names = ["model", "data", "eval", "ranks", "memory", "steps", "decay"]
    assert [line.split()[0] for line in text.splitlines()] == names
    assert max(map(len, text.splitlines())) <= 80
    assert all(line == line.rstrip() for line in text.splitlines())
    assert shown(trainer, width=72) == EXPECTED


@pytest.mark.parametrize("eval_batches", [3, "all"])
def test_an_evaluation_that_reads_all_rows_needs_no_word(make_trainer, eval_batches):
    assert "\neval" not in shown(make_trainer(eval_batches=eval_batches), width=80)


def test_it_is_the_same_in_colour_in_a_pipe_and_in_a_dumb_terminal(make_trainer, monkeypatch):
    trainer = make_trainer()
    plain = shown(trainer, width=80)
    coloured = shown(trainer, width=80, force_terminal=True, color_system="truecolor")
    assert "\x1b[1mmodel" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("TERM", "dumb")
    assert shown(trainer, width=80, force_terminal=True).replace("\x1b[1m", "").replace("\x1b[0m", "") == plain


def test_the_sums_of_micro_batches_are_said(make_trainer):
    trainer = make_trainer(gradient_accumulation_steps=2)
    assert re.search(r"216\.1 optimizer, 110\.\d for sums of micro-batches\n", shown(trainer, width=120))


def test_frozen_parameters_are_counted_apart(make_trainer, model):
    trainer = make_trainer()
    trainer.engine.freeze("wte.*")
    assert "25,984 parameters trained, 1,024 frozen" in shown(trainer, width=80)


@pytest.mark.parametrize(
    "optimizer",
    [partial(torch.optim.AdamW, lr=1e-2), partial(torch.optim.SGD, lr=0.1, momentum=0.9)],
    ids=["AdamW", "SGD"],
)
@pytest.mark.parametrize("precision", ["fp32", PrecisionConfig("bf16", ["*ln_*"])], ids=["fp32", "bf16"])
def test_the_bytes_that_are_planned_are_those_of_the_report(make_trainer, model, optimizer, precision, world):
    engine = build_engine(model, optimizer=optimizer, precision=precision, world=world)
    planned = engine.planned_nbytes()
    trainer = make_trainer(engine=engine)
    trainer.run()
    assert planned == engine.memory_bytes()["theory"]


def test_sequences_are_counted_where_nobody_knows_the_tokens(make_trainer, dataset):
    del dataset.train.tokens_per_sequence
    text = shown(make_trainer(), width=80)
    assert "200 sequences to train on" in text
    assert "4 of 4 sequences; an epoch is 50 steps" in text


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


def test_an_epoch_that_is_less_than_ten_steps_has_a_tenth(make_trainer):
    text = shown(make_trainer(micro_batch_size=64), width=80)
    assert "4 of 1,024 tokens, 4,096 tokens to go; an epoch is 3.1 steps" in text


def test_each_rank_is_counted_and_each_group_named():
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    groups = [{"params": ["0.*"], "weight_decay": 0.0, "name": "first"}, {"params": ["*"], "name": "rest"}]
    engine = build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2), param_groups=groups)
    assert engine.group_sizes() == [(2, 20), (4, 40)]


def test_a_run_shows_it(make_trainer, screen):
    make_trainer().run()
    assert screen.getvalue().startswith("model   GPT, ")


@pytest.mark.parametrize(
    ("reduction", "said"), [("ordered", ""), ("native", "; the bits depend on the number of ranks without")]
)
def test_virtual_ranks_are_said_and_when_their_bits_follow_the_ranks(make_trainer, model, reduction, said):
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    engine = build_engine(model, optimizer=optimizer, zero=ZeroConfig(reduction=reduction), virtual_ranks=4)
    line = next(line for line in shown(make_trainer(engine=engine), width=140).splitlines() if line.startswith("ranks"))
    assert line.endswith("fp32; virtual ranks: 4, 4 on each") == (said == "")
    assert said in line
