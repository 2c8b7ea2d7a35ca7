"""MLP: a neural n-gram language model, the smallest model that learns text."""

import torch
import torch.nn.functional as F
from torch import nn

from zerotrain.models.arguments import require_at_least
from zerotrain.models.loss import MeanCrossEntropy


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
