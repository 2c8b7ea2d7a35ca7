"""What a run trains on: the same however it is read and wherever it goes on, compared over the ranks, and waited for
as little as can be."""

import copy
import math
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import zerotrain
from tests.ranks.fake_wire import run_threads
from tests.unit.training.runs import Changed, lines_in, result_in, tiny_gpt, trainer_of
from zerotrain import ConfigError
from zerotrain.comm.world import World
from zerotrain.data import Mix, SyntheticTokens
from zerotrain.data.fetch import RowError, fingerprint_of, num_tokens_of
from zerotrain.models import GPT
from zerotrain.training.sameness import require_same_data


class Recorded(Dataset):
    """The items of another dataset; notes which are read."""

    draws = False

    def __init__(self, items, wait_s=0.0):
        self.items, self.wait_s, self.read = items, wait_s, []
        self.tokens_per_sequence = items.tokens_per_sequence

    def __len__(self):
        return len(self.items)

    def __getitem__(self, row):
        time.sleep(self.wait_s)
        self.read.append(row)
        return self.items[row]


class Masked(Recorded):
    """A random part of the ids of each item is zero: drawn when the item is read."""

    draws = True

    def __getitem__(self, row):
        ids, labels = super().__getitem__(row)
        return ids * (torch.rand(ids.shape) < 0.8), labels


def fresh_engine():
    return zerotrain.build_engine(tiny_gpt(), optimizer=torch.optim.AdamW)


def train(make_trainer, dataset, **changes) -> str:
    return make_trainer(engine=fresh_engine(), dataset=dataset, **changes).run()["weights_sha256"]


@pytest.mark.case(
    "data: Order, position and loading", "Read by a thread, by processes or between steps", "the same weights"
)
def test_a_run_has_the_same_weights_whoever_reads_its_rows(make_trainer, dataset):
    plain = dataset.train
    dataset.train = Recorded(plain)
    in_thread = train(make_trainer, dataset)
    dataset.train.draws = True
    assert {train(make_trainer, dataset), train(make_trainer, dataset, num_workers=2)} == {in_thread}
    dataset.train = Masked(plain)
    drawn = train(make_trainer, dataset)
    assert train(make_trainer, dataset, num_workers=1) == drawn != in_thread


def rows_trained(make_trainer, dataset, *, num_rows: int, **changes) -> list[int]:
    recorded = Recorded(dataset.train)
    dataset.train = recorded
    trainer = make_trainer(engine=fresh_engine(), dataset=dataset, **changes)
    trainer.run()
    dataset.train = recorded.items
    assert trainer.data_state["rows_consumed"] == num_rows
    return behind_fingerprint(recorded)


def behind_fingerprint(recorded: Recorded) -> list[int]:
    """The rows that were read behind those that tell the data apart: all of so few, and the first twice."""
    assert sorted(recorded.read[: len(recorded) + 1]) == [0, *range(len(recorded))]
    return recorded.read[len(recorded) + 1 :]


@pytest.mark.case("data: Order, position and loading", "A run goes on with other ranks, batch size or accumulation")
def test_a_run_goes_on_at_its_row_with_another_batch_size(make_trainer, dataset):
    """200 rows; the second run reads over the end of the epoch."""
    small = {"micro_batch_size": 3, "gradient_accumulation_steps": 5}
    in_one_go = rows_trained(make_trainer, dataset, num_rows=240, micro_batch_size=60)
    assert sorted(in_one_go[:200]) == list(range(200))
    trainer = make_trainer(engine=fresh_engine(), dataset=dataset, max_steps=9, **small)
    trainer.run()
    first = rows_trained(make_trainer, dataset, num_rows=135, max_steps=9, **small)
    goes_on = {"data_state": trainer.data_state, "first_step": 9, "max_steps": 12, "micro_batch_size": 35}
    assert first + rows_trained(make_trainer, dataset, num_rows=240, **goes_on) == in_one_go


def test_without_a_state_of_the_data_a_run_goes_on_behind_its_first_steps(make_trainer, dataset):
    in_one_go = rows_trained(make_trainer, dataset, num_rows=16)
    assert rows_trained(make_trainer, dataset, num_rows=16, first_step=2) == in_one_go[8:]


@pytest.mark.case(
    "data: Order, position and loading",
    "with another seed, order or data",
    under="A run goes on with other ranks, batch size or accumulation",
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seed": 3}, "seed: 3 there, 0 here"),
        ({"order_version": 1}, "version of the order: 1 there, 2 here"),
        ({"fingerprint": {"rows": 1000}}, "rows of the data: 1000 there, 200 here"),
    ],
    ids=["seed", "order", "data"],
)
def test_a_run_goes_on_with_its_own_data_alone(make_trainer, tmp_path, change, said):
    first = make_trainer(engine=fresh_engine())
    first.run()
    other = make_trainer(engine=fresh_engine(), data_state=first.data_state | change, first_step=1)
    with pytest.raises(ConfigError, match="data: the saved run read other rows") as refused:
        other.run()
    assert said in str(refused.value)
    assert result_in(tmp_path)["status"] == "failed"


