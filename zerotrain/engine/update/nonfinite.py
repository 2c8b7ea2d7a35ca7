"""Steps that are skipped because a gradient is not finite: how many in a row, and where it was when that is enough."""

from collections.abc import Sequence

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.engine.buckets.bucket import TrainedBucket
from zerotrain.engine.model.precision import LossScaler
from zerotrain.engine.state.named import GRADIENT, pieces

_FINITE, _INFINITE, _NAN = 0, 1, 2
_WORDS = {_INFINITE: "inf", _NAN: "nan"}


class SkippedSteps:
    """Counts the steps skipped in a row and says why training must stop.

    Args:
        max_in_a_row: as many skipped one after another stop the training; 1 stops at once.
    """

    def __init__(self, max_in_a_row: int, loss_scaler: LossScaler | None) -> None:
        self.max_in_a_row = max_in_a_row
        self.loss_scaler = loss_scaler
        self.num_in_a_row = 0

    def reason_to_stop(self, *, skipped: bool) -> str | None:
        """A step was done or skipped: None while training may go on."""
        self.num_in_a_row = self.num_in_a_row + 1 if skipped else 0
        if not skipped:
            return None
        if self.loss_scaler is not None and self.loss_scaler.is_exhausted:
            return (
                "the gradient overflows fp16 even at a loss scale of 1; use precision='bf16' or lower the "
                "optimizer's lr"
            )
        if self.num_in_a_row < self.max_in_a_row:
            return None
        in_a_row = "" if self.max_in_a_row == 1 else f" in {self.num_in_a_row} steps in a row"
        return (
            f"the gradient was not finite{in_a_row}; lower the optimizer's lr, look at the data, or let more steps "
            "be skipped (max_skipped_steps)"
        )


def find_nonfinite(
    model: nn.Module,
    trained: Sequence[TrainedBucket],
    losses: Sequence[torch.Tensor],
    collectives: Collectives,
) -> str:
    """Say which parameter's reduced gradient went wrong first, and on which ranks the loss had. Collective.

    First is meant in the order of the backward: of the parameters that are not finite the last of the model. Parameters
    before it in the model get their gradients from there.

    Args:
        losses: of the step's micro-batches, on this rank.
    """
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    found = [bad for bucket in trained for bad in _bad_parameters(bucket, order)]
    position, kind = max(found, default=(-1, _FINITE))
    loss_kind = max((_kind(loss) for loss in losses), default=_FINITE)
    mine = torch.tensor([position, kind, loss_kind], dtype=torch.float64, device=collectives.world.device)
    ranks = [
        [int(number) for number in row]
        for row in collectives.gather_small(mine, name="where the gradient is not finite").tolist()
    ]

    position, kind = max((position, kind) for position, kind, _ in ranks)
    bad_losses = [f"{_WORDS[kind]} on rank {rank}" for rank, (_, _, kind) in enumerate(ranks) if kind != _FINITE]
    said_of_losses = f"the loss was {', '.join(bad_losses)}" if bad_losses else "the loss was finite on every rank"
    return f"In the backward it was first {_WORDS[kind]} in {list(order)[position]}; {said_of_losses}"


def _bad_parameters(bucket: TrainedBucket, order: dict[str, int]) -> list[tuple[int, int]]:
    """(place in the model, kind) of each parameter that is not finite within this rank's shard."""
    kinds = [(piece.managed, _kind(piece.values)) for piece in pieces(bucket, GRADIENT)]
    return [(order[managed.names[0]], kind) for managed, kind in kinds if kind != _FINITE]


def _kind(values: torch.Tensor) -> int:
    if values.isnan().any():
        return _NAN
    return _INFINITE if values.isinf().any() else _FINITE
