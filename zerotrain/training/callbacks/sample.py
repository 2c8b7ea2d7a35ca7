"""The sample of text that a run ends with."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from zerotrain.data.fetch import ids_of, tokens_known
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CommError
from zerotrain.files.untrusted import printable
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.evaluation import in_evaluation_mode
from zerotrain.training.report import MAX_LINE

# Text from a model: one token after another.


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
            context = ids[-max_seq_len:] if num_left > 0 else prompt[:1]
            logits = engine(context[None])[0, -1].float().cpu()  # (vocab_size,)
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
    token = getattr(text, "end_of_text", None)
    return token if isinstance(token, int) else None


NUM_PROMPT_TOKENS = 32
MAX_SHOWN = 400
"""Characters of a prompt that its title shows."""


class Sample(Callback):
    """Shows samples when the last step is done.

    Args:
        num_tokens: of a sample, at most.
        prompts: texts to continue; None: the beginning of the validation text.
    """

    def __init__(self, *, num_tokens: int, prompts: Sequence[str] | None, seed: int) -> None:
        self._num_tokens, self._prompts, self._seed = num_tokens, prompts, seed

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if not run.stopped_by:
            show_sample(
                run.console,
                run.engine,
                run.dataset,
                num_tokens=self._num_tokens,
                prompts=self._prompts,
                seed=self._seed,
            )


def show_sample(
    console: Console,
    engine: ZeroEngine,
    dataset: Any,
    *,
    num_tokens: int,
    seed: int,
    prompts: Sequence[str] | None = None,
) -> None:
    """Let the model continue each prompt; without any the beginning of the validation text, or of the training text
    where there is none; unless by 0 tokens. Data that cannot decode gets a word where the model is a language model.
    Collective."""
    if num_tokens == 0:
        return
    if getattr(dataset, "decode", None) is None:
        if tokens_known(engine.module) is not None:
            console.print("No sample of text: the dataset has no decode().")
        return
    name, rows = ("validation", dataset.validation) if len(dataset.validation) else ("training", dataset.train)
    row_ids = ids_of(rows[0])
    if row_ids is None:
        console.print("No sample of text: the items have no token ids to continue.")
        return
    start = row_ids[:NUM_PROMPT_TOKENS]
    stop_token = stop_token_of(dataset)
    try:
        texts = {f"{len(start)} of the {name} text": start} if prompts is None else prompts_of(dataset, prompts)
        for title, prompt in texts.items():
            ids = generate(
                engine=engine,
                prompt=prompt.to(engine.world.device),
                num_tokens=num_tokens,
                max_seq_len=len(row_ids),
                seed=seed,
                stop_token=stop_token,
            )
            num_added = len(ids) - len(prompt)
            whole = ids[:-1] if num_added and ids[-1].item() == stop_token else ids
            console.rule(Text(f"{num_added} tokens after {title}"))
            console.print(printable(dataset.decode(whole), MAX_LINE), markup=False, highlight=False)
        console.rule()
    except CommError:
        raise
    except Exception as error:  # of the user's model or dataset: the training is done, and its report is due
        why = printable(f"{type(error).__name__}: {error}", keep="")
        console.print(f"No sample of text: {why}", markup=False, highlight=False)


def prompts_of(dataset: Any, prompts: Sequence[str]) -> dict[str, torch.Tensor]:
    """The tokens of each prompt, by the prompt in quotes.

    Raises:
        ValueError: one has no token, or one that is not below the `vocab_size` of the data.
    """
    tokens = {}
    vocab_size = getattr(dataset, "vocab_size", None)
    for prompt in prompts:
        ids = torch.as_tensor(dataset.encode(prompt)).long()
        quote = repr(printable(prompt, MAX_SHOWN, keep=""))
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"{quote} has no token")
        if isinstance(vocab_size, int) and int(ids.max()) >= vocab_size:
            raise ValueError(f"{quote} has token {int(ids.max())}, and the data knows {vocab_size}")
        tokens[quote] = ids
    return tokens