def test_metrics_tell_how_far_the_data_is_read(make_trainer, tmp_path):
    make_trainer(max_steps=3, micro_batch_size=40).run()
    told = [(line["epoch"], line["tokens"]) for line in lines_in(tmp_path, "epoch")]
    assert told == [(0.2, 640), (0.4, 1280), (0.6, 1920)]


def ragged(items):
    """Row n has n % 5 labels that count."""
    return Changed(items, lambda row, ids, labels: (ids, torch.where(torch.arange(16) < row % 5, labels, -100)))


@pytest.mark.parametrize("virtual_ranks", [1, 2, 4])
def test_uneven_micro_batches_weigh_by_their_labels_whatever_virtual_rank_runs_them(
    make_trainer, dataset, virtual_ranks
):
    """The engine takes the mean over virtual ranks: so the weights of all are as many, and not as many as ranks."""
    dataset.train = ragged(dataset.train)
    engine = zerotrain.build_engine(fresh_engine().module, optimizer=torch.optim.SGD, virtual_ranks=virtual_ranks)
    feed = make_trainer(engine=engine, dataset=dataset, micro_batch_size=3, gradient_accumulation_steps=2).feed
    batches = [rows for number in range(virtual_ranks) for rows in feed.sampler.micro_batches(0, [number])]
    num_labels = [sum(row % 5 for row in each.rows) for each in batches]
    weights = [float(each) for number in range(virtual_ranks) for each in feed.leaf(number)[1]]
    assert weights == pytest.approx([virtual_ranks * each / sum(num_labels) for each in num_labels])


# ---- waiting


def test_a_run_that_waits_for_its_rows_says_so_with_what_helps(make_trainer, dataset, tmp_path, screen):
    dataset.train = Recorded(dataset.train, wait_s=0.02)
    dataset.train.draws = True
    body = make_trainer(dataset=dataset, max_steps=5).run()
    assert body["data_wait_ms"] >= 4 * 20
    assert all(line["data_wait_ms"] >= 4 * 20 for line in lines_in(tmp_path, "train_loss"))
    said = " ".join(screen.getvalue().split())
    assert "waited for data" in said
    assert "% of the time: data.num_workers=2 reads with processes; or a dataset that draws no random numbers" in said


# ---- agreement


def compared(by_rank: list[dict[str, Any]], checked: dict[str, Any] | None = None) -> list[str]:
    def on_a_rank(world: World) -> str:
        engine = zerotrain.build_engine(torch.nn.Linear(2, 2), optimizer=torch.optim.SGD, world=world)
        try:
            require_same_data(engine.collectives, by_rank[world.rank], checked)
        except ConfigError as error:
            return str(error)
        return ""

    return run_threads(on_a_rank, len(by_rank))[0]


DIFFER = "data: the ranks differ: "
ADVICE = "; give all machines the same files, and seed what a dataset draws alike on all ranks"
HUNDRED = {"rows": 100, "tokens": 5, "files": "ab"}


@pytest.mark.case(
    "data: Order, position and loading",
    "Ranks whose data differs, or data that has changed since it was checked",
    "refused on all ranks, with what differs and both values",
)
@pytest.mark.parametrize(
    ("by_rank", "checked", "said"),
    [
        (  # seen: of an epoch 33 rows were never read, and 27 twice
            [HUNDRED, {"rows": 110, "tokens": 5, "files": "cd"}, HUNDRED],
            None,
            [
                f"{DIFFER}rows: 100 on ranks 0, 2, 110 on rank 1{ADVICE}",
                f"{DIFFER}files: ab on ranks 0, 2, cd on rank 1{ADVICE}",
            ],
        ),
        (
            [{"rows": 100}, {"rows": 100, "split": "by chunk"}],
            None,
            [f"{DIFFER}split: nothing on rank 0, by chunk on rank 1{ADVICE}"],
        ),
        (  # seen: the run's own config.yaml came into the corpus between the check and the ranks
            [{"rows": 9}, {"rows": 9}],
            {"rows": 7},
            [
                "data: it has changed since it was checked: rows: 7 when it was checked, 9 on all ranks; nothing may "
                "write to the data or to its folder while a run starts, and a dataset with random items must seed its "
                "generators; start the run again"
            ],
        ),
    ],
    ids=["another copy", "another kind", "changed since"],
)
def test_data_that_is_not_the_same_everywhere_is_told_with_both_values(by_rank, checked, said):
    lines = compared(by_rank, checked)
    assert len(set(lines)) == 1
    assert lines[0].splitlines() == said


