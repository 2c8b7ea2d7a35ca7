"""The plain models and their loss: GPT, a decoder-only transformer in the shape of GPT-2, and an MLP."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from zerotrain.device.device import lies_on_host
from zerotrain.device.kinds import device_of

# Errors of models about wrong arguments: one sentence with the field, its value and the allowed ones.


def require_at_least(minimum: int, **arguments: object) -> None:
    """Check each argument for a whole number of at least `minimum`; a ValueError names the first other one."""
    for name, value in arguments.items():
        if not isinstance(value, int):
            raise ValueError(f"model.{name}={value} is no whole number; it must be one, at least {minimum}")
        if value < minimum:
            raise ValueError(f"model.{name}={value} is too small; it must be at least {minimum}")


def require_fraction(**arguments: float) -> None:
    """Check each argument for a number in [0, 1); a ValueError names the first other one."""
    for name, value in arguments.items():
        if not 0 <= value < 1:
            raise ValueError(f"model.{name}={value} is out of range; it must be at least 0 and below 1")


# The loss of all language models here.


IGNORED_LABEL = -100
"""Positions with this label count neither in the loss nor in the number of tokens."""


def num_counted(labels: torch.Tensor) -> torch.Tensor:
    """0-dim: how many labels are not ignored, at least 1."""
    return (labels != IGNORED_LABEL).sum().clamp(min=1)


MULTIPLE_ON_GPU = 64
"""GPUs multiply matrices faster whose sides are multiples of 64. GPT-2 has 50,257 tokens: on an H200 its step took
46.1 ms as it is, and 28.8 ms padded (2026-11-27)."""


def with_whole_multiple(weight: torch.Tensor, multiple: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight and the bias of a head that computes a multiple of so many logits.

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
    """Mean cross entropy in nats over the labels but ignored ones, computed in fp32. A module, as torch's own
    losses are: an engine that compiles, compiles them too."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        """Compute it.

        Args:
            logits: (B, T, vocab_size), of any floating dtype.
            labels: (B, T) int64, the token that follows each position, or `IGNORED_LABEL`.
            count: 0-dim, what the sum is divided by; None: the number of those labels.

        Returns:
            0-dim fp32 tensor. Zero where every label is ignored; torch's own mean is nan there.
        """
        logits, labels = logits.float().flatten(0, 1), labels.flatten()
        total = F.cross_entropy(logits, labels, ignore_index=IGNORED_LABEL, reduction="sum")
        return total / (num_counted(labels) if count is None else count)


def chunked(
    loss: MeanCrossEntropy,
    num_chunks: int,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
) -> torch.Tensor:
    """`loss` of the logits `hidden @ weight.T + bias`, computed by chunks of the positions, one at a time.

    The forward computes the gradients too: the backward needs no logits. The gradients of the weight are added
    by chunk, in fp32: they have other bits than without chunks.

    Args:
        hidden: (B, T, hidden_size).
        weight: (vocab_size, hidden_size).
        bias: (vocab_size,), without a gradient.
        labels: (B, T) int64.
    """
    needs_gradient = [tensor.requires_grad and torch.is_grad_enabled() for tensor in (hidden, weight)]
    total: torch.Tensor = _TotalByChunks.apply(hidden, weight, bias, labels, loss, num_chunks, needs_gradient)
    return total / num_counted(labels)


_MANY = 1024
"""The gradients of so many positions add up to numbers in the range of fp16."""


class _TotalByChunks(torch.autograd.Function):
    """The sum over all labels.

    Its gradients are computed before anybody can scale them for fp16. So they are those of a sum, since those of a mean
    may vanish; and a chunk's are divided by a power of two, lest they overflow where many positions agree.
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
        needs_gradient: list[bool],
    ) -> torch.Tensor:
        total, num_rows = torch.zeros((), device=hidden.device), -(-labels.numel() // num_chunks)
        ctx.divisor = 2.0 ** (num_rows // _MANY).bit_length()
        divisor = torch.full_like(total, ctx.divisor)  # no copy that a GPU would be waited for
        of_hidden = torch.empty_like(hidden).flatten(0, 1) if needs_gradient[0] else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_gradient[1] else None
        leaf = weight.detach().requires_grad_(needs_gradient[1])
        begin = 0
        for rows, targets in zip(
            hidden.detach().flatten(0, 1).chunk(num_chunks), labels.flatten().chunk(num_chunks), strict=True
        ):
            rows.requires_grad_(needs_gradient[0])
            with torch.set_grad_enabled(any(needs_gradient)):
                part = loss(F.linear(rows, leaf, bias)[None], targets[None], divisor)
            total += part.detach()
            inputs = [tensor for tensor in (rows, leaf) if tensor.requires_grad]
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


INIT_STD = 0.02


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019): learned positions, pre-norm blocks, biases, head tied to the token embedding.

    Args:
        vocab_size: tokens the model knows.
        max_seq_len: longest sequence forward accepts, in tokens.
        num_layers: blocks.
        num_heads: attention heads of a block; must divide `hidden_size`.
        hidden_size: width of the residual stream; the MLP is four times as wide.
        dropout: probability of dropping an activation in training.
        vocab_multiple: the head computes a multiple of so many logits. Those beyond `vocab_size` take no part in the
            loss; weights and outputs have `vocab_size`. auto: 64 on a GPU, else 1.
        loss_chunks: parts of the positions, for each of which the loss is computed alone: the logits of one part exist
            at a time.

    Raises:
        ValueError: an argument is out of range, or `num_heads` does not divide `hidden_size`.
    """

    next_token_labels = True
    """labels[t] is the token after ids[t]; data whose labels equal its ids is refused."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_seq_len: int,
        num_layers: int,
        num_heads: int,
        hidden_size: int,
        dropout: float = 0.0,
        vocab_multiple: int | str = "auto",
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, max_seq_len=max_seq_len, num_layers=num_layers, num_heads=num_heads)
        require_at_least(1, hidden_size=hidden_size, loss_chunks=loss_chunks)
        if vocab_multiple != "auto":
            require_at_least(1, vocab_multiple=vocab_multiple)
        require_fraction(dropout=dropout)
        if hidden_size % num_heads:
            divisors = [number for number in range(hidden_size, 0, -1) if hidden_size % number == 0]
            nearest = min(divisors, key=lambda divisor: abs(divisor - num_heads))  # the larger of two equally near
            raise ValueError(
                f"model.num_heads={num_heads} does not divide model.hidden_size={hidden_size}; "
                f"choose a number of heads that does, such as {nearest}"
            )
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        self.vocab_multiple, self.loss_chunks = vocab_multiple, loss_chunks
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(max_seq_len, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden_size, num_heads, dropout) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(hidden_size)
        self.loss = MeanCrossEntropy()
        self._initialize_weights()
        # Counted here, while every parameter is whole: an engine may keep only a shard of each later.
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self,
        ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        *,
        position_ids: torch.Tensor | None = None,
        with_outputs: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, or the logits where no labels are given.

        Args:
            ids: (B, T) int64 tokens, T <= max_seq_len.
            labels: (B, T) int64, labels[:, t] the token after ids[:, t], or -100 where there is none to learn.
            position_ids: (B, T) int64 of rows with several examples: each begins at 0, and sees itself alone.
            with_outputs: give the logits beside the loss, detached.

        Returns:
            The mean cross entropy over the labels (0-dim, fp32), or the logits (B, T, vocab_size), or (loss, logits).

        Raises:
            ValueError: a sequence is longer than `max_seq_len`.
        """
        seq_len = ids.shape[1]
        if seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens is longer than model.max_seq_len={self.max_seq_len}")
        positions, masks = torch.arange(seq_len, device=ids.device), list[torch.Tensor]()
        if position_ids is not None:
            positions, example = position_ids, (position_ids == 0).cumsum(1)
            masks = [(example[:, :, None] == example[:, None]).tril()[:, None]]  # (B, 1, T, T)
        hidden = self.dropout(self.wte(ids) + self.wpe(positions))  # (B, T, hidden_size)
        for block in self.blocks:
            hidden = block(hidden, *masks)
        hidden = self.ln_f(hidden)
        multiple = self.vocab_multiple
        if isinstance(multiple, str):  # torch's compiler warns of the cache in device_of, which a plan alone needs
            is_on_host = device_of(hidden.device).is_host if hidden.is_meta else lies_on_host(hidden)
            multiple = 1 if is_on_host else MULTIPLE_ON_GPU
        weight, bias = with_whole_multiple(self.wte.weight, multiple)
        if labels is not None and self.loss_chunks > 1:
            loss = chunked(self.loss, self.loss_chunks, hidden, weight, bias, labels)
            if not with_outputs:
                return loss
            with torch.no_grad():
                return loss, F.linear(hidden, weight, bias)[..., : self.vocab_size]
        logits = F.linear(hidden, weight, bias)  # (B, T, vocab_size or more)
        if labels is None:
            return logits[..., : self.vocab_size]
        loss = self.loss(logits, labels)
        return (loss, logits[..., : self.vocab_size].detach()) if with_outputs else loss

    def _initialize_weights(self) -> None:
        """GPT-2's: N(0, 0.02), zero biases, projections into the residual stream scaled by 1/sqrt(2 num_layers)."""
        residual_std = INIT_STD / math.sqrt(2 * len(self.blocks))
        for name, module in self.named_modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("out_proj") else INIT_STD)
                nn.init.zeros_(module.bias)


