"""The sample of text at the end of a run."""

from collections.abc import Sequence
from typing import Any

import torch
from rich.text import Text

from zerotrain.data.fetch import ids_of, is_counted, labels_of, tokens_known
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CommError
from zerotrain.files.untrusted import printable
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.evaluation import in_evaluation_mode
from zerotrain.training.report import MAX_LINE

# Text from a model: one token after another.


LEAST_TEMPERATURE = 1e-20
"""Divided by less, logits may be no numbers; only the likeliest token is drawn long before."""


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
    """The token at the end of a text: `end_of_text` of a tokenizer or a dataset; None where it has none."""
    token = getattr(text, "end_of_text", None)
    return token if isinstance(token, int) else None


NUM_PROMPT_TOKENS = 32
"""A sample takes as many tokens of a text; it takes a chat up to where the first answer begins."""
MAX_SHOWN = 400
"""Characters of a prompt in its title."""


class Sample(Callback):
    """Lets the model continue texts when the last step is done. Data that cannot decode gets a word where the model is
    a language model.

    Args:
        num_tokens: of a sample, at most; 0: there are no samples.
        prompts: texts to continue; None: the beginning of the validation text, or of the training text where there is
            none.
    """

    def __init__(self, *, num_tokens: int, prompts: Sequence[str] | None, seed: int) -> None:
        self._num_tokens, self._prompts, self._seed = num_tokens, prompts, seed

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if run.stopped_by or self._num_tokens == 0:
            return
        if getattr(run.dataset, "decode", None) is None:
            if tokens_known(run.engine.module) is not None:
                run.console.print("No sample of text: the dataset has no decode().")
            return
        has_validation = len(run.dataset.validation) > 0
        name, rows = ("validation", run.dataset.validation) if has_validation else ("training", run.dataset.train)
        row_ids, labels = ids_of(rows[0]), labels_of(rows[0])
        if row_ids is None:
            run.console.print("No sample of text: the items have no token ids to continue.")
            return
        try:
            num_tokens = NUM_PROMPT_TOKENS
            if labels is not None and labels.shape == row_ids.shape and not is_counted(labels)[0]:
                num_tokens = int(is_counted(labels).int().argmax()) + 1
            self._show_samples(run, name, row_ids[:num_tokens], len(row_ids))
        except CommError:
            raise
        except Exception as error:  # of the user's model or dataset: the training is done, and its report is due
            why = printable(f"{type(error).__name__}: {error}", keep="")
            run.console.print(f"No sample of text: {why}", markup=False, highlight=False)

    def _show_samples(self, run: Run, name: str, start: torch.Tensor, max_seq_len: int) -> None:
        """Continue each prompt, or else the start of the text of this name. Collective."""
        stop_token = stop_token_of(run.dataset)
        texts = {f"{len(start)} of the {name} text": start}
        if self._prompts is not None:
            texts = prompts_of(run.dataset, self._prompts)
        for title, prompt in texts.items():
            ids = generate(
                engine=run.engine,
                prompt=prompt.to(run.world.device),
                num_tokens=self._num_tokens,
                max_seq_len=max_seq_len,
                seed=self._seed,
                stop_token=stop_token,
            )
            num_added = len(ids) - len(prompt)
            whole = ids[:-1] if num_added and ids[-1].item() == stop_token else ids
            run.console.rule(Text(f"{num_added} tokens after {title}"))
            run.console.print(printable(run.dataset.decode(whole), MAX_LINE), markup=False, highlight=False)
        run.console.rule()


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
