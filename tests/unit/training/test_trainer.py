import copy
import os
import signal
from functools import partial

import pytest
import torch

from tests.unit.data.test_batches import rank_rows
from tests.unit.engine.parts import sum_by_tree
from tests.unit.training.runs import Changed, Notebook, lines_in, mask_ends, result_in, tiny_gpt
from zerotrain import PrecisionConfig, build_engine
from zerotrain.data import SyntheticTokens, TextDataset
from zerotrain.data.fetch import RowError
from zerotrain.models import GPT
from zerotrain.training import request as requests, warmup_cosine


def with_changed_training(dataset: SyntheticTokens, change) -> SyntheticTokens:
    dataset.train = Changed(dataset.train, change)
    return dataset


# ---- a run as a whole


def test_training_lowers_the_loss_and_tells_so_everywhere(make_trainer, tmp_path, screen):
    body = make_trainer(max_steps=60, eval_every=30, log_every=10).run()
    assert body == result_in(tmp_path)
    facts = {"status": "completed", "error": None, "steps": 60, "world_size": 1, "stage": 2}
    facts |= {"overrides": ["train.max_steps=4"], "config_hash": "abc"}
    assert {name: body[name] for name in facts} == facts
    assert max(body["final_train_loss"], body["final_val_loss"]) < 2.5
    assert min(body["tokens_per_s"], body["step_ms_median"]) > 0
    assert len(body["weights_sha256"]) == 64
    assert "60 steps" in screen.getvalue()


@pytest.mark.parametrize(
    ("max_steps", "eval_every", "log_every", "logged", "evaluated"),
    [(10, 4, 3, [1, 3, 6, 9, 10], [0, 4, 8, 10]), (3, 0, 1, [1, 2, 3], [3])],
)
def test_metrics_have_a_line_at_the_first_step_each_logged_step_and_each_evaluation(
    make_trainer, tmp_path, max_steps, eval_every, log_every, logged, evaluated
):
    make_trainer(max_steps=max_steps, eval_every=eval_every, log_every=log_every).run()
    assert [line["step"] for line in lines_in(tmp_path, "train_loss")] == logged
    assert [line["step"] for line in lines_in(tmp_path, "val_loss")] == evaluated
    assert result_in(tmp_path)["final_val_loss"] == lines_in(tmp_path)[-1]["val_loss"]


def test_a_sink_of_the_users_own_gets_every_line_of_the_file(make_trainer, tmp_path):
    sink = Notebook()
    make_trainer(max_steps=5, eval_every=2, log_every=3, sinks=[sink]).run()
    assert sink.lines == lines_in(tmp_path)
    assert sink.is_closed


def test_a_sink_that_fails_ends_the_run_and_all_are_closed(make_trainer, tmp_path):
    sinks = [Notebook(failing=True), Notebook()]
    with pytest.raises(ConnectionError, match="nobody listens"):
        make_trainer(sinks=sinks).run()
    assert [sink.is_closed for sink in sinks] == [True, True]
    assert result_in(tmp_path)["error"] == "ConnectionError: nobody listens"


# ---- the same bits


@pytest.mark.parametrize("masked", [False, True], ids=["all labels", "ragged labels"])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 12])
def test_the_loss_is_the_mean_over_the_tokens_of_the_global_batch(
    make_trainer, model, dataset, tmp_path, num_micro_batches, masked
):
    if masked:
        dataset = with_changed_training(dataset, mask_ends)
    reference, losses = copy.deepcopy(model), []
    trainer = make_trainer(
        optimizer=partial(torch.optim.SGD, lr=0.5),
        dataset=dataset,
        max_steps=5,
        micro_batch_size=12 // num_micro_batches,
        gradient_accumulation_steps=num_micro_batches,
    )
    for step in range(5):  # in plain PyTorch: one batch, its loss the mean over all its tokens
        rows = [dataset.train[row] for row in rank_rows(trainer.feed.sampler, step)]
        ids, labels = map(torch.stack, zip(*rows, strict=True))
        loss = torch.nn.functional.cross_entropy(reference(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 0.5 * parameter.grad
        reference.zero_grad()
    trainer.run()
    assert [line["train_loss"] for line in lines_in(tmp_path, "train_loss")] == pytest.approx(losses, rel=1e-5)
    weights = trainer.engine.full_state_dict()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6)


def test_a_step_whose_gradient_is_not_finite_is_counted_and_shown(make_trainer, tmp_path, screen, model):
    with torch.no_grad():
        model.ln_f.weight.fill_(float("inf"))
    body = make_trainer(max_steps=2).run()
    assert body["status"] == "completed"
    assert body["final_train_loss"] is None
    assert [line["skipped_steps"] for line in lines_in(tmp_path, "train_loss")] == [1, 2]
    assert "2 skipped" in screen.getvalue()


def overflow_at(trainer, steps):
    """Make the loss of these steps infinite."""
    train_step, number = trainer.engine.train_step, 0

    def with_overflow(micro_batches, *, weights, **others):
        nonlocal number
        number += 1
        weights = [float("inf")] * len(micro_batches) if number in steps else weights
        return train_step(micro_batches, weights=weights, **others)

    trainer.engine.train_step = with_overflow


def test_a_skipped_step_is_a_step_of_the_run_but_not_of_the_schedule(make_trainer, tmp_path):
    schedule = partial(warmup_cosine, warmup_steps=4)
    trainer = make_trainer(max_steps=5, schedule=schedule, optimizer=partial(torch.optim.AdamW, lr=0.4))
    overflow_at(trainer, {2, 3})
    body = trainer.run()
    assert (body["steps"], body["skipped_steps"]) == (5, 2)
    lines = lines_in(tmp_path, "lr")
    assert [line["lr"] for line in lines] == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.3])
    assert [line["skipped_steps"] for line in lines] == [0, 1, 2, 2, 2]
    update = trainer.engine.schedule.trained[0].update
    [optimizer] = {update.span_state(span)["step"].item() for span in update.spans}
    assert optimizer == 3