class Block(nn.Module):
    """Pre-norm transformer block: attention, then an MLP, each added to the residual stream (B, T, hidden_size)."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size)
        self.attention = CausalSelfAttention(hidden_size, num_heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden_size)
        self.mlp = FeedForward(hidden_size, dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        hidden = hidden + self.attention(self.ln_1(hidden), mask)
        return hidden + self.mlp(self.ln_2(hidden))


class CausalSelfAttention(nn.Module):
    """Multi-head attention: a position sees itself and all earlier ones, or those of a mask (B, 1, T, T)."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        # (B, T, 3 x hidden_size) -> three of (B, num_heads, T, head_size)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None
        )
        return self.residual_dropout(self.out_proj(attended.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """The block's MLP: up to four times the width, GELU (tanh form), back down."""

    def __init__(self, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.in_proj = nn.Linear(hidden_size, 4 * hidden_size)
        self.activation = nn.GELU(approximate="tanh")
        self.out_proj = nn.Linear(4 * hidden_size, hidden_size)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.residual_dropout(self.out_proj(self.activation(self.in_proj(hidden))))


# MLP: a neural n-gram language model, the smallest model to learn text.


class MLP(nn.Module):
    """Predicts the next token from the last `context` tokens (Bengio et al. 2003), with residual hidden layers.

    Args:
        vocab_size: tokens the model knows.
        context: tokens a prediction sees, its own position included.
        hidden_size: width of the token embedding and of the hidden layers.
        num_layers: hidden layers.

    Raises:
        ValueError: an argument is below 1.
    """

    next_token_labels = True
    """labels[t] is the token after ids[t]; data whose labels equal its ids is refused."""

    def __init__(self, *, vocab_size: int, context: int, hidden_size: int, num_layers: int) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, context=context, hidden_size=hidden_size, num_layers=num_layers)
        self.vocab_size, self.context = vocab_size, context
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.in_proj = nn.Linear(context * hidden_size, hidden_size)
        self.blocks = nn.ModuleList(HiddenLayer(hidden_size) for _ in range(num_layers))
        self.ln_f = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)
        self.loss = MeanCrossEntropy()
        # Counted here, while every parameter is whole: an engine may keep only a shard of each later.
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, *, with_outputs: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, or the logits where no labels are given.

        Args:
            ids: (B, T) int64 tokens; before the first one the model sees zeros.
            labels: (B, T) int64, labels[:, t] the token after ids[:, t], or -100 where there is none to learn.
            with_outputs: give the logits beside the loss, detached.

        Returns:
            The mean cross entropy over the labels (0-dim, fp32), or the logits (B, T, vocab_size), or (loss, logits).
        """
        embedded = F.pad(self.wte(ids), (0, 0, self.context - 1, 0))  # (B, context - 1 + T, hidden_size)
        windows = embedded.unfold(1, self.context, 1).flatten(2)  # (B, T, hidden_size x context)
        hidden = self.in_proj(windows)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.ln_f(hidden))
        if labels is None:
            return logits
        loss: torch.Tensor = self.loss(logits, labels)
        return (loss, logits.detach()) if with_outputs else loss


class HiddenLayer(nn.Module):
    """One residual layer: x + Linear(GELU(LayerNorm(x))), (..., hidden_size) in and out."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(hidden_size)
        self.linear = nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.linear(F.gelu(self.ln(hidden)))
