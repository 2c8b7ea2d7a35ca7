"""A plan against a real engine: states to the byte, and the peak of its tensors. All rows are in tests/bits."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.preflight.rows import MODELS, Row, held, misfits, planned, rehearsals, rows
from zerotrain.comm.world import World

PICKED = {
    ("gpt", 2, "fp32", ()),
    ("gpt", 0, "bf16", ("model.activation_checkpointing=true",)),
    ("gpt", 3, "bf16", ("offload.optimizer=cpu", "offload.parameters=cpu")),
    ("mixtral", 3, "fp32", ()),
}
ALONE = [row for row in rows() if row.ranks == 1 and (row.model, row.stage, row.precision, row.settings) in PICKED]


@pytest.mark.parametrize("row", ALONE)
def test_a_plan_is_what_one_rank_holds_at_most(row: Row, tmp_path: Path):
    assert len(ALONE) == len(PICKED)
    found = held(row, World(0, 1, 0, torch.device("cpu")), tmp_path)

    wrong = misfits(row, planned(row, tmp_path), found)

    assert not wrong, "\n".join(wrong)


class Chooser(nn.Module):
    """Computes with the tokens alone that the weights choose."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        hidden = self.table(ids)
        chosen = hidden.sum(-1) > 0
        return nn.functional.cross_entropy(self.head(hidden[chosen]), labels[chosen])


def test_an_operation_that_asks_for_values_is_named_and_the_states_are_planned(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "chooser", {"_target_": f"{__name__}.Chooser"})

    plan = planned(Row(model="chooser", ranks=2, stage=3, precision="fp32"), tmp_path)

    numel = sum(each.numel() for each in Chooser().parameters())
    assert numel * 4 <= 2 * plan.parameters <= numel * 4 * 1.2
    assert plan.optimizer == 2 * plan.parameters
    assert (plan.activations, plan.peak, plan.sent) == (None, None, None)
    assert plan.unknown_because == "aten.index.Tensor"


def test_the_average_of_the_weights_is_planned(tmp_path: Path):
    average = "callbacks.ema={_target_: zerotrain.training.callbacks.ema.EMA}"
    without, plan = (
        planned(Row(model="gpt", ranks=2, stage=1, precision="fp32", settings=settings), tmp_path)
        for settings in ((), (average,))
    )

    assert plan.optimizer == without.optimizer + without.parameters // 2
    assert plan.peak is not None
    assert without.peak is not None
    assert plan.peak == without.peak + without.parameters // 2


def test_beside_a_gpu_a_plan_counts_what_crosses_to_an_update_on_the_host(tmp_path: Path):
    """A second buffer for the gradient that is on its way, and pinned memory for two gradients and two weights."""
    settings = ("offload.optimizer=cpu", "offload.update=host")
    row = Row(model="gpt", precision="bf16", settings=settings, ranks=2, stage=2, measured=0, planned=0)
    on_cpu, on_gpu = (rehearsals(row, tmp_path, on_host=each).plan(2) for each in (True, False))
    pinned_nbytes = on_gpu.host - on_cpu.host
    assert pinned_nbytes > 0
    assert pinned_nbytes % (2 * (4 + 2)) == 0  # of fp32 and of bf16
    assert on_gpu.scratch > on_cpu.scratch
