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
from zerotrain.training.callbacks.generate import generate, stop_token_of
from zerotrain.training.figures.report import MAX_LINE

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
    first = ids_of(rows[0])
    if first is None:
        console.print("No sample of text: the items have no token ids to continue.")
        return
    start = first[:NUM_PROMPT_TOKENS]
    stop_token = stop_token_of(dataset)
    try:
        given = {f"{len(start)} of the {name} text": start} if prompts is None else prompts_of(dataset, prompts)
        for shown, prompt in given.items():
            ids = generate(
                engine=engine,
                prompt=prompt.to(engine.world.device),
                num_tokens=num_tokens,
                max_seq_len=len(first),
                seed=seed,
                stop_token=stop_token,
            )
            num_added = len(ids) - len(prompt)
            whole = ids[:-1] if num_added and ids[-1].item() == stop_token else ids
            console.rule(Text(f"{num_added} tokens after {shown}"))
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
    found = {}
    vocab_size = getattr(dataset, "vocab_size", None)
    for prompt in prompts:
        ids = torch.as_tensor(dataset.encode(prompt)).long()
        shown = repr(printable(prompt, MAX_SHOWN, keep=""))
        if ids.ndim != 1 or not len(ids):
            raise ValueError(f"{shown} has no token")
        if isinstance(vocab_size, int) and int(ids.max()) >= vocab_size:
            raise ValueError(f"{shown} has token {int(ids.max())}, and the data knows {vocab_size}")
        found[shown] = ids
    return found
