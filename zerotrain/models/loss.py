"""The loss all language models here share."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

IGNORED_LABEL = -100
"""Positions with this label count neither in the loss nor in the number of tokens."""


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
    """Mean cross entropy in nats over the labels that are not ignored, computed in fp32.

    Args:
        logits: (B, T, vocab_size), of any floating dtype.
        labels: (B, T) int64, the token that follows each position, or `IGNORED_LABEL`.
        count: 0-dim, what the sum is divided by; None: the number of those labels.

    Returns:
        0-dim fp32 tensor. Zero where every label is ignored; torch's own mean is nan there.
    """
    total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    return total / (num_counted(labels) if count is None else count)


def num_counted(labels: torch.Tensor) -> torch.Tensor:
    """0-dim: how many labels are not ignored, at least 1."""
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


def with_whole_multiple(weight: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the bias of a head that computes a multiple of so many logits: GPUs multiply matrices faster whose
    sides are multiples of 64, and GPT-2 has 50,257 tokens.

    Args:
        weight: (vocab_size, hidden_size).

    Returns:
        `weight` with further rows of zeros, a copy for each forward, and a bias that is 0 for each token and minus
        infinity beyond: the logits there take no part in a softmax, and get no gradient. `weight` itself and None where
        nothing is missing.
    """
    vocab_size = weight.shape[0]
    if not (missing := -vocab_size % multiple):
        return weight, None
    return F.pad(weight, (0, 0, 0, missing)), F.pad(weight.new_zeros(vocab_size), (0, missing), value=-math.inf)


class MeanCrossEntropy(nn.modules.loss._Loss):
    """`mean_cross_entropy` as a module, as torch's own losses are: an engine that compiles, compiles them too."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """See `mean_cross_entropy`."""
        return mean_cross_entropy(logits, labels, count)


def chunked(
    loss: MeanCrossEntropy,
    num_chunks: int,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
) -> torch.Tensor:
    """`loss` of the logits `hidden @ weight.T + bias`, of which there is one chunk of the positions at a time.

    The forward computes the gradients too, so that the backward needs no logits. The gradients of the weight are added
    by chunk, in fp32: they have other bits than without chunks.

    Args:
        hidden: (B, T, hidden_size).
        weight: (vocab_size, hidden_size).
        bias: (vocab_size,), without a gradient.
        labels: (B, T) int64.
    """
    wanted = [each.requires_grad and torch.is_grad_enabled() for each in (hidden, weight)]
    total: torch.Tensor = _TotalByChunks.apply(hidden, weight, bias, labels, loss, num_chunks, wanted)
    return total / num_counted(labels)


_MANY = 1024
"""Positions whose gradients add up to numbers that fp16 can hold."""


class _TotalByChunks(torch.autograd.Function):
    """The sum over all labels.

    Its gradients are computed before anybody can scale them for fp16. So they are not those of a mean, which may
    vanish; and a chunk's are divided by a power of two, so that they do not overflow where many positions agree.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        loss: MeanCrossEntropy,
        num_chunks: int,
        wanted: list[bool],
    ) -> torch.Tensor:
        total, num_rows = torch.zeros((), device=hidden.device), -(-labels.numel() // num_chunks)
        ctx.divisor = 2.0 ** (num_rows // _MANY).bit_length()
        divisor = torch.full_like(total, ctx.divisor)  # no copy that a GPU would be waited for
        of_hidden = torch.empty_like(hidden).flatten(0, 1) if wanted[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        leaf = weight.detach().requires_grad_(wanted[1])
        begin = 0
        for rows, targets in zip(
            hidden.detach().flatten(0, 1).chunk(num_chunks), labels.flatten().chunk(num_chunks), strict=True
        ):
            rows.requires_grad_(wanted[0])
            with torch.set_grad_enabled(any(wanted)):
                part = loss(F.linear(rows, leaf, bias)[None], targets[None], divisor)
            total += part.detach()
            inputs = [each for each in (rows, leaf) if each.requires_grad]
            gradients = [*torch.autograd.grad(part, inputs)] if inputs else []
            if of_weight is not None:
                of_weight += gradients.pop()
            if of_hidden is not None:
                of_hidden[begin : begin + len(rows)] = gradients.pop()
            begin += len(rows)
        ctx.save_for_backward(None if of_hidden is None else of_hidden.view_as(hidden), of_weight)
        ctx.dtype = weight.dtype
        return total * ctx.divisor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_hidden, of_weight = ctx.saved_tensors
        factor = factor * ctx.divisor
        if of_hidden is not None:
            of_hidden = (of_hidden.float() * factor).to(of_hidden.dtype)  # else the factor would be rounded to 16 bits
        if of_weight is not None:
            of_weight = (of_weight * factor).to(ctx.dtype)
        return of_hidden, of_weight, None, None, None, None, None