def test_steps_skipped_before_the_run_are_no_updates_to_its_schedule(make_trainer, tmp_path):
    schedule = partial(warmup_cosine, warmup_steps=4)
    optimizer = partial(torch.optim.AdamW, lr=0.4)
    body = make_trainer(max_steps=5, schedule=schedule, optimizer=optimizer, first_step=3, skipped_before=2).run()
    rates = [line["lr"] for line in lines_in(tmp_path, "lr")]
    assert rates == pytest.approx([0.2, 0.3])
    assert body["skipped_steps"] == 2


@pytest.mark.parametrize(
    "wrong", [{"first_step": 5}, {"first_step": -1}, {"first_step": 1, "skipped_before": 2}], ids=str
)
def test_steps_that_cannot_have_been_before_are_refused(make_trainer, wrong):
    with pytest.raises(ValueError, match=r"must be in 0\.\.4, which is max_steps"):
        make_trainer(max_steps=4, **wrong)


def test_the_loss_scale_of_fp16_is_in_the_metrics(make_trainer, model, tmp_path):
    precision = PrecisionConfig("fp16", initial_scale=2.0, growth_interval=2)
    engine = build_engine(model, optimizer=partial(torch.optim.SGD, lr=0.1), precision=precision)
    make_trainer(engine=engine, max_steps=4).run()
    assert [line["loss_scale"] for line in lines_in(tmp_path, "loss_scale")] == [2, 2, 4, 4]


# ---- the sample


def test_a_sample_of_text_ends_the_run_where_the_dataset_can_decode(make_trainer, tmp_path, screen):
    (tmp_path / "text.txt").write_text("all work and no play makes jack a dull boy [/] " * 100)
    dataset = TextDataset(str(tmp_path / "text.txt"), seq_len=40, cache_dir=str(tmp_path / "cache"))
    model = GPT(vocab_size=256, max_seq_len=40, num_layers=1, num_heads=1, hidden_size=16)
    engine = build_engine(model, optimizer=torch.optim.SGD)
    make_trainer(sample_tokens=20).run()
    assert "No sample of text: the dataset has no decode()." in screen.getvalue()
    make_trainer(engine=engine, dataset=dataset, sample_tokens=20).run()
    prompt = dataset.decode(dataset.validation[0][0][:32])
    assert prompt in screen.getvalue()
    assert "20 tokens after 32 of the validation text" in screen.getvalue()


# ---- ends that are not the end


ITEMS_COMPARED = 201
"""Read before the first step, to tell the data of one rank from that of another: the first one twice."""


def failing_at_read(number, failure):
    reads = []

    def change(index, ids, labels):
        reads.append(index)
        if len(reads) == ITEMS_COMPARED + number:
            failure()
        return ids, labels

    return change


def raise_broken_disk():
    raise OSError("broken disk")


def test_a_failed_run_leaves_a_result_that_says_why(make_trainer, dataset, tmp_path):
    trainer = make_trainer(dataset=with_changed_training(dataset, failing_at_read(10, raise_broken_disk)))
    with pytest.raises(RowError, match="broken disk"):
        trainer.run()
    result = result_in(tmp_path)
    assert (result["status"], result["steps"]) == ("failed", 2)
    row = rank_rows(trainer.feed.sampler, 2)[1]
    said = f"RowError: data.train: row {row} (epoch 0, step 3) cannot be read: OSError: broken disk"
    assert result["error"] == said
    assert result["final_train_loss"] == lines_in(tmp_path)[-1]["train_loss"]
    assert result["weights_sha256"] is None


