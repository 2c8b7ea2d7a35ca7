"""Text from a model: one token after another."""

from typing import Any

import torch

from zerotrain.engine.engine import ZeroEngine
from zerotrain.training.callbacks.evaluation import in_evaluation_mode

LEAST_TEMPERATURE = 1e-20
"""Logits that are divided by less may be no numbers, and only the likeliest token is drawn long before."""


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
    stop_token: int | None = None,
) -> torch.Tensor:
    """Continue a prompt. Collective: all ranks call it, each with a prompt, a length and a seed of its own.

    Args:
        engine: called as engine(ids (1, T)) for logits (1, T, vocab_size).
        prompt: (num_prompt_tokens,) int64, at least one token, on the engine's device.
        num_tokens: how many to add at most.
        max_seq_len: tokens the model can look back on.
        seed: the same seed and weights give the same text, on every rank.
        temperature: below 1 prefers likely tokens; must be above 0.
        top_k: choose among this many likeliest tokens.
        stop_token: ends the text; None: num_tokens are added.

    Returns:
        (num_prompt_tokens + added tokens,) int64, the prompt and the stop token included.
    """
    generator = torch.Generator().manual_seed(seed)
    ids, num_left = prompt, num_tokens
    with in_evaluation_mode(engine):
        while engine.any_rank(num_left > 0):
            # A rank that is done calls on: where parameters are sharded, the others need its part of them.
            seen = ids[-max_seq_len:] if num_left > 0 else prompt[:1]
            logits = engine(seen[None])[0, -1].float().cpu()  # (vocab_size,)
            if num_left > 0:
                token = next_token(logits, temperature=temperature, top_k=top_k, generator=generator).to(ids.device)
                ids = torch.cat([ids, token])
                num_left = 0 if token.item() == stop_token else num_left - 1
    return ids


def next_token(logits: torch.Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a token: (1,) int64.

    Args:
        logits: (vocab_size,) fp32, on the CPU.
        temperature, top_k: as for `generate`; below `LEAST_TEMPERATURE` the likeliest.
    """
    if temperature < LEAST_TEMPERATURE:
        return logits.argmax(dim=0, keepdim=True)
    top = (logits / temperature).topk(min(top_k, len(logits)))
    choice = torch.multinomial(top.values.softmax(dim=0), num_samples=1, generator=generator)
    return top.indices[choice]


def stop_token_of(text: Any) -> int | None:
    """The token that ends a text: `end_of_text` of a tokenizer or a dataset; None where it has none."""
    found = getattr(text, "end_of_text", None)
    return found if isinstance(found, int) else None
