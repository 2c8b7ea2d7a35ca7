"""Large models are never whole anywhere: at stage 3 a function that builds the model gives shards."""

import functools
from pathlib import Path

import pytest
import torch
from cases import OPTIMIZERS, memory_nbytes, reset_peak, run_over
from torch import nn

import zerotrain

NUM_LAYERS, HIDDEN = 16, 768
UNIT_NBYTES = 4 * HIDDEN * 2 * HIDDEN
MODEL_NBYTES = (NUM_LAYERS + 1) * UNIT_NBYTES
ELSE_NBYTES = 16 * 2**20
"""For what a first use of torch and gloo takes, and what malloc does not give back."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, HIDDEN)
        self.down = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Large(nn.Module):
    """Of 80 MB; drawn anew when all of it is there, as GPT-2 and most models of Hugging Face are."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.apply(self.reset)

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)


def peak_nbytes(stage: int) -> dict[str, int]:
    """On each rank: the most memory while the engine was built and its weights were hashed, above what there was."""
    small = functools.partial(nn.Linear, 8, 8)  # brings in what torch imports when first used
    zerotrain.build_engine(small, optimizer=OPTIMIZERS["adamw"], zero=zerotrain.ZeroConfig(stage=3)).weights_sha256()
    before = reset_peak()
    engine = zerotrain.build_engine(
        Large,
        optimizer=OPTIMIZERS["adamw"],
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=UNIT_NBYTES / 2**20),
    )
    built = memory_nbytes("VmHWM") - before
    engine.weights_sha256()
    return {"built": built, "hashed": memory_nbytes("VmHWM") - before}


@pytest.mark.slow
@pytest.mark.case(
    "models: Models and optimizers",
    "a model several times the size of a unit, given as a function",
    "at stage 3 a rank peaks at its shard and a few units",
)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_the_peak_of_a_rank_at_stage_3_is_its_shard_and_a_few_units() -> None:
    allowed = MODEL_NBYTES // 4 + MODEL_NBYTES // 4 + 3 * UNIT_NBYTES + ELSE_NBYTES  # parameters and gradients
    assert allowed < 0.95 * MODEL_NBYTES
    sharded, replicated = run_over([3, 2], peak_nbytes, 4)
    assert [peak for peak in sharded if max(peak.values()) > allowed] == []
    assert all(peak["built"] > MODEL_NBYTES for peak in replicated)
