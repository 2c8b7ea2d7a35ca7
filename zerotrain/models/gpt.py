"""GPT: a decoder-only transformer in the shape of GPT-2."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from zerotrain.models.arguments import require_at_least, require_fraction
from zerotrain.models.loss import MeanCrossEntropy, chunked, with_whole_multiple

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
            loss; weights and outputs have `vocab_size`.
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
        vocab_multiple: int = 1,
        loss_chunks: int = 1,
    ) -> None:
        super().__init__()
        require_at_least(1, vocab_size=vocab_size, max_seq_len=max_seq_len, num_layers=num_layers)
        require_at_least(1, vocab_multiple=vocab_multiple, loss_chunks=loss_chunks)
        require_at_least(1, num_heads=num_heads, hidden_size=hidden_size)
        require_fraction(dropout=dropout)
        if hidden_size % num_heads:
            raise ValueError(
                f"model.num_heads={num_heads} does not divide model.hidden_size={hidden_size}; "
                f"choose a number of heads that does, such as {_nearest_divisor(hidden_size, num_heads)}"
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
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, *, with_outputs: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, or the logits where no labels are given.

        Args:
            ids: (B, T) int64 tokens, T <= max_seq_len.
            labels: (B, T) int64, labels[:, t] the token after ids[:, t], or -100 where there is none to learn.
            with_outputs: give the logits beside the loss, detached.

        Returns:
            The mean cross entropy over the labels (0-dim, fp32), or the logits (B, T, vocab_size), or (loss, logits).

        Raises:
            ValueError: a sequence is longer than `max_seq_len`.
        """
        seq_len = ids.shape[1]
        if seq_len > self.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} tokens is longer than model.max_seq_len={self.max_seq_len}")
        positions = torch.arange(seq_len, device=ids.device)
        hidden = self.dropout(self.wte(ids) + self.wpe(positions))  # (B, T, hidden_size)
        for block in self.blocks:
            hidden = block(hidden)
        hidden = self.ln_f(hidden)
        weight, bias = with_whole_multiple(self.wte.weight, self.vocab_multiple)
        loss: torch.Tensor
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

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.ln_1(hidden))
        return hidden + self.mlp(self.ln_2(hidden))


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before it."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        # (B, T, 3 x hidden_size) -> three of (B, num_heads, T, head_size)
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv_proj(hidden).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
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


def _nearest_divisor(number: int, wanted: int) -> int:
    """The divisor of `number` nearest to `wanted`, the larger of two equally near."""
    divisors = [candidate for candidate in range(number, 0, -1) if number % candidate == 0]
    return min(divisors, key=lambda divisor: abs(divisor - wanted))
