"""The loss all language models here share."""

import torch
import torch.nn.functional as F
from torch import nn

IGNORED_LABEL = -100
"""Positions with this label count neither in the loss nor in the number of tokens."""


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats over the labels that are not ignored, computed in fp32.

    Args:
        logits: (B, T, vocab_size), of any floating dtype.
        labels: (B, T) int64, the token that follows each position, or `IGNORED_LABEL`.

    Returns:
        0-dim fp32 tensor. Zero where every label is ignored; torch's own mean is nan there.
    """
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / (labels != IGNORED_LABEL).sum().clamp(min=1)


class MeanCrossEntropy(nn.modules.loss._Loss):
    """`mean_cross_entropy` as a module, as torch's own losses are: an engine that compiles, compiles them too."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `mean_cross_entropy`."""
        return mean_cross_entropy(logits, labels)
