"""Sequences made up on the spot, for benchmarks and tests without files."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from zerotrain.data.batches import require_at_least

MAX_STRIDE = 8


class SyntheticTokens:
    """Counting sequences: a random first token, then a random stride, modulo the vocabulary.

    The second token gives the stride away, so a model that looks back learns them to a loss near zero; one that sees
    only the last token stays at ln(8). Sequence i is a function of i, seq_len and vocab_size alone.

    Args:
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows.
        num_sequences: training sequences; validation has a tenth as many others, at least one.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(self, *, seq_len: int, vocab_size: int, num_sequences: int = 10000) -> None:
        require_at_least("seq_len", seq_len, 1)
        require_at_least("vocab_size", vocab_size, 2)
        require_at_least("num_sequences", num_sequences, 1)
        self.vocab_size = vocab_size
        self.train = CountingSequences(0, num_sequences, seq_len, vocab_size)
        self.validation = CountingSequences(num_sequences, max(1, num_sequences // 10), seq_len, vocab_size)


@dataclass(eq=False)
class CountingSequences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The `num_sequences` counting sequences from number `start` on."""

    draws = False  # nothing of the global generators
    start: int
    num_sequences: int
    tokens_per_sequence: int
    vocab_size: int

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make sequence `index`: (ids, labels), each (seq_len,) int64, labels one token later."""
        ids, labels = self.rows([index])
        return ids[0], labels[0]

    def rows(self, indices: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a batch of sequences: (ids, labels), each (len(indices), seq_len) int64."""
        for index in indices:
            if not 0 <= index < self.num_sequences:
                raise IndexError(f"sequence {index} of {self.num_sequences}")
        # Raw bits, which numpy promises to be the same in all its versions.
        bits = [np.random.Philox(key=self.start + index).random_raw(2).tolist() for index in indices]
        starts = torch.tensor([[start % self.vocab_size] for start, _ in bits])
        strides = torch.tensor([[1 + stride % MAX_STRIDE] for _, stride in bits])
        tokens = (starts + torch.arange(self.tokens_per_sequence + 1) * strides) % self.vocab_size
        return tokens[:, :-1].clone(), tokens[:, 1:].contiguous()