def test_a_run_goes_on_whose_data_was_told_by_other_rows(make_trainer, dataset):
    """How many rows are cheap depends on the machine."""
    dataset.train = Recorded(dataset.train)
    like = {"items_of_train": "0" * 16 + " of 17 rows"}
    first = make_trainer(engine=fresh_engine(), dataset=dataset)
    first.run()
    theirs = first.data_state["fingerprint"] | fingerprint_of(dataset, like=like)
    assert theirs != first.data_state["fingerprint"]
    going_on = {"dataset": dataset, "first_step": 4, "max_steps": 5}
    state = first.data_state | {"fingerprint": theirs}
    assert make_trainer(engine=fresh_engine(), data_state=state, **going_on).run()["status"] == "completed"
    state["fingerprint"] = theirs | {"items_of_train": "0" * 16 + " of 17 rows"}
    with pytest.raises(ConfigError, match="the saved run read other rows"):
        make_trainer(engine=fresh_engine(), data_state=state, **going_on).run()


# ---- validation


@pytest.mark.case(
    "data: Order, position and loading", "Validation at another batch size or number of ranks", "the same rows"
)
@pytest.mark.parametrize("shape", [(4, 1), (7, 1), (2, 5)], ids=str)
def test_validation_reads_the_same_rows_at_any_batch_size(make_trainer, dataset, shape):
    """Seen: 128 rows on one rank, and 256 others on two, with the settings as they come."""
    dataset.validation = Recorded(dataset.train)
    size, accumulation = shape
    make_trainer(dataset=dataset, micro_batch_size=size, gradient_accumulation_steps=accumulation, eval_batches=3).run()
    assert sorted(set(behind_fingerprint(dataset.validation))) == [row * 200 // 24 for row in range(24)]


class Late:
    """Rows of tokens, of which one late one has a token that no model knows."""

    draws = False

    def __init__(self, row: int) -> None:
        self.row = row

    def __len__(self) -> int:
        return 40

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.arange(16)
        ids[3] = 999 if row == self.row else 3
        return ids, torch.arange(16)


@pytest.mark.parametrize(("part", "row", "num_workers"), [("train", 29, 0), ("train", 29, 1), ("validation", 0, 0)])
def test_a_token_that_is_not_known_is_told_with_its_row_whoever_reads(make_trainer, dataset, part, row, num_workers):
    setattr(dataset, part, Late(row))
    with pytest.raises(
        RowError, match=rf"data.{part}: row {row} \(epoch 0, step \d+\) .* the token 999 is not among .* 0 to 31"
    ):
        make_trainer(engine=fresh_engine(), dataset=dataset, max_steps=10, num_workers=num_workers).run()


def test_tokens_labels_and_samples_are_told_apart(make_trainer, dataset):
    """Rows of 16 tokens, of which 2 are labels that count on average."""
    dataset.train = ragged(dataset.train)
    body = make_trainer(engine=fresh_engine(), dataset=dataset, micro_batch_size=100, max_steps=2).run()
    assert body["tokens_per_s"] == pytest.approx(16 * body["samples_per_s"])
    assert body["labels_per_s"] == pytest.approx(2 * body["samples_per_s"])


def test_rows_of_numbers_have_no_tokens():
    floats, ids = torch.zeros(4, 16), torch.zeros(4, 16, dtype=torch.int64)
    assert [num_tokens_of(each) for each in (floats, (floats, ids), ids[:, 0], {"labels": ids}, "text")] == [0] * 5
    assert [num_tokens_of(each) for each in (ids, (ids, floats), {"input_ids": ids.int()})] == [64] * 3


# ---- named items, mixes, and rows without labels


def named(items):
    """Makes a dict of pairs, its names in another order than the model's arguments."""
    ids, labels = zip(*items, strict=True)
    return {"labels": torch.stack(labels), "ids": torch.stack(ids)}


def test_named_items_train_to_the_bits_of_pairs(make_trainer, dataset, model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pairs = make_trainer(dataset=dataset).run()["weights_sha256"]
    model.load_state_dict(state)
    assert make_trainer(dataset=dataset, collate_fn=named).run()["weights_sha256"] == pairs


@pytest.mark.case("losses", "Validation of a mix")
def test_a_mix_is_trained_on_and_each_source_has_its_loss(make_trainer, dataset, tmp_path, screen):
    other = SyntheticTokens(seq_len=16, vocab_size=32, num_sequences=3)
    mix = Mix({"counting": {"data": dataset, "weight": 1}, "few": {"data": other, "weight": 3}})
    body = make_trainer(dataset=mix, max_steps=4, eval_every=2).run()
    assert list(body["val_loss_by_source"]) == ["counting", "few"]
    last = lines_in(tmp_path, "val_loss")[-1]
    assert last["val_loss/few"] == body["val_loss_by_source"]["few"]
    assert last["val_loss"] == body["final_val_loss"]
    # 16 rows, of which 12 are of the 3 of `few`.
    assert "the run reads each row of few 4.0 times" in screen.getvalue()


@pytest.mark.case("losses", "Items without labels", "a micro-batch weighs its rows")
def test_a_model_without_labels_is_trained_by_rows_and_its_data_is_not_spoken_of_as_text(make_trainer, screen):
    class Distance(torch.nn.Linear):
        def forward(self, pixels):
            return super().forward(pixels).square().mean()

    engine = zerotrain.build_engine(Distance(4, 2), optimizer=torch.optim.SGD)
    rows = list(torch.eye(4))
    data = SimpleNamespace(train=rows, validation=rows)
    body = make_trainer(engine=engine, dataset=data, sample_tokens=9).run()
    assert body["status"] == "completed"
    assert body["final_val_loss"] > 0
    assert "an epoch is 1.0 steps" in screen.getvalue()
    assert "No sample of text" not in screen.getvalue()
    assert "more data or fewer" not in screen.getvalue()


# ---- micro-batches, and a share of the validation, in which no label counts: they reach no sum and no gradient


class WithLoss(nn.Module):
    """A model whose loss is written as in docs/guides/own_model.md, or as the mean of masked losses."""

    def __init__(self, loss):
        super().__init__()
        self.gpt = GPT(vocab_size=32, max_seq_len=16, num_layers=2, num_heads=2, hidden_size=16)
        self.loss = loss

    def forward(self, ids, labels=None):
        logits = self.gpt(ids)
        return logits if labels is None else self.loss(logits.float().flatten(0, 1), labels.flatten())


def masked_mean(logits, labels):
    counts = labels != -100
    return (F.cross_entropy(logits, labels.clamp(min=0), reduction="none") * counts).sum() / counts.sum()


class HalfOfThemWithout:
    """Sequences of which only those with an odd number have labels that count."""

    def __init__(self, num_sequences):
        tokens = torch.randint(32, (num_sequences, 9), generator=torch.Generator().manual_seed(1))
        self.train = [(row[:-1], row[1:] if i % 2 else torch.full((8,), -100)) for i, row in enumerate(tokens)]
        self.validation = self.train[:7]


def sum_over_threads(world, values):
    """`World.sum` where ranks are threads, which have no process group."""
    if world.size > 1:
        values.copy_(world.shards.make_wire(True).gather_small(values, "sum").sum(dim=0))
    return values


def run(world, folder, model):
    """Four steps of 6 sequences, one a micro-batch."""
    zero = zerotrain.ZeroConfig(stage=3, bucket_mb=0.01)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    engine = zerotrain.build_engine(copy.deepcopy(model), optimizer=optimizer, zero=zero, world=world)
    size = {"micro_batch_size": 1, "gradient_accumulation_steps": 6 // world.size, "eval_batches": 10}
    return trainer_of(engine, folder, dataset=HalfOfThemWithout(24), **size).run()


@pytest.mark.case(
    "losses",
    "through the Trainer, in training and in validation, on 1, 2 and 3 ranks",
    "the same losses and norms",
    under=("A micro-batch without any label, its loss or its gradient nan; `weight=0` in `backward` and `train_step`"),
)
@pytest.mark.parametrize("loss", [F.cross_entropy, masked_mean], ids=["torch's mean", "masked mean"])
def test_any_number_of_ranks_trains_and_validates_alike_where_many_micro_batches_have_no_label(
    loss, tmp_path, monkeypatch
):
    monkeypatch.setattr(zerotrain.World, "sum", sum_over_threads)
    torch.manual_seed(0)
    model, lines = WithLoss(loss), {}
    for size in (1, 2, 3):
        results, _ = run_threads(partial(run, folder=tmp_path / str(size), model=model), size, late_rank=size - 1)
        assert {result["skipped_steps"] for result in results} == {0}
        shown = ("train_loss", "grad_norm", "val_loss")
        lines[size] = [line[name] for line in lines_in(tmp_path / str(size)) for name in shown if name in line]
    assert all(math.isfinite(number) for number in lines[1])
    assert lines[2] == pytest.approx(lines[1], rel=1e-5)
    assert lines[3] == pytest.approx(lines[1], rel=1e-5)
