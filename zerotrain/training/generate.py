"""Text from a model: one token after another."""

import torch

from zerotrain.engine.engine import ZeroEngine


@torch.no_grad()
def generate(
    *,
    engine: ZeroEngine,
    prompt: torch.Tensor,
    num_tokens: int,
    max_seq_len: int,
    seed: int,
    temperature: float = 0.8,
    top_k: int = 50,
) -> torch.Tensor:
    """Continue a prompt. Collective: every rank calls the same number of forwards, as sharded parameters need.

    Args:
        engine: called as engine(ids (1, T)) for logits (1, T, vocab_size).
        prompt: (num_prompt_tokens,) int64, at least one token, on the engine's device.
        num_tokens: how many to add.
        max_seq_len: tokens the model can look back on.
        seed: the same seed and weights give the same text, on every rank.
        temperature: below 1 prefers likely tokens; must be above 0.
        top_k: choose among this many likeliest tokens.

    Returns:
        (num_prompt_tokens + num_tokens,) int64, the prompt included.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = prompt
    engine.eval()
    for _ in range(num_tokens):
        logits = engine(ids[None, -max_seq_len:])[0, -1].float().cpu()  # (vocab_size,)
        top = (logits / temperature).topk(min(top_k, len(logits)))
        choice = torch.multinomial(top.values.softmax(dim=0), num_samples=1, generator=generator)
        ids = torch.cat([ids, top.indices[choice].to(ids.device)])
    engine.train()
    return ids