@pytest.fixture
def ctrl_c():
    """Python's own handler, which a process that a shell has started in the background has not: it ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", requests.STOP_SIGNALS, ids=lambda number: number.name)
def test_a_run_that_is_told_to_stop_ends_the_step_and_says_so_in_its_result(make_trainer, dataset, tmp_path, number):
    tell = partial(os.kill, os.getpid(), number)
    trainer = make_trainer(dataset=with_changed_training(dataset, failing_at_read(10, tell)))
    body = trainer.run()
    result = result_in(tmp_path)
    assert result == body
    assert (result["status"], result["stopped_by"], result["steps"]) == ("stopped", number.name, 3)
    assert result["error"] == f"stopped by {number.name} after step 3 of {trainer.max_steps}"
    assert lines_in(tmp_path)[-1]["step"] == 3
    assert lines_in(tmp_path)[-1]["train_loss"] == result["final_train_loss"]
    assert result["weights_sha256"] is None


@pytest.mark.case("stopping", "in the last step", "the run completes")
def test_a_run_told_to_stop_in_its_last_step_completes(make_trainer, dataset, tmp_path):
    trainer = make_trainer(dataset=dataset)
    trainer.begin = lambda step: step == trainer.max_steps and os.kill(os.getpid(), signal.SIGTERM)
    trainer.run()
    assert (result_in(tmp_path)["status"], result_in(tmp_path)["stopped_by"]) == ("completed", None)


def signal_twice(first, second, error):
    os.kill(os.getpid(), first)
    try:
        os.kill(os.getpid(), second)
    finally:
        if error is not None:
            raise error


@pytest.mark.case("stopping", "a second signal")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("second", "error", "raised"),
    [
        (signal.SIGINT, None, KeyboardInterrupt),
        (signal.SIGTERM, RuntimeError("connection closed by peer"), RuntimeError),
    ],
    ids=["an interrupt", "a broken connection"],
)
def test_a_second_signal_stops_at_once_whatever_it_surfaces_as(
    make_trainer, dataset, tmp_path, monkeypatch, second, error, raised
):
    monkeypatch.setattr(requests, "SAME_REQUEST_S", 0.0)
    twice = partial(signal_twice, signal.SIGTERM, second, error)
    trainer = make_trainer(dataset=with_changed_training(dataset, failing_at_read(10, twice)))
    with pytest.raises(raised):
        trainer.run()
    result = result_in(tmp_path)
    assert (result["status"], result["stopped_by"], result["steps"]) == ("stopped", None, 2)


@pytest.mark.case("stopping", "a rank dies, or fails, while all stop")
def test_what_fails_after_a_signal_has_failed(make_trainer, dataset, tmp_path):
    """The disk may be full when the run saves."""

    def stop_and_fail():
        os.kill(os.getpid(), signal.SIGTERM)
        raise_broken_disk()

    trainer = make_trainer(dataset=with_changed_training(dataset, failing_at_read(10, stop_and_fail)))
    with pytest.raises(RowError, match="broken disk"):
        trainer.run()
    assert result_in(tmp_path)["status"] == "failed"


# ---- what one virtual rank adds to a step, computed alone


VIRTUAL_RANKS = 4


@pytest.mark.parametrize("is_ragged", [False, True])
def test_the_leaves_of_a_step_are_its_gradient(make_trainer, dataset, is_ragged):
    if is_ragged:
        dataset.train = Changed(dataset.train, mask_ends)

    def trainer(max_steps):
        engine = build_engine(
            tiny_gpt(num_heads=2, dropout=0.2),
            optimizer=partial(torch.optim.SGD, lr=1.0),
            virtual_ranks=VIRTUAL_RANKS,
        )
        made = make_trainer(engine=engine, max_steps=max_steps, gradient_accumulation_steps=2, micro_batch_size=2)
        made.run()
        return made

    two, three = trainer(2), trainer(3)
    leaves = [two.leaf(number) for number in reversed(range(VIRTUAL_RANKS))][::-1]
    before, after = two.engine.full_state_dict(), three.engine.full_state_dict()
    for name in leaves[0]:
        mean = sum_by_tree([leaf[name] for leaf in leaves]) / VIRTUAL_RANKS
        assert torch.equal(after[name], before[name] - mean), name
    with pytest.raises(ValueError, match="virtual_rank=4: there are 4; give 0 to 3"):
        two.leaf(VIRTUAL_RANKS)
