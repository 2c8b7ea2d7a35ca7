"""A plan by a few blocks against the plan by all of them, and which models have blocks that are alike."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.planning.rows import MODELS, Row, rehearsals
from zerotrain.planning import rehearsal, repeated
from zerotrain.planning.rehearsal import StagePlan
from zerotrain.planning.repeated import KEPT, MIN_BLOCKS, Blocks

NUM_BLOCKS, SLACK = 21, 2**13
CHANGING = ("peak", "activations", "scratch", "gathered", "operations")
"""Those that need not be on a line to the byte."""


def both(row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StagePlan | None, StagePlan]:
    """By a few blocks, and by all. Each matrix is a bucket, and a block several."""
    monkeypatch.setattr(repeated, "SLACK_NBYTES", SLACK)
    of_row = rehearsals(row, folder)
    return of_row._by_few_blocks(row.stage), of_row._whole(row.stage)


def deep(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = MODELS[model]
    of_config = values.get("config")
    more = {"config": of_config | {"num_hidden_layers": NUM_BLOCKS}} if of_config else {"num_layers": NUM_BLOCKS}
    monkeypatch.setitem(MODELS, model, values | more)


@pytest.mark.parametrize(
    ("model", "ranks", "stage", "precision", "settings"),
    [
        ("gpt", 1, 0, "fp32", ("model.activation_checkpointing=true",)),
        ("gpt", 3, 2, "bf16", ("train.gradient_accumulation_steps=2",)),
        ("gpt", 2, 3, "fp32", ("zero.reshard_after_forward=false",)),
        ("mixtral", 4, 3, "bf16", ("model.activation_checkpointing=true",)),
    ],
)
def test_the_plan_by_a_few_blocks_is_that_by_all(
    model: str,
    ranks: int,
    stage: int,
    precision: str,
    settings: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deep(model, monkeypatch)
    row = Row(model=model, ranks=ranks, stage=stage, precision=precision, settings=(*settings, "zero.bucket_mb=0.004"))
    few, whole = both(row, tmp_path, monkeypatch)
    assert few is not None
    exact, changing = asdict(few), asdict(whole)
    for name in CHANGING:
        got, right = exact.pop(name), changing.pop(name)
        assert right - 256 <= got <= right + max(0.03 * right, 2 * SLACK), name
    assert exact == changing


class Net(nn.Module):
    """Blocks, and what is done to them."""

    def __init__(self, change: Callable[[nn.ModuleList], object] = lambda blocks: None, num: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(num))
        for place, block in enumerate(self.blocks):
            block.place = place
        self.head = nn.Linear(8, 8)
        change(self.blocks)


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: setattr(blocks[15][1], "p", 0.2),
        lambda blocks: blocks[15][0].requires_grad_(False),
        lambda blocks: blocks[15][0].register_forward_hook(lambda *_: None),
        lambda blocks: blocks[15][0].register_buffer("mask", torch.ones(8)),
        lambda blocks: setattr(blocks[15], "window", 4),
        lambda blocks: setattr(blocks[15], "place", 3),
        lambda blocks: blocks.__setitem__(15, nn.Sequential(nn.Linear(8, 8), nn.Identity())),
        lambda blocks: [setattr(block, "own", object()) for block in blocks],
        lambda blocks: [setattr(block, "tables", (torch.ones(2), torch.ones(2))) for block in blocks],
        lambda blocks: setattr(blocks[15][0], "weight", blocks[3][0].weight),
        lambda blocks: setattr(blocks[15][0], "weight", nn.Parameter(torch.ones(8, 8).t())),
    ],
    ids=["dropout", "frozen", "hook", "buffer", "attribute", "place", "class", "objects", "tensors", "tied", "strides"],
)
def test_a_block_that_differs_ends_the_run(change: Callable[[nn.ModuleList], object]) -> None:
    assert Blocks.of(Net()) == Blocks("blocks", range(NUM_BLOCKS))
    assert Blocks.of(Net(change)) is None


def test_the_longest_run_is_cut_and_what_stands_before_and_behind_it_stays() -> None:
    model = Net(lambda blocks: [setattr(blocks[place][1], "p", 0.3) for place in (0, 1, 28)], num=31)
    found = Blocks.of(model)
    assert found == Blocks("blocks", range(2, 28))
    few = found.cut(model, KEPT[-1])
    assert [block.place for block in model.blocks] == [0, 1, *range(2, 2 + KEPT[-1]), 28, 29, 30]
    few.cut(model, KEPT[0])
    assert [block.place for block in model.blocks] == [0, 1, *range(2, 2 + KEPT[0]), 28, 29, 30]
    assert Blocks.of(Net(num=MIN_BLOCKS - 1)) is None


@pytest.mark.parametrize(
    "settings",
    [
        ("zero.bucket_mb=1",),
        ("zero.bucket_mb=0.004", "zero.units=['blocks.*']"),
        ("zero.bucket_mb=0.004", "precision.keep_fp32=['blocks.20.*']"),
        ("zero.bucket_mb=0.004", "zero.prefetch=3"),
        ("zero.bucket_mb=0.004", "offload.optimizer=cpu"),
        ("zero.bucket_mb=0.004", "offload.activations=cpu"),
        ("zero.bucket_mb=0.004", "model.vocab_size=8192"),
    ],
    ids=[
        "blocks share buckets",
        "units by name",
        "fp32 by name",
        "gathers far ahead",
        "offloaded state",
        "offloaded activations",
        "large reductions",
    ],
)
def test_where_blocks_need_not_add_the_same_all_are_rehearsed(
    settings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep("gpt", monkeypatch)
    few, _ = both(Row(model="gpt", ranks=2, stage=2, precision="bf16", settings=settings), tmp_path, monkeypatch)
    assert few is None


class ByPlace(nn.Module):
    """A block does more at one place that is none of the first, or looks back at all before it."""

    def __init__(self, place: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(32, 64)
        self.place = place

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        before = [self.table(ids)]
        for place, block in enumerate(self.blocks):
            hidden = block(before[-1])
            if self.place is None:
                before.append(hidden + torch.stack(before).exp().sum(0))
            else:
                before = [hidden.repeat(9, 1, 1).exp()[:4] if place == self.place else hidden]
        return nn.functional.cross_entropy(self.head(before[-1]).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("place", [None, 15, 99])
def test_a_forward_that_is_not_the_same_at_each_place_is_rehearsed_whole(
    place: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "by place", {"_target_": f"{__name__}.ByPlace", "place": place})
    row = Row(model="by place", ranks=2, stage=2, precision="fp32", settings=("zero.bucket_mb=0.004",))
    few, _ = both(row, tmp_path, monkeypatch)
    assert (few is not None) == (place == 99)


class Wide(nn.Module):
    """A block is a matrix, which is never cut, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 1024)
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(NUM_BLOCKS))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """A number."""
        hidden = self.table(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.mean()


def test_blocks_that_share_a_bucket_only_where_all_are_there_are_rehearsed_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket of two blocks is more than an eighth of a model of six."""
    monkeypatch.setitem(MODELS, "wide", {"_target_": f"{__name__}.Wide"})
    row = Row(model="wide", ranks=2, stage=2, precision="bf16", settings=("zero.bucket_mb=25",))
    of_row = rehearsals(row, tmp_path)
    assert of_row.few is not None
    assert of_row._by_few_blocks(row.stage) is None


def test_three_numbers_tell_a_line_or_nothing() -> None:
    assert repeated._line([10, 20, 30], 21, slack=0) == 180
    assert repeated._line([10, 21, 30], 21, slack=1) > 180  # the most that it leaves
    with pytest.raises(repeated.UnevenError):
        repeated._line([10, 22, 30], 21, slack=1)


def test_what_is_off_the_line_is_rehearsed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the blocks that are left out would hold more, or the model needs all of them."""
    deep("gpt", monkeypatch)
    row = Row(model="gpt", ranks=2, stage=2, precision="fp32", settings=("zero.bucket_mb=0.004",))
    monkeypatch.setattr(repeated, "KEPT", (4, 5, 7))
    monkeypatch.setattr(rehearsal, "KEPT", (4, 5, 7))
    few, _ = both(row, tmp_path, monkeypatch)
    assert few is None
