"""Models whose losses are means over different things, and rows for each."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from zerotrain.training.losses import BinaryCrossEntropy, CrossEntropy, add_loss

CLASSES, LENGTH, ROWS = 7, 6, 8


class Tagger(nn.Module):
    """(B, T) tokens to (B, T, CLASSES) logits, and a loss of these and the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(self.embedding(ids).tanh())
        return logits if labels is None else self.loss(logits, labels)

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Shifting(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits[:, :-1], labels[:, 1:])


class ShiftingSays(Shifting):
    loss_over = "shifted_labels"


class PerRow(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return (losses.sum(dim=1) / (labels != -100).sum(dim=1)).mean()


class Summing(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 32


class Weighed(Tagger):
    """With weights of classes, of which torch's mean takes the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.linspace(0.3, 2.1, CLASSES))

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.weight)


class WeighedCounts(Weighed):
    def loss_count(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        return torch.linspace(0.3, 2.1, CLASSES)[labels[labels != -100]].sum().item()


class OtherIgnored(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


class OtherIgnoredCounts(OtherIgnored):
    def loss_count(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (labels != 0).sum()


class Unsigned(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits, labels.long())


class Contrastive(Tagger):
    """Each row is told from the others of its batch, so that it is no mean over rows."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        vectors = logits.flatten(1)
        return F.cross_entropy(vectors @ vectors.T, torch.arange(len(vectors)))


class Balanced(Tagger):
    """The mean over labels, and a small part that balances the whole batch, as a mixture of experts has it."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits, labels) + logits.softmax(dim=-1).mean(dim=(0, 1)).square().sum() / 10


class MaskedMean(Tagger):
    """Without a label that counts it is 0, not nan."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return (losses + 1) / (labels != -100).sum().clamp(min=1)


class Zeroing(Tagger):
    """So is it here, and else torch's mean."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return losses / (labels != -100).sum().clamp(min=1)


class Narrow(Tagger):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().loss(logits, labels).bfloat16()


class WithLogits(Tagger):
    """Returns its loss beside its logits."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return logits, super().loss(logits, labels)


class TwoNumbers(Tagger):
    """Returns its loss beside a part of it."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = super().loss(logits, labels)
        return loss, loss / 2


class LogitsAlone(Tagger):
    """Returns its logits in evaluation mode."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return super().loss(logits, labels) if self.training else logits


class Drawing(Tagger):
    """Its loss follows from numbers that it draws, in evaluation mode too, as in diffusion."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (logits + torch.randn_like(logits)).square().mean()


class Lengths(Tagger):
    """CTC: the mean over rows of each loss by the length of its target; labels are padded with 0 to their longest."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, num_labels: torch.Tensor) -> torch.Tensor:
        logits = super().forward(ids).log_softmax(dim=-1).transpose(0, 1)
        return F.ctc_loss(logits, labels, torch.full((len(ids),), LENGTH), num_labels)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(LENGTH, 8), nn.Linear(8, LENGTH)

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((self.head(self.hidden(features).tanh()) - target) / 100).square().mean()


class Choices(Regression):
    """Several classes at once, of which labels are bools, or shares of them."""

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.hidden(features).tanh())
        return F.binary_cross_entropy_with_logits(logits, labels.float())


def _drawn(row: int) -> torch.Generator:
    return torch.Generator().manual_seed(row)


def ragged(row: int) -> tuple[torch.Tensor, ...]:
    """Labels of which the last are ignored, and the first of some."""
    ids, labels = torch.randint(1, CLASSES, (2, LENGTH), generator=_drawn(row))
    labels[1 + row * 3 % LENGTH :] = -100
    if row % 2 and row % LENGTH > 1:
        labels[0] = -100
    labels[1] = ids[0]
    return ids, labels


def unlabelled(row: int) -> tuple[torch.Tensor, ...]:
    ids, labels = ragged(row)
    return ids, labels.fill_(-100)


def in_turn(row: int) -> tuple[torch.Tensor, ...]:
    """Rows of one class after rows of another."""
    ids, labels = ragged(row)
    return ids, torch.where(labels == -100, labels, row % 4)


def with_zeros(row: int) -> tuple[torch.Tensor, ...]:
    ids, labels = ragged(row)
    return ids, labels.clamp(min=0)


def equal(row: int) -> tuple[torch.Tensor, ...]:
    ids, labels = torch.randint(CLASSES, (2, LENGTH), generator=_drawn(row))
    return ids, labels


def of_bytes(row: int) -> tuple[torch.Tensor, ...]:
    ids, labels = with_zeros(row)
    return ids, labels.to(torch.uint8)


def targets(row: int) -> tuple[torch.Tensor, ...]:
    features, target = torch.randn(2, LENGTH, generator=_drawn(row))
    target[: row % 4] = -100.0
    return features, target


def choices(row: int) -> tuple[torch.Tensor, ...]:
    features, target = targets(row)
    return features, target > 0


def shares(row: int) -> tuple[torch.Tensor, ...]:
    features, target = targets(row)
    return features, target.sigmoid()


def spoken(row: int) -> tuple[torch.Tensor, ...]:
    ids, labels = torch.randint(1, CLASSES, (2, LENGTH), generator=_drawn(row))
    return ids, labels[: 1 + row % 3]


def padded(items: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    ids, labels = zip(*items, strict=True)
    return (
        torch.stack(ids),
        nn.utils.rnn.pad_sequence(list(labels), batch_first=True),
        torch.tensor([len(each) for each in labels]),
    )


class Outputs(nn.Module):
    """Returns its outputs: (B, LENGTH) features to (B, CLASSES)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(LENGTH, 8), nn.Linear(8, CLASSES)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(features).tanh())


class Logits(Tagger):
    """Returns (B, T, CLASSES) logits alone, and has a count of its own that is another's."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids)

    def loss_count(self, ids: torch.Tensor) -> float:
        return 17.0


def per_row(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    losses = F.cross_entropy(outputs.transpose(1, 2), batch[1], reduction="none")
    return (losses.sum(dim=1) / (batch[1] != -100).sum(dim=1)).mean()


class Sampled:
    """A mean by the weights of samples, with its own count."""

    def __call__(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        losses = (outputs - batch["target"]).square().mean(dim=1)
        return (losses * batch["weight"]).sum() / batch["weight"].sum()

    def loss_count(self, batch: dict[str, Any]) -> torch.Tensor:
        return batch["weight"].sum()


def classes(row: int) -> tuple[torch.Tensor, ...]:
    features = torch.randn(LENGTH, generator=_drawn(row))
    return features, torch.tensor(row * 5 % CLASSES, dtype=torch.int32)


def shares_of_classes(row: int) -> tuple[torch.Tensor, ...]:
    features, target = torch.randn(2, CLASSES, generator=_drawn(row))
    return features[:LENGTH], target.softmax(dim=0)


def several(row: int) -> tuple[torch.Tensor, ...]:
    features, target = shares_of_classes(row)
    return features, target > 0.1


def weighed_rows(row: int) -> dict[str, torch.Tensor]:
    features, target = shares_of_classes(row)
    return {"features": features, "target": target, "weight": torch.tensor(float(row % 3))}


@dataclass(frozen=True)
class Kind:
    """A model with rows for it."""

    model: type[nn.Module]
    row: Callable[[int], tuple[torch.Tensor, ...]]
    loss_over: str = "auto"
    """What fits."""
    refused: str | None = None
    """What is refused."""
    instead: str = ""
    """What the refusal names."""
    collate: Any = None
    loss: Callable[[], Any] | None = None
    """Makes the loss beside a model that returns outputs."""
    plain: Callable[[Any, Any], torch.Tensor] | None = None
    """The loss of outputs and a batch in plain PyTorch."""

    def batch(self, rows: range = range(ROWS)) -> Any:
        return (self.collate or torch.utils.data.default_collate)([self.row(row) for row in rows])

    def made(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model()
        if self.loss is not None:
            add_loss(model, self.loss(), None)
        return model

    def trained(self, num_steps: int, lr: float, num_rows: int) -> tuple[dict[str, torch.Tensor], float]:
        """(weights, loss) after steps of plain PyTorch over all rows at once."""
        torch.manual_seed(0)
        model, batch = self.model(), self.batch(range(num_rows))

        def loss() -> torch.Tensor:
            if self.plain is None:
                return model(*batch)
            return self.plain(model(batch["features"] if isinstance(batch, dict) else batch[0]), batch)

        for _ in range(num_steps):
            model.zero_grad()
            loss().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= lr * parameter.grad
        return copy.deepcopy(model.state_dict()), loss().item()


ALONE = "labels, shifted_labels, rows and sum fit no better; give"
KINDS = {
    "labels": Kind(Tagger, ragged, refused="rows", instead="train.loss_over=labels fits"),
    "shifted labels": Kind(Shifting, ragged, "shifted_labels", "auto", "train.loss_over=shifted_labels fits"),
    "shifted labels, as it says": Kind(ShiftingSays, ragged, "auto", "labels", "train.loss_over=shifted_labels fits"),
    "a sum": Kind(Summing, ragged, "sum", "auto", "train.loss_over=sum fits"),
    "no sum": Kind(Tagger, ragged, "labels", "sum", "train.loss_over=labels fits"),
    "rows": Kind(PerRow, ragged, "rows", "auto", "train.loss_over=rows fits"),
    "class weights": Kind(WeighedCounts, ragged, "auto", "labels", "train.loss_over=model fits"),
    "class weights of equal rows": Kind(WeighedCounts, equal, "auto", "rows", "train.loss_over=model fits"),
    "another ignored label": Kind(OtherIgnoredCounts, with_zeros, "model", "labels", "train.loss_over=model fits"),
    "unsigned labels": Kind(Unsigned, of_bytes),
    "targets of -100.0": Kind(Regression, targets),
    "bool labels": Kind(Choices, choices),
    "soft labels": Kind(Choices, shares),
    "CTC": Kind(Lengths, spoken, "rows", "auto", "train.loss_over=rows fits", padded),
}
CLASS_WEIGHTS = [0.2, 1.0, 1.7, 3.0, 0.5, 2.0, 0.9]
CONFIGURED = {
    "classes": Kind(Outputs, classes, loss=CrossEntropy, plain=lambda out, rows: F.cross_entropy(out, rows[1].long())),
    "weights of classes": Kind(
        Logits,
        with_zeros,
        loss=lambda: CrossEntropy(weight=CLASS_WEIGHTS, ignore_index=0, label_smoothing=0.1),
        plain=lambda out, rows: F.cross_entropy(
            out.transpose(1, 2), rows[1], torch.tensor(CLASS_WEIGHTS), ignore_index=0, label_smoothing=0.1
        ),
    ),
    "shares of classes": Kind(
        Outputs, shares_of_classes, loss=CrossEntropy, plain=lambda out, rows: F.cross_entropy(out, rows[1])
    ),
    "squares": Kind(Outputs, shares_of_classes, loss=nn.MSELoss, plain=lambda out, rows: F.mse_loss(out, rows[1])),
    "several classes": Kind(
        Outputs,
        several,
        loss=lambda: BinaryCrossEntropy(pos_weight=CLASS_WEIGHTS),
        plain=lambda out, rows: F.binary_cross_entropy_with_logits(
            out, rows[1].float(), pos_weight=torch.tensor(CLASS_WEIGHTS)
        ),
    ),
    "a sum of torch": Kind(
        Outputs,
        shares_of_classes,
        loss=lambda: nn.HuberLoss(reduction="sum", delta=0.01),
        plain=lambda out, rows: F.huber_loss(out, rows[1], reduction="sum", delta=0.01),
    ),
    "a function": Kind(Logits, ragged, "rows", loss=lambda: per_row, plain=per_row),
    "a function's count": Kind(Outputs, weighed_rows, loss=Sampled, plain=Sampled()),
}
"""Losses beside a model that returns outputs."""
NO_FIT = {
    "class weights": Kind(Weighed, ragged, refused="auto", instead=f"{ALONE} Weighed a method loss_count"),
    "another ignored label": Kind(OtherIgnored, with_zeros, refused="auto", instead=f"{ALONE} OtherIgnored a method"),
    "a part of the batch": Kind(Balanced, ragged, refused="auto", instead="train.loss_over=micro_batches, labels or"),
    "rows that act on each other": Kind(Contrastive, ragged, refused="auto", instead="train.loss_over=micro_batches"),
}


class Items(list[Any]):
    """Rows that say how many labels each has."""

    tokens_per_sequence: int | None = None


class Rows:
    """Data of the same rows to train and to validate, of one of `KINDS` or `NO_FIT`."""

    def __init__(self, kind: str, fits: bool = True, num_rows: int | None = None, validates: bool = True) -> None:
        kinds = KINDS | CONFIGURED if fits else NO_FIT
        self.train = self.validation = Items(kinds[kind].row(row) for row in range(num_rows or ROWS))
        self.train.tokens_per_sequence = LENGTH if kinds[kind].row is equal else None
        if not validates:
            self.validation = Items()


class Averaging(Tagger):
    """Its logits depend on the padding of a batch."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        logits = super().forward(ids)
        logits = logits + logits.mean(dim=1, keepdim=True)
        return logits if labels is None else self.loss(logits, labels)


class FromZero(PerRow):
    """Of a last layer of zeros all losses are the same."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)


class Broken(Tagger):
    def loss_count(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        return -float(len(ids))


class Fails(PerRow):
    """Cannot compute here, as what needs a GPU."""

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel")


def masked(items: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """Draws the tokens to learn of a batch."""
    ids, labels = torch.utils.data.default_collate(items)
    left_out = torch.rand(labels.shape) < 0.4
    left_out[:, 1] = False
    return ids, labels.masked_fill(left_out, -100)


def cut(items: list[tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    ids, labels = torch.utils.data.default_collate(items)
    length = 1 + int((labels != -100).any(dim=0).nonzero().max())
    return ids[:, :length], labels[:, :length]
