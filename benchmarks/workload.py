"""What every engine is given alike: the model's size, the data, the number of ranks and steps."""

from dataclasses import dataclass, replace

import torch

from zerotrain.data import SyntheticTokens
from zerotrain.models import GPT

LEARNING_RATE = 3e-4
NUM_SEQUENCES = 16
"""Few, so that they are learnt within a benchmark: the loss falls only if the work was done."""


@dataclass(frozen=True)
class Size:
    """A GPT and the micro-batch it is trained with."""

    vocab_size: int
    num_layers: int
    num_heads: int
    hidden_size: int
    max_seq_len: int
    seq_len: int
    """Tokens of a sequence of the benchmark."""
    micro_batch_size: int
    """Sequences per rank in one forward and backward."""
    vocab_multiple: int = 1
    loss_chunks: int = 1
    """Both as `GPT` takes them."""


RAGGED = Size(50257, 12, 12, 768, max_seq_len=1024, seq_len=1024, micro_batch_size=12)
"""With the vocabulary that GPT-2 has, of no multiple of 64 tokens."""
SIZES = {
    "tiny": Size(256, 2, 2, 32, max_seq_len=16, seq_len=16, micro_batch_size=2),
    "13.9m": Size(8192, 6, 6, 384, max_seq_len=256, seq_len=128, micro_batch_size=2),
    "100m": Size(16384, 12, 12, 768, max_seq_len=256, seq_len=128, micro_batch_size=2),
    "gpt2": Size(50304, 12, 12, 768, max_seq_len=1024, seq_len=1024, micro_batch_size=12),
    "gpt2_ragged": RAGGED,
    "gpt2_padded": replace(RAGGED, vocab_multiple=64),
    "gpt2_chunked": replace(RAGGED, vocab_multiple=64, loss_chunks=8),
    "gpt2_medium": Size(50304, 24, 16, 1024, max_seq_len=1024, seq_len=1024, micro_batch_size=12),
    "gpt2_large": Size(50304, 36, 20, 1280, max_seq_len=1024, seq_len=1024, micro_batch_size=12),
}


@dataclass(frozen=True)
class Workload:
    """One training that every engine runs."""

    size: str = "13.9m"
    """A key of SIZES."""
    precision: str = "fp32"
    """fp32 or bf16."""
    num_ranks: int = 2
    num_micro_batches: int = 1
    """Micro-batches accumulated in one optimizer step."""
    num_warmup_steps: int = 3
    """Steps before the clock starts."""
    num_steps: int = 8
    """Steps on the clock."""
    bucket_mb: float | str = "auto"
    """MiB of our engine's buckets, or auto: 25 on a CPU, which is also DDP's, and a unit on a GPU."""
    device: str = "cpu"
    """cpu (gloo, one thread per rank) or cuda (NCCL)."""
    compiled: bool = False
    """Whether torch.compile is used, in the way each engine documents."""
    max_grad_norm: float | None = None
    """Of the whole gradient, which is clipped to it; None: it is not."""
    seed: int = 0

    @property
    def shape(self) -> Size:
        return SIZES[self.size]

    @property
    def num_tokens(self) -> int:
        """Tokens of all ranks in one optimizer step."""
        return self.num_ranks * self.num_micro_batches * self.shape.micro_batch_size * self.shape.seq_len

    def build_model(self, device: torch.device) -> GPT:
        """The GPT in fp32, with the same initial weights on every rank and under every engine."""
        shape = self.shape
        torch.manual_seed(self.seed)
        with device:
            return GPT(
                vocab_size=shape.vocab_size,
                max_seq_len=shape.max_seq_len,
                num_layers=shape.num_layers,
                num_heads=shape.num_heads,
                hidden_size=shape.hidden_size,
                vocab_multiple=shape.vocab_multiple,
                loss_chunks=shape.loss_chunks,
            )

    def micro_batches(self, step: int, rank: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What `rank` reads in `step`: (ids, labels) of each micro-batch, each (micro_batch_size, seq_len) int64."""
        shape = self.shape
        data = SyntheticTokens(seq_len=shape.seq_len, vocab_size=shape.vocab_size, num_sequences=NUM_SEQUENCES)
        micro_batches = []
        for index in range(self.num_micro_batches):
            first = ((step * self.num_micro_batches + index) * self.num_ranks + rank) * shape.micro_batch_size
            rows = [data.train[(first + row) % NUM_SEQUENCES] for row in range(shape.micro_batch_size)]
            ids, labels = (torch.stack(column).to(device) for column in zip(*rows, strict=True))
            micro_batches.append((ids, labels))
        return micro_batches
