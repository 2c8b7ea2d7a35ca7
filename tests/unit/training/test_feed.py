"""What a run trains on: the same however it is read and wherever it goes on, compared over the ranks, and waited for
as little as can be."""

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import zerotrain
from tests.unit.training.runs import lines_in, result_in, tiny_gpt
from zerotrain import ConfigError
from zerotrain.comm.world import World
from zerotrain.data.fetch import RowError, fingerprint_of, num_tokens_of
from zerotrain.testing.fake_wire import run_threads
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


class Ragged(Recorded):
    """Row n has n % 5 labels that count."""

    def __init__(self, items):
        super().__init__(items)
        del self.tokens_per_sequence

    def __getitem__(self, row):
        ids, labels = super().__getitem__(row)
        return ids, torch.where(torch.arange(len(labels)) < row % 5, labels, -100)


@pytest.mark.parametrize("virtual_ranks", [1, 2, 4])
def test_uneven_micro_batches_weigh_by_their_labels_whatever_virtual_rank_runs_them(
    make_trainer, dataset, virtual_ranks
):
    """The engine takes the mean over virtual ranks: so the weights of all are as many, and not as many as ranks."""
    dataset.train = Ragged(dataset.train)
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


def test_a_run_that_does_not_wait_does_not_speak_of_it(make_trainer, dataset, screen):
    trainer = make_trainer(max_steps=8)
    trainer.run()
    share = trainer.clock.figures()["data_wait_share"]
    assert ("waited for data" in screen.getvalue()) == (share > 0.05)
    assert 0 <= share < 1


# ---- agreement


def compared(by_rank: list[dict[str, Any]], checked: dict[str, Any] | None = None) -> list[str]:
    """What each rank is told."""

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
        ([HUNDRED, dict(reversed(HUNDRED.items()))], None, []),
        (
            [{"rows": 100}, {"rows": 100, "split": "by chunk"}],
            None,
            [f"{DIFFER}split: nothing on rank 0, by chunk on rank 1{ADVICE}"],
        ),
        ([{"rows": 7}, {"rows": 7}], {"rows": 7}, []),
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
    ids=["another copy", "another order of names", "another kind", "as it was checked", "changed since"],
)
def test_data_that_is_not_the_same_everywhere_is_told_with_both_values(by_rank, checked, said):
    lines = compared(by_rank, checked)
    assert len(set(lines)) == 1
    assert lines[0].splitlines() == said


def test_a_trainer_compares_its_data_with_what_was_checked(make_trainer, dataset):
    checked = fingerprint_of(dataset)
    assert make_trainer(data_checked=checked).run()["status"] == "completed"
    with pytest.raises(ConfigError, match="rows: 199 when it was checked, 200 on all ranks"):
        make_trainer(engine=fresh_engine(), data_checked=checked | {"rows": 199}).run()


class Flipped(Recorded):
    """The labels of 15 of 136 rows are others in each instance: nobody has seeded its generator."""

    def __init__(self, items):
        super().__init__(items)
        self.flipped = set(np.random.default_rng().choice(136, size=15, replace=False).tolist())

    def __len__(self):
        return 136

    def __getitem__(self, row):
        ids, labels = super().__getitem__(row)
        return ids, labels.flip(0) if row in self.flipped else labels


def test_few_rows_that_differ_are_seen_at_the_start_and_where_a_run_goes_on(make_trainer, dataset):
    """Seen: 31 of 136 rows differed, of which none was the first, the middle or the last, and nothing was said."""
    plain = dataset.train
    dataset.train = Flipped(plain)
    checked = fingerprint_of(dataset)
    first = make_trainer(engine=fresh_engine(), dataset=dataset, data_checked=checked)
    first.run()
    dataset.train = Flipped(plain)
    with pytest.raises(ConfigError, match=r"items of train: .* of 136 rows when it was checked"):
        make_trainer(engine=fresh_engine(), dataset=dataset, data_checked=checked).run()
    going_on = {"dataset": dataset, "data_state": first.data_state, "first_step": 4, "max_steps": 5}
    with pytest.raises(ConfigError, match="the saved run read other rows"):
        make_trainer(engine=fresh_engine(), data_checked=fingerprint_of(dataset), **going_on).run()


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
    dataset.train = Ragged(dataset.train)
    body = make_trainer(engine=fresh_engine(), dataset=dataset, micro_batch_size=100, max_steps=2).run()
    assert body["tokens_per_s"] == pytest.approx(16 * body["samples_per_s"])
    assert body["labels_per_s"] == pytest.approx(2 * body["samples_per_s"])


def test_rows_of_numbers_have_no_tokens():
    floats, ids = torch.zeros(4, 16), torch.zeros(4, 16, dtype=torch.int64)
    assert [num_tokens_of(each) for each in (floats, (floats, ids), ids[:, 0], {"labels": ids}, "text")] == [0] * 5
    assert [num_tokens_of(each) for each in (ids, (ids, floats), {"input_ids": ids.int()})] == [64] * 3
