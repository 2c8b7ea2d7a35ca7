"""Configs of small runs, as Hydra composes them."""

from typing import Any

from zerotrain.config.schema import Config, TrainConfig

GPT = {
    "_target_": "zerotrain.models.GPT",
    "vocab_size": 256,
    "max_seq_len": 16,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_size": 8,
}
ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
CONSTANT = {"_target_": "zerotrain.training.constant", "_partial_": True}
SYNTHETIC = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 16, "vocab_size": 256, "num_sequences": 64}
NUM_SEQUENCES = 1000


def config(**groups: Any) -> Config:
    return Config(**({"model": GPT, "data": SYNTHETIC, "optimizer": ADAMW, "scheduler": COSINE} | groups))


class Rows:
    """Sequences of 16 tokens each."""

    tokens_per_sequence = 16

    def __len__(self) -> int:
        return NUM_SEQUENCES


def config_with(**train: Any) -> Config:
    return Config(train=TrainConfig(**{"max_steps": None, "micro_batch_size": 4} | train))
