"""The operations of a model, counted without computing them, and the share of the device's peak they take."""

import pytest
import torch
from torch import nn

from zerotrain.models import GPT, MLP
from zerotrain.training.clock import ModelFlops, count_flops

SEQ_LEN = 128
SEQUENCE = (torch.zeros(1, SEQ_LEN, dtype=torch.int64), torch.zeros(1, SEQ_LEN, dtype=torch.int64))
NUM_LAYERS, HIDDEN_SIZE = 4, 128


class OneProduct(nn.Module):
    """One matrix product a position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.linear(self.embedding(ids)).mean()


class Choosing(OneProduct):
    """Looks at its values to decide what to compute."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, labels) if ids.max().item() > 3 else self.embedding(ids).mean()


def on_meta(make: type[nn.Module], **arguments: int) -> nn.Module:
    with torch.device("meta"):
        return make(**arguments)


def test_the_operations_of_a_gpt_are_those_of_the_palm_formula():
    model = on_meta(
        GPT, vocab_size=256, max_seq_len=SEQ_LEN, num_layers=NUM_LAYERS, num_heads=4, hidden_size=HIDDEN_SIZE
    )
    assert isinstance(model, GPT)
    num_weights = model.num_parameters - SEQ_LEN * HIDDEN_SIZE  # the positions are looked up, not multiplied with
    per_token = 6 * num_weights + 12 * NUM_LAYERS * HIDDEN_SIZE * SEQ_LEN
    assert count_flops(model, SEQUENCE) == pytest.approx(SEQ_LEN * per_token, rel=0.02)


def test_the_operations_of_a_model_without_attention_are_six_for_each_weight_of_a_product():
    model = on_meta(MLP, vocab_size=256, context=4, hidden_size=64, num_layers=2)
    num_weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    assert count_flops(model, SEQUENCE) == 6 * num_weights * SEQ_LEN


def test_a_product_is_counted_once_forward_and_twice_backward():
    assert count_flops(on_meta(OneProduct), SEQUENCE) == 3 * 2 * 16 * 16 * SEQ_LEN


def test_a_forward_that_needs_values_has_no_count():
    assert count_flops(on_meta(Choosing), SEQUENCE) is None


def test_the_utilization_is_the_share_of_the_peak():
    assert ModelFlops(per_sequence=2e9, peak_per_s=1e12).utilization(sequences_per_s=100.0) == pytest.approx(0.2)
